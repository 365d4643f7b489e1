"""Vector math: exp, tanh, erf and similar functions, as expressions.

Owns their range reductions and polynomials.

Every operation is a vector operation of C, so that one expansion serves every
machine, and there is no branch. A bound is in units in the last place of the
exact result, and 2**-149 where that is subnormal; of exponentials and activations, which are 0 there, 2**-126:
processors take a hundred cycles to round a result to a subnormal number. It was measured over all
2**32 arguments against float64, and holds for any contraction of products with
sums: only those of `fma`, all of them, or none; where the bound is worse without
any, it is the second number. Other products that are added are by a power of two,
and exact, except for that of `gelu_tanh`, whose bound has a margin. The result of
a NaN is a NaN; that of an infinity is the limit.

Method: Cody and Waite's reduction, with ln 2 in two parts (Muller et al., Handbook
of Floating-Point Arithmetic, 2nd ed., 11.1), rounding by a large addend, and
minimax polynomials of the error relative to the function, fitted by Lawson's
iteration; coefficients were rounded to float32 one after the other from the lowest,
the others being fitted again each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from portmm.spec.expr import Expr, apply, const
from portmm.spec.expr_functions import bits, fma, from_bits, select

_INF = float("inf")
_NAN = float("nan")
_SIGN = -(2**31)
EXPONENT = 127  # of 1, as it is stored

# The product of the high part and a count of up to eight bits is exact.
_LN2_HIGH = float.fromhex("0x1.62e4p-1")
_LN2_LOW = float.fromhex("0x1.7f7d1cp-20")
LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453

WHOLE = 1.5 * 2**23  # added to a float32 below 2**22 it leaves the nearest integer in the last bits

# exp(x) for |x| up to ln 2, and 2**x for |x| up to 1/2.
_EXP = (1.0, 1.0, 0.50000036, 0.16666618, 0.04166123, 0.008335929, 0.0014104752, 0.00019630798)
EXP2 = (1.0, 0.6931472, 0.24022648, 0.0555036, 0.009618506, 0.0013390807, 0.00015326461)
# (1 - exp(-x) - x) / x**2 for |x| up to ln 2 / 2, and ((1 - exp(-2x)) / 2 - x) / x**2 up to half of it.
_EXPM1 = (-0.49999997, 0.16666546, -0.041667443, 0.008366252, -0.0013869958)
_TANH = (-0.99999994, 0.6666617, -0.33334202, 0.1338666, -0.04429177)
# erf(sqrt(u)) / sqrt(u) - 1 for u up to 1, and -erfc(x)**(1/5) for x from 1 to 4.
_ERF = (0.12837912, -0.37612322, 0.11280146, -0.02671035, 0.00491644, -0.0005626936)
_ERFC = (-1.0020765, 0.2363412, 0.07844388, 0.022317389, -0.034474004, 0.009681683, -0.0010584509, 3.598356e-05)
# erf(sqrt(u)) / sqrt(u) for u up to 9, by absolute errors; beyond, its product with sqrt(u) grows.
_FAST_ERF = (
    1.1282685,
    -0.37531507,
    0.11107957,
    -0.025103003,
    0.0042354739,
    -0.00051104574,
    4.1061503e-05,
    -1.9448805e-06,
    4.0743519e-08,
)
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

_NORMAL = 87.33654  # exp(-x) is subnormal for greater x
# With this much added to their exponents, sigmoids are normal where x * sigmoid(x) is.
_SCALE = 40


def poly(x: Expr, coefficients: Sequence[float]) -> Expr:
    """A polynomial, its constant first, by Horner's rule."""
    result: Expr = const(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = fma(result, x, c)
    return result


def _at_most(x: Expr, high: float) -> Expr:
    """The lesser of x and `high`; a NaN stays."""
    return select(x > high, high, x)


def _at_least(x: Expr, low: float) -> Expr:
    """The greater of x and `low`; a NaN stays."""
    return select(x < low, low, x)


def _with_sign(x: Expr, of: Expr) -> Expr:
    """X with the sign of another value; its own must be + or the same."""
    return from_bits(bits(x) | (bits(of) & _SIGN))


def _reduced(x: Expr, rate: float, exponent: int = 0) -> tuple[Expr, Expr]:
    """Cody and Waite's reduction: x = n * ln2 / rate + r, n being an integer of at most eight bits.

    Returns:
        r, of at most ln2 / |rate| / 2, and 2.0**(n + exponent).
    """
    whole = WHOLE + EXPONENT + exponent
    shifted = fma(x, LOG2E * rate, whole)
    # Where n is 0 it is +0, and its product with a negative number -0: r keeps the sign of x.
    n = shifted - whole if rate > 0 else whole - shifted
    part = 1.0 / abs(rate)
    r = fma(n, -_LN2_LOW * part, fma(n, -_LN2_HIGH * part, x))
    return r, from_bits(bits(shifted) << 23)


def _lost(r: Expr, coefficients: Sequence[float]) -> Expr:
    """1 - exp(-r), or half of 1 - exp(-2 * r): r minus a product, so that a zero keeps its sign."""
    return fma(r * r, poly(r, coefficients), r)


def exp(x: Expr) -> Expr:
    """e**x, for all x, 0 where that is subnormal.

    Bound: 1.66, 1.96 ulp.
    Method: reduced by even multiples of ln 2, so that one power of two is built and multiplied by twice,
    with no overflow in between.
    """
    low = x < -_NORMAL
    r, root = _reduced(select(low, -_NORMAL, _at_most(x, 89.0)), 0.5)
    return poly(r, _EXP) * root * select(low, 0.0, root)


def expm1(x: Expr) -> Expr:
    """e**x - 1, for all x, -0 for -0.

    Bound: 1.53, 1.66 ulp.
    Method: -2 * (h * (1 - e**-r) - (h - 1/2)), with h = 2**n / 2, as 2**128 is not an f32.
    """
    # The subtrahend is +0 where x is 0.
    r, half = _reduced(-_at_least(_at_most(x, 89.0), -18.0), -1.0, -1)
    return (half * _lost(r, _EXPM1) - (half - 0.5)) * -2.0


def log(x: Expr) -> Expr:
    """The natural logarithm, subnormal x included: -inf for either 0, NaN below.

    Bound: 1.14, 1.22 ulp.
    Method: x = 2**e * (1 + f) with 1 + f from sqrt(1/2) to sqrt(2), and log(1 + f) = f + f**2 * q(f). As f is
    exact, results near x = 1 nearly are.
    """
    low = x < 2.0**-126
    root = 0x3F3504F3  # the bits of sqrt(1/2)
    shifted = bits(select(low, x * 2.0**24, x)) - select(low, const(root + (24 << 23), "s32"), const(root, "s32"))
    f = from_bits((shifted & 0x7FFFFF) + root) - 1.0
    e = apply("float", shifted >> 23)
    result = fma(e, _LN2, fma(f * f, poly(f, _LOG), f))
    return select(x > 0.0, select(x < _INF, result, x), select(x == 0.0, -_INF, _NAN))


def softplus(x: Expr) -> Expr:
    """log(1 + e**x), for all x, 0 where that is subnormal.

    Bound: 1.96, 2.21 ulp.
    Method: max(x, 0) + log(1 + e), e = exp(-|x|), by a polynomial for e up to 1, of which any small number does for
    one that is less.
    """
    r, power = _reduced(_at_most(abs(x), _NORMAL), -1.0)
    e = (1.0 - _lost(r, _EXPM1)) * power
    some = _at_least(e, 2.0**-60)
    tail = fma(e, some * poly(some, _LOG1P), e)
    return select(x < -_NORMAL, 0.0, tail + select(x < 0.0, 0.0, x))


def tanh(x: Expr) -> Expr:
    """The hyperbolic tangent, for all x, -0 for -0.

    Bound: 1.96, 1.99 ulp.
    Method: (1 - e) / (1 + e), e = exp(-2 * |x|), both halved, from (1 - exp(-2 * r)) / 2: so the numerator has
    no cancellation, and the denominator, just below 1 for a small x, has half of the error that it would have above 1.
    """
    r, power = _reduced(_at_most(abs(x), 9.1), -2.0)
    part = power * _lost(r, _TANH)
    above = fma(power, -0.5, 0.5) + part
    below = fma(power, 0.5, 0.5) - part
    return _with_sign(above / below, x)


def _gate(x: Expr) -> Expr:
    """Denominator of a sigmoid, (1 + exp(-x)) * 2.0**-_SCALE, which is finite where exp(-x) is not.

    In this order of terms the error of the first sum is small where that of the second is large.
    """
    r, power = _reduced(x, -1.0, -_SCALE)
    return 2.0**-_SCALE - power * _lost(r, _EXPM1) + power


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e**-x), for all x, 0 where that is subnormal.

    Bound: 2 ulp.
    Method: both sides of the fraction are scaled, so that its denominator is finite.
    """
    low = x < -_NORMAL
    return select(low, 0.0, 2.0**-_SCALE / _gate(select(low, -_NORMAL, _at_most(x, 18.0))))


def erf(x: Expr) -> Expr:
    """The error function, for all x, -0 for -0.

    Bound: 1.61, 1.99 ulp.
    Method: x + x * p(x**2) up to 1; beyond, 1 - q(|x|)**5, as a root of erfc is smooth and small errors of it
    stay small (Abramowitz and Stegun, 7.1.28, have such a power in a denominator).
    """
    size = _at_most(abs(x), 4.0)
    near = fma(x, poly(x * x, _ERF), x)
    root = poly(size, _ERFC)
    square = root * root
    far = fma(root, square * square, 1.0)
    return _with_sign(select(size < 1.0, near, far), x)


def fast_erf(x: Expr) -> Expr:
    """The error function for results that are rounded to 11 bits or fewer, for all x.

    Error: at most 2.3e-5, 2.6e-5, half of a unit of 2**-14 near 1; relative to results near 0 as much as 1.2e-4.
    Exactly 1 from |x| = 3.01 on.
    Method: x * p(x**2), in a third of the operations of `erf`. The product grows without end where it is above 1, and
    is limited to it.
    """
    return _at_least(_at_most(x * poly(x * x, _FAST_ERF), 1.0), -1.0)


def _gated(x: Expr, gate: Callable[[Expr], Expr], shut_to: float, open_from: float) -> Expr:
    """X * sigmoid(gate(x)); -0 where that would be subnormal, and x itself where it is so large that the gate is 1."""
    low = x < shut_to
    shut = select(low, shut_to + 1.0, x)  # any number whose result is normal
    wide = shut > open_from
    part = select(wide, open_from, shut)
    return select(wide, shut, select(low, -0.0, part / _gate(gate(part)) * 2.0**-_SCALE))


def silu(x: Expr) -> Expr:
    """The product x * sigmoid(x), for all x, -0 for -0 and where it is subnormal.

    Bound: 2 ulp.
    Method: x / (1 + e**-x), whose numerator is exact.
    """
    return _gated(x, lambda x: x, -91.85677, 20.0)


def gelu_tanh(x: Expr) -> Expr:
    """GELU by tanh, x * (1 + tanh(z)) / 2, z = sqrt(2 / pi) * (x + 0.044715 * x**3), for all x, -0 where subnormal.

    Bound: 2.9 ulp times max(1, x**2 for x < 0): no more than if x were changed by as many ulp. A smaller
    error would take z in two numbers.
    Method: (1 + tanh(z)) / 2 is sigmoid(2 * z), which does not cancel on the left.
    """
    rate = 1.5957691216057308  # 2 * sqrt(2 / pi)
    return _gated(x, lambda x: x * fma(x * x, rate * 0.044715, rate), -10.100637, 6.0)


fast_gelu = gelu_tanh
"""Composable Kernel's x / (1 + exp(-2 * z)), which is the same function of x."""


def gelu(x: Expr) -> Expr:
    """GELU, x * (1 + erf(x / sqrt(2))) / 2, for all x, without cancellation for large negative x.

    Bound: 2.3, 3.2 ulp times max(1, x**2 for x < 0) for x >= -6: no more than if x were changed by as many ulp. A
    smaller error would take x**2 in two numbers. For smaller x, where the result is below 1e-8,
    the relative error grows: 2e-5 at -7, 1e-3 at -11, 1e-2 at -13. It is 0 from -13.1 on, where it is below 2**-125.
    Method: max(x, 0) - |x| * 2**t / 2, where t = log2(erfc(|x| / sqrt(2))) = |x| * h(|x|) by a polynomial.
    """
    size = abs(x)
    normal = size < 13.1
    size = select(normal, size, 13.1)
    h = poly(size, _GELU)
    whole = WHOLE + EXPONENT + _SCALE
    shifted = fma(size, h, whole)
    f = fma(size, h, whole - shifted)
    tail = select(normal, size * poly(f, EXP2) * from_bits(bits(shifted) << 23), 0.0)
    return fma(tail, -(2.0 ** -(_SCALE + 1)), select(x < 0.0, 0.0, x))
