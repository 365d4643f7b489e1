"""Launches through cffi: the Python-free library of the run time, kernels, and their arguments.

Owns `Launches`, the part of the cffi run time that loads kernels and runs them on raw memory; which kernel a call takes
is decided by `cffi_runtime`.
"""

from __future__ import annotations

import operator
import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from cffi import FFI  # type: ignore[import-untyped]

from portmm.errors import BuildError
from portmm.ir.abi import ARGS
from portmm.runtime.cffi_records import Kernel, Packed, Plan, Route, address, largest_scale, offsets_of, register_dtype

if TYPE_CHECKING:
    from pathlib import Path

_DECLARATIONS = (
    ARGS
    + """
int portmm_start(void);
long portmm_get_num_threads(void);
long portmm_pool_threads(void);
void portmm_set_num_threads(long threads);
void portmm_set_scratch(long bytes);
long portmm_scratch(void);
void *portmm_open(const char *path, const char *symbol, char *error, long size);
int portmm_run(void *function, long work, long workers, const long *bytes, const portmm_args *args,
               const long *offsets, long count);
void *portmm_bind(void *function, long work, long workers, const long *bytes, const portmm_args *args,
                  const long *offsets, long count);
int portmm_run_bound(const void *bound, const void *a, const void *b, void *c);
void portmm_unbind(void *bound);
"""
)
_TYPES = ("char[512]", "char *", "long *", "long[]", "void *", "float *", "portmm_operand *", "portmm_args *")
SYMBOLS = tuple(re.findall(r"(portmm_\w+)\(", _DECLARATIONS.removeprefix(ARGS)))
"""Functions of the library."""
_STEP = 20
"""Words of a step of `execute_all`."""


class Launches:
    """The library at `path`, its kernels, and its threads.

    Types: `Packed(owner, k, n, dtype, family, b_k, b_n, b_batch, shape=(k, n))`
    is a weight in a packed layout, its data in the 1-D array
    `owner` and its three strides as the kernel takes them; a base for a Python class.
    `Kernel`, `Route` and `Plan` are created by the functions of the run time.
    """

    def __init__(self, path: str) -> None:
        self.Packed, self.Kernel, self.Route, self.Plan = Packed, Kernel, Route, Plan
        self._ffi = FFI()
        self._ffi.cdef(_DECLARATIONS)
        try:
            self._lib: Any = self._ffi.dlopen(
                path, os.RTLD_NOW | os.RTLD_NODELETE
            )  # as long as the threads of its pool
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error
        # cffi resolves names under its own locks, which a forked child may inherit locked: all are resolved now.
        for text in _TYPES:
            self._ffi.typeof(text)
        for name in SYMBOLS:
            getattr(self._lib, name)
        if self._lib.portmm_start():
            raise RuntimeError("the thread pool cannot be started")

    def load(self, path: str | Path, symbol: str, file: str | Path = "") -> Kernel:
        """Load the kernel `symbol` of the shared object at `path`.

        The loader opens `file` instead, if that names a sealed copy of the same bytes: see `sealed_library`.

        Raises:
            BuildError: it cannot be loaded.
        """
        error = self._ffi.new("char[512]")
        function = self._lib.portmm_open(os.fsencode(file or path), symbol.encode(), error, 512)
        if not function:
            raise BuildError(f"{path} cannot be loaded: {self._ffi.string(error).decode(errors='replace')}")
        return Kernel(path, symbol, function)

    @staticmethod
    def register_dtype(name: str, dtype: np.dtype[Any]) -> None:
        """Register the NumPy dtype of "bf16", which NumPy does not define."""
        register_dtype(name, dtype)

    def make_route(self, kernel: Kernel, work_bytes: int, workers: int, dtype: str, unit: int = 1) -> Route:
        """Make a route: a kernel with its workspace and the most threads it may use.

        `dtype` names the types of A, B and C, "f32" or "u8-s8-s32"; offsets of B
        count `unit` elements.
        """
        return Route(kernel, work_bytes, workers, dtype, unit)

    def launch(self, route: Route, v: tuple[int, ...], outer: bytes, table: int = 0, numbers: int = 0) -> None:
        """Run a kernel; `v` as for `execute`, `outer` as bytes, and the addresses of operands and numbers."""
        if self._lib.portmm_run(*self._launched(route, v, outer, table, numbers)):
            raise MemoryError(f"no memory for a workspace of {route.work_bytes} bytes")

    def bind(self, route: Route, v: tuple[int, ...], outer: bytes) -> tuple[int, int, Any]:
        """Addresses of `portmm_run_bound` and of its first argument, with the numbers of `launch`, and its owner."""
        bound = self._lib.portmm_bind(*self._launched(route, v, outer))
        if not bound:
            raise MemoryError("no memory for a bound plan")
        words = [self._ffi.cast("long", x) for x in (self._ffi.addressof(self._lib, "portmm_run_bound"), bound)]
        return int(words[0]), int(words[1]), self._ffi.gc(bound, self._lib.portmm_unbind)

    def _launched(self, route: Route, v: tuple[int, ...], outer: bytes, table: int = 0, numbers: int = 0) -> Any:
        """The arguments of `portmm_run`."""
        cast = self._ffi.cast
        args = self._ffi.new("portmm_args *")
        args.m, args.n, args.k, args.batch, a, args.a_m, args.a_k, args.a_batch = v[:8]
        b, args.b_k, args.b_n, args.b_batch, c, args.c_m, args.c_n, args.c_batch = v[8:]
        args.a, args.b, args.c = cast("void *", a), cast("void *", b), cast("void *", c)
        args.operands, args.numbers = cast("portmm_operand *", table), cast("float *", numbers)
        offsets = self._ffi.from_buffer("long[]", outer)
        return route.kernel.function, route.work_bytes, route.workers, route.bytes, args, offsets, len(outer) // 24

    def execute(self, route: Route, *numbers: Any) -> None:
        """Run a kernel on raw memory.

        `numbers` are m, n, k, batch, a pointer (an array, or an integer), a_m, a_k, a_batch, b pointer,
        b_k, b_n, b_batch, c pointer, c_m, c_n, c_batch, with strides in
        elements, and optionally None or a bytes-like object of int64 triples:
        the kernel runs once for each triple of offsets (a, b, c), in elements.
        Fused expressions take more: the table of their operands, an array of int64 with a row for each, an address
        and strides (see `abi.ARGS`), and their numbers, an array of float32; each a pointer or None. Addresses of
        arrays that follow are added to those of the table, row by row, for this call.

        Raises:
            MemoryError: no memory for the workspace.
        """
        if not isinstance(route, Route) or len(numbers) < 16 or len(numbers) == 18:
            raise TypeError(
                "execute takes a Route, 16 integers, optional offsets, then a table of operands, numbers and arrays; "
                f"got {len(numbers) + 1} arguments"
            )
        outer = offsets_of(numbers[16] if len(numbers) > 16 else None)
        more, arrays = list(numbers[17:19]), numbers[19:]
        if arrays:
            if not isinstance(more[0], np.ndarray):
                raise TypeError("execute got arrays without a table")
            if more[0].ndim != 2 or len(more[0]) < len(arrays):
                raise ValueError(f"execute got {len(arrays)} arrays; the table has no row for each")
            more[0] = more[0][: len(arrays)].copy()
            more[0][:, 0] += [_address(x) for x in arrays]
        self.launch(route, tuple(map(_address, numbers[:16])), outer, *map(_address, more))

    def execute_all(self, routes: tuple[Route, ...], address: int) -> None:
        """Run kernels one after the other.

        `address` points to 20 words of 64 bits for each: the 16 numbers of `execute`, the address
        and the count of its offsets, or 0, and the addresses of operands and numbers, or 0.

        Raises:
            MemoryError: no memory for a workspace.
        """
        words = self._ffi.cast("long *", address)
        for i, route in enumerate(routes):
            w = [words[_STEP * i + j] for j in range(_STEP)]
            outer = bytes(self._ffi.buffer(self._ffi.cast("char *", w[16]), 24 * w[17])) if w[16] else offsets_of(None)
            self.launch(route, tuple(w[:16]), outer, *w[18:])

    @staticmethod
    def address(array: np.ndarray[Any, Any]) -> int:
        """The address of the first element of an array."""
        if not isinstance(array, np.ndarray):
            raise TypeError("address takes an array")
        return address(array)

    @staticmethod
    def largest_scale(vector: np.ndarray[Any, Any]) -> float:
        """The largest number of a contiguous vector of float32, at least 0; -1 if any is negative or not finite."""
        if (
            not isinstance(vector, np.ndarray)
            or (vector.ndim, vector.dtype) != (1, np.float32)
            or not vector.flags.c_contiguous
        ):
            raise TypeError("scales must be a contiguous 1-D float32 array")
        return largest_scale(vector)

    def get_num_threads(self) -> int:
        """The bound on the threads of one call; at first, the processors of this process."""
        return int(self._lib.portmm_get_num_threads())

    def set_scratch(self, size: int) -> None:
        """Bound the bytes of workspaces that all threads together keep between calls.

        Workspaces of a MiB or less stay with their threads, and do not count.

        Raises:
            ValueError: `size` is negative.
        """
        size = operator.index(size)
        if size < 0:
            raise ValueError(f"the limit of workspaces is {size} bytes; it must be at least 0")
        self._lib.portmm_set_scratch(size)

    def scratch(self) -> int:
        """Bytes of the workspaces that count towards the bound."""
        return int(self._lib.portmm_scratch())

    def pool_threads(self) -> int:
        """The number of threads that the pool has started in this process."""
        return int(self._lib.portmm_pool_threads())


def _address(x: Any) -> int:
    """An address: an integer, or that of the first element of an array; 0 for None."""
    return address(x) if isinstance(x, np.ndarray) else 0 if x is None else operator.index(x)
