"""The manifest's cases of an instruction set of devices, in each language that has words for it.

Products for threads alone, or that multiply fragments together; copies of operands; expressions over rows and
down columns; attention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from fused_cases import by_rows, columns, epilogues, every_operation, every_type
from grid_cases import MACHINE
from manifest_case import Case, all_words, covering, few, on_device, smallest
from manifest_host import forms
from rows_lowered import lower_grid_columns, lower_grid_rows

from portmm.codegen.lower import lower_grid, lower_int4_floats, lower_lines, lower_program
from portmm.errors import ScheduleError
from portmm.ir.attention_program import of_attention
from portmm.schedule import gpu_attention_choice
from portmm.schedule.candidates import candidates, units
from portmm.schedule.gpu_attention import AttentionSizes
from portmm.schedule.rows import rows_schedule
from portmm.spec.dtype import BY_NAME, CODES_KR, types
from portmm.spec.problem import Family, Problem
from portmm.target.target import load_target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.target.target import Target

LANGUAGES = ("cuda", "opencl")
CHIPS = {"mma_sm75": "t4", "mma_sm80": "a100", "mma_sm89": "l4", "wgmma": "h200"}
"""Whose units of fragments are looked at; all others are of the tiny device of tests."""
MAIN = {
    True: (
        "f32", "bf16", "f16", "f16-f16-f32", "s8-s8-s32", "u8-s8-s32", "bf16-u4-bf16", "f16-u4-f16", "e4m3-e4m3-bf16",
    ),
    False: ("f32", "f64", "bf16", "f32-s8-f32", "s8-s8-s32", "bf16-u4-bf16", "e4m3-e5m2-f32"),
}  # fmt: skip
"""Products of which all layouts are looked at, of units of fragments and of threads; of the others some."""
LAYOUTS = tuple(product(("row", "col", "any"), ("row", "col", "any"), ("row", "col")))
OTHERS = 2
PROBLEMS = {True: 24, False: 14}
"""Problems that are looked at: of each other type, and of a main one."""
SIZES = {
    "vector": (1, 256, 4096, 1), "thin": (5, 320, 2048, 1), "blocks": (500, 384, 512, 1),
    "deep": (64, 64, 16384, 1), "large": (3000, 4096, 1024, 1), "batch": (40, 96, 256, 3),
}  # fmt: skip
VECTORS = {"aligned": 16, "of 4 bytes": 4, "odd": 1}
"""Bytes that operands are aligned to."""
GROUPS = (0, 8, 32, 128)
ROW_FORMS = (
    (16, 16), (64, 64, 4), (256, 32, 4, 4), (64, 16, 4), (128, 64, 1, 1, True), (256, 256, 0, 4, True),
    (128, 128, 8, 4, True),
)  # fmt: skip
"""Threads of a block and of a row, columns of a thread, and of a vector, and whether threads exchange registers."""
HEADS = ((64, 64), (128, 128), (80, 48), (7, 5))
"""Elements of a head of K, and of V."""
ATTENDING = {"many": (512, 1), "four": (4, 1), "together": (2, 8)}
"""Queries of a head, and heads that share keys."""


FAMILIES = {
    **{f"{name} cuda": (chip, chip) for name, chip in CHIPS.items()},
    **{f"simt_dot4 {language}": ("", "") for language in LANGUAGES},
    "simt cuda": ("", "a100"),
    "simt opencl": ("", "mi300x"),
    "simt opencl-cpu": ("opencl_cpu", "opencl_cpu"),
}
"""An instruction set and a language -> the chip for products, if not the tiny device of tests, and for attention."""


def cases(family: str) -> Iterator[Case]:
    """All cases of a family."""
    chip, attending = FAMILIES[family]
    name, _, language = family.partition(" ")
    language = language.removesuffix("-cpu")
    target = load_target(chip) if chip else MACHINE
    if target.device.language != language:
        target = replace(target, device=replace(target.device, language=language, architecture=""))
    yield from _products(name, target, language)
    if name == "simt":
        yield from _rows(target.isa(name), language)
    if attending:
        found = load_target(attending)
        yield from _attention(found if name in CHIPS else found.limited_to(name), language)


# -- products -------------------------------------------------------------------------------


def _products(name: str, target: Target, language: str) -> Iterator[Case]:
    """Products: of the main types all layouts and all kinds of schedules, of each other type one."""
    isa, matrix = target.isa(name), name in CHIPS
    alone = replace(target, isas=(isa,))
    for word in _words_in_pairs(name, alone):
        pool = {}
        posed = _posed(word, PROBLEMS[matrix] if word in MAIN[matrix] else OTHERS, matrix=matrix)
        for named, (p, vectors, *about) in posed.items():
            for kind, s in _schedules(p, alone, vectors).items():
                moved = "x".join(map(str, s.vectors))
                found = (*about, kind, (about[0], s.program), s.vectors) if word in MAIN[matrix] else (word,)
                pool[f"{named} {kind} {moved}"] = (found, s)
        for named, s in covering(pool).items():
            yield from on_device(named, language, lower_grid, s, isa)


def _words_in_pairs(name: str, target: Target) -> list[str]:
    """The main types, and of the others that an instruction set multiplies some in which every two types meet."""
    pool, main = {}, []
    for word in all_words():
        a, b, c = types(word)
        try:
            found = [isa.name for isa, _ in units(word, target, tf32=word == "f32")]
        except ScheduleError:
            continue
        if name in found:
            pool[f"{name} {word}"] = (((a, b), (b, c), (a, c)), word)
            main += [word] if word in MAIN[name in CHIPS] else []
    return sorted({*main, *covering(pool).values()})


@cache
def _posed(word: str, most: int, *, matrix: bool) -> dict[str, Any]:
    """So many problems of some types, by name, each with the elements that may be moved at once, and what it is like.

    Those of `matrix` units lie by rows or columns, and are aligned.
    """
    codes = types(word)[1] == "u4"
    layouts = [x for x in LAYOUTS if not matrix or "any" not in x]
    layouts = [(a, "codes", c) for a, b, c in layouts if b == "row"] if codes else layouts
    aligned = [x for x in VECTORS if not matrix or x != "odd"]
    ways = GROUPS if codes else (None,)
    kinds = _kinds(word)
    named = {}
    for about in product(SIZES, layouts, kinds, aligned, ways):
        size, lie, label, at, group = about
        words = (word, ".".join(lie), size, label, at, f"groups of {group}" if codes else "")
        named[" ".join(filter(None, words))] = about

    def made(about: tuple[Any, ...]) -> tuple[Any, ...]:
        size, (a, b, c), label, at, group = about
        m, n, k, batch = SIZES[size]
        family = str(Family("u4", 1, CODES_KR, group=group)) if codes else ""
        first, second, last = (max(1, VECTORS[at] // BY_NAME[x].bytes) for x in types(word))
        vectors = (first, next(x for x in (32, 16, 8) if group % x == 0) if codes else second, last)
        p = Problem(m, n, k, word, batch, a, b, c, family, **kinds[label])
        return (p, vectors, (a, b, c), size, label, at, group)

    return few(named, most, made)


def _kinds(word: str) -> dict[str, dict[str, Any]]:
    """What else may be asked of products of some types."""
    to = types(word)[2]
    found = {x: {x: True} for x in ("deterministic", "static", "grouped")}
    found |= {"": {}, "tf32": {"tf32": True}} if word == "f32" else {"": {}}
    return found | ({name: {"fused": str(x)} for name, x in epilogues().items()} if to != "s32" else {})


def _schedules(p: Problem, target: Target, vectors: tuple[int, int, int]) -> dict[str, Schedule]:
    """The schedules of a problem whose loops differ, by words that say how."""
    return smallest(lambda: candidates(p, target, vectors), _words)


def _words(s: Schedule) -> str:
    """What sets a schedule apart for the loops that it becomes, sizes aside."""
    x = s.parallel
    marks = {
        "stages": s.stages > 1, "copies": s.a.asynchronous, "joined": x.fixup, "slices": s.slices,
        "swap": s.atom.swap, f"groups-{x.warpgroups}": x.warpgroups, "pingpong": x.pingpong,
        "clusters": x.cluster > 1, "persistent": x.persistent, "cell": max(x.cell) > 1, "resident": x.occupancy,
    }  # fmt: skip
    return " ".join([s.program, *(name for name, there in marks.items() if there)])


# -- expressions and attention --------------------------------------------------------------


def bytes_of_all_kinds() -> Fused:
    """Operands of types that only devices have."""
    return every_type(("e4m3", "e5m2", "u8"))


def _rows(isa: Any, language: str) -> Iterator[Case]:
    """Expressions over rows and down columns, and copies of operands."""
    for make, form in product((every_operation, every_type, bytes_of_all_kinds, by_rows), ROW_FORMS):
        threads, subgroup, cells, vector, exchange = (*form, *(0, 1, False)[len(form) - 2 :])
        if exchange <= (language == "cuda"):
            name = f"rows {make.__name__} {threads}-{subgroup}-{cells}-{vector}"
            yield from on_device(name, language, lower_grid_rows, isa, str(make()), rows_schedule(*form))
    for sliced in (False, True):
        name = f"columns{' in slices' if sliced else ''}"
        yield from on_device(name, language, lower_grid_columns, isa, str(columns()), 64, sliced=sliced)
    for kind, along in product(("u8", "s16", "s32"), ("k", "row")):
        yield from on_device(f"lines {kind} along {along}", language, lower_lines, isa, kind, along)
    for kind, group in product(("bf16", "f16"), (0, 32)):
        yield from on_device(f"{kind} of int4, groups of {group}", language, lower_int4_floats, isa, kind, group)


def _attention(target: Target, language: str) -> Iterator[Case]:
    """Attention of many queries and of few, by threads or by units that multiply fragments."""
    pool = {}
    for held in ("f32", "bf16", "f16"):
        for (d, dv), how, loose, (name, form) in product(HEADS, ATTENDING, ("", "o", "v"), forms(held).items()):
            queries, group = ATTENDING[how]
            vector = 1 if d % 4 else 16 // BY_NAME[held].bytes
            asked = AttentionSizes(held, d, dv, queries, 64, group, 2048, (vector,) * 4, loose)
            named = f"{name} heads of {d} and {dv}, {how} queries{f', {loose} loose' if loose else ''}"
            about = (d, how, loose, form.bounds, form.lse, form.starts, str(form.score), (held, form.to), (d, how))
            pool[named] = (about, (form, asked))
    for name, (form, asked) in covering(pool).items():
        s = gpu_attention_choice.choices(asked, target)[0]
        unit = gpu_attention_choice.unit_of(s, target)
        yield from on_device(name, language, lower_program, of_attention(form), s, *unit)
