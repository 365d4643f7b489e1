"""Integer sums of coordinates, simplified as they are built, for `layout`.

Owns `Sum`: terms are products of an integer and of factors, in the order in which they were written. A factor is a
`Leaf`, or the quotient, remainder or exclusive or of two sums. Leaves have known ranges, from which follows which
quotients and remainders vanish: with 0 <= R < d, (d Q + R) / d is Q and (d Q + R) % d is R. Ranges are sums of sizes,
so this holds for sizes that are names as well as for numbers. Quotients round down. `evaluate` computes a sum with
any objects that have operators: NumPy arrays, index expressions of kernels, other sums.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from portmm.util.records import dataclass

if TYPE_CHECKING:
    Size: TypeAlias = "Sum | int | str"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A variable.

    Attributes:
        name: of the variable.
        extent: of a coordinate, 0 <= x < extent; None for a size or a stride, x >= 1.
    """

    name: str
    extent: Sum | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Operation:
    """The quotient, remainder or exclusive or of two sums."""

    op: Literal["/", "%", "^"]
    left: Sum
    right: Sum

    def __str__(self) -> str:
        return f"({self.left} {self.op} {self.right})"


Factor = Leaf | Operation
Product = tuple[Factor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """Sum of products. Two sums are equal if they have the same terms in any order.

    Attributes:
        terms: factors and coefficient of each term.
        constant: the term without factors.
    """

    terms: tuple[tuple[Product, int], ...] = ()
    constant: int = 0

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return not self.terms and self.constant == other
        return isinstance(other, Sum) and self.constant == other.constant and dict(self.terms) == dict(other.terms)

    def __hash__(self) -> int:
        return hash((frozenset(self.terms), self.constant)) if self.terms else hash(self.constant)

    def __add__(self, other: Size) -> Sum:
        right = as_sum(other)
        if not right.terms or not self.terms:
            return Sum(self.terms or right.terms, self.constant + right.constant)
        terms = dict(self.terms)
        for product, times in right.terms:
            terms[product] = terms.get(product, 0) + times
        return _joined({x: c for x, c in terms.items() if c}, self.constant + right.constant)

    def __mul__(self, other: Size) -> Sum:
        left, right = self, as_sum(other)
        if not left.terms:
            left, right = right, left
        if not right.terms:
            times = right.constant
            return Sum(tuple((x, c * times) for x, c in left.terms), left.constant * times) if times else ZERO
        total = left * right.constant
        for x, c in right.terms:
            for y, d in left.terms:
                # Coordinates first, sizes last; the coefficient follows.
                total += Sum(((tuple(sorted(y + x, key=lambda z: (_is_size(z), str(z)))), c * d),))
            total += Sum(((x, c * left.constant),)) if left.constant else 0
        return total

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Sum:
        return self * -1

    def __sub__(self, other: Size) -> Sum:
        return self + as_sum(other) * -1

    def __rsub__(self, other: Size) -> Sum:
        return as_sum(other) - self

    def __floordiv__(self, other: Size) -> Sum:
        return _divided(self, as_sum(other))[0]

    def __mod__(self, other: Size) -> Sum:
        return _divided(self, as_sum(other))[1]

    def __xor__(self, other: Size) -> Sum:
        return _exclusive(self, as_sum(other))

    def __int__(self) -> int:
        if self.terms:
            raise ValueError(f"{self} is no number: bind its names first")
        return self.constant

    def __str__(self) -> str:
        return str(evaluate(self, lambda x: _Text(x.name)))


ZERO = Sum()


def as_sum(x: Size) -> Sum:
    """The sum of an integer, of the name of a size, or of a sum itself."""
    return x if isinstance(x, Sum) else _one(Leaf(x)) if isinstance(x, str) else Sum((), x)


def coordinate(name: str, extent: Size) -> Sum:
    """A coordinate: 0 <= x < extent; 0 where the extent is 1."""
    bound = as_sum(extent)
    return ZERO if bound == 1 else _one(Leaf(name, bound))


def leaves(x: Sum) -> Iterator[Leaf]:
    """The variables of a sum; those of their extents are not among them."""
    for product, _ in x.terms:
        for factor in product:
            if isinstance(factor, Leaf):
                yield factor
            else:
                yield from (*leaves(factor.left), *leaves(factor.right))


def evaluate(x: Sum, value: Callable[[Leaf], Any]) -> Any:
    """The value of a sum from those of its variables, which have operators; strides are multiplied first."""
    total, constant = (x.constant, 0) if x.terms and x.terms[0][1] < 0 else (None, x.constant)
    for product, times in x.terms:
        values = [(value(y) if isinstance(y, Leaf) else _operation(y, value), _is_size(y)) for y in product]
        near, far = [x for x, is_size in values if not is_size], [x for x, is_size in values if is_size]
        far += [abs(times)] if abs(times) != 1 else []
        term: Any = reduce(operator.mul, [*near, reduce(operator.mul, far)] if far else near)
        total = term if total is None else total + term if times > 0 else total - term
    if total is None:
        return constant
    return total + constant if constant > 0 else total - -constant if constant else total


def _operation(x: Operation, value: Callable[[Leaf], Any]) -> Any:
    left, right = evaluate(x.left, value), evaluate(x.right, value)
    if isinstance(left, int):  # index expressions have no reversed operators
        left = right * 0 + left
    return left // right if x.op == "/" else left % right if x.op == "%" else left ^ right


def within(x: Sum, extent: Sum) -> bool:
    """Whether 0 <= x < extent is certain."""
    ends = bounds(x)
    return ends is not None and is_positive(ends[0] + 1) and is_positive(extent - ends[1])


def is_positive(x: Sum) -> bool:
    """Whether x > 0 is certain, for a sum of sizes, which are at least 1."""
    total = as_sum(x.constant)
    for product, times in x.terms:
        if any(isinstance(y, Leaf) and y.extent is not None for y in product):
            return False
        term = as_sum(times)
        for y in product:
            term *= Sum((((y,), 1),), int(isinstance(y, Leaf)))
        total += term
    return total.constant > 0 and all(c > 0 for _, c in total.terms)


def bounds(x: Sum) -> tuple[Sum, Sum] | None:
    """The least and the greatest value of a sum, as sums of sizes; None if they are not known."""
    least, most = as_sum(x.constant), as_sum(x.constant)
    for product, times in x.terms:
        low = high = as_sum(times)
        for factor in product:
            of_factor = _bounds(factor)
            if of_factor is None:
                return None
            low, high = low * of_factor[0], high * of_factor[1]
        least, most = (least + low, most + high) if times > 0 else (least + high, most + low)
    return least, most


def _bounds(x: Factor) -> tuple[Sum, Sum] | None:
    """Bounds of a factor; the least is never negative."""
    if isinstance(x, Leaf):
        return (ZERO, x.extent - 1) if x.extent is not None else (as_sum(x.name), as_sum(x.name))
    if x.op == "%":
        return ZERO, x.right - 1
    left = bounds(x.left)
    if left is None or not is_positive(left[0] + 1):
        return None
    if x.op == "/":
        return ZERO, left[1] // x.right
    right = bounds(x.right)
    if right is None or left[1].terms or right[1].terms or not is_positive(right[0] + 1):
        return None
    return ZERO, as_sum((1 << max(left[1].constant, right[1].constant).bit_length()) - 1)


def divisor(x: Sum) -> int:
    """The largest power of two that certainly divides a sum; of 0, a large one."""
    bits = abs(x.constant)
    for product, times in x.terms:
        power = times
        for factor in product:
            if isinstance(factor, Operation) and factor.op != "/":
                power *= divisor(factor.left) | divisor(factor.right)
        bits |= power & -power
    return bits & -bits or 1 << 62


def _is_size(x: Factor) -> bool:
    return isinstance(x, Leaf) and x.extent is None


def _joined(terms: dict[Product, int], constant: int) -> Sum:
    """A sum in which d * (x / d) + x % d is x, and d * (x / d % e) + x % d is x % (d * e)."""
    remainders = [(x, y) for x in terms for y in x if isinstance(y, Operation) and y.op == "%"]
    for product, rest in remainders:
        scale = reduce(operator.mul, [_one(y) for y in product if y is not rest], as_sum(terms[product]))
        quotient = rest.left // rest.right
        joined = [(quotient, rest.left)]
        joined += [(_one(y), rest.left % (rest.right * y.right)) for _, y in remainders if y.left == quotient]
        for whole, value in joined:
            high = whole * rest.right * scale
            if high.terms and not high.constant and all(terms.get(x) == c for x, c in high.terms):
                gone, total, new = {product, *dict(high.terms)}, Sum(), value * scale
                for x, c in terms.items():  # the joined value is written where its first part was
                    total, new = (total + Sum(((x, c),)), new) if x not in gone else (total + new, ZERO)
                return total + constant
    return Sum(tuple(terms.items()), constant)


def _one(x: Factor) -> Sum:
    return Sum((((x,), 1),))


def _split(x: Sum, d: Sum) -> tuple[Sum, Sum]:
    """Q and R with x = Q d + R, where Q has the terms that d divides; d is one term."""
    if len(d.terms) + bool(d.constant) != 1:
        return (as_sum(1), ZERO) if x == d else (ZERO, x)
    product, times = d.terms[0] if d.terms else ((), d.constant)
    whole, rest = Sum((), 0 if product else x.constant // times), Sum((), x.constant if product else x.constant % times)
    for factors, c in x.terms:
        left = list(factors)
        if c % times or any(factors.count(y) < product.count(y) for y in product):
            rest += Sum(((factors, c),))
            continue
        for y in product:
            left.remove(y)
        whole += Sum(((tuple(left), c // times),)) if left else c // times
    return whole, rest


def _divisors(d: Sum) -> list[Sum]:
    """The divisors of one term, but 1 and itself, largest first."""
    if len(d.terms) + bool(d.constant) != 1:
        return []
    product, times = d.terms[0] if d.terms else ((), d.constant)
    counts = [x for x in range(times, 0, -1) if times % x == 0]
    products = {x for size in range(len(product), -1, -1) for x in combinations(product, size)}
    ordered = sorted(products, key=lambda x: (-len(x), str(x)))
    sums = [Sum(((x, c),)) if x else Sum((), c) for x in ordered for c in counts]
    return [x for x in sums if x not in (d, as_sum(1))]


def _divided(x: Sum, d: Sum) -> tuple[Sum, Sum]:
    """Quotient and remainder."""
    if d == 1:
        return x, ZERO
    whole, rest = _split(x, d)
    if within(rest, d):
        return whole, rest
    for common in _divisors(d):
        inner, low = _split(rest, common)
        if inner != 0 and within(low, common):
            quotient, remainder = _divided(inner, _split(d, common)[0])
            return whole + quotient, remainder * common + low
    only = rest.terms[0][0] if len(rest.terms) == 1 and rest.terms[0][1] == 1 and not rest.constant else ()
    quotient, remainder = (_one(Operation(op, rest, d)) for op in ("/", "%"))
    if len(only) == 1 and isinstance(only[0], Operation) and only[0].op != "^":
        inside = only[0]
        if inside.op == "/":
            quotient = inside.left // (inside.right * d)
        elif _split(inside.right, d)[1] == 0:
            quotient, remainder = inside.left // d % _split(inside.right, d)[0], inside.left % d
    return whole + quotient, remainder


def _exclusive(x: Sum, y: Sum) -> Sum:
    """Exclusive or of two sums: bits that only one of them has are added."""
    if not x.terms and not y.terms:
        return as_sum(x.constant ^ y.constant)
    if x == y:
        return ZERO
    most = max(abs(c) for c in (x.constant, y.constant, *(c for z in (x, y) for _, c in z.terms)))
    for bit in range(most.bit_length() - 1, 0, -1):
        power = as_sum(1 << bit)
        (high_x, low_x), (high_y, low_y) = _split(x, power), _split(y, power)
        parts = (high_x, high_y, low_x, low_y)
        if all(part != 0 for part in parts) or (high_x == 0 and high_y == 0):
            continue
        if within(low_x, power) and within(low_y, power):
            return _exclusive(high_x, high_y) * power + _exclusive(low_x, low_y)
    if x == 0 or y == 0:
        return x + y
    return _one(Operation("^", x, y))


@dataclass(frozen=True, slots=True)
class _Text:
    """An expression as text, with its operator, and the precedence of that: "^" 0, "+" 1, "*" 2."""

    text: str
    level: int = 3
    op: str = ""

    def _with(self, op: str, other: _Text | int, level: int, *, left: bool = True) -> _Text:
        right = other if isinstance(other, _Text) else _Text(str(other))
        one, two = (self, right) if left else (right, self)
        first = f"({one.text})" if one.level < level or one.level == 0 else one.text
        apart = two.level < level + (op != "+") and not op == two.op == "*"
        second = f"({two.text})" if apart or two.level == 0 else two.text
        return _Text(f"{first} {op} {second}", level, op)

    def __add__(self, other: _Text | int) -> _Text:
        return self._with("+", other, 1)

    def __sub__(self, other: _Text | int) -> _Text:
        return self._with("-", other, 1)

    def __rsub__(self, other: int) -> _Text:
        return self._with("-", other, 1, left=False)

    def __mul__(self, other: _Text | int) -> _Text:
        return self._with("*", other, 2)

    def __floordiv__(self, other: _Text | int) -> _Text:
        return self._with("/", other, 2)

    def __mod__(self, other: _Text | int) -> _Text:
        return self._with("%", other, 2)

    def __xor__(self, other: _Text | int) -> _Text:
        return self._with("^", other, 0)

    def __str__(self) -> str:
        return self.text
