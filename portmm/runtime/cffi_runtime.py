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
    """The run time in Python, over the Python-free library at `path`; the extension has the same interface.

    Types: `Packed(owner, k, n, dtype, family, b_k, b_n, b_batch, shape=(k, n))`
    is a weight in a packed layout, its data in the 1-D array
    `owner` and its three strides as the kernel takes them; a base for a Python class.
    `Kernel`, `Route` and `Plan` are created by the functions below.
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
        self._slow: Callable[..., Any] | None = None
        self._resolver: Callable[..., Any] | None = None
        self._planner: Callable[..., Any] | None = None
        self._density = self._override = False
        self._memo: dict[tuple[Any, ...], Route] = {}
        self._plans: dict[tuple[Any, ...], Plan | None] = {}

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
    def race(route: Route, task: Callable[..., None], after: float) -> None:
        """Let a route race, once: task(route) is to bring rivals, and later task(route, winner, ratio) is called.

        Rivals are asked for after calls that took `after` seconds together. The ratio is that of the winner's time to
        the time of the route's own kernel.

        Here nothing: only the extension times single calls well enough.
        """

    @staticmethod
    def start_race(route: Route, rivals: tuple[Route, ...] | None) -> None:
        """Begin the race of a route that waits, with at most three routes; without any, end it; None: ask again later.

        Calls of a route that is to ask again are counted from the start.

        Here nothing, likewise.
        """

    @staticmethod
    def racing(_route: Route) -> str:
        """State of a route: "counting" calls, "waiting" for rivals, "running", or "done"; "" if it does not race.

        Here always "".
        """
        return ""

    @staticmethod
    def repeat(*_call: Any) -> Any:
        """The results of a product with an epilogue, of a kind that was kept; else NotImplemented.

        Here never any: a call in Python is as fast.

        Args:
            call: the function, A, B, out, the type of the result, or None, and the settings.
        """
        return NotImplemented

    @staticmethod
    def keep_call(_call: tuple[Any, ...], *_prepared: Any) -> bool:
        """Prepare further calls of a kind: see `ops.call_fastpath`; False if `repeat` cannot run them.

        Here always False, likewise.
        """
        return False

    @staticmethod
    def attend(*_call: Any) -> Any:
        """The results of attention, of a kind that was kept; else NotImplemented.

        Here never any, likewise.

        Args:
            call: q, k, v, scale, causal, window, return_lse, the settings, and the limit of threads.
        """
        return NotImplemented

    @staticmethod
    def keep_attention(_call: tuple[Any, ...], *_prepared: Any) -> bool:
        """Prepare further calls of a kind: see `ops.attention_fastpath`; False if `attend` cannot run them.

        Here always False, likewise.
        """
        return False

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
    def describe(*_: Any) -> None:
        """The key by which a call with native arrays, packed weights and integers is cached; None for other arguments.

        Extents equal to `rows` are replaced by their class (see `row_classes`).

        Here always None: there is no fast path for descriptions.
        """

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
        if plan is None or (out is not None and (np.may_share_memory(out, a) or np.may_share_memory(out, data))):
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
        return None if np.may_share_memory(out, a) or np.may_share_memory(out, b) else into

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """The product of two arrays, or of an array and a `Packed`.

        2-D arrays with a unit stride, of native types that kernels multiply without conversion, run
        the route that the resolver returns; so do stacks of matrices with evenly spaced rows, which
        are one taller matrix, by a 2-D array. Other aligned, native arrays, not
        empty and of at most 8 dimensions, run the plan that the planner returns
        for their types, shapes and strides. Other calls, and those with an `out`
        that overlaps an operand, take the slow path.
        """
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
        """Make a plan: a callable for arrays of these shapes and strides only.

        `a`, `b` and `c` are (shape, strides in bytes); `b` may be a `Packed`,
        which then is bound. `numbers` are those of `execute` without the
        pointers; `detail` becomes an attribute. Call the plan as plan(a, b, out=None), or plan(a, out=None).

        Raises:
            ValueError: shapes, strides or numbers are malformed; when called,
                an operand differs, or out overlaps an input.
            TypeError: when called, an operand is no array or of another dtype.
        """
        if not isinstance(route, Route):
            raise TypeError(f"{route!r} is no Route")
        plan = Plan(self, route, (a, b, c), numbers, outer)
        plan.detail = detail
        return plan

    def set_slow(self, function: Callable[[Any, Any, Any], Any]) -> None:
        """Register the slow path, which `matmul` calls as function(a, b, out) off the fast path."""
        self._slow = _callable(function)

    def set_resolver(self, function: Callable[..., Any], density: bool = False) -> None:
        """Register the resolver, which returns the route of a new shape.

        Called as function(dtype, m, n, k, a, b, c, family), with layouts "row",
        "col" and, for b, "packed"; family is "" unless b is packed. It returns
        a Route, which is cached, or None for the slow path; or a Route and True
        if it serves every M of a class (see `row_classes`), for which it is
        cached then, or None if it is for one call, and is not cached. `dtype` names
        all types where they differ, "u8-s8-s32". With `density`
        it also gets a boolean: every operand is dense (leading stride equal to
        the extent), and dense and other operands are cached separately; and the extension asks it
        for stacks of matrices by as many matrices, with their count as a last argument.
        """
        self._resolver, self._density = _callable(function), bool(density)
        self.clear_memo()

    def set_planner(self, function: Callable[[Any, Any, Any], Any]) -> None:
        """Register the planner, which returns the plan for operands not seen before.

        Called as function(a, b, out) with arrays, a `Packed` b, or an out of
        None. It returns a Plan for these shapes and strides only, or None for
        the slow path; both are cached. A `Packed` is not to be bound: its
        `owner` takes the place of b in the plan. An exception goes to the caller.
        """
        self._planner = _callable(function)
        self.clear_memo()

    def set_override(self, flag: bool) -> None:
        """Make every `matmul` take the slow path while `flag` is true."""
        self._override = bool(flag)

    def clear_memo(self) -> None:
        """Drop all cached routes and plans."""
        self._memo, self._plans = {}, {}

    def memo_size(self) -> int:
        """The number of cached routes and plans."""
        return len(self._memo) + len(self._plans)

    def set_num_threads(self, threads: int) -> None:
        """Bound the threads of one call; a change drops all routes and plans.

        Raises:
            ValueError: `threads` is less than 1.
        """
        threads = operator.index(threads)
        if threads < 1:
            raise ValueError(f"the number of threads is {threads}; it must be at least 1")
        if threads != self._lib.portmm_get_num_threads():
            self._lib.portmm_set_num_threads(threads)
            self.clear_memo()

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


def _of_class(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key shared by all M of a class."""
    return (key[0], -row_class(key[1])[1], *key[2:])


def _address(x: Any) -> int:
    """An address: an integer, or that of the first element of an array; 0 for None."""
    return address(x) if isinstance(x, np.ndarray) else 0 if x is None else operator.index(x)


def _callable(function: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"{function!r} is not callable")
    return function
