"""Proxies of what a traced function captures, and builtins that ask what a value is.

Owns `Proxy`, a captured object whose attributes are traced, `Namespace`, a captured class or module, `unwrapped`, and
`BUILTINS`, by name: the functions that replace builtins among the globals of a traced function.
A proxy answers as its object does to isinstance, comparisons, conversions and every special method of the object's
class, so that a function takes the same branches while it is traced as without tracing. Special methods that are
written in Python run on the proxy, and what they capture is traced too. `isinstance` and `match` need no replacement,
since placeholders name the class of the value as their own.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from enum import EnumType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from portmm.errors import TraceError


class Scope(Protocol):
    """The captured values of one trace."""

    def attribute(self, owner: Any, key: str, name: str) -> Any:
        """The traced replacement of an attribute of an object, `name` being the object's in messages."""

    def item(self, owner: Any, key: Any, name: str) -> Any:
        """The traced replacement of an item of an object."""

    def bound(self, function: types.FunctionType, owner: Any) -> Any:
        """The traced replacement of a method, bound to a proxy."""

    def special(self, owner: Any, key: str) -> None:
        """Guard a special method, which Python looks up on the class of an object."""

    def member(self, kind: type, key: str) -> None:
        """Guard a method of a class."""

    def called(self, x: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a captured object that is called."""

    def of_object(self, x: Any, name: str = "") -> Any:
        """The placeholder of an object, a class or a module: the same each time."""

    def unseen(self) -> None:
        """Note that the trace depends on values that no later call compares."""


_OWN = frozenset(
    (
        "__new__", "__init__", "__del__", "__init_subclass__", "__getattribute__", "__getattr__", "__setattr__",
        "__delattr__", "__class__", "__dict__", "__weakref__", "__slots__", "__reduce__", "__reduce_ex__",
        "__getstate__", "__setstate__", "__sizeof__", "__dir__", "__subclasshook__", "__class_getitem__",
        "__instancecheck__", "__subclasscheck__", "__array__", "__array_interface__", "__array_struct__",
        "__array_ufunc__", "__array_function__", "__array_priority__", "__array_wrap__", "__array_finalize__",
    )
)  # fmt: skip
"""Special methods that are not forwarded: of creation, of attributes, and of NumPy."""
_FIELDS = ("__dataclass_fields__", "__dataclass_params__", "__match_args__")
"""Attributes of classes that functions look for on the type of an object."""
_CHANGES = frozenset(("__setitem__", "__delitem__")) | {
    f"__i{x}__"
    for x in "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split()  # noqa: SIM905
}


_CONVERSIONS = frozenset(("__float__", "__int__", "__index__", "__bool__", "__complex__"))


class Proxy:
    """A captured object in a traced function; see the module."""

    __slots__ = ("__weakref__", "_portmm_captured")
    placeholder_ = True

    def __init__(self, scope: Scope, x: Any, name: str) -> None:
        object.__setattr__(self, "_portmm_captured", (scope, x, name, {}))

    @property
    def __class__(self) -> Any:
        return type(_captured(self)[1])

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TraceError("the class of a captured object cannot be set")

    def __getattr__(self, key: str) -> Any:
        scope, x, name, known = _captured(self)
        if key not in known:
            known[key] = scope.attribute(x, key, name)
        return known[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise TraceError(f"setting .{key} of a captured object cannot be traced; return what it should hold")

    def __delattr__(self, key: str) -> None:
        raise TraceError(f"deleting .{key} of a captured object cannot be traced")

    def __eq__(self, other: object) -> Any:
        return _captured(self)[1] is unwrapped(other)

    def __ne__(self, other: object) -> Any:
        equal = self == other
        return equal if equal is NotImplemented else not equal

    def __hash__(self) -> int:
        return hash(_captured(self)[1])

    def __repr__(self) -> str:
        _captured(self)[0].unseen()
        return repr(_captured(self)[1])


def _captured(x: Proxy) -> tuple[Scope, Any, str, dict[str, Any]]:
    return object.__getattribute__(x, "_portmm_captured")


_classes: WeakKeyDictionary[type, type[Proxy]] = WeakKeyDictionary()


def proxy(scope: Scope, x: Any, name: str) -> Proxy:
    """The proxy of an object."""
    kind = type(x)
    known = _classes.get(kind)
    if known is None:
        special: dict[str, Any] = {"__slots__": ()}
        for owner in reversed(kind.__mro__[:-1]):
            for key, value in vars(owner).items():
                if key in _FIELDS:
                    special[key] = value
                elif key.startswith("__") and key.endswith("__") and key not in _OWN:
                    if value is None:
                        special[key] = None  # as __hash__ of a class without hashes
                    elif callable(value):
                        special[key] = _forwarded(key)
        if "__eq__" in special and "__ne__" not in special:
            special["__ne__"] = Proxy.__ne__
        known = _classes[kind] = type(kind.__name__, (Proxy,), special)
    return known(scope, x, name)


def _forwarded(key: str) -> Callable[..., Any]:
    """A special method of proxies, which runs that of the object's class."""

    def method(self: Proxy, *args: Any, **options: Any) -> Any:
        scope, x, name, _ = _captured(self)
        function = next(vars(t)[key] for t in type(x).__mro__ if key in vars(t))
        if isinstance(function, types.FunctionType):
            scope.special(x, key)
            result = scope.bound(function, self)(*args, **options)
            return getattr(result, key)() if key in _CONVERSIONS and hasattr(type(result), "placeholder_") else result
        if key in _CHANGES:
            raise TraceError(
                f"{key} changes a captured {type(x).__name__} in place, once, while the function is traced"
            )
        if key == "__getitem__":
            return scope.item(x, unwrapped(args[0]), name)
        if key == "__call__":
            return scope.called(x, args, options)
        scope.unseen()
        return function.__get__(x, type(x))(*(unwrapped(y) for y in args), **options)

    method.__name__ = key
    return method


class Namespace:
    """A captured class or module: its arrays are seen as traced ones, its numbers as arguments of each call."""

    __slots__ = ("__weakref__", "_portmm_captured")
    placeholder_ = True

    def __init__(self, scope: Scope, x: Any, name: str) -> None:
        self._portmm_captured: tuple[Scope, Any, str, dict[str, Any]] = (scope, x, name, {})

    def __getattr__(self, key: str) -> Any:
        scope, x, name, known = self._portmm_captured
        if key == "__bases__":  # of which issubclass asks
            return (x,) if isinstance(x, type) else getattr(x, key)
        if key not in known:
            known[key] = scope.attribute(x, key, name)
        return known[key]

    def __call__(self, *args: Any, **options: Any) -> Any:
        """An instance of the class."""
        scope, x, _, _ = self._portmm_captured
        return scope.called(x, args, options)

    def _members(self) -> Any:
        """The class, whose members are looked at: only those of an enumeration last."""
        scope, x, _, _ = self._portmm_captured
        if not isinstance(x, EnumType):
            scope.unseen()
        return x

    def __getitem__(self, key: Any) -> Any:
        scope, _, name, _ = self._portmm_captured
        return scope.of_object(self._members()[key], name)

    def __iter__(self) -> Any:
        scope, _, name, _ = self._portmm_captured
        return (scope.of_object(y, name) for y in self._members())

    def __len__(self) -> int:
        return len(self._members())

    def __bool__(self) -> bool:
        return True

    def __contains__(self, other: Any) -> bool:
        return unwrapped(other) in self._members()

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, self._portmm_captured[1])

    def __subclasscheck__(self, other: Any) -> bool:
        return issubclass(unwrapped(other), self._portmm_captured[1])

    def __or__(self, other: Any) -> Any:
        return self._portmm_captured[1] | unwrapped(other)

    def __ror__(self, other: Any) -> Any:
        return unwrapped(other) | self._portmm_captured[1]

    def __eq__(self, other: object) -> Any:
        return unwrapped(other) == self._portmm_captured[1]

    def __hash__(self) -> int:
        return hash(self._portmm_captured[1])

    def __repr__(self) -> str:
        return repr(self._portmm_captured[1])


def unwrapped(x: Any) -> Any:
    """The object, class or module of a proxy; other values as they are."""
    if issubclass(type(x), Proxy):
        return _captured(x)[1]
    return x._portmm_captured[1] if type(x) is Namespace else x  # noqa: SLF001 - of this module


def refuse_class_attribute(names: tuple[str, ...], captured: Iterable[Any]) -> None:
    """Refuse x.__class__ beside a captured class, which are compared by `is`: the class has a placeholder.

    Args:
        names: attributes that a function reads.
        captured: the placeholders of what it captures.

    Raises:
        TraceError: it reads both.
    """
    if "__class__" in names:
        for x in captured:
            if type(x) is Namespace and isinstance(unwrapped(x), type):
                name = unwrapped(x).__name__
                raise TraceError(f"x.__class__ beside the class {name} cannot be traced; write type(x) is {name}")


class _Type:
    """The builtin `type`."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, x: Any, *more: Any, **options: Any) -> Any:
        if more or options:
            return type(x, *(unwrapped(y) for y in more), **options)
        inner = unwrapped(x)
        stands_in = inner is x and hasattr(type(x), "placeholder_")  # for an array or a number, whose class it names
        return self.scope.of_object(x.__class__ if stands_in else type(inner))

    def __getattr__(self, name: str) -> Any:
        return getattr(type, name)

    def __instancecheck__(self, x: Any) -> bool:
        return isinstance(unwrapped(x), type)

    def __eq__(self, other: object) -> bool:
        return other is type or isinstance(other, _Type)

    def __hash__(self) -> int:
        return hash(type)


class _Super:
    """The builtin `super` of a proxy: attributes of the classes behind another one."""

    def __init__(self, scope: Scope, kind: type, owner: Proxy) -> None:
        self.__target = scope, kind, owner

    def __getattr__(self, name: str) -> Any:
        scope, kind, owner = self.__target
        x = unwrapped(owner)
        classes = type(x).__mro__
        owner_of = next((t for t in classes[classes.index(kind) + 1 :] if name in vars(t)), None)
        value = None if owner_of is None else vars(owner_of)[name]
        if owner_of is not None and isinstance(value, (types.FunctionType, property)):
            scope.member(owner_of, name)
        if isinstance(value, types.FunctionType):
            return scope.bound(value, owner)
        if isinstance(value, property) and isinstance(value.fget, types.FunctionType):
            return scope.bound(value.fget, owner)()
        if value is None:
            raise AttributeError(f"'super' object has no attribute {name!r}")
        raise TraceError(f"super().{name} of a captured object cannot be traced; call a method, or read self.{name}")


def _super_of(scope: Scope) -> Callable[..., Any]:
    def of_frame(*args: Any) -> Any:
        if not args:  # as the builtin: the first argument of the function that calls it, and the cell __class__
            frame = sys._getframe(1)  # noqa: SLF001
            args = (frame.f_locals["__class__"], frame.f_locals[frame.f_code.co_varnames[0]])
        kind, *owner = (unwrapped(args[0]), *args[1:])
        if owner and isinstance(owner[0], Proxy):
            return _Super(scope, kind, owner[0])
        return super(kind, *owner)

    return of_frame


def _callable(_: Scope) -> Callable[[Any], bool]:
    return lambda x: callable(unwrapped(x))


def _id(_: Scope) -> Callable[[Any], int]:
    def identity(x: Any) -> int:
        if unwrapped(x) is x and hasattr(type(x), "placeholder_"):
            raise TraceError("id() of an array or a number cannot be traced: it differs from call to call")
        return id(unwrapped(x))

    return identity


BUILTINS: dict[str, Callable[[Scope], Any]] = {"type": _Type, "super": _super_of, "callable": _callable, "id": _id}
"""The name of a builtin -> its replacement in a scope."""


def replaced_builtins(scope: Scope, names: tuple[str, ...], namespace: dict[str, Any]) -> dict[str, Any]:
    """Replacements of the builtins that code reads by these names, unless globals of its own hide them."""
    return {name: make(scope) for name, make in BUILTINS.items() if name in names and name not in namespace}
