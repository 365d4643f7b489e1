"""Nodes for threads of a device have a meaning: kernels of block programs on NumPy's arrays, without a compiler."""

from __future__ import annotations

import fused_cases
import numpy as np
import pytest
from fused_cases import by_rows, columns, every_type, rows_case
from rows_lowered import lower_grid_columns, lower_grid_rows
from test_grid_rows import down

from portmm.ir import thread_interpreter
from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import If, Move
from portmm.ir.thread_interpreter import run_grid
from portmm.ir.thread_nodes import Barrier, Shared
from portmm.schedule.rows import rows_schedule
from portmm.spec.epilogue import PRODUCT
from portmm.target.target import load_isa

ISA = load_isa("simt")


def interpreted(kernels, f, **numbers):
    """C and the operands as threads leave them."""
    k, flats = f.case, [x.flat.copy() for x in f.case.operands]
    arrays = {f"x{i}_all": (x, k.operands[i].offset) for i, x in enumerate(flats)}
    arrays["work"] = np.full(4096, np.nan, np.float32), 0
    numbers |= k.fields | {f"number_{i}": float(x) for i, x in enumerate(k.numbers)}
    for i, x in enumerate(k.operands):
        numbers |= {f"x{i}_{axis}": s for axis, s in zip(PRODUCT, x.steps, strict=True)}
    for kernel in kernels:
        run_grid(kernel, numbers, arrays)
    return [k.c.flat, *flats]


@pytest.mark.parametrize("make", [by_rows, every_type], ids=lambda x: x.__name__)
@pytest.mark.parametrize("form", [(16, 16), (32, 8, 4), (64, 32, 2), (16, 16, 8, 4), (64, 64, 1, 1, True)], ids=str)
def test_rows(make, form):
    fused = make()
    f = rows_case(fused, (3, 16 if len(form) > 2 else 19), 2, 1)
    f.check(interpreted([lower_grid_rows(ISA, str(fused), rows_schedule(*form))], f), form)


@pytest.mark.parametrize("slices", [0, 3])
def test_columns(slices, monkeypatch):
    fused = columns()
    monkeypatch.setattr(fused_cases, "meaning", lambda *_: (np.float64(0), np.float64(np.inf)))
    f = rows_case(fused, (7, 21), 2, 1)
    found = interpreted(lower_grid_columns(ISA, str(fused), 16, sliced=slices > 0), f, slices=slices)
    f.check(found, "columns")
    for (to, dtype, *_), want in zip(f.results, down(fused, f), strict=True):
        got = found[1 + to][f.written[to].places()].astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2e-3 if dtype == "f16" else 1e-4, atol=2e-3)


def kernel(*body):
    """A block of four threads that share four numbers."""
    shared = (Shared("all", 4, "f32"), *body)
    real = ISA.vector("f32", 1)
    return GridKernel("k", ISA, real, (Argument("to", "pointer", "f32"),), 4, (const(1), const(1)), shared)


def test_barriers(monkeypatch):
    out, me = np.full(4, np.nan, np.float32), var("thread")
    move = Move(Ptr("to", me), Ptr("all", (me + 1) % 4))
    run_grid(kernel(Move(Ptr("all", me), None), Barrier(), move), {}, {"to": (out, 0)})
    assert not out.any()
    with pytest.raises(IndexError, match="of 4 elements"):
        run_grid(kernel(If(me.eq(3), (Move(Ptr("to", me + 1), None),)), Barrier()), {}, {"to": (out, 0)})
    monkeypatch.setattr(thread_interpreter, "PATIENCE", 0.5)
    with pytest.raises(RuntimeError, match="barrier"):
        run_grid(kernel(If(me.eq(3), (Barrier(),))), {}, {"to": (out, 0)})
