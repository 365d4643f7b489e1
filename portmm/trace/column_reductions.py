"""Functions that reduce columns, in two: what is to be known of whole columns first, and the rest.

Owns `down`. Imports `spec.expr`, `spec.epilogue`, `trace.bind`, `trace.tracer`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import TraceError
from portmm.spec.epilogue import argument, varies
from portmm.spec.expr import Expr, ordered
from portmm.trace.bind import substituted

if TYPE_CHECKING:
    from portmm.trace.tracer import Traced


def down(traced: Traced, given: int, usual: np.dtype[Any]) -> tuple[Traced, Traced, tuple[int, ...], int] | None:
    """What is to be known of whole columns first, and the rest, which is given it; None where there is nothing.

    Then come the places of the results among those of the first, or, counted down from -1, among the rest; and
    how many of the first are given to the rest.

    Raises:
        TraceError: columns are reduced of what is reduced along rows.
    """
    steps = ordered(tuple(x for x, _ in traced.results))
    folds = [x for x in steps if x.op == "fold"]
    if not folds:
        return None
    if any(y.op == "reduce" for x in folds for y in ordered(x.inner)):
        raise TraceError("columns of what is reduced along rows cannot be reduced in kernels: take two steps")
    along = varies(steps, traced.operands)
    whole: dict[Expr, Expr] = {}

    def change(x: Expr) -> Expr | None:
        if x.dtype != "f32" or "m" in along[x] or not any(y.op == "fold" for y in ordered((x,))):
            return None
        return whole.setdefault(x, argument(given + len(whole), "f32"))

    done: dict[Expr, Expr] = {}
    results = [(substituted(x, change, done), dtype) for x, dtype in traced.results]
    sums = [(x, np.dtype(np.float32)) for x in whole]
    order: list[int] = []
    rest: list[tuple[Expr, Any]] = []
    for x, (new, dtype) in zip(traced.results, results, strict=True):
        if x[0] in whole:  # a result by itself
            order.append(len(sums))
            sums.append((x[0], usual if dtype is None else dtype))
        else:
            order.append(-1 - len(rest))
            rest.append((new, dtype))
    return replace(traced, results=tuple(sums)), replace(traced, results=tuple(rest)), tuple(order), len(whole)
