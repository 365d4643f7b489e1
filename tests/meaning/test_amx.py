"""Products on tiles: in the interpreter, as built code with tiles written in C, and as machine code for AMX.

No machine here is asked to have AMX. The emitted text is the same in all three
cases: tiles.h, put before it, defines the words that stand for instructions.
"""

from __future__ import annotations

import ctypes
import platform
import re
from dataclasses import replace
from functools import partial

import cover
import crossing
import machines
import numpy as np
import operands
import problems
import pytest
import runs
import test_compiles
from machines import small
from operands import case
from places import HELPERS
from problems import pose
from runs import check_built, execute, interpret

import portmm as pm
from portmm.build import shared_object as building
from portmm.build.shared_object import build
from portmm.codegen.c_kernel import source
from portmm.codegen.lower import lower, lower_pack
from portmm.dispatch import cpu_kernels, schedule_choice
from portmm.errors import ScheduleError
from portmm.host import gauge, microbenchmarks
from portmm.ir.interpreter import numpy_type
from portmm.ir.nodes import Configure, Function, If, walk
from portmm.schedule.candidates import candidates
from portmm.schedule.text import parse, spell
from portmm.spec.dtype import types
from portmm.spec.problem import Problem, family
from portmm.target.target import load_isa, load_target

ISAS = ("amx_bf16", "amx_int8", "amx_fp16")
WORDS = [
    ("amx_bf16", "bf16"), ("amx_bf16", "bf16-bf16-f32"), ("amx_int8", "s8"), ("amx_int8", "u8-s8-s32"),
    ("amx_fp16", "f16"), ("amx_fp16", "f16-f16-f32"),
]  # fmt: skip
SCALED = [("amx_int8", word) for word in ("u8-s8-f32", "s8-s8-bf16", "s8-s8-s8", "u8-s8-u8")]
TILES = [(name, atom.name) for name in ISAS for atom in load_isa(name).atoms if atom.tiled]
LAYOUTS = [
    ("row", "row", "row"), ("row", "packed", "row"), ("col", "col", "row"), ("any", "any", "row"),
    ("row", "col", "col"), ("col", "packed", "row"),
]  # fmt: skip
SIZES = [
    (1, 17, 64), (5, 40, 7), (16, 33, 70), (17, 1, 33), (32, 96, 128), (33, 65, 31), (70, 40, 200), (50, 7, 1),
    (31, 64, 257),
]  # fmt: skip
SHAPES = {(16, 16, 1), (16, 16, 2), (16, 32, 1), (16, 32, 2), (32, 16, 1), (32, 16, 2), (32, 32, 1)}
"""MR, NR and panels of all register tiles."""
SHIM = (HELPERS / "tiles.h").read_text()

LINES_RUN = all(
    machines.runs_here(isa.name) for name in ISAS for isa in load_isa(name).below if not isa.name.startswith("amx")
)
needs_avx512 = pytest.mark.skipif(not LINES_RUN, reason="lines are moved by AVX-512")


def shimmed(kernel, _=""):
    """A kernel whose tiles are arrays, loaded here."""
    from portmm.runtime.cpu import runtime

    flags = tuple(x for x in kernel.isa.flags if "amx" not in x)
    return runtime().load(build(SHIM + source(kernel), flags=flags, name=kernel.name).path, kernel.name)


def posed(name, word, **more):
    """Problems of all layouts and sizes, with all that machines of small caches may do: panels are in L2, or beyond."""
    target = small(name)
    l1, l2 = target.levels
    beyond = replace(target, levels=(l1, replace(l2, bytes=16)))
    for i, size in enumerate(SIZES):
        for layouts in (LAYOUTS[i % len(LAYOUTS)], LAYOUTS[(i + 2) % len(LAYOUTS)])[: 1 if more else 2]:
            if layouts[2] == "col" and (word.startswith("u8") or more.get("post")):
                continue
            if "azero" in more.get("post", "") and layouts[1] != "packed":
                continue
            if "static" in more and not {"any", "packed"}.isdisjoint(layouts):
                continue
            for p in pose(size, layouts, target, dtype=word, **more):
                far = candidates(p, beyond) if p.b == "packed" and p.m <= 32 else []
                found = dict.fromkeys(candidates(p, target) + far)
                yield i, p, [s for s in found if s.program == "tiles"]


@pytest.mark.thin(4)
@pytest.mark.parametrize("more", [{}, {"batch": 2}, {"static": True}], ids=str)
@pytest.mark.parametrize(("name", "word"), WORDS)
def test_tiles_mean_the_product(name, word, more):
    kinds = set()
    for i, p, found in posed(name, word, **more):
        assert found
        k = case(p, seed=i)
        for s in found[i % 2 if more else 0 :: 2 if more else 1]:
            kinds.add((s.mr, s.nr, s.b.panels, s.b.once, s.b.packed, bool(s.kc)))
            k.check(interpret(lower(s, load_isa(name)), k, 1 + i % 3, shuffle=i), s)
    if not more:
        assert {x[:3] for x in kinds} == SHAPES
        ways = {(True, True, True), (False, True, True), (False, False, True), (False, True, False)}
        assert {x[3:] for x in kinds} >= ways


@pytest.mark.parametrize("b", ["row", "packed"])
@pytest.mark.parametrize(("name", "word"), WORDS)
def test_tiles_of_a_pass_a_panel_in_l1(name, word, b):
    """Blocks of k in which stores are kept awake, of sums that are loaded again, and prefetches of the next panels."""
    target = small(name)
    l1 = replace(target.levels[0], name="L1", bytes=24 << 10)
    target = replace(target, levels=(l1, replace(l1, name="L2", bytes=128 << 10)))
    kr = target.isas[0].atom(word).k_pack
    for i, size in enumerate([(70, 70, 300 * kr - 1), (33, 100, 128 * kr), (40, 33, 200 * kr)]):
        p = pose(size, ("row", b, "row"), target, dtype=word)[-1]  # of the widest panels
        found = [s for s in candidates(p, target) if s.program == "tiles" and s.kc and s.tiles[1].k == s.kc]
        assert found
        k = case(p, seed=i)
        for s in found:
            kernel = lower(s, load_isa(name))
            assert "TILE_STREAM(" in source(kernel)
            k.check(interpret(kernel, k, 1 + i % 2), s)
            if LINES_RUN:
                check_built(kernel, k, 1 + i % 2, s, code=shimmed)
            if machines.runs_here(name):
                check_built(kernel, k, 1 + i % 2, s, code=runs.load, end=True)


@pytest.mark.thin(2)
@pytest.mark.parametrize(("name", "word"), WORDS)
def test_tiles_of_every_height(name, word):
    """A configuration for each number of rows, and slices of two heights."""
    target = small(name)
    for m in [*range(1, 35), 47, 63, 65, 95, 97]:
        p = pose((m, 20, 70), ("row", "packed", "row"), target, dtype=word)[0]
        k = case(p, seed=m)
        for s in candidates(p, target)[: 1 + (m % 5 == 0)]:
            k.check(interpret(lower(s, load_isa(name)), k, 2), s)


@pytest.mark.thin(2)
@pytest.mark.parametrize("post", ["scale", "scale+azero", "scale+azero+bzero+bias"])
@pytest.mark.parametrize(("name", "word"), SCALED)
def test_sums_of_tiles_are_scaled(name, word, post):
    for i, p, found in posed(name, word, post=post):
        k = case(p, seed=i, floats=True)
        for s in found[i % 2 :: 2]:
            k.check(interpret(lower(s, load_isa(name)), k, 2), s)


@pytest.mark.thin(2)
@pytest.mark.parametrize("group", [0, 8, 64])
def test_codes_become_tiles(group):
    """Weights of four bits, unfolded into panels of units; built too, where there is AVX-512."""
    isa, target = load_isa("amx_bf16"), small("amx_bf16")
    for i, size in enumerate(
        [(1, 33, 37), (16, 64, 64), (4, 64, 10), (16, 32, 33), (33, 40, 100), (70, 17, 200), (40, 64, 1)]
    ):
        word, layout = ("bf16-u4-bf16", "bf16-u4-f32")[i % 2], ("row", "col", "any")[i % 3]
        p = problems.coded(size, word, 32, group, a=layout)
        k = case(p, seed=i, floats=True)
        found = [s for s in candidates(p, target) if s.program == "tiles"]
        assert found
        built = cover.some(found, i + group // 8, 3)  # other groups build the others
        for s in found:
            kernel = lower(s, isa)
            k.check(interpret(kernel, k, 2), s)
            if LINES_RUN and s in built:
                check_built(kernel, k, 2, s, code=shimmed)


@pytest.mark.thin(3)
@needs_avx512
@pytest.mark.parametrize("tiles", ["shim", "machine"])
@pytest.mark.parametrize(("name", "word"), [*WORDS, *SCALED])
def test_built_kernels_are_the_product(name, word, tiles):
    """Operands lie beside pages that cannot be touched, on either side."""
    if tiles == "machine" and not machines.runs_here(name):
        pytest.skip(f"no {name} on this machine")
    more = {"post": "scale+bias"} if (name, word) in SCALED else {}
    for i, p, found in posed(name, word, **more):
        for s in found[i % 3 :: 3] if tiles == "shim" else found[i % 2 :: 2]:
            kernel = lower(s, load_isa(name))
            code = shimmed if tiles == "shim" else runs.load
            for floats in (False, True) if not more else ():
                k = case(p, seed=i, floats=floats)
                check_built(kernel, k, 1 + i % 2, s, code=code, end=bool(i % 2))


@needs_avx512
@pytest.mark.parametrize("word", ["s8", "u8-s8-s32"])
def test_extremes_are_exact(word):
    """No product is shifted, and sums wrap at 2**32."""
    isa, target = load_isa("amx_int8"), small("amx_int8")
    p = pose((3, 17, 70_000), ("row", "packed", "row"), target, dtype=word)[0]
    k = case(p)
    low, high = np.iinfo(numpy_type(p.types[0])).min, np.iinfo(numpy_type(p.types[0])).max
    panels = operands.panels_of(np.full((1, p.k, p.n), -128, np.int8), family(p.family))
    k.b[:] = panels.ravel()
    for value in (high, low):
        k.a[:] = value
        want = np.int64(int(value) * -128 * p.k).astype(np.int32)
        for s in candidates(p, target):
            kernel = lower(s, isa)
            if not runs.called_as_before(kernel, k, 1, "tiles in C"):
                assert (execute(kernel, k, code=shimmed(kernel))[k.c.places()] == want).all(), s


@needs_avx512
@pytest.mark.parametrize("layout", ["row", "col", "any"])
@pytest.mark.parametrize(("name", "word"), [("amx_bf16", "bf16"), ("amx_int8", "s8"), ("amx_fp16", "f16")])
def test_a_weight_is_packed_as_for_vectors(name, word, layout):
    isa, k, n = load_isa(name), 71, 45
    atom = isa.atom(word)
    kept = family(cpu_kernels.family(word, small(name)))
    assert str(kept) == {"bf16": "bf16x32k2", "s8": "s8x32k4s", "f16": "f16x32k2"}[word]
    b = np.random.default_rng(0).integers(-128, 128, (1, k, n)).astype(numpy_type(atom.b))
    want = operands.panels_of(b, kept).ravel()
    kernel = lower_pack(isa, word, kept.nr, layout)
    plain = replace(kernel, isa=replace(isa, flags=tuple(x for x in isa.flags if "amx" not in x)))
    got = runs.packed_by(plain, operands.lay(b, layout, 3), want, kept, k, n)
    valid = operands.valid_of(kept, k, n)
    np.testing.assert_array_equal(got[valid], want[valid])


# -- choice -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "word"), WORDS)
@pytest.mark.parametrize("chip", ["sapphire_rapids", "granite_rapids"])
def test_tiles_are_chosen_where_they_pay(chip, name, word):
    target = load_target(chip)
    if target.isa(name) is None:
        pytest.skip(f"{chip} has no {name}")
    kept = cpu_kernels.family(word, target)
    for b in ("row", "packed"):
        many = Problem(1024, 1024, 1024, word, b=b, family=kept if b == "packed" else "")
        assert schedule_choice.choose(many, target).schedule.isa == name
    # One packed weight serves both, but vectors of this chip multiply no pairs of f16.
    due = {"tiles"} if name == "amx_fp16" else {"tiles", "gemm"}
    assert {s.program for s in candidates(many, target)} == due
    one = Problem(1, 4096, 4096, word, b="packed", family=kept)
    assert {s.program for s in candidates(one, target)} == due
    assert schedule_choice.choose(replace(one, m=16), target).schedule.isa == name


@pytest.mark.parametrize("b", ["row", "packed"])
def test_one_unit_serves_all_shapes_where_results_must_not_depend_on_them(b):
    target = load_target("sapphire_rapids")
    kept = cpu_kernels.family("bf16", target) if b == "packed" else ""
    shapes = [(1, 64, 64), (3, 1, 4096), (16, 5000, 64), (100, 33, 7), (1024, 1024, 1024)]
    posed = [Problem(*x, "bf16", b=b, family=kept, deterministic=True) for x in shapes]
    assert {s.isa for p in posed for s in candidates(p, target)} == {"amx_bf16"}
    assert {s.isa for s in candidates(Problem(3, 5, 7, "s8", deterministic=True), target)} > {"amx_int8"}


@pytest.mark.parametrize("packed", ["s8x8k4s", "s8x24k4s", "s8x16k4s", "s8x48k4s", "s8x96k4s", "s8x128k4s"])
def test_panels_of_other_widths(packed):
    """As many tiles side by side as there are registers for; none for half a tile."""
    target, p = small("amx_int8"), Problem(19, 150, 70, "s8", b="packed", family=packed)
    if family(packed).nr not in (16, 48, 96):
        with pytest.raises(ScheduleError):
            candidates(p, target)
        return
    for s in candidates(p, target):
        k = case(p)
        k.check(interpret(lower(s, target.isas[0]), k), s)


def test_types_that_tiles_do_not_multiply_go_to_vectors():
    for word in ("f32", "f32-bf16-f32", "bf16-s8-bf16"):
        assert not any(load_isa(name).atom(word) for name in ISAS), word
    own = {"amx_bf16": "bf16", "amx_int8": "s8", "amx_fp16": "f16"}
    assert all(bool(load_isa(name).atom(word)) == (own[name] == word) for name in ISAS for word in own.values())


@pytest.mark.parametrize(("name", "word"), WORDS)
def test_schedules_read_back(name, word):
    for _, _, found in posed(name, word):
        assert all(parse(spell(s)) == s for s in found)


# -- measuring --------------------------------------------------------------------


@needs_avx512
@pytest.mark.parametrize(
    ("name", "row"), [(name, atom.name) for name in ISAS for atom in load_isa(name).atoms if atom.tiled]
)
def test_the_peak_loop_multiplies_every_step(name, row, monkeypatch):
    isa = load_isa(name)
    atom = isa.word(row)
    found = microbenchmarks.peak(isa, atom)
    steps, kr, rng = 6, atom.k_pack, np.random.default_rng(0)
    types = [numpy_type(x) for x in (atom.a, atom.b, atom.acc)]
    sizes = (found.a * steps * kr, found.b * steps * kr, found.c)
    a, b, c = (rng.integers(0, 9, n).astype(t) for n, t in zip(sizes, types, strict=True))
    before = c.reshape(2, 2, 16, 16).astype(float)
    seen = [i % microbenchmarks.TILE_STEPS for i in range(steps)]
    wide_a = a.reshape(steps, 2, 16, 16 * kr)[seen].astype(float)
    wide_b = b.reshape(steps, 2, 16, 16, kr)[seen].transpose(0, 1, 2, 4, 3).reshape(steps, 2, 16 * kr, 16).astype(float)
    want = before + 3 * np.einsum("srik,scko->rcio", wide_a, wide_b)
    text = SHIM + source(found.kernel)
    flags = tuple(x for x in isa.flags if "amx" not in x)
    shim = partial(build, text, flags=flags, name=found.kernel.name)
    monkeypatch.setattr(building, "build", lambda *_args, **_more: shim())
    gauge.open_loop(found).start(3, steps, a, b, c)
    np.testing.assert_array_equal(c.reshape(2, 2, 16, 16), want)
    assert found.flops == 2 * found.c * atom.k


# -- strictness -------------------------------------------------------------------


def without(kernel, which):
    """A kernel that leaves out configuring its tiles, or giving them up."""

    def keeps(s):
        return not isinstance(s, Configure) or bool(s.rows) != (which == "configure")

    def one(s):
        if hasattr(s, "function"):
            return replace(s, function=changed(s.function))
        if isinstance(s, If):
            return replace(s, then=body(s.then), orelse=body(s.orelse))
        return replace(s, body=body(s.body)) if hasattr(s, "body") else s

    def body(statements):
        return tuple(one(s) for s in statements if keeps(s))

    def changed(f):
        return replace(f, body=body(f.body))

    return replace(kernel, entry=changed(kernel.entry))


@pytest.mark.parametrize(("which", "error"), [("configure", KeyError), ("release", ValueError)])
def test_the_interpreter_knows_what_tiles_are_configured(which, error):
    target = small("amx_int8")
    p = Problem(40, 40, 80, "s8")
    kernel = lower(candidates(p, target)[0], target.isas[0])
    with pytest.raises(error):
        interpret(without(kernel, which), case(p))


@pytest.mark.parametrize("operand", ["a", "b"])
def test_the_interpreter_guards_what_tiles_read(operand):
    target = small("amx_bf16")
    p = pose((20, 20, 40), ("row", "packed", "row"), target, dtype="bf16")[-1]
    k = case(p)
    kernel = lower(candidates(p, target)[0], target.isas[0])
    short = replace(k, **{operand: getattr(k, operand)[: -1 if operand == "a" else -64]})
    with pytest.raises(IndexError):
        interpret(kernel, short)


# -- machine code -----------------------------------------------------------------


@pytest.mark.rest("all compilers")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="no cross compiler for x86_64")
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize(("name", "word"), WORDS)
def test_compilers_have_no_complaint_and_multiply_in_the_loop(name, word, compiler, monkeypatch):
    isa = load_isa(name)
    monkeypatch.setenv(*crossing.build_with(isa, compiler))
    mac = {"bf16": "tdpbf16ps", "s8": "tdpbssd", "u8": "tdpbusd", "f16": "tdpfp16ps"}[types(word)[0]]
    seen = {}
    for _, _, found in posed(name, word):
        for s in found:
            seen.setdefault((s.mr, s.nr, s.b.panels), s)
    assert seen.keys() == SHAPES
    for s in seen.values():
        kernel = lower(s, isa)
        artifact = build(
            source(kernel), flags=(*isa.flags, *test_compiles.WARNINGS), arch=platform.machine(), name=kernel.name
        )
        listing = test_compiles.listing(str(artifact.path), platform.machine())
        for function, instructions in listing.items():
            if function.startswith("ukr_"):
                loops = test_compiles.loops_of(instructions, re.compile(mac))
                rows, columns = (int(x) for x in re.findall(r"\d+", function)[:2])
                framed = any(test_compiles.FRAME.search(x) for _, x in instructions)  # else %rbp is a register
                calls = [any("call" in x for x in loop) for loop in loops]
                assert sorted(calls) == [False, True], (function, s)  # steps that finish the tile before, and others
                for loop, finishing in zip(loops, calls, strict=True):
                    said = " ".join(loop)
                    assert said.count(mac) == rows * columns
                    assert said.count("tileloadd") == rows + columns
                    touched = [x for x in loop if test_compiles.STACK.search(x) and (framed or "rsp" in x)]
                    # There are more arguments than registers: one is read again, nothing is stored.
                    again = [x for x in touched if re.fullmatch(r"mov +(0x[0-9a-f]+)?\(%r[bs]p\),%r\w+", x)]
                    # Prefetches of a B beyond L2 take registers of their own, so that more are.
                    assert finishing or touched == (again if s.b.prefetch else again[:1]), (function, touched)
        text = " ".join(x for instructions in listing.values() for _, x in instructions)
        assert "ldtilecfg" in text
        assert "tilerelease" in text


def test_a_micro_kernel_keeps_its_tiles_apart():
    """No number serves two of C, A and B."""
    for name, word in WORDS:
        for _, _, found in posed(name, word):
            for s in found:
                kernel = lower(s, load_isa(name))
                for f in functions_of(kernel.entry):
                    words = [x for x in walk(f.body) if getattr(x, "name", "") in ("mac", "load_a", "load_b")]
                    c, a, b = ({x.d for x in words if x.name == name} for name in ("mac", "load_a", "load_b"))
                    if any(x.name == "mac" and x.d.isdigit() for x in words):
                        assert len(c) + len(a) + len(b) == len(c | a | b)
                        assert {int(x) for x in c | a | b} <= set(range(8))


def functions_of(f: Function):
    yield f
    for s in walk(f.body):
        if hasattr(s, "function"):
            yield from functions_of(s.function)


KEEPS = """
typedef struct { unsigned char palette, start, none[14]; unsigned short bytes[16]; unsigned char rows[16]; } shapes_t;
void configure(const shapes_t *x) { __asm__ volatile("ldtilecfg %0" : : "m"(*x)); }
void configured(shapes_t *x) { __asm__ volatile("sttilecfg %0" : "=m"(*x)); }
void release(void) { __asm__ volatile("tilerelease"); }
"""


@pytest.mark.skipif(not machines.runs_here("amx_int8"), reason="this machine has no AMX")
def test_tiles_that_other_code_has_configured_stay_so():
    built = build(KEEPS, flags=("-mamx-tile",), name="keeps", symbols=("configure", "configured", "release"))
    tiles = ctypes.CDLL(str(built.path))
    theirs, after = np.zeros(64, np.uint8), np.ones(64, np.uint8)
    theirs[0], theirs[16:22:2], theirs[48:51] = 1, 64, (3, 5, 16)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, s, np.int8) for s in ((64, 128), (128, 64)))
    pm.matmul(a, b)  # asks the kernel for tiles
    for before in (theirs, np.zeros(64, np.uint8)):
        tiles.configure(before.ctypes.data_as(ctypes.c_void_p)) if before.any() else tiles.release()
        np.testing.assert_array_equal(pm.matmul(a, b), a.astype(np.int32) @ b.astype(np.int32))
        tiles.configured(after.ctypes.data_as(ctypes.c_void_p))
        np.testing.assert_array_equal(after, before)
