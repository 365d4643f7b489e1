"""The run time through cffi, where Python's headers are missing.

Owns the Python counterparts of the extension's functions: the same interface, some
microseconds more per call. The thread pool and the launch are the extension's C.
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
from portmm.runtime.cffi_records import (
    CLOSED,
    NAMES,
    ORIGIN,
    Kernel,
    Packed,
    Plan,
    Route,
    address,
    largest_scale,
    layout_of,
    offsets_of,
    overlap,
    register_dtype,
    signature,
)
from portmm.spec.row_classes import row_class

if TYPE_CHECKING:
    from collections.abc import Callable
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
_MOST_ROUTES, _MOST_PLANS = 1 << 16, 1 << 12  # as in memo.c


class CffiRuntime:
    """The `Runtime` in Python, over the Python-free library at `path`."""

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
        self._slow: Callable[..., Any] | None = None
        self._resolver: Callable[..., Any] | None = None
        self._planner: Callable[..., Any] | None = None
        self._density = self._override = False
        self._memo: dict[tuple[Any, ...], Route] = {}
        self._plans: dict[tuple[Any, ...], Plan | None] = {}

    def load(self, path: str | Path, symbol: str, file: str | Path = "") -> Kernel:
        """See `Runtime`."""
        error = self._ffi.new("char[512]")
        function = self._lib.portmm_open(os.fsencode(file or path), symbol.encode(), error, 512)
        if not function:
            raise BuildError(f"{path} cannot be loaded: {self._ffi.string(error).decode(errors='replace')}")
        return Kernel(path, symbol, function)

    @staticmethod
    def race(route: Route, task: Callable[..., None], after: float) -> None:
        """Nothing: only the extension times single calls well enough."""

    @staticmethod
    def start_race(route: Route, rivals: tuple[Route, ...] | None) -> None:
        """Nothing, likewise."""

    @staticmethod
    def racing(_route: Route) -> str:
        """An empty string: no route races."""
        return ""

    @staticmethod
    def repeat(*_call: Any) -> Any:
        """Nothing: a call in Python is as fast."""
        return NotImplemented

    @staticmethod
    def keep_call(_call: tuple[Any, ...], *_prepared: Any) -> bool:
        """False, likewise."""
        return False

    @staticmethod
    def attend(*_call: Any) -> Any:
        """Nothing, likewise."""
        return NotImplemented

    @staticmethod
    def keep_attention(_call: tuple[Any, ...], *_prepared: Any) -> bool:
        """False, likewise."""
        return False

    @staticmethod
    def register_dtype(name: str, dtype: np.dtype[Any]) -> None:
        """See `Runtime`."""
        register_dtype(name, dtype)

    def make_route(self, kernel: Kernel, work_bytes: int, workers: int, dtype: str, unit: int = 1) -> Route:
        """See `Runtime`."""
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
        """See `Runtime`."""
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
        """See `Runtime`."""
        words = self._ffi.cast("long *", address)
        for i, route in enumerate(routes):
            w = [words[_STEP * i + j] for j in range(_STEP)]
            outer = bytes(self._ffi.buffer(self._ffi.cast("char *", w[16]), 24 * w[17])) if w[16] else offsets_of(None)
            self.launch(route, tuple(w[:16]), outer, *w[18:])

    @staticmethod
    def describe(*_: Any) -> None:
        """See `Runtime`: without the extension there is no fast path for descriptions."""

    @staticmethod
    def address(array: np.ndarray[Any, Any]) -> int:
        """See `Runtime`."""
        if not isinstance(array, np.ndarray):
            raise TypeError("address takes an array")
        return int(array.__array_interface__["data"][0])

    @staticmethod
    def largest_scale(vector: np.ndarray[Any, Any]) -> float:
        """See `Runtime`."""
        if (
            not isinstance(vector, np.ndarray)
            or (vector.ndim, vector.dtype) != (1, np.float32)
            or not vector.flags.c_contiguous
        ):
            raise TypeError("scales must be a contiguous 1-D float32 array")
        return largest_scale(vector)

    def _resolve(self, key: tuple[Any, ...], dtype: str) -> Route | None:
        if self._resolver is None:
            return None
        memo = self._memo
        answer = self._resolver(*(key if self._density else key[:-1]))
        if answer is None:
            return None
        route, shared = answer if isinstance(answer, tuple) else (answer, False)
        if not isinstance(route, Route) or route.dtype != dtype:
            raise TypeError(f"the resolver returned {route!r}; need a Route for {dtype}, or None")
        if shared is None:
            return route  # for this call only
        if len(memo) >= _MOST_ROUTES:
            memo.clear()
        # `memo` is the dictionary from before the call, even if the memo was cleared since.
        memo[_of_class(key) if shared else key] = route
        return route

    def _ask_planner(self, key: tuple[Any, ...], a: Any, b: Any, data: Any, out: Any) -> Plan | None:
        plans = self._plans
        plan = self._planner(a, b, out) if self._planner else None
        if plan is not None:
            if not isinstance(plan, Plan) or plan.packed is not None:
                raise TypeError(f"the planner returned {plan!r}; need a Plan for these operands, or None")
            plan.check(a, data, out)
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = plan
        return plan

    def _planned(self, a: Any, b: Any, out: Any) -> Any:
        """The product by a plan; NotImplemented for the slow path."""
        key = None if self._override or self._planner is None else signature(a, b, out)
        if key is None:
            return NotImplemented
        data = b.owner if isinstance(b, Packed) else b
        plan = self._plans.get(key, NotImplemented)
        if plan is NotImplemented:
            plan = self._ask_planner(key, a, b, data, out)
        if plan is None or (out is not None and (overlap(out, a) or overlap(out, data))):
            return NotImplemented
        return plan.run(a, data, plan.check(a, data, out), scalar=out is None)

    def _fast(self, a: Any, b: Any, out: Any) -> Any:
        """The product of two matrices, the first possibly a stack, by a route; NotImplemented for other calls."""
        left = None if self._override else layout_of(a)
        if left is None or NAMES[a.dtype] not in CLOSED:
            return NotImplemented
        dtype = NAMES[a.dtype]
        packed = b if isinstance(b, Packed) else None
        right: tuple[str, int, int, bool] | None
        if packed is not None:
            if packed.element != dtype or packed.k != a.shape[-1] or packed.n <= 0 or len(packed.shape) != 2:
                return NotImplemented
            n, right, batch, data = packed.n, ("packed", packed.b_k, packed.b_n, True), packed.b_batch, packed.owner
        else:
            right, batch, data = layout_of(b), 0, b
            if right is None or b.ndim != 2 or b.dtype != a.dtype or b.shape[0] != a.shape[-1]:
                return NotImplemented
            n = b.shape[1]
        shape, rows, k = (*a.shape[:-1], n), a.size // a.shape[-1], a.shape[-1]
        into = ("row", n, 1, True) if out is None else self._out_layout(out, shape, a, data)
        if into is None:
            return NotImplemented
        dense = self._density and left[3] and right[3] and into[3]
        family = packed.family if packed is not None else ""
        key = (dtype, rows, n, k, left[0], right[0], into[0], family, dense)
        route = self._memo.get(_of_class(key)) or self._memo.get(key) or self._resolve(key, dtype)
        if route is None:
            return NotImplemented
        c = np.empty(shape, a.dtype) if out is None else out
        operands = (*self._place(a, left, 0), *self._place(data, right, batch), *self._place(c, into, 0))
        self.launch(route, (rows, n, k, 1, *operands), ORIGIN)
        return c

    @staticmethod
    def _place(x: Any, layout: tuple[str, int, int, bool], batch: int) -> tuple[int, int, int, int]:
        return address(x), layout[1], layout[2], batch

    @staticmethod
    def _out_layout(out: Any, shape: tuple[int, ...], a: Any, b: Any) -> tuple[str, int, int, bool] | None:
        into = layout_of(out)
        if into is None or out.shape != shape or out.dtype != a.dtype or not out.flags.writeable:
            return None
        return None if overlap(out, a) or overlap(out, b) else into

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """See `Runtime`."""
        for way in (self._fast, self._planned):
            result = way(a, b, out)
            if result is not NotImplemented:
                return result
        if self._slow is None:
            raise RuntimeError("no slow path is registered; call set_slow first")
        return self._slow(a, b, out)

    def make_plan(  # noqa: PLR0917
        self, route: Route, a: Any, b: Any, c: Any, numbers: Any, outer: Any = None, *, detail: Any = None
    ) -> Plan:
        """See `Runtime`."""
        if not isinstance(route, Route):
            raise TypeError(f"{route!r} is no Route")
        plan = Plan(self, route, (a, b, c), numbers, outer)
        plan.detail = detail
        return plan

    def set_slow(self, function: Callable[[Any, Any, Any], Any]) -> None:
        """See `Runtime`."""
        self._slow = _callable(function)

    def set_resolver(self, function: Callable[..., Any], density: bool = False) -> None:
        """See `Runtime`."""
        self._resolver, self._density = _callable(function), bool(density)
        self.clear_memo()

    def set_planner(self, function: Callable[[Any, Any, Any], Any]) -> None:
        """See `Runtime`."""
        self._planner = _callable(function)
        self.clear_memo()

    def set_override(self, flag: bool) -> None:
        """See `Runtime`."""
        self._override = bool(flag)

    def clear_memo(self) -> None:
        """See `Runtime`."""
        self._memo, self._plans = {}, {}

    def memo_size(self) -> int:
        """See `Runtime`."""
        return len(self._memo) + len(self._plans)

    def set_num_threads(self, threads: int) -> None:
        """See `Runtime`."""
        threads = operator.index(threads)
        if threads < 1:
            raise ValueError(f"the number of threads is {threads}; it must be at least 1")
        if threads != self._lib.portmm_get_num_threads():
            self._lib.portmm_set_num_threads(threads)
            self.clear_memo()

    def get_num_threads(self) -> int:
        """See `Runtime`."""
        return int(self._lib.portmm_get_num_threads())

    def set_scratch(self, size: int) -> None:
        """See `Runtime`."""
        size = operator.index(size)
        if size < 0:
            raise ValueError(f"the limit of workspaces is {size} bytes; it must be at least 0")
        self._lib.portmm_set_scratch(size)

    def scratch(self) -> int:
        """See `Runtime`."""
        return int(self._lib.portmm_scratch())

    def pool_threads(self) -> int:
        """See `Runtime`."""
        return int(self._lib.portmm_pool_threads())


def _of_class(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key shared by all M of a class."""
    return (key[0], -row_class(key[1])[1], *key[2:])


def _address(x: Any) -> int:
    """An address: an integer, or that of the first element of an array; 0 for None."""
    if isinstance(x, np.ndarray):
        return int(x.__array_interface__["data"][0])
    return 0 if x is None else operator.index(x)


def _callable(function: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"{function!r} is not callable")
    return function
