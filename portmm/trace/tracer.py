"""Tracing of a function: it runs on values of a tile, and its operations become expressions.

Owns `Traced`, the expressions of a function with the operands and numbers that it captured, and `trace`, whose
results are remembered for each kind of closure, so that a function is traced once for each.

A traced function sees the arrays that it captures (closures, globals,
defaults, attributes of captured objects) as `Tensor`, which can be indexed by
axes. Captured floats become numbers that each call passes, so that a new value
compiles nothing; where Python must know them (an if, math.sqrt), they are
constants, and each value has a kernel of its own.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.libraries import on_device
from portmm.errors import TraceError
from portmm.spec.elementwise import Typed
from portmm.spec.epilogue import index
from portmm.spec.expr import Expr, real
from portmm.trace.builtin_queries import replaced_builtins
from portmm.trace.closures import (
    PLAIN,
    attribute_names,
    captures_nothing,
    filled,
    fixed,
    global_names,
    holds_only_items,
    is_constant,
    is_float,
    is_plain,
    looks_names_up,
    named_as,
    ours,
    resolve,
    same_container,
)
from portmm.trace.number import Number
from portmm.trace.proxies import Namespace, proxy, refuse_class_attribute, unwrapped
from portmm.trace.recorder import Recorder, run
from portmm.trace.tensor import Tensor
from portmm.util.array_subclasses import refuse_class
from portmm.util.user_warnings import caller, is_users

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.spec.epilogue import Operand
    from portmm.trace.recorder import Source

Array = np.ndarray[Any, Any]


class Indices:
    """Indices of an element of the result along each axis: of a product, row m, column n, item b of a batch."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = tuple(names.items())
        for name, axis in names.items():
            setattr(self, name, index(axis))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = ", ".join(f"i.{x}" for x, _ in self._names)
        raise TraceError(f"there is no index {name!r} here; there are {known}")

    @property
    def kind(self) -> tuple[Any, ...]:
        """The names of the indices, with their axes."""
        return self._names


class Tracer(Recorder):
    """One trace: the captured values of a function, and what replaces them."""

    def __init__(self, *, by_value: bool, rank: int) -> None:
        super().__init__(rank)
        self.by_value = by_value
        self.proxies: dict[int, Any] = {}  # by the identity of the object
        self.keys: dict[int, list[tuple[tuple[Any, ...], frozenset[str]]]] = {}  # of classes and modules, see namespace
        self.names: frozenset[str] = frozenset()  # attributes that the function whose closure is replaced may read

    def wrapped(  # noqa: PLR0911 - one branch for each kind
        self, value: Any, key: tuple[Any, ...], seen: dict[int, Any]
    ) -> Any:
        """The value that replaces a captured one in a traced function."""
        if isinstance(value, np.ndarray):
            refuse_class(value, "a captured array", matrix=False)
            self.lasting &= value.ndim > 0
            return Tensor(self, value, key) if value.ndim else value
        if is_float(value) and not self.by_value:
            self.values[key] = value
            return Number(self, key, type(value))
        if isinstance(value, types.FunctionType) and not ours(value):
            if id(value) not in seen:
                seen[id(value)] = value
                seen[id(value)] = self.rebound(value, key, seen)
            return seen[id(value)]
        if isinstance(value, (tuple, list, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            self.lasting &= holds_only_items(value)
            replaced = [self.wrapped(x, (*key, i), seen) for i, x in items]
            return same_container(value, replaced, lambda x: self.wrapped(x, (*key, "key"), seen))
        if is_plain(value) or is_float(value) or fixed(value) or is_constant(value):
            return value
        if isinstance(value, (*PLAIN, float, np.generic)):
            self.lasting = False
            return value
        if on_device(value):
            return Tensor(self, self.standin(value), key)
        if isinstance(value, (types.ModuleType, type)):
            return self.namespace(value, key)
        self.lasting = False
        through = isinstance(value, (types.MethodType, partial))
        return self.callable(value, key, seen) if through else self.of_object(value)

    def namespace(self, value: Any, key: tuple[Any, ...]) -> Any:
        """The placeholder of a class or a module that a function finds by this key, and reads some attributes of."""
        if id(value) not in self.proxies:
            self.kept.append(value)
            self.proxies[id(value)] = Namespace(self, value, "")
        self.keys.setdefault(id(value), []).append((key, self.names))
        return self.proxies[id(value)]

    def covered_by(self, closure: dict[tuple[Any, ...], Any]) -> bool:
        """Whether a closure has all that is read: a function in two places is collected in one of them."""
        try:
            for key in (*self.numbers, *(x.key for x in self.sources)):
                resolve(key, closure)
        except KeyError:
            return False
        return True

    # The protocol of proxies.

    def attribute(self, owner: Any, key: str, name: str) -> Any:  # noqa: ARG002 - of the protocol
        """The traced replacement of an attribute."""
        try:
            value = getattr(owner, key)
        except AttributeError:  # a later call may find it
            self.lasting = False
            raise
        if id(owner) not in self.keys:
            if isinstance(value, types.MethodType) and value.__self__ is owner:
                return self.bound(value.__func__, self.of_object(owner))
            return self.wrapped(value, ("object", id(owner), key), {})
        known = next(((path, names) for path, names in self.keys[id(owner)] if key in names), None)
        self.lasting &= known is not None  # else no later call looks at the attribute
        path, names = known or (("object", id(owner)), self.names)
        before, self.names = self.names, names
        try:
            return self.wrapped(value, (*path, ("attribute", key)), {})
        finally:
            self.names = before

    def item(self, owner: Any, key: Any, name: str) -> Any:  # noqa: ARG002 - of the protocol
        """The traced replacement of an item."""
        return self.wrapped(owner[key], ("object", id(owner), repr(key)), {})

    def bound(self, function: Any, owner: Any) -> Any:
        """The traced replacement of a method, bound to a proxy."""
        if not isinstance(function, types.FunctionType) or ours(function):
            return types.MethodType(function, unwrapped(owner))
        return types.MethodType(self.rebound(function, ("object", id(unwrapped(owner)), function.__name__), {}), owner)

    def called(self, x: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a captured object that is called."""
        if isinstance(x, type):
            self.lasting &= captures_nothing(x) and captures_nothing(type(x))
            return x(*args, **options)
        return self.callable(x, ("object", id(x)), {})(*args, **options)

    def of_object(self, x: Any, name: str = "") -> Any:
        """The placeholder of an object: the same each time."""
        if fixed(x) or is_constant(x) or is_plain(x):
            return x
        if isinstance(x, (types.ModuleType, type)):
            return self.namespace(x, ("object", id(x)))
        if id(x) not in self.proxies:
            self.kept.append(x)
            self.proxies[id(x)] = proxy(self, x, name)
        return self.proxies[id(x)]

    def unseen(self) -> None:
        """Note that the trace depends on values that no later call compares."""
        self.lasting = False

    def callable(self, value: Any, key: tuple[Any, ...], seen: dict[int, Any]) -> Any:
        """A method, a partial, or a callable object whose captured values are replaced."""
        if isinstance(value, types.FunctionType):
            return value if ours(value) else self.rebound(value, key, seen)
        if isinstance(value, partial):
            args = [self.wrapped(x, (*key, i), seen) for i, x in enumerate(value.args)]
            named = {k: self.wrapped(x, (*key, k), seen) for k, x in value.keywords.items()}
            return partial(self.callable(value.func, (*key, "func"), seen), *args, **named)
        owner, function = (value.__self__, value.__func__) if isinstance(value, types.MethodType) else (value, None)
        calls = next((vars(t)["__call__"] for t in type(value).__mro__ if "__call__" in vars(t)), None)
        function = function or calls
        if not isinstance(function, types.FunctionType) or ours(function):
            return value
        return types.MethodType(self.rebound(function, (*key, "func"), seen), self.of_object(owner))

    def rebound(self, function: types.FunctionType, key: tuple[Any, ...], seen: dict[int, Any]) -> types.FunctionType:
        """The function, with placeholders instead of what it captures."""
        code = function.__code__
        self.lasting &= not looks_names_up(code)
        before, self.names = self.names, frozenset(attribute_names(code))
        names = [n for n in global_names(code) if n in function.__globals__]
        namespace = dict(function.__globals__)
        for name in names:
            namespace[name] = self.wrapped(namespace[name], (*key, ("global", name)), seen)
        namespace.update(replaced_builtins(self, global_names(code), function.__globals__))
        refuse_class_attribute(attribute_names(code), [namespace[n] for n in names])
        cells = tuple(
            types.CellType(self.wrapped(cell.cell_contents, (*key, ("closure", i)), seen)) if filled(cell) else cell
            for i, cell in enumerate(function.__closure__ or ())
        )
        defaults = function.__defaults__ and tuple(
            self.wrapped(x, (*key, ("default", i)), seen) for i, x in enumerate(function.__defaults__)
        )
        function_ = types.FunctionType(code, namespace, function.__name__, defaults, cells)
        if function.__kwdefaults__:
            function_.__kwdefaults__ = {
                n: self.wrapped(x, (*key, ("keyword", n)), seen) for n, x in function.__kwdefaults__.items()
            }
        named_as(function_, function)
        vars(function_).update({n: self.wrapped(x, (*key, ("attribute", n)), seen) for n, x in vars(function).items()})
        self.names = before
        return function_


@dataclass(frozen=True, slots=True)
class Traced:
    """The expressions of a function, with the operands and numbers that it reads.

    Attributes:
        results: an expression for each value that it returned, and the NumPy type of a `cast`, or None.
        several: it returned a tuple.
        operands: the arrays that it reads.
        sources: the views of captured arrays that these are.
        numbers: keys of the numbers of a call.
        values: of numbers that objects hold, as they were when the function was traced.
        by_extents: the function asked for extents of arrays that it captures: they may be constants in the results.
    """

    results: tuple[tuple[Expr, Any], ...]
    several: bool
    operands: tuple[Operand, ...]
    sources: tuple[Source, ...]
    numbers: tuple[tuple[Any, ...], ...]
    values: tuple[tuple[tuple[Any, ...], float], ...] = ()
    by_extents: bool = False


def trace(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    *,
    by_value: bool,
    rank: int = 2,
    closure: dict[tuple[Any, ...], Any] | None = None,
) -> tuple[Traced, bool]:
    """Run a function on values of a tile; also whether the result holds for the next call, with a closure like this.

    Raises:
        TraceError: the function cannot be traced; the message names the line.
    """
    tracer = Tracer(by_value=by_value, rank=rank)
    try:
        if not callable(function):
            raise TypeError(f"{function!r} is no function")
        traced = tracer.callable(function, (), {})
        result = run(lambda: traced(*values[: arity(function, len(values))]))
        results = tuple(_result(x, tracer) for x in _values_of(result))
    except TraceError as error:
        raise _located(error, function) from error.__cause__
    lasting = tracer.lasting and isinstance(function, types.FunctionType)
    lasting = lasting and (closure is None or tracer.covered_by(closure))
    # A later call looks numbers up by their keys, but for those of objects.
    several = isinstance(result, tuple)
    values_ = tuple((key, x) for key, x in tracer.values.items() if not lasting or key[0] == "object")
    # The memo must not keep arrays alive; calls look them up by their keys.
    sources = tuple(replace(x, there=None) if lasting else x for x in tracer.sources)
    reads = (tuple(tracer.operands), sources, tuple(tracer.numbers), values_)
    return Traced(results, several, *reads, tracer.by_extents), lasting


def _values_of(result: Any) -> tuple[Any, ...]:
    """The results of a function as a tuple."""
    if isinstance(result, tuple) and not result:
        raise TraceError("the function returns an empty tuple; return a value")
    return result if isinstance(result, tuple) else (result,)


def arity(function: Any, most: int) -> int:
    """The number of values that a function takes: its parameters without defaults, at most `most`."""
    function = getattr(function, "__wrapped__", function)
    if isinstance(function, np.ufunc):
        return min(most, function.nin)
    if isinstance(function, partial):
        return arity(function.func, most + len(function.args)) - len(function.args)
    code: types.CodeType | None = getattr(function, "__code__", None)
    method = isinstance(function, types.MethodType)
    if code is None:
        code, method = getattr(type(function).__call__, "__code__", None), True
    if code is None or code.co_flags & 0x04:  # *args
        return most
    names = code.co_argcount - method
    return min(most, names - len(getattr(function, "__defaults__", None) or ()) or names)


def _result(x: Any, tracer: Tracer) -> tuple[Expr, Any]:
    if isinstance(x, Typed):
        value, _ = _result(x.value, tracer)
        return value, x.dtype
    if isinstance(x, (Tensor, Number)):
        x = x.broadcast_()
    if not isinstance(x, Expr):
        x = real(x)
    return x, None


def _located(error: TraceError, function: Any) -> TraceError:
    """The error, with the line of the user's function that raised it."""
    if getattr(error, "located", False):
        return error
    line, name = 0, ""
    step = error.__traceback__
    while step is not None:
        if is_users(step.tb_frame.f_globals):
            line, name = step.tb_lineno, step.tb_frame.f_code.co_filename
        step = step.tb_next
    own: types.CodeType | None = getattr(function, "__code__", None)
    if not line and own is not None and is_users(function.__globals__):
        line, name = own.co_firstlineno, own.co_filename
    if not line and (frame := caller()) is not None:
        line, name = frame.f_lineno, frame.f_code.co_filename
    located = TraceError(f"{name}, line {line}: {error}" if name else str(error))
    located.located = True  # type: ignore[attr-defined]
    return located
