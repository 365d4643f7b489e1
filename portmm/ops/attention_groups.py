"""Heads of queries that share keys, as rows of one head.

Owns the selection of that form for calls without functions. Units of tiles multiply rows of one head: of a query for
each of 16 heads they make 16 tiles with a row each, or one. Kernels for few queries have the rows of all heads anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portmm.dispatch import base_kernels, config
from portmm.ops.attention_launch import stored
from portmm.ops.attention_shapes import SUPPORTED
from portmm.spec.row_classes import last_of_class
from portmm.util.memo import Memory

Array = np.ndarray[Any, Any]
FULL = 16
"""Queries of a head that fill tiles by themselves."""
LEAST_ROWS, LEAST_KEYS = 9, 512
"""Rows and keys from which tiles are faster: 16 heads of a query that share 256, 1024 and 4096 keys take 1.5, 0.6 and
0.43 of the time of the kernel for few queries (bfloat16, heads of 64, Granite Rapids), 8 heads 1.9, 1.1 and 1.0."""
UNIT = 4
"""Bytes of a unit of tiles, of which strides of keys must be multiples."""
MOST_KINDS = 256
"""Kinds of calls remembered before the memo is emptied."""

_known = Memory(MOST_KINDS, "calls")
"""Elements of a head that a step of tiles multiplies, 0 where there are none for these rows: by the type, the rows, the
width of V and the settings."""


def joined(q: Array, k: Array, v: Array, *, causal: bool, offset: Any) -> Array | None:
    """Queries (..., heads of keys, rows of all heads that share them, d); None where they differ, or are not faster.

    Operands that do not fit have None, too.
    """
    (*lead, heads, m, d), (*_, few, n, e) = q.shape, k.shape
    same = q.dtype == k.dtype == v.dtype and k.shape[:-1] == v.shape[:-1] and tuple(lead) == k.shape[:-3] and d == e
    if not same or not few or heads % few or (causal and (m != 1 or offset is not None)):
        return None
    rows = heads // few * m
    if q.dtype.itemsize != 2 or not q.size or m > FULL or rows < LEAST_ROWS or n < LEAST_KEYS:
        return None
    key = (q.dtype, last_of_class(rows), v.shape[-1], config.current(), config.limit())
    step = _known.get(key)
    if step is None:
        step = _known.keep(key, _step(q, last_of_class(rows), v.shape[-1]))
    # Keys that tiles cannot read where they are would be copied. Without splits there is a task for each head of keys.
    if not step or d % step or any([x % UNIT for x in k.strides[:-1]]):  # noqa: C419
        return None
    if config.get_num_threads() > 2 * few * (q.size // (heads * m * d)):
        return None
    return q.reshape(*lead, few, rows, d)


def _step(q: Array, rows: int, dv: int) -> int:
    """Elements of a head that a step of the unit of tiles multiplies that is for some rows; 0 if no tiles are."""
    from portmm.arrays.numpy_arrays import name_of

    if q.dtype.name not in SUPPORTED:  # the general path says so
        return 0
    dtype = name_of(q.dtype)
    if base_kernels.active():
        known = stored(dtype, rows, dv, causal=False)
        if known is not None:
            _, kr, k_step, _ = known[0]
            return k_step if k_step > kr else 0
    from portmm.dispatch import cpu_kernels
    from portmm.errors import ScheduleError
    from portmm.spec.epilogue import C, Fused, acc

    if cpu_kernels.recording():
        return 0
    try:
        _, atom, _ = cpu_kernels.attention_unit(dtype, Fused((), ((C, acc()),)), config.target(), rows)
    except ScheduleError:
        return 0
    return atom.k if atom.tiled else 0
