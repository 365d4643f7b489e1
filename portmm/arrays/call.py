"""A call reduced to numbers.

Owns the step from operands to a `Problem` and the integers of the argument
block: which layout each operand has, how a batch is walked, what becomes more
rows of one product, what is compiled for one size. Imports `arrays.numpy_arrays`, `dispatch.config`,
`spec.problem`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.spec.problem import Problem

STATIC_BATCH = 16
"""Items of a batch from which it pays to compile for one size."""


def problem(
    dtype: str,
    size: tuple[int, int, int],
    layouts: tuple[str, str, str],
    family: str = "",
    batch: int = 1,
    *,
    dense: bool = False,
    static: bool = False,
    post: str = "",
) -> Problem:
    """The problem that a call poses under the current settings.

    With one column, B is a vector: if it is dense it runs along k, and C along m
    as well, so that A decides which way round to multiply; but u8 stays on the left.
    """
    m, n, k = size
    a, b, c = layouts
    if n == 1 and dense and b not in ("packed", "codes"):
        b = "col"
        c = "col" if a == "col" and not dtype.startswith("u8") else "row"
    if static:
        from portmm.schedule.cpu_candidates import STATIC_LIMIT

        static = dense and max(size) <= STATIC_LIMIT
    return Problem(m, n, k, dtype, batch, a, b, c, family, config.current().deterministic, static, post)


@dataclass(frozen=True, slots=True)
class Call:
    """A product reduced to what a kernel takes: everything but the output's address."""

    problem: Problem
    a: numpy_arrays.Operand
    b: Any
    c: numpy_arrays.Operand
    walk: numpy_arrays.Batch

    def numbers(self) -> tuple[int, ...]:
        """The integers of the argument block, as `execute` orders them."""
        p, w = self.problem, self.walk
        if isinstance(self.b, numpy_arrays.Operand):
            b = (self.b.address, self.b.row, self.b.col)
        else:
            b = (int(self.b.owner.__array_interface__["data"][0]), self.b.b_k, self.b.b_n)
        return (
            *(p.m, p.n, p.k, w.count),
            *(self.a.address, self.a.row, self.a.col, w.strides[0]),
            *(*b, w.strides[1]),
            *(self.c.address, self.c.row, self.c.col, w.strides[2]),
        )


def reduce_call(a: Any, b: Any, c: Any, dtypes: numpy_arrays.DTypes, *, static: bool = False) -> Call:
    """Operands with at least two dimensions as one strided batch.

    `b` may be a packed weight; `c` has the product's shape, and the last of the
    types that A, B and C are to have.
    """
    batch = c.shape[:-2]
    is_packed = not isinstance(b, np.ndarray)
    left, right = numpy_arrays.canonical(a, dtypes[0]), b if is_packed else numpy_arrays.canonical(b, dtypes[1])
    result = numpy_arrays.canonical(c, dtypes[2])
    m, n, k = c.shape[-2], c.shape[-1], a.shape[-1]
    b_steps = _packed_steps(b, batch) if is_packed else numpy_arrays.strides_over(right.array, batch)
    a_steps, c_steps = numpy_arrays.strides_over(left.array, batch), numpy_arrays.strides_over(result.array, batch)
    if left.layout == result.layout == "row" and not any(b_steps):
        # One B for the whole batch: its items are more rows of one product.
        rows = numpy_arrays.collapse((*batch, m), ((*a_steps, left.row), (*b_steps, 0), (*c_steps, result.row)))
        if rows.outer is None and (m > 1 or rows.strides[0] >= k) and rows.count > m:
            left, result = replace(left, row=rows.strides[0]), replace(result, row=rows.strides[2])
            m, walk = rows.count, numpy_arrays.Batch(1, (0, 0, 0), None)
        else:
            walk = numpy_arrays.collapse(batch, (a_steps, b_steps, c_steps))
    else:
        walk = numpy_arrays.collapse(batch, (a_steps, b_steps, c_steps))
    b_layout = "packed" if is_packed else right.layout
    dense = _dense(left, m, k) and _dense(result, m, n) and (is_packed or _dense(right, k, n))
    family = b.family if is_packed else ""
    static = (static or walk.count >= STATIC_BATCH) and not is_packed
    layouts = (left.layout, b_layout, result.layout)
    return Call(
        problem(numpy_arrays.word(dtypes), (m, n, k), layouts, family, walk.count, dense=dense, static=static),
        left,
        right,
        result,
        walk,
    )


def _dense(x: numpy_arrays.Operand, rows: int, cols: int) -> bool:
    return (x.layout == "row" and x.row == cols) or (x.layout == "col" and x.col == rows)


def _packed_steps(b: Any, batch: tuple[int, ...]) -> tuple[int, ...]:
    own = b.shape[:-2]
    steps, total = [], b.b_batch
    for n in reversed(own):
        steps.append(0 if n == 1 else total)
        total *= n
    return (0,) * (len(batch) - len(own)) + tuple(reversed(steps))
