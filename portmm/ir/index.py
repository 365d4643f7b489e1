"""Integer expressions: loop counters, extents and addresses.

Owns `Index`, its constructors, and `Ptr`. Python's operators build expressions, and
fold constants.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from portmm.ir.prefix import OPERATORS
from portmm.util.records import dataclass


@dataclass(frozen=True, slots=True)
class Index:
    """An integer expression. `op` is "const", "var" or a C operator or "min"/"max"."""

    op: str
    args: tuple[Index | int | str, ...]

    def __add__(self, other: Index | int) -> Index:
        return _binary("+", self, other)

    def __radd__(self, other: int) -> Index:
        return _binary("+", const(other), self)

    def __sub__(self, other: Index | int) -> Index:
        return _binary("-", self, other)

    def __rsub__(self, other: int) -> Index:
        return _binary("-", const(other), self)

    def __mul__(self, other: Index | int) -> Index:
        return _binary("*", self, other)

    def __rmul__(self, other: int) -> Index:
        return _binary("*", const(other), self)

    def __floordiv__(self, other: Index | int) -> Index:
        return _binary("/", self, other)

    def __mod__(self, other: Index | int) -> Index:
        return _binary("%", self, other)

    def lt(self, other: Index | int) -> Index:
        """1 if self < other else 0."""
        return _binary("<", self, other)

    def __xor__(self, other: Index | int) -> Index:
        return _binary("^", self, other)

    def eq(self, other: Index | int) -> Index:
        """1 if self == other else 0."""
        return _binary("==", self, other)


def meaning(x: Index) -> Callable[[Mapping[str, int]], int]:
    """A function that evaluates an expression from its variables, for repeated evaluation."""
    if x.op == "const":
        value = int(x.args[0])  # type: ignore[arg-type]
        return lambda _: value
    if x.op == "var":
        name: Any = x.args[0]
        return operator.itemgetter(name)
    op, (left, right) = OPERATORS[x.op], (meaning(y) for y in x.args)  # type: ignore[arg-type]
    y: Any = x.args[1]
    if y.op == "const":  # the most frequent case, with one call less
        return lambda ints: op(left(ints), y.args[0])
    return lambda ints: op(left(ints), right(ints))


def spelled(x: Index) -> str:
    """An expression as words in prefix notation, the input of `parsed`."""
    if x.op in ("const", "var"):
        return str(x.args[0])
    return " ".join((x.op, *[spelled(y) for y in x.args]))  # type: ignore[arg-type]


def parsed(text: str) -> Index:
    """The expression of words in prefix notation.

    Raises:
        ValueError: they are no expression.
    """
    words = text.split()
    expression = _parsed(words)
    if words:
        raise ValueError(f"{text!r} is no expression: words follow its end")
    return expression


def _parsed(words: list[str]) -> Index:
    if not words:
        raise ValueError("an expression ends too early")
    word = words.pop(0)
    if word in OPERATORS:
        return Index(word, (_parsed(words), _parsed(words)))
    return const(int(word)) if word.lstrip("-").isdigit() else var(word)


_NEUTRAL = {("+", 0), ("-", 0), ("*", 1), ("/", 1), ("^", 0)}
_NEUTRAL_ON_THE_LEFT = {("+", 0), ("*", 1)}
_ZERO_ON_THE_RIGHT = {("*", 0), ("%", 1)}
_LEAVES = 4096
"""Constants, and variables, that are kept: the same few make up all expressions."""


@lru_cache(_LEAVES, typed=True)
def const(value: int) -> Index:
    """The constant `value`."""
    return Index("const", (value,))


@lru_cache(_LEAVES)
def var(name: str) -> Index:
    """The variable, parameter or argument field called `name`."""
    return Index("var", (name,))


def _lift(x: Index | int) -> Index:
    return x if isinstance(x, Index) else const(x)


def _binary(op: str, x: Index | int, y: Index | int) -> Index:
    # Most of what lowering does: no calls, and no tuples to look up, where they change nothing.
    x = x if isinstance(x, Index) else const(x)
    y = y if isinstance(y, Index) else const(y)
    if y.op == "const":
        value: Any = y.args[0]
        if x.op == "const":
            return const(OPERATORS[op](int(x.args[0]), int(value)))  # type: ignore[arg-type]
        special = 0 <= value <= 1
        if special and (op, value) in _NEUTRAL:
            return x
        return const(0) if special and (op, value) in _ZERO_ON_THE_RIGHT else Index(op, (x, y))
    if x.op == "const":
        if (op, x.args[0]) in _NEUTRAL_ON_THE_LEFT:
            return y
        return x if op == "*" and x.args[0] == 0 else Index(op, (x, y))
    return x if op in ("min", "max") and x == y else Index(op, (x, y))


def minimum(x: Index | int, y: Index | int) -> Index:
    """The smaller of two expressions."""
    return _binary("min", x, y)


def maximum(x: Index | int, y: Index | int) -> Index:
    """The larger of two expressions."""
    return _binary("max", x, y)


def ceil_div(x: Index | int, y: Index | int) -> Index:
    """X / y rounded up, for x >= 0 and y > 0."""
    return (_lift(x) + (_lift(y) - 1)) // y


def round_up(x: Index | int, y: int) -> Index:
    """X rounded up to a multiple of y."""
    return ceil_div(x, y) * y


_ZERO = const(0)


@dataclass(frozen=True, slots=True)
class Ptr:
    """An address: `offset` elements past the pointer called `name`."""

    name: str
    offset: Index = _ZERO

    def __add__(self, other: Index | int) -> Ptr:
        return Ptr(self.name, self.offset + other)
