"""Load by other processes: how it is measured, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from portmm.host import machine_load

STAT = """cpu  900 0 900 9000 900 0 0 0 0 0
cpu0 {user} 10 20 1000 70 3 4 {steal} 500 0
cpu1 50000 0 0 0 0 0 0 0 0 0
intr 1 2 3
"""


def at(seconds, used, own, average=None):
    return machine_load.Snapshot(seconds, used, own, average)


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setattr(machine_load.os, "sched_getaffinity", lambda _pid: {0}, raising=False)
    monkeypatch.setattr(machine_load, "_ticks", lambda: 100)


def files(monkeypatch, **texts):
    named = {f"/proc/{name.replace('_', '/')}": text for name, text in texts.items()}
    monkeypatch.setattr(machine_load, "_lines", lambda path: named.get(path, "").splitlines())


@pytest.mark.usefixtures("one_core")
def test_time_that_a_core_was_busy_or_stolen_counts(monkeypatch):
    files(monkeypatch, stat=STAT.format(user=100, steal=5))
    before = machine_load._used()
    files(monkeypatch, stat=STAT.format(user=250, steal=55))
    assert before == pytest.approx(1.42)  # neither idle, nor waiting for a disk, nor a guest's, nor another core's
    assert machine_load._used() == pytest.approx(before + 2.0)


@pytest.mark.usefixtures("one_core")
def test_workers_and_what_they_waited_for_are_our_own(monkeypatch):
    files(monkeypatch, stat="", **{"7_stat": "7 (a ) b) S 1 1 1 0 -1 0 0 0 0 0 150 50 20 30 20 0 1 0 5"})
    before = machine_load.snapshot()
    assert machine_load.snapshot((7, 8)).own == pytest.approx(before.own + 2.5, abs=0.2)  # 8 is gone


def test_the_load_is_what_others_used():
    assert machine_load.others(at(10, 50.0, 5.0), at(14, 57.0, 8.0)) == pytest.approx(1.0)
    assert machine_load.others(at(10, 50.0, 5.0), at(14, 52.9, 8.0)) == 0.0  # ticks are rounded
    assert machine_load.others(at(10, None, 5.0, 3.5), at(14, None, 8.0, 4.0)) == 3.5
    assert machine_load.others(at(10, None, 5.0), at(14, None, 8.0)) is None


@pytest.mark.parametrize(
    ("load", "cores", "expect"),
    [(None, 2, False), (0.1, 2, False), (0.6, 2, True), (1.5, 64, False), (7.0, 64, True)],
)
def test_a_load_is_judged_by_the_cores(load, cores, expect):
    assert machine_load.is_busy(load, cores) == expect
    assert ("measure again" in machine_load.sentence(load, cores)) == expect
    assert load is None or f"{load:.2g} of {cores} cores" in machine_load.sentence(load, cores)


@pytest.mark.skipif(machine_load.snapshot().used is None, reason="no /proc/stat")
def test_a_process_beside_this_one_is_seen_and_our_own_work_is_not():
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            before, with_it = machine_load.snapshot(), machine_load.snapshot((other.pid,))
            while (after := machine_load.snapshot((other.pid,))).own - with_it.own < 0.5:
                sum(range(10000))
            # Before the other ends: CPU time of children that ended is this process's own.
            own = machine_load.snapshot().own - before.own
        finally:
            other.kill()
    # Of the half second that both used, this one's part is nobody else's, and that of the other is if it is not named.
    alone = machine_load.others(before, replace(after, own=before.own + own)) * (after.seconds - before.seconds)
    named = machine_load.others(with_it, after) * (after.seconds - with_it.seconds)
    assert alone - named == pytest.approx(0.5 - own, abs=0.15)
    assert alone > 0.05
