"""Bound of the error of a random test: by degrees, numbers of exponentials and sizes of coefficients.

Owns `Size`, those of a value as a quotient of polynomials in elements and exponentials, `sizes`, which follows them
through a graph, and `tests_for`. A value that differs is a polynomial that is not zero; Schwartz and Zippel's lemma
bounds how often it vanishes modulo p, and the number of primes how often one divides all coefficients. Where it has
exponentials, one of its coefficients is not zero, and remains alone unless its exponent is modulo q that of another
one: their number bounds how often. Each comparison of data is a coin.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.ir.block_meaning import varying
from portmm.ir.block_program import BlockProgram, TileGemm, TileReduce
from portmm.spec.epilogue import summed
from portmm.spec.expr_ops import OPS
from portmm.spec.function_patterns import function_of
from portmm.util.memo import Memory, cached
from portmm.verification.batches import levels
from portmm.verification.field import LEAST, PRIMES, Q
from portmm.verification.values import UnsupportedError

if TYPE_CHECKING:
    from portmm.ir.mugraph import MuGraph
    from portmm.spec.expr import Expr

BITS = 40
"""An accepted program is wrong with a probability of at most 2**-BITS."""
REDRAWS = 4
"""Draws of fields, where a divisor is zero: each may accept."""
MOST_TESTS = 256
UNEVEN = 1.2
"""Most likely residue of a random function over the mean."""


class Factor(NamedTuple):
    """A factor of a denominator.

    Attributes:
        name: factors with one name are the same.
        degree: as a polynomial.
        many: products of exponentials in it.
        bits: logarithm of the sum of its coefficients.
        along: labels along which it varies.
    """

    name: Any
    degree: float
    many: float
    bits: float
    along: frozenset[str]


Factors = tuple[tuple[Factor, int], ...]
SIZES = 1 << 12
"""Sums and products of sizes that are remembered: elements of one result have few different ones."""


class Size(NamedTuple):
    """A quotient of polynomials.

    Attributes:
        top: degree of the numerator.
        many: products of exponentials in it.
        exponent: degree of what is in exponents.
        bits: logarithm of the sum of its coefficients.
        coins: degree in comparisons of data.
        factors: of the denominator, with how often each is there.
    """

    top: float = 1
    many: float = 1
    exponent: float = 0
    bits: float = 1
    coins: float = 0
    factors: Factors = ()

    @property
    def bottom(self) -> float:
        """Degree of the denominator."""
        return sum(x.degree * n for x, n in self.factors)

    def over(self, names: Mapping[str, str]) -> Size:
        """The same value with other labels."""
        changed = (
            (x._replace(along=frozenset(z for y in x.along for z in names.get(y, y))), n) for x, n in self.factors
        )
        return self._replace(factors=tuple(changed))


_ZERO = Size(0, bits=0)


@cached("kernels", SIZES)
def _times(a: Size, b: Size) -> Size:
    if _ZERO in (a, b):
        return _ZERO
    every = Counter(dict(a.factors)) + Counter(dict(b.factors))
    return Size(a.top + b.top, a.many * b.many, a.exponent + b.exponent, a.bits + b.bits, a.coins + b.coins,
                tuple(every.items()))  # fmt: skip


def _expanded(a: Size, factors: Mapping[Factor, int]) -> Size:
    """The same quotient, expanded to a denominator with more factors."""
    own = dict(a.factors)
    for x, n in factors.items():
        more = n - own.get(x, 0)
        a = a._replace(top=a.top + more * x.degree, many=a.many * x.many**more, bits=a.bits + more * x.bits)
    return a._replace(factors=tuple(factors.items()))


@cached("kernels", SIZES)
def _plus(a: Size, b: Size) -> Size:
    if _ZERO in (a, b):
        return b if a == _ZERO else a
    every = dict(Counter(dict(a.factors)) | Counter(dict(b.factors)))
    x, y = _expanded(a, every), _expanded(b, every)
    exponent, coins = max(a.exponent, b.exponent), max(a.coins, b.coins)
    many = x.many + y.many if exponent else 1
    return Size(max(x.top, y.top), many, exponent, max(x.bits, y.bits) + 1, coins, x.factors)


def _either(a: Size, b: Size) -> Size:
    """The size of one of two values, which does not depend on data."""
    if _ZERO in (a, b):
        return b if a == _ZERO else a
    every = dict(Counter(dict(a.factors)) | Counter(dict(b.factors)))
    x, y = _expanded(a, every), _expanded(b, every)
    top, many, exponent, bits, coins = map(max, x[:-1], y[:-1])
    return Size(top, many, exponent, bits, coins, x.factors)


def _inverse(a: Size, name: Any, axes: frozenset[str]) -> Size:
    top = sum(x.degree * n for x, n in a.factors)
    many = math.prod(x.many**n for x, n in a.factors)
    bits = sum(x.bits * n for x, n in a.factors)
    factor = Factor(name, a.top, a.many, a.bits, axes)
    return Size(top, many, a.exponent, bits, a.coins, ((factor, 1),))


def _sum(a: Size, label: str, n: int) -> Size:
    """A sum of n values: those of a factor that varies are all different."""
    fixed = {x: k for x, k in a.factors if label not in x.along}
    for x, k in a.factors:
        if label in x.along:
            a = a._replace(top=a.top + k * x.degree * (n - 1), many=a.many * x.many ** (k * (n - 1)),
                           bits=a.bits + k * x.bits * (n - 1))  # fmt: skip
            whole = Factor((x.name, label), x.degree * n, x.many**n, x.bits * n, x.along - {label})
            fixed[whole] = k
    return a._replace(
        many=a.many * n if a.exponent else 1, bits=a.bits + math.log2(n + 1), factors=tuple(fixed.items())
    )


def _exponential(a: Size) -> Size:
    return Size(1, 1, max(1, a.top + a.bottom), 1, a.coins)


def _literal(x: float) -> Size:
    if not math.isfinite(x):
        return _ZERO
    top, bottom = float(x).as_integer_ratio()
    return Size(0, bits=math.log2(abs(top) + 1) + math.log2(bottom))


def _known(x: Expr) -> bool:
    """Whether a comparison is that of zero with a sum of exponentials, which is greater unless it is zero."""
    return x.op == "lt" and x.args[0].op == "const" and not x.args[0].args[0] and _positive(x.args[1])


def _positive(x: Expr) -> bool:
    """Whether a value is a sum of products and quotients of exponentials and of literals that are not negative."""
    if x not in _signs:
        _signs.keep(x, _has_sign(x))
    return bool(_signs[x])


_signs = Memory(1 << 16, "kernels")


def _has_sign(x: Expr) -> bool:
    named = function_of(x)
    if named is not None or x.op == "const":
        return named[0] == "exp" if named is not None else x.args[0] >= 0
    summed_ = x.op in ("reduce", "fold", "contract") and x.args[0] != "max"
    return (summed_ or x.op in ("add", "mul", "div", "fma", "chain")) and all(map(_positive, x.inner))


class _Sizes:
    """Sizes of the values of a program, from those of its operands."""

    def __init__(
        self, number: Any, program: BlockProgram, operands: Sequence[Size], extents: Mapping[str, int]
    ) -> None:
        self.number, self.program, self.operands, self.extents = number, program, operands, extents
        self.axes = varying(program)
        every = [x for one in program.passes for x in one if isinstance(x, (TileReduce, TileGemm))]
        self.rescaled = {x.value for x in every if x.rescaled is not None}
        self.known: dict[Expr, Size] = {}

    def of(self, x: Expr) -> Size:
        """The size of a value."""
        if x not in self.known:
            self.known[x] = self._of(x)
        return self.known[x]

    def _of(self, x: Expr) -> Size:
        named = function_of(x)
        if named is not None:
            size = self.of(named[1])
            return _exponential(size) if named[0] == "exp" else _opaque([size])
        if x.op == "load":
            return self.operands[x.args[0]]
        if x.op == "const" and x.dtype == "f32":
            return _literal(x.args[0])
        inner = [self.of(y) for y in x.inner]
        if x.op in ("contract", "reduce", "fold") and x.args[0] != "max":
            return self._reduction(x, inner)
        if x.dtype != "f32" or x.op not in OPS or not inner:
            compared = x.op in ("lt", "le", "eq", "ne") and any(y.dtype == "f32" for y in x.inner) and not _known(x)
            return _opaque(inner)._replace(top=0, bits=32, coins=sum(y.coins for y in inner) + compared)
        return self._operation(x, inner)

    def _reduction(self, x: Expr, inner: list[Size]) -> Size:
        """The size of a sum along a label."""
        term = _times(*inner) if len(inner) > 1 else inner[0]
        total = _sum(term, summed(x), self.extents[summed(x)])
        trips = self.extents[summed(x)] if x in self.rescaled else 0
        return total._replace(top=total.top + trips, exponent=total.exponent + (trips > 0))

    def _operation(self, x: Expr, inner: list[Size]) -> Size:
        """The size of an operation's result, by those of its operands."""
        known: dict[str, Callable[[], Size]] = {
            "add": lambda: _plus(*inner),
            "sub": lambda: _plus(*inner),
            "mul": lambda: _times(*inner),
            "div": lambda: _times(inner[0], _inverse(inner[1], (self.number, x.args[1]), self.axes[x.args[1]])),
            "fma": lambda: _plus(_times(inner[0], inner[1]), inner[2]),
            "neg": lambda: inner[0],
            "select": lambda: _select(*inner),
        }
        return known.get(x.op, lambda: _opaque(inner))()


def _select(mask: Size, a: Size, b: Size) -> Size:
    """The size of one of two values: a + coin (b - a) where it depends on data."""
    either = _plus(a, b) if mask.coins else _either(a, b)
    return either._replace(coins=max(a.coins, b.coins) + mask.coins, exponent=max(either.exponent, mask.exponent))


def _opaque(inner: Sequence[Size]) -> Size:
    """The size of a random function's result, a fresh variable, if the function's arguments are told from others."""
    many = sum(x.many for x in inner if x.exponent) or 1
    return Size(many=many, coins=sum(x.coins for x in inner), exponent=max((x.exponent for x in inner), default=0))


def sizes(graph: MuGraph, extents: Mapping[str, int]) -> list[Size]:
    """The sizes of the results of a graph, whose labels have these extents."""
    known = {i: Size() for i in graph.inputs}
    for number, step in enumerate(graph.steps):
        local: dict[str, int] = {}
        operands = []
        for x, at in zip(step.program.operands, step.operands, strict=True):
            labels = graph.labels(at)
            local |= {y: math.prod(extents[z] for z in labels[i] if z != "1") for i, y in enumerate(x.axes)}
            names = {z: x.axes[i].lower() for i, group in enumerate(labels) for z in group}
            operands.append(known.get(at.tensor, Size()).over(names))
        one = _Sizes((id(graph), number), step.program, operands, local)
        for i, value in step.program.fused.results:
            back = dict(zip(step.program.operands[i].axes, graph.labels(step.operands[i]), strict=True))
            size, to = one.of(value).over(back), step.operands[i]
            known[to.tensor] = size if to.part is None or not to.part[1] else _either(known[to.tensor], size)
    return [known[i] for i in graph.results]


_ELEMENT = Size()


class _Elements(_Sizes):
    """Sizes of expressions of single elements; operations on the same sizes give the same."""

    def __init__(self) -> None:
        self.number, self.axes, self.known = "elements", defaultdict(frozenset), {}
        self.same = {_ELEMENT: _ELEMENT}
        self.results: dict[tuple[Any, ...], Size] = {}

    def _of(self, x: Expr) -> Size:
        if x.op == "element":
            return _ELEMENT
        if x.op == "upper":
            return self._one(_opaque([self.of(x.args[0])]))
        if x.op not in ("add", "mul", "fma", "chain") or function_of(x) is not None:
            return self._one(super()._of(x))
        key = x.op, *[id(self.of(y)) for y in x.args]  # `same` holds all: different ones have different numbers
        known = self.results.get(key)
        if known is None:
            size = self._chain(*x.args) if x.op == "chain" else super()._of(x)
            known = self.results[key] = self._one(size)
        return known

    def _chain(self, first: Expr, *factors: Expr) -> Size:
        """The size of a sum of products."""
        total = self.of(first)
        for a, b in zip(factors[::2], factors[1::2], strict=True):
            total = _plus(_times(self.of(a), self.of(b)), total)
        return total

    def _one(self, x: Size) -> Size:
        """The one object of equal sizes."""
        return self.same.setdefault(x, x)


def element_sizes(results: Iterable[Sequence[Expr]]) -> list[Size]:
    """The size of the largest element of each of some results."""
    every, at = [], _Elements()
    for elements in results:
        for _, group, _ in levels(elements):
            for x in group:
                at.of(x)
        each = [at.of(x) for x in elements]
        bottom = max(each, key=lambda x: math.log2(x.bottom + 1) + sum(math.log2(y.many) * n for y, n in x.factors))
        top, many = max(x.top for x in each), max(x.many for x in each)
        exponent, bits = max(x.exponent for x in each), max(x.bits for x in each)
        every.append(Size(top, many, exponent, bits, max(x.coins for x in each), bottom.factors))
    return every


def error(a: Size, b: Size) -> tuple[float, float]:
    """Probability that one test does not tell two values that differ, without comparisons, and with them."""
    exponent = max(a.exponent, b.exponent)
    less, more = (_times(x, _inverse(y._replace(top=0, many=1, bits=0), "", frozenset())) for x, y in ((a, b), (b, a)))
    many, degree, bits = less.many + more.many, max(less.top, more.top), max(less.bits, more.bits) + 1
    exponents = many * exponent / Q if exponent else 0
    divided = (Q - 1 if exponent else 1) * bits / (PRIMES * math.log2(LEAST))
    one = exponents + divided + UNEVEN * degree / LEAST
    return one, 1 - 2.0 ** -(a.coins + b.coins) * (1 - one)


def tests_for(pairs: Sequence[tuple[Size, Size]]) -> tuple[int, float]:
    """Number of tests, and the logarithm of the probability that they accept a wrong result.

    Raises:
        UnsupportedError: it would take too many tests.
    """
    one = max(error(a, b)[1] for a, b in pairs) if pairs else 0.0
    wanted = BITS + math.log2(REDRAWS)
    tests = max(2, math.ceil(-wanted / math.log2(one))) if 0 < one < 1 else MOST_TESTS + 1
    if tests > MOST_TESTS:
        raise UnsupportedError(f"a test tells a wrong result with a probability of {1 - one:.2g} only; split the graph")
    return tests, tests * math.log2(one) + math.log2(REDRAWS)
