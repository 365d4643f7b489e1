"""Tensor cores of a warp: every type, layout and tile, on the shim, against float64 and exact integers."""

from __future__ import annotations

from dataclasses import replace

import grid_cases
import pytest
from fused_cases import epilogues
from grid_cases import check_run, fused_case, kernels_of, rounded
from places import MACHINES

from portmm.schedule.candidates import candidates
from portmm.schedule.text import parse, spell, varied
from portmm.spec.problem import Problem
from portmm.target.target import load_isa, load_target

MATRIX = load_target(str(MACHINES / "tiny_matrix.toml"))
TURING = replace(
    MATRIX, isas=(load_isa("mma_sm75"), *MATRIX.isas[1:]), device=replace(MATRIX.device, architecture="75"),
    rates=MATRIX.rates | {"mma_sm75_f16": 512.0, "mma_sm75_s8s8": 1024.0, "mma_sm75_u8s8": 1024.0},
)  # fmt: skip
ROWS, BY_K, BY_ROW, TURNED = ("row", "row", "row"), ("row", "col", "row"), ("col", "row", "row"), ("col", "col", "row")
C_BY_COLUMNS = ("row", "col", "col")
PRODUCTS = (
    ("bf16", BY_K, (8, 8, 8)), ("bf16", ROWS, (8, 8, 2)), ("f16", TURNED, (8, 8, 8)), ("f16", BY_ROW, (8, 8, 4)),
    ("f16-f16-f32", ROWS, (4, 2, 4)), ("bf16-bf16-f32", BY_ROW, (1, 8, 1)), ("f16", C_BY_COLUMNS, (8, 4, 1)),
    ("s8-s8-s32", BY_K, (16, 16, 4)), ("u8-s8-s32", BY_K, (16, 4, 2)), ("s8-s8-s32", C_BY_COLUMNS, (4, 1, 1)),
)  # fmt: skip
"""Types, layouts, and the elements of A, B and C that lie aligned."""
SIZES = ((65, 33, 131, 1, ""), (17, 70, 64, 2, "b"), (1, 1, 1, 1, ""), (130, 9, 0, 2, ""), (7, 129, 200, 3, "a"))
"""m, n, k, the items of a batch, and what is the same for all of them."""
FEW = 40
"""Sums of a lane, beyond which the shim takes long to compile."""


def posed(dtype, layouts, vectors, size=(65, 33, 131), batch=1, **more):
    a, b, c = layouts
    return Problem(*rounded(size, layouts, vectors), dtype, batch, a, b, c, **more)


def schedules(dtype, layouts, vectors, target=MATRIX, most=FEW):
    """Those for tensor cores, without slices of k."""
    found = candidates(posed(dtype, layouts, vectors), target, vectors)
    return [s for s in found if s.program == "mma" and s.parallel.split == 1 and s.mr * s.nr <= most]


def check(s, layouts, dtype, target=MATRIX, sizes=SIZES):
    kernels = kernels_of(s, target)
    for i, (*size, batch, shared) in enumerate(sizes):
        k = grid_cases.case(posed(dtype, layouts, s.vectors, size, batch), s.vectors, i, shared)
        seeds = (i % 3,) if i else (0, 2)
        check_run(s, kernels, "cuda", k, (k.problem, s), seeds)


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda x: "{}-{}".format(x[0], "x".join(map(str, x[2]))))
def test_products(product):
    dtype, layouts, _ = product
    found = schedules(*product)
    at = PRODUCTS.index(product)
    for turn in (5 * at, 5 * at + 7, 5 * at + 16):
        s = found[turn % len(found)]
        check(varied(s, split=1 + turn % 3), layouts, dtype)


@pytest.mark.parametrize("product", [PRODUCTS[i] for i in (2, 4, 7, 8)], ids=lambda x: f"{x[0]}-{x[1][1]}")
def test_turing(product):
    """No asynchronous copies, and shallower atoms."""
    dtype, layouts, _ = product
    found = schedules(*product, target=TURING)
    assert not any(s.a.asynchronous for s in found)
    at = PRODUCTS.index(product)
    for turn in (at, at + 5):
        check(found[turn % len(found)], layouts, dtype, TURING)


def test_the_largest_tile_of_a_warp():
    found = [s for s in schedules("bf16", BY_K, (8, 8, 8), most=128) if s.mr * s.nr == 128]
    check(found[0], BY_K, "bf16", sizes=SIZES[:1])


@pytest.mark.parametrize("stages", [3, 4, 5])
def test_stages(stages):
    found = [s for s in schedules("f16", BY_K, (8, 8, 8)) if s.a.asynchronous and s.stages == stages]
    s = found[stages % len(found)]
    check(s, BY_K, "f16", sizes=[(17, 24, k, 1, "") for k in (16, 200, 650)])


def test_operands_change_sides():
    found = [s for s in schedules("bf16", ROWS, (8, 8, 8)) if s.atom.swap]
    assert {s.block.m for s in found} >= {8, 16}
    for s in (found[0], found[-1]):
        check(s, ROWS, "bf16", sizes=[(m, 72, 130, 2, "b") for m in (1, 8, 13)])


def test_columns_and_depth_are_compiled_in():
    """Rows stay what a call says they are."""
    for split in (1, 3):
        s = varied(schedules("bf16", BY_K, (8, 8, 8))[7], split=split, static=(0, 72, 200))
        kernels = kernels_of(s, MATRIX)
        assert not {"n", "k"} & {a.name for x in kernels for a in x.arguments}
        assert s == parse(spell(s))
        check(s, BY_K, "bf16", sizes=[(m, 72, 200, 1, "") for m in (1, 70)])


EPILOGUES = epilogues()


@pytest.mark.parametrize(("name", "kind"), [("plain", "split"), ("many", "whole"), ("places", "swap")])
def test_products_end_in_expressions(name, kind):
    fused = EPILOGUES[name]
    dtype, layouts, vectors = ("bf16", BY_K, (8, 8, 4))
    p = posed(dtype, layouts, vectors, fused=str(fused))
    ways = [
        s for s in candidates(p, MATRIX, vectors) if s.program == "mma" and s.mr * s.nr <= 16 and s.parallel.split == 1
    ]
    s = next(s for s in ways if s.atom.swap == (kind == "swap"))
    s = varied(s, split=3 if kind == "split" else 1)
    kernels = kernels_of(s, MATRIX)
    for i, (*size, batch) in enumerate([(33, 19, 37, 2), (1, 1, 1, 1), (4, 8, 70, 3)]):
        f = fused_case(replace(posed(dtype, layouts, s.vectors, size, batch), fused=p.fused), fused, s.vectors, i)
        check_run(s, kernels, "cuda", f, (f.case.problem, s))
