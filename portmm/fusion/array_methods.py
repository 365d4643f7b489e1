"""NumPy's functions and methods that fused functions may use, by name.

Owns `METHODS`, the methods of ndarray as a few operations of `fusion.recorder` (views, conversions, reductions,
products and calls of NumPy), and the tables of functions that are methods, views, copies, or known while tracing.
Element-wise functions are rows of `spec.expr_ops.OPS` and `spec.elementwise`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.fusion.graph import refuse
from portmm.spec import elementwise

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
LOOKS = frozenset(("item", "tolist", "tobytes", "tofile", "dump", "dumps", "data", "ctypes", "flat", "base", "flags"))
"""Attributes and methods that look at values or memory."""
OF_FUNCTIONS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("sum", "max", "amax", "min", "amin", "mean", "var", "std"), frozenset(("axis", "keepdims"))),
    **dict.fromkeys(("reshape", "ravel"), frozenset(("order",))),
    "squeeze": frozenset(("axis",)),
    **dict.fromkeys(("astype", "copy"), frozenset()),
    "repeat": frozenset(("axis",)),
}
"""Functions that are methods -> the options that these have, too."""


def _view(name: str, method: str) -> Callable[..., Any]:
    """A method that returns a view of the same elements."""
    return lambda x, *args: x.recorder.viewed(name, lambda y: getattr(y, method)(*args), x)


def _reshape(x: Any, *shape: Any, order: str = "C") -> Any:
    wanted = shape[0] if len(shape) == 1 else shape
    if order == "C":
        return x.recorder.viewed("reshape", lambda y: y.reshape(wanted), x)
    return x.recorder.viewed("[]", lambda y: y.reshape(wanted, order=order), x)


def _flat(x: Any, order: str = "C") -> Any:
    return _reshape(x, -1, order=order)


def _repeat(x: Any, repeats: Any, axis: Any = None) -> Any:
    """Each element along an axis so many times: a broadcast along a new axis behind it, which is then a part of it.

    NumPy repeats elements by other arguments, or says what is wrong with them.
    """
    if type(repeats) is not int or type(axis) is not int or not -x.ndim <= axis < x.ndim:
        return x.recorder.called("np.repeat", np.repeat, (x, repeats), {"axis": axis})
    at = range(x.ndim)[axis] + 1
    size = (*x.shape[:at], repeats, *x.shape[at:])
    wide = x.recorder.viewed("broadcast_to", lambda y: np.broadcast_to(np.expand_dims(y, at), size), x)
    return _reshape(wide, (*x.shape[: at - 1], x.shape[at - 1] * repeats, *x.shape[at:]))


def _refuse_view(*_: Any, **__: Any) -> Any:
    raise refuse("view() looks at an array's memory; use astype")


def _reduction(name: str, plain: Any) -> Callable[..., Any]:
    """A reduction with a kernel along the last axis."""

    def method(x: Any, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Any:
        return x.recorder.reduced(x, name, axis, keepdims=keepdims, plain=plain, options=options)

    return method


def _composed(name: str, last: Callable[[Any], Any], *, floats: bool = False) -> Callable[..., Any]:
    """A reduction that is computed of others along the last axis, and elsewhere by NumPy."""
    plain = getattr(np, name)

    def method(x: Any, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Any:
        if not is_last(x, axis) or options or (floats and x.dtype.kind != "f"):
            return x.recorder.called(f"np.{name}", plain, (x,), {"axis": axis, "keepdims": keepdims, **options})
        return squeezed(last(x), keepdims)

    return method


def _variance(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return (centred * centred).mean(-1, keepdims=True)


def _clip(x: Any, low: Any = None, high: Any = None) -> Any:
    return elementwise.clip(x, low, high)


METHODS: dict[str, Callable[..., Any]] = {
    "transpose": _view("transpose", "transpose"), "swapaxes": _view("swapaxes", "swapaxes"),
    "squeeze": lambda x, axis=None: _view("reshape", "squeeze")(x, axis),
    "reshape": _reshape, "ravel": _flat, "flatten": _flat, "view": _refuse_view,
    "copy": lambda x, order="C": x.recorder.copied(x),  # noqa: ARG005
    "astype": lambda x, dtype, **_: x.recorder.converted(x, dtype),
    "sum": _reduction("sum", np.sum), "max": _reduction("max", np.max), "mean": _reduction("mean", np.mean),
    "min": _composed("min", lambda x: -(-x).max(-1, keepdims=True), floats=True),
    "var": _composed("var", _variance), "std": _composed("std", lambda x: np.sqrt(x.var(-1, keepdims=True))),
    "dot": np.dot, "clip": _clip, "repeat": _repeat,
}  # fmt: skip
"""Methods of arrays, by name."""


def is_last(x: Any, axis: Any) -> bool:
    """Test whether an axis, possibly None, is the last and only one to reduce."""
    if isinstance(axis, tuple) and len(axis) == 1:
        axis = axis[0]
    if x.ndim == 0:
        return False
    return (axis is None and x.ndim == 1) or (isinstance(axis, (int, np.integer)) and axis in (-1, x.ndim - 1))


def squeezed(x: Any, keepdims: bool) -> Any:
    """The result of a reduction, with or without its last axis."""
    return x if keepdims else x.recorder.viewed("reshape", lambda y: y[..., 0], x)
