"""Captured arrays in a traced function.

Owns `Tensor`, which stands for an array that a function captures: indexed by axes of the result, or broadcast as in
NumPy. It has the array's class and layout; what looks at elements makes the trace hold for this call only.
"""

from __future__ import annotations

import types
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import TraceError
from portmm.spec.epilogue import PRODUCT
from portmm.spec.expr import Expr
from portmm.trace.numpy_names import CHANGES

if TYPE_CHECKING:
    from portmm.trace.recorder import Recorder

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

    @property
    def __class__(self) -> Any:
        """The class of the array."""
        return type(self._array)

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TraceError("the class of a captured array cannot be set")

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
