"""The walk over what a traced function captures, which replaces it by placeholders and guards it.

Owns `Captures`: closures, globals, defaults, attributes, called functions, methods, partials, containers and objects
are followed by the same rules in epilogues and in fused functions, which differ in the placeholders of arrays and
numbers. Each captured value is a constant with a guard, or one that later calls look up.
"""

from __future__ import annotations

import keyword
import types
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol
from weakref import ref

import numpy as np

from portmm.arrays.libraries import is_tensor, on_device
from portmm.errors import TraceError
from portmm.trace.closures import (
    PLAIN,
    attribute_names,
    captures_nothing,
    compares_identities,
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
from portmm.trace.guards import Guards, as_numpy, place
from portmm.trace.proxies import Namespace, proxy, refuse_class_attribute, replaced_builtins, unwrapped
from portmm.util.array_subclasses import refuse_class
from portmm.weights.kinds import ON_HOST, weight_kind

_UNCHANGING = (np.number, np.bool_, np.str_, np.bytes_, np.datetime64, np.timedelta64, itemgetter)
"""Types of values of libraries that never change."""

MANY = 32
"""Items from which a container of numbers is guarded as a whole."""


class Place(NamedTuple):
    """Where a captured value is.

    Attributes:
        text: the expression by which guards look it up; of the function itself, `f`.
        name: in messages.
    """

    text: str
    name: str


def is_weight(x: Any) -> bool:
    """Whether an object is a packed or quantized weight on the host, which never changes."""
    return weight_kind(x) in ON_HOST


class Recorder(Protocol):
    """Record of a trace, which has the placeholders of captured values.

    Attributes:
        lasting: later calls of this kind would record the same.
    """

    lasting: bool

    def array(self, x: Any, at: Place) -> Any:
        """The placeholder of an array, in the host's memory or on a device."""

    def number(self, x: Any, at: Place) -> Any:
        """The placeholder of a number; None if it is a constant."""

    def weight(self, x: Any, at: Place) -> Any:
        """The placeholder of a weight, packed or quantized."""


class Captures:
    """The captured values of one trace, and what replaces them.

    Args:
        recorder: makes placeholders of arrays and numbers.
        by_value: numbers are constants.
        fresh: each call has another function, with the same code: guards must not keep objects alive.
    """

    def __init__(self, recorder: Recorder, *, by_value: bool, fresh: bool) -> None:
        self.recorder, self.by_value, self.fresh = recorder, by_value, fresh
        self.guards = Guards(named=fresh)
        self.kept: list[Any] = []  # what the dicts below name by identity
        self.first: dict[int, tuple[str, Any]] = {}  # arrays: their first place, and their placeholder
        self.functions: dict[tuple[int, str], tuple[str, Any]] = {}
        self.objects: dict[int, tuple[str, Any]] = {}
        self.equal: dict[Any, list[str]] = {}  # places of arrays and functions that guards do not tell apart
        self.open: set[int] = set()  # containers whose items are walked
        self.compares_identities = False

    def unseen(self) -> None:
        """Note that the trace depends on values that no later call compares."""
        self.recorder.lasting = False

    # The walk.

    def wrapped(self, x: Any, at: Place) -> Any:  # noqa: C901, PLR0911, PLR0912 - one branch for each kind
        """The traced replacement of a captured value."""
        v = self.guards.look(at.text)
        if not isinstance(x, PLAIN) and is_tensor(x):
            v, x = self.guards.look(f"_as_numpy({v})"), as_numpy(x)
        if isinstance(x, np.ndarray) or (not isinstance(x, PLAIN) and on_device(x)):
            return self._array(x, v, at)
        if is_float(x) and not self.by_value and (number := self.recorder.number(x, at)) is not None:
            self.guards.typed(v, type(x))
            self.guards.returns(v, (at.text,), "{}" if self.fresh else "float({})")
            return number
        if is_plain(x) or is_float(x):
            if is_float(x):
                self.guards.number(v, x, (at.text,))
            else:
                self.guards.equal(v, x)
            return x
        if is_constant(x):
            self.guards.alike(v, x)
            return x
        if isinstance(x, (*PLAIN, float)):  # of a class of the user's
            self.unseen()
            return x
        self.kept.append(x)
        if type(x).__name__ == "FusedFunction":
            self._same(v, x)
            x, v = x.__wrapped__, self.guards.look(f"{v}.__wrapped__")
        if isinstance(x, types.FunctionType) and not ours(x):
            return self._function(x, v)
        if isinstance(x, types.MethodType):
            self._bound(v, x)
            return self.method(x, v)
        if isinstance(x, (tuple, list, dict)):
            return self._container(x, v, at)
        if isinstance(x, partial):
            return self._partial(x, v)
        self._same(v, x)
        if is_weight(x):
            self.guards.returns(v, (at.text,))
            return self.recorder.weight(x, at)
        return self.of_object(x, at.name, v)

    def _array(self, x: Any, v: str, at: Place) -> Any:
        """The placeholder of an array: the same wherever the same array is."""
        if id(x) in self.first:
            first, placeholder = self.first[id(x)]
            self.guards.refuse(f"{v} is not {first}")
            return placeholder
        if isinstance(x, np.ndarray):
            refuse_class(x, at.name, matrix=False)
            self.guards.array(v, x)
            self.equal.setdefault((x.shape, x.strides, x.dtype), []).append(v)
        else:
            self.guards.layout(v, x)
            self.equal.setdefault("on a device", []).append(v)
        self.kept.append(x)
        self.guards.returns(v, (at.text,))
        placeholder = self.recorder.array(x, at)
        self.first[id(x)] = v, placeholder
        return placeholder

    def _same(self, v: str, x: Any) -> None:
        """Guard the identity of an object."""
        if not self.fresh or fixed(x) or isinstance(x, (types.ModuleType, type)):
            self.guards.same(v, x)
            return
        try:
            self.guards.refuse(f"{v} is not {self.guards.constant(ref(x))}()")
        except TypeError:  # a guard would keep it alive
            self.unseen()

    def _named(self, x: Any) -> str:
        """The text of an object that is always the same."""
        return f"{self.guards.constant(ref(x))}()" if self.fresh else self.guards.constant(x)

    def _function(self, x: types.FunctionType, v: str) -> Any:
        """The traced replacement of a function: if calls make it afresh, its code is guarded, not its identity."""
        if not self.fresh:
            self.guards.same(v, x)
        elif (id(x), "") in self.functions:
            first, copy = self.functions[id(x), ""]
            self.guards.refuse(f"{v} is not {first}")
            return copy
        else:
            self.guards.typed(v, type(x))
            self.guards.refuse(f"{v}.__code__ is not {self.guards.constant(x.__code__)}")
            self.equal.setdefault(x.__code__, []).append(v)
        self.guards.keys(f"{v}.__dict__", vars(x))
        return self.rebound(x, v)

    def _bound(self, v: str, x: types.MethodType) -> None:
        """Guard a bound method, which is another object each time."""
        self.guards.typed(v, type(x))
        self._same(f"{v}.__func__", x.__func__)
        self._same(f"{v}.__self__", x.__self__)

    def _container(self, x: Any, v: str, at: Place) -> Any:
        """A tuple, list or dict of traced values."""
        self.guards.typed(v, type(x))
        if isinstance(x, dict):
            self.guards.keys(v, x)
        else:
            self.guards.refuse(f"len({v}) != {len(x)}")
        if not holds_only_items(x):
            self.unseen()
        if id(x) in self.open:
            raise TraceError(f"{at.name} is a {type(x).__name__} that contains itself; capture one that does not")
        self.open.add(id(x))
        items = x.items() if isinstance(x, dict) else enumerate(x)
        if len(x) < MANY or not _of_numbers(x.values() if isinstance(x, dict) else x):
            replaced = [self.wrapped(y, self._item(v, i, at.name)) for i, y in items]
        else:
            replaced = self._numbers([*items], f"{v}.values()" if isinstance(x, dict) else v, v, at)
        self.open.remove(id(x))
        return same_container(x, replaced, lambda key: self.rebound(key, self._named(key)))

    def _numbers(self, items: list[tuple[Any, Any]], values: str, v: str, at: Place) -> list[Any]:
        """The traced replacements of many plain values and floats, which are guarded together."""
        replaced, keys = [], []
        for i, y in items:
            z = y
            if isinstance(y, float):
                item = self._item(v, i, at.name)
                keys.append((item.text,))
                z = y if self.by_value else self.recorder.number(y, item)
            replaced.append(z)
        self.guards.values_of(values, [y for _, y in items], keys, by_value=self.by_value)
        return replaced

    def _item(self, v: str, key: Any, name: str) -> Place:
        text = repr(key) if type(key) in (str, int) else self.guards.constant(key)
        return Place(f"{v}[{text}]", f"{name}[{key!r}]")

    def _partial(self, x: partial[Any], v: str) -> Any:
        """A partial function of traced values."""
        self.guards.typed(v, type(x))
        self.guards.refuse(f"len({v}.args) != {len(x.args)}")
        self.guards.keys(f"{v}.keywords", x.keywords)
        args = [self.wrapped(y, Place(f"{v}.args[{i}]", f"argument {i}")) for i, y in enumerate(x.args)]
        named = {n: self.wrapped(y, Place(f"{v}.keywords[{n!r}]", n)) for n, y in x.keywords.items()}
        return partial(self.wrapped(x.func, Place(f"{v}.func", "func")), *args, **named)

    def outermost(self, function: Any) -> Any:
        """The function that is traced, or another callable, with placeholders in place of what it captures."""
        v = "f" if self.fresh else self.guards.constant(function)
        if isinstance(function, types.FunctionType) and not ours(function):
            return self.rebound(function, v)
        return self.wrapped(function, Place(v, "the function"))

    def finished(self) -> Guards:
        """The guards, after the function has run."""
        if self.compares_identities:
            for names in self.equal.values():
                if len(names) > 1:
                    self.guards.distinct(names)
        return self.guards

    def rebound(self, function: types.FunctionType, v: str, kind: str = "") -> Any:
        """The function that guards know by `v`, with placeholders in place of what it captures.

        A function that is always the same (`kind`) has a copy of its own.
        """
        if ours(function):
            return function
        if (id(function), kind) in self.functions:
            return self.functions[id(function), kind][1]
        code, outer = function.__code__, function.__globals__
        namespace = dict(outer)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copy = types.FunctionType(code, namespace, function.__name__, None, cells or None)
        self.functions[id(function), kind] = v, copy
        self.compares_identities |= compares_identities(code)
        names = [n for n in global_names(code) if n in outer]
        g = f"{v}.__globals__" if self.fresh else self.guards.constant(outer)
        if absent := [n for n in global_names(code) if n not in outer]:
            self.guards.refuse(" or ".join(f"{n!r} in {g}" for n in absent))
        for name in names:
            text = place(v, name=name) if self.fresh else f"{g}[{name!r}]"
            namespace[name] = self.wrapped(outer[name], Place(text, name))
        namespace.update(replaced_builtins(self, global_names(code), outer))
        refuse_class_attribute(attribute_names(code), [namespace[n] for n in names])
        for i, (old, new) in enumerate(zip(function.__closure__ or (), cells, strict=True)):
            text = place(v, cell=i) if self.fresh else f"{self.guards.constant(old)}.cell_contents"
            if filled(old):
                new.cell_contents = self.wrapped(old.cell_contents, Place(text, code.co_freevars[i]))
            else:
                self.guards.refuse(f"_filled({text.removesuffix('.cell_contents')})")
        self._defaults(copy, function, v)
        named_as(copy, function)
        attributes = vars(function).items()
        vars(copy).update({n: self.wrapped(x, Place(f"{v}.__dict__[{n!r}]", n)) for n, x in attributes})
        if looks_names_up(code):
            self.unseen()
        return copy

    def _defaults(self, copy: types.FunctionType, function: types.FunctionType, v: str) -> None:
        """Give the copy of a function the traced replacements of its defaults."""
        defaults, named = function.__defaults__, function.__kwdefaults__
        if defaults:
            self.guards.refuse(f"len({v}.__defaults__ or ()) != {len(defaults)}")
            places = [Place(f"{v}.__defaults__[{i}]", f"default {i}") for i in range(len(defaults))]
            copy.__defaults__ = tuple([self.wrapped(x, p) for x, p in zip(defaults, places, strict=True)])
        elif self.fresh:
            self.guards.refuse(f"{v}.__defaults__")
        if named:
            self.guards.keys(f"({v}.__kwdefaults__ or ())", named)
            copy.__kwdefaults__ = {n: self.wrapped(x, Place(f"{v}.__kwdefaults__[{n!r}]", n)) for n, x in named.items()}
        elif self.fresh:
            self.guards.refuse(f"{v}.__kwdefaults__")

    def method(self, x: types.MethodType, v: str) -> Any:
        """A method bound to the traced replacement of its object."""
        owner = x.__self__ if isinstance(x.__self__, type) else type(x.__self__)
        if not isinstance(x.__func__, types.FunctionType) or _of_library(owner):
            return x
        return self.bound(x.__func__, self.of_object(x.__self__, "self", f"{v}.__self__"))

    # The protocol of proxies.

    def attribute(self, owner: Any, key: str, name: str) -> Any:
        """The traced replacement of an attribute."""
        try:
            value = getattr(owner, key)
        except AttributeError:  # a later call may find it
            self.unseen()
            raise
        base, _ = self.objects[id(owner)]
        # The compiler normalizes other identifiers.
        usual = key.isascii() and key.isidentifier() and not keyword.iskeyword(key)
        return self.wrapped(value, Place(f"{base}.{key}" if usual else f"getattr({base}, {key!r})", f"{name}.{key}"))

    def item(self, owner: Any, key: Any, name: str) -> Any:
        """The traced replacement of an item."""
        return self.wrapped(owner[key], self._item(self.objects[id(owner)][0], key, name))

    def bound(self, function: types.FunctionType, owner: Any) -> Any:
        """The traced replacement of a method, bound to a proxy."""
        if ours(function):
            return types.MethodType(function, unwrapped(owner))
        return types.MethodType(self.rebound(function, self._named(function), "fixed"), owner)

    def special(self, owner: Any, key: str) -> None:
        """Guard a special method, which Python looks up on the class of an object."""
        self._same(self.guards.look(f"type({self.objects[id(owner)][0]}).{key}"), getattr(type(owner), key))

    def member(self, kind: type, key: str) -> None:
        """Guard a method of a class."""
        self._same(self.guards.look(f"{self._named(kind)}.__dict__[{key!r}]"), vars(kind)[key])

    def called(self, x: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a captured object that is called."""
        if isinstance(x, type):
            if not (captures_nothing(x) and captures_nothing(type(x))):
                self.unseen()
            return x(*args, **options)
        function = x.__call__
        if isinstance(function, types.MethodType):
            return self.method(function, f"{self.objects[id(x)][0]}.__call__")(*args, **options)
        self.unseen()
        return x(*args, **options)

    def of_object(self, x: Any, name: str = "", v: str = "") -> Any:
        """The placeholder of an object, a class or a module, which guards know by `v`: the same each time."""
        is_namespace = isinstance(x, (types.ModuleType, type))
        if fixed(x) or is_constant(x) or is_plain(x):
            return x
        if not is_namespace and _of_library(type(x)):
            if not isinstance(x, _UNCHANGING) and type(x).__module__.partition(".")[0] != "portmm":
                self.unseen()
            return x
        if id(x) not in self.objects:
            self.kept.append(x)
            if is_namespace or not (v or self.fresh):
                v = self.guards.constant(x)
            elif not v:
                self.unseen()
            self.objects[id(x)] = v or "None", Namespace(self, x, name) if is_namespace else proxy(self, x, name)
        return self.objects[id(x)][1]


def _of_numbers(values: Any) -> bool:
    """Whether all are plain values, or floats that an array of doubles holds."""
    return all(type(x) in (float, np.float64) or is_plain(x) for x in {type(x): x for x in values}.values())


def _of_library(kind: type) -> bool:
    """Test for a class of a library, not of the user: its objects are not traced."""
    return kind.__module__.partition(".")[0] in ("builtins", "portmm", "numpy", "functools", "operator", "ml_dtypes")
