"""Tuning: candidates that misbehave cost only themselves, and what was measured is never lost nor measured twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import HELPERS
from rich.console import Console

import portmm as pm
from portmm.comparison import Case
from portmm.dispatch import config, tuning_database
from portmm.errors import DatabaseError, PortmmError
from portmm.host import machine_load
from portmm.schedule.text import parse
from portmm.tuning import Trial, TunedCase, Tuning, proposals
from portmm.tuning.proposals import MISSING, ranked
from portmm.tuning.records import spearman, view

CUBE = Case("cube", "cube", 256, 256, 256)
WIDE = Case("wide", "cube", 64, 512, 256)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(HELPERS))
    for name in ("FAKE_TUNE", "FAKE_LOG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rules(monkeypatch):
    return lambda **rules: monkeypatch.setenv("FAKE_TUNE", json.dumps(rules))


def run(*suite, path=None, opener="fake", **options):
    options = {"threads": 1, "budget_s": 60.0, "search": "candidates", "patience_s": 0.5, **options}
    return pm.tune(suite or [CUBE], database=path, opener=f"tune_fakes:{opener}", **options)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuned.sqlite"


def order(case=CUBE, threads=1):
    return ranked(case.problem, config.target(), threads)


# --- candidates that misbehave -------------------------------------------------


def test_a_bad_candidate_costs_only_itself(rules, path):
    rules(**{"1": "crash", "2": "hang", "3": "wrong", "4": "unbuildable", "5": "late crash", "6": "fast"})
    (found,) = run(path=path).cases
    states = {(x.schedule, x.workers): x.state for x in found.trials}
    told = [states[x.key] for x in order()[:7]]
    assert told == ["ok", "crashed", "timeout", "wrong", "unbuildable", "crashed", "ok"]
    assert found.finished
    assert len(found.trials) == len(order())
    assert (found.tuned, found.tuned_workers) == order()[6].key
    assert found.ratio == pytest.approx(2.1)
    reasons = [x.reason for x in found.failed]
    assert "SIGSEGV" in reasons[0]
    assert "no answer" in reasons[1]
    assert "exceeds" in reasons[2]
    assert "the compiler says no" in reasons[3]
    (kept,) = tuning_database.rows(path)
    assert (kept.schedule, kept.workers) == (parse(found.tuned), 1)
    assert kept.gain == pytest.approx(2.1)
    assert kept.problem == CUBE.problem


def test_nothing_slower_than_the_analytical_choice_is_chosen(rules, path, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FIRST", str(tmp_path / "first"))
    rules(**{"2": "slow", "3": "lucky"})
    (found,) = run(path=path).cases
    assert found.tuned == found.analytical == order()[0].text
    assert found.ratio == 1
    # What a process was kind to is measured again in another.
    lucky = next(x for x in found.trials if (x.schedule, x.workers) == order()[3].key)
    assert lucky.seconds > found.seconds
    assert [x.gain for x in tuning_database.rows(path)] == [1]


def test_a_broken_analytical_choice_is_replaced(rules, path):
    rules(**{"0": "crash"})
    (found,) = run(path=path).cases
    assert found.trials[0].state == "crashed"
    assert found.analytical == order()[1].text


def test_what_cannot_be_tuned_says_why(path):
    (found,) = run(Case("odd", "impossible", 8, 8, 8), path=path).cases
    assert found.reason == "there is nothing to tune"
    assert found.ratio == 0
    assert tuning_database.rows(path) == [] if path.exists() else True


def test_a_worker_that_cannot_start_is_an_error(path):
    with pytest.raises(PortmmError, match="no portmm here"):
        run(path=path, opener="absent")


# --- the search ----------------------------------------------------------------


@pytest.mark.rest("takes long for what it finds")
def test_the_search_goes_beyond_the_candidates(rules, path):
    pytest.importorskip("optuna")
    rules(beyond="fast")
    (found,) = run(path=path, search="auto").cases
    listed = {x.text for x in order()}
    assert found.tuned not in listed
    assert found.ratio == pytest.approx(2.1)


def test_the_search_is_the_same_for_the_same_seed():
    pytest.importorskip("optuna")
    listed = order()

    def asked(seed):
        made = proposals.proposals(CUBE.problem, config.target(), listed, seed)
        return [x.key for x in made.ask(4, {})]

    assert asked(1) == asked(1)
    assert len(set(asked(1))) == 4


def test_without_optuna_every_candidate_is_measured_and_it_is_said(monkeypatch, path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    found = run(path=path, search="auto")
    assert found.notes[0] == MISSING
    assert len(found.cases[0].trials) == len(order())


@pytest.mark.parametrize("others", [0.0, 0.9])
def test_a_busy_machine_is_told(monkeypatch, path, others):
    monkeypatch.setattr(machine_load, "others", lambda *_: others * machine_load.cores())
    note = "".join(run(path=path).notes)
    assert ("the machine was busy" in note) == bool(others)


@pytest.mark.rest("takes long for what it finds")
def test_threads_are_searched_too(rules, path):
    last = len(order(threads=2)) - 1
    rules(**{str(last): "fast"})
    (found,) = run(path=path, threads=2).cases
    assert (found.tuned, found.tuned_workers) == order(threads=2)[last].key
    assert tuning_database.rows(path)[0].threads == 2


@pytest.mark.rest("takes long for what it finds")
def test_cold_caches_are_their_own_finding(path):
    warm, cold = run(path=path), run(path=path, cold=True)
    assert cold.cases[0].seconds == pytest.approx(2 * warm.cases[0].seconds)
    assert [x.cold for x in tuning_database.rows(path)] == [False, True]


@pytest.mark.rest("takes long for what it finds")
def test_the_budget_is_kept_and_shared(rules, path):
    rules(delay=0.3)
    start = time.monotonic()
    found = run(CUBE, WIDE, path=path, budget_s=8)
    assert time.monotonic() - start < 8 + 10  # starting a process takes seconds on a machine that is busy
    assert not all(x.finished for x in found.cases)


def test_what_no_time_was_left_for_is_named(path):
    found = run(CUBE, WIDE, path=path, budget_s=1e-6)
    assert found.cases == ()
    assert "cube, wide" in found.notes[0]


# --- resuming ------------------------------------------------------------------


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return lambda: (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []


def test_a_finished_case_is_not_measured_again(path, log):
    first = run(path=path)
    before = log()
    again = run(path=path)
    assert log() == before
    assert again.cases == first.cases


PROGRAM = """
import portmm as pm, sys
from portmm.comparison import Case
from portmm.cli.measuring import tune
import portmm.tuning as t
whole = t.tune
def faked(suite, **options):
    options |= {"opener": "tune_fakes:fake", "search": "candidates"}
    return whole([Case("cube", "cube", 256, 256, 256)], **options)
t.tune = faked
import typer
app = typer.Typer()
app.command()(tune)
app(sys.argv[1:])
"""


def command(path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *filter(None, sys.path)])}
    words = [
        sys.executable,
        "-P",
        "-c",
        PROGRAM,
        "cube-256",
        "--threads",
        "1",
        "--database",
        str(path),
        "--budget",
        "60",
    ]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(log, lines):
    deadline = time.monotonic() + 60
    while len(log()) < lines:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(x) for x in found]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.rest("takes long for what it finds")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_a_run_that_was_cut_short_goes_on(rules, path, log, how):
    rules(delay=0.2, **{"2": "fast"})
    process = command(path)
    wait_for(log, 6)
    workers = children(process.pid)
    process.send_signal(how)
    out, err = process.communicate(timeout=30)
    assert process.returncode == (130 if how == signal.SIGINT else -9), err
    if how == signal.SIGINT:
        assert "Interrupted" in out
        assert "256x256x256" in out
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    done = len(log())
    rules(**{"2": "fast"})
    (found,) = run(path=path).cases
    twice = [x for x in order()[: done - 2] if (later := log()[done:]) and f"{x.text} {x.workers}" in later]
    # The analytical choice is checked once more, and so is who may be chosen.
    assert {x.key for x in twice} <= {order()[0].key, order()[2].key}
    assert found.tuned == order()[2].text
    assert len(found.trials) == len(order())


@pytest.mark.rest("takes long for what it finds")
def test_two_tuners_share_a_database(rules, path, log):
    rules(delay=0.02)
    both = [command(path), command(path)]
    for process in both:
        _, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
    (kept,) = tuning_database.rows(path)
    assert kept.problem == CUBE.problem
    assert len(log()) >= len(order())


def test_a_corrupt_database_says_what_to_do(path):
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(DatabaseError, match="move it away"):
        run(path=path)


# --- arguments and reports -------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda"}, "processor"),
        ({"search": "x"}, "candidates"),
        ({"budget_s": 0}, "budget_s"),
        ({"most": 0}, "most"),
        ({}, "shape"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        run((1, 2), **options)


def sample():
    trials = (
        Trial("first", 1, "ok", 1e-6, 2e-6),
        Trial("second", 1, "ok", 2e-6, 1e-6),
        Trial("third", 1, "ok", 3e-6, 3e-6),
        Trial("fourth", 1, "crashed", 4e-6, reason="killed by <SIGSEGV>"),
    )
    one = TunedCase(CUBE, "p", "first", 1, "second", 1, 2e-6, 1e-6, 1e-6, trials, finished=True)
    two = TunedCase(WIDE, reason="nothing to tune")
    return Tuning("chip", "A chip [x]", 1, False, (one, two), 3.0, "2026-01-02", notes=("a note",))


def test_reports_say_everything():
    found = sample()
    assert found.geomean == pytest.approx(0.5)
    assert found.rank_correlation == pytest.approx(0.5)
    assert found.choices_correlation is None
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(view(found))
    page = found._repr_html_()
    for piece in ("256x256x256", "2.00", "second", "50.0%", "nothing to tune", "a note", "crashed"):
        assert piece in page
        assert piece in console.export_text(clear=False)
    assert "<SIGSEGV>" not in page
    data = json.loads(found.to_json())
    assert data["geomean"] == pytest.approx(0.5)
    assert data["cases"][0]["trials"][3]["state"] == "crashed"
    rows = found.records()
    assert [x["analytical"] for x in rows] == [True, False, False, False]
    assert [x["tuned"] for x in rows] == [False, True, False, False]


def test_rank_correlation():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 4], [1, 2, 2, 9]) == pytest.approx(1)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2], [1, 2]) is None


# --- the real thing --------------------------------------------------------------


@pytest.mark.rest("takes long for what it finds")
def test_real_kernels_of_every_kind_of_call(path):
    kinds = (
        Case("plain", "x", 24, 40, 32),
        Case("packed", "x", 4, 96, 64, packed=True),
        Case("batch", "x", 8, 8, 8, batch=100),
        Case("scaled", "x", 4, 64, 64, packed=True, dtype="u8-s8-f32"),
        Case("codes", "x", 2, 64, 128, packed=True, dtype="f32-u4-f32", block=64),
    )
    found = pm.tune(kinds, threads=1, budget_s=100, turn_s=0.001, most=2, database=path)
    assert [x.case.name for x in found.cases if x.seconds and not x.reason] == [x.name for x in kinds]
    assert not [y for x in found.cases for y in x.failed]
    assert len(tuning_database.rows(path)) == len(kinds)


@pytest.mark.rest("takes long for what it finds")
def test_real_calls_that_find_cold_caches(path):
    kinds = (Case("plain", "x", 24, 40, 32), Case("codes", "x", 2, 64, 128, packed=True, dtype="f32-u4-f32", block=64))
    found = pm.tune(kinds, threads=1, budget_s=100, cold=True, turn_s=0.01, most=2, database=path)
    assert [x.state for case in found.cases for x in case.trials[:1]] == ["ok", "ok"]
