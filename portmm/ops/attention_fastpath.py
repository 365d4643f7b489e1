"""Fast path of attention without functions: calls whose operands are of kinds that were met before.

Owns the memo of their kernels. Numbers of queries and keys count by their classes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.dispatch import config
from portmm.ops.attention_launch import FORK, AttentionKernel
from portmm.runtime.cpu import runtime
from portmm.spec.row_classes import last_of_class
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.ops.attention_shapes import Shape

Array = np.ndarray[Any, Any]
STRIDES = 4
"""Strides of an operand: along items, rows, columns and heads."""
MOST_KINDS = 1024
"""Kinds of calls remembered before the memo is emptied."""

kinds = Memory(MOST_KINDS, "calls")
"""Kernels of kinds of calls: functions of q, k and v."""


def kind_of(q: Any, k: Any, v: Any, *options: Any) -> Any:
    """The memo key of calls without functions; None if a call needs the general path.

    Numbers of queries and keys are replaced by the last of their classes where operands are dense: strides follow from
    them. Of others strides count, which for keys of a cache are the same for any number of them: these are of classes.
    """
    if not type(q) is type(k) is type(v) is np.ndarray or not q.ndim == k.ndim == v.ndim > 2:
        return None
    a, b, c = q.flags, k.flags, v.flags
    at = (k.__array_interface__["data"][0] % 4, a.aligned and b.aligned and c.aligned)
    rest = (q.dtype, k.dtype, v.dtype, *at, *options, config.current(), config.limit())
    (*lead, m, d), (*heads, n, e), (*others, rows, dv) = q.shape, k.shape, v.shape
    spread = math.prod(lead) * m * n * (d + dv) > FORK
    if heads != others or n != rows:
        return (q.shape, q.strides, k.shape, k.strides, v.shape, v.strides, *rest)
    if not (a.c_contiguous and b.c_contiguous and c.c_contiguous):
        return (q.shape, q.strides, k.strides, v.strides, last_of_class(n), spread, *heads, e, dv, *rest)
    return (last_of_class(m), last_of_class(n), spread, *lead, *heads, d, e, dv, *rest)


def again(call: tuple[Any, ...]) -> tuple[Any, Any]:
    """The results of a call of a known kind, else NotImplemented, and the key of its kind, if there may be others.

    Args:
        call: the arguments of `CffiRuntime.attend`, which does not know it.
    """
    key = kind_of(*call[:-2])
    known = kinds.get(key) if key else None
    return (NotImplemented if known is None else known.again(call)), key


def keep(  # noqa: PLR0917 - one caller
    key: Any,
    operands: tuple[Array, Array, Array],
    kernel: AttentionKernel,
    shape: Shape,
    window: int | None,
    numbers: list[Any],
    *,
    lse: bool,
    call: tuple[Any, ...],
) -> None:
    """Remember the kernel of a kind of calls, if operands of this kind are read without a copy.

    The last argument is that of `CffiRuntime.attend`.
    """
    if all(map(_same, shape.operands, operands)):
        repeated = _Repeated(kernel, shape, window, numbers, lse=lse)
        kinds.keep(key, repeated)
        repeated.repeats = repeated.hand_on(call)


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
        self.repeats = False
        self.numbers = np.array(numbers or [0], np.float32)
        self.sizes = shape.items * shape.heads, shape.heads, shape.group, shape.dv
        self.last = shape.m, shape.n, kernel.bound.template
        self.dense = all(x.flags.c_contiguous for x in shape.operands)
        # Of dense operands: strides of rows and columns, heads, and whether a row is of a query (1) or of a key (2).
        h, kv_heads = shape.heads, shape.heads // shape.group
        padded = kernel.kr > 1 and not kernel.run  # see `readable`
        d = -(-shape.d // kernel.k_step) * kernel.k_step if padded else shape.d
        dense = [(d, 1, h, 1), (d, 1, kv_heads, 2), (shape.dv, 1, kv_heads, 2), (shape.dv, 1, h, 1), (1, 0, h, 1)]
        # For each operand the address, strides along items, rows, columns and heads: times 1, queries and keys.
        self.strides = np.zeros((*kernel.bound.template.shape, 3), np.int64)
        for strides, (row, column, many, of) in zip(self.strides, dense, strict=False):
            strides[1, of], strides[2:4, 0], strides[4, of] = row * many, (row, column), row

    def again(self, call: tuple[Any, ...]) -> Any:
        """The results of a call with the arguments of `CffiRuntime.attend`."""
        if self.repeats:  # a kind that the runtime tells from others, or has forgotten
            self.hand_on(call)
        return self(*call[:3])

    def hand_on(self, call: tuple[Any, ...]) -> bool:
        """Let the runtime run such calls by itself, if keys are read as they are."""
        kernel, (q, k, *_) = self.kernel, call
        unit = kernel.kr * k.itemsize if kernel.kr > 1 and not kernel.run else 1
        if kernel.run and not q.flags.c_contiguous:
            return False
        if unit > 1 and (q.shape[-1] % kernel.k_step or any(s % unit for s in k.strides[:-1])):
            return False
        batch, heads, group, dv = self.sizes
        numbers = (0, 0, q.shape[-1], batch, heads, group, 0, 0, kernel.step, 0, 0, dv, kernel.run)
        steps = np.ascontiguousarray(self.strides[:, 1 : 1 + STRIDES])
        window = -1 if self.window is None else self.window
        return runtime().keep_attention(
            call, kernel.route, numbers, kernel.bound.template, steps, self.numbers, window, unit, FORK
        )

    def template(self, m: int, n: int) -> Array:
        """The table of operands for m queries and n keys, without addresses."""
        last = self.last
        if self.dense and (last[0] != m or last[1] != n):
            last = self.last = m, n, self.strides @ np.array((1, m, n), np.int64)
        return last[2]

    def __call__(self, q: Array, k: Array, v: Array) -> Any:
        (*_, m, d), n, (batch, heads, group, dv) = q.shape, k.shape[-2], self.sizes
        result = np.empty((*q.shape[:-1], dv), self.dtype)
        lse = np.empty(q.shape[:-1], np.float32) if self.lse else None
        keys, table = k, self.template(m, n)
        q, k, d = self.kernel.readable(q, k)
        if k is not keys and not self.dense:  # strides of a copy follow from the number of keys
            table = table.copy()
            table[1] = self.strides[1] @ np.array((1, m, n), np.int64)
        operands = (q, k, v, result) if lse is None else (q, k, v, result, lse)
        far = n if self.window is None else min(self.window, m + n)
        self.kernel.launch((m, n, d, batch, heads, group, dv), far, table, self.numbers, *operands)
        return result if lse is None else (result, lse)
