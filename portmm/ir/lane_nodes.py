"""Statements that combine the lanes of vectors, or create them: element-wise operations and reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.nodes import Stmt

if TYPE_CHECKING:
    from portmm.ir.index import Index, Ptr

LEAST_PEAK = 1.5e-36
"""Magnitude below which rows are quantised to zeros: TOP divided by a smaller one would overflow."""


@dataclass(frozen=True, slots=True)
class Map(Stmt):
    """An operation of `expr_ops.OPS` on every lane, or an operation that creates a vector.

    Attributes:
        op: the operation; "literal" and "splat", a literal, or a left
            fragment, in every lane; "lanes", `count` + 0, 1, 2 and so on; "whole", `count` in every lane.
        d: register written.
        args: registers, and literals.
        dtype: "f32", "s32" or "mask", the type of the result.
        operand: the type of the last operand.
        count: an integer.
        of: name of the atom of f32 with the same lanes.
    """

    op: str
    d: str
    args: tuple[str | int | float, ...]
    dtype: str
    operand: str
    of: str
    count: Index | None = None


@dataclass(frozen=True, slots=True)
class Shuffle(Stmt):
    """Shuffle of vectors of type b_type: d[i] = concat(a, b)[pick[i]]."""

    d: str
    a: str
    b: str
    pick: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Repeat(Stmt):
    """A vector of type b_type of two elements of 4 bytes at p, repeated: d[i] = p[i % 2]."""

    d: str
    p: Ptr


@dataclass(frozen=True, slots=True)
class Reduce(Stmt):
    """Store of the sum of the lanes of `d`, added to *p if `accumulate`, at p."""

    d: str
    p: Ptr
    accumulate: Index


@dataclass(frozen=True, slots=True)
class Total(Stmt):
    """*to = the sum ("add") or the maximum ("max") of `count` f32, a power of two, at `src`; NaN if any is NaN."""

    kind: str
    to: Ptr
    src: Ptr
    count: int


@dataclass(frozen=True, slots=True)
class RowScale(Stmt):
    """*scale = m / top and *inverse = top / m, m the maximum of `count` f32 at `peaks`; both 0 if m is 0."""

    scale: Ptr
    inverse: Ptr
    peaks: Ptr
    count: int
    top: int
