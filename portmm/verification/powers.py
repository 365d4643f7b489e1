"""Exponentials to the base 2 of a text, as those of a record: of scores that are multiplied by log2(e) before.

Owns `Powers`. A device has an instruction for 2**x, and kernels multiply scores by log2(e) with the number that scales
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
