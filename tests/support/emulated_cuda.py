"""CuPy's arrays in the host's memory, and kernels that run through the shim: all of CUDA's way but the GPU."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import cuda_shim
import numpy as np
from cuda_fakes import FakeCupy, read_words

from portmm.build import nvrtc
from portmm.build.nvrtc import Cubin
from portmm.dispatch import machine
from portmm.spec.dtype import BY_NAME
from portmm.util import memo

LETTERS = {"p": "Q", "m": "m", "i": "i", "l": "q", "f": "f"}
"""The shim's letter of an argument -> that of `struct`."""
KINDS = {"m": "map", "i": "int", "q": "long", "f": "float"}


class ndarray:  # noqa: N801 - CuPy's name
    """Of CuPy, `host` being what it holds."""

    def __init__(self, host, stream=0):
        self.host, self.stream = host, stream
        self.dtype, self.shape, self.strides = host.dtype, host.shape, host.strides
        self.data, self.device = SimpleNamespace(ptr=host.__array_interface__["data"][0]), SimpleNamespace(id=0)

    @property
    def ndim(self):
        return self.host.ndim

    def transpose(self, axes):
        return ndarray(self.host.transpose(axes))

    def set(self, x):
        self.host[...] = x

    def get(self):
        return self.host.copy()

    def __getitem__(self, key):
        return ndarray(self.host[key])

    def __setitem__(self, key, value):
        self.host[key] = value.host if isinstance(value, ndarray) else value

    def reshape(self, shape):
        return ndarray(self.host.reshape(shape))

    def view(self, dtype):
        return ndarray(self.host.view(dtype))

    @property
    def T(self):  # noqa: N802 - CuPy's name
        return ndarray(self.host.T)


ndarray.__module__ = "cupy"


def aligned(shape, dtype):
    """An array of poison, aligned as CUDA's allocations are."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    whole = np.full(size + 256, 0xFF, np.uint8)
    start = -whole.__array_interface__["data"][0] % 256
    return whole[start : start + size].view(dtype).reshape(shape)


class EmulatedCupy(FakeCupy):
    """A device whose code is the source of a kernel.

    Attributes:
        launches: name, grid, block and stream of each.
    """

    def __init__(self):
        super().__init__()
        self.launches, self.ndarray, self.loaded = [], ndarray, {}
        self.cuda.function = SimpleNamespace(Module=lambda: _Module(self))

    def _launch(self, function, *more):
        (*sizes, shared, stream, arguments, _), (kernel, cluster) = more, self.loaded[function]
        formats = [LETTERS[x] for x in kernel.library.shim_signature().decode()]
        self.launches.append((kernel.name, tuple(sizes[:2]), tuple(sizes[3:4]), stream))
        given = [_argument(x, f) for x, f in zip(read_words(arguments, formats), formats, strict=True)]
        kernel.launch(tuple(sizes[:3]), sizes[3], given, shared=shared, cluster=cluster)

    def array(self, x):
        made = aligned(x.shape, x.dtype)
        made[...] = x
        return ndarray(made)

    def empty(self, shape, dtype):
        return ndarray(aligned(shape, dtype))


class _Module:
    def __init__(self, cupy):
        self.cupy = cupy

    def load(self, code):
        self.source = code.decode()

    def get_function(self, name):
        found = re.search(r"__cluster_dims__\((\d+), 1, 1\)", self.source)
        return _Function(self.cupy, cuda_shim.compile(self.source, name), int(found[1]) if found else 1)


class _Function:
    def __init__(self, cupy, kernel, cluster):
        self.ptr = len(cupy.loaded) + 1
        cupy.loaded[self.ptr] = kernel, cluster


def _argument(x, letter):
    """An argument in the driver's memory, as the shim takes it."""
    return _pointer(x) if letter == "Q" else (KINDS[letter], x)


def mapped(dtype, address, sizes, strides, box, swizzle, rounds=False, pixels=None):  # noqa: PLR0917 - as the driver's
    """In place of CUDA's driver: a tensor map as the shim has it."""
    if pixels is not None:
        made = cuda_shim.shim_images(BY_NAME[dtype].bytes, address, sizes, strides, box, pixels, swizzle, rounds)
        return np.frombuffer(made, "V128")
    made = cuda_shim.shim_map(BY_NAME[dtype].bytes, address, sizes, strides, box, swizzle, rounds)
    return np.frombuffer(made, "V128")


def _pointer(x):
    """An address, as the shim takes it: as an array of one byte."""
    held = (ctypes.c_char * 1).from_address(int(x)) if x else ctypes.create_string_buffer(1)
    return np.frombuffer(held, np.uint8)


def compiled(source, name, architecture):
    """In place of NVRTC: the source is the code."""
    return Cubin(source.encode(), "", 0, 0, 0, 0.0, False, (0,), architecture, f"{name} {hash(source)}")


def install(monkeypatch):
    """The device, for one test."""
    from cuda_fakes import install as put

    from portmm.runtime import cuda, tensor_map

    monkeypatch.setattr(tensor_map, "tensor_map", mapped)
    monkeypatch.setattr(nvrtc, "compile_cuda", compiled)
    for known in (cuda._cupy, cuda._facts):
        getattr(known, "cache_clear", lambda: None)()
    for known in ("_functions", "_banks"):
        monkeypatch.setattr(cuda, known, {})
    monkeypatch.setattr(machine, "_machines", {})
    memo.forget_all()  # calls of an earlier device
    return put(monkeypatch, EmulatedCupy())
