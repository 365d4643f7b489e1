"""Thinned products still hold every pair."""

from __future__ import annotations

from itertools import combinations, product

import cover
import pytest

AXES = [("ab", range(5), "xyz"), ("ab", "cd", "ef", "gh", range(7)), (range(6), range(9)), (range(4),), ("a", "b", "c")]


@pytest.mark.parametrize("axes", AXES)
def test_every_two_values_meet(axes, monkeypatch):
    monkeypatch.setattr(cover, "ALL", False)
    found = cover.pairs(*axes)
    assert set(found) <= set(product(*axes))
    for i, j in combinations(range(len(axes)), 2):
        assert {(x[i], x[j]) for x in found} == set(product(axes[i], axes[j]))
    assert {x[0] for x in found} == set(axes[0])
    assert found == cover.pairs(*axes)


def test_turns_differ(monkeypatch):
    monkeypatch.setattr(cover, "ALL", False)
    turns = [cover.pairs("abc", range(3), "xyz", turn=i) for i in range(4)]
    assert len({tuple(x) for x in turns}) > 1


def test_fewer_than_the_product(monkeypatch):
    monkeypatch.setattr(cover, "ALL", False)
    assert len(cover.pairs(range(5), range(5), range(5))) < 50
    assert len(cover.pairs("ab", "ab", "ab", "ab", "ab")) < 12


def test_what_there_is(monkeypatch):
    monkeypatch.setattr(cover, "ALL", False)
    found = cover.pairs(range(4), range(4), "xy", where=lambda i, j, _: i < j)
    assert {x[:2] for x in found} == set(combinations(range(4), 2))


def test_all_of_it_when_asked_for(monkeypatch):
    monkeypatch.setattr(cover, "ALL", True)
    assert cover.pairs("ab", range(3), "xy") == list(product("ab", range(3), "xy"))
    assert cover.some(range(9), 1, 2) == list(range(9))


def test_neighbours_get_others(monkeypatch):
    monkeypatch.setattr(cover, "ALL", False)
    kept = [cover.some(range(9), i, 3) for i in range(3)]
    assert sorted(x for found in kept for x in found) == list(range(9))
    assert {len(x) for x in kept} == {3}
