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
        """The power of two, as an exponential for a value less a maximum that has it.

        Raises:
            UnsupportedError: it is of something else than a multiple of log2(e).
        """
        return node(DECAY, (self.natural(x),), "f32")

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
        if x.op == "fma" and x.args[1].op == "const" and x.args[2].op == "const" and not x.args[2].args[0]:
            scale = self.scales.get(_rounded(x.args[1].args[0]))
            if scale is not None:
                return apply("fma", x.args[0], const(scale), x.args[2])
        if x.op in ("sub", "max", "greater"):
            return apply(x.op, *map(self.natural, x.args))
        if x.op == "select":
            return apply("select", x.args[0], *map(self.natural, x.args[1:]))
        raise UnsupportedError("a power of two of what is no multiple of log2(e)")


def _rounded(x: float) -> float:
    return float(np.float32(x))
