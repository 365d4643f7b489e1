"""Methods of traced arrays, as NumPy's arrays have them.

Owns `ArrayMethods`, which expresses views, conversions, reductions and products by a few operations of
`fusion.traced_array`: those whose names end in an underscore.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portmm.fusion.graph import refuse
from portmm.spec import elementwise

# ruff: noqa: D102 - the methods are those of ndarray


class ArrayMethods:
    """The methods of ndarray on a traced array."""

    __slots__ = ()
    ndim: Any
    dtype: Any
    view_: Any
    called_: Any
    reduced_: Any
    converted_: Any
    product_: Any
    __neg__: Any

    @property
    def T(self) -> Any:  # noqa: N802 - as NumPy calls it
        return self.transpose()

    @property
    def mT(self) -> Any:  # noqa: N802 - as NumPy calls it
        return self.swapaxes(-1, -2)

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        wanted = shape[0] if len(shape) == 1 else shape
        if order == "C":
            return self.view_("reshape", lambda x: x.reshape(wanted))
        return self.view_("[]", lambda x: x.reshape(wanted, order=order))

    def transpose(self, *axes: Any) -> Any:
        return self.view_("transpose", lambda x: x.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> Any:
        return self.view_("swapaxes", lambda x: x.swapaxes(a, b))

    def squeeze(self, axis: Any = None) -> Any:
        return self.view_("reshape", lambda x: x.squeeze(axis))

    def ravel(self, order: str = "C") -> Any:
        return self.reshape(-1, order=order)

    def flatten(self, order: str = "C") -> Any:
        return self.reshape(-1, order=order)

    def copy(self, order: str = "C") -> Any:
        del order
        return self

    def astype(self, dtype: Any, **options: Any) -> Any:
        del options
        return self.converted_(dtype)

    def view(self, *_: Any, **__: Any) -> Any:
        raise refuse("view() looks at an array's memory; use astype")

    # Reductions.

    def sum(self, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Any:
        return self.reduced_("sum", axis, keepdims=keepdims, plain=np.sum, options=options)

    def max(self, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Any:
        return self.reduced_("max", axis, keepdims=keepdims, plain=np.max, options=options)

    def mean(self, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Any:
        return self.reduced_("mean", axis, keepdims=keepdims, plain=np.mean, options=options)

    def min(self, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Any:
        if not is_last(self, axis) or options or self.dtype.kind != "f":
            return self.called_("np.min", np.min, (self,), {"axis": axis, "keepdims": keepdims, **options})
        return squeezed(-(-self).max(-1, keepdims=True), keepdims)

    def var(self, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Any:
        if not is_last(self, axis) or options:
            return self.called_("np.var", np.var, (self,), {"axis": axis, "keepdims": keepdims, **options})
        centred = self - self.mean(-1, keepdims=True)
        return squeezed((centred * centred).mean(-1, keepdims=True), keepdims)

    def std(self, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Any:
        if not is_last(self, axis) or options:
            return self.called_("np.std", np.std, (self,), {"axis": axis, "keepdims": keepdims, **options})
        return squeezed(np.sqrt(self.var(-1, keepdims=True)), keepdims)

    # Products, and other methods.

    def __matmul__(self, other: Any) -> Any:
        return self.product_(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return self.product_(other, self)

    def __imatmul__(self, other: Any) -> Any:
        raise refuse("@= changes an array in place; write x = x @ ...")

    def dot(self, other: Any) -> Any:
        return np.dot(self, other)  # type: ignore[call-overload] # by __array_function__

    def clip(self, low: Any = None, high: Any = None) -> Any:
        return elementwise.clip(self, low, high)


def is_last(x: Any, axis: Any) -> bool:
    """Test whether an axis, possibly None, is the last and only one to reduce."""
    if isinstance(axis, tuple) and len(axis) == 1:
        axis = axis[0]
    if x.ndim == 0:
        return False
    return (axis is None and x.ndim == 1) or (isinstance(axis, (int, np.integer)) and axis in (-1, x.ndim - 1))


def squeezed(x: Any, keepdims: bool) -> Any:
    """The result of a reduction, with or without its last axis."""
    return x if keepdims else x.view_("reshape", lambda y: y[..., 0])
