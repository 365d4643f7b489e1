"""Placeholders of the arrays and numbers of a function that is traced: in epilogues and in fused functions alike.

Owns `Array` and `Number`, which have the class of what they stand for, `Indices`, and the table of operators. What an
operation with a placeholder becomes is its recorder's answer: an expression of one element of a tile
(`trace.recorder.Elements`), or a node of a graph of whole arrays (`fusion.recorder.WholeArrays`). Where Python must
know the value of a number (an if, a format, a key of a dict), `ByValueError` makes the function be traced again with
the value as a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from portmm.errors import TraceError


class ByValueError(TraceError):
    """Raised where tracing needs the value of a number that varies per call: trace again, with its value."""


class Placeholder:
    """Stand-in for a value while a function is traced.

    Attributes:
        recorder: of the trace; its methods `operation`, `ufunc`, `function`, `kind`, `attribute`, `item` and `value`
            return what becomes of operations, and `refusal` the error for what cannot be traced.
        node: the value, as the recorder knows it.
    """

    __slots__ = ("node", "recorder")
    __hash__ = object.__hash__
    __array_priority__ = 1000
    placeholder_ = True

    def __init__(self, recorder: Any, node: Any) -> None:
        self.recorder, self.node = recorder, node

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return self.recorder.ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return self.recorder.function(function, types, args, options)

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _OF_RECORDERS:  # functions of portmm look for them on values
            method = getattr(self.recorder, name)
            return partial(method, self) if name == "broadcast_" else method
        return self._attribute(name)

    def _attribute(self, name: str) -> Any:
        raise NotImplementedError


_OF_RECORDERS = frozenset(("record_", "call_", "call_conv_", "matmul_", "broadcast_"))
_OF_OTHERS = frozenset(("family",))
"""Attributes that functions of portmm look for on other values."""


class Number(Placeholder):
    """A number that varies from call to call."""

    __slots__ = ()

    @property
    def __class__(self) -> Any:
        return self.recorder.kind(self)

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TypeError("the class of a number cannot be set")

    def _attribute(self, name: str) -> Any:
        if name.startswith("_") or name in _OF_OTHERS:
            raise AttributeError(name)
        raise ByValueError(f".{name} of a number depends on its value")


class Array(Placeholder):
    """An array."""

    __slots__ = ()

    @property
    def __class__(self) -> Any:
        return self.recorder.kind(self)

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise self.recorder.refusal("the class of a traced array cannot be set")

    def _attribute(self, name: str) -> Any:
        if name in _OF_OTHERS:
            raise AttributeError(name)
        if name in _CHANGES:
            raise self.recorder.refusal(
                f"{name}() changes an array in place, once, while the function is traced; use the function of NumPy "
                "that returns a new one"
            )
        return self.recorder.attribute(self, name)

    @property
    def shape(self) -> Any:
        """Extents, as the array's."""
        return self.recorder.attribute(self, "shape")

    @property
    def ndim(self) -> Any:
        """Number of dimensions."""
        return self.recorder.attribute(self, "ndim")

    def __repr__(self) -> str:
        return f"<traced {self.dtype} {self.shape}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.recorder.value(self, "array", dtype)

    def __getitem__(self, key: Any) -> Any:
        return self.recorder.item(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self.recorder.refusal("[...] = changes an array in place; use pm.where, or compute a new array")

    def __delitem__(self, key: Any) -> None:
        self.__setitem__(key, None)


_CHANGES = frozenset(("sort", "fill", "put", "partition", "resize", "itemset", "setfield", "setflags", "byteswap"))
IN_PLACE = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
"""Operators of two operands that have reversed forms, and forms that work in place."""
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_OF_VALUES = ("bool", "float", "int", "index", "complex", "contains")
"""Special methods that ask for values."""
_OF_NUMBERS = ("array", "hash", "repr", "str", "format", "round", "trunc", "floor", "ceil", "len", "iter", "getitem",
               "divmod", "rdivmod")  # fmt: skip
"""Further methods of numbers; each needs the number's value."""


def _operators() -> None:
    """Define the operators of placeholders."""

    def operation(name: str) -> None:
        function = getattr(operator, f"{name}_" if name in ("and", "or") else name)

        def method(self: Placeholder, *others: Any) -> Any:
            return self.recorder.operation(name, function, (self, *others))

        def reflected(self: Placeholder, other: Any) -> Any:
            return self.recorder.operation(name, function, (other, self))

        def in_place(self: Array, _: Any) -> Any:
            raise self.recorder.refusal(
                f"an operator with = changes an array in place; write x = x {IN_PLACE[name]} ..."
            )

        of = Array if name == "matmul" else Placeholder
        setattr(of, f"__{name}__", method)
        if name in IN_PLACE:
            setattr(of, f"__r{name}__", reflected)
            setattr(Array, f"__i{name}__", in_place)

    for name in (*IN_PLACE, *COMPARISONS, "neg", "pos", "abs", "invert"):
        operation(name)


def _questions() -> None:
    """Define the special methods of placeholders that ask for values."""

    def question(name: str) -> None:
        def of_array(self: Array, *args: Any) -> Any:
            return self.recorder.value(self, name, *args)

        def of_number(*_: Any, **__: Any) -> Any:
            raise ByValueError(f"{name} of a number depends on its value")

        setattr(Number, f"__{name}__", of_number)
        if name in _OF_VALUES:
            setattr(Array, f"__{name}__", of_array)

    for name in (*_OF_VALUES, *_OF_NUMBERS):
        question(name)


_operators()
_questions()


class Indices:
    """Indices of an element of the result along each axis: of a product, row m, column n, item b of a batch.

    Args:
        names: the name of each index, and its axis or what stands for it.
        make: an index of an axis.
    """

    def __init__(self, names: dict[str, Any], make: Callable[[Any], Any]) -> None:
        self._names = tuple(names)
        for name, axis in names.items():
            setattr(self, name, make(axis))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = ", ".join(f"i.{x}" for x in self._names)
        raise TraceError(f"there is no index {name!r} here; there are {known}")


def rebuilt(x: Any, change: Callable[[Any], Any]) -> Any:
    """Nested lists, tuples and dicts with `change` applied to their leaves."""
    if type(x) in (list, tuple):
        return type(x)([rebuilt(y, change) for y in x])
    if type(x) is dict:
        return {k: rebuilt(y, change) for k, y in x.items()}
    return change(x)
