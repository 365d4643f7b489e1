"""Where benchmarks of devices keep their arrays: PyTorch on a CUDA device, or PyOpenCL.

Each has arrays by portmm's names of types, clocks, and float64 for checks. What is asked of one
is asked of the other, and of the arrays that tests use in place of a GPU's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from portmm.arrays.numpy_arrays import numpy_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

AHEAD = 2e-3
"""Seconds that a device waits before what is timed, so that the calls are in its queue when it begins."""
REPLAYS = 5
TORCH_NAMES = {
    "f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "s8": "int8", "s32": "int32",
    "u8": "uint8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip


def drawn(shape, dtype, seed):
    """Random values in the host's memory: normal, or all of int8 but -128."""
    rng = np.random.default_rng(seed)
    if dtype == "s8":
        return rng.integers(-127, 128, shape, dtype=np.int8)
    return rng.standard_normal(shape, dtype=np.float32)


class Torch:
    """Arrays of PyTorch; another device than "cuda" only in tests."""

    name = "cuda"

    def __init__(self, where="cuda"):
        import torch

        self.torch = self.xp = torch
        self.where = where
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    def type(self, dtype):
        return getattr(self.torch, TORCH_NAMES[dtype])

    def array(self, x, dtype):
        return self.torch.from_numpy(np.ascontiguousarray(x)).to(self.where).to(self.type(dtype))

    def random(self, shape, dtype, seed):
        """Made on the device: the host would take longer than all that is timed."""
        generator = self.torch.Generator(self.where).manual_seed(seed)
        if dtype == "s8":
            return self.torch.randint(-127, 128, shape, dtype=self.torch.int8, device=self.where, generator=generator)
        wide = "f32" if dtype in ("e4m3", "e5m2") else dtype
        made = self.torch.randn(shape, dtype=self.type(wide), device=self.where, generator=generator)
        return made.to(self.type(dtype))

    def empty(self, shape, dtype):
        return self.torch.empty(shape, dtype=self.type(dtype), device=self.where)

    def copy(self, x):
        return x.clone()

    def move(self, x, to):
        """Copy one array into another."""
        to.copy_(x)

    def host(self, x):
        """The values in the host's memory, in float32."""
        return x.to(self.torch.float32).cpu().numpy()

    def wide(self, x):
        """The values in float64, for checks on the device."""
        return x.to(self.torch.float64)

    def wait(self):
        self.torch.cuda.synchronize()

    def pointer(self, x):
        return x.data_ptr()

    def stream(self):
        return self.torch.cuda.current_stream().cuda_stream

    def seconds(self, calls):
        """Of the device, of each of some calls that are in its queue one behind another."""
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda._sleep(int(AHEAD * 1.5e9))  # noqa: SLF001 - counts cycles
        first.record()
        for call in calls:
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / len(calls)

    def replayed(self, calls):
        """A clock of the calls as one graph, without what the host does for each: it gives seconds of one."""
        graph = self.torch.cuda.CUDAGraph()
        kept = []
        with self.torch.cuda.graph(graph):
            kept.extend(call() for call in calls)
        graph.replay()
        self.wait()

        def clock():
            _ = kept  # results lie in the graph's memory
            return self.seconds([graph.replay] * REPLAYS) / len(calls)

        return clock

    def free(self):
        """Give memory back, between cases."""
        self.torch.cuda.empty_cache()


class OpenCl:
    """Arrays of PyOpenCL on the first device."""

    name, xp = "opencl", np

    def __init__(self):
        from opencl_cpu import announce, opencl_device

        announce()
        self.context, self.queue = opencl_device()
        import pyopencl.array

        self.module = pyopencl.array

    def array(self, x, dtype):
        return self.module.to_device(self.queue, np.ascontiguousarray(x.astype(numpy_of(dtype))))

    def random(self, shape, dtype, seed):
        return self.array(drawn(shape, dtype, seed), dtype)

    def empty(self, shape, dtype):
        return self.module.empty(self.queue, shape, numpy_of(dtype))

    def copy(self, x):
        return x.copy()

    def host(self, x):
        return x.get().astype(np.float32)

    def wide(self, x):
        return x.get().astype(np.float64)

    def wait(self):
        self.queue.finish()

    def seconds(self, calls):
        self.wait()
        start = time.perf_counter()
        for call in calls:
            call()
        self.wait()
        return (time.perf_counter() - start) / len(calls)

    def replayed(self, _calls):
        raise NotImplementedError("OpenCL 1.2 has no graphs")

    def free(self):
        """Buffers are freed with their arrays."""
