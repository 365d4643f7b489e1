"""Element-wise operators, conversions and comparisons."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.onnx.model import Node, numpy_type
from portmm.onnx.operators import MICROSOFT, UnsupportedError, is_traced, operator
from portmm.spec import elementwise as e
from portmm.trace.placeholders import Placeholder

FLOATS = ("float32", "float16", "bfloat16", "float64")
CASTS = frozenset((
    *FLOATS, "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
))  # fmt: skip
"""Types between which ONNX converts as NumPy does."""


def literals(*values: Any) -> list[Any]:
    """Operands of an element-wise operation, constants of one element as numbers where that changes no shape."""
    rank = max((x.ndim for x in values if isinstance(x, Placeholder)), default=-1)
    known = [isinstance(x, np.ndarray) and not isinstance(x, Placeholder) for x in values]
    return [_literal(x) if k and x.size == 1 and x.ndim <= rank else x for k, x in zip(known, values, strict=True)]


def _literal(x: Any) -> Any:
    if x.dtype.name in ("float32", "float16"):
        return x.reshape(())[()]
    if x.dtype.name in ("bfloat16", "float64"):
        return float(x.reshape(()))
    return x.reshape(()).item() if x.dtype.kind in "iub" else x


def _simple(names: str, function: Callable[..., Any], *, computed: bool = False) -> None:
    """Add operators of any number of operands without attributes."""
    operator(*names.split(), computed=computed)(lambda _, *xs: function(*literals(*xs)))


def _of_floats(names: str, function: Callable[[Any], Any]) -> None:
    """Add operators of one float operand, whose results have its type."""

    def run(_: Node, x: Any) -> Any:
        if x.dtype.name not in FLOATS:
            raise UnsupportedError
        return same_type(function(x), x)

    operator(*names.split())(run)


def same_type(value: Any, x: Any) -> Any:
    """A value in the type of x."""
    return value if value.dtype == x.dtype else value.astype(x.dtype)


def _divided(a: Any, b: Any) -> Any:
    """A quotient; of integers without its fraction."""
    kind = (a if hasattr(a, "dtype") else b).dtype.kind
    if kind not in "iu":
        return a / b
    if is_traced(a, b):
        raise UnsupportedError
    quotient = a // b
    return quotient + ((a % b != 0) & ((a < 0) != (b < 0))).astype(quotient.dtype)


def _arithmetic(name: str, function: Callable[..., Any]) -> None:
    """Add an operator whose results have the type of its operands, also where NumPy's scalars would widen it."""

    def run(_: Node, *xs: Any) -> Any:
        return same_type(np.asarray(y) if isinstance(y := function(*literals(*xs)), np.generic) else y, xs[0])

    operator(name)(run)


for _names, _function in (
    ("Add", lambda a, b: a + b), ("Sub", lambda a, b: a - b), ("Mul", lambda a, b: a * b), ("Div", _divided),
    ("Neg", lambda x: -x), ("Abs", abs),
    ("Min", lambda *xs: functools.reduce(e.minimum, xs)), ("Max", lambda *xs: functools.reduce(e.maximum, xs)),
    ("Sum", lambda *xs: functools.reduce(lambda a, b: a + b, xs)),
):  # fmt: skip
    _arithmetic(_names, _function)
for _names, _function in (
    ("Not", np.logical_not),
    ("Equal", lambda a, b: a == b), ("Greater", lambda a, b: a > b), ("Less", lambda a, b: a < b),
    ("GreaterOrEqual", lambda a, b: a >= b), ("LessOrEqual", lambda a, b: a <= b),
    ("And", lambda a, b: a & b), ("Or", lambda a, b: a | b), ("Xor", lambda a, b: a != b),
):  # fmt: skip
    _simple(_names, _function)
for _names, _function in (
    ("Floor", np.floor), ("Ceil", np.ceil), ("Round", np.rint), ("Sign", np.sign), ("IsNaN", np.isnan),
    ("Sin", np.sin), ("Cos", np.cos), ("Tan", np.tan), ("Asin", np.arcsin), ("Acos", np.arccos), ("Atan", np.arctan),
    ("Sinh", np.sinh), ("Cosh", np.cosh), ("Asinh", np.arcsinh), ("Acosh", np.arccosh), ("Atanh", np.arctanh),
    ("BitwiseAnd", np.bitwise_and), ("BitwiseOr", np.bitwise_or), ("BitwiseXor", np.bitwise_xor),
    ("BitwiseNot", np.bitwise_not),
):  # fmt: skip
    _simple(_names, _function, computed=True)
for _names, _function in (
    ("Exp", e.exp), ("Log", e.log), ("Sqrt", e.sqrt), ("Sigmoid", e.sigmoid), ("Tanh", e.tanh),
    ("Softplus", e.softplus), ("Reciprocal", lambda x: 1.0 / x), ("HardSwish", e.hard_swish),
    ("Softsign", lambda x: x / (1.0 + abs(x))), ("Mish", lambda x: x * e.tanh(e.softplus(x))),
):  # fmt: skip
    _of_floats(_names, _function)


def _activation(name: str, function: Callable[..., Any], **defaults: float) -> None:
    """Add an operator of one operand, whose results have its type, with attributes that are numbers."""

    def run(node: Node, x: Any) -> Any:
        return same_type(function(x, **{key: float(node.attribute(key, y)) for key, y in defaults.items()}), x)

    operator(name, domains=(MICROSOFT,) if name == "QuickGelu" else ("",))(run)


_activation("LeakyRelu", lambda x, alpha: e.where(x >= 0, x, x * alpha), alpha=0.01)
_activation("Elu", lambda x, alpha: e.where(x >= 0, x, alpha * e.expm1(x)), alpha=1.0)
_activation("Celu", lambda x, alpha: e.where(x >= 0, x, alpha * e.expm1(x * (1.0 / alpha))), alpha=1.0)
_activation(
    "Selu", lambda x, alpha, gamma: e.where(x > 0, x, alpha * e.expm1(x)) * gamma, alpha=1.6732632, gamma=1.0507010
)
_activation("HardSigmoid", lambda x, alpha, beta: e.clip(x * alpha + beta, 0.0, 1.0), alpha=0.2, beta=0.5)
_activation("ThresholdedRelu", lambda x, alpha: e.where(x > alpha, x, 0.0), alpha=1.0)
_activation("Swish", lambda x, alpha: e.silu(x) if alpha == 1 else x * e.sigmoid(x * alpha), alpha=1.0)
_activation("QuickGelu", lambda x, alpha: x * e.sigmoid(x * alpha), alpha=1.702)


@operator("Where")
def _where(_: Node, condition: Any, a: Any, b: Any) -> Any:
    return same_type(e.where(*literals(condition, a, b)), a)


@operator("Relu")
def _relu(_: Node, x: Any) -> Any:
    return e.maximum(x, 0.0 if x.dtype.name in FLOATS else 0) if x.dtype.kind != "u" else x


@operator("PRelu")
def _prelu(_: Node, x: Any, slope: Any) -> Any:
    (slope,) = literals(slope)
    return same_type(e.where(x >= 0, x, x * slope), x)


@operator("Shrink")
def _shrink(node: Node, x: Any) -> Any:
    if x.dtype.name not in FLOATS:
        raise UnsupportedError
    bias, lambd = float(node.attribute("bias", 0.0)), float(node.attribute("lambd", 0.5))
    return same_type(e.where(x < -lambd, x + bias, e.where(x > lambd, x - bias, 0.0)), x)


@operator("Erf")
def _erf(node: Node, x: Any) -> Any:
    if x.dtype.name not in FLOATS:
        raise UnsupportedError
    return same_type((e.fast_erf if _rounded(node, x) else e.erf)(x), x)


ROUNDED = "rounded"
"""Attribute of nodes of `precision` whose results are parts of those that are rounded to a narrow type."""


def _rounded(node: Node, x: Any) -> bool:
    """Whether results are rounded: those of float64 are not."""
    return bool(node.attribute(ROUNDED)) and x.dtype != np.float64


@operator("Gelu", domains=("", MICROSOFT))
def _gelu(node: Node, x: Any) -> Any:
    if _rounded(node, x) and node.attribute("approximate", "none") == "none":
        x = e.maximum(x, -10.0)  # where the result is 0; -inf times 0 is NaN
        return x * (e.fast_erf(x * math.sqrt(0.5)) * 0.5 + 0.5)
    return same_type((e.gelu_tanh if node.attribute("approximate", "none") == "tanh" else e.gelu)(x), x)


@operator("FastGelu", "BiasGelu", domains=(MICROSOFT,))
def _bias_gelu(node: Node, x: Any, bias: Any = None) -> Any:
    x = x if bias is None else x + bias
    return same_type((e.gelu_tanh if node.op == "FastGelu" else e.gelu)(x), x)


@operator("Mean")
def _mean(_: Node, *xs: Any) -> Any:
    return same_type(functools.reduce(lambda a, b: a + b, literals(*xs)) * (1.0 / len(xs)), xs[0])


@operator("Clip")
def _clip(node: Node, x: Any, low: Any = None, high: Any = None) -> Any:
    low, high = node.attribute("min", low), node.attribute("max", high)
    bounds = [np.asarray(y, x.dtype) if isinstance(y, float) else y for y in (low, high)]
    _, low, high = literals(x, *bounds)
    x = x if low is None else e.maximum(x, low)
    return x if high is None else e.minimum(x, high)


@operator("Pow")
def _pow(_: Node, x: Any, power: Any) -> Any:
    if is_traced(x) and not is_traced(power) and power.size == 1 and power.ndim <= x.ndim:
        exponent = float(power.reshape(()))
        if x.dtype.name in FLOATS and exponent == 0.5:
            return e.sqrt(x)
        if x.dtype.name in FLOATS and exponent == int(exponent) and 1 <= exponent <= MOST_POWER:
            return functools.reduce(lambda a, b: a * b, [x] * int(exponent))
    if is_traced(x, power):
        raise UnsupportedError
    with np.errstate(all="ignore"):
        return np.power(x, power).astype(x.dtype)


MOST_POWER = 4


@operator("Mod", computed=True)
def _mod(node: Node, a: Any, b: Any) -> Any:
    return np.fmod(a, b) if node.attribute("fmod", 0) else np.mod(a, b)


@operator("BitShift", computed=True)
def _shift(node: Node, a: Any, b: Any) -> Any:
    return np.left_shift(a, b) if node.attribute("direction") == "LEFT" else np.right_shift(a, b)


@operator("IsInf", computed=True)
def _isinf(node: Node, x: Any) -> Any:
    up, down = node.attribute("detect_positive", 1), node.attribute("detect_negative", 1)
    return (np.isposinf(x) if up else np.zeros(x.shape, bool)) | (np.isneginf(x) if down else np.zeros(x.shape, bool))


@operator("Identity")
def _identity(_: Node, x: Any) -> Any:
    return x


@operator("Dropout")
def _dropout(node: Node, x: Any, ratio: Any = None, training: Any = None) -> Any:
    if training is not None and (is_traced(training) or bool(training)):
        raise UnsupportedError
    del ratio
    if len(node.outputs) < 2:
        return x
    if is_traced(x):
        raise UnsupportedError
    return x, np.ones(x.shape, x.dtype if node.version < 10 else bool)


@operator("Cast")
def _cast(node: Node, x: Any) -> Any:
    return converted(x, np.dtype(numpy_type(node.attribute("to"))))


@operator("CastLike")
def _cast_like(_: Node, x: Any, like: Any) -> Any:
    return converted(x, like.dtype)


def converted(x: Any, wanted: Any) -> Any:
    """An array in another type."""
    if x.dtype.name not in CASTS or wanted.name not in CASTS:
        raise UnsupportedError
    return x if x.dtype == wanted else x.astype(wanted)
