"""Layouts by name, as the expressions that a person would write for them."""

from __future__ import annotations

import numpy as np
import pytest

from portmm.ir.index import spelled, var
from portmm.ir.interpreter import evaluate as evaluated
from portmm.spec.layout import Layout, Position
from portmm.spec.layout_index import as_sum, coordinate, evaluate
from portmm.spec.layouts import column_major, in_panels, panels, row_major, swizzled, windows


def index_of(layout, names):
    return [coordinate(x, extent) for x, extent in zip(names.split(), layout.extents, strict=True)]


def form(layout, names):
    """The offset as text."""
    return str(layout.offset(index_of(layout, names)))


def conditions(layout, names):
    """Conditions of validity as text."""
    values = {f"i{i}": x for i, x in enumerate(index_of(layout, names))}

    def text(x):
        return None if x is None else str(as_sum(evaluate(x, lambda leaf: values.get(leaf.name, as_sum(leaf.name)))))

    return [(text(x.index), text(x.least), text(x.end)) for x in layout.conditions]


MATRIX = Layout(("k", "n"), ("b_k", 1))
LINES = row_major(128, 64).unmerge(1, None, 8)
INT4 = Layout((4, 2, 18, 32, 2, 4), (36 * 32 * 8, 18 * 32 * 8, 32 * 8, 8, 1, 2))

FORMS = [
    (row_major("m", "k"), "i p", "i * k + p"),
    (column_major("m", "k"), "i p", "i + p * m"),
    (Layout(("m", "k"), ("a_m", "a_k")), "i p", "i * a_m + p * a_k"),
    # A strided batch, an item of it, and a view with gaps.
    (Layout(("batch", "m", "n"), ("c_batch", "c_m", 1)), "b i j", "b * c_batch + i * c_m + j"),
    (Layout((8, "m", "n"), ("c_batch", "c_m", 1)).freeze(0, 3), "i j", "c_batch * 3 + i * c_m + j"),
    (row_major("m", 64).slice(1, 4, 16, 3), "i j", "i * 64 + j * 3 + 4"),
    (row_major("m", 64).unmerge(1, 4, 16).freeze(1, 2), "i j", "i * 64 + j + 32"),
    (row_major("m", 64).broadcast(0, "batch"), "b i j", "i * 64 + j"),
    # Panels of B, of units, and of a slice of A; those of a packed weight with sums behind each panel.
    (panels("k", "n", 32), "p j", "j / 32 * k * 32 + p * 32 + j % 32"),
    (panels("k", 32, 32), "p j", "p * 32 + j"),
    (panels("k", "m", 6), "p i", "i / 6 * k * 6 + p * 6 + i % 6"),
    (panels(64, "n", 32, 4, "step"), "p j", "j / 32 * step + p / 4 * 128 + j % 32 * 4 + p % 4"),
    (in_panels(MATRIX, 16), "q u j e", "u * b_k + q * 16 + j"),
    (in_panels(MATRIX, 16, 4), "q u j e", "u * b_k * 4 + e * b_k + q * 16 + j"),
    # A tile of AMX: 16 rows of 16 units of four.
    (panels(64, 16, 16, 4).unmerge(0, None, 4).permute(0, 2, 1), "u j e", "u * 64 + j * 4 + e"),
    # Units of two rows by eight of k, a word of 16 bytes of SMMLA.
    (panels(64, 32, 32, 8), "p j", "p / 8 * 256 + j * 8 + p % 8"),
    # Eight int4 values of a column in a word, the even ones in lower halves of bytes; groups of 128 rows.
    (
        INT4.slice(2, 2, 16).permute(1, 2, 4, 5, 0, 3).merge(0, 4).merge(1, 2),
        "p j",
        "j / 32 * 9216 + p / 128 * 4608 + p / 8 % 16 * 256 + j % 32 * 8 + p / 4 % 2 + p % 4 * 2 + 512",
    ),
    # Shared memory, with vectors of lines of 128 and of 64 bytes in other banks.
    (swizzled(64, 2), "line vector e", "line * 64 + (vector ^ line % 8) * 8 + e"),
    (Layout((128, 64), swizzle=(3, 3, 3)).unmerge(1, 8, 8), "line vector e", "line * 64 + (vector ^ line % 8) * 8 + e"),
    (swizzled(32, 2), "line vector e", "line * 32 + (vector ^ line / 2 % 4) * 8 + e"),
    (swizzled(64, 4, 2), "line vector e", "line * 64 + (vector ^ line % 4 * 2) * 4 + e"),
    (
        Layout((128, 32), swizzle=(2, 3, 3)).unmerge(1, 4, 8),
        "line vector e",
        "line * 32 + (vector ^ line / 2 % 4) * 8 + e",
    ),
    (Layout((128, 64), swizzle=(3, 3, 3)), "line column", "line * 64 + (column ^ line % 8 * 8)"),
    # A box of TMA: strips of 64 rows, lines of one k of each.
    (
        Layout((4, 128, 64), swizzle=(3, 3, 3)).unmerge(2, 8, 8),
        "strip k vector e",
        "strip * 8192 + k * 64 + (vector ^ k % 8) * 8 + e",
    ),
    # Contiguous axes are one, an axis apart is another, and digits of a number are that number.
    (row_major("n", "h", "w").merge(0, 3), "x", "x"),
    (Layout(("n", "h", "w"), ("pitch", "w", 1)).merge(0, 3), "x", "x / (h * w) * pitch + x % (h * w)"),
    (row_major(6, 4, 8).merge(1, 2).unmerge(1, 4, 8), "a b c", "a * 32 + b * 8 + c"),
    (row_major(6, 32).unmerge(1, 4, 8).merge(1, 2), "a b", "a * 32 + b"),
    (row_major(6, 32).unmerge(1, 4, 8).merge(0, 2).merge(0, 2), "x", "x"),
    (row_major(8, 6).permute(1, 0).merge(0, 2), "x", "x % 8 * 6 + x / 8"),
    (row_major(256).unmerge(0, None, 16).slice(0, 0, 4).merge(0, 2), "x", "x"),
    (row_major("n").pad_to(0, 16).unmerge(0, None, 16).merge(0, 2), "x", "x"),
    (row_major(64).compose(Layout((8, 4), (2, 16))), "lane register", "lane * 2 + register * 16"),
    # Windows of a convolution: any, those of one pixel, and those beside each other.
    (windows(row_major("n", "c", "h", "w"), (1, 1)), "m k", "m / (h * w) * c * h * w + k * h * w + m % (h * w)"),
    (
        windows(row_major(2, 3, 10, 10), (3, 3)),
        "m k",
        "m / 64 * 300 + k / 9 * 100 + m / 8 % 8 * 10 + k / 3 % 3 * 10 + m % 8 + k % 3",
    ),
    (windows(row_major(2, 3, 8, 8), (2, 2), (2, 2)).unmerge(0, 2, 4, 4).unmerge(3, 3, 2, 2), "n y x c r s",
     "n * 192 + c * 64 + y * 16 + r * 8 + x * 2 + s"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "names", "text"), FORMS, ids=[x[2] for x in FORMS])
def test_offsets_are_what_a_person_writes(layout, names, text):
    assert form(layout, names) == text


PADDED = row_major("n", "c", "h", "w").pad(2, 1, 1).pad(3, 1, 1)
CONDITIONS = [
    (row_major(64).pad(0, 0, 0), "x", []),
    (row_major("n").pad_to(0, 16).unmerge(0, None, 16), "q j", [("q * 16 + j", None, "n")]),
    (row_major(64).pad_to(0, 16).unmerge(0, None, 16), "q j", []),
    (in_panels(MATRIX, 16, 4), "q u j e", [("q * 16 + j", None, "n"), ("u * 4 + e", None, "k")]),
    (row_major("n").pad(0, 2), "x", [("x", "2", None)]),
    (row_major("n").pad(0, 2).slice(0, 2, "n"), "x", []),
    (
        PADDED.embed(2, ("h", 3), (1, 1)).embed(4, ("w", 3), (1, 1)),
        "n c y r x s",
        [("x + s", "1", "w + 1"), ("y + r", "1", "h + 1")],
    ),
]


@pytest.mark.parametrize(("layout", "names", "expected"), CONDITIONS)
def test_conditions_are_those_that_can_fail(layout, names, expected):
    assert conditions(layout, names) == expected


def test_steps_along_an_axis_are_constants_where_they_can_be():
    conv = windows(row_major(2, 3, 10, 10), (3, 3))
    assert str(row_major("m", "k").step(0, 3)) == "k * 3"
    assert panels("k", "n", 32).step(0, 5) == 160
    assert [panels(64, 64, 32).step(1, x) for x in (1, 32)] == [None, 2048]
    assert [conv.step(1, x) for x in (1, 9, 18)] == [None, 100, 200]
    assert [conv.step(0, x) for x in (8, 64)] == [None, 300]
    assert [LINES.xor(1, 0).step(0, x) for x in (1, 8)] == [None, 512]


def test_vectors_are_as_long_as_memory_allows():
    assert [row_major(6, 48).vector(x, 64) for x in (0, 1)] == [1, 16]
    assert row_major("m", "k").vector(1, 8) == 1
    assert row_major("m", "k").vector(1, 8, {"k": 8}) == 8
    assert row_major(4, 48).pad(1, 8, 4).vector(1, 16) == 4
    assert [panels(64, 64, 16, 4).vector(x, 64) for x in (0, 1)] == [4, 1]
    assert [panels(64, 64, 16).vector(x, 64) for x in (0, 1)] == [1, 16]
    assert [LINES.xor(1, 0).vector(x, 64) for x in (0, 1, 2)] == [1, 1, 8]
    assert Layout((128, 64), swizzle=(3, 3, 3)).vector(1, 64) == 8
    assert in_panels(MATRIX, 16).vector(2, 64, {"b_k": 4, "n": 8}) == 4
    assert windows(row_major(2, 3, 8, 8), (2, 2), (2, 2)).vector(1, 64) == 2


def test_a_carry_replaces_divisions():
    """Steps through k of a convolution move digits of (c, r, s)."""
    conv = windows(row_major(2, 8, 9, 9), (3, 3))
    position, seen = conv.start((5, 0)), []
    for _ in range(9):
        seen.append(position.offset)
        position = conv.move(position, 1, 8)
    np.testing.assert_array_equal(seen, [conv.offset((5, k)) for k in range(0, 72, 8)])


@pytest.mark.parametrize("delta", [1, 8, 13])
def test_kernels_carry_without_a_division(delta):
    conv = windows(row_major(2, 8, 9, 9), (3, 3))
    moved = conv.move(conv.start((5, var("k")), var), 1, delta, var).offset
    # The digits of the old position are variables of a kernel, which it updates.
    levels = conv.start((5, 40)).levels
    digits = tuple(tuple(var(f"x{i}_{j}") for j in range(len(level))) for i, level in enumerate(levels))
    values = {f"x{i}_{j}": int(x) for i, level in enumerate(levels) for j, x in enumerate(level)}
    values["linear"] = int(conv.offset((5, 40)))
    cheap = conv.move(Position(digits, var("linear"), None), 1, delta, var).offset
    assert not {"/", "%"} & set(spelled(cheap).split())
    assert evaluated(cheap, values) == evaluated(moved, {"k": 40}) == conv.offset((5, 40 + delta))
