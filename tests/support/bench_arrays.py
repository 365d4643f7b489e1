"""Where bench/gpu.py keeps its arrays in tests: CuPy's in the host's memory, or PyTorch's, with a clock of the host.

Kernels are launched as on a GPU, and run through the shim.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import numpy as np

from portmm.arrays import interop, operand
from portmm.arrays.numpy_arrays import numpy_of


class Emulated:
    """As `gpu_arrays.Torch`, of `emulated_cuda`."""

    name, xp = "cuda", np

    def __init__(self, cupy):
        self.cupy = cupy

    def array(self, x, dtype):
        return self.cupy.array(np.asarray(x).astype(numpy_of(dtype)))

    def random(self, shape, dtype, seed):
        rng = np.random.default_rng(seed)
        if dtype == "s8":
            return self.array(rng.integers(-127, 128, shape, dtype=np.int8), dtype)
        return self.array(rng.standard_normal(shape, dtype=np.float32), dtype)

    def empty(self, shape, dtype):
        return self.cupy.empty(shape, numpy_of(dtype))

    def move(self, x, to):
        to.host[...] = x.host

    def host(self, x):
        return x.host.astype(np.float32)

    def copy(self, x):
        return self.cupy.array(x.host)

    def wide(self, x):
        return x.host.astype(np.float64)

    def wait(self):
        pass

    def pointer(self, x):
        return x.data.ptr

    def stream(self):
        return 0

    def seconds(self, calls):
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)

    def replayed(self, calls):
        return lambda: self.seconds(calls)

    def free(self):
        pass


class HostPeers:
    """NumPy's products in place of a library's."""

    def __init__(self, on):
        self.on, self.missing, self.notes = on, {}, {}

    def versions(self):
        return {"numpy's products": np.__version__}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda _case, _sets: {"host": lambda x: self.on.wide(x[0]).sum()}


class _Event:
    def __init__(self, **_):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class _Graph:
    def replay(self):
        pass


def tensors_there(monkeypatch):
    """PyTorch's tensors in the host's memory are taken for ones on a GPU, which has a clock and graphs."""
    import torch

    def adopted(x):
        size = x.element_size()
        name = operand.type_name(str(x.dtype).removeprefix("torch."), "a tensor")
        strides = tuple(s * size for s in x.stride())
        return operand.Operand(x, "cuda", ("cuda", 0), x.data_ptr(), tuple(x.shape), strides, name, 100, readonly=False)

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _x: True), raising=False)
    monkeypatch.setitem(interop._READERS, "torch", adopted)
    for name, value in {
        "Event": _Event, "_sleep": lambda _cycles: None, "synchronize": lambda: None, "CUDAGraph": _Graph,
        "graph": lambda _graph: contextlib.nullcontext(), "empty_cache": lambda: None,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=100),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
