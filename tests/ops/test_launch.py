"""Kernels of somebody's own, on arrays as they lie."""

from __future__ import annotations

import machines
import numpy as np
import pytest
from machines import HERE

import portmm as pm
from portmm.codegen.lower import lower
from portmm.errors import TargetError
from portmm.schedule.candidates import candidates
from portmm.spec.problem import Problem
from portmm.target.target import load_isa

pytestmark = pytest.mark.calls

QUICKLY = "fast"

RNG = np.random.default_rng(0)


def kernel_for(isa, shape, **layouts):
    p = Problem(*shape, **layouts)
    s = next(s for s in candidates(p, machines.small(isa)) if s.program == "gemm" and not s.static)
    return lower(s, load_isa(isa))


@pytest.mark.parametrize("isa", HERE)
def test_a_kernel_runs_on_arrays(isa):
    if not load_isa(isa).atom("f32"):
        pytest.skip("multiplies other types")
    for threads in (1, 2):
        with pm.config(threads=threads):
            wide = RNG.random((33, 80), np.float32)
            a, b, c = wide[:, 3:60], RNG.random((57, 70), np.float32), np.full((33, 70), np.nan, np.float32)
            assert pm.launch(kernel_for(isa, (33, 70, 57)), a, b, c) is c
            np.testing.assert_allclose(c, a @ b, rtol=1e-5)
            many = RNG.random((3, 20, 57), np.float32), RNG.random((3, 57, 70), np.float32)
            got = pm.launch(kernel_for(isa, (20, 70, 57), batch=3), *many, np.empty((3, 20, 70), np.float32))
            np.testing.assert_allclose(got, many[0] @ many[1], rtol=1e-5)


def test_what_does_not_fit_is_refused():
    kernel = kernel_for("scalar", (4, 6, 5))
    a, b, c = np.ones((4, 5), np.float32), np.ones((5, 6), np.float32), np.empty((4, 6), np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        pm.launch(kernel, a, b, c.T)
    with pytest.raises(TypeError, match="matrices of float32"):
        pm.launch(kernel, a.astype(np.float64), b, c)
    with pytest.raises(TypeError, match="a list"):
        pm.launch(kernel, a, b, [c])
    with pytest.raises(ValueError, match="copy it first"):
        pm.launch(kernel, a, b.astype(">f4"), c)
    with pytest.raises(TypeError, match="masked array"):
        pm.launch(kernel, np.ma.masked_array(a), b, c)
    c.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pm.launch(kernel, a, b, c)
    foreign = "neon" if "neon" not in HERE else "avx2"
    with pytest.raises(TargetError, match="lacks"):
        pm.launch(kernel_for(foreign, (4, 6, 5)), a, b, a)
