"""Tensor cores of Hopper: pipelines of warpgroups on the shim, and as NVRTC compiles them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import grid_cases
import opencl_cpu
import pytest
from fused_cases import epilogues
from grid_cases import compiled, fused_case, kernels_of, run

from portmm.dtype import BY_NAME
from portmm.errors import NoCompilerError, ScheduleError
from portmm.grid_candidates import candidates, illegal
from portmm.grid_candidates import shared_bytes as shared_of
from portmm.grid_dispatch import choose, source
from portmm.grid_warpgroup import LINE, STRIP, budgets, panel, registers, staged
from portmm.lower import lower_grid
from portmm.nvrtc import compile_cuda, find_nvrtc
from portmm.problem import Problem
from portmm.schedule import ALL, Schedule, Tile, parse, spell
from portmm.target import load_target

HOPPER = load_target(str(Path(__file__).with_name("targets") / "tiny_hopper.toml"))
H200 = load_target("h200")
ROWS, BY_K, BY_ROW, TURNED = ("row", "row", "row"), ("row", "col", "row"), ("col", "row", "row"), ("col", "col", "row")
C_BY_COLUMNS = ("row", "col", "col")


def schedule(dtype, layouts, m, n, groups=1, **more):
    """A schedule for tiles of m x n of a block."""
    a, b, c = layouts
    x, y, z = (BY_NAME[t].bytes for t in Problem(1, 1, 1, dtype).types)
    turns, swap = more.get("pingpong", False), more.get("swap", False)
    part = (m, n) if turns else (m, n // groups) if swap else (m // groups, n)
    wide, high = part if swap else part[::-1]
    sums = (wide // 4, 2 * high // STRIP) if swap else (2 * high // STRIP, wide // 4)
    k = 32 // x
    tiles = (Tile("registers", *sums, k), Tile("warp", *part, k), Tile("shared", m, n, LINE // x), Tile("L2", 8 * m, ALL, ALL))
    sent = 8 if z == 2 and c == "row" and more.get("split", 1) == 1 else 2 if c == "row" else 1
    given = {"stages": 3, "persistent": 4, "vectors": (16 // x, 16 // y, sent)} | more
    if given.get("split", 1) > 1:
        given["persistent"] = 0
    s = Schedule(
        "wgmma", "wgmma", dtype, tiles, (sums[0],), a=a, b=b, pack_a=False, pack_b=False,
        c="row" if c == "row" else "any", groups=groups, resident=1, **given,
    )  # fmt: skip
    return s if not sent == 8 or panel(s) else replace(s, vectors=(*s.vectors[:2], 2))


def posed(dtype, layouts, size, batch=1, **more):
    a, b, c = layouts
    return Problem(*size, dtype, batch, a, b, c, **more)


def check(s, layouts, sizes, seeds=(0, 1, 2)):
    """A schedule's kernels on m, n, k, the items of a batch, and what all of them share."""
    assert parse(spell(s)) == s
    kernels = kernels_of(s, HOPPER)
    codes = compiled(kernels, "cuda")
    for i, (*size, batch, shared) in enumerate(sizes):
        p = posed(s.dtype, layouts, size, batch)
        assert not illegal(s, p, HOPPER) or s.split > 1
        k = grid_cases.case(p, (*s.vectors[:2], 8 if staged(s) else 2), i, shared)
        k.check(run(s, kernels, codes, "cuda", k, seeds if i == 0 else seeds[i % 3 :][:1])[0], (p, s))


EDGES = (130, 70, 200, 1, "")
"""m, n, k, the items of a batch, and what is the same for all of them: rows, columns and a step of k are left over."""
BATCHES = ((64, 33, 131, 3, "b"), (7, 129, 64, 2, "a"))
COOPERATIVE = schedule("bf16", BY_K, 128, 32, 2)
SWAPPED = schedule("bf16", BY_K, 8, 64, swap=True)
VARIANTS = {
    "one warpgroup": (schedule("bf16", BY_K, 64, 32), [EDGES, *BATCHES]),
    "two warpgroups": (COOPERATIVE, [EDGES, *BATCHES]),
    "two strips": (schedule("f16", BY_K, 256, 16, 2), [(300, 40, 100, 1, "")]),
    "in turns": (schedule("bf16", BY_K, 64, 32, 2, pingpong=True), [EDGES, (64, 33, 131, 3, "b")]),
    "in turns, two strips": (schedule("bf16", BY_K, 128, 16, 2, pingpong=True), [EDGES]),
    "a tile each": (replace(COOPERATIVE, persistent=0), [(130, 40, 70, 1, "")]),
    "many stages": (schedule("bf16", BY_K, 64, 16, stages=7), [(100, 16, 1000, 1, ""), (1, 1, 16, 1, "")]),
    "a panel of 64": (schedule("bf16", BY_K, 64, 64), [(70, 70, 70, 2, "")]),
    "a panel of 16": (schedule("bf16", BY_K, 64, 48), [(70, 100, 70, 1, "")]),
    "no panel": (schedule("bf16", BY_K, 64, 24), [(70, 50, 70, 1, "")]),
    "clusters": (replace(COOPERATIVE, cluster=2), [(300, 70, 200, 1, ""), (64, 33, 131, 3, "b")]),
    "clusters in turns": (schedule("bf16", BY_K, 64, 32, 2, pingpong=True, cluster=2), [(200, 70, 131, 1, "")]),
    "swapped": (SWAPPED, [(5, 130, 200, 2, "a"), (1, 64, 131, 1, "")]),
    "swapped, two strips": (schedule("bf16", BY_K, 16, 256, 2, swap=True), [(13, 300, 70, 1, "")]),
    "slices": (replace(COOPERATIVE, persistent=0, split=3, vectors=(8, 8, 2)), [(130, 70, 461, 2, "b")]),
    "swapped slices": (replace(SWAPPED, persistent=0, split=2, vectors=(8, 8, 1)), [(5, 70, 300, 1, "")]),
    "f32 of bf16": (schedule("bf16-bf16-f32", BY_K, 64, 32), [EDGES]),
    "bytes": (schedule("s8-s8-s32", BY_K, 128, 32, 2), [EDGES, (64, 33, 300, 2, "b")]),
    "bytes without a sign": (schedule("u8-s8-s32", BY_K, 64, 16), [(60, 20, 150, 1, "")]),
    "swapped bytes": (schedule("s8-s8-s32", BY_K, 16, 64, swap=True), [(9, 70, 150, 1, "")]),
}
LAID = {
    "B by rows": schedule("bf16", ROWS, 64, 32), "A by columns": schedule("f16", ("col", "col", "row"), 128, 32, 2),
    "both": schedule("bf16", BY_ROW, 64, 128, 2, pingpong=True), "swapped": schedule("bf16", ROWS, 16, 128, 2, swap=True),
    "A by columns, swapped": schedule("bf16", BY_ROW, 8, 64, swap=True),
    "clusters": schedule("bf16", ROWS, 64, 128, cluster=2), "C by columns": schedule("bf16", C_BY_COLUMNS, 64, 32),
    "C by columns, swapped": schedule("bf16", C_BY_COLUMNS, 8, 64, swap=True),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    s, sizes = VARIANTS[name]
    check(s, BY_K, sizes)


@pytest.mark.parametrize("name", LAID)
def test_layouts(name):
    s = LAID[name]
    a, b = s.a, s.b
    check(s, (a, b, "col" if s.c == "any" else "row"), [(9 if s.swap else 130, 140, 100, 2, "b")])


EPILOGUES = epilogues()


@pytest.mark.parametrize(("name", "way"), [("plain", "sent"), ("many", "sent"), ("places", "sent swapped"), ("many", "not"), ("plain", "slices")])
def test_products_end_in_expressions(name, way):
    fused = EPILOGUES[name]
    more = {"split": 2} if way == "slices" else {"swap": True} if "swapped" in way else {}
    s = schedule("bf16", BY_K, *((8, 64) if "swap" in more else (64, 32)), fused=str(fused), **more)
    s = s if "sent" in way else replace(s, vectors=(8, 8, 2))
    assert staged(s) == ("sent" in way)
    kernels = kernels_of(s, HOPPER)
    codes = compiled(kernels, "cuda")
    vectors = (8, 8, 8)
    for i, (*size, batch) in enumerate([(8, 80, 72, 2), (72, 40, 136, 1)][: 1 if "swap" in more else 2]):
        f = fused_case(posed("bf16", BY_K, size, batch, fused=str(fused)), fused, vectors, i)
        f.check(run(s, kernels, codes, "cuda", f.case, (i,)), (f.case.problem, s))
