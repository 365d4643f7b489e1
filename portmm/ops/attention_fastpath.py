"""Fast path of attention without functions: calls whose operands are of kinds that were met before.

Owns the memo of their kernels. Numbers of queries and keys count by their classes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.dispatch import config
from portmm.ops.attention_kernel import FORK, AttentionKernel
from portmm.spec.row_classes import last_of_class
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.ops.attention_shapes import Shape

Array = np.ndarray[Any, Any]
MOST_KINDS = 1024
"""Kinds of calls remembered before the memo is emptied."""

kinds = Memory(MOST_KINDS, "calls")
"""Kernels of kinds of calls: functions of q, k and v."""


def kind_of(q: Any, k: Any, v: Any, *options: Any) -> Any:
    """The memo key of calls without functions; None if a call needs the general path.

    Numbers of queries and keys are replaced by the last of their classes where operands are dense: strides follow from
    them.
    """
    if not type(q) is type(k) is type(v) is np.ndarray or not q.ndim == k.ndim == v.ndim > 2:
        return None
    a, b, c = q.flags, k.flags, v.flags
    at = (k.__array_interface__["data"][0] % 4, a.aligned and b.aligned and c.aligned)
    rest = (q.dtype, k.dtype, v.dtype, *at, *options, config.current(), config.limit())
    (*lead, m, d), (*heads, n, e), (*others, rows, dv) = q.shape, k.shape, v.shape
    if not (a.c_contiguous and b.c_contiguous and c.c_contiguous and heads == others and n == rows):
        return (q.shape, q.strides, k.shape, k.strides, v.shape, v.strides, *rest)
    spread = math.prod(lead) * m * n * (d + dv) > FORK
    return (last_of_class(m), last_of_class(n), spread, *lead, *heads, d, e, dv, *rest)


def keep(  # noqa: PLR0917 - one caller
    key: Any,
    operands: tuple[Array, Array, Array],
    kernel: AttentionKernel,
    shape: Shape,
    window: int | None,
    numbers: list[Any],
    *,
    lse: bool,
) -> None:
    """Remember the kernel of a kind of calls, if operands of this kind are read without a copy."""
    if all(map(_same, shape.operands, operands)):
        kinds.keep(key, _Repeated(kernel, shape, window, numbers, lse=lse))


def _same(x: Array, y: Array) -> bool:
    """Whether an operand was used without a copy."""
    return bool(x.__array_interface__["data"] == y.__array_interface__["data"] and x.strides[-3:] == y.strides[-3:])


class _Repeated:
    """The kernel of a call without functions, for calls whose numbers of queries and keys are of the same classes.

    Args:
        kernel: the kernel.
        shape: of the first call.
        window: the distance of keys from a query, or None.
        numbers: of the score.
        lse: also return the logarithms of the sums.
    """

    def __init__(
        self, kernel: AttentionKernel, shape: Shape, window: int | None, numbers: list[Any], *, lse: bool
    ) -> None:
        self.kernel, self.window, self.lse, self.dtype = kernel, window, lse, shape.dtype
        self.numbers = np.array(numbers or [0], np.float32)
        self.sizes = shape.items * shape.heads, shape.heads, shape.group, shape.dv
        self.last = shape.m, shape.n, kernel.bound.template
        # Of dense operands: elements of a row, heads, and whether those have a row for each query, or for each key.
        h, kv_heads = shape.heads, shape.heads // shape.group
        padded = kernel.kr > 1 and not kernel.run  # see `readable`
        d = -(-shape.d // kernel.k_step) * kernel.k_step if padded else shape.d
        self.dense = [(d, h, True), (d, kv_heads, False), (shape.dv, kv_heads, False), (shape.dv, h, True)]
        # Strides along items, rows, columns and heads, of which the first and the last depend on numbers of rows.
        self.fixed = np.zeros_like(kernel.bound.template)
        self.fixed[:4, 2:4] = [(width, 1) for width, *_ in self.dense]
        if lse:
            self.dense.append((1, h, True))
            self.fixed[4, 2] = 1

    def template(self, m: int, n: int) -> Array:
        """The table of operands for m queries and n keys, without addresses."""
        last = self.last
        if last[0] != m or last[1] != n:
            heads = [(width * (m if queries else n), many) for width, many, queries in self.dense]
            template = self.fixed.copy()
            template[:, 1::3] = [(step * many, step) for step, many in heads]
            last = self.last = m, n, template
        return last[2]

    def __call__(self, q: Array, k: Array, v: Array) -> Any:
        (*_, m, d), n, (batch, heads, group, dv) = q.shape, k.shape[-2], self.sizes
        result = np.empty((*q.shape[:-1], dv), self.dtype)
        lse = np.empty(q.shape[:-1], np.float32) if self.lse else None
        q, k, d = self.kernel.readable(q, k)
        operands = (q, k, v, result) if lse is None else (q, k, v, result, lse)
        far = n if self.window is None else min(self.window, m + n)
        self.kernel.launch((m, n, d, batch, heads, group, dv), far, self.template(m, n), self.numbers, *operands)
        return result if lse is None else (result, lse)
