"""Substitutes for CuPy, PyTorch and cublasLt without a GPU: they record their calls."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np

from portmm.runtime import cuda_launch

PROPERTIES = {
    "name": b"Fake H100",
    "multiProcessorCount": 132,
    "warpSize": 32,
    "maxThreadsPerBlock": 1024,
    "sharedMemPerBlock": 49152,
    "l2CacheSize": 50 << 20,
    "totalGlobalMem": 80 << 30,
    "clockRate": 1980000,
    "memoryClockRate": 2619000,
    "memoryBusWidth": 5120,
    "major": 9,
    "minor": 0,
}
OPT_IN, REGISTERS = 97, 82
GRANT = 8
SHARED_OF_A_KERNEL = 48 << 10


def strides_of(shape, size):
    return np.empty(shape, f"V{size}").strides


class ndarray:  # noqa: N801 - CuPy's name
    """Of CuPy: `at` is its address."""

    def __init__(self, shape, dtype, at=4096, strides=None, device=0):
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        self.strides = strides if strides is not None else strides_of(self.shape, self.dtype.itemsize)
        self.data, self.device = SimpleNamespace(ptr=at), SimpleNamespace(id=device)


ndarray.__module__ = "cupy"


class FakeCupy(ModuleType):
    """With two devices.

    Attributes:
        log: what was asked for, in order.
        current: the device.
        streams: the current stream of each device.
        addresses: the device that an address is on, 0 by default.
        captured: streams that are being captured.
        formats: a letter of `struct` for each argument of a launched kernel.
    """

    __version__ = "14.0.0"

    def __init__(self):
        super().__init__("cupy")
        self.log, self.current, self.streams, self.addresses, self.granted = [], 0, {0: 0, 1: 0}, {}, {}
        self.captured = set()
        self.count, self.fail, self.kernels, self.formats = 2, None, ("f",), ""
        self.ndarray = ndarray
        runtime = SimpleNamespace(
            cudaDevAttrMaxSharedMemoryPerBlockOptin=OPT_IN,
            cudaDevAttrMaxRegistersPerMultiprocessor=REGISTERS,
            getDeviceCount=lambda: self._fails("getDeviceCount") or self.count,
            getDevice=lambda: self.current,
            getDeviceProperties=lambda _d: dict(PROPERTIES),
            driverGetVersion=lambda: 12090,
            deviceSynchronize=lambda: self.log.append(("wait", self.current)),
            streamIsCapturing=lambda stream: stream in self.captured,
            deviceGetAttribute=lambda a, _d: {OPT_IN: 232448, REGISTERS: 65536}[a],
            pointerGetAttributes=lambda at: SimpleNamespace(device=self.addresses.get(at, 0)),
        )
        driver = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=GRANT,
            funcGetAttribute=lambda _a, f: self.granted.get(f, SHARED_OF_A_KERNEL),
            funcSetAttribute=self._grant,
            launchKernel=self._launch,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            driver=driver,
            function=SimpleNamespace(Module=lambda: _Module(self)),
            Device=self._on,
            Stream=SimpleNamespace(from_external=self._in),
            get_current_stream=lambda device=-1: SimpleNamespace(ptr=self.streams[max(device, 0)]),
        )

    def _fails(self, where):
        if self.fail == where:
            raise RuntimeError("cudaErrorInsufficientDriver")

    def _grant(self, function, attribute, value):
        assert attribute == GRANT
        self._fails("grant")
        self.granted[function] = value
        self.log.append(("grant", function, value))

    def _launch(self, _function, *more):
        """As the driver: 3 extents of a grid, 3 of a block, bytes, a stream, the address of addresses, and no more."""
        *sizes, shared, stream, arguments, extra = more
        assert len(sizes) == 6
        assert not extra
        self._fails("launch")
        words = read_words(arguments, self.formats)
        self.log.append(("launch", self.current, tuple(sizes[:3]), tuple(sizes[3:]), words, shared, stream))

    @contextlib.contextmanager
    def _on(self, device):
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _in(self, stream):
        version, pointer = stream.__cuda_stream__()
        assert version == 0
        before, self.streams[self.current] = self.streams[self.current], pointer
        yield
        self.streams[self.current] = before

    def empty(self, shape, dtype):
        self.log.append(("empty", self.current, self.streams[self.current]))
        return ndarray(shape, dtype, at=1 << 20, device=self.current)

    def from_dlpack(self, x):
        self.log.append(("from_dlpack", x))
        return ndarray((2,), "f4", at=64)


class _Module:
    def __init__(self, cupy):
        self.cupy = cupy

    def load(self, code):
        assert type(code) is bytes
        self.cupy._fails("load")
        self.cupy.log.append(("load", self.cupy.current, code))

    def get_function(self, name):
        if name not in self.cupy.kernels:
            raise RuntimeError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        return _Function(self.cupy)


class _Function:
    def __init__(self, cupy):
        self.cupy, self.ptr = cupy, 77


def read_words(at, formats):
    """The arguments of a launch, whose addresses lie at an address; of a map its bytes."""
    places = (ctypes.c_uint64 * len(formats)).from_address(at)
    sizes = {"Q": 8, "i": 4, "q": 8, "f": 4, "m": 128}
    held = [ctypes.string_at(place, sizes[x]) for place, x in zip(places, formats, strict=True)]
    return tuple([x if f == "m" else struct.unpack(f"<{f}", x)[0] for x, f in zip(held, formats, strict=True)])


# -- PyTorch -----------------------------------------------------------------------------


class Device(NamedTuple):
    """Of PyTorch."""

    type: str
    index: int


class Tensor:
    """Of PyTorch: on a CUDA device unless told otherwise."""

    def __init__(self, shape, dtype, at=8192, strides=None, device=0, *, layout="strided", neg=False, cuda=True):
        self.shape, self.dtype, self.layout, self.is_cuda = tuple(shape), dtype, layout, cuda
        self._at, self._neg, self._size = at, neg, {"torch.float64": 8, "torch.bfloat16": 2}.get(str(dtype), 4)
        self._strides = strides or tuple(s // self._size for s in strides_of(self.shape, self._size))
        self.device, self.requires_grad = Device("cuda" if cuda else "cpu", device), False

    def data_ptr(self):
        return self._at

    def stride(self):
        return self._strides

    def element_size(self):
        return self._size

    def is_neg(self):
        return self._neg


Tensor.__module__ = "torch"


class _Type:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"torch.{self.name}"


class FakeTorch(ModuleType):
    """Its current stream is 100 plus the device."""

    def __init__(self):
        super().__init__("torch")
        self.Tensor, self.strided = Tensor, "strided"
        for name in ("float32", "float64", "bfloat16", "complex64"):
            setattr(self, name, _Type(name))
        self.cuda = SimpleNamespace(
            current_stream=lambda device: SimpleNamespace(cuda_stream=100 + device),
        )

    def empty_strided(self, shape, strides, dtype, device):
        return Tensor(shape, dtype, at=1 << 21, strides=strides, device=device.index)


# -- cublasLt ------------------------------------------------------------------------------


class _LtCall:
    def __init__(self, name, library):
        self.name, self.library, self.argtypes, self.restype = name, library, (), None

    def __call__(self, *given):
        assert self.argtypes == () or len(given) == len(self.argtypes), self.name
        return self.library.called(self.name, given)


class FakeLt:
    """cublasLt's functions: handles are numbers, algorithms are told apart by their first word."""

    def __init__(self):
        self.log, self.next, self.alive, self.asked = [], 100, 0, 0

    def __getattr__(self, name):
        if not name.startswith("cublasLt"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, _LtCall(name, self))

    def called(self, name, given):
        self.log.append((name, given))
        if name == "cublasLtGetVersion":
            return 130100
        if name.endswith("Create"):
            self.next += 1
            self.alive += name != "cublasLtCreate"
            given[0]._obj.value = self.next
        if name.endswith("Destroy"):
            self.alive -= 1
        if name == "cublasLtMatmulAlgoGetHeuristic":
            found, count = given[8], given[9]._obj
            for i in range(4):
                found[i].algorithm.data[0], found[i].state, found[i].workspace = i, int(i == 3), 64 * i
            count.value = 4
        # The first algorithm is proposed, and yet refused.
        return 15 if name == "cublasLtMatmul" and given[12]._obj.data[0] == 0 else 0


def install(monkeypatch, module):
    monkeypatch.setattr(cuda_launch, "extended", lambda: None)  # there may be a driver
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module
