"""Captured numbers in a traced function.

Owns `Number`, which stands for a number that each call passes. It has the class of the number, and arithmetic with it
builds expressions; where Python must know its value (an if, a format, a key of a dict), it raises TraceError, and the
function is traced again with the value as a constant.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import TraceError
from portmm.trace.closures import COMPUTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.spec.expr import Expr
    from portmm.trace.recorder import Recorder


class Number:
    """A captured number, or one that each call computes from such.

    Attributes:
        key: by which calls look it up.
        kind: its class.
    """

    __slots__ = ("key", "kind", "recorder")
    placeholder_ = True

    def __init__(self, recorder: Recorder, key: tuple[Any, ...], kind: type) -> None:
        self.recorder, self.key, self.kind = recorder, key, kind

    @property
    def expr(self) -> Expr:
        """Its value in expressions."""
        return self.recorder.number(self.key)

    @property
    def __class__(self) -> Any:
        """The class of the number."""
        return self.kind

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TypeError("the class of a number cannot be set")

    def broadcast_(self) -> Expr:
        """The value as an operand."""
        return self.expr

    def __getattr__(self, name: str) -> Any:
        if name in {"record_", "call_", "along_"}:  # of other traced values
            raise AttributeError(name)
        raise TraceError(f".{name} of a captured number depends on its value")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        args = tuple(x.expr if type(x) is Number else x for x in inputs)
        return self.expr.__array_ufunc__(ufunc, method, *args, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return self.expr.__array_function__(function, types, args, options)


def _arithmetic(function: Callable[..., Any]) -> tuple[Any, Any]:
    """The methods of an operator, and of the operator with its operands reversed."""

    def method(self: Number, *others: Any) -> Any:
        return _result(function, (self, *others))

    def reflected(self: Number, other: Any) -> Any:
        return _result(function, (other, self))

    return method, reflected


def _result(function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """A number again if all operands are, which Python computes in each call; else an expression."""
    kinds = [x.kind if type(x) is Number else type(x) for x in operands]
    if not all(issubclass(kind, (int, float, np.number)) for kind in kinds):
        return function(*(x.expr if type(x) is Number else x for x in operands))
    recorder = next(x.recorder for x in operands if type(x) is Number)
    # As text, too: 0.0 and -0.0 are equal.
    of = tuple((True, x.key) if type(x) is Number else (False, x, repr(x)) for x in operands)
    return Number(recorder, (COMPUTED, function, of), type(function(*(kind(1) for kind in kinds))))


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _method, _reflected = _arithmetic(getattr(operator, _name))
    setattr(Number, f"__{_name}__", _method)
    setattr(Number, f"__r{_name}__", _reflected)
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name))[0])


def _comparison(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: Number, other: Any) -> Any:
        if type(other) is Number or isinstance(other, (int, float, np.generic)):
            raise TraceError("a comparison of captured numbers depends on their values")
        return function(self.expr, other)

    return method


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _comparison(getattr(operator, _name)))


def refuse_values(kind: type, error: type[TraceError], names: tuple[str, ...] = ()) -> None:
    """Give a class of numbers the special methods that need a value, and others by name: they raise an error."""

    def needing(name: str) -> Any:
        def method(*_: Any, **__: Any) -> Any:
            raise error(f"{name} of a number depends on its value")

        return method

    for name in (*_OF_VALUES, *names):
        setattr(kind, f"__{name}__", needing(name))


_OF_VALUES = (
    "bool", "float", "int", "index", "complex", "hash", "repr", "str", "format", "round", "trunc", "floor", "ceil",
    "len", "iter", "contains", "getitem", "array", "divmod", "rdivmod",
)  # fmt: skip
refuse_values(Number, TraceError, ("mod", "rmod", "floordiv", "rfloordiv"))
