"""Placeholders of captured arrays and numbers in a traced function.

Owns `Tensor`, which stands for an array that a function captures: indexed by axes of the result, or broadcast as in
NumPy. It has the array's class and layout; what looks at elements makes the trace hold for this call only. Owns
`Number`, which stands for a number that each call passes. It has the class of the number, and arithmetic with it
builds expressions; where Python must know its value (an if, a format, a key of a dict), it raises TraceError, and the
function is traced again with the value as a constant.
"""

from __future__ import annotations

import operator
import types
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import TraceError
from portmm.spec.epilogue import PRODUCT
from portmm.spec.expr import Expr
from portmm.trace.closures import COMPUTED
from portmm.trace.proxies import posing

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.trace.recorder import Recorder

STATIC: dict[Any, Callable[[Any], Any]] = {
    np.shape: lambda x: x.shape, np.ndim: lambda x: x.ndim, np.size: lambda x: x.size,
}  # fmt: skip
"""Functions of an array's layout, known while it is traced."""
VIEWS = frozenset(
    (
        "transpose", "swapaxes", "moveaxis", "rollaxis", "squeeze", "expand_dims", "broadcast_to", "split",
        "array_split", "hsplit", "vsplit", "atleast_2d", "flip", "matrix_transpose", "permute_dims", "unstack",
    )
)  # fmt: skip
COPIES = frozenset(("concatenate", "stack", "hstack", "vstack", "column_stack", "concat"))
"""Functions that move elements and compute nothing, by NumPy."""
STATIC_METHODS = frozenset(("itemsize", "nbytes"))
CHANGES = frozenset(("sort", "fill", "put", "partition", "resize", "itemset", "setfield", "setflags", "byteswap"))
LOOKS = frozenset(("item", "tolist", "tobytes", "tofile", "dump", "dumps", "data", "ctypes", "flat", "base", "flags"))
METHODS = {
    "sum": {"axis", "keepdims"}, "max": {"axis", "keepdims"}, "amax": {"axis", "keepdims"},
    "min": {"axis", "keepdims"}, "amin": {"axis", "keepdims"}, "mean": {"axis", "keepdims"},
    "var": {"axis", "keepdims"}, "std": {"axis", "keepdims"}, "reshape": {"order"}, "ravel": {"order"},
    "squeeze": {"axis"}, "astype": set(), "copy": set(),
}  # fmt: skip
"""Functions that are methods -> their options."""
SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
"""Operators of two arrays; each has a form that works in place."""


def rebuilt(x: Any, change: Callable[[Any], Any]) -> Any:
    """Nested lists, tuples and dicts with `change` applied to their leaves."""
    if type(x) in (list, tuple):
        return type(x)([rebuilt(y, change) for y in x])
    if type(x) is dict:
        return {k: rebuilt(y, change) for k, y in x.items()}
    return change(x)


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

    __class__ = posing(lambda self: self.kind, "a number", TypeError)

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


Array = np.ndarray[Any, Any]
_LAID = frozenset(("shape", "ndim", "dtype", "size", "strides", "itemsize", "nbytes"))
"""Attributes that do not depend on values."""
_EXTENTS = frozenset(("shape", "size", "strides", "nbytes"))
"""Attributes that depend on extents."""
_VIEWS = frozenset(("T", "mT", "transpose", "swapaxes", "squeeze"))
"""Attributes and methods that return views."""
_SOUGHT = frozenset(("record_", "call_", "along_"))
"""Attributes that portmm's functions look for on other traced values."""


class Tensor:
    """An array that a traced function captured: indexed by axes, or broadcast as in NumPy."""

    placeholder_ = True

    def __init__(self, tracer: Recorder, array: Array, key: tuple[Any, ...]) -> None:
        self._tracer, self._array, self._key = tracer, array, key

    __class__ = posing(lambda self: type(self._array), "a captured array")

    def __getattr__(self, name: str) -> Any:
        if name in CHANGES:
            raise TraceError(f"{name}() changes an array in place, once, while the function is traced")
        if name in _SOUGHT:
            raise AttributeError(name)
        self._seen(name, name in (*_LAID, *_VIEWS))
        self._tracer.by_extents |= name in _EXTENTS
        attribute = getattr(self._array, name)
        if isinstance(attribute, np.ndarray):
            attribute = self._tracer.look(self._array, attribute, lambda x: getattr(x, name))
            return Tensor(self._tracer, attribute, (*self._key, ("attribute", name)))
        self._tracer.lasting &= name in _LAID  # else the result depends on its values
        return partial(self._called, name, attribute) if isinstance(attribute, types.BuiltinMethodType) else attribute

    def _seen(self, what: str, known: bool = False) -> None:
        """Refuse operations on the elements of an array on a device."""
        if not known and id(self._array) in self._tracer.there:
            raise TraceError(f"{what} of an array on a device; compute it before, and let the function capture it")

    def _called(self, name: str, method: Any, *values: Any, **options: Any) -> Any:
        """The result of a method; an array becomes an operand."""
        result = method(*values, **options)
        if not isinstance(result, np.ndarray) or not result.ndim:
            return result
        result = self._tracer.look(self._array, result, lambda x: getattr(x, name)(*values, **options))
        return Tensor(self._tracer, result, (*self._key, ("called", name, repr((values, options)))))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TraceError("[...] = changes an array in place, once, while the function is traced")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        self._seen("the values")
        self._tracer.lasting = False  # the result depends on its values
        return np.asarray(self._array, dtype)

    def __len__(self) -> int:
        self._tracer.by_extents = True
        return len(self._array)

    def __getitem__(self, key: Any) -> Any:
        indices = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(x, Expr) for x in indices):
            integers = [x for x in indices if isinstance(x, (int, np.integer)) and not isinstance(x, bool)]
            basic = all(x is None or x is ... or isinstance(x, (slice, int, np.integer)) for x in indices)
            self._seen(f"[{key!r}]", basic and len(integers) < self._array.ndim)
            item = self._array[key]
            where = (*self._key, ("item", repr(key)))
            if isinstance(item, np.ndarray) and item.ndim:
                self._tracer.lasting = False
                return Tensor(self._tracer, self._tracer.look(self._array, item, lambda x: x[key]), where)
            self._tracer.lasting = False
            return item
        if len(indices) != self._array.ndim:
            raise TraceError(
                f"an array of {self._array.ndim} dimensions is indexed by {len(indices)}; give one for each"
            )
        return self._tracer.operand(self._key, self._array, tuple(self._word(x) for x in indices))

    def _word(self, x: Any) -> str | int:
        if isinstance(x, Expr) and x.op == "index":
            return str(x.args[0])
        if isinstance(x, (int, np.integer)):
            return int(x)
        raise TraceError(f"an array is indexed by {x!r}; use an index as it is (i.m, i.n), or an integer")

    def broadcast_(self) -> Expr:
        """The array as an operand that broadcasts as in NumPy: its last axes are the result's."""
        shape = self._array.shape
        if len(shape) > self._tracer.rank:
            raise TraceError(f"an array of shape {shape} has more dimensions than the result")
        axes = ("bhmn" if self._tracer.rank == 4 else PRODUCT)[-len(shape) :]
        view = tuple("" if n == 1 else x for n, x in zip(shape, axes, strict=True))
        return self._tracer.operand(self._key, self._array, view, exact=True)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _by_numpy(ufunc, method, inputs, options)


def _operator(name: str) -> Any:
    def method(self: Tensor, *others: Any) -> Any:
        own = self.broadcast_()
        args = [x.broadcast_() if isinstance(x, Tensor) else x for x in others]
        return getattr(own, name)(*args)

    return method


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "neg", "abs", "pow",
    "lt", "le", "gt", "ge", "eq", "ne", "and", "rand", "or", "ror", "xor", "rxor", "invert",
):  # fmt: skip
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


def _converted(name: str) -> Any:
    def method(self: Tensor, *others: Any) -> Any:
        self._seen(f"{name}()")
        self._tracer.lasting = False  # the result depends on its values
        return getattr(self._array, f"__{name}__")(*others)

    return method


for _name in ("bool", "int", "float", "complex", "index", "contains"):
    setattr(Tensor, f"__{_name}__", _converted(_name))


def _by_numpy(ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    args = tuple(y.broadcast_() if isinstance(y, Tensor) else y for y in inputs)
    expressions = [y for y in args if isinstance(y, Expr)]
    return expressions[0].__array_ufunc__(ufunc, method, *args, **options)
