"""Captured variables of a traced function, and guards on them.

Owns `Scope`, which replaces the arguments of a function and its captured variables
(closures, globals, defaults, attributes of captured objects) by traced arrays. It records
the access path of each captured object, with a check (guard) that the object is still
of the kind that was traced.
"""

from __future__ import annotations

import functools
import operator
import types
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.interop import lay
from portmm.arrays.libraries import on_device
from portmm.fusion.traced_array import Value
from portmm.fusion.traced_number import traced_number
from portmm.trace.builtin_queries import replaced_builtins
from portmm.trace.closures import (
    PLAIN,
    attribute_names,
    captures_nothing,
    constant_key,
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
    same_container,
)
from portmm.trace.proxies import Namespace, proxy, refuse_class_attribute
from portmm.util.array_subclasses import refuse_class
from portmm.weights.kinds import ON_HOST, weight_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.fusion.graph import Graph

Array = np.ndarray[Any, Any]
ITEM, CELL, ATTRIBUTE = range(3)
SAME, EQUAL, ARRAY, NUMBER, LENGTH, DEVICE, CONSTANT, WEIGHT = range(8)
Check = tuple[int, Any, Any, int, Any]
"""A guard: the access (ITEM, CELL, ATTRIBUTE), its container and key; the kind of comparison, the expected value."""


def array_key(x: Array) -> tuple[Any, ...]:
    """The properties of an array that select its kernels."""
    return (x.shape, x.strides, x.dtype, x.flags.aligned)


def is_weight(x: Any) -> bool:
    """Whether an object is a packed or quantized weight on the host, which never changes."""
    return weight_kind(x) in ON_HOST


def arguments(values: Any, key: list[Any], leaves: list[Any], kept: list[Any]) -> None:
    """Append the cache key of some arguments, the values that vary per call (leaves), and objects named by identity."""
    for x in values:
        if type(x) is np.ndarray:
            key.append((x.shape, x.strides, x.dtype, x.flags.aligned))
            leaves.append(x)
        elif isinstance(x, (tuple, list)):
            key.append((type(x), len(x)))
            arguments(x, key, leaves, kept)
        elif isinstance(x, dict):
            key.append(tuple(x))
            arguments(x.values(), key, leaves, kept)
        elif isinstance(x, float) and is_float(x):
            key.append(type(x))
            leaves.append(float(x))
        elif isinstance(x, np.ndarray):
            refuse_class(x, "an argument", matrix=False)
            key.append(array_key(x))
            leaves.append(np.asarray(x))
        elif is_weight(x):
            key.append((id(x), x.shape))
            leaves.append(x)
            kept.append(x)
        elif isinstance(x, type) or is_plain(x):
            key.append((type(x), x))
        elif on_device(x):
            key.append(lay(x))
            leaves.append(x)
        else:
            key.append(id(x))
            kept.append(x)


class Scope:
    """The closure of a function while it is traced.

    Args:
        graph: the graph to record in.
        by_value: numbers are constants.
    """

    def __init__(self, graph: Graph, *, by_value: bool) -> None:
        self.graph, self.by_value = graph, by_value
        self.checks: list[Check] = []
        self.kept: list[Any] = []
        self.seen: dict[int, Any] = {}

    def argument(self, x: Any, name: str) -> Any:
        """The traced replacement of an argument, whose kind is in the key of the call: see `arguments`."""
        if isinstance(x, np.ndarray):
            return Value(self.graph, self.graph.leaf(np.asarray(x), name))
        if is_weight(x) or on_device(x):
            return Value(self.graph, self.graph.leaf(x, name))
        if isinstance(x, (tuple, list)):
            items = [self.argument(y, f"{name}[{i}]") for i, y in enumerate(x)]
            return type(x)(items) if type(x) in (tuple, list) else type(x)(*items)
        if isinstance(x, dict):
            return {k: self.argument(y, f"{name}[{k!r}]") for k, y in x.items()}
        if isinstance(x, float) and is_float(x):
            number = traced_number(self.graph, x, name)
            return x if self.by_value else number
        return x if isinstance(x, type) or is_plain(x) else self.wrapped(x, ITEM, {0: x}, 0, name)

    def check(self, access: int, container: Any, key: Any, kind: int, expected: Any) -> None:
        """Add a guard: the object is still the expected one."""
        self.checks.append((access, container, key, kind, expected))

    def wrapped(self, x: Any, access: int, container: Any, key: Any, name: str) -> Any:  # noqa: C901, PLR0911, PLR0912
        """The traced replacement of a captured object."""
        if isinstance(x, np.ndarray):
            refuse_class(x, name, matrix=False)
            self.check(access, container, key, ARRAY, array_key(x))
            return Value(self.graph, self.graph.leaf(np.asarray(x), name))
        if isinstance(x, float) and not self.by_value and is_float(x):
            self.check(access, container, key, NUMBER, type(x))
            return traced_number(self.graph, x, name)
        if is_plain(x) or (isinstance(x, float) and is_float(x)):
            self.check(access, container, key, EQUAL, x)
            return x
        if is_constant(x):
            self.check(access, container, key, CONSTANT, constant_key(x))
            return x
        if on_device(x):
            self.check(access, container, key, DEVICE, lay(x))
            return Value(self.graph, self.graph.leaf(x, name))
        if isinstance(x, (*PLAIN, float)):  # of a class of the user's
            self.unseen()
            return x
        if isinstance(x, (list, dict)):
            self.check(access, container, key, LENGTH, (x, len(x)))
        elif isinstance(x, types.MethodType):  # another object each time; equal ones have the same owner and function
            self.check(access, container, key, EQUAL, x)
        else:
            self.check(access, container, key, WEIGHT if is_weight(x) else SAME, x)
        self.kept.append(x)
        if is_weight(x):
            return Value(self.graph, self.graph.leaf(x, name))
        function = getattr(x, "__wrapped__", None) if type(x).__name__ == "FusedFunction" else x
        if isinstance(function, types.FunctionType):
            if not ours(function):
                self.check(ATTRIBUTE, function, "__dict__", LENGTH, (vars(function), len(vars(function))))
            return self.rebound(function)
        if isinstance(x, types.MethodType):
            return self.method(x)
        if isinstance(x, (tuple, list, dict)):
            items = x.items() if isinstance(x, dict) else enumerate(x)
            if not holds_only_items(x):
                self.unseen()
            replaced = [self.wrapped(y, ITEM, x, i, f"{name}[{i!r}]") for i, y in items]
            return same_container(x, replaced, self.rebound)
        if isinstance(x, functools.partial):
            return self.partial(x)
        return self.of_object(x, name)

    def outermost(self, function: Any) -> Any:
        """The function that is traced, or another callable, with traced arrays in place of what it captures."""
        is_function = isinstance(function, types.FunctionType)
        return self.rebound(function) if is_function else self.wrapped(function, ITEM, (function,), 0, "the function")

    def rebound(self, function: types.FunctionType) -> Any:
        """The function, with traced arrays in place of what it captures."""
        if ours(function):
            return function
        if id(function) in self.seen:
            return self.seen[id(function)]
        namespace = dict(function.__globals__)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copy = types.FunctionType(function.__code__, namespace, function.__name__, None, cells or None)
        self.seen[id(function)] = copy
        for name in global_names(function.__code__):
            if name in namespace:
                namespace[name] = self.wrapped(namespace[name], ITEM, function.__globals__, name, name)
        namespace.update(replaced_builtins(self, global_names(function.__code__), function.__globals__))
        refuse_class_attribute(
            attribute_names(function.__code__), [namespace.get(n) for n in global_names(function.__code__)]
        )
        names = function.__code__.co_freevars
        for name, old, new in zip(names, function.__closure__ or (), cells, strict=True):
            if filled(old):
                new.cell_contents = self.wrapped(old.cell_contents, CELL, old, 0, name)
        self.defaults(copy, function)
        named_as(copy, function)
        attributes = vars(function)
        vars(copy).update({n: self.wrapped(x, ITEM, attributes, n, n) for n, x in attributes.items()})
        if looks_names_up(function.__code__):
            self.unseen()
        return copy

    def defaults(self, copy: types.FunctionType, function: types.FunctionType) -> None:
        """Give the copy of a function the traced replacements of its defaults."""
        if function.__defaults__:
            defaults = function.__defaults__
            copy.__defaults__ = tuple(
                self.wrapped(x, ITEM, defaults, i, f"default {i}") for i, x in enumerate(defaults)
            )
        if function.__kwdefaults__:
            copy.__kwdefaults__ = {
                n: self.wrapped(x, ITEM, function.__kwdefaults__, n, n) for n, x in function.__kwdefaults__.items()
            }

    def partial(self, x: functools.partial[Any]) -> Any:
        """A partial function of traced values."""
        self.check(ATTRIBUTE, x, "keywords", LENGTH, (x.keywords, len(x.keywords)))
        args = [self.wrapped(y, ITEM, x.args, i, f"argument {i}") for i, y in enumerate(x.args)]
        named = {n: self.wrapped(y, ITEM, x.keywords, n, n) for n, y in x.keywords.items()}
        return functools.partial(self.wrapped(x.func, ATTRIBUTE, x, "func", "func"), *args, **named)

    def method(self, x: types.MethodType) -> Any:
        """A method bound to the traced replacement of its object."""
        owner = x.__self__ if isinstance(x.__self__, type) else type(x.__self__)
        if not isinstance(x.__func__, types.FunctionType) or _of_library(owner):
            return x
        return self.bound(x.__func__, self.of_object(x.__self__, "self"))

    # The protocol of proxies.

    def attribute(self, owner: Any, key: str, name: str) -> Any:
        """The traced replacement of an attribute."""
        try:
            value = getattr(owner, key)
        except AttributeError:  # a later call may find it
            self.unseen()
            raise
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            self.check(ATTRIBUTE, owner, key, EQUAL, value)
            return self.method(value)
        return self.wrapped(value, ATTRIBUTE, owner, key, f"{name}.{key}")

    def item(self, owner: Any, key: Any, name: str) -> Any:
        """The traced replacement of an item."""
        return self.wrapped(owner[key], ITEM, owner, key, f"{name}[{key!r}]")

    def bound(self, function: types.FunctionType, owner: Any) -> Any:
        """The traced replacement of a method, bound to a proxy."""
        return types.MethodType(self.rebound(function), owner)

    def called(self, x: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a captured object that is called."""
        if isinstance(x, type):
            if not (captures_nothing(x) and captures_nothing(type(x))):
                self.unseen()
            return x(*args, **options)
        function = x.__call__
        if isinstance(function, types.MethodType):
            return self.method(function)(*args, **options)
        self.unseen()
        return x(*args, **options)

    def of_object(self, x: Any, name: str = "") -> Any:
        """The placeholder of an object, a class or a module: the same each time."""
        is_namespace = isinstance(x, (types.ModuleType, type))
        if fixed(x) or is_constant(x):
            return x
        if not is_namespace and _of_library(type(x)):
            if not isinstance(x, _UNCHANGING) and type(x).__module__.partition(".")[0] != "portmm":
                self.unseen()
            return x
        if id(x) not in self.seen:
            self.kept.append(x)
            self.seen[id(x)] = Namespace(self, x, name) if is_namespace else proxy(self, x, name)
        return self.seen[id(x)]

    def unseen(self) -> None:
        """Note that the trace depends on values that no later call compares."""
        self.graph.cacheable = False


def _of_library(kind: type) -> bool:
    """Test for a class of a library, not of the user: its objects are not traced."""
    return kind.__module__.partition(".")[0] in ("builtins", "portmm", "numpy", "functools", "operator", "ml_dtypes")


_UNCHANGING = (np.number, np.bool_, np.str_, np.bytes_, np.datetime64, np.timedelta64, operator.itemgetter)
"""Types of values of libraries that never change."""


def captured_values(checks: list[Check]) -> list[Any] | None:
    """The arrays and numbers that a function captures now; None if a guard fails."""
    leaves: list[Any] = []
    try:
        for access, container, key, kind, expected in checks:
            x = (
                container[key]
                if access == ITEM
                else container.cell_contents
                if access == CELL
                else getattr(container, key)
            )
            # The most frequent kinds without a call, as every call of the function comes here.
            if kind == SAME:
                if x is not expected:
                    return None
            elif kind == NUMBER:
                if type(x) is not expected:
                    return None
                leaves.append(float(x))
            else:
                if not _IS[kind](x, expected):
                    return None
                if kind in _READ:
                    leaves.append(x)
    except (KeyError, IndexError, AttributeError, ValueError):
        return None
    return leaves


def _is_array(x: Any, expected: tuple[Any, ...]) -> bool:
    if type(x) is not np.ndarray:  # tested here, as every call passes
        refuse_class(x, "a captured array", matrix=False)
    return isinstance(x, np.ndarray) and array_key(x) == expected


_READ = (ARRAY, WEIGHT, DEVICE)
"""Kinds of objects that kernels read."""
_IS: dict[int, Callable[[Any, Any], bool]] = {
    EQUAL: lambda x, expected: (
        type(x) is type(expected) and x == expected and (not isinstance(x, float) or repr(x) == repr(expected))
    ),
    ARRAY: _is_array,
    WEIGHT: lambda x, expected: x is expected,
    LENGTH: lambda x, expected: x is expected[0] and len(x) == expected[1],
    DEVICE: lambda x, expected: on_device(x) and lay(x) == expected,
    CONSTANT: lambda x, expected: is_constant(x) and constant_key(x) == expected,
}
"""The comparison of each other kind of check with the expected value."""
