"""Vector math of devices for results of 16 bits: activations with one instruction for a power of two.

Each takes the type of its results, and adds at most 0.03 units of the result's last place to the error of rounding;
gelu of bfloat16, below -6, 0.07. That was measured over one in 488 of all arguments, against float64. Errors of
bfloat16 are relative, those of float16 absolute where it has subnormal numbers. A NaN stays one.

Method: that of `short_math`, whose powers of two are "exp2" here, within two units of the last place of float32. It is
an instruction of a unit that has an eighth of the throughput of additions, so a second one, a reciprocal, would take
longer than the polynomial in its place. Arguments are limited where results are 0, so that nothing is selected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from portmm.spec.expr import apply
from portmm.spec.expr_functions import fma, select
from portmm.spec.short_math import PART, SCALE
from portmm.spec.vector_math import LOG2E, poly

if TYPE_CHECKING:
    from portmm.spec.expr import Expr

# log2(erfc(x / sqrt(2))) / x for x up to 13.2 and to 6.
_GELU = {
    "bf16": (-1.1501074, -0.46120697, -0.05176767, 0.0077172937, -0.0007943386, 5.2299773e-05, -1.9612837e-06,
             3.1667103e-08),
    "f16": (-1.1510742, -0.45911184, -0.053092908, 0.00795664, -0.0007508706, 3.2607022e-05),
}  # fmt: skip
# Magnitudes from which results on the left are 0: of gelu, gelu_tanh, and of a sigmoid, perhaps times its argument.
_LIMITS = {"bf16": (14.5, 10.9, 104.0), "f16": (6.0, 6.0, 21.0)}


def _limited(x: Expr, limit: float) -> Expr:
    return apply("min", abs(x), limit)


def _power(size: Expr, rate: Expr | float) -> Expr:
    """2**(size * rate + SCALE): normal wherever its product with the argument is."""
    return apply("exp2", fma(size, rate, float(SCALE)))


def _less(x: Expr, tail: Expr, exponent: int) -> Expr:
    """max(x, 0) - tail / 2**exponent."""
    return fma(tail, -(2.0**-exponent), apply("max", x, 0.0))


def gelu(x: Expr, dtype: str) -> Expr:
    """GELU: max(x, 0) - |x| * erfc(|x| / sqrt(2)) / 2, as in `vector_math`."""
    size = _limited(x, _LIMITS[dtype][0])
    return _less(x, size * _power(size, poly(size, _GELU[dtype])), SCALE + 1)


def _gated(x: Expr, size: Expr, rate: Expr | float, dtype: str) -> Expr:
    """max(x, 0) - |x| * e / (1 + e), e = 2**(|x| * rate)."""
    e = _power(size, rate)
    return _less(x, size * (e * poly(e, PART[dtype])), SCALE)


def gelu_tanh(x: Expr, dtype: str) -> Expr:
    """GELU by tanh, x times a sigmoid."""
    size = _limited(x, _LIMITS[dtype][1])
    rate = -1.5957691216057308 * LOG2E  # 2 * sqrt(2 / pi)
    return _gated(x, size, fma(size * size, rate * 0.044715, rate), dtype)


def silu(x: Expr, dtype: str) -> Expr:
    """The product x * sigmoid(x)."""
    return _gated(x, _limited(x, _LIMITS[dtype][2]), -LOG2E, dtype)


def sigmoid(x: Expr, dtype: str) -> Expr:
    """1 / (1 + exp(-x)): e / (1 + e), e = exp(-|x|), or 1 less that."""
    e = _power(_limited(x, _LIMITS[dtype][2]), -LOG2E)
    tail = e * poly(e, PART[dtype]) * 2.0**-SCALE
    return select(x < 0.0, tail, 1.0 - tail)


DEVICE: dict[str, Callable[..., Expr]] = {"gelu": gelu, "gelu_tanh": gelu_tanh, "sigmoid": sigmoid, "silu": silu}
"""Functions of `vector_math` -> those of devices for results of 16 bits."""


def of_type(name: str, dtype: str) -> Callable[[Expr], Expr]:
    """Function of this name for results of a type."""
    return lambda x: DEVICE[name](x, dtype)
