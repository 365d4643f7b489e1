"""Tuning on workers of Dask, joblib and Ray: every case is searched on every chip, and workers may die meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from places import HELPERS

from portmm.comparison import Case
from portmm.dispatch import tuning_database
from portmm.errors import PortmmError
from portmm.tuning import Trial, TunedCase, Tuning, executors, farm
from portmm.tuning.executors import DaskExecutor, JoblibExecutor, LostWorkerError, Machine, RayExecutor, connect
from portmm.tuning.farm import tune_on

SUITE = [Case(f"cube-{n}", "cube", n, n, n) for n in (64, 96, 128)]
OPTIONS = {"threads": 1, "budget_s": 60.0, "search": "candidates", "most": 2, "opener": "tune_fakes:fake"}


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(HELPERS))
    monkeypatch.setenv("FAKE_TUNE", json.dumps({"1": "fast", "delay": 0.1}))
    monkeypatch.setattr(farm, "SURVEY", 0.1)


def check(results, path, suite=SUITE):
    assert len(results) == 1
    for one in results:
        assert [x.case for x in one.cases] == suite, one.notes
        assert all(x.finished and len(x.trials) == 2 and x.ratio > 1.5 for x in one.cases)
    kept = tuning_database.rows(path)
    assert {(x.problem, x.chip) for x in kept} == {(x.problem, r.machine) for x in suite for r in results}


def killing(pid, log):
    """Kill a process once a worker has begun to check candidates."""

    def run():
        while not log.exists():
            time.sleep(0.01)
        os.kill(pid() if callable(pid) else pid, signal.SIGKILL)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


# -- without other libraries -----------------------------------------------------------


@pytest.fixture
def instant(monkeypatch):
    """Searches that take no time."""

    def tuned(case, options):
        one = TunedCase(case, "{}", "a", 1, "b", 1, 2.0, 1.0, 2.0, (Trial("a", 1, "ok", 2.0, 2.0),), finished=True)
        assert options["budget_s"] > 0
        return Tuning("here", "chip", options["threads"], cold=False, cases=(one,), spent=0.0, date=""), []

    monkeypatch.setattr(farm, "tuned_there", tuned)


class Scripted:
    """An executor that runs functions here; workers die, or fail, as a script says for each run of one."""

    def __init__(self, machines, *script):
        self.alive, self.script, self.runs = dict(machines), list(script), []

    def workers(self):
        return dict(self.alive)

    def submit(self, worker, function, *args):
        self.runs.append(worker)
        return worker, self.script.pop(0) if self.script else "", function, args

    def done(self, future):
        return future[1] != "vanishes"

    def result(self, future):
        worker, event, function, args = future
        if event == "dies":
            raise LostWorkerError(worker)
        if event == "fails":
            raise OSError("no space left")
        return function(*args)

    def cancel(self, future):
        self.runs.append(f"cancelled {future[0]}")

    def close(self):
        self.alive.clear()


def machine(name="here"):
    return executors.identify()._replace(name=name, key=name)


@pytest.mark.usefixtures("instant")
def test_each_kind_of_machine_has_every_case(tmp_path):
    path = tmp_path / "tuned.sqlite"
    workers = Scripted({"a": machine("one"), "b": machine("one"), "c": machine("two")})
    results = tune_on(workers, SUITE, database=path, **OPTIONS)
    assert [x.machine for x in results] == ["one", "two"]
    assert [len(x.cases) for x in results] == [3, 3]
    assert workers.runs.count("c") == 3
    again = Scripted({"a": machine("one"), "d": machine("three")})
    results = tune_on(again, SUITE, database=path, **OPTIONS)
    assert again.runs == ["d"] * 3, "what one was searched for is not repeated"
    assert [len(x.cases) for x in results] == [3, 3]
    assert results[0].cases[0].trials


@pytest.mark.usefixtures("instant")
def test_a_worker_that_dies_or_fails_costs_no_other(tmp_path):
    workers = Scripted({"a": machine()}, "dies", "", "dies", "dies", "fails", "")
    (result,) = tune_on(workers, SUITE, database=tmp_path / "tuned.sqlite", **OPTIONS)
    assert len(result.cases) == 2
    assert workers.runs == ["a"] * 6
    assert any("no space left" in x for x in result.notes)
    (result,) = tune_on(Scripted({"a": machine()}, *["dies"] * 3), SUITE[:1], database=None, **OPTIONS)
    assert any("given up" in x for x in result.notes)


@pytest.mark.usefixtures("instant")
def test_a_worker_that_vanishes_gives_its_case_to_others(tmp_path):
    workers = Scripted({"a": machine(), "b": machine()}, "vanishes")
    threading.Timer(0.3, lambda: workers.alive.pop("a")).start()
    (result,) = tune_on(workers, SUITE, database=tmp_path / "tuned.sqlite", **OPTIONS)
    assert len(result.cases) == 3
    assert "cancelled a" in workers.runs


@pytest.mark.usefixtures("instant")
def test_without_workers_there_is_an_error(monkeypatch):
    with pytest.raises(PortmmError, match="no workers"):
        tune_on(Scripted({}), SUITE, **OPTIONS)
    monkeypatch.setattr(farm, "PATIENCE", 0.3)
    workers = Scripted({"a": machine()}, "vanishes")
    threading.Timer(0.2, workers.alive.clear).start()
    (result,) = tune_on(workers, SUITE, database=None, **OPTIONS)
    assert any("no worker" in x for x in result.notes)
    with pytest.raises(ValueError, match="budget_s"):
        tune_on(Scripted({"a": machine()}), SUITE, **OPTIONS | {"budget_s": 0})


@pytest.mark.parametrize("text", ["", "dask", "joblib:0", "joblib:x", "slurm://here", "ray:3"])
def test_a_text_that_names_no_executor(text):
    with pytest.raises(PortmmError, match="executor is"), connect(text):
        pass


def test_the_command_names_what_is_wrong_with_an_executor():
    command = [sys.executable, "-m", "portmm", "tune", "tiny-4", "--executor", "slurm://here"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert "executor is 'slurm://here'" in done.stderr


def test_a_machine_says_on_what_results_depend():
    here = executors.identify()
    assert isinstance(here, Machine)
    assert here.key.startswith(here.name)
    assert here.threads >= 1


def test_a_worker_searches_as_this_process_would(tmp_path):
    path = tmp_path / "tuned.sqlite"
    check(tune_on(Scripted({"a": executors.identify()}), SUITE[:1], database=path, **OPTIONS), path, SUITE[:1])


# -- joblib ----------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [2, 4])
def test_joblib_survives_the_death_of_a_process(processes, tmp_path, monkeypatch):
    pytest.importorskip("joblib", reason="joblib is not installed: `tune --executor joblib:N` is not tested")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    path, workers = tmp_path / "tuned.sqlite", JoblibExecutor(processes)
    killer = killing(lambda: next(iter(workers._pool._processes)), tmp_path / "log")
    try:
        results = tune_on(workers, SUITE, database=path, **OPTIONS)
    finally:
        killer.join()
        workers.close()
    check(results, path)


# -- Dask ------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [2, 4])
def test_dask_survives_the_death_of_a_worker(processes, tmp_path, monkeypatch):
    distributed = pytest.importorskip(
        "distributed", reason="Dask is not installed: `tune` on its workers is not tested"
    )
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    path = tmp_path / "tuned.sqlite"
    options = {"n_workers": processes, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        pid = next(iter(client.run(os.getpid).values()))
        killer = killing(pid, tmp_path / "log")
        results = tune_on(DaskExecutor(client), SUITE, database=path, **OPTIONS)
        killer.join()
    check(results, path)


def test_no_worker_of_dask_is_missed_while_the_client_renews_what_it_knows():
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: its workers are not listed")
    dask = pytest.importorskip("dask", reason="Dask is not installed: its workers are not listed")
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with (
        dask.config.set({"distributed.client.scheduler-info-interval": "1ms"}),
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
    ):
        workers = DaskExecutor(client)
        assert all(len(workers.workers()) == 2 for _ in range(200))


# -- Ray -------------------------------------------------------------------------------


def searching():
    """The process of Ray's that searches."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if place.read_bytes().startswith(b"ray::tuned_there"):
                return int(place.parent.name)
    raise AssertionError("no process of Ray's searches")


@pytest.mark.rest("starts a cluster of Ray's")
def test_ray_survives_the_death_of_a_worker(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed: `tune` on its nodes is not tested")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *filter(None, sys.path)]))
    path = tmp_path / "tuned.sqlite"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        killer = killing(searching, tmp_path / "log")
        results = tune_on(RayExecutor(ray), SUITE, database=path, **OPTIONS)
        killer.join()
    finally:
        ray.shutdown()
    check(results, path)


@pytest.mark.rest("starts a cluster of Ray's")
@pytest.mark.parametrize("nodes", [2, 4])
def test_ray_survives_the_death_of_a_node(nodes, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed: `tune` on its nodes is not tested")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *filter(None, sys.path)]))
    path = tmp_path / "tuned.sqlite"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        others = [cluster.add_node(num_cpus=1) for _ in range(nodes - 1)]
        ray.init(address=cluster.address, log_to_driver=False)
        workers = RayExecutor(ray)
        assert len(workers.workers()) == nodes
        killer = threading.Timer(0.5, lambda: cluster.remove_node(others[0], allow_graceful=False))
        killer.start()
        results = tune_on(workers, SUITE, database=path, **OPTIONS)
        killer.join()
        assert others[0].node_id not in workers.workers(), "at once, before Ray finds out"
    finally:
        ray.shutdown()
        cluster.shutdown()
    check(results, path)
