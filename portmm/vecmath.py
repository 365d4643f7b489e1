"""Functions of vectors: exp, tanh, erf and their like, as expressions.

Owns their reductions and polynomials. Imports `expr`.

All is written with operations that are one of C's on vectors, so that one
expansion serves every machine, and no result depends on a branch. Bounds are in
units in the last place of the exact result, 2**-149 where that is subnormal;
they were measured over all 2**32 arguments, and they hold whatever becomes of
the products that meet a sum: `fma` rounded once and the others twice, all
rounded twice, or all fused. Products that are split or scaled by a power of two
are exact, so that fusing changes nothing; nothing relies on the error of a product.

Method: Cody and Waite's reduction, with ln 2 in two parts (Muller et al., Handbook
of Floating-Point Arithmetic, 2nd ed., 11.1), rounding by a large addend, and
polynomials of least greatest error relative to the function, fitted by Lawson's
iteration; coefficients were rounded to float32 one after the other from the lowest,
the rest being fitted anew each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.expr import apply, bits, const, fma, from_bits, select

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.expr import Expr

_INF = float("inf")
_NAN = float("nan")
_SIGN = -(2**31)
_ONE = 0x3F800000  # the bits of 1
_EXPONENT = 127  # of 1, as it is stored

# Times a count of up to eight bits the high part is exact.
_LN2_HIGH = float.fromhex("0x1.62e4p-1")
_LN2_LOW = float.fromhex("0x1.7f7d1cp-20")
_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453

_WHOLE = 1.5 * 2**23  # added to a float32 below 2**22 it leaves the nearest whole number in the last bits

# (exp(x) - 1) / x for |x| up to ln 2, and (exp(-x) - 1) / x up to half of it.
_EXP_WIDE = (1.0, 0.50000036, 0.16666618, 0.04166123, 0.008335929, 0.0014104752, 0.00019630798)
_EXP = (-1.0, 0.49999994, -0.16666523, 0.041668292, -0.008368532, 0.0013818297)
# (2**x - 1) / x for |x| up to 1/2.
_EXP2 = (0.6931472, 0.24022648, 0.0555036, 0.009618506, 0.0013390807, 0.00015326461)
# (1 - exp(-x) - x) / x**2 for |x| up to ln 2 / 2, and ((1 - exp(-2x)) / 2 - x) / x**2 up to half of it.
_EXPM1 = (-0.49999997, 0.16666546, -0.041667443, 0.008366252, -0.0013869958)
_TANH = (-0.99999994, 0.66666186, -0.33333954, 0.13386004, -0.044383865)
# erf(sqrt(u)) / sqrt(u) - 1 for u up to 1, and -erfc(x)**(1/5) for x from 1 to 3.93.
_ERF = (0.12837912, -0.37612322, 0.11280146, -0.02671035, 0.00491644, -0.0005626936)
_ERFC = (-1.002181, 0.23674819, 0.077804625, 0.022831189, -0.03469211, 0.009724629, -0.0010598365, 3.5523535e-05)
# (log(1 + x) - x) / x**2, for 1 + x from sqrt(1/2) to sqrt(2), and for x from 0 to 1.
_LOG = (-0.4999999, 0.33333945, -0.25001776, 0.1996224, -0.16570312, 0.14916353, -0.14307743, 0.08738836)
_LOG1P = (
    -0.4999993,
    0.33330464,
    -0.2495802,
    0.19692121,
    -0.15344976,
    0.10661361,
    -0.057460267,
    0.02008826,
    -0.0032910071,
)
# -log2(erfc(x / sqrt(2))) / x for x up to 14.5.
_GELU = (
    -1.1511053,
    -0.45921203,
    -0.052461904,
    0.00696152,
    8.822809e-06,
    -0.00029990438,
    9.010276e-05,
    -1.579768e-05,
    1.8454062e-06,
    -1.4481263e-07,
    7.3223543e-09,
    -2.1509516e-10,
    2.7823943e-12,
)

_SCALE = 40  # beyond the least normal number, so much is left for a quotient to be subnormal


def _poly(x: Expr, coefficients: Sequence[float], *low: float) -> Expr:
    """A polynomial by Horner's rule; `low` are coefficients below the others."""
    every = (*low, *coefficients)
    result: Expr = const(every[-1])
    for c in reversed(every[:-1]):
        result = fma(result, x, c)
    return result


def _at_most(x: Expr, high: float) -> Expr:
    """The lesser; a NaN stays one. In this order x86 has one instruction for it."""
    return select(x > high, high, x)


def _at_least(x: Expr, low: float) -> Expr:
    return select(x < low, low, x)


def _with_sign(x: Expr, of: Expr) -> Expr:
    """X, which is not negative or has that sign already, with the sign of another."""
    return from_bits(bits(x) | (bits(of) & _SIGN))


def _reduced(x: Expr, rate: float, exponent: int = 0) -> tuple[Expr, Expr]:
    """X = n * ln2 / rate + r, with n whole, and r small.

    Returns:
        r, of at most ln2 / (2 * |rate|), and 2.0**(n + exponent).
    """
    whole = _WHOLE + _EXPONENT + exponent
    turns = fma(x, _LOG2E * rate, whole)
    # The product by a negative part of ln 2 is -0 where x is 0, and keeps its sign.
    n = turns - whole if rate > 0 else whole - turns
    part = 1.0 / abs(rate)
    r = fma(n, -_LN2_LOW * part, fma(n, -_LN2_HIGH * part, x))
    return r, from_bits(bits(turns) << 23)


def _exp_minus(x: Expr, scale: int) -> Expr:
    """Exp(-x) * 2.0**scale, where that is normal."""
    r, power = _reduced(x, -1.0, scale)
    return _poly(r, _EXP, 1.0) * power


def exp(x: Expr) -> Expr:
    """e**x.

    Subnormal results are rounded once more, and are right.

    Bound: @exp@ ulp.
    Method: reduced by even multiples of ln 2, so that the one power of two that is built
    is multiplied with twice; that cannot overflow on the way.
    """
    r, root = _reduced(_at_least(_at_most(x, 89.0), -104.0), 0.5)
    return _poly(r, _EXP_WIDE, 1.0) * root * root


def expm1(x: Expr) -> Expr:
    """e**x - 1, relative to which the error is small about 0, too.

    Bound: @expm1@ ulp.
    Method: -2 * (2**(n-1) * (1 - e**-r) - (2**(n-1) - 1/2)), as 2**128 is no number.
    """
    # Of -x, so that r and -r**2 agree in sign where both are 0; subtracting what is +0 keeps it.
    r, half = _reduced(-_at_least(_at_most(x, 89.0), -18.0), -1.0, -1)
    part = fma(r * r, _poly(r, _EXPM1), r)
    return (half * part - (half - 0.5)) * -2.0


def log(x: Expr) -> Expr:
    """The natural logarithm: -inf of either 0, NaN below.

    Bound: @log@ ulp.
    Method: x = 2**e * m with m from sqrt(1/2) to sqrt(2); of log(1 + f) = f + f**2 * q(f) the first
    term is exact.
    """
    low = x < 2.0**-126
    root = 0x3F3504F3  # the bits of sqrt(1/2)
    shifted = bits(select(low, x * 2.0**24, x)) - select(low, const(root + (24 << 23), "s32"), const(root, "s32"))
    f = from_bits((shifted & 0x7FFFFF) + root) - 1.0
    e = apply("float", shifted >> 23)
    result = fma(e, _LN2, fma(f * f, _poly(f, _LOG), f))
    return select(x > 0.0, select(x < _INF, result, x), select(x == 0.0, -_INF, _NAN))


def softplus(x: Expr) -> Expr:
    """log(1 + e**x).

    Bound: @softplus@ ulp.
    Method: max(x, 0) + log(1 + e), e = exp(-|x|), by a polynomial for e up to 1.
    """
    scaled = _exp_minus(_at_most(abs(x), 110.0), _SCALE)
    e = scaled * 2.0**-_SCALE
    tail = fma(scaled * e, _poly(e, _LOG1P), scaled)
    return fma(tail, 2.0**-_SCALE, select(x < 0.0, 0.0, x))


def tanh(x: Expr) -> Expr:
    """The hyperbolic tangent.

    Bound: @tanh@ ulp.
    Method: (1 - e) / (1 + e), e = exp(-2 * |x|), both halved, from (1 - exp(-2r)) / 2 = r + r**2 * p(r): the
    numerator has no cancellation, and the denominator is rounded on its own, just below 1 where x is small.
    """
    r, power = _reduced(_at_most(abs(x), 9.1), -2.0)
    part = fma(r * r, _poly(r, _TANH), r)
    part = power * part
    above = fma(power, -0.5, 0.5) + part
    below = fma(power, 0.5, 0.5) - part
    return _with_sign(above / below, x)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e**-x).

    Bound: @sigmoid@ ulp.
    Method: both sides of the fraction are scaled, so that only the quotient may be subnormal.
    """
    one = 2.0**-_SCALE
    return one / (_exp_minus(_at_least(_at_most(x, 18.0), -105.0), -_SCALE) + one)


def erf(x: Expr) -> Expr:
    """The error function.

    Bound: @erf@ ulp.
    Method: x + x * p(x**2) up to 1; beyond, 1 - q(|x|)**5, as the fifth root of erfc is smooth (in
    the manner of Abramowitz and Stegun 7.1.28, whose root is of the reciprocal).
    """
    size = _at_most(abs(x), 3.93)
    near = fma(x, _poly(x * x, _ERF), x)
    root = _poly(size, _ERFC)
    square = root * root
    far = fma(root, square * square, 1.0)
    return _with_sign(select(size < 1.0, near, far), x)


def _gated(x: Expr, gate: Expr, open_from: float) -> Expr:
    """X * sigmoid(gate); x itself where it is so great that the gate is open.

    The fraction is scaled, so that only the last product may be subnormal.
    """
    one = 2.0**-_SCALE
    return select(x > open_from, x, x / (_exp_minus(gate, -_SCALE) + one) * one)


def silu(x: Expr) -> Expr:
    """X * sigmoid(x).

    Bound: @silu@ ulp.
    """
    x = _at_least(x, -110.0)
    return _gated(x, x, 20.0)


def gelu_tanh(x: Expr) -> Expr:
    """X * (1 + tanh(z)) / 2, z = sqrt(2 / pi) * (x + 0.044715 * x**3).

    Bound: @gelu_tanh@
    Method: (1 + tanh(z)) / 2 is sigmoid(2 * z), which has no cancellation on the left.
    """
    x = _at_least(x, -11.0)
    rate = 1.5957691216057308  # 2 * sqrt(2 / pi)
    return _gated(x, x * fma(x * x, rate * 0.044715, rate), 6.0)


fast_gelu = gelu_tanh
"""x / (1 + exp(-2 * z)), as Composable Kernel has it: the same function of x."""


def gelu(x: Expr) -> Expr:
    """X * (1 + erf(x / sqrt(2))) / 2.

    Bound: @gelu@
    Method: max(x, 0) - |x| * 2**t / 2, where t = log2(erfc(|x| / sqrt(2))) = |x| * h(|x|) by a polynomial.
    """
    size = _at_most(abs(x), 14.5)
    h = _poly(size, _GELU)
    whole = _WHOLE + _EXPONENT + _SCALE
    turns = fma(size, h, whole)
    f = fma(size, h, whole - turns)
    tail = size * _poly(f, _EXP2, 1.0) * from_bits(bits(turns) << 23)
    return fma(tail, -(2.0 ** -(_SCALE + 1)), select(x < 0.0, 0.0, x))
