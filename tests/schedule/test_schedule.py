"""Schedules: every candidate is legal, and spells and reads back the same."""

from __future__ import annotations

from dataclasses import replace

import machines
import pytest
from machines import SEVEN, TINY
from problems import LAYOUTS, NUMPY, pose

from portmm.codegen.lower import lower
from portmm.errors import ScheduleError
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_cost import cost
from portmm.schedule.legality import footprint, illegal
from portmm.schedule.parts import ALL
from portmm.schedule.text import parse, spell, varied
from portmm.spec import kernel_name
from portmm.spec.dequantization import Dequantization
from portmm.spec.problem import Problem
from portmm.target.target import described, load_target, names_of

SIZES = [(1, 1, 1), (1, 9, 300), (7, 9, 11), (16, 64, 16), (3, 1, 5), (100, 37, 64), (1024, 1024, 1024), (5000, 3, 70)]
MACHINES = [SEVEN, *(load_target(name) for name in names_of("cpu"))]
FEW = [SEVEN, *map(described, machines.ISAS)]


def problems(target, dtype):
    for layouts in LAYOUTS:
        for size in SIZES:
            yield from pose(size, layouts, target, dtype=dtype)
    yield from (Problem(*size, dtype, 5, static=static) for size in SIZES for static in (False, max(size) <= 64))
    yield from (Problem(*size, dtype, b="col", deterministic=True) for size in SIZES)


@pytest.mark.thin(10)
@pytest.mark.parametrize("target", MACHINES, ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", NUMPY)
def test_candidates_are_legal_and_told_apart(target, dtype):
    for p in problems(target, dtype):
        found = candidates(p, target)
        assert found
        assert len(set(found)) == len(found)
        assert found == candidates(p, target)
        for s in found:
            isa = target.isa(s.isa)
            atom = isa.atom(dtype, s.atom.lanes)
            assert not illegal(s, p, isa, atom, target), s
            assert footprint(s, p, atom)["registers"] <= isa.registers
            assert s.dtype == dtype
            assert s.program == "dot" or s.nr % atom.n == 0
            assert max(s.heights) <= s.mr
            assert s.mc % s.mr == 0
            assert s.nc % s.nr == 0
            assert s.atom.swap == (p.c == "col")
            assert not (p.deterministic and s.program == "dot")
            if p.b == "packed":
                # Dot products copy columns of a panel; no other program packs a panel again.
                assert (s.family, s.b.layout, s.b.packed) == (p.family, "packed", s.program == "dot")


@pytest.mark.parametrize(
    ("dtype", "b", "family"),
    [("f32", "packed", "f32x8"), ("s8-u4-f32", "codes", "u4x8k8g0"), ("f32-u4-f32", "codes", "u4x8k8g64c")],
)
def test_panels_for_shorter_vectors_are_read_by_other_instruction_sets(dtype, b, family):
    """Panels that the base set of the level dotprod packed, on a processor with SVE of 512 bits."""
    dynamic = dtype.startswith("s8")
    fused, source = (Dequantization(dynamic=True).text, "f32") if dynamic else ("", "")
    p = Problem(9, 33, 64, dtype, b=b, family=family, fused=fused, source=source)
    target = described("sve512")
    found = candidates(p, target)
    assert {s.isa for s in found} == {"neon"}
    assert {s.family for s in found} == {family}
    assert lower(found[0], target.isa("neon"))
    own = replace(p, family=family.replace("x8", "x32", 1))
    assert {s.isa for s in candidates(own, target)} == {"sve512"}


@pytest.mark.thin(3)
@pytest.mark.parametrize("target", MACHINES, ids=lambda t: t.name)
def test_block_extents_fill_no_level_over(target):
    for p in problems(target, "f32"):
        for s in candidates(p, target):
            for tile in s.tiles[1:]:
                level = target.level(tile.level)
                if level is None or ALL in (tile.m, tile.n, tile.k):
                    continue
                held = {"L1": (tile.m + tile.n) * tile.k, "L2": tile.m * tile.k, "L3": tile.n * tile.k}[tile.level]
                m, n = (p.n, p.m) if s.atom.swap else (p.m, p.n)
                if tile.m <= m and tile.n <= n and tile.k <= p.k:
                    assert held * p.elements[0].bytes <= level.bytes, (p, s)


def test_heights_cover_every_slice():
    """Nearly equal slices of any number of rows have heights that the kernel holds."""
    for target in (TINY, described("avx512"), described("sse2"), described("sve256")):
        for m in range(1, 70):
            for s in candidates(Problem(m, 40, 40), target):
                blocks = {m} if not s.mc else {m * (i + 1) // q - m * i // q for q in range(1, 9) for i in range(q)}
                for rows in blocks - {0} if s.program == "gemm" else ():
                    if s.mc and rows < m and rows < 2 * s.mr:
                        continue  # the program makes no block of fewer than 2 MR rows
                    slices = -(-rows // s.mr)
                    assert {rows // slices, -(-rows // slices)} <= set(s.heights), (m, rows, s)


@pytest.mark.thin(4)
@pytest.mark.parametrize("target", FEW, ids=lambda t: f"{t.name}-{t.isas[0].name}")
def test_schedules_and_names_read_back(target):
    for p in problems(target, "f32"):
        for s in candidates(p, target):
            assert parse(spell(s)) == s
            name = s.name(target.isa(s.isa).atom(s.dtype, s.atom.lanes))
            assert kernel_name.parse(str(name)) == name
            assert (name.op, name.mr, name.nr, name.isa) == (s.program, s.mr, s.nr, s.isa)


@pytest.mark.parametrize(
    "text",
    ["", "gemm", "gemm:avx2:f32:1x2:1-1:a=row", "gemm:avx2:f32:axbxc/1x1x1/1x1x1/1x1x1:1-1:a=row,b=row", ":::::"],
)
def test_a_wrong_spelling_is_refused(text):
    with pytest.raises(ValueError, match="not a schedule"):
        parse(text)


@pytest.mark.parametrize("text", ["", "gemm", "portmm_gemm_f32_f32_f32_14x32_avx512", "portmm_gemm_f32_f32_f32_1x2x3_"])
def test_a_wrong_name_is_refused(text):
    with pytest.raises(ValueError, match="not a kernel name"):
        kernel_name.parse(text)


@pytest.mark.thin(8)
@pytest.mark.parametrize("target", FEW, ids=lambda t: f"{t.name}-{t.isas[0].name}")
def test_costs_are_positive_and_keep_their_terms(target):
    for p in problems(target, "f32"):
        for s in candidates(p, target):
            atom = target.isa(s.isa).atom("f32", s.atom.lanes)
            for workers in (1, 4):
                c = cost(p, s, atom, target, workers)
                assert c.seconds > 0
                assert c.bound in c.overlapped
                assert all(x >= 0 for x in (*c.overlapped.values(), *c.added.values()))
                least = max(c.overlapped.values()) + sum(c.added.values())
                most = sum(c.overlapped.values()) + sum(c.added.values())
                assert least * 0.999999 <= c.seconds <= most * 1.000001


def test_a_packed_weight_of_a_strange_family_is_refused():
    for family in ("f32x3", "f32x4096"):
        with pytest.raises(ScheduleError):
            candidates(Problem(4, 4, 4, b="packed", family=family), TINY)


def test_a_packed_weight_with_c_by_columns_is_refused():
    with pytest.raises(ScheduleError, match="packed"):
        candidates(Problem(4, 4, 4, b="packed", family="f32x2", c="col"), TINY)


@pytest.mark.parametrize("more", [{"batch": 3}, {"static": True}])
def test_a_machine_of_few_registers_takes_batches(more):
    assert candidates(Problem(4, 4, 4, **more), TINY)


def test_an_unknown_program_is_refused():
    s = candidates(Problem(4, 4, 4), TINY)[0]
    text = spell(s).replace(s.program, "strassen", 1)
    with pytest.raises(ScheduleError, match="strassen"):
        lower(parse(text), TINY.isas[0])


def refused(way, changes):
    """A schedule that packs B in a way, `once` or `inside`, has a kernel, and none with the changes."""
    isa = SEVEN.isas[0]
    s = next(s for s in candidates(Problem(40, 40, 40), SEVEN) if getattr(s.b, way))
    assert lower(s, isa)
    with pytest.raises((ScheduleError, ValueError), match=f"packs B {way}"):
        lower(varied(s, **changes), isa)


@pytest.mark.parametrize("changes", [{"over": "k"}, {"over": "batch"}, {"pack_b": False}])
def test_packing_once_needs_threads_that_share_tiles(changes):
    refused("once", changes)


@pytest.mark.parametrize("changes", [{"pack_b": False}, {"once": True}, {"panels": 2}, {"static": (40, 40, 40)}])
def test_packing_inside_needs_rows_of_one_panel(changes):
    refused("inside", changes)


def test_runs_of_k_are_shared_where_their_sums_add_up():
    """The correction of a shifted A is the sum over all of a column: once, not once a run."""
    target = load_target("zen4")

    def shared(dtype):
        return {s.isa for s in candidates(Problem(100, 16, 100000, dtype), target) if s.parallel.over == "k"}

    assert shared("u8-s8-s32") == {"avx512vnni", "avx512"}
    assert shared("s8-s8-s32") == {"avx512"}  # which multiplies s8 as it is
    assert not shared("bf16")


def test_a_type_without_an_atom_is_refused():
    from dataclasses import replace

    isa = TINY.isas[0]
    only = replace(TINY, isas=(replace(isa, atoms=(isa.atom("f32"),)),))
    with pytest.raises(ScheduleError, match="f64"):
        candidates(Problem(4, 4, 4, "f64"), only)
