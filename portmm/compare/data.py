"""Random inputs and the judgement of a result.

Owns the arrays of a case and the check against a wider type. Imports `dtype`
and `suite`.

Entries are uniform in [-1, 1). Partial sums of k such products walk randomly:
the i-th is about sqrt(i)/3, each addition rounds it by at most u, the errors
add like a random walk too, so the error of one element is near u k / 4 in any
order of summation. `TOLERANCE` k u is sixteen deviations above that, exceeds
the worst case for k <= 4, and is still a thousand times less than what one
lost or doubled term would change, or than what rounding the inputs to a
narrower type would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.compare.suite import Case

TOLERANCE = 4.0
# A prime, so that rows of any length start at different places of the pool.
POOL = 1_000_003
# Products up to this many multiply-adds are checked whole.
WHOLE = 1 << 22
ROWS, COLUMNS, BATCHES = 6, 256, 8


@dataclass(frozen=True, slots=True)
class Arrays:
    """The operands of one case, 2-D, or 3-D when the case has a batch."""

    a: Any
    b: Any
    c: Any


def arrays(case: Case, seed: int = 0) -> Arrays:
    """Inputs for `case`, the same for the same seed, and a result full of NaN.

    Values repeat after `POOL` elements: making fresh random numbers for large
    weights would take longer than timing them.
    """
    dtype = np.dtype(BY_NAME[case.dtype].numpy)
    pool = (np.random.default_rng(seed).random(POOL) * 2 - 1).astype(dtype)
    a = _layout(pool, case.batch, case.m, case.k, case.a)
    b = _layout(pool[::-1], case.batch, case.k, case.n, case.b)
    c = _layout(np.full(1, np.nan, dtype), case.batch, case.m, case.n, case.c)
    return Arrays(a, b, c)


def _layout(values: Any, batch: int, rows: int, columns: int, layout: str) -> Any:
    shape = (batch, rows, columns) if layout == "row" else (batch, columns, rows)
    array = np.resize(values, shape)
    array = array if layout == "row" else array.transpose(0, 2, 1)
    return array if batch > 1 else array[0]


def judge(case: Case, data: Arrays) -> tuple[float, float]:
    """The largest error of `data.c` over the sampled elements, and its bound.

    Both are absolute, for entries in [-1, 1). A result that was left unwritten
    anywhere, or is not finite, has the error infinity.
    """
    bound = TOLERANCE * max(case.k, 1) * BY_NAME[case.dtype].eps
    if not np.isfinite(data.c).all():
        return float("inf"), bound
    wide = np.float64 if case.dtype == "f32" else np.longdouble
    a, b, c = (x if case.batch > 1 else x[None] for x in (data.a, data.b, data.c))
    some = _sample(case)
    error = 0.0
    for i in some.batches:
        for rows, columns in some.blocks:
            # einsum rather than matmul: it wakes no BLAS and none of its threads.
            want = np.einsum("mk,kn->mn", a[i][rows].astype(wide), b[i][:, columns].astype(wide))
            error = max(error, float(np.abs(c[i][np.ix_(rows, columns)] - want).max(initial=0)))
    return error, bound


@dataclass(frozen=True, slots=True)
class _Sample:
    batches: list[int]
    blocks: list[tuple[Any, Any]]


def _sample(case: Case) -> _Sample:
    work = case.m * case.n * case.k
    if work * case.batch <= WHOLE:
        return _Sample(list(range(case.batch)), [(np.arange(case.m), np.arange(case.n))])
    batches = _ends(case.batch, BATCHES).tolist()
    if work <= WHOLE:
        return _Sample(batches, [(np.arange(case.m), np.arange(case.n))])
    few_rows = (_ends(case.m, ROWS), _ends(case.n, COLUMNS))
    few_columns = (_ends(case.m, COLUMNS), _ends(case.n, ROWS))
    return _Sample(batches, [few_rows, few_columns])


def _ends(size: int, count: int) -> Any:
    """At most `count` of range(size): the first and last quarters of them, and random ones between."""
    if size <= count:
        return np.arange(size)
    edge = max(count // 4, 1)
    middle = np.random.default_rng(size).choice(np.arange(edge, size - edge), count - 2 * edge, replace=False)
    return np.concatenate([np.arange(edge), np.sort(middle), np.arange(size - edge, size)])
