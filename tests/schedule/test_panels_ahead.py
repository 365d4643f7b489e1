"""Prefetches along panels and rows of weights that come from afar, by few rows of A."""

from __future__ import annotations

import pytest

from portmm.dispatch.schedule_choice import choose
from portmm.spec.problem import Problem
from portmm.target.target import load_target


@pytest.mark.parametrize("m", [6, 8, 10, 12])
def test_one_panel_of_many_megabytes_is_prefetched(m):
    """A last level of hundreds of MiB is shared by others: 64 MiB of weights come from memory."""
    s = choose(posed(m, 4096), load_target("granite_rapids"), tuned=False).schedule
    assert s.b.along
    assert s.b.panels == 1


def test_few_rows_are_multiplied_by_several_panels():
    s = choose(posed(2, 4096), load_target("granite_rapids"), tuned=False).schedule
    assert s.b.panels > 1
    assert not s.b.along


def test_panels_that_stay_in_a_cache_are_not_prefetched():
    s = choose(posed(8, 128), load_target("granite_rapids"), tuned=False).schedule
    assert not s.b.along


@pytest.mark.parametrize("n", [4096, 11008])
@pytest.mark.parametrize("m", [8, 12, 16, 32])
def test_rows_of_many_megabytes_are_swept_few_at_a_time(m, n):
    """As weights in panels are, rows of weights come from memory, though the last level is larger."""
    s = choose(posed(m, 4096, n, b="row"), load_target("granite_rapids"), tuned=False).schedule
    assert s.b.along == 128
    assert (s.tile("L1").k, s.tile("L3").n) == (16, 4096)


def test_rows_that_stay_in_a_cache_are_swept_many_at_a_time():
    s = choose(posed(8, 1024, 4096, b="row"), load_target("granite_rapids"), tuned=False).schedule
    assert s.tile("L1").k == 64


def posed(m, k, n=4096, b="packed"):
    return Problem(m, n, k, "f32", 1, "row", b, "row", family="f32x32")
