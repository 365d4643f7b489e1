"""Operands of products, laid in memory between poison, with the exact product and a bound of the error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from problems import post_of

from portmm.ir.interpreter import numpy_type
from portmm.spec.dequantization import OPERANDS, Dequantization
from portmm.spec.dtype import BY_NAME, CODES_AT, CODES_KR
from portmm.spec.problem import Family, Problem, family


def poison(dtype: np.dtype) -> Any:
    """The value around operands: no result has it."""
    return np.asarray({1: 85, 2: -7777.0}.get(dtype.itemsize, -77777.0)).astype(dtype)


@dataclass(frozen=True)
class Laid:
    """Values in a flat array that ends where they do: element (q, i, j) lies at
    offset + q * item + i * row + j * col."""

    flat: np.ndarray
    offset: int
    item: int
    row: int
    col: int
    shape: tuple[int, int, int]

    def places(self) -> np.ndarray:
        """Where the elements lie, (batch, rows, columns)."""
        q, i, j = np.ogrid[tuple(slice(n) for n in self.shape)]
        return self.offset + q * self.item + i * self.row + j * self.col

    def values(self) -> np.ndarray:
        """The elements, (batch, rows, columns)."""
        return self.flat[self.places()]


def lay(x: np.ndarray, layout: str, gap: int) -> Laid:
    """Values in a layout, with `gap` unused elements after each line and item."""
    batch, rows, cols = x.shape
    if layout == "any":  # backwards, and every third element
        row, col, offset = -(3 * cols + gap), 3, (rows - 1) * (3 * cols + gap)
    elif layout == "row":
        row, col, offset = cols + gap, 1, 0
    else:
        row, col, offset = 1, rows + gap, 0
    extent = 1 + (rows - 1) * abs(row) + (cols - 1) * col
    flat = np.full((batch - 1) * (extent + gap) + extent, poison(x.dtype), x.dtype)
    laid = Laid(flat, offset, extent + gap, row, col, x.shape)
    flat[laid.places()] = x
    return laid


def panels_of(b: np.ndarray, family: Family) -> np.ndarray:
    """B in panels, flat: [p][k][nr], or [p][k][nr][kr] in units of k filled up with zeros, and, for integers,
    the sum of each column as s32. Padded columns hold something: what is computed with it must not be stored.
    """
    nr, kr = family.nr, family.kr
    batch, k, n = b.shape
    count, depth = -(-n // nr), -(-k // kr)
    junk = 77 if b.dtype.kind in "iu" else np.nan
    wide = np.full((batch, depth * kr, count * nr), junk, b.dtype)
    wide[:, :, :n] = 0
    wide[:, :k, :n] = b
    units = wide.reshape(batch, depth, kr, count, nr).transpose(0, 3, 1, 4, 2)
    panels = np.ascontiguousarray(units).reshape(batch, count, -1)
    if not family.sums:
        return panels
    totals = units.astype(np.int32).sum(axis=(2, 4), dtype=np.int32)
    # The sums are aligned to themselves.
    gap = -panels.shape[2] * b.itemsize % 4 // b.itemsize
    filler = np.full((*panels.shape[:2], gap), junk, b.dtype)
    return np.concatenate([panels, filler, np.ascontiguousarray(totals).view(b.dtype)], axis=2)


@dataclass(frozen=True)
class Extra:
    """An operand of fused expressions: element (q, i, j) of a tile lies at offset + (q, i, j) . steps."""

    flat: np.ndarray
    offset: int
    steps: tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """A problem with operands, and the exact product."""

    problem: Problem
    fields: dict[str, int]
    a: np.ndarray
    a_offset: int
    b: np.ndarray
    b_offset: int
    c: Laid
    want: np.ndarray
    bound: np.ndarray
    operands: tuple[Extra, ...] = ()
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))

    def fresh(self) -> np.ndarray:
        """Memory for C: unset elements are NaN, all others poison."""
        return self.c.flat.copy()

    def parts(self) -> tuple[object, ...]:
        """All that a run on these operands depends on."""
        extra = [x for y in self.operands for x in (y.flat, y.offset, y.steps)]
        c = (self.c.flat, self.c.offset, self.c.item, self.c.row, self.c.col, self.c.shape)
        memory = (self.a, self.a_offset, self.b, self.b_offset, *c, self.numbers)
        return (self.problem, sorted(self.fields.items()), *memory, self.want, self.bound, *extra)

    def check(self, c: np.ndarray, what: object = "") -> None:
        """C is the product, and nothing beside it was written."""
        got = c[self.c.places()].astype(np.float64)
        off = ~(np.abs(got - self.want) <= self.bound)
        assert not off.any(), f"{what}: {off.sum()} of {off.size} wrong, first at {np.argwhere(off)[0]}"
        rest = np.ones(c.size, bool)
        rest[self.c.places()] = False
        assert (c[rest] == poison(c.dtype)).all(), f"{what}: wrote between the rows or items of C"


def case(p: Problem, seed: int = 0, *, floats: bool = False, shared: str = "") -> Case:
    """Operands for a problem: small integers, exact in any order, or floats with an error bound.

    `shared` names an operand whose one item serves the whole batch.
    """
    rng = np.random.default_rng(seed)
    types = [numpy_type(x) for x in p.types]
    if p.b == "codes":
        types[1] = np.dtype(np.float64)
    if p.source:
        types[0] = numpy_type(p.source)

    def draw(name: str, dtype: np.dtype, rows: int, cols: int) -> np.ndarray:
        shape = (1 if name == shared else p.batch, rows, cols)
        if dtype.kind in "iu" and p.acc == "s32":
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            return rng.integers(low, high + 1, shape).astype(dtype)
        return (
            rng.standard_normal(shape) * (50 if dtype.kind in "iu" else 1) if floats else rng.integers(-4, 5, shape)
        ).astype(dtype)

    x, y = draw("a", types[0], p.m, p.k), draw("b", types[1], p.k, p.n)
    gap = 0 if p.static else 3
    unset = poison(types[2]) + 1 if types[2].kind in "iu" else np.nan
    blank = np.full((p.batch, p.m, p.n), unset, types[2])
    a, c = lay(x, p.a, gap), lay(blank, p.c, gap)
    fields = {"m": p.m, "n": p.n, "k": p.k, "batch": p.batch}
    fields |= {"a_m": a.row, "a_k": a.col, "a_batch": 0 if shared == "a" else a.item}
    flat, offset, item, steps, y = laid_b(p, y, gap, rng)
    fields |= steps | {"b_batch": 0 if shared == "b" else item}
    fields |= {"c_m": c.row, "c_n": c.col, "c_batch": c.item}
    want, bound, operands = expected(p, x, y, rng, floats=floats)
    return Case(p, fields, a.flat, a.offset, flat, offset, c, want, bound, operands)


def laid_b(p: Problem, y: np.ndarray, gap: int, rng: Any) -> tuple[np.ndarray, int, int, dict[str, int], np.ndarray]:
    """B as a problem has it: memory, where it starts, items, strides, and its values."""
    if p.b == "codes":
        flat, offset, y = folded(p, rng)
        kept = family(p.family)
        return flat, offset, flat.size, {"b_k": kept.nr, "b_n": kept.panel(p.k)}, y
    if p.b == "packed":
        kept = family(p.family)
        panels = panels_of(y, kept)
        return panels.ravel(), 0, panels[0].size // kept.kr, {"b_k": kept.nr, "b_n": panels.shape[2] // kept.kr}, y
    b = lay(y, p.b, gap)
    return b.flat, b.offset, b.item, {"b_k": b.row, "b_n": b.col}, y


def expected(
    p: Problem, x: np.ndarray, y: np.ndarray, rng: Any, *, floats: bool
) -> tuple[np.ndarray, np.ndarray, tuple[Extra, ...]]:
    """The exact product, how far from it a result may be, and the operands of the epilogue of a quantised one."""
    rows = None
    if p.source:
        x, rows = by_rows(x)
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    to, out = numpy_type(p.types[2]), BY_NAME[p.types[2]].eps
    if post_of(p):
        operands, vectors, want = quantised(p, x, y, rng)
        size = vectors["size"]
        if rows is not None:  # scales of rows come from the rows
            assert "bias" not in post_of(p), "a bias is not scaled by rows"
            want, size = (v / vectors["a_scale"][:, None] * rows[:, None] for v in (want, size))
        # Three roundings in f32, one to the result.
        bound = 2.0**-21 * size + out * np.abs(want) + (0.5001 if not out else 0)
        return want if out else np.clip(want, np.iinfo(to).min, np.iinfo(to).max), bound, operands
    want = wide_x @ wide_y
    if not floats:
        return want.astype(to).astype(np.float64), np.zeros(1), ()
    # Each of k multiply-adds rounds at most twice, the result once: Higham, Accuracy and Stability, section 3.1.
    sizes = np.abs(wide_x) @ np.abs(wide_y)
    bound = 2 * (p.k + 1) * BY_NAME[p.acc].eps * sizes
    if p.b == "codes":  # weights may be rounded to the type of A
        bound = bound + (BY_NAME[p.types[0]].eps if p.types[0] == "bf16" else 0) * sizes
    # Halves of what small floats of eight bits are multiples of.
    least = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}.get(p.types[2], 0.0)
    return want, bound + (out * (np.abs(want) + bound) + least if p.types[2] != p.acc else 0), ()


def by_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of floats as codes, and their scales."""
    wide = x.astype(np.float32)
    most = np.abs(wide).max(axis=-1)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    return np.rint(wide * inverse[..., None]).astype(np.int8), (most / np.float32(127))[0].astype(np.float64)


TWICE_E2M1 = [sign * x for sign in (1, -1) for x in (0, 1, 2, 3, 4, 6, 8, 12)]
"""Floats of four bits, doubled, by their bits: sign, exponent and mantissa."""


def folded(p: Problem, rng: Any) -> tuple[np.ndarray, int, np.ndarray]:
    """A random weight of four bits: its panels, where they start, and its values. Padding is NaN and ones."""
    kept = family(p.family)
    nr, groups = kept.nr, kept.groups(p.k)
    rows = np.arange(p.k) // kept.group if kept.group else np.zeros(p.k, int)
    codes = rng.integers(0, 16, (p.k, p.n))
    scales, offsets = (rng.standard_normal((groups, p.n)).astype(np.float32) for _ in range(2))
    scales = scales.astype(kept.head_type.replace("f", "float")).astype(np.float32)
    offsets = -8 * scales if kept.symmetric else offsets * (not kept.e2m1)
    panels = []
    for first in range(0, p.n, nr):
        wide = min(nr, p.n - first)
        for g in range(groups):
            for values in (scales, offsets)[: kept.heads]:
                row = np.full(nr, np.nan, np.float32)
                row[:wide] = values[g, first : first + wide]
                panels.append(row.astype(np.float16 if kept.half else np.float32).view(np.int32))
            mine = codes[rows == g, first : first + wide] ^ (15 if kept.e2m1 else 0)
            for u in range(0, len(mine), CODES_KR):
                word = np.full(nr, -1, np.int64)
                word[:wide] = sum(x.astype(np.int64) << CODES_AT[e] for e, x in enumerate(mine[u : u + CODES_KR]))
                panels.append(word.astype(np.uint32).view(np.int32))
    numbers = np.array(TWICE_E2M1)[codes] if kept.e2m1 else codes
    values = scales[rows].astype(np.float64) * numbers + offsets[rows]
    return np.concatenate(panels), 0, values[None]


def valid_of(kept: Family, k: int, n: int) -> np.ndarray:
    """A mask of the elements of panels that count: no padded column, but every sum of one that is none."""
    columns = np.arange(-(-n // kept.nr) * kept.nr).reshape(-1, 1, kept.nr, 1) < n
    units = np.broadcast_to(columns, (len(columns), -(-k // kept.kr), kept.nr, kept.kr)).reshape(len(columns), -1)
    if not kept.sums:
        return units.ravel()
    size = BY_NAME[kept.dtype].bytes
    sums = np.repeat(columns.reshape(len(columns), -1), 4 // size, axis=1)
    gap = np.zeros((len(columns), -units.shape[1] * size % 4 // size), bool)
    return np.concatenate([units, gap, sums], axis=1).ravel()


LARGEST = 64
"""More than a scale times a code and an offset of `folded` come to."""


def quantised(
    p: Problem, x: np.ndarray, y: np.ndarray, rng: Any
) -> tuple[tuple[Extra, ...], dict[str, Any], np.ndarray]:
    """Operands of the epilogue of a quantised product, all vectors for it, and its exact result."""
    rows, columns, post = (p.m,), (-(-p.n // 64) * 64,), post_of(p)
    span = 1.0 if BY_NAME[p.types[2]].eps else 1e-2
    a_scale, b_scale = rng.random(rows).astype(np.float32) * span, rng.random(columns).astype(np.float32)
    bias = (rng.standard_normal(columns) * 10).astype(np.float32)
    a_zero, b_zero = rng.integers(-9, 99, rows).astype(np.int32), rng.integers(-9, 99, columns).astype(np.int32)
    wide_x, wide_y = x.astype(np.int64), y.astype(float if p.b == "codes" else np.int64)
    if "azero" not in post:
        a_zero[:] = 0
    if "bzero" not in post:
        b_zero[:] = 0
    exact = (wide_x - a_zero[:, None]) @ (wide_y - b_zero[: p.n])
    scaled = exact * a_scale[:, None].astype(float) * b_scale[: p.n].astype(float)
    want = scaled + (bias[: p.n] if "bias" in post else 0)
    size = np.abs(scaled) + np.abs(bias[: p.n])
    if p.b == "codes":  # sums of codes and of offsets may cancel
        size = size + LARGEST * np.abs(wide_x).sum(-1)[0][:, None] * a_scale[:, None] * b_scale[: p.n]
    a_sum = -(wide_x.sum(-1)[0] - p.k * a_zero).astype(np.int32)
    vectors = {
        "a_scale": a_scale,
        "b_scale": b_scale[: p.n],
        "bias": bias[: p.n],
        "a_zero": -a_zero,
        "a_sum": a_sum,
        "b_zero": b_zero[: p.n],
        "size": size,
    }
    names = Dequantization("azero" in post, "bzero" in post, "bias" in post, bool(p.source)).names
    steps = {"m": (0, 1, 0), "n": (0, 0, 1)}
    return tuple(Extra(vectors[x], 0, steps[OPERANDS[x][1]]) for x in names), vectors, want
