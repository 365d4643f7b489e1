"""Fusion of functions of arrays into few kernels.

Owns `fuse` and the function that it returns, `FusedFunction`: it is traced once for each kind of
arguments, and from then on runs as a program of few kernels. What traces and compiles, `tracing`, is loaded by the
first call that needs it: functions over rows have kernels in the base set of a wheel.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from portmm.arrays.libraries import any_tensor, on_device
from portmm.dispatch import config as settings
from portmm.errors import ChangedError, TraceError
from portmm.ops import host_matmul
from portmm.runtime import cpu as cpu_runtime
from portmm.util import locks
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph
    from portmm.fusion.program import Explained
    from portmm.fusion.tracing import Program
    from portmm.trace.captures import Captures

MOST_KINDS = 256
"""Kinds of arguments whose programs a function caches before it drops them all."""
MOST_KERNELS = 12288
"""Kernels of all cached programs of a process, 4 KiB of objects each, before all are dropped."""
KIND = 4
"""Memory of a program besides its kernels, counted in kernels."""


class FusedFunction:
    """A callable that runs a function as few kernels. See `fuse`."""

    def __init__(self, function: Callable[..., Any], *, strict: bool, search: float = 0.0) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self.strict, self.search, self.seen = strict, search, False
        self.memo = Memory(MOST_KINDS, "calls")
        self.fast_path: tuple[Any, Memory] = (None, Memory(MOST_KINDS, "calls"))
        self.describe: Callable[[Any], bytes | None] = self.begin
        with _making:
            _functions.add(self)

    def begin(self, args: Any) -> bytes | None:
        """Load the run time, which describes arrays from then on; arrays on a device need no run time."""
        if any(on_device(x) for x in args):
            return None
        host_matmul.begin()
        cpu_types = cpu_runtime.types()
        if cpu_runtime.has_kernels(cpu_types):  # without kernels there are no fast paths to look up yet
            self.describe = cpu_types.describe
        return cpu_types.describe(args)

    def __reduce__(self) -> tuple[Any, ...]:
        function = self.__wrapped__
        if isinstance(function, types.FunctionType) and _namesake(function) is self:
            # Picklers that find functions by their names find a decorated one within this.
            function.__qualname__ = function.__qualname__.removesuffix(_WITHIN) + _WITHIN
        return _restored, (function, self.strict, self.search)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """Bind the function to an object, as methods are."""
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the program of this kind of call; compile it first if there is none."""
        description = self.describe(args) if not options else None
        config, fast_path = self.fast_path  # together, as other threads may change them
        if description is not None and settings.current() is config:
            program: Program | None = fast_path.get(description)
            if program is not None:
                captured = program.guards.values(None) if program.guards.lines else []
                if captured is not None:
                    try:
                        return program.run(args if program.simple else _leaves(args, captured))
                    except ChangedError:
                        return self.again(args, options)
        if description is None and any_tensor((args, options)):
            from portmm.arrays.interop import through

            return through(self, *args, **options)
        if not (self.seen or options or self.search):
            from portmm.ops import outlined_rows

            self.seen = True
            result = outlined_rows.results(self.__wrapped__, args)
            if result is not None:
                return result
        return self.run(args, options, description, (config, fast_path))

    def run(self, args: Any, options: Any, description: bytes | None, recent: tuple[Any, Memory]) -> Any:
        """Run the program of a call that is not on the fast path.

        Args:
            args: positional arguments.
            options: arguments by name.
            description: of the arguments; None if they have none.
            recent: the programs on the fast path, after their settings.
        """
        from portmm.trace.guards import find

        key, leaves, kept = self.kind(args, options)
        program, captured = find(self.memo, key, None, leaves)
        if program is None:
            program, leaves = self.make(args, options, key, leaves, kept, by_value=captured is not None)
            captured = []
        elif description is not None:
            if settings.current() is not recent[0]:
                self.fast_path = recent = settings.current(), Memory(MOST_KINDS, "calls")
            recent[1].keep(description, program)
            program.simple = not program.guards.returned and not any(type(x) is int for x in args)
        try:
            return program.run([*leaves, *captured])
        except ChangedError:
            return self.again(args, options)

    def again(self, args: Any, options: Any) -> Any:
        """Run the undecorated function, and drop its programs: NumPy returned a shape that they do not expect."""
        self.forget()
        return self.__wrapped__(*args, **options)

    def forget(self) -> None:
        """Drop all programs."""
        self.memo.clear()
        self.fast_path[1].clear()

    def explain(self, *args: Any, **options: Any) -> Explained:
        """An explanation of a call with these arguments: kernels, fused operations, lines of those not fused."""
        from portmm.fusion import tracing
        from portmm.trace.guards import find

        if any_tensor((args, options)):
            from portmm.arrays.interop import through

            return through(self.explain, *args, **options)
        key, leaves, kept = self.kind(args, options)
        program, now = find(self.memo, key, None, leaves)
        program = program or self.make(args, options, key, leaves, kept, by_value=now is not None)[0]
        return tracing.with_races(program.explained)

    @staticmethod
    def kind(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, list[Any], list[Any]]:
        """The cache key of a call, the values that vary per call, and objects that the key names by identity."""
        from portmm.fusion.captures import arguments

        kinds: list[Any] = []
        leaves: list[Any] = []
        kept: list[Any] = []
        arguments(args, kinds, leaves, kept)
        if options:
            kinds.append(tuple(options))
            arguments(options.values(), kinds, leaves, kept)
        return (*kinds, settings.current(), settings.limit()), leaves, kept

    def make(
        self, args: Any, options: Any, key: Any, leaves: list[Any], kept: list[Any], *, by_value: bool
    ) -> tuple[Program, list[Any]]:
        """Trace the function, compile a program, and cache it."""
        from portmm.fusion import tracing
        from portmm.trace.guards import remember

        program, traced, by_value = tracing.program_of(self, args, options, kept, by_value=by_value)
        if program.cacheable:
            _make_room(len(program.explained.kernels) + KIND)
            remember(self.memo, key, program, None, leaves, by_value=by_value)
        return program, traced

    def trace(self, args: Any, options: Any, *, by_value: bool) -> tuple[Graph, Any, Captures]:
        """Run the function on traced values, which record its operations."""
        from portmm.fusion import tracing

        return tracing.trace(self.__wrapped__, args, options, strict=self.strict, by_value=by_value)


_WITHIN = ".__wrapped__"


def _namesake(function: Callable[..., Any]) -> Any:
    """The object that has the name of a function in its module: the fused function where that is decorated."""
    value: Any = sys.modules.get(getattr(function, "__module__", ""))
    for name in getattr(function, "__qualname__", "").removesuffix(_WITHIN).split("."):
        value = getattr(value, name, None)
    return value


def _restored(function: Callable[..., Any], strict: bool, search: float) -> FusedFunction:
    """A fused function, as in unpickling: the one of this process, if it is decorated in a module."""
    here = _namesake(function)
    if isinstance(here, FusedFunction) and here.__wrapped__ is function:
        return here
    restored = FusedFunction(function, strict=strict, search=search)
    vars(restored)["__qualname__"] = getattr(function, "__qualname__", "").removesuffix(_WITHIN)
    return restored


_making = locks.reentrant_lock()
_functions: WeakSet[FusedFunction] = WeakSet()
_kernels = 0


def _make_room(more: int) -> None:
    """Drop the programs of all functions if there are too many kernels with these."""
    global _kernels  # noqa: PLW0603 - of the whole process
    with _making:
        _kernels += more
        if _kernels > MOST_KERNELS:
            _kernels = more
            for x in tuple(_functions):
                x.forget()


def _leaves(args: tuple[Any, ...], more: list[Any]) -> list[Any]:
    """The values of a call that vary; integers are part of the program."""
    return [*(x for x in args if type(x) is not int), *more]


def fuse(
    function: Callable[..., Any] | None = None,
    *,
    on_unfusable: Literal["split", "error"] = "split",
    search: bool | float = False,
) -> Any:
    """Fuse a function of matrix products, element-wise operations, reductions and reshapes into few kernels.

    The function is traced once for each kind of arguments (shapes, strides, types), with its
    arrays, including captured ones, replaced by traced arrays that record the operations on them. Element-wise
    operations that follow a product become its epilogue; operations that reduce rows
    run as one kernel over rows; NumPy computes between kernels what no kernel can. Arrays are
    looked up at each call: new values, and rebound variables, are seen.

    Undecorated (`__wrapped__`), the function runs as NumPy does, and is its own reference.
    NumPy scalars of float64 or integer type are treated as Python's: they take the type of the other operand.
    A number that is converted (`np.float32(scale)`) is a constant of the trace: each new value traces again.

    Args:
        function: the function; it may take and return lists, tuples and dicts of arrays.
        on_unfusable: "split" lets NumPy compute, between kernels, what no kernel can;
            "error" raises TraceError, naming the line.
        search: seconds, or True for a minute: the first call of each kind searches an equivalent program that is
            faster, which is verified and measured, and kept in the tuning database.

    Returns:
        A function with the same arguments, and a method `explain` that takes them too. It may be pickled where the
        function may be (by cloudpickle: anywhere), and is traced again in the other process.

    Raises:
        TypeError: this is no function, or `search` no number.
        ValueError: `on_unfusable` is neither of these.
        TraceError: when called, the control flow of the function depends on values, or it changes an array in place.
    """
    if on_unfusable not in ("split", "error"):
        raise ValueError(f"on_unfusable is {on_unfusable!r}; use 'split' or 'error'")
    if function is None:
        return functools.partial(fuse, on_unfusable=on_unfusable, search=search)
    if not callable(function):
        raise TypeError(f"fuse takes a function, not {function!r}")
    if not isinstance(search, (bool, int, float)):
        raise TypeError(f"search is {search!r}; pass a number of seconds, True or False")
    seconds = 60.0 if search is True else float(search)
    return FusedFunction(function, strict=on_unfusable == "error", search=seconds)


__all__ = ["FusedFunction", "TraceError", "fuse"]
