"""Prefetches along panels of weights that come from afar, by few rows of A."""

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


def posed(m, k):
    return Problem(m, 4096, k, "f32", 1, "row", "packed", "row", family="f32x32")
