"""The run time through cffi, where Python's headers are missing.

Owns the Python counterparts of the extension's functions that select a kernel or a plan for a call: the same interface,
some microseconds more per call. The thread pool and the launch are the extension's C (`cffi_launches`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.runtime.cffi_launches import Launches
from portmm.runtime.cffi_records import (
    CLOSED,
    NAMES,
    ORIGIN,
    Packed,
    Plan,
    Route,
    address,
    layout_of,
    signature,
)
from portmm.spec.row_classes import row_class

_MOST_ROUTES, _MOST_PLANS = 1 << 16, 1 << 12  # as in memo.c


class CffiRuntime(Launches):
    """The run time in Python, over the Python-free library at `path`; the extension has the same interface.

    Its types are those of `Launches`.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._slow: Callable[..., Any] | None = None
        self._resolver: Callable[..., Any] | None = None
        self._planner: Callable[..., Any] | None = None
        self._density = self._override = False
        self._memo: dict[tuple[Any, ...], Route] = {}
        self._plans: dict[tuple[Any, ...], Plan | None] = {}

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
    def describe(*_: Any) -> None:
        """The key by which a call with native arrays, packed weights and integers is cached; None for other arguments.

        Extents equal to `rows` are replaced by their class (see `row_classes`).

        Here always None: there is no fast path for descriptions.
        """

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


def _of_class(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key shared by all M of a class."""
    return (key[0], -row_class(key[1])[1], *key[2:])


def _callable(function: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"{function!r} is not callable")
    return function
