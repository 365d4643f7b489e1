"""The manifest's cases of an instruction set of CPUs: products, packers, expressions over rows, attention, probes.

The machine has tiny caches, so that small problems have blocks at every level.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from fused_cases import by_rows, columns, epilogues, every_operation, every_type
from machines import small
from manifest_case import Case, all_words, covering, few, on_host, smallest
from problems import LAYOUTS, coded, pose
from rows_lowered import NORMAL, lower_rows

from portmm.codegen.lower import lower, lower_group_norm, lower_grouped, lower_int4_repack, lower_pack, lower_program
from portmm.dispatch.cpu_kernels import attention_unit
from portmm.errors import ScheduleError
from portmm.host import microbenchmarks
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.schedule.candidates import PACKED_VECTORS, candidates
from portmm.schedule.cpu_attention import attention_schedule
from portmm.schedule.grouped_convolution import grouped, panels_of
from portmm.spec.convolution import Convolution
from portmm.spec.dtype import CODES_KR, types
from portmm.spec.epilogue import C, Fused, Operand, acc, load, number
from portmm.spec.expr import apply
from portmm.spec.expr_functions import sqrt
from portmm.spec.problem import LAYOUTS_B, Family
from portmm.target.supports import lacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from portmm.ir.nodes import Kernel
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

MAIN = ("f32", "f64", "bf16", "s8-s8-s32", "u8-s8-s32")
"""Products of which all layouts are looked at; of the others, that take the same ways, some."""
MAIN_ENDS = ("f32", "bf16", "f32-u4-f32", "bf16-u4-bf16", "s8-s8-f32", "s8-u4-f32")
"""The same for products that something is done to."""
KINDS, OTHERS = 2, 1
"""Problems that are looked at: of each layout of a main type, and of each other type."""
REGISTERS = 7
"""Of the machine: few make small tiles, and short texts; `manifest_chosen` has large ones."""
ROWS_AHEAD = 4
HALF = {"symmetric": True, "half": True}
GROUPS = (0, 8, 64)
POSTS = ("scale", "scale+bias", "scale+azero", "scale+azero+bzero+bias")


NARROW = ("root", "scale")
"""What half a vector of every instruction set can do."""
FUSIONS = epilogues() | {"root": Fused((Operand("f32", "n"),), ((C, sqrt(apply("max", acc() + load(0, "f32"), 0.0))),))}


def cases(name: str) -> Iterator[Case]:
    """All cases of an instruction set."""
    isa = small(name).isas[0]
    target = replace(small(name), rows_ahead=ROWS_AHEAD, isas=(replace(isa, registers=min(isa.registers, REGISTERS)),))
    yield Case("flags", " ".join(isa.flags))
    yield from _plain(isa, target)
    yield from _finished(isa, target)
    yield from _packers(isa)
    yield from _rows(isa)
    yield from _groups(isa, target)
    yield from _attention(target)
    for atom, make in product(isa.atoms, (microbenchmarks.peak, microbenchmarks.stream)):
        yield from on_host(f"{atom.name} {make.__name__}", _probing, make, isa, atom)


def _probing(make: Callable[[Isa, Atom], microbenchmarks.Probe], isa: Isa, atom: Atom) -> Kernel:
    return make(isa, atom).kernel


# -- products -------------------------------------------------------------------------------


def _sizes(lanes: int) -> dict[str, tuple[tuple[int, int, int], dict[str, Any]]]:
    """Kinds of problems: a size, and what else is asked of it."""
    ragged, whole = 2 * lanes + 1, 2 * lanes
    return {
        "vector": ((1, 3 * lanes, 40), {}),
        "thin": ((3, ragged, 2 * lanes + 3), {}),
        "half a vector": ((5, max(1, lanes // 2 - 1), 40), {}),
        "a quarter": ((5, max(1, lanes // 4 - 1), 40), {}),
        "blocks": ((17, ragged, 13), {}),
        "whole blocks": ((18, whole, 40), {}),
        "deep": ((5, lanes + 1, 600), {}),
        "batch": ((9, lanes + 3, 6), {"batch": 7}),
        "static": ((7, lanes + 2, 5), {"batch": 3, "static": True}),
        "deterministic": ((17, ragged, 600), {"deterministic": True}),
        "vector, deterministic": ((1, whole, 600), {"deterministic": True}),
    }


def _plain(isa: Isa, target: Target) -> Iterator[Case]:
    """Products alone: of the main types all layouts and all kinds of schedules, of each other type one."""
    for word in _words_in_pairs(isa, MAIN):
        if types(word)[1] == "u4":
            continue
        lanes = isa.columns(isa.atom(word))
        posed = {}
        for layouts in LAYOUTS:
            kinds = {kind: x for kind, x in _sizes(lanes).items() if "static" not in x[1] or _dense(layouts)}
            lie = f"{word} {'.'.join(layouts)}"
            every = {f"{lie} {kind}": (layouts, kind, *x) for kind, x in kinds.items()}
            posed |= few(every, KINDS if word == "f32" else 1)
        pool = {}
        for named, (layouts, kind, size, more) in (posed if word in MAIN else few(posed, OTHERS)).items():
            p = _posed(size, layouts, target, dtype=word, **more)
            for words, s in _schedules(p, isa, target).items():
                about = (layouts, (kind, s.b.packed), words) if word in MAIN else (word,)
                pool[f"{named} {words}"] = ((*about, (layouts, s.program)) if word == "f32" else about, s)
        yield from _lowered(pool, isa)


def words_of(isa: Isa) -> list[str]:
    """The types of all products that an instruction set computes."""
    return [word for word in all_words() if isa.atom(word)]


def _words_in_pairs(isa: Isa, main: tuple[str, ...]) -> list[str]:
    """The main types, and of the others some in which every two types of operands meet."""
    pool = {}
    for word in words_of(isa):
        a, b, c = types(word)
        pool[f"{isa.name} {word}"] = (((a, b), (b, c), (a, c)), word)
    return [word for word in words_of(isa) if word in {*main, *covering(pool).values()}]


def _dense(layouts: tuple[str, str, str]) -> bool:
    """Strides may be compiled in."""
    return {"any", "packed"}.isdisjoint(layouts)


def _lowered(pool: dict[str, Any], isa: Isa) -> Iterator[Case]:
    """Those schedules that are needed."""
    for name, s in covering(pool).items():
        yield from on_host(name, lower, s, isa)


def _posed(size: tuple[int, int, int], layouts: tuple[str, str, str], target: Target, **more: Any) -> Problem | None:
    """The problem, with panels of the widest that this machine packs; None if the types do not multiply so."""
    try:
        return pose(size, layouts, target, **more)[-1]
    except (ScheduleError, ValueError):
        return None


def _schedules(p: Problem | None, isa: Isa, target: Target) -> dict[str, Schedule]:
    """The schedules of a problem whose loops differ, by words that say how."""
    return {} if p is None else smallest(lambda: candidates(p, target), lambda s: _words(s, isa))


def _words(s: Schedule, isa: Isa) -> str:
    """What sets a schedule apart for the loops that it becomes, sizes aside."""
    marks = {
        "pack-a": s.a.packed, "pack-b": s.b.packed and not s.b.once, "pack-b-once": s.b.once, "inside": s.b.inside,
        f"over-{s.parallel.over}": s.parallel.over != "tiles", f"lanes-{s.atom.lanes}": s.atom.lanes,
        "panels": s.b.panels > 1,
        "prefetch": s.b.prefetch, "ahead": s.c.prefetch, "kc": s.kc, "mc": s.mc,
        "columns": s.nr > isa.columns(isa.atom(s.dtype, s.atom.lanes)),
    }  # fmt: skip
    return " ".join([s.program, *(name for name, there in marks.items() if there)])


def _finished(isa: Isa, target: Target) -> Iterator[Case]:
    """Products with codes of four bits, scales, rows that are quantised first, and expressions."""
    for word in _words_in_pairs(isa, MAIN_ENDS):
        lanes, pool = isa.columns(isa.atom(word)), {}
        sizes = {"thin": (3, 2 * lanes + 1, 37), "blocks": (20, 2 * lanes, 150)}
        if word in MAIN_ENDS:
            sizes |= {"half a vector": (5, max(1, lanes // 2 - 1), 37), "a quarter": (5, max(1, lanes // 4 - 1), 37)}
        machine = small(isa.name) if types(word)[1] == "u4" else target  # codes as they lie take more registers
        posed, ends = {}, _ends(word)
        for (kind, size), (label, end), a, b in product(sizes.items(), ends.items(), ("row", "col"), _ways(word)):
            about = (label, kind, (a, b), (label in NARROW, kind))
            posed[f"{word} {a}.{b} {kind} {label}"] = (about, (size, a, b, kind, label, end))
        chosen = covering(posed) if word in MAIN_ENDS else few({name: x for name, (_, x) in posed.items()}, OTHERS)
        for named, (size, a, b, kind, label, end) in chosen.items():
            p = _with_weight(size, word, a, b, lanes, machine, end)
            for words, s in _schedules(p, isa, machine).items():
                about = (label, kind, a, b, words) if word in MAIN_ENDS else (word,)
                pool[f"{named} {words}"] = (about, s)
        yield from _lowered(pool, isa)


def _ends(word: str) -> dict[str, dict[str, Any]]:
    """What may become of sums of some types."""
    a, b, to = types(word)
    integers = a in ("s8", "u8") and b in ("s8", "u4")
    ends: dict[str, dict[str, Any]] = {}
    if b == "u4" and (not integers or to == "f32"):
        ends |= {"alone": {}, "deterministic": {"deterministic": True}}
    if to != "s32" and (integers or to in ("s8", "u8")):
        ends |= {x: {"post": x} for x in POSTS}
        sources = ("f32", "bf16", "f16") if integers and a == "s8" else ()
        ends |= {f"of {x}": {"post": "scale", "source": x} for x in sources}
    if to in ("f32", "bf16"):
        ends |= {name: {"fused": str(x)} for name, x in FUSIONS.items()}
    return ends


def _ways(word: str) -> tuple[Any, ...]:
    """How B may lie, or the groups of its codes."""
    return GROUPS if types(word)[1] == "u4" else LAYOUTS_B[:-1]


def _with_weight(  # noqa: PLR0917 - one call
    size: tuple[int, int, int], word: str, a: str, b: Any, lanes: int, target: Target, more: dict[str, Any]
) -> Problem | None:
    """A problem whose result lies by rows; None if there is none such."""
    if types(word)[1] != "u4":
        return _posed(size, (a, b, "row"), target, dtype=word, **more)
    try:
        return coded(size, word, PACKED_VECTORS * lanes, b, a=a, **more)
    except ValueError:
        return None


def _packers(isa: Isa) -> Iterator[Case]:
    """What lays weights out: of each type that is read, for each atom."""
    kinds = {}
    for word in words_of(isa):
        atom = isa.atom(word)
        if types(word)[1] != "u4":
            kinds.setdefault((atom.name, types(word)[1]), (word, isa.columns(atom)))
    for (atom, held), (word, line) in kinds.items():
        for layout, v in product(("row", "col", "any"), (1, PACKED_VECTORS)):
            yield from on_host(f"{atom} pack {held} {layout} {v}v", lower_pack, isa, word, v * line, layout)
    real = isa.atom("f32")
    for group in GROUPS if real else ():
        for more, end in (({}, ""), ({"symmetric": True}, " without offsets"), (HALF, " by scales of 16 bits")):
            kept = Family("u4", real.n * PACKED_VECTORS, CODES_KR, group=group, **more)
            name = f"fold groups of {group}{end}"
            yield from on_host(name, lower_int4_repack, isa, kept)


# -- expressions and attention --------------------------------------------------------------


def _rows(isa: Isa) -> Iterator[Case]:
    """Expressions over rows, and down columns."""
    real = isa.atom("f32")
    for make in (every_operation, every_type, by_rows, columns):
        fused = make()
        if real is not None and not lacks(isa, real, fused):
            yield from on_host(f"rows {make.__name__}", lower_rows, isa, real, str(fused))
    if real is not None:
        yield from on_host("group norm", lower_group_norm, isa, real, NORMAL, 10, "1e-05", 160)


def _groups(isa: Isa, target: Target) -> Iterator[Case]:
    """Convolutions of groups of few channels: some in a vector, and some vectors of the outputs of one."""
    real, ends = isa.atom("f32"), {"": "", " root": str(FUSIONS["root"])}
    for (groups, channels, outputs), (end, text) in product(((5, 2, 2), (3, 3, 24)), ends.items()):
        panels = real and panels_of(groups, channels, outputs, (3, 3), isa, real)
        if panels is None or (text and lacks(isa, real, FUSIONS["root"])):
            continue
        size = Convolution(groups, channels, outputs, (6, 9), (3, 3), (1, 2), (1, 1), (1, 1), (1, 1))
        dense = groups * channels
        sizes = grouped(size, (54 * dense, 9 * dense, dense, 1), panels, isa, target)
        yield from on_host(f"groups of {channels}{end}", lower_grouped, isa, real, sizes, ("f32", "f32"), text)


SCORES = {
    "scaled": Fused((), ((C, acc() * number(0)),)),
    "biased": Fused(
        (Operand("f32", "mn"), Operand("f16", "h")), ((C, acc() * number(0) + load(0, "f32") * load(1, "f16")),)
    ),
}
BOUNDS = {"": Bounds(), " causal": Bounds(causal=True), " window": Bounds(causal=True, window=True)}


def forms(held: str) -> dict[str, Form]:
    """Kinds of attention."""
    extra = {"": {}, " lse": {"lse": True}, " cache": {"lengths": True, "starts": True, "lse": True}}
    return {
        f"attention {held}-{to} {score}{bound}{more}": Form(SCORES[score], held, to, BOUNDS[bound], **extra[more])
        for to, score, bound, more in product(dict.fromkeys((held, "f32")), SCORES, BOUNDS, extra)
    }


def _attention(target: Target) -> Iterator[Case]:
    """Attention of many queries and of few."""
    for held in ("f32", "bf16", "f16"):
        named = {}
        for (name, form), is_few, packs in product(forms(held).items(), (False, True), (False, True)):
            if not (is_few and packs):
                words = " few queries" if is_few else " V packed" if packs else ""
                named[name + words] = (form, is_few, packs)
        for name, kind in few(named, 4).items():
            yield from on_host(name, _attending, *kind, held, target)


def _attending(form: Form, is_few: bool, packs: bool, held: str, target: Target) -> Kernel:
    isa, atom, real = attention_unit(held, form.score, target, 3 if is_few else 64)
    unit = real if is_few else atom
    s = attention_schedule(isa, unit, packs=packs)
    kernel: Kernel = lower_program(of_attention(form, "n" if is_few else "m"), s, isa, unit)[0]
    return kernel
