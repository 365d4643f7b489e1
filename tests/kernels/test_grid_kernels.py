"""Kernels of devices compute what they should, in both of their languages, on machines without a GPU."""

from __future__ import annotations

from dataclasses import replace

import grid_cases
import pytest
from fused_cases import epilogues
from grid_cases import MACHINE, check_run, fused_case, kernels_of, rounded

from portmm.schedule.candidates import candidates
from portmm.schedule.text import varied
from portmm.spec.problem import Problem

ROWS, BY_K, BY_ROW, TURNED = ("row", "row", "row"), ("row", "col", "row"), ("col", "row", "row"), ("col", "col", "row")
ANY, C_BY_COLUMNS, ANY_B = ("any", "any", "row"), ("row", "row", "col"), ("col", "any", "col")
PRODUCTS = (
    ("f32", ROWS, (4, 4, 4)), ("f32", BY_K, (2, 1, 2)), ("f32", BY_ROW, (4, 2, 1)), ("f32", TURNED, (1, 4, 4)),
    ("f32", ANY, (1, 1, 1)), ("f32", C_BY_COLUMNS, (1, 2, 1)), ("f32", ANY_B, (2, 1, 1)),
    ("f64", ROWS, (1, 1, 2)), ("f64", ANY_B, (1, 1, 1)),
    ("f16", ROWS, (8, 8, 4)), ("f16", TURNED, (4, 8, 2)), ("f16-f16-f32", BY_K, (1, 2, 1)), ("f16", ANY, (1, 1, 8)),
    ("bf16", BY_ROW, (8, 4, 4)), ("bf16-bf16-f32", BY_K, (8, 8, 4)), ("bf16", C_BY_COLUMNS, (2, 1, 1)),
    ("f32-bf16-f32", ROWS, (4, 8, 4)), ("f32-bf16-f32", TURNED, (1, 2, 1)),
    ("f32-s8-f32", ROWS, (2, 4, 4)), ("f32-s8-f32", BY_K, (4, 16, 2)), ("bf16-s8-bf16", TURNED, (2, 8, 4)),
    ("s8-s8-s32", ROWS, (16, 4, 4)), ("s8-s8-s32", BY_K, (8, 16, 1)), ("s8-s8-s32", BY_ROW, (4, 4, 4)),
    ("s8-s8-s32", TURNED, (16, 4, 2)), ("s8-s8-s32", ANY, (1, 1, 1)), ("s8-s8-s32", C_BY_COLUMNS, (2, 2, 1)),
    ("u8-s8-s32", ROWS, (4, 1, 4)), ("u8-s8-s32", BY_K, (16, 4, 2)), ("u8-s8-s32", ANY_B, (8, 1, 1)),
)  # fmt: skip
"""Types, layouts, and the elements of A, B and C that lie aligned."""
SIZES = (
    (65, 33, 131, 1, ""), (33, 65, 17, 2, "b"), (3, 17, 33, 3, ""), (1, 1, 1, 1, ""), (17, 3, 1, 2, "a"),
    (5, 3, 0, 2, ""),
)  # fmt: skip
"""m, n, k, the items of a batch, and what is the same for all of them."""
LARGEST = 300
"""Statements of an unrolled step, beyond which compilers take long."""


def posed(dtype, layouts, vectors, size=(65, 33, 131), batch=1, **more):
    a, b, c = layouts
    return Problem(*rounded(size, layouts, vectors), dtype, batch, a, b, c, **more)


def several(dtype, layouts, vectors, turn):
    """Schedules of several kinds, other tiles with every turn."""
    found = candidates(posed(dtype, layouts, vectors), MACHINE, vectors)
    direct = [s for s in found if s.program == "direct"]
    through = [s for s in found if s.program == "simt" and (s.mr * s.nr + s.mr + s.nr) * s.block.k <= LARGEST]
    one, other = (direct[at % len(direct)] for at in (3 * turn, 3 * turn + 1))
    if not through:
        return [one, other]
    first, second = (varied(through[at % len(through)], split=1) for at in (5 * turn, 7 * turn + 3))
    if turn % 3 == 2:
        first = varied(first, stages=1, copies=False)
    return [first, one if turn % 2 else varied(second, split=2 + turn % 4)]


def check(s, language, layouts, dtype, what=SIZES):
    """A schedule's kernels on problems of several sizes."""
    kernels = kernels_of(s)
    for i, (*size, batch, shared) in enumerate(what):
        k = grid_cases.case(posed(dtype, layouts, s.vectors, size, batch), s.vectors, i, shared)
        check_run(s, kernels, language, k, (k.problem, s))


@pytest.mark.parametrize("language", ["cuda", "opencl"])
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda x: "{}-{}".format(x[0], "x".join(map(str, x[2]))))
def test_products(product, language):
    dtype, layouts, _ = product
    for s in several(*product, PRODUCTS.index(product)):
        if language == "opencl":
            s = varied(s, copies=False, stages=min(s.stages, 2))  # noqa: PLW2901
        check(s, language, layouts, dtype)


@pytest.mark.parametrize(
    ("layouts", "stages", "language"),
    [*((x, i, "cuda") for x in (ROWS, BY_K, TURNED) for i in (2, 3, 4)), (ROWS, 3, "opencl")],
)
def test_asynchronous_copies(layouts, stages, language):
    """OpenCL copies at once."""
    vectors = ((4, 4, 4), (2, 1, 2), (4, 1, 4))[stages - 2]
    found = [s for s in candidates(posed("f32", layouts, vectors), MACHINE, vectors) if s.a.asynchronous]
    s = varied(found[(stages + len(layouts[0])) % len(found)], stages=stages, split=stages - 1, joined=False)
    check(s, language, layouts, "f32", SIZES[:4])


@pytest.mark.parametrize("language", ["cuda", "opencl"])
def test_the_largest_tile_of_a_thread(language):
    found = candidates(posed("f32", ROWS, (4, 4, 4)), MACHINE, (4, 4, 4))
    s = next(s for s in found if (s.mr, s.nr) == (8, 8) and not s.a.asynchronous)
    check(s, language, ROWS, "f32", SIZES[:3])


@pytest.mark.parametrize("split", [1, 2, 4, 32])
def test_slices_of_k_that_are_empty(split):
    """As many slices as there are tiles of k, and more."""
    found = candidates(posed("f16", BY_K, (2, 2, 4)), MACHINE, (2, 2, 4))
    s = varied(next(s for s in found if s.program == "simt" and s.mr == 1), split=split)
    check(s, "cuda", BY_K, "f16", [(5, 9, k, 2, "") for k in (1, 15, 33, 64)])


EPILOGUES = epilogues()
ENDINGS = (
    ("f32", ROWS, (4, 4, 4), "whole"), ("f32", TURNED, (1, 1, 2), "split"), ("f32", C_BY_COLUMNS, (4, 1, 1), "direct"),
    ("f16", BY_K, (8, 8, 4), "split"), ("bf16", ROWS, (2, 8, 2), "whole"), ("f32-s8-f32", BY_ROW, (4, 4, 1), "whole"),
)  # fmt: skip


@pytest.mark.parametrize("language", ["cuda", "opencl"])
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda x: f"{x[0]}-{x[3]}")
def test_products_end_in_expressions(ending, language):
    dtype, layouts, vectors, kind = ending
    at = ENDINGS.index(ending)
    for name in ("plain", ("many", "places")[at % 2]):
        fused = EPILOGUES[name]
        p = posed(dtype, layouts, vectors, fused=str(fused))
        program = "direct" if kind == "direct" else "simt"
        ways = [s for s in candidates(p, MACHINE, vectors) if s.program == program and s.mr * s.nr <= 8]
        s = varied(
            ways[5 * at % len(ways)], split=3 if kind == "split" else 1, copies=False, stages=min(ways[0].stages, 2)
        )
        kernels = kernels_of(s)
        for i, (*size, batch) in enumerate([(33, 19, 37, 2), (1, 1, 1, 1), (4, 8, 70, 3)]):
            f = fused_case(replace(posed(dtype, layouts, s.vectors, size, batch), fused=p.fused), fused, s.vectors, i)
            check_run(s, kernels, language, f, (f.case.problem, s))
