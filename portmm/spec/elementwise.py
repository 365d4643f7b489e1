"""Element-wise functions of arrays, and of values in a tile.

Owns the functions that a traced function may call. Called with arrays they compute with NumPy, so that a function
that calls them runs untraced and is its own reference; called with values of a tile they build expressions.
Reductions are along the last axis, which is kept, with extent 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from portmm.errors import TraceError
from portmm.spec import vector_math
from portmm.spec.epilogue import column_reduction, extent, index, reduction
from portmm.spec.expr import FUNCTIONS, UFUNCS, Expr, apply, real
from portmm.util.records import dataclass

TOP = 127
"""The int8 value of the largest magnitude of a quantised row."""
LEAST = 1.5e-36
"""The magnitude below which a row is quantised to zeros: `TOP` divided by a smaller one would overflow."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A result with its output type."""

    value: Any
    dtype: np.dtype[Any]

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise TraceError("cast sets the type of a result; no operation can follow it")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __array_ufunc__


def _traced(*values: Any) -> bool:
    """Whether a value is one in a tile, or an array that represents one."""
    return any([type(x) is Expr or hasattr(x, "broadcast_") for x in values])  # noqa: C419 - faster


def _value(x: Any) -> Any:
    """A value as an operand of expressions."""
    return x.broadcast_() if type(x) is not Expr and hasattr(x, "broadcast_") else x


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of a function of arrays that computes floats of 16 bits in float32, as kernels do, and rounds once."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        values = (*args, *options.values())
        arrays = () if _traced(*values) else tuple(x for x in values if isinstance(x, np.ndarray))
        if not any(_narrow(x) for x in arrays):
            return function(*args, **options)
        wide = [x.astype(np.float32) if _narrow(x) else x for x in args]
        named = {name: x.astype(np.float32) if _narrow(x) else x for name, x in options.items()}
        return function(*wide, **named).astype(np.result_type(*(x.dtype for x in arrays)))

    return call


def _narrow(x: Any) -> bool:
    """Whether an array has floats of 16 bits."""
    return isinstance(x, np.ndarray) and x.dtype.itemsize == 2 and x.dtype.name in {"float16", "bfloat16"}


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of a function that traced arrays record, to call it with values of a tile later.

    Such an array has a method `record_` with the function, its arguments and its options.
    """

    @wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        for x in (*values, *options.values()):
            if type(x) is not Expr and hasattr(x, "record_"):
                return x.record_(call, values, options)
        return function(*values, **options)

    return call


def _either(name: str, meaning: str, traced: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of values in a tile, or of arrays."""

    def function(x: Any) -> Any:
        return traced(real(_value(x))) if _traced(x) else plain(x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = meaning
    return recorded(function)


def _float(x: Any) -> Any:
    """An array of floats: integers are converted to float64, as in NumPy."""
    array = np.asarray(x)
    return array if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else array.astype(np.float64)


def _quiet(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of one array, computed in float64, without warnings."""

    def plain(x: Any) -> Any:
        with np.errstate(all="ignore"):
            value = _float(x)
            return np.asarray(function(value.astype(np.float64))).astype(value.dtype)[()]

    return plain


_erf64 = np.frompyfunc(math.erf, 1, 1)


def _erf(x: Any) -> Any:
    return np.asarray(_erf64(x), np.float64)


def _gated(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """X times a gate that tends to 0 faster than x grows: 0 at minus infinity, where the formula is NaN."""
    return lambda x: np.where(x == -np.inf, 0, function(x))


_expressions: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "exp": ("The exponential.", vector_math.exp, np.exp),
    "log": ("The natural logarithm; NaN for negative x.", vector_math.log, np.log),
    "tanh": ("The hyperbolic tangent.", vector_math.tanh, np.tanh),
    "erf": ("The error function.", vector_math.erf, _erf),
    "sigmoid": ("The logistic function, 1 / (1 + exp(-x)).", vector_math.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "sqrt": ("The square root; NaN for negative x.", lambda x: apply("sqrt", x), np.sqrt),
    "rsqrt": ("One over the square root.", lambda x: 1.0 / apply("sqrt", x), lambda x: 1 / np.sqrt(x)),
    "silu": ("X times its `sigmoid`.", vector_math.silu, _gated(lambda x: x / (1 + np.exp(-x)))),
    "gelu": (
        "X times the normal distribution's probability of less than x, by `erf`.",
        vector_math.gelu,
        _gated(lambda x: 0.5 * x * (1 + _erf(x * math.sqrt(0.5)))),
    ),
    "gelu_tanh": (
        "The approximation of `gelu` by a hyperbolic tangent.",
        vector_math.gelu_tanh,
        _gated(lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    ),
    "fast_gelu": (
        "`gelu_tanh`, written as x times a sigmoid.",
        vector_math.fast_gelu,
        _gated(lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    ),
    "expm1": ("The exponential less 1, precise near 0.", vector_math.expm1, np.expm1),
    "softplus": (
        "The logarithm of 1 + exp(x).",
        vector_math.softplus,
        lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    ),
}
exp, log, tanh, erf, sigmoid, sqrt, rsqrt, silu, gelu, gelu_tanh, fast_gelu, expm1, softplus = (
    _either(name, meaning, traced, _quiet(plain)) for name, (meaning, traced, plain) in _expressions.items()
)

fast_erf = _either("fast_erf", "The error function to 2.5e-5, for rounded results.", vector_math.fast_erf, _quiet(_erf))


@recorded
def minimum(a: Any, b: Any) -> Any:
    """The smaller of a and b; NaN if either is NaN."""
    return apply("min", _value(a), _value(b)) if _traced(a, b) else np.minimum(a, b)


@recorded
def maximum(a: Any, b: Any) -> Any:
    """The larger of a and b; NaN if either is NaN."""
    return apply("max", _value(a), _value(b)) if _traced(a, b) else np.maximum(a, b)


def clip(x: Any, low: Any, high: Any) -> Any:
    """X limited to the range from `low` to `high`; either may be None."""
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "iu":  # NumPy's maximum refuses what such an array cannot hold
        ends = np.iinfo(dtype)
        low = int(ends.min) if type(low) is int and low < ends.min else low
        high = int(ends.max) if type(high) is int and high > ends.max else high
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


@recorded
def where(condition: Any, a: Any, b: Any) -> Any:
    """A where the condition holds, else b."""
    if _traced(condition, a, b):
        return apply("select", _value(condition), _value(a), _value(b))
    return np.where(condition, a, b)


def relu(x: Any) -> Any:
    """The larger of x and 0."""
    return maximum(x, 0)


def relu6(x: Any) -> Any:
    """X between 0 and 6."""
    return clip(x, 0, 6)


def leaky_relu(x: Any, slope: Any = 0.01) -> Any:
    """X, times `slope` where it is negative."""
    return where(x < 0, x * slope, x)


def hard_sigmoid(x: Any) -> Any:
    """X / 6 + 1 / 2 between 0 and 1."""
    return clip(x * (1 / 6) + 0.5, 0, 1)


def hard_swish(x: Any) -> Any:
    """X times `hard_sigmoid`, as x * relu6(x + 3) / 6."""
    return x * (relu6(x + 3) * (1 / 6))


def square(x: Any) -> Any:
    """X times x."""
    return x * x


def elu(x: Any, alpha: Any = 1.0) -> Any:
    """X, and where it is negative alpha * (exp(x) - 1)."""
    return where(x > 0, x, alpha * expm1(minimum(x, 0)))


@recorded
def cast(x: Any, dtype: Any) -> Any:
    """X converted to another type: floats round to nearest even, integers saturate.

    Raises:
        TypeError: no kernel writes this type.
    """
    wanted = np.dtype(dtype)
    if _traced(x):
        return Typed(_value(x), wanted)
    array = np.asarray(x)
    if wanted.kind in "iu" and array.dtype.kind not in "iub":
        info = np.iinfo(wanted)
        with np.errstate(all="ignore"):
            array = np.nan_to_num(np.clip(np.rint(array.astype(np.float64)), info.min, info.max), nan=info.min)
    return array.astype(wanted)


@recorded
def dropout(x: Any, rate: Any, seed: int) -> Any:
    """X / (1 - rate), and 0 with probability `rate`: the same elements for the same seed.

    A hash of 32 bits of the row, the column and the seed selects the elements that are kept
    (two rounds of multiplications and shifts, after MurmurHash3's finaliser). Items of
    a batch are alike. A seed that is an integer is part of a kernel; to change it from call to call,
    pass it as an array of int32 with one element.

    Raises:
        ValueError: a rate that is a number is not from 0 to 1.
    """
    if not _traced(rate) and isinstance(rate, (int, float)) and not 0 <= rate <= 1:
        raise ValueError(f"the rate is {rate}; use one from 0 to 1")
    if _traced(x) or _traced(seed):
        rows, columns = index("m"), index("n")
        hashed = _hash(rows, columns, seed)
        uniform = apply("float", (hashed >> 8) & 0xFFFFFF) * 2.0**-24
        return apply("select", real(rate) <= uniform, _value(x) * (1.0 / (1.0 - real(rate))), 0.0)
    array = _float(x)
    rows, columns = (
        np.indices(array.shape[-2:], np.int32) if array.ndim > 1 else np.indices((1, *array.shape), np.int32)
    )
    with np.errstate(all="ignore"):
        uniform = ((_hash(rows, columns, seed) >> 8) & 0xFFFFFF) * np.float32(2.0**-24)
    widened = array.astype(np.result_type(array.dtype.newbyteorder("="), np.float32))
    with np.errstate(all="ignore"):
        scaled = widened * (1 / (1 - widened.dtype.type(rate)))
    kept = np.where(uniform >= np.float32(rate), scaled, 0).astype(array.dtype)
    return kept if array.ndim > 1 else kept[0]


def _wrapped(x: int) -> int:
    """An integer as one of 32 bits."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def _hash(rows: Any, columns: Any, seed: Any) -> Any:
    """Hash of a row, a column and a seed."""
    if not _traced(seed) and isinstance(seed, (int, np.integer)):
        start: Any = _wrapped(int(seed) * 0x85EBCA6B + 0x7F4A7C15)
    else:
        seed = np.asarray(seed, np.int32) if not _traced(seed) else _value(seed)
        start = seed * _wrapped(0x85EBCA6B) + _wrapped(0x7F4A7C15)
    h = (rows * _wrapped(0x9E3779B1)) ^ (columns + start)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        h = h ^ ((h >> 15) & 0x1FFFF)
        h = h * _wrapped(factor)
    return h ^ ((h >> 16) & 0xFFFF)


def _reduced(kind: str, x: Any, axis: Any) -> Expr:
    """A reduction along rows (axis -1), or down columns (axis -2)."""
    if axis == -1:
        return reduction(kind, real(_value(x)))
    if axis == -2:
        return column_reduction(kind, real(_value(x)))
    raise TraceError(f"a reduction along axis {axis!r} cannot be traced; use -1, along rows, or -2, down columns")


_wide_sum, _wide_mean = widened(np.sum), widened(np.mean)


@recorded
def sum(x: Any, axis: int = -1) -> Any:  # noqa: A001 - as NumPy calls it
    """The sum along the last axis, or axis -2, which is kept with extent 1."""
    if _traced(x):
        return _reduced("add", x, axis)
    return _wide_sum(x, axis=axis, keepdims=True)


@recorded
def max(x: Any, axis: int = -1) -> Any:  # noqa: A001 - as NumPy calls it
    """The maximum along the last axis, which is kept with extent 1."""
    if _traced(x):
        return _reduced("max", x, axis)
    if not np.ndim(x):
        raise TraceError(f"{x!r} has no axis along which there is a maximum: pass an array of at least one dimension")
    return (
        np.max(x, axis=axis, keepdims=True, initial=-np.inf)
        if np.asarray(x).shape[axis] == 0
        else np.max(x, axis=axis, keepdims=True)
    )


@recorded
def mean(x: Any, axis: int = -1) -> Any:
    """The mean along the last axis, which is kept with extent 1."""
    if _traced(x):
        return sum(x, axis) / real(extent("n" if axis == -1 else "m"))
    return _wide_mean(x, axis=axis, keepdims=True)


@widened
def softmax(x: Any) -> Any:
    """exp(x) divided by its sum along the last axis; NaN for a row of -inf."""
    e = exp(x - max(x))
    total = sum(e)
    return e * (1.0 / total) if _traced(total) else e / total  # in kernels, one division a row


@widened
def logsumexp(x: Any) -> Any:
    """The logarithm of the sum of exponentials along the last axis, with extent 1."""
    most = max(x)
    safe = where(abs(most) < np.inf, most, 0)
    return log(sum(exp(x - safe))) + safe


@widened
def log_softmax(x: Any) -> Any:
    """X minus its `logsumexp`."""
    return x - logsumexp(x)


@widened
def rms_norm(x: Any, weight: Any = 1.0, eps: float = 1e-6) -> Any:
    """X divided by the root of its mean square along the last axis, times `weight`."""
    return x * rsqrt(mean(x * x) + eps) * weight


@widened
def layer_norm(x: Any, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5) -> Any:
    """X minus its mean, divided by its standard deviation along the last axis, times `weight`, plus `bias`."""
    centred = x - mean(x)
    return centred * rsqrt(mean(centred * centred) + eps) * weight + bias


def quantize_rows(x: Any) -> tuple[Any, Any]:
    """Rows as int8 values and their scales: value * scale approximates x, and the largest magnitude is 127."""
    most = max(abs(x))
    inverse = where(most >= LEAST, TOP / maximum(most, LEAST), 0)
    return cast(x * inverse, np.int8), most / TOP


UFUNCS.update(
    exp=exp, log=log, tanh=tanh, square=square, expm1=expm1, positive=lambda x: x,
    greater=lambda a, b: apply("lt", b, a), greater_equal=lambda a, b: apply("le", b, a),
    power=lambda x, y: (x if isinstance(x, Expr) else real(x)) ** y,
    reciprocal=lambda x: 1.0 / real(x), isnan=lambda x: x != x,  # noqa: PLR0124 - only a NaN differs from itself
)  # fmt: skip
FUNCTIONS.update(where=where, clip=clip)
