"""Expressions of a table that a program writes: of its operations on symbols, each after its operands.

Owns `OPERATIONS`, which number them, and `replayed`. A sum of many products is one expression of all of them, as dot
products are most of what a kernel computes.

`Powers` has the exponentials to the base 2 of a text, as those of a record: of scores that are multiplied by log2(e)
before. A device has an instruction for 2**x, and kernels multiply scores by log2(e) with the number that scales
them. So 2**y is exp(x) where y is x times log2(e), by the laws of maxima, differences and selections, which hold
for a positive factor.
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np

from portmm.spec.expr import Expr, apply, const, node
from portmm.spec.function_patterns import DECAY
from portmm.spec.vector_math import LOG2E
from portmm.verification.symbolic import POISON, applied, element
from portmm.verification.values import LOWEST, UnsupportedError


class Powers:
    """Expressions that are multiples of log2(e), without that factor.

    Attributes:
        scales: a literal of a text -> that of the record which it is log2(e) times.
    """

    def __init__(self, literals: frozenset[float]) -> None:
        self.scales = {_rounded(x * LOG2E): x for x in (*literals, 1.0) if abs(x) < -LOWEST}
        self.done: dict[Expr, Expr] = {}

    def exponential(self, x: Expr) -> Expr:
        """The power of two: an exponential for a value less a maximum that has it, or one of `device_math`."""
        with suppress(UnsupportedError):
            return node(DECAY, (self.natural(x),), "f32")
        return node("exp2", (x,), "f32")

    def product(self, a: Expr, b: Expr) -> Expr | None:
        """A product with log(2), or None if it is none of a multiple of log2(e)."""
        for x, y in ((a, b), (b, a)):
            if y.op == "const" and y.args[0] == _rounded(math.log(2)):
                with suppress(UnsupportedError):
                    return self.natural(x)
        return None

    def natural(self, x: Expr) -> Expr:
        """An expression over log2(e)."""
        if x not in self.done:
            self.done[x] = self._natural(x)
        return self.done[x]

    def _natural(self, x: Expr) -> Expr:
        if x.op == "const" and x.args[0] < LOWEST:
            return x
        scale = self.scale(x.args[1]) if x.op in ("fma", "mul") else None
        if x.op == "mul" and scale is not None:
            return self.scaled(x.args[0], scale)
        if x.op == "fma" and (scale is not None or _literal(x.args[1], 1.0)):
            score = self.natural(x.args[0]) if scale is None else self.scaled(x.args[0], scale)
            added = x.args[2]
            if _literal(added, 0.0):
                return score
            if added.op == "mul" and _literal(added.args[1], -1.0):
                return apply("sub", score, self.natural(added.args[0]))
        if x.op in ("sub", "max", "greater"):
            return apply(x.op, *map(self.natural, x.args))
        if x.op == "select":
            return apply("select", x.args[0], *map(self.natural, x.args[1:]))
        raise UnsupportedError("a power of two of what is no multiple of log2(e)")

    def scale(self, by: Expr) -> float | None:
        """The factor of the record that a literal is log2(e) times, or None."""
        return self.scales.get(_rounded(by.args[0])) if by.op == "const" else None

    def scaled(self, x: Expr, scale: float) -> Expr:
        """A product times a factor, or the largest of products, each times a positive one."""
        if x.op in ("max", "greater") and scale > 0:
            return apply(x.op, *[self.scaled(y, scale) for y in x.args])
        lowest = x.op == "const" and x.args[0] < LOWEST
        return x if lowest else apply("fma", x, const(scale), const(0.0))


def _literal(x: Expr, value: float) -> bool:
    return bool(x.op == "const" and x.args[0] == value)


def _rounded(x: float) -> float:
    return float(np.float32(x))


OPERATIONS = (
    "real", "integer", "mask", "element", "add", "sub", "mul", "div", "neg", "fma", "lt", "le", "more", "eq", "ne",
    "and", "or", "xor", "not", "shl", "shr", "bits", "from_bits", "float", "int", "select", "abs", "max", "min",
    "greater", "sqrt", "exp2", "pair", "upper",
)  # fmt: skip
"""Operations of nodes in the order of their numbers."""
_COUNTS = tuple(
    0 if x in ("real", "integer", "mask", "element")
    else 1 if x in ("neg", "not", "bits", "from_bits", "float", "int", "abs", "sqrt", "exp2", "upper")
    else 3 if x in ("fma", "select")
    else 2
    for x in OPERATIONS
)  # fmt: skip
"""Number of operands of each."""
_FMA = OPERATIONS.index("fma")
CHAIN = 8
"""Least number of products of a sum that is one expression: more than expansions of functions have."""


def replayed(
    nodes: np.ndarray[tuple[int, ...], np.dtype[np.uint32]], wanted: list[int], literals: frozenset[float]
) -> dict[int, Expr]:
    """The expressions of wanted nodes, and of those that they need."""
    rows = nodes.tolist()
    powers = Powers(literals)
    uses = _uses(rows, wanted)
    needed = [x for x in enumerate(rows) if uses[x[0]]]
    sums = _chains(needed, uses)
    known: dict[int, Expr] = {}
    for i, (op, *of) in needed:
        if i in sums:
            if sums[i]:
                known[i] = node("chain", tuple([known[x] for x in sums[i]]), "f32")
            continue
        name, args = OPERATIONS[op], [known[x] for x in of[: _COUNTS[op]]]
        if name == "upper":
            known[i] = node(name, tuple(args), "f32")
        elif name == "exp2":
            known[i] = powers.exponential(args[0])
        elif name == "mul" and (power := powers.product(*args)) is not None:
            known[i] = power
        elif args:
            known[i] = applied("lt", args[::-1]) if name == "more" else applied(name, args)
        else:
            known[i] = _leaf(name, *of[:2])
    return known


def _uses(rows: list[list[int]], wanted: list[int]) -> list[int]:
    """Number of uses of each node by wanted nodes and what they need; a wanted one has a use of its own."""
    uses = [0] * len(rows)
    for i in wanted:
        if i != POISON:
            uses[i] += 1
    for i in range(len(rows) - 1, -1, -1):
        if uses[i]:
            op, *of = rows[i]
            for x in of[: _COUNTS[op]]:
                uses[x] += 1
    return uses


def _chains(needed: list[tuple[int, list[int]]], uses: list[int]) -> dict[int, list[int]]:
    """Sums of at least `CHAIN` products: the node of the last one -> the first summand and all factors.

    Nodes of the other products, which nothing else uses, have empty lists.
    """
    ends: dict[int, tuple[list[int], list[int]]] = {}
    for i, (op, a, b, c) in needed:
        if op == _FMA:
            one = ends.pop(c, None) if uses[c] == 1 else None
            inner, parts = ([], [c]) if one is None else one
            inner.append(i)
            parts += (a, b)
            ends[i] = inner, parts
    long = [x for x in ends.values() if len(x[0]) >= CHAIN]
    return {i: [] for inner, _ in long for i in inner[:-1]} | {inner[-1]: parts for inner, parts in long}


def _leaf(name: str, first: int, second: int) -> Expr:
    """The expression of a literal or of an element."""
    if name == "element":
        return element(first, second)
    if name == "mask":
        return const(bool(first), "mask")
    word = np.array([first], np.uint32)
    return const(word.view(np.float32)[0].item()) if name == "real" else const(word.view(np.int32)[0].item(), "s32")
