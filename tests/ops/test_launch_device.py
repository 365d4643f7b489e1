"""Kernels of somebody's own, on arrays of devices as they lie."""

from __future__ import annotations

import numpy as np
import pytest
from machines import HERE, small

import portmm as pm
from portmm.codegen.lower import lower
from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, ceil_div, const, var
from portmm.ir.nodes import For, If, Let, Mac, Move, Scratch
from portmm.ir.thread_nodes import Clear
from portmm.schedule.candidates import candidates
from portmm.spec.problem import Problem
from portmm.target.target import load_isa


def product(extra=()):
    """C = A B, an element of it by each thread."""
    isa = load_isa("simt")
    steps = [f"{x}_{y}" for x, axes in (("a", "mk"), ("b", "kn"), ("c", "mn")) for y in (*axes, "batch")]
    pointers = [Argument("a", "pointer", "f32", readonly=True), Argument("b", "pointer", "f32", readonly=True)]
    given = [Argument(x, "int") for x in "mnk"] + [*pointers, Argument("c", "pointer", "f32")]
    row, column, item = var("row"), var("column"), var("item")
    a = Ptr("a", item * var("a_batch") + row * var("a_m") + var("p") * var("a_k"))
    b = Ptr("b", item * var("b_batch") + var("p") * var("b_k") + column * var("b_n"))
    step = (Move(Ptr("x"), a), Move(Ptr("y"), b), Mac(Ptr("sum"), Ptr("x"), Ptr("y")))
    total = (
        Clear("sum", 1),
        For("p", const(0), var("k"), const(1), step),
        Move(Ptr("c", item * var("c_batch") + row * var("c_m") + column * var("c_n")), Ptr("sum")),
    )
    each = ceil_div(var("n"), 32)
    body = (
        *(Scratch(x, 1, "f32") for x in ("sum", "x", "y")),
        Let("item", var("slice")),
        Let("row", var("block") // each),
        Let("column", var("block") % each * 32 + var("thread")),
        If(column.lt(var("n")), total),
    )
    arguments = (*given, *(Argument(x, "long") for x in steps), Argument("batch", "int"), *extra)
    grid = (var("m") * each, var("batch"))
    return GridKernel("by_elements", isa, isa.atom("f32"), arguments, 32, grid, body)


def numbers(*shape):
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(np.float32)


def test_a_kernel_runs_on_arrays(on):
    a, b = numbers(5, 20), numbers(40, 11)
    c = on.array(np.zeros((5, 40), np.float32))
    assert pm.launch(product(), on.array(a)[:, 3:14], on.array(b).T, c) is c
    np.testing.assert_allclose(c.get(), a[:, 3:14] @ b.T, rtol=1e-4, atol=1e-5)
    a, b = numbers(3, 5, 7), numbers(3, 7, 9)
    c = pm.launch(product(), on.array(a), on.array(b), on.array(np.zeros((3, 5, 9), np.float32)))
    np.testing.assert_allclose(c.get(), a @ b, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused(on):
    host = numbers(4, 4)
    x = on.array(host)
    with pytest.raises(ValueError, match="do not fit"):
        pm.launch(product(), x, x[:3], x)
    with pytest.raises(TypeError, match="a is of f16; this kernel takes f32"):
        pm.launch(product(), on.array(host.astype(np.float16)), x, x)
    with pytest.raises(TypeError, match="has a parameter 'x0'; there are a, b, c, m, n"):
        pm.launch(product((Argument("x0", "int"),)), x, x, x)
    with pytest.raises(TypeError, match="c is a ndarray; by_elements is for arrays on a device"):
        pm.launch(product(), x, x, host)
    with pytest.raises(TypeError, match="a is a ndarray; by_elements is for arrays on a device"):
        pm.launch(product(), host, host, host)
    s = next(s for s in candidates(Problem(4, 4, 4), small(HERE[0])) if s.program == "gemm" and not s.static)
    with pytest.raises(TypeError, match="a is on a device; this kernel is for arrays in the host's memory"):
        pm.launch(lower(s, load_isa(HERE[0])), x, host, host)
