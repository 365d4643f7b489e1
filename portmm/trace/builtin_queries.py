"""Builtins that ask what a value is: in a traced function they answer for placeholders as for the values.

Owns `BUILTINS`, by name: the functions that replace builtins among the globals of a traced function.
`isinstance` and `match` need none, since placeholders name the class of the value as their own.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

from portmm.errors import TraceError
from portmm.trace.proxies import Proxy, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.trace.proxies import Scope


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
