"""Results of kernels: every candidate in the interpreter, then as built code against the interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import cover
import machines
import numpy as np
import operands
import problems
import pytest
import runs
from machines import HERE, SEVEN, TINY
from operands import case
from problems import LAYOUTS, pose, selection
from runs import check_built, execute, interpret

from portmm.codegen.lower import lower
from portmm.dispatch import config
from portmm.runtime.cpu import runtime
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_gemm import AHEAD
from portmm.schedule.cpu_streams import caches, near_depth
from portmm.schedule.legality import illegal
from portmm.schedule.parts import PACKED
from portmm.schedule.schedule import sweeps, sweeps_panels
from portmm.spec.dtype import BY_NAME
from portmm.spec.problem import Problem
from portmm.target.model import CPU

SIZES = [
    (1, 1, 1), (1, 7, 5), (5, 1, 4), (2, 3, 9), (3, 5, 7), (4, 4, 8), (7, 9, 11), (13, 2, 10),
    (2, 17, 3), (6, 6, 30), (9, 10, 6), (11, 3, 20), (1, 12, 16), (16, 1, 5), (8, 1, 1), (1, 1, 23),
]  # fmt: skip


def kernels(p, target):
    """Each candidate for a problem with its loops."""
    return [(s, lower(s, target.isa(s.isa))) for s in candidates(p, target)]


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_every_candidate_is_the_product(layouts):
    first = LAYOUTS.index(layouts)
    for i in range(3):
        size = SIZES[(first * 3 + i * 5) % len(SIZES)]
        for p in pose(size, layouts, TINY):
            k = case(p, seed=i)
            for s, kernel in kernels(p, TINY):
                k.check(interpret(kernel, k, 1 + i % 3, shuffle=i), s)


@pytest.mark.thin(2)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"batch": 5}, {"static": True}, {"deterministic": True}], ids=str)
def test_workers_and_orders_do_not_matter(more, workers):
    for i, layouts in enumerate([("row", "row", "row"), ("row", "col", "row"), ("col", "any", "row"), *LAYOUTS[1::5]]):
        if "static" in more and not {"any", "packed"}.isdisjoint(layouts):
            continue
        for p in pose((9, 5, 4), layouts, SEVEN, **more):
            k = case(p, seed=workers, shared=("", "a", "b")[(i + workers) % 3] if p.batch > 1 else "")
            # Another number of workers takes the others.
            for s, kernel in cover.some(kernels(p, SEVEN), i + workers, 2):
                k.check(interpret(kernel, k, workers, shuffle=i + 1), s)


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", problems.NUMPY)
@pytest.mark.parametrize("name", machines.ISAS)
def test_every_isa_means_the_product(name, dtype):
    """Vectors, masks, spare tiles and shuffles, which the scalar machine has not."""
    target = machines.small(name)
    lanes = target.isas[0].atom(dtype).n
    for i, layouts in enumerate(LAYOUTS):
        size = [(5, lanes + 1, 3), (1, 3 * lanes, lanes + 2), (2 * lanes + 1, 3, 2)][i % 3]
        p = pose(size, layouts, target, dtype=dtype)[-1]
        k = case(p, seed=i)
        for s, kernel in kernels(p, target)[i % 3 :: 3]:
            k.check(interpret(kernel, k, 2, shuffle=i), s)


@pytest.mark.thin(2)
@pytest.mark.parametrize("size", [(1, 9, 257), (3, 21, 300), (20, 9, 270)])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_deep_products(size, workers):
    """K that threads share out or pack in pieces, and streams that ask for rows ahead."""
    target = replace(SEVEN, rows_ahead=CPU.ahead_depths[0])
    found = set()
    for p in pose(size, ("row", "row", "row"), target):
        k = case(p, seed=workers)
        for s, kernel in kernels(p, target):
            kind = (s.b.once, s.parallel.over, s.b.prefetch > 0)
            if any((s.b.once, s.parallel.over == "k", s.b.prefetch)) and (kind, s.nr) not in found:
                found.add((kind, s.nr))
                k.check(interpret(kernel, k, workers, shuffle=workers), s)
    kinds = {kind for kind, _ in found}
    if size[0] > 3:
        assert (True, "tiles", False) in kinds
    else:
        assert {(False, "k", True), (False, "tiles", True), (False, "k", False)} <= kinds


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16-bf16-f32"])
@pytest.mark.parametrize("name", [x for x in HERE if x in ("avx2", "avx512")])
def test_rows_of_b_may_start_anywhere(name, dtype):
    """A sweep's first tile ends where vectors of B are aligned, if those of all rows are at once.

    Sums are in C between blocks of k, or in tiles of their own.
    """
    target = machines.small(name)
    lanes = target.isas[0].atom(dtype).n
    for i in range(2 * lanes):
        apart = i % 3 == 1
        n, k, row = 3 * lanes + i, 35 + i + 700 * apart, 8 * lanes - (i % 4 == 3)
        p = Problem(CPU.sums_in_c + 1 + i % 9 if apart else 1 + i % 3, n, k, dtype=dtype)
        whole = case(p, seed=i)
        b = np.full((k - 1) * row + n, operands.poison(whole.b.dtype), whole.b.dtype)
        places = np.arange(k)[:, np.newaxis]
        b[places * row + np.arange(n)] = whole.b[places * whole.fields["b_k"] + np.arange(n)]
        # Flush with the end of a page, so that it starts at any multiple of an element.
        moved = replace(whole, b=b, fields=whole.fields | {"b_k": row})
        swept = [s for s in candidates(p, target) if sweeps(s, target.isas[0].atom(dtype)) and s.parallel.over != "k"]
        found = [s for s in swept if s.c.packed == apart]
        assert found
        for j, s in enumerate(cover.some(found, i, 2)):
            kernel = lower(s, target.isas[0])
            moved.check(interpret(kernel, moved), s)
            check_built(kernel, moved, 1 + (i + j) % 2, s, end=True)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kc", [7, 12, 24])
def test_sweeps_of_any_depth(kc, apart):
    """KC need not be a multiple of the steps of k that are written out."""
    target = machines.small("avx2")
    p = Problem(CPU.sums_in_c + 2 if apart else 1, 37, 700)
    found = [s for s in candidates(p, target) if sweeps(s, target.isas[0].atom("f32")) and s.parallel.over != "k"]
    s = next(s for s in found if s.c.packed == apart)
    for mr in (1, 4, 6) if apart else (1,):
        tiles = (s.tiles[0]._replace(m=mr, least=(mr + 1) // 2), *[t._replace(k=kc) for t in s.tiles[1:]])
        kernel, k = lower(replace(s, tiles=tiles), target.isas[0]), case(replace(p, k=2 * kc + 5), seed=mr)
        k.check(interpret(kernel, k, 2), s)
        if "avx2" in HERE:
            check_built(kernel, k, 1, s, end=True)


@pytest.mark.parametrize(("name", "dtype"), [("avx2", "f32"), ("avx512", "f32"), ("neon", "f32")])
@pytest.mark.parametrize("few", [False, True])
def test_sweeps_of_a_b_in_the_last_level(name, dtype, few, monkeypatch):
    """Many rows of B are swept at a time, by one slice of rows or several; sums are in tiles of their own."""
    target = machines.small(name)
    room = [("L1", 2), ("L2", 2), ("L3", 8)]
    levels = [replace(target.levels[0], name=x, bytes=times * target.levels[0].bytes) for x, times in room]
    target = replace(target, levels=tuple(levels))
    atom, size = target.isas[0].atom(dtype), BY_NAME[dtype].bytes
    monkeypatch.setattr(CPU, "near_bytes", 4 * atom.n * size)
    m, n = CPU.sums_in_c_wide + 3 if few else CPU.near_rows - 1, 6 * atom.n + 3 * bool(few and atom.mask)
    p = Problem(m, n, levels[1].bytes // (n * size) + CPU.near_depth + 5, dtype=dtype)
    (s,) = [s for s in candidates(p, target) if s.c.packed and s.b.along * size == CPU.near_ahead]
    assert s.kc == near_depth(n * size, s.nr * size, caches(target))
    kernel, k = lower(s, target.isas[0]), case(p, seed=few)
    k.check(interpret(kernel, k, 2), s)
    if name in HERE:
        check_built(kernel, k, 1 + few, s, end=True)


@pytest.mark.parametrize("b", ["row", "col", "packed"])
@pytest.mark.parametrize(("name", "dtype"), [("avx2", "f32"), ("avx512", "f32"), ("avx512", "f64"), ("neon", "f32")])
def test_sweeps_of_panels(name, dtype, b):
    """Slices of A pass panels of B, part of which are packed together; k is a part of a run, or several runs."""
    target = _with_l2(name)
    lanes = target.isas[0].atom(dtype).n
    for i, k in enumerate((5, 64, 700) if b != "row" else (70, 700)):
        near = 3 if i else 9  # more than are packed at once
        posed = pose((19 + i, (near + 2) * 2 * lanes + 3, k), ("row", b, "row"), target, dtype=dtype)
        p, found = next((p, x) for p in posed if (x := [s for s in candidates(p, target) if sweeps_panels(s)]))
        assert {(s.a.packed, s.b.along > 0) for s in found} == set(product((False, True), repeat=2))
        for s in found:
            level = "L3" if b == "packed" and not s.a.packed else "L2"
            tiles = [t._replace(n=near * s.nr) if t.level == level else t for t in s.tiles]
            if s.a.packed:  # the last block of rows has fewer
                tiles[3] = tiles[3]._replace(m=s.mr)
            swept = replace(s, tiles=tuple(tiles))
            kernel, problem = lower(swept, target.isas[0]), case(p, seed=i)
            problem.check(interpret(kernel, problem, 2), swept)
            if name in HERE:
                check_built(kernel, problem, 1 + i % 2, swept, end=True)


@pytest.mark.parametrize(("name", "dtype", "ragged"), [
    ("avx2", "f32", 3), ("avx512", "f32", 17), ("avx512", "f64", 1), ("neon", "f32", 0), ("sse2", "f32", 0),
])  # fmt: skip
def test_panels_that_a_micro_kernel_packs(name, dtype, ragged):
    """The first slice of a block of rows reads B beside a guard page, others what it packs; k is up to three runs."""
    target = _with_l2(name)
    lanes, seen = target.isas[0].atom(dtype).n, set()
    for i, (a, k, batch) in enumerate([("row", 37, 2), ("col", 650, 1)]):
        for p in pose((31, 4 * lanes + ragged, k), (a, "row", "row"), target, dtype=dtype, batch=batch):
            for found in (x for x in candidates(p, target) if x.b.inside):
                near = {"L2": 2 * found.mr, "L3": 2 * found.mr}  # rows of a block, of which the last has fewer
                s = replace(found, tiles=tuple(t._replace(m=near.get(t.level, t.m)) for t in found.tiles))
                seen.add((s.a.packed, s.nr // lanes))
                kernel, problem = lower(s, target.isas[0]), case(p, seed=i, floats=True)
                problem.check(interpret(kernel, problem, 2, shuffle=1), s)
                if name in HERE:
                    check_built(kernel, problem, 1 + i, s, end=True)
    assert seen >= {(False, 2), (True, 2)}


def _with_l2(name):
    """A machine of one instruction set whose L2 has room for panels of a run, and L1 ways for a slice of rows."""
    target = machines.small(name)
    l1 = replace(target.levels[0], ways=16)
    return replace(target, levels=(l1, replace(l1, name="L2", bytes=1 << 20)))


def test_what_no_sweep_of_panels_does_is_illegal():
    target = _with_l2("avx2")
    isa, p = target.isas[0], Problem(20, 40, 70)
    s = next(s for s in candidates(p, target) if sweeps_panels(s))
    for changed in (replace(s, c=AHEAD), replace(s, b=s.b.with_pack(None)), replace(s, b=s.b.covering(2))):
        assert "no kernel sweeps panels" in illegal(changed, p, isa, isa.atom("f32"), target)
    assert "sums in tiles" in illegal(replace(s, c=s.c.with_pack(PACKED)), p, isa, isa.atom("f32"), target)
    (ready,) = pose((20, 40, 70), ("row", "packed", "row"), target)[:1]
    packed = next(s for s in candidates(ready, target) if not s.b.packed)
    twice = replace(packed, b=packed.b.with_pack(PACKED))
    assert "in panels already" in illegal(twice, ready, isa, isa.atom("f32"), target)


@pytest.mark.parametrize(("name", "dtype"), [("avx2", "f32"), ("avx512", "f64"), ("avx512", "u8-s8-s32")])
def test_panels_from_afar(name, dtype):
    """Lines of a packed panel are prefetched beyond its end, which nothing reads."""
    target = machines.small(name)
    lanes = target.isas[0].atom(dtype).n
    size, layouts = (CPU.panel_rows + 1, 5 * lanes + 1, 40 * lanes), ("row", "packed", "row")
    found = [(p, s) for p in pose(size, layouts, target, dtype=dtype) for s in candidates(p, target) if s.b.along]
    assert found
    for i, (p, s) in enumerate(found[-2:]):
        kernel, k = lower(s, target.isas[0]), case(p, seed=i)
        k.check(interpret(kernel, k), s)
        if name in HERE:
            check_built(kernel, k, 1 + i, s, end=True)


def test_wide_products():
    """B is packed first, in more runs of columns than one."""
    p = Problem(9, 2 * CPU.run_bytes // 4 + 5, 3)
    k = case(p)
    found = {s.nr: (s, kernel) for s, kernel in kernels(p, SEVEN) if s.b.once}
    assert found
    for s, kernel in found.values():
        k.check(interpret(kernel, k, 2, shuffle=1), s)


SLABS = [
    ("avx512", "f32", ("row", "row", "row"), {}),
    ("avx2", "f32", ("col", "col", "row"), {"batch": 2}),
    ("avx2", "f32", ("row", "any", "col"), {}),
    ("avx2", "s8-s8-f32", ("row", "row", "row"), {"post": "scale+bias"}),
    ("avx512", "bf16", ("row", "row", "row"), {}),
    ("avx512", "f32-u4-f32", ("row", "codes", "row"), {}),
    ("amx_int8", "s8-s8-f32", ("row", "row", "row"), {"post": "scale+bias"}),
]


@pytest.mark.parametrize(("name", "dtype", "layouts", "more"), SLABS, ids=str)
def test_slabs_of_b(name, dtype, layouts, more, monkeypatch):
    """A B that is packed as a whole, but of which only a few columns have room at a time."""
    monkeypatch.setattr(CPU, "slab_bytes", 1)
    target, size = machines.small(name), (40 if "amx" in name else 9, 3 * CPU.run_bytes // 4 - 11, 37)
    if layouts[1] == "codes":
        posed = [problems.coded(size, dtype, 2 * target.isas[0].atom("f32").n, 16)]
    else:
        posed = pose(size, layouts, target, dtype=dtype, **more)
    found = [(p, s) for p in posed for s in candidates(p, target) if s.b.once]
    assert found
    for i, (p, s) in enumerate({(x.program, x.kc > 0): (q, x) for q, x in found}.values()):
        kernel, k = (
            lower(s, target.isa(s.isa)),
            case(p, seed=i, floats=p.b == "codes", shared="b" if p.batch > 1 else ""),
        )
        for workers in (1, 3):
            k.check(interpret(kernel, k, workers, shuffle=workers), s)
        if s.isa in HERE:
            check_built(kernel, k, 2, s)


class Counted(np.ndarray):
    """A flat array that counts the stores to each element."""

    def __setitem__(self, key, value):
        self.counts[key] += 1
        super().__setitem__(key, value)


def counted(x):
    array = x.view(Counted)
    array.counts = np.zeros(x.size, int)
    return array


@pytest.mark.thin(4)
@pytest.mark.parametrize("size", [(7, 9, 11), (1, 13, 20), (4, 5, 23)])
@pytest.mark.parametrize("name", ["tiny", "sse2", "avx512"])
def test_each_element_of_c_is_covered_once_per_block_of_k(name, size):
    target = SEVEN if name == "tiny" else machines.small(name)
    for layouts in [("row", "row", "row"), ("col", "col", "row"), ("row", "col", "row"), ("any", "row", "col")]:
        for p in [*pose(size, layouts, target), *pose(size, layouts, target, batch=2)]:
            k = case(p)
            for s, kernel in kernels(p, target):
                c = counted(k.fresh())
                interpret(kernel, k, 2, c=c)
                inside = c.counts[k.c.places()]
                assert inside.min() == inside.max() > 0, s
                assert c.counts.sum() == inside.sum(), s
                if s.program == "gemm":
                    blocks = -(-p.k // s.kc) if s.kc else 1
                    assert inside.max() <= blocks, s


def test_the_interpreter_guards_bounds():
    p = Problem(4, 4, 4)
    k = case(p)
    kernel = lower(candidates(p, TINY)[0], TINY.isas[0])
    for name in ("a", "b"):
        short = replace(k, **{name: getattr(k, name)[:-1]})
        with pytest.raises(IndexError):
            interpret(kernel, short)
    with pytest.raises(IndexError):
        interpret(kernel, k, c=k.fresh()[:-1])
    with pytest.raises(IndexError):
        interpret(kernel, replace(k, a_offset=-1))


# -- built code -------------------------------------------------------------------


@pytest.fixture
def _three_threads():
    """As many as the tests ask of a kernel, however many cores there are."""
    config.set_num_threads(3)
    runtime().set_num_threads(3)
    yield
    config.set_num_threads(0)


@pytest.mark.thin(3)
@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize("dtype", problems.NUMPY)
@pytest.mark.parametrize("name", HERE)
def test_built_kernels_agree_with_the_interpreter(name, dtype):
    """Bit for bit on small integers, where every order and every rounding gives the same."""
    target = machines.small(name)
    isa = target.isas[0]
    chosen = [(p, s) for p, found in selection(target, dtype, isa.atom(dtype).n) for s in found]
    # Every kind is interpreted, and a part of them built, another for each set of instructions.
    chosen = cover.some(chosen, HERE.index(name), 3 if dtype == "f32" else 6)
    for i, (p, s) in enumerate(chosen):
        kernel, exact, rough = lower(s, isa), case(p, seed=i), case(p, seed=i, floats=True)
        meant = interpret(kernel, exact)
        exact.check(meant, s)
        for workers in (1, 2, 3):
            if not runs.called_as_before(kernel, exact, workers, meant):
                got = execute(kernel, exact, workers, end=workers != 2)
                np.testing.assert_array_equal(got, meant, err_msg=str(s))
        check_built(kernel, rough, 1 + i % 3, s)
