"""Random operands of a case and the check of its result.

Owns the arrays of a case and the check against a wider type.

Entries are uniform in [-1, 1). Partial sums of k such products walk randomly:
the i-th is about sqrt(i)/3, each addition rounds it by at most u, the errors
add like a random walk too, so the error of one element is near u k / 4 in any
order of summation. `TOLERANCE` k u is sixteen deviations above that, exceeds
the worst case for k <= 4, and is still a thousand times less than the error of one
lost or doubled term, or of inputs that are rounded to a narrower type.

Narrow floats are summed in float32, and a narrow result is rounded once more: u of
its own size. Integers are exact. With a library that rounds one operand of each
product again (weights of four bits to bfloat16, say) the errors of k products,
v/2 each, walk randomly to sqrt(k) v / 4: `TOLERANCE` sqrt(k) v is allowed then, not
k v, which at k = 1024 would exceed the results themselves. Activations in 8 bits,
steps of 1/127 of their largest, are that with v = 1/127.

Activation functions are curved where sums are near 1, so the weights of a fused case are
scaled by a power of two that brings its sums there; so are the errors of its sums. A
library that rounds to narrow operands may round after each step, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from portmm.arrays.numpy_arrays import numpy_of
from portmm.comparison import fused
from portmm.comparison.case import Case
from portmm.spec.dtype import BY_NAME, FP8

TOLERANCE = 4.0
# A prime, so that rows of any length start at different offsets in the pool.
POOL = 1_000_003
# Products up to this many multiply-adds are checked whole.
WHOLE = 1 << 22
ROWS, COLUMNS, BATCHES = 6, 256, 8

EXACT, INPUTS, APPROXIMATE = PRECISIONS = ("exact", "inputs", "approximate")
"""Precisions of a library: sums in their type and one rounding of the result; operands rounded
to the narrower of their types; activations of 8 bits."""

CODES = 16
ZERO = 8
"""Number of int4 values, and the one that represents zero."""
LARGEST_CODE = 128
# Far below any sum of integers of the cases.
UNWRITTEN = -(2**31)
BITS_8 = 1 / 127
# Less than any error that is not zero, for sums that must be exact.
TINY = 1e-300
# Round-off of sums that units for floats of eight bits keep: Hopper's have some 13 bits behind the point.
SUMS_OF_FP8 = 2.0**-10
# Roundings of a scaled sum: to float32, by each scale, and one to spare for another order.
SCALED_ROUNDINGS = 4
# Three standard deviations of uniform numbers, and one of products of int8 values.
DEVIATIONS = 3.0
CODES_DEVIATION = 8000.0


@dataclass(frozen=True, slots=True)
class Arrays:
    """The operands of one case, 2-D, or 3-D when the case has a batch.

    Attributes:
        a: A; integers are quantised values if there are scales.
        b: B; for four bits values from 0 to 15, uint8, of which 8 is zero.
        c: the result.
        rows: a scale for each row of A, float32, (m,), if A is quantised.
        columns: a scale for each column of B, float32, (n,); with blocks one for each of
            them, (k / block, n), of values that bfloat16 represents.
        bias: (n,), of C's type, if it is fused.
        residual: (m, n), of C's type, if it is fused.
    """

    a: Any
    b: Any
    c: Any
    rows: Any = None
    columns: Any = None
    bias: Any = None
    residual: Any = None

    @property
    def added(self) -> dict[str, Any]:
        """Arrays that are added to the product, by the words of `comparison.fused`."""
        return {name: x for name in fused.ADDED if (x := getattr(self, name)) is not None}

    def spoil(self) -> None:
        """Fill the result with a value that marks elements as unwritten."""
        self.c.fill(UNWRITTEN if self.c.dtype.kind == "i" else math.nan)


def arrays(case: Case, seed: int = 0) -> Arrays:
    """Operands of `case`, the same for the same seed, and an unwritten result.

    Values repeat after `POOL` elements: generating random numbers for all of a large
    weight would take longer than timing it.

    Raises:
        TypeError: the case has bfloat16, and there is no ml_dtypes.
    """
    rng = np.random.default_rng(seed)
    if not case.narrow:
        dtype = numpy_of(case.dtype)
        pool = (rng.random(POOL) * 2 - 1).astype(dtype)
        pools, empty = (pool, pool[::-1]), np.empty(1, dtype)
    else:
        pools, empty = tuple(_pool(rng, x) for x in case.types[:2]), np.empty(1, numpy_of(case.types[2]))
    size = weights_size(case)
    if size != 1 and not (case.scaled or case.block):
        pools = (pools[0], pools[1] * pools[1].dtype.type(size))
    a = _layout(pools[0], case.batch, case.m, case.k, case.a)
    b = _layout(pools[1], case.batch, case.k, case.n, case.b)
    c = _layout(empty, case.batch, case.m, case.n, case.c)
    rows = columns = None
    if case.scaled:
        rows = _scales(rng, (case.m,)) if case.whole else None
        # With activations in floats the dequantised weights are in [-1, 1).
        columns = _scales(rng, (case.n,)) * np.float32(size / (1 if case.whole else LARGEST_CODE))
    elif case.block:
        columns = _scales(rng, (-(-case.k // case.block), case.n)) * np.float32(size / ZERO)
    data = Arrays(a, b, c, rows, columns, **_added(case, rng, empty.dtype))
    data.spoil()
    return data


def _added(case: Case, rng: Any, dtype: Any) -> dict[str, Any]:
    """Bias and residual of a case, in [-1, 1), by the words of `comparison.fused`."""
    shapes = {"bias": (case.n,), "residual": (case.m, case.n)}
    words = [word for word in fused.steps(case.fused) if word in shapes]
    return {word: np.resize((rng.random(POOL) * 2 - 1).astype(dtype), shapes[word]) for word in words}


def weights_size(case: Case) -> float:
    """Largest weight, a power of two: 1 for a bare product; for a fused one such that sums are near 1."""
    if not case.fused:
        return 1.0
    one = CODES_DEVIATION if case.scaled and case.whole else 1 / DEVIATIONS
    return 2.0 ** -round(math.log2(one * math.sqrt(max(case.k, 1))))


def _pool(rng: Any, name: str) -> Any:
    """Random values of a type."""
    if name == "u4":
        return rng.integers(0, CODES, POOL, dtype=np.uint8)
    dtype = numpy_of(name)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, POOL, dtype=dtype, endpoint=True)
    return (rng.random(POOL) * 2 - 1).astype(dtype)


def _scales(rng: Any, shape: tuple[int, ...]) -> Any:
    """Random scales from 1/2 to 1, of 8 bits, which libraries with scales in bfloat16 represent exactly."""
    return (rng.integers(128, 256, shape) / 256).astype(np.float32)


def _layout(values: Any, batch: int, rows: int, columns: int, layout: str) -> Any:
    shape = (batch, rows, columns) if layout == "row" else (batch, columns, rows)
    array = np.resize(values, shape)
    array = array if layout == "row" else array.transpose(0, 2, 1)
    return array if batch > 1 else array[0]


def judge(case: Case, data: Arrays, precision: str = EXACT) -> tuple[float, float]:
    """Error of `data.c` and its bound, at the sampled element with the largest ratio of the two.

    Both are absolute, for entries in [-1, 1). A result with an unwritten or infinite element has
    the error infinity.
    """
    if not _written(data.c):
        return math.inf, _bound(case, 0.0, precision)
    a, b, c = (x if case.batch > 1 else x[None] for x in (data.a, data.b, data.c))
    batches, blocks = _sample(case)
    error, bound, worst = 0.0, float(_bound(case, 0.0, precision)), 0.0
    for i in batches:
        for rows, columns in blocks:
            sums = _sums(case, data, a[i][rows], b[i][:, columns], (rows, columns))
            want, bounds = _finished(case, data, sums, (rows, columns), precision)
            errors = np.abs(c[i][np.ix_(rows, columns)].astype(want.dtype) - want)
            bounds = np.broadcast_to(bounds, errors.shape)
            ratios = errors / np.maximum(bounds, TINY)
            if ratios.max(initial=0) > worst:
                at = np.unravel_index(int(ratios.argmax()), ratios.shape)
                worst, error, bound = float(ratios[at]), float(errors[at]), float(bounds[at])
    return error, bound


def _finished(case: Case, data: Arrays, sums: Any, where: tuple[Any, Any], precision: str) -> tuple[Any, Any]:
    """Expected results of sums at rows and columns `where`, and the error allowed in each."""
    if not case.fused:
        return sums, _bound(case, np.abs(sums), precision)
    added = {name: x[where[1]] if x.ndim == 1 else x[np.ix_(*where)] for name, x in data.added.items()}
    inner, outer = _eps(case.types[2], case)
    rounding = fused.Rounding(inner, outer, 0.0 if precision == EXACT else outer)
    return fused.finished(case.fused, sums, added, _sums_bound(case, np.abs(sums), precision), rounding)


def _written(c: Any) -> bool:
    return not (c == UNWRITTEN).any() if c.dtype.kind == "i" else bool(np.isfinite(c).all())


def _sums(case: Case, data: Arrays, a: Any, b: Any, where: tuple[Any, Any]) -> Any:
    """Product of some rows and columns in a wider type."""
    # einsum rather than matmul: it calls no BLAS and starts none of its threads.
    if case.whole:
        sums = np.einsum("mk,kn->mn", a.astype(np.int64), b.astype(np.int64))
        return (
            sums * data.rows.astype(float)[where[0], None] * data.columns.astype(float)[where[1]]
            if case.scaled
            else sums
        )
    wider = np.longdouble if case.dtype == "f64" else np.float64
    right = b.astype(wider)
    if case.scaled:
        right *= data.columns[where[1]]
    elif case.block:
        right = (right - ZERO) * np.repeat(data.columns[:, where[1]].astype(wider), case.block, axis=0)[: case.k]
    return np.einsum("mk,kn->mn", a.astype(wider), right)


def _bound(case: Case, size: Any, precision: str) -> Any:
    """Error allowed in an element of absolute value `size` of a bare product."""
    return _sums_bound(case, size, precision) + _eps(case.types[2], case)[1] * size


def _sums_bound(case: Case, size: Any, precision: str) -> Any:
    """Error allowed in a sum of absolute value `size`, before it is rounded to the result's type."""
    k, largest = max(case.k, 1), weights_size(case)
    inner, outer = _eps(case.types[2], case)
    if case.whole:
        return (SCALED_ROUNDINGS * inner if case.scaled else 0.0) * size
    bound = TOLERANCE * k * inner * largest
    if not case.narrow:
        return bound
    if not FP8.isdisjoint(case.types[:2]):
        bound, precision = bound + TOLERANCE * math.sqrt(k) * SUMS_OF_FP8, EXACT
    # Units that multiply only bfloat16 round the dequantised values of a weight of four bits.
    rounded = precision == INPUTS or case.types[:2] == ("bf16", "u4")
    if rounded and not case.dynamic:
        v = max(BY_NAME["bf16"].eps if x == "u4" else BY_NAME[x].eps for x in case.types)
        return bound + TOLERANCE * math.sqrt(k) * v * largest + max(v - outer, 0.0) * size
    if precision == APPROXIMATE or case.dynamic:
        return bound + TOLERANCE * math.sqrt(k) * BITS_8 * largest
    return bound


def _eps(result: str, case: Case) -> tuple[float, float]:
    """Unit round-offs of the sums and of the result, 0 for one no narrower, 1 % more for rounding twice."""
    inner = BY_NAME[case.problem.acc].eps or BY_NAME["f32"].eps
    outer = BY_NAME[result].eps
    return inner, 1.01 * outer if outer > inner else 0.0


def _sample(case: Case) -> tuple[list[int], list[tuple[Any, Any]]]:
    """The batches that are checked, and the rows and columns of each."""
    whole = (np.arange(case.m), np.arange(case.n))
    work = case.m * case.n * case.k
    if work * case.batch <= WHOLE:
        return list(range(case.batch)), [whole]
    batches = _ends(case.batch, BATCHES).tolist()
    if work <= WHOLE:
        return batches, [whole]
    few_rows = (_ends(case.m, ROWS), _ends(case.n, COLUMNS))
    few_columns = (_ends(case.m, COLUMNS), _ends(case.n, ROWS))
    return batches, [few_rows, few_columns]


def _ends(size: int, count: int) -> Any:
    """At most `count` of range(size): the first and last quarters of them, and random ones between."""
    if size <= count:
        return np.arange(size)
    edge = max(count // 4, 1)
    middle = np.random.default_rng(size).choice(np.arange(edge, size - edge), count - 2 * edge, replace=False)
    return np.concatenate([np.arange(edge), np.sort(middle), np.arange(size - edge, size)])
