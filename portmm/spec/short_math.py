"""Vector math for results of 16 bits: activations in half to three quarters of the operations of `vector_math`.

Each takes the type of its results, and adds at most 0.042 units of the result's last place to the error of rounding;
gelu of bfloat16, below -6, 0.13. That was measured over all 2**32 arguments against float64, and holds for any
contraction of products with sums. Errors of bfloat16 are relative, so that products of results are as precise, and
subnormal results are 0; those of float16 are absolute where it has subnormal numbers. A NaN stays one.

Method: that of `vector_math`, by polynomials for these errors. A sigmoid needs no division, as 1 / (1 + e) is a
polynomial of few terms where e is the exponential of a negative number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from portmm.spec.expr_functions import bits, fma, from_bits, select
from portmm.spec.vector_math import EXPONENT, LOG2E, WHOLE, poly
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.spec.expr import Expr

SCALE = 8
"""Added to exponents, so that powers are normal wherever x times a power is."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """Coefficients for results of one type.

    Attributes:
        exp2: 2**x for |x| up to 1/2.
        part: 1 / (1 + e) for e up to 1, a factor 2**-SCALE for each power of e.
        gelu: log2(erfc(x / sqrt(2))) / x for x up to the limit.
        limits: of arguments of gelu, gelu_tanh, silu and sigmoid, beyond which results on the left are 0.
        vanishes: results at limits round to 0; else they are made 0.
    """

    exp2: tuple[float, ...]
    part: tuple[float, ...]
    gelu: tuple[float, ...]
    limits: tuple[float, float, float, float]
    vanishes: bool


def _scaled(*coefficients: float) -> tuple[float, ...]:
    return tuple(c * 2.0 ** (-SCALE * i) for i, c in enumerate(coefficients))


_TERMS = {
    "bf16": _Terms(
        (0.99992806, 0.69326097, 0.24261121, 0.05517152),
        _scaled(0.999949, -0.9962756, 0.9534201, -0.77057145, 0.4179361, -0.10448378),
        (-1.1503087, -0.46074337, -0.052124903, 0.007846204, -0.0008189197, 5.48467e-05, -2.0965642e-06, 3.4547213e-08),
        (13.146247, 10.100637, 91.85677, 87.33654),
        vanishes=False,
    ),
    "f16": _Terms(
        (0.9999993, 0.6931219, 0.24024725, 0.055917405, 0.0095704785),
        _scaled(0.99999124, -0.99913287, 0.98540217, -0.9030325, 0.6677225, -0.32263926, 0.07169305),
        (-1.1510742, -0.4591118, -0.05309295, 0.007956658, -0.00075087446, 3.2607313e-05),
        (6.0, 6.0, 21.0, 18.0),
        vanishes=True,
    ),
}


def _power(size: Expr, rate: Expr | float, terms: _Terms) -> Expr:
    """2**(size * rate + SCALE)."""
    whole = WHOLE + EXPONENT + SCALE
    shifted = fma(size, rate, whole)
    return poly(fma(size, rate, whole - shifted), terms.exp2) * from_bits(bits(shifted) << 23)


def _limited(x: Expr, limit: float) -> tuple[Expr, Expr]:
    """The magnitude of an argument, at most a limit, and whether it is beyond; a NaN stays."""
    size = abs(x)
    beyond = size > limit
    return select(beyond, limit, size), beyond


def _kept(tail: Expr, beyond: Expr, terms: _Terms) -> Expr:
    """The difference to max(x, 0) on the left: 0 beyond the limit, unless it rounds to 0 there."""
    return tail if terms.vanishes else select(beyond, 0.0, tail)


def _less(x: Expr, tail: Expr, exponent: int) -> Expr:
    """max(x, 0) - tail / 2**exponent."""
    return fma(tail, -(2.0**-exponent), select(x < 0.0, 0.0, x))


def gelu(x: Expr, dtype: str) -> Expr:
    """GELU: max(x, 0) - |x| * erfc(|x| / sqrt(2)) / 2, as in `vector_math`."""
    terms = _TERMS[dtype]
    size, beyond = _limited(x, terms.limits[0])
    return _less(x, _kept(size * _power(size, poly(size, terms.gelu), terms), beyond, terms), SCALE + 1)


def _gated(x: Expr, size: Expr, rate: Expr | float, beyond: Expr, terms: _Terms) -> Expr:
    """max(x, 0) - |x| * e / (1 + e), e = 2**(|x| * rate)."""
    e = _power(size, rate, terms)
    return _less(x, _kept(size * (e * poly(e, terms.part)), beyond, terms), SCALE)


def gelu_tanh(x: Expr, dtype: str) -> Expr:
    """GELU by tanh, x times a sigmoid."""
    terms = _TERMS[dtype]
    size, beyond = _limited(x, terms.limits[1])
    rate = -1.5957691216057308 * LOG2E  # 2 * sqrt(2 / pi)
    return _gated(x, size, fma(size * size, rate * 0.044715, rate), beyond, terms)


def silu(x: Expr, dtype: str) -> Expr:
    """The product x * sigmoid(x)."""
    terms = _TERMS[dtype]
    size, beyond = _limited(x, terms.limits[2])
    return _gated(x, size, -LOG2E, beyond, terms)


def sigmoid(x: Expr, dtype: str) -> Expr:
    """1 / (1 + exp(-x)): e / (1 + e), e = exp(-|x|), or 1 less that."""
    terms = _TERMS[dtype]
    size, beyond = _limited(x, terms.limits[3])
    e = _power(size, -LOG2E, terms)
    tail = _kept(e * poly(e, terms.part), beyond, terms) * 2.0**-SCALE
    return select(x < 0.0, tail, 1.0 - tail)


PART = {name: x.part for name, x in _TERMS.items()}
"""Type -> coefficients of 1 / (1 + e) in e * 2**SCALE, for e up to 1."""
SHORT: dict[str, Callable[..., Expr]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "sigmoid": sigmoid,
    "silu": silu,
}
"""Functions of `vector_math` -> those for results of 16 bits."""
TYPES = tuple(_TERMS)
"""Types of such results."""


def of_type(name: str, dtype: str) -> Callable[[Expr], Expr]:
    """Function of this name for results of a type."""
    return lambda x: SHORT[name](x, dtype)
