"""Timing with cold caches."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from places import HELPERS

from portmm.comparison import Case, Contender, compare, measure
from portmm.comparison.data import EXACT, arrays, judge
from portmm.comparison.limit import Limits
from portmm.comparison.peers import Fetched, Library, Setup, UnsupportedError, repeat, returning
from portmm.comparison.report import from_json
from portmm.comparison.text import heading, notes
from portmm.target.cache_levels import MemoryLevel

SMALL = Case("small", "cube", 8, 12, 16)
LARGE = Case("large", "cube", 64, 64, 64)
LEVELS = (MemoryLevel("L1", 1000), MemoryLevel("L2", 10_000), MemoryLevel("L3", 100_000, shared=True))


def listening(calls):
    """A library that writes down whose operands each call has."""

    def prepare(_case, data):
        def call():
            calls.append(id(data))
            np.matmul(data.a, data.b, out=data.c)

        return {"matmul": repeat(call)}

    return Library("listening 1", prepare)


def prepared(library, case, flushed, threads=1):
    made, copies = measure.prepared(library, case, arrays(case), Setup(threads, cold=flushed))
    return made["matmul"], copies


def test_what_is_enough():
    assert measure.enough(LEVELS, 1) == measure.MARGIN * 110_000
    assert measure.enough(LEVELS, 4) == measure.MARGIN * 140_000
    assert measure.enough((), 1) == measure.UNKNOWN
    assert measure.enough((MemoryLevel("L3", 1 << 40, shared=True),), 1) == measure.LARGEST


@pytest.mark.parametrize(
    ("case", "flushed", "number"),
    [
        (LARGE, LARGE.bytes, 2),
        (LARGE, LARGE.bytes - 1, 2),
        (LARGE, 3 * LARGE.bytes, 4),
        (SMALL, 1 << 20, measure.COPIES),
        (Case("huge", "cube", 1 << 14, 1 << 14, 1 << 14), 1 << 26, 1),
    ],
)
def test_copies_outgrow_the_caches_or_are_a_few(case, flushed, number):
    assert measure.copies(case, flushed) == number


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("batch", [1, 3])
def test_copies_are_alike_and_elsewhere(layout, batch):
    data = arrays(Case("x", "x", 5, 6, 7, batch, a=layout, b=layout, c=layout))
    other = measure.copied(data)
    for name in ("a", "b", "c"):
        one, two = getattr(data, name), getattr(other, name)
        assert one.strides == two.strides
        assert not np.shares_memory(one, two)
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("flushed", [3 * LARGE.bytes, 1 << 22])
def test_each_call_has_other_operands(flushed):
    calls = []
    run, copies = prepared(listening(calls), LARGE, flushed)
    assert len(copies) == len(run.runs) == min(-(-flushed // LARGE.bytes) + 1, measure.COPIES)
    measure.seconds_per_call(run, 0.01)
    assert set(calls) == {id(x) for x in copies}
    # One after the other, round and round.
    order = [id(x) for x in copies]
    assert all(order.index(b) == (order.index(a) + 1) % len(order) for a, b in pairwise(calls))


def test_copies_that_outgrow_the_caches_need_no_flush(monkeypatch):
    flushes = []
    monkeypatch.setattr(measure, "flush", lambda *given: flushes.append(given))
    large, _ = prepared(listening([]), LARGE, 3 * LARGE.bytes)
    measure.seconds_per_call(large, 0.001)
    assert flushes == []
    small, _ = prepared(listening([]), SMALL, 1 << 20, threads=2)
    measure.seconds_per_call(small, 0.001)
    assert set(flushes) == {(1 << 20, 2)}


def test_flushed_operands_are_used_once_between_two_flushes(monkeypatch):
    calls = []
    monkeypatch.setattr(measure, "flush", lambda *_: calls.append("flush"))
    run, _ = prepared(listening(calls), SMALL, 1 << 20)
    measure.seconds_per_call(run, 0.001)
    between = "".join("|" if x == "flush" else "." for x in calls).split("|")[1:]
    assert max(map(len, between)) <= measure.COPIES
    assert len(between) > 1


def test_a_flush_writes_every_line():
    measure.flush(1 << 16, 3)
    before = measure._ballast(1 << 16).copy()
    measure.flush(1 << 16, 3)
    assert (measure._ballast(1 << 16) - before)[:: measure.LINE // 8].tolist() == [1] * ((1 << 16) // measure.LINE)


def test_the_clock_is_read_around_calls_alone(monkeypatch):
    now = [0.0]

    def flush(*_):
        now[0] += 5.0

    def prepare(_case, _data):
        def call():
            now[0] += 0.001

        return {"matmul": repeat(call)}

    monkeypatch.setattr(measure, "flush", flush)
    run, _ = prepared(Library("fake", prepare), SMALL, 1 << 20)
    assert measure.seconds_per_call(run, 0.02, lambda: now[0]) == pytest.approx(0.001)


def test_results_of_all_copies_are_checked():
    first = []

    def prepare(_case, data):
        first.append(data)

        def call():
            return data.a @ data.b + (0 if data is first[0] else 1)

        return {"matmul": returning(call, lambda result: np.copyto(data.c, result))}

    run, copies = prepared(Library("late", prepare), SMALL, 1 << 20)
    assert all(isinstance(x, Fetched) for x in run.runs)
    run.runs[0](1)
    run.runs[0].fetch()
    assert judge(SMALL, copies[0])[0] <= judge(SMALL, copies[0])[1]
    error, bound = measure.checked(SMALL, run, copies, EXACT)
    assert error > bound


def test_what_a_library_refuses_stays_refused():
    def prepare(_case, _data):
        raise UnsupportedError("no")

    with pytest.raises(UnsupportedError):
        prepared(Library("none", prepare), SMALL, 1 << 20)


def test_operands_come_from_memory():
    reach = Limits({"fma": 1000.0, "L1": 1000.0, "memory": 1.0}, (MemoryLevel("L1", 1 << 30),), {"f32": "fma"})
    assert reach.of(LARGE, 1) == 1000.0
    assert reach.of(LARGE, 1, cold=True) == pytest.approx(LARGE.flops / LARGE.bytes)


def contest(*names, **options):
    field = [Contender(name, f"compare_fakes:{name}", peer=name != "right") for name in names]
    return compare([SMALL], contenders=field, rounds=2, turn_s=0.001, limits=False, cold=True, **options)


def test_a_contest_with_cold_caches(monkeypatch):
    monkeypatch.syspath_prepend(str(HELPERS))
    monkeypatch.setattr("portmm.comparison.contest.enough", lambda _levels, threads: threads << 20)
    report = contest("right", "slow", "forgetful", "unfinished", "elsewhere", threads=2)
    (result,) = report.results
    states = {name: entry.state for name, entry in result.entries.items()}
    assert states == {"right": "ok", "slow": "ok", "forgetful": "wrong", "unfinished": "wrong", "elsewhere": "ok"}
    assert result.entries["slow"].seconds >= 0.005
    assert report.cold == 2 << 20
    assert "2 threads, cold caches" in heading(report)
    assert "cold caches: at least 2 MiB pass between two uses of an operand" in notes(report)
    assert json.loads(report.to_json())["cold"] == 2 << 20
    assert from_json(report.to_json()) == report
    assert {row["cold"] for row in report.records()} == {True}
