"""Launches of CUDA kernels whose constant arguments are laid out in memory once.

Owns the memory that the driver reads a launch's arguments from, and the call of the driver, by CuPy's
`driver.launchKernel`: numbers that a call leaves open, and addresses, are written in place, so that a repeated launch
makes no objects.

Kernels that wait for the grid before theirs (`codegen.cuda.waiting`) are launched by `cuLaunchKernelEx`, which CuPy
does not wrap, with an attribute that lets them begin before that grid has ended: CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization". PORTMM_PDL=off launches them as all others.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.errors import DeviceError
from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIBRARY = "libcuda.so.1"
WORD = 8
"""Bytes of the memory of an argument; the driver reads as many as its type has, which is little-endian."""
KINDS = ("pointer", "int", "long", "float", "map")
MOST_MAPS = 256
"""Tensor maps that an argument keeps, by address, before it drops all: allocators return to the same addresses."""
_MASK = (1 << 64) - 1
_LIMITS = {"int": 32, "long": 64}
OVERLAP = "PORTMM_PDL"
"""Variable of the environment: "off" or "0" where no kernel begins before the one before it has ended."""
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, of cuda.h; graphs of captured launches have it from CUDA 12.3.
_SERIALIZATION, _CAPTURED = 6, 12030
_NO_CONTEXT = 201


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint32), ("_", ctypes.c_uint32), ("value", ctypes.c_uint64 * 8))


class _Config(ctypes.Structure):
    """CUlaunchConfig: extents of the grid and of a block, bytes of shared memory, and a stream."""

    _fields_ = (
        ("sizes", ctypes.c_uint32 * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


_overlapping = _Attribute(_SERIALIZATION, 0, (ctypes.c_uint64 * 8)(1))


class _Block(NamedTuple):
    """The arguments of one launch in memory.

    Attributes:
        words: 8 bytes for each argument.
        floats: the same memory.
        places: the address of each argument.
        address: of `places`.
        maps: keep the memory of tensor maps alive until they are replaced.
        config: of a launch that may begin early, else None.
    """

    words: Any
    floats: Any
    places: Any
    address: int
    maps: list[Any]
    config: _Config | None


class PreparedLaunch:
    """A launch of a kernel on its device, with the arguments that a call leaves open by index and name.

    Args:
        function: has the kernel as CuPy's function `call`, its `name` and its `device`, and whether it `waits`.
        grid: blocks along each of up to three dimensions; nothing runs if one is 0.
        block: threads along each.
        arguments: pairs of a kind and a value, as `cuda.launch` takes them; an open map has all but its address.
        left: index and name of the open ones.
        shared: bytes of dynamic shared memory.
        grant: raises the kernel's limit of these on its device, before the first launch.

    Raises:
        ValueError: a kind is unknown.
        OverflowError: an integer does not fit.
    """

    __slots__ = (
        "_arguments", "_extended", "_floats", "_free", "_grant", "_maps", "_numbers", "_pointers", "_where", "function",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 - the parameters of a launch
        self,
        function: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[tuple[str, Any]],
        left: Sequence[tuple[int, str]] = (),
        shared: int = 0,
        grant: Callable[[], None] | None = None,
    ) -> None:
        unknown = [kind for kind, _ in arguments if kind not in KINDS]
        if unknown:
            raise ValueError(f"arguments of kind {unknown[0]!r} are unknown; use one of {', '.join(KINDS)}")
        self.function, self._grant, self._free = function, grant, list[_Block]()
        whole = [(*x, *(1,) * (3 - len(x))) for x in (grid, block)]
        self._where = None if 0 in grid else (*whole[0], *whole[1], shared)
        self._extended = extended() if function.waits else None
        opened = dict(left)
        self._arguments = [(kind, None if i in opened else value) for i, (kind, value) in enumerate(arguments)]
        kinds = [kind for kind, _ in arguments]
        self._pointers = tuple([(i, name) for i, name in left if kinds[i] == "pointer"])
        self._numbers = tuple([(i, name) for i, name in left if kinds[i] in _LIMITS])
        self._floats = tuple([(2 * i, name) for i, name in left if kinds[i] == "float"])
        self._maps = tuple([(i, name, arguments[i][1], dict[int, Any]()) for i, name in left if kinds[i] == "map"])
        self._free.append(self._block())

    def _block(self) -> _Block:
        """Memory for one launch: launches of several threads do not share it."""
        count = max(1, len(self._arguments))
        words = (ctypes.c_uint64 * count)()
        floats = (ctypes.c_float * (2 * count)).from_buffer(words)
        first = ctypes.addressof(words)
        places = (ctypes.c_uint64 * count)(*range(first, first + count * WORD, WORD))
        maps = [None] * count
        for i, (kind, value) in enumerate(self._arguments):
            if kind == "map" and value is not None:
                maps[i], places[i] = value, value.__array_interface__["data"][0]
            elif kind == "float":
                floats[2 * i] = 0.0 if value is None else value
            else:
                words[i] = _checked(kind, value)
        config = None
        if self._extended is not None and self._where is not None:
            sizes = (ctypes.c_uint32 * 7)(*self._where)
            config = _Config(sizes, None, ctypes.addressof(_overlapping), 1)
        return _Block(words, floats, places, ctypes.addressof(places), maps, config)

    def __call__(self, values: dict[str, Any], stream: int) -> None:  # noqa: C901 - calls would take as long as all this
        """Launch asynchronously, with the open arguments by name, on the stream of a handle.

        Raises:
            DeviceError: the driver refused the launch.
        """
        if self._where is None:
            return
        try:
            block = self._free.pop()
        except IndexError:
            block = self._block()
        words, floats, places, _, maps, _ = block
        for i, name in self._pointers:
            words[i] = values[name]
        for i, name in self._numbers:
            words[i] = _checked(self._arguments[i][0], values[name])
        for i, name in self._floats:
            floats[i] = values[name]
        for i, name, map_at, known in self._maps:
            there = values[name]
            kept = known.get(there)
            if kept is None:
                kept = _kept(map_at, there, known)
            maps[i], places[i] = kept
        if (grant := self._grant) is not None:
            self._granted(grant)
        cuda = sys.modules["cupy"].cuda
        function = self.function
        try:
            if cuda.runtime.getDevice() == function.device:
                self._start(cuda, stream, block)
            else:
                self._elsewhere(cuda, stream, block)
        except RuntimeError as error:
            self._again(cuda, stream, block, error)
        self._free.append(block)

    def _start(self, cuda: Any, stream: int, block: _Block) -> None:
        """Launch on the current device; without overlap where the driver refuses that."""
        assert self._where is not None  # noqa: S101 - else nothing is launched
        refused, launch = 0, self._extended  # another thread may set that to None
        if (config := block.config) is not None and launch is not None:
            config.stream = stream
            refused = launch(ctypes.addressof(config), self.function.call.ptr, block.address, None)
            if not refused:
                return
            if refused == _NO_CONTEXT:
                raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT")
        cuda.driver.launchKernel(self.function.call.ptr, *self._where, stream, block.address, 0)
        if refused:
            self._extended = None
            _refused(refused)

    def _elsewhere(self, cuda: Any, stream: int, block: _Block) -> None:
        """Launch on the kernel's device where another one is current."""
        with cuda.Device(self.function.device):
            self._start(cuda, stream, block)

    def _again(self, cuda: Any, stream: int, block: _Block, error: RuntimeError) -> None:
        """Launch again where the thread had no context yet: it is made by CUDA's run time, not by its driver."""
        cause = error
        if "INVALID_CONTEXT" in str(error):
            try:
                with cuda.Device(self.function.device):
                    cuda.runtime.memGetInfo()
                self._elsewhere(cuda, stream, block)
            except RuntimeError as second:
                cause = second
            else:
                return
        assert self._where is not None  # noqa: S101 - as above
        grid, threads, shared = self._where[:3], self._where[3:6], self._where[6]
        raise DeviceError(
            f"CUDA did not launch {self.function.name} with grid {grid}, block {threads} and {shared} bytes of dynamic "
            f"shared memory: {cause}"
        ) from cause

    def _granted(self, grant: Callable[[], None]) -> None:
        cuda = sys.modules["cupy"].cuda
        assert self._where is not None  # noqa: S101 - else nothing is launched
        try:
            with cuda.Device(self.function.device):
                grant()
        except RuntimeError as error:
            raise DeviceError(
                f"CUDA does not give {self.function.name} {self._where[6]} bytes of dynamic shared memory: {error}"
            ) from error
        self._grant = None


@cache
def extended() -> Callable[..., int] | None:
    """The driver's launch with attributes; None where kernels do not overlap: by the environment, or an old driver."""
    if os.environ.get(OVERLAP, "").lower() in ("0", "off"):
        return None
    version = int(sys.modules["cupy"].cuda.runtime.driverGetVersion())
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    if version < _CAPTURED:
        warn(f"kernels do not overlap: CUDA {version // 1000}'s driver is older than 12.3; update it")
        return None
    launch = driver.cuLaunchKernelEx
    launch.argtypes, launch.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
    return launch


@cache
def _refused(status: int) -> None:
    """Say once that kernels do not overlap."""
    warn(
        f"CUDA's driver refuses programmatic dependent launch (error {status}): kernels begin when those before have "
        f"ended; {OVERLAP}=off says so beforehand"
    )


def _checked(kind: str, value: Any) -> int:
    """The bits of an integer or an address, of which None is NULL.

    Raises:
        OverflowError: it does not fit its type.
    """
    number = int(value or 0)
    bits = _LIMITS.get(kind)
    if bits and not -1 << (bits - 1) <= number < 1 << (bits - 1):
        raise OverflowError(f"{number} does not fit an argument of {bits} bits")
    return number & _MASK


def _kept(map_at: Any, there: int, known: dict[int, Any]) -> tuple[Any, int]:
    """A tensor map of memory at an address, and its own address."""
    if len(known) >= MOST_MAPS:
        known.clear()
    map_ = map_at(there)
    kept: tuple[Any, int] = map_, map_.__array_interface__["data"][0]
    known[there] = kept
    return kept
