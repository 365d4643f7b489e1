"""Products of rows in groups on devices: OpenCL's on a CPU, and CUDA's, emulated."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulated_cuda import install
from opencl_cpu import opencl_device

import portmm as pm
from portmm import memory
from portmm.errors import ScheduleError

BF16 = np.dtype(ml_dtypes.bfloat16)


class OpenCl:
    def __init__(self):
        opencl_device()
        import pyopencl.array

        self.module, self.queue = pyopencl.array, opencl_device()[1]

    def array(self, x):
        return self.module.to_device(self.queue, np.ascontiguousarray(x))


@pytest.fixture(params=["opencl", "cuda"])
def on(request, monkeypatch):
    """A device."""
    memory.forget_all()
    yield OpenCl() if request.param == "opencl" else install(monkeypatch)
    memory.forget_all()


def values(shape, dtype, seed=0):
    """Small whole numbers, whose sums are exact in every type."""
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(-4, 5, shape).astype(dtype)


def looped(a, b, ends):
    """Group after group; what no group has is zeros. Ends are taken as kernels take them."""
    c = np.zeros((a.shape[0], b.shape[2]))
    begin = 0
    for g, given in enumerate(ends):
        end = min(max(int(given), begin), a.shape[0])
        c[begin:end] = a[begin:end].astype(float) @ b[g].astype(float)
        begin = end
    return c


def groups_of(ends, groups):
    """The group of each row; the last one of rows that have none."""
    return lambda m: np.minimum(np.searchsorted(np.maximum.accumulate(ends), np.arange(m), side="right"), groups - 1)


CASES = (
    (70, 24, 40, (10, 10, 47, 70)), (70, 24, 40, (0, 33, 33, 60)), (5, 9, 7, (2, 3, 5)), (200, 33, 65, (1, 200)),
    (64, 48, 32, (64,)), (3, 8, 0, (1, 2)), (40, 16, 16, (0, 0, 0)), (130, 8, 24, tuple(range(5, 131, 5))),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.int8], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_are_those_of_a_loop(on, case, dtype):
    m, n, k, ends = case
    a, b, ends = values((m, k), dtype), values((len(ends), k, n), dtype, 1), np.array(ends, np.int32)
    found = pm.grouped_matmul(on.array(a), on.array(b), on.array(ends), dtype=None if dtype == np.int8 else np.float32)
    np.testing.assert_array_equal(found.get(), looped(a, b, ends))
