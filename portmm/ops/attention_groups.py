"""Heads of queries that share keys, as rows of one head.

Owns the selection of that form for calls without functions. Units of tiles multiply rows of one head: of a query for
each of 16 heads they make 16 tiles with a row each, or one. Kernels for few queries have the rows of all heads anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portmm.build import kernel_store
from portmm.dispatch import base_kernels, config
from portmm.ops.attention_launch import Form, bundled, stored
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
widths of Q and V and the settings."""


def joined(q: Array, k: Array, v: Array, *, causal: bool, offset: Any) -> Array | None:
    """Queries (..., heads of keys, rows of all heads that share them, d); None where they differ, or are not faster.

    Operands that do not fit have None, too.
    """
    (*lead, heads, m, d), (*_, few, n, e) = q.shape, k.shape
    same = q.dtype == k.dtype == v.dtype and k.shape[:-1] == v.shape[:-1] and tuple(lead) == k.shape[:-3] and d == e
    if not same or not few or heads % few or (causal and offset is not None):
        return None
    rows = rows_of((heads, few), m, n, causal=causal)
    if not rows or q.dtype.itemsize != 2 or not q.size:
        return None
    key = (q.dtype, last_of_class(rows), d, v.shape[-1], config.current(), config.limit())
    step = _known.get(key)
    if step is None:
        step = _known.keep(key, _step(q, last_of_class(rows), (d, v.shape[-1])))
    # Keys that tiles cannot read where they are would be copied. Without splits there is a task for each head of keys.
    if not step or d % step or any([x % UNIT for x in k.strides[:-1]]):  # noqa: C419
        return None
    if config.get_num_threads() > 2 * few * (q.size // (heads * m * d)):
        return None
    return q.reshape(*lead, few, rows, d)


def rows_of(heads: tuple[int, int], queries: int, keys: int, *, causal: bool) -> int:
    """Rows of a head of keys if queries of all heads that share it may be faster as such; else 0.

    Args:
        heads: of queries, and of keys.
        queries: number of queries.
        keys: number of keys.
        causal: whether the mask is causal.
    """
    rows = heads[0] // heads[1] * queries
    fits = queries <= FULL and rows >= LEAST_ROWS and keys >= LEAST_KEYS and (queries == 1 or not causal)
    return rows if fits else 0


def _step(q: Array, rows: int, widths: tuple[int, int]) -> int:
    """Elements of a head that a step of the unit of tiles multiplies that is for some rows; 0 if no tiles are."""
    from portmm.arrays.numpy_arrays import name_of

    if q.dtype.name not in SUPPORTED:  # the general path says so
        return 0
    dtype = name_of(q.dtype)
    if base_kernels.active():
        known = stored(dtype, rows, widths[1], causal=False)
        if known is not None:
            return _of_tiles(known[0])
    elif kernel_store.bundles() and not config.is_described():
        known = bundled(dtype, rows, widths, causal=False)
        return 0 if known is None else _of_tiles(known[0])
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


def _of_tiles(form: Form) -> int:
    """Elements of a step of a kernel's unit if that is of tiles, else 0."""
    _, kr, k_step, _ = form
    return k_step if k_step > kr else 0
