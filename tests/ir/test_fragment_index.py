"""Index expressions of fragments: what they evaluate to, and how they are spelled."""

from __future__ import annotations

import pytest

from portmm.codegen.c_like import index
from portmm.errors import ScheduleError
from portmm.ir.fragment_index import (
    Registers,
    coordinate,
    in_column,
    in_row,
    lane_column,
    lane_row,
    row_masks,
)
from portmm.ir.index import const, meaning, var
from portmm.target import target
from portmm.target.fragment import Fragment

LANE = var("lane")
HELD = [(isa, x) for isa in target.names_of("device", "isa") for x in target.load_isa(isa).fragments]
SUMS = [(isa, x) for isa, x in HELD if x.startswith(("sums", "matrix"))]


def fragment(isa, name):
    return target.load_isa(isa).fragments[name]


def value(x, lane):
    return meaning(x)({"lane": lane})


@pytest.mark.parametrize(("isa", "name"), HELD, ids="-".join)
def test_expressions_are_the_places_of_lanes(isa, name):
    f = fragment(isa, name)
    for lane in range(f.lanes):
        assert (value(lane_row(f, LANE), lane), value(lane_column(f, LANE), lane)) == f.place(lane, 0)


@pytest.mark.parametrize(("isa", "name"), HELD, ids="-".join)
def test_lanes_of_a_row_are_numbered(isa, name):
    f = fragment(isa, name)
    rows, columns = {}, {}
    for lane in range(f.lanes):
        row, column = f.place(lane, 0)
        rows.setdefault(row, set()).add((value(in_row(f, LANE), lane), column))
        columns.setdefault(column, set()).add((value(in_column(f, LANE), lane), row))
    for lanes, count in ((rows, f.lane_columns), (columns, f.lane_rows)):
        for one in lanes.values():
            assert sorted(number for number, _ in one) == list(range(count))
            assert sorted(one) == sorted(one, key=lambda x: x[1])  # in order
    masks = row_masks(f)
    assert len(masks) == f.lane_columns.bit_length() - 1
    assert all(f.place(0, 0)[0] == f.place(mask, 0)[0] for mask in masks)


@pytest.mark.parametrize(("isa", "name"), SUMS, ids="-".join)
@pytest.mark.parametrize("turned", [False, True])
def test_registers_have_rows_and_columns(isa, name, turned):
    f = fragment(isa, name)
    f = f.transposed if turned else f
    own = Registers(f)
    assert own.rows * own.columns == f.elements
    numbers = set()
    for i in range(own.rows):
        for j in range(own.columns):
            at = value(own.number(const(3), const(i), const(j)), 0) - 3 * f.elements
            numbers.add(at)
            row, column = coordinate(const(i), own.row_weights), coordinate(const(j), own.column_weights)
            assert f.place(0, at) == (value(row, 0), value(column, 0))
    assert numbers == set(range(f.elements))
    assert [f.place(0, i) for i in range(own.neighbours)] == [(0, i) for i in range(own.neighbours)]


def test_spelling():
    """As one would write them: emitted text is read."""
    sums = fragment("mma_sm75", "sums_16x8")
    assert (index(lane_row(sums, LANE)), index(lane_column(sums, LANE))) == ("lane / 4", "lane % 4 * 2")
    sums = fragment("mfma_cdna3", "sums_32x32")
    assert (index(lane_row(sums, LANE)), index(lane_column(sums, LANE))) == ("lane / 32 * 4", "lane % 32")
    assert index(coordinate(var("e"), Registers(sums).row_weights)) == "e / 4 * 8 + e % 4"
    both = fragment("simdgroup_apple", "matrix_8x8")
    assert index(lane_row(both, LANE)) == "lane / 16 * 4 + lane / 2 % 4"
    assert index(lane_column(both, LANE)) == "lane / 8 % 2 * 4 + lane % 2 * 2"
    # A broadcast adds nothing, and what lies above it is cut off.
    assert index(lane_row(fragment("wmma_rdna3", "a_16x16"), LANE)) == "lane % 16"
    # Of four warps that multiply together, the first has lanes 0 to 31.
    assert index(lane_row(fragment("wgmma", "sums_64x8"), LANE, 32)) == "lane / 4"
    assert coordinate(LANE, []) == const(0)


def test_mixed_registers_are_refused():
    mixed = Registers(Fragment((), ((1, 0), (0, 1), (2, 0))))
    with pytest.raises(ScheduleError, match="count neither rows nor columns first"):
        mixed.number(const(0), const(0), const(0))
