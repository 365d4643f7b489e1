"""Reduction of a matmul call to the numbers of a kernel call.

Owns the step from operands to a `Problem` and the integers of the argument
block: the layout of each operand, the strides of a batch, the merging of a batch
into the rows of one product, and compilation for one size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.spec.problem import Problem

STATIC_BATCH = 16
"""Batch size from which compiling for one size pays."""


def problem(
    dtype: str,
    size: tuple[int, int, int],
    layouts: tuple[str, str, str],
    family: str = "",
    batch: int = 1,
    *,
    dense: bool = False,
    static: bool = False,
    fused: str = "",
) -> Problem:
    """The problem of a call under the current settings.

    With one column, B is a vector: if it is dense it is contiguous along k, and C along m
    as well, so that A determines whether the product is transposed; but u8 stays on the left.
    """
    m, n, k = size
    a, b, c = layouts
    if n == 1 and dense and b not in ("packed", "codes"):
        b = "col"
        c = "col" if a == "col" and not dtype.startswith("u8") else "row"
    if static:
        from portmm.schedule.candidates import STATIC_LIMIT

        static = dense and max(size) <= STATIC_LIMIT
    return Problem(m, n, k, dtype, batch, a, b, c, family, config.current().deterministic, static, fused=fused)


class Call(NamedTuple):
    """A product reduced to the arguments of a kernel."""

    problem: Problem
    a: numpy_arrays.Operand
    b: Any
    c: numpy_arrays.Operand
    walk: numpy_arrays.Batch

    def numbers(self) -> tuple[int, ...]:
        """The integers of the argument block, in the order of `execute`."""
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

    `b` may be a packed weight; `c` has the product's shape. The types are those that A, B and C are converted to.
    """
    batch = c.shape[:-2]
    is_packed = not isinstance(b, np.ndarray)
    left, right = numpy_arrays.canonical(a, dtypes[0]), b if is_packed else numpy_arrays.canonical(b, dtypes[1])
    result = numpy_arrays.canonical(c, dtypes[2])
    m, n, k = c.shape[-2], c.shape[-1], a.shape[-1]
    b_strides = _packed_steps(b, batch) if is_packed else numpy_arrays.strides_over(right.array, batch)
    a_strides, c_strides = numpy_arrays.strides_over(left.array, batch), numpy_arrays.strides_over(result.array, batch)
    if left.layout == result.layout == "row" and not any(b_strides):
        # One B for the whole batch: its items are more rows of one product.
        rows = numpy_arrays.collapse((*batch, m), ((*a_strides, left.row), (*b_strides, 0), (*c_strides, result.row)))
        if rows.outer is None and (m > 1 or rows.strides[0] >= k) and rows.count > m:
            left, result = left._replace(row=rows.strides[0]), result._replace(row=rows.strides[2])
            m, walk = rows.count, numpy_arrays.Batch(1, (0, 0, 0), None)
        else:
            walk = numpy_arrays.collapse(batch, (a_strides, b_strides, c_strides))
    else:
        walk = numpy_arrays.collapse(batch, (a_strides, b_strides, c_strides))
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
    strides, total = [], b.b_batch
    for n in reversed(own):
        strides.append(0 if n == 1 else total)
        total *= n
    return (0,) * (len(batch) - len(own)) + tuple(reversed(strides))
