"""Operands of epilogues that warpgroups copy through shared memory, emulated, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from emulated_cuda import install

import portmm as pm
from portmm.schedule import gpu_cost
from portmm.util import memo

erfc = np.frompyfunc(math.erfc, 1, 1)
BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


@pytest.fixture(params=[True, False], ids=["in turns", "together"])
def cupy(monkeypatch, request):
    """A device on which warpgroups compute every product, in turns or together."""
    real = gpu_cost.cost

    def cost(p, s, atom, target):
        wanted = s.program == "wgmma" and not s.atom.swap and s.parallel.pingpong == request.param
        found = real(p, s, atom, target)
        return found if wanted else replace(found, seconds=found.seconds * 1e6)

    monkeypatch.setattr(gpu_cost, "cost", cost)
    memo.forget_all()
    yield install(monkeypatch)
    memo.forget_all()


# Sizes, the type, columns before the first array's own, and columns behind those of both.
CASES = [
    ((128, 128, 64), BF16, 0, 0),
    ((130, 136, 96), F16, 0, 0),
    ((200, 264, 64), BF16, 1, 9),  # addresses and rows that are no multiples of 16 bytes
    ((129, 200, 64), BF16, 8, 8),
    ((70, 130, 64), F16, 0, 3),
]


@pytest.mark.thin(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_arrays_that_are_added(cupy, case):
    (m, n, k), dtype, before, behind = case
    rng = np.random.default_rng(m)
    a, b = (rng.standard_normal((x, k)).astype(dtype) for x in (m, n))
    d, e = (rng.standard_normal((m, n + behind)).astype(dtype) for _ in range(2))
    bias, scales = rng.standard_normal(n).astype(dtype), rng.standard_normal(m).astype(np.float32)
    there = [cupy.array(x) for x in (d, e, bias, scales)]
    first, second = there[0][:, before : before + n], there[1][:, :n]

    def end(acc, i):
        return pm.fast_gelu((acc + first[i.m, i.n]) * there[3][i.m] + second[i.m, i.n] + there[2][i.n])

    got = pm.matmul(cupy.array(a), cupy.array(b).T, epilogue=end).get().astype(np.float64)
    assert "wgmma" in cupy.launches[-1][0]
    wide = [x.astype(np.float64) for x in (a, b, d, e, bias, scales)]
    x = (wide[0] @ wide[1].T + wide[2][:, before : before + n]) * wide[5][:, None] + wide[3][:, :n] + wide[4]
    want = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    eps = 2.0**-8 if dtype == BF16 else 2.0**-11
    assert np.all(abs(got - want) <= 1.5 * eps * abs(want) + 2e-3)


@pytest.mark.thin(2)
@pytest.mark.parametrize("arrays", [0, 1, 3])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_elements_out_of_bounds_are_computed_and_not_stored(cupy, arrays, dtype):
    """Biases of two types, and arrays of which two come in panels; columns that fill no tile, and several tiles."""
    m, n, k, batch = 200, 328, 64, 2
    rng = np.random.default_rng(arrays)
    a, b = rng.standard_normal((batch, m, k)).astype(dtype), rng.standard_normal((batch, k, n)).astype(dtype)
    wide, narrow = rng.standard_normal(n).astype(np.float32), rng.standard_normal((batch, n)).astype(dtype)
    whole = [rng.standard_normal((m, n)).astype(dtype) for _ in range(arrays)]
    first, second, *there = (cupy.array(x) for x in (wide, narrow, *whole))

    def end(acc, i):
        total = acc + first[i.n] * second[i.b, i.n]
        for x in there:
            total = total + x[i.m, i.n]
        return pm.gelu(total)

    got = pm.matmul(cupy.array(a), cupy.array(b), epilogue=end).get().astype(np.float64)
    assert "wgmma" in cupy.launches[-1][0]
    x = a.astype(np.float64) @ b.astype(np.float64) + (wide * narrow.astype(np.float64))[:, None]
    x += sum(y.astype(np.float64) for y in whole)
    want = 0.5 * x * erfc(-x * np.sqrt(0.5)).astype(np.float64)
    eps = 2.0**-8 if dtype == BF16 else 2.0**-11
    assert np.all(abs(got - want) <= 1.5 * eps * abs(want) + 2e-3)
