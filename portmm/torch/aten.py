"""Operators of PyTorch that kernels compute: one row each, from an operator to operations on traced arrays.

Products and attention are in `portmm.torch.products`.

Owns `HANDLERS`, functions of a translator and an operator's arguments. What a row does not take it refuses with
`Unsupported`, and PyTorch computes the operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.spec import elementwise as ew
from portmm.trace.placeholders import Array

LOWEST = float(np.finfo(np.float32).min)
TINY = float(np.finfo(np.float32).tiny)


class Unsupported(Exception):  # noqa: N818 - no error: PyTorch computes it
    """The reason why no kernel computes an operator."""


HANDLERS: dict[str, Any] = {}
MOVES = frozenset(f"aten.{x}" for x in (
    "cat.default", "embedding.default", "gather.default", "index.Tensor",
    "index_select.default", "stack.default",
))  # fmt: skip
"""Operators that move elements: PyTorch is their place, and no report names them."""


def row(*names: str) -> Callable[[Any], Any]:
    """Register a handler for operators."""

    def registered(function: Any) -> Any:
        HANDLERS.update(dict.fromkeys([f"aten.{n}" if "." in n else f"aten.{n}.default" for n in names], function))
        return function

    return registered


# -- element by element ----------------------------------------------------------------

_UNARY: dict[str, Callable[[Any], Any]] = {
    **{n: getattr(ew, n) for n in ("exp", "log", "tanh", "erf", "sigmoid", "sqrt", "rsqrt", "silu", "relu", "expm1")},
    "neg": operator.neg, "abs": abs, "reciprocal": lambda x: 1.0 / x, "square": lambda x: x * x,
    "hardswish": ew.hard_swish, "hardsigmoid": ew.hard_sigmoid,
    "mish": lambda x: x * ew.tanh(ew.softplus(x)), "log_sigmoid": lambda x: -ew.softplus(-x),
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "mul": operator.mul, "div": operator.truediv, "maximum": ew.maximum, "minimum": ew.minimum,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda t, x: function(t.operand(x))


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    return lambda t, x, y: function(*floats(t, x, y))


def floats(t: Any, *values: Any) -> list[Any]:
    """Operands of arithmetic: floats and numbers."""
    operands = [t.operand(x) for x in values]
    if any(isinstance(x, Array) and x.dtype.kind == "b" for x in operands):
        raise Unsupported("arithmetic of booleans")
    return operands


HANDLERS |= {f"aten.{name}.default": _unary(function) for name, function in _UNARY.items()}
HANDLERS |= {
    f"aten.{name}.{overload}": _binary(function)
    for name, function in _BINARY.items()
    for overload in ("default", "Tensor", "Scalar")
}


@row("add.Tensor", "add.Scalar")
def _add(t: Any, x: Any, y: Any, alpha: float = 1) -> Any:
    a, b = floats(t, x, y)
    return a + (b if alpha == 1 else b * alpha)


@row("sub.Tensor", "sub.Scalar")
def _sub(t: Any, x: Any, y: Any, alpha: float = 1) -> Any:
    a, b = floats(t, x, y)
    return a - (b if alpha == 1 else b * alpha)


@row("rsub.Tensor", "rsub.Scalar")
def _rsub(t: Any, x: Any, y: Any, alpha: float = 1) -> Any:
    return _sub(t, y, x, alpha)


@row("gelu")
def _gelu(t: Any, x: Any, approximate: str = "none") -> Any:
    return (ew.gelu if approximate == "none" else ew.gelu_tanh)(t.operand(x))


@row("pow.Tensor_Scalar")
def _pow(t: Any, x: Any, exponent: float) -> Any:
    known: dict[float, Callable[[Any], Any]] = {
        0.5: ew.sqrt, -0.5: ew.rsqrt, -1: lambda y: 1.0 / y, 1: lambda y: y, 2: lambda y: y * y,
        3: lambda y: y * y * y,
    }  # fmt: skip
    if exponent not in known:
        raise Unsupported(f"kernels have no power of {exponent}")
    (y,) = floats(t, x)
    return known[exponent](y)


@row("where.self")
def _where(t: Any, condition: Any, x: Any, y: Any) -> Any:
    c, a, b = (t.operand(z) for z in (condition, x, y))
    if not isinstance(c, Array):
        return a if c else b
    if not isinstance(a, Array) and not isinstance(b, Array):
        a = np.float32(a)  # two of Python's floats would be float64
    return ew.where(c, a, b)


@row("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(t: Any, x: Any, mask: Any, value: Any) -> Any:
    return _where(t, mask, value, x)


@row("logical_not", "bitwise_not")
def _not(t: Any, x: Any) -> Any:
    y = t.operand(x)
    if y.dtype.kind != "b":
        raise Unsupported("bits of numbers")
    return ~y


@row("logical_and", "bitwise_and.Tensor")
def _and(t: Any, x: Any, y: Any) -> Any:
    a, b = t.operand(x), t.operand(y)
    if not all(isinstance(z, Array) and z.dtype.kind == "b" for z in (a, b)):
        raise Unsupported("bits of numbers")
    return a & b


@row("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(t: Any, x: Any, low: Any = None, high: Any = None) -> Any:
    y = t.operand(x)
    y = y if low is None else ew.maximum(y, low)
    return y if high is None else ew.minimum(y, high)


HANDLERS["aten.clamp_max.default"] = lambda t, x, high: _clamp(t, x, None, high)
HANDLERS["aten.hardtanh.default"] = lambda t, x, low=-1.0, high=1.0: _clamp(t, x, low, high)


@row("leaky_relu")
def _leaky(t: Any, x: Any, slope: float = 0.01) -> Any:
    return ew.leaky_relu(t.operand(x), slope)


@row("softplus")
def _softplus(t: Any, x: Any, beta: float = 1, threshold: float = 20) -> Any:
    if beta != 1 or threshold < 20:
        raise Unsupported("softplus with another beta or threshold")
    return ew.softplus(t.operand(x))


@row("_to_copy", "to.dtype")
def _to(t: Any, x: Any, dtype: Any = None, **_: Any) -> Any:
    y = t.operand(x)
    if dtype is not None and not dtype.is_floating_point:
        raise Unsupported(f"a conversion to {dtype}")
    return y  # the caller converts it to the type of the result


# -- views -----------------------------------------------------------------------------


def _same(t: Any, x: Any, *_: Any, **__: Any) -> Any:
    return t.array(x)


for _name in ("clone", "alias", "detach", "contiguous", "lift_fresh", "lift_fresh_copy"):
    HANDLERS[f"aten.{_name}.default"] = _same


def _view(name: str, x: Array, function: Callable[[Any], Any]) -> Any:
    return x.recorder.viewed(name, function, x)


@row("view", "reshape", "_unsafe_view", "_reshape_copy")
def reshape(t: Any, x: Any, shape: Any) -> Any:
    """The same elements in another shape."""
    wanted = tuple(map(int, shape))
    return _view("reshape", t.array(x), lambda y: y.reshape(wanted))


@row("permute")
def _permute(t: Any, x: Any, order: Any) -> Any:
    axes = tuple(order)
    return _view("transpose", t.array(x), lambda y: y.transpose(axes))


@row("transpose.int")
def _transpose(t: Any, x: Any, first: int, second: int) -> Any:
    y = t.array(x)
    return _view("swapaxes", y, lambda z: z.swapaxes(first, second)) if y.ndim else y


@row("t")
def _t(t: Any, x: Any) -> Any:
    return _view("transpose", t.array(x), lambda y: y.T)


@row("expand")
def _expand(t: Any, x: Any, shape: Any, implicit: bool = False) -> Any:  # noqa: ARG001
    y = t.array(x)
    missing = len(shape) - y.ndim
    wanted = tuple([int(n) if n != -1 else y.shape[i - missing] for i, n in enumerate(shape)])
    return _view("broadcast_to", y, lambda z: np.broadcast_to(z, wanted)) if wanted != y.shape else y


@row("unsqueeze")
def _unsqueeze(t: Any, x: Any, dim: int) -> Any:
    return _view("reshape", t.array(x), lambda y: np.expand_dims(y, dim))


@row("squeeze.dim", "squeeze.dims")
def _squeeze(t: Any, x: Any, dims: Any) -> Any:
    y = t.array(x)
    axes = tuple([d for d in ([dims] if isinstance(dims, int) else dims) if y.ndim and y.shape[d] == 1])
    return _view("reshape", y, lambda z: np.squeeze(z, axes)) if axes else y


@row("slice.Tensor")
def _slice(t: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    y = t.array(x)
    index = (*(slice(None),) * (dim % y.ndim), slice(start, end, step))
    if index[-1].indices(y.shape[dim]) == (0, y.shape[dim], 1):
        return y
    return _view("[]", y, lambda z: z[index])


@row("select.int")
def _select(t: Any, x: Any, dim: int, at: int) -> Any:
    y = t.array(x)
    index = (*(slice(None),) * (dim % y.ndim), at)
    return _view("[]", y, lambda z: z[index])


@row("split.Tensor")
def _split(t: Any, x: Any, size: int, dim: int = 0) -> Any:
    n = t.array(x).shape[dim]
    return [_slice(t, x, dim, i, min(i + size, n)) for i in range(0, n, size)]


@row("split_with_sizes")
def _split_sizes(t: Any, x: Any, sizes: Any, dim: int = 0) -> Any:
    ends = np.cumsum(sizes).tolist()
    return [_slice(t, x, dim, end - n, end) for n, end in zip(sizes, ends, strict=True)]


@row("unbind.int")
def _unbind(t: Any, x: Any, dim: int = 0) -> Any:
    return [_select(t, x, dim, i) for i in range(t.array(x).shape[dim])]


@row("sym_size.int")
def _size(t: Any, x: Any, dim: int) -> Any:
    return t.array(x).shape[dim]


# -- along rows ------------------------------------------------------------------------


def _last(x: Array, dims: Any) -> None:
    """Refuse reductions that are not along the last axis."""
    if not x.ndim:
        raise Unsupported("a number has no rows")
    axes = [dims] if isinstance(dims, int) else list(dims or range(x.ndim))
    if [d % x.ndim for d in axes] != [x.ndim - 1]:
        raise Unsupported(f"kernels reduce along the last axis, not {dims}")


def _reduction(function: Callable[[Any], Any]) -> Any:
    def reduced(t: Any, x: Any, dims: Any = None, keepdim: bool = False, **_: Any) -> Any:
        (y,) = floats(t, x)
        _last(y, dims)
        value = function(y)
        return value if keepdim else _view("reshape", value, lambda z: z[..., 0])

    return reduced


HANDLERS["aten.sum.dim_IntList"] = _reduction(ew.sum)
HANDLERS["aten.mean.dim"] = _reduction(ew.mean)
HANDLERS["aten.amax.default"] = _reduction(ew.max)


def row_weights(scores: Any) -> Any:
    """The softmax of rows, zeros for a row of minus infinities."""
    e = ew.exp(scores - ew.maximum(ew.max(scores), LOWEST))
    return e / ew.maximum(ew.sum(e), TINY)


def _of_rows(function: Callable[[Any], Any]) -> Any:
    def run(t: Any, x: Any, dim: int, *_: Any, **__: Any) -> Any:
        y = t.operand(x)
        _last(y, dim)
        return function(y)

    return run


for _name, _function in (("_softmax", ew.softmax), ("_safe_softmax", row_weights), ("_log_softmax", ew.log_softmax)):
    HANDLERS[f"aten.{_name}.default"] = _of_rows(_function)


@row("native_layer_norm")
def _layer_norm(t: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    if len(shape) != 1:
        raise Unsupported("a norm over several axes")
    y = t.operand(x)
    mean = ew.mean(y)
    centred = y - mean
    scale = ew.rsqrt(ew.mean(centred * centred) + eps)
    value = centred * scale
    value = value if weight is None else value * t.operand(weight)
    return [value if bias is None else value + t.operand(bias), mean, scale]


@row("_fused_rms_norm")
def _rms_norm(t: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    if len(shape) != 1:
        raise Unsupported("a norm over several axes")
    y = t.operand(x)
    scale = ew.rsqrt(ew.mean(y * y) + (float(np.finfo(np.float32).eps) if eps is None else eps))
    value = y * scale
    return [value if weight is None else value * t.operand(weight), scale]
