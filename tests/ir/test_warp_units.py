"""Matrix units of a warp have a meaning by their fragments' rows: kernels on NumPy's arrays, without a shim in C++."""

from __future__ import annotations

from dataclasses import replace

import grid_cases
import numpy as np
import pytest
from test_matrix_units import machine
from test_mma import BY_K, BY_ROW, MATRIX, ROWS, TURING, TURNED, posed
from test_wgmma import HOPPER, schedule
from test_wgmma import posed as hopper_problem

from portmm.codegen.lower import lower_grid
from portmm.ir import warp_values
from portmm.ir.grid_kernel import GridKernel
from portmm.ir.index import Ptr, const
from portmm.ir.nodes import Scratch
from portmm.ir.thread_interpreter import run_grid
from portmm.ir.thread_nodes import Do
from portmm.schedule.candidates import candidates
from portmm.schedule.text import varied
from portmm.target.target import load_isa

SIZE = (17, 9, 24)
CDNA, RDNA = (machine(load_isa(x), "opencl") for x in ("mfma_cdna3", "wmma_rdna3"))
PRODUCTS = (
    (MATRIX, "f16", ROWS, (8, 8, 8)), (MATRIX, "bf16-bf16-f32", TURNED, (8, 8, 4)),
    (MATRIX, "s8-s8-s32", BY_K, (16, 16, 4)), (TURING, "f16", BY_ROW, (8, 8, 4)),
    (TURING, "u8-s8-s32", BY_K, (16, 4, 2)),
    (CDNA, "bf16", BY_K, (8, 8, 8)), (CDNA, "f32", ROWS, (4, 4, 4)), (RDNA, "f16", ROWS, (8, 8, 4)),
)  # fmt: skip


def least(target, dtype, layouts, vectors):
    """Problem and schedules with the fewest threads and sums, in either order of the operands."""
    p = posed(dtype, layouts, vectors, SIZE)
    found = [s for s in candidates(p, target, vectors) if s.program == "mma" and s.parallel.split == 1]
    for swap in (False, True):
        some = [s for s in found if s.atom.swap == swap]
        if some:
            yield p, min(some, key=lambda s: (s.threads * s.mr * s.nr, s.block.k))


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda x: f"{x[0].isas[0].name}-{x[1]}")
def test_products_are_those_of_fragments(product):
    target, _, _, vectors = product
    every = list(least(*product))
    assert every
    for i, (p, s) in enumerate(every):
        k = grid_cases.case(p, vectors, i)
        c = k.fresh()
        arrays = {"a": (k.a, k.a_offset), "b": (k.b, k.b_offset), "c": (c, k.c.offset)}
        for kernel in lower_grid(s, target.isa(s.isa)):
            run_grid(kernel, k.fields, arrays)
        k.check(c, s)


WARPGROUPS = {
    "one": (schedule("bf16-bf16-f32", BY_K, 64, 32), BY_K, (70, 40, 100)),
    "two": (schedule("s8-s8-s32", BY_K, 128, 16, 2), BY_K, (130, 20, 150)),
    "rows": (schedule("f16", BY_ROW, 64, 24, pingpong=True), BY_ROW, (64, 24, 72)),
    "swapped": (varied(schedule("bf16", ROWS, 16, 64, swap=True), vectors=(8, 8, 2)), ROWS, (9, 72, 70)),
}


def test_copies_round_to_tf32():
    s = varied(schedule("f32", BY_K, 64, 16), vectors=(4, 4, 2))
    k = grid_cases.case(hopper_problem("f32", BY_K, (60, 12, 36), tf32=True), s.vectors)
    k.a[:], k.b[:] = 1 + 2.0**-11 + 2.0**-20, 1
    c = k.fresh()
    arrays = {"a": (k.a, k.a_offset), "b": (k.b, k.b_offset), "c": (c, k.c.offset)}
    run_grid(grid_cases.kernels_of(s, HOPPER)[0], k.fields, arrays)
    replace(k, want=np.full((1, 60, 12), 36 * (1 + 2.0**-10))).check(c, s)


@pytest.mark.parametrize("name", WARPGROUPS)
def test_products_of_warpgroups(name):
    s, layouts, size = WARPGROUPS[name]
    k = grid_cases.case(posed(s.dtype, layouts, s.vectors, size), s.vectors)
    c = k.fresh()
    arrays = {"a": (k.a, k.a_offset), "b": (k.b, k.b_offset), "c": (c, k.c.offset)}
    for kernel in grid_cases.kernels_of(s, HOPPER):
        run_grid(kernel, k.fields, arrays)
    k.check(c, s)


def test_copies_of_an_element_are_the_same():
    fragment = load_isa("wmma_rdna3").atoms[0].a_fragment
    held = [np.zeros(fragment.elements, np.float16) for _ in range(fragment.lanes)]
    assert fragment.copies > 1
    assert not warp_values.matrix(fragment, held).any()
    held[0][0] = 1
    with pytest.raises(ValueError, match="different values"):
        warp_values.matrix(fragment, held)


def test_other_primitives_are_named():
    isa = MATRIX.isas[0]
    body = (Scratch("x", 1, "b32"), Do("codes_to_f16", (Ptr("x"), Ptr("x"))))
    with pytest.raises(NotImplementedError, match="codes_to_f16 has no meaning"):
        run_grid(GridKernel("k", isa, isa.atoms[0], (), 1, (const(1), const(1)), body), {}, {})
