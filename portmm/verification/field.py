"""Fields of random tests: Z_p for values, Z_q for what is in an exponent, with q a divisor of p - 1.

Owns `Field`, some tests at once, each with a random prime p near 2**61 and an element w of order q, so that
exp(x) = w**x turns sums into products; arithmetic modulo p on NumPy's arrays, whose last dimension are the tests; and
keyed random functions in the place of those that have no meaning in a field.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Q = 1048583
"""A prime near 2**20, the order of w."""
LEAST, MOST = 1 << 60, 1 << 61
"""Range of p."""
PRIMES = 2.0**34
"""Primes p = 1 modulo q in the range: at least (2**60 / log(2**61)) / q, of which half may be lost to irregularity."""
_SMALL = math.prod(n for n in range(3, 2000, 2) if all(n % d for d in range(3, int(n**0.5) + 1, 2)))
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23)
"""Bases by which Miller and Rabin's test is exact below 3825123056546413051, above 2**61 (OEIS A014233)."""
_STEP = 1 << 10
ADDENDS = 8
"""Residues whose sum is below 2**64."""


def _is_prime(n: int) -> bool:
    if math.gcd(n, _SMALL) > 1:
        return False
    odd = n - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    for base in _WITNESSES:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def random_prime(source: random.Random) -> int:
    """A prime p = 1 modulo `Q`, uniformly from its range."""
    while True:
        p = Q * source.randrange(LEAST // Q + 1, MOST // Q) + 1
        if _is_prime(p):
            return p


def _root(p: int, source: random.Random) -> int:
    """An element of order `Q`."""
    while True:
        w = pow(source.randrange(2, p), (p - 1) // Q, p)
        if w != 1:
            return w


@dataclass(frozen=True, eq=False, slots=True)
class Field:
    """Some independent tests.

    Attributes:
        seed: of everything random in them.
        p: the prime of each.
        low, high: powers of w, by the low and the high bits of an exponent.
    """

    seed: int
    p: Array
    low: Array
    high: Array

    @classmethod
    def of(cls, seed: int, tests: int) -> Field:
        """Fields of a seed."""
        source = random.Random(f"portmm {seed}")  # noqa: S311 - reproducible from the seed, which is drawn elsewhere
        primes = [random_prime(source) for _ in range(tests)]
        source = random.Random(f"portmm {seed} roots")  # noqa: S311 - as above: fewer tests have the same roots
        roots = [_root(p, source) for p in primes]
        steps = [pow(w, _STEP, p) for w, p in zip(roots, primes, strict=True)]
        return cls(
            seed, np.array(primes, np.uint64), _powers(roots, primes, _STEP), _powers(steps, primes, Q // _STEP + 1)
        )

    @property
    def tests(self) -> int:
        """Number of tests."""
        return len(self.p)

    def part(self, tests: int) -> Field:
        """The first tests."""
        return Field(self.seed, self.p[:tests], self.low[:tests], self.high[:tests])

    def add(self, a: Array, b: Array) -> Array:
        """A + b: less p, which is the smaller one unless it wraps."""
        total = a + b
        return np.minimum(total, total - self.p)

    def sub(self, a: Array, b: Array) -> Array:
        """A - b: plus p, which is the smaller one where the difference wraps."""
        rest = a - b
        return np.minimum(rest, rest + self.p)

    def total(self, a: Array, axis: int) -> Array:
        """The sum along an axis, which stays: `ADDENDS` at once do not reach 2**64."""
        parts = [a[(slice(None),) * axis + (slice(i, i + ADDENDS),)] for i in range(0, a.shape[axis], ADDENDS)]
        sums = [x.sum(axis, keepdims=True, dtype=np.uint64) % self.p for x in parts]
        return reduce(self.add, sums)

    def mul(self, a: Array, b: Array) -> Array:
        """A * b."""
        return _product(a, b, self.p)

    def inverse(self, a: Array) -> Array:
        """1 / a, element by element.

        Raises:
            ZeroDivisionError: an element is zero.
        """
        rows = a.reshape(-1, self.tests).T.tolist()
        values = [_inverses(x, p) for x, p in zip(rows, self.p.tolist(), strict=True)]
        return np.array(values, np.uint64).T.reshape(a.shape)

    def power(self, exponent: Array) -> Array:
        """W to the power of an element of Z_q."""
        tests = np.arange(self.tests)
        whole = exponent.astype(np.int64)
        return self.mul(self.low[tests, whole % _STEP], self.high[tests, whole // _STEP])

    def random(self, name: str, *values: Array) -> Array:
        """64 bits of a keyed random function of elements of the field, by name."""
        state, *keys = _keys(self.seed, self.tests, name, len(values))
        for x, factor, key in zip(values, keys[::2], keys[1::2], strict=True):
            state = _mixed((state ^ x) * factor, key)
        return state

    def draw(self, name: str, *values: Array) -> tuple[Array, Array]:
        """Elements of Z_p and Z_q of a keyed random function."""
        word = self.random(name, *values)
        residue: Array = word % self.p
        return residue, self.exponent(word)

    @staticmethod
    def exponent(word: Array) -> Array:
        """An element of Z_q of a random word, by other bits than those of the word modulo p."""
        other = (word ^ (word >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        return ((other >> np.uint64(20)) % np.uint64(Q)).view(np.int64)

    def literal(self, x: float) -> Array:
        """A float as the fraction that it is."""
        return np.array([_literal(float(x), p) for p in self.p.tolist()], np.uint64)


@lru_cache(maxsize=4096)
def _keys(seed: int, tests: int, name: str, values: int) -> tuple[Any, ...]:
    """A word for each test, then a factor and a word for each value."""
    source = random.Random(f"portmm {seed} {name}")  # noqa: S311 - keys of the seed
    each = [w for _ in range(values) for w in (source.getrandbits(63) * 2 + 1, source.getrandbits(64))]
    return np.array([source.getrandbits(64) for _ in range(tests)], np.uint64), *map(np.uint64, each)


def q_literal(x: float) -> int:
    """A float in Z_q."""
    return _literal(float(x), Q)


def q_inverse(a: Array) -> Array:
    """1 / a in Z_q, element by element."""
    return np.array(_inverses(a.ravel().tolist(), Q), np.int64).reshape(a.shape)


@lru_cache(maxsize=4096)
def _literal(x: float, p: int) -> int:
    top, bottom = x.as_integer_ratio()
    return top * pow(bottom, -1, p) % p


def _inverses(values: list[int], p: int) -> list[int]:
    """1 / x of each, by the inverse of the product of all."""
    before = [1]
    for x in values:
        before.append(before[-1] * x % p)
    if not before[-1]:
        raise ZeroDivisionError("a divisor is zero in one of the fields")
    inverse, inverses = pow(before.pop(), -1, p), []
    for x in reversed(values):
        inverses.append(inverse * before.pop() % p)
        inverse = inverse * x % p
    return inverses[::-1]


def _powers(roots: list[int], primes: list[int], count: int) -> Array:
    """Powers of a root of each prime, a row for each: twice as many by each product."""
    p, step = np.array(primes, np.uint64), np.array(roots, np.uint64)
    powers = np.ones((1, len(primes)), np.uint64)
    while len(powers) < count:
        powers = np.concatenate([powers, _product(powers, step, p)])
        step = _product(step, step, p)
    return powers[:count].T.copy()


def _product(a: Array, b: Array, p: Array) -> Array:
    """A * b modulo p: the quotient in extended precision is right within 1, and the rest modulo 2**64 corrects it."""
    quotient = (a.astype(np.longdouble) * b / p).astype(np.uint64)
    rest = a * b - quotient * p
    rest = np.minimum(rest, rest + p)
    return np.minimum(rest, rest - p)


def _mixed(x: Array, key: Any) -> Array:
    """A bijection of 64 bits without structure that arithmetic has: murmur's finaliser, keyed."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return np.asarray(x ^ (x >> np.uint64(33)) ^ key)
