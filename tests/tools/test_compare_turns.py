"""Turns of a comparison: within a budget, with a gauge among the contenders, by the user's own tuned schedules."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from places import HELPERS
from typer.testing import CliRunner

from portmm.build import cache as kept
from portmm.cli import main
from portmm.comparison import Case, Contender, compare, contest, process
from portmm.comparison.limit import MEMORY, Limits, Machine, level_of
from portmm.comparison.peers import Setup, environment, removed
from portmm.comparison.process import LOG, SEE, WorkerError, last_words
from portmm.comparison.text import notes
from portmm.dispatch import config, schedule_choice, tuned_schedule, tuning_database
from portmm.dispatch.tuned_schedule import Tuned
from portmm.host import machine_load
from portmm.host.detect import host
from portmm.target.cache_levels import MemoryLevel

SMALL = Case("small", "cube", 8, 12, 16)


def fake(name, *, peer=True):
    return Contender(name, f"compare_fakes:{name}", f"pip install {name}", peer=peer)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(HELPERS))


# --- the budget --------------------------------------------------------------

COSTS = {"open": 2.0, "prepare": 0.4, "time": 0.05, "drop": 0.1}


class Clock:
    """Time that passes only while fake workers are waited for; a contender's name says what it takes besides."""

    def __init__(self, monkeypatch, **slow):
        self.now, self.slow, self.asked = 1000.0, slow, []
        monkeypatch.setattr(contest, "time", self)
        monkeypatch.setattr(process, "time", self)
        monkeypatch.setattr(process, "Worker", lambda contender, _setup, _module: FakeWorker(self, contender.name))
        monkeypatch.setattr(
            machine_load, "snapshot", lambda _workers=(): machine_load.Snapshot(self.now, None, 0.0, None)
        )

    def monotonic(self):
        return self.now


class FakeWorker:
    pid = 0

    def __init__(self, clock, name):
        self.clock, self.name = clock, name

    def pass_(self, what, timeout):
        self.clock.asked.append((self.name, what))
        cost = self.clock.slow.get(f"{self.name}_{what}", COSTS[what])
        self.clock.now += min(cost, timeout)
        if cost > timeout:
            raise WorkerError("timeout", "no answer")

    def hear(self, timeout):
        self.pass_("open", timeout)
        return {"state": "ok", "version": "1"}

    def ask(self, request, timeout):
        self.pass_(request["do"], timeout)
        if self.name == "limit":
            return {"state": "ok", "peak": "atom", "level": "", "rates": {"atom": 100.0}}
        checked = {"method": "x", "wrong": [], "error": 0.0, "bound": 1.0}
        return {"state": "ok", "seconds": 1e-6, **checked}

    def hang_up(self):
        pass

    def close(self, patience):
        self.clock.now += min(0.3, patience)


def suite(count):
    return [Case(f"case-{i}", "cube", 8, 8, 8) for i in range(count)]


def timed(clock, count, budget, names=("mine", "one", "two"), **options):
    began = clock.now
    field = [Contender(name, "x:y", peer=name != "mine") for name in names]
    report = compare(suite(count), contenders=field, budget_s=budget, **options)
    return report, clock.now - began


@pytest.mark.parametrize("budget", [0.0, 1.0, 5.0, 9.0, 10.0, 12.0, 20.0, 33.3, 60.0])
@pytest.mark.parametrize(
    "slow",
    [
        {},
        {"two_open": 30.0},  # a large library that takes long to import
        {"one_prepare": 7.0},  # one that compiles
        {"two_drop": 3.0},
        {"mine_time": 1.5},
        {"limit_prepare": 5.0},
        {"two_prepare": 1e9},  # one that hangs
    ],
)
def test_the_budget_is_kept_whatever_takes_the_time(monkeypatch, budget, slow):
    report, took = timed(Clock(monkeypatch, **slow), 12, budget)
    assert took <= budget + 1e-6
    assert len(report.results) + len(report.skipped) == 12
    for result in report.results:
        counts = {len(e.samples) for e in result.entries.values() if e.state == "ok"}
        assert len(counts) <= 1
        assert min(counts, default=3) >= contest.FEWEST_ROUNDS


def test_a_budget_that_suffices_leaves_nothing_out(monkeypatch):
    report, took = timed(Clock(monkeypatch), 3, 60.0)
    assert report.skipped == ()
    assert took < 30
    assert {len(e.samples) for r in report.results for e in r.entries.values()} == {contest.ROUNDS}


def test_a_library_that_opens_too_late_says_so(monkeypatch):
    report, _ = timed(Clock(monkeypatch, two_open=30.0), 2, 9.0)
    assert {e.name: e.state for e in report.entrants} == {
        "mine": "ok",
        "one": "ok",
        "two": "timeout",
        "limit": "timeout",
    }
    said = " ".join(notes(report))
    assert "two: timeout when opened: no time was left to open it; give more with --budget" in said
    assert "no time was left for: case-0, case-1; give it with --budget" in said


# --- the gauge ---------------------------------------------------------------


def test_the_gauge_has_its_turn_in_every_round(monkeypatch):
    clock = Clock(monkeypatch)
    report, _ = timed(clock, 1, 60.0, rounds=3)
    turns = [name for name, what in clock.asked if what == "time"]
    assert turns == ["mine", "one", "two", "limit", "one", "two", "mine", "limit", "two", "mine", "one", "limit"]
    (result,) = report.results
    assert (result.limit, result.roof) == (100.0, "atom")
    assert report.rates == {"atom": 100.0}
    assert [e.name for e in report.entrants] == ["mine", "one", "two"]


def test_without_limits_nothing_is_gauged(monkeypatch):
    clock = Clock(monkeypatch)
    report, _ = timed(clock, 1, 60.0, limits=False)
    assert report.results[0].limit is None
    assert "limit" not in {name for name, _ in clock.asked}


LEVELS = (MemoryLevel("L1", 4096), MemoryLevel("L2", 1 << 20))


def test_the_level_is_the_nearest_that_holds_all_operands():
    small, large = Case("x", "x", 16, 16, 16), Case("x", "x", 1, 4096, 4096)
    assert level_of(small, LEVELS) == "L1"
    assert level_of(small, LEVELS, cold=True) == level_of(large, LEVELS) == MEMORY
    known = Limits({"atom": 100.0, "memory": 2.0}, LEVELS, {"f32": "atom"})
    assert (known.roof(small), known.roof(large)) == ("atom", MEMORY)


def test_the_gauge_of_this_machine_measures_what_bounds_a_case():
    machine = Machine(Setup())
    reply = machine.prepare(asdict(SMALL))
    assert (reply["state"], reply["level"]) == ("ok", host().levels[0].name)
    found = machine.time(0.004)["rates"]
    assert set(found) == {reply["peak"], reply["level"]}
    assert all(0.01 < x < 1e5 for x in found.values())
    bare = Machine(Setup())
    bare.target = replace(host(), isas=())
    nothing = bare.prepare(asdict(SMALL))
    assert (nothing["state"], nothing["reason"]) == ("unsupported", "no unit multiplies f32")


def test_a_comparison_measures_its_limits_in_its_own_process():
    report = compare([SMALL], contenders=[fake("right", peer=False)], rounds=2, turn_s=0.002)
    (result,) = report.results
    assert result.limit > 0
    assert result.roof in report.rates
    assert 0 < report.share(result) <= 1
    assert report.cores == machine_load.cores()
    assert (result.load is None) == (report.load is None)


# --- tuned schedules ---------------------------------------------------------


def test_a_comparison_uses_what_was_tuned_into_another_database(monkeypatch, tmp_path):
    """The contender's own process finds the database that PORTMM_TUNED names."""
    path = tmp_path / "tuned.sqlite"
    monkeypatch.setenv("PORTMM_TUNED", str(path))
    here = config.target()
    p = SMALL.problem
    choice = schedule_choice.choose(p, here, 1, tuned=False)
    facts = {"chip": here.name, "architecture": tuned_schedule.architecture(here), "vendor": here.vendor}
    row = Tuned(problem=p, threads=1, schedule=choice.runners_up[0][0], workers=1, seconds=1.0, analytical=3.2,
                date="2026-01-01", **facts)  # fmt: skip
    tuning_database.record(path, [row])
    for name, origin in ((str(path), "tuned on"), ("off", choice.origin)):
        monkeypatch.setenv("PORTMM_TUNED", name)
        report = compare([SMALL], contenders=[fake("tuned", peer=False)], rounds=1, turn_s=0.001, limits=False)
        assert report.entrants[0].version.startswith(origin)
        assert "PORTMM_TUNED" not in report.removed
    assert "PORTMM_TUNED" not in removed({"PORTMM_TUNED": "x"})
    assert environment({"PORTMM_TUNED": "x"}, Setup(), uses_openblas=False)["PORTMM_TUNED"] == "x"


# --- what failed -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unbuildable", "cc did not build a kernel; its output"),
        ("unlinked", "could not build the driver that repeats calls with -lnosuchlibrary"),
        ("unmade", "RuntimeError: CppCompileError: C++ compile error"),
    ],
)
def test_a_failed_build_is_one_line_and_where_the_rest_is(monkeypatch, tmp_path, name, said):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path))
    report = compare([SMALL], contenders=[fake(name)], rounds=1, turn_s=0.001, limits=False)
    (line,) = [x for x in notes(report) if said in x]
    assert SEE in line
    for text in notes(report):
        assert "\n" not in text
        assert "ld:" not in text
        assert str(tmp_path) not in text
    assert "cannot find -l" in kept.read_note(LOG)
    assert (tmp_path / f"{LOG}.note").is_file()


def test_the_last_words_of_a_process_are_its_exception():
    chained = "Traceback (most recent call last):\nKeyError: 1\n\nDuring it\n\nTraceback (most recent call last):\n"
    assert last_words(chained + '  File "x"\na.b.CompileError: no\n\nld: x\ncollect2: error: status 1') == (
        "a.b.CompileError: no"
    )
    assert last_words("hello\nTerminated\n") == "Terminated"
    assert last_words("") == ""


# --- progress ----------------------------------------------------------------


def test_without_a_terminal_there_is_a_line_for_each_case_with_the_time_that_is_left(monkeypatch):
    def contest_(_suite, *, progress, **_options):
        for i, name in enumerate(("cube-64", "tiny-4")):
            progress(i, 2, name)
        progress(2, 2, "done")
        raise ValueError("that is all")

    monkeypatch.setattr("portmm.comparison.compare", contest_)
    done = CliRunner().invoke(main.app, ["compare", "smoke", "--budget", "60"])
    first, second, *_ = done.stderr.splitlines()
    assert first == "comparing 1/2: cube-64, 60 s left"
    assert second.startswith("comparing 2/2: tiny-4, ")
