"""Column reductions of a function, split into a kernel that reduces whole columns and one for the rest.

Owns `split_column_reductions`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import TraceError
from portmm.spec.epilogue import argument, varies
from portmm.spec.expr import Expr, ordered, substituted

if TYPE_CHECKING:
    from portmm.trace.tracer import Traced


def split_column_reductions(
    traced: Traced, first: int, usual: np.dtype[Any]
) -> tuple[Traced, Traced, tuple[int, ...], int] | None:
    """The function split in two, the reductions of columns and the rest; None where no column is reduced.

    The two come with the index of each result, among those of the first function or, counted down from -1, among the
    rest, and with the number of reductions, which are arguments of the rest after the `first` ones.

    Raises:
        TraceError: columns are reduced of values that are reduced along rows.
    """
    steps = ordered(tuple(x for x, _ in traced.results))
    reductions = [x for x in steps if x.op == "fold"]
    if not reductions:
        return None
    if any(y.op == "reduce" for x in reductions for y in ordered(x.inner)):
        raise TraceError("columns of values that are reduced along rows cannot be reduced in kernels: take two steps")
    along = varies(steps, traced.operands)
    whole: dict[Expr, Expr] = {}

    def change(x: Expr) -> Expr | None:
        if x.dtype != "f32" or "m" in along[x] or not any(y.op == "fold" for y in ordered((x,))):
            return None
        return whole.setdefault(x, argument(first + len(whole), "f32"))

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
