"""Tuning on the workers of an executor, which may have different chips.

Owns `tune_on`. A case is searched on every kind of machine among the workers, by one worker of that kind from its first
trial to its last, since no time of another process is comparable. The results go to one database: records of tuned
schedules and trials carry the machine. A case whose worker died is given to another of its kind.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from portmm.build.cache import tuned_database
from portmm.comparison.case import Case
from portmm.comparison.shapes import cases, merged, shaped
from portmm.dispatch.overrides import renew
from portmm.dispatch.tuned_schedule import of_row
from portmm.dispatch.tuning_database import record, rows
from portmm.errors import PortmmError
from portmm.tuning.executors import Executor, LostWorkerError
from portmm.tuning.journal import Journal, Machine
from portmm.tuning.records import TunedCase, Tuning
from portmm.tuning.tuner import Progress, tune

ATTEMPTS = 3
"""Workers that a case is given to, as long as they die."""
POLL = 0.05
"""Seconds between looks at futures."""
SURVEY = 1.0
"""Seconds between looks at the list of workers."""
PATIENCE = 30.0
"""Seconds to wait for a worker where none of its kind is left: a cluster may start another one."""
LEAST = 1.0
"""Least seconds for a case."""


@dataclass(slots=True)
class _Job:
    """A case to be searched on a kind of machine."""

    case: Case
    machine: Machine
    lost: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Farm:
    """State of one call of `tune_on`."""

    executor: Executor
    options: dict[str, Any]
    budget: float
    path: Path | None
    selected: Sequence[Case]
    start: float
    tell: Progress
    waiting: dict[Machine, deque[_Job]] = field(default_factory=dict)
    running: dict[str, tuple[_Job, Any]] = field(default_factory=dict)
    tuned: dict[Machine, dict[str, TunedCase]] = field(default_factory=dict)
    results: dict[Machine, list[Tuning]] = field(default_factory=dict)
    notes: dict[Machine, list[str]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self.start + self.budget - time.monotonic()

    @property
    def open(self) -> bool:
        """Whether a case waits or is searched."""
        return bool(self.running) or any(self.waiting.values())

    def survey(self) -> dict[str, Machine]:
        """The workers that are alive; machines that are new begin with all cases that are not finished on them."""
        alive = self.executor.workers()
        for machine in alive.values():
            if machine not in self.waiting:
                journal = self.journal(machine)
                usual = self.budget / max(1, len(self.selected))
                self.waiting[machine], self.notes[machine] = deque(), []
                self.tuned[machine] = known = {}
                for case in self.selected:
                    stored = journal.finished(case, usual)
                    if stored is None:
                        self.waiting[machine].append(_Job(case, machine))
                    else:
                        known[case.name] = stored
        for worker in [x for x in self.running if x not in alive]:
            job, future = self.running.pop(worker)
            self.executor.cancel(future)
            self.lose(job, worker)
        return alive

    def lose(self, job: _Job, worker: str) -> None:
        """Put a case whose worker died back into the queue, unless it has killed too many."""
        job.lost.append(worker)
        if len(job.lost) < ATTEMPTS:
            self.waiting[job.machine].append(job)
        else:
            self.notes[job.machine].append(f"{job.case.name} was given up: {len(job.lost)} workers died with it")

    def assign(self, alive: dict[str, Machine]) -> None:
        """Give each idle worker a case."""
        for worker, machine in alive.items():
            queue = self.waiting[machine]
            if worker in self.running or not queue or self.left < LEAST:
                continue
            job = queue.popleft()
            same = sum(x == machine for x in alive.values())
            share = min(self.left, self.budget * same / len(self.selected))
            try:
                future = self.executor.submit(worker, tuned_there, job.case, {**self.options, "budget_s": share})
            except Exception as error:  # noqa: BLE001 - of three libraries: the worker cannot be reached
                self.notes[machine].append(f"worker {worker} takes no work: {error}")
                self.lose(job, worker)
                continue
            self.running[worker] = job, future

    def collect(self) -> None:
        """Store the results that have arrived."""
        for worker, (job, future) in list(self.running.items()):
            if not self.executor.done(future):
                continue
            del self.running[worker]
            try:
                result, schedules = self.executor.result(future)
            except LostWorkerError:
                self.lose(job, worker)
            except Exception as error:  # noqa: BLE001 - one machine's failure must not end the others
                self.notes[job.machine].append(f"{job.case.name}: {type(error).__name__}: {error}")
            else:
                self.keep(job, result, schedules)

    def keep(self, job: _Job, result: Tuning, schedules: list[dict[str, Any]]) -> None:
        """Store a result and its trials under the machine that they are of."""
        self.results.setdefault(job.machine, []).append(result)
        self.tuned[job.machine] |= {x.case.name: x for x in result.cases}
        self.tell(max(0.0, self.left), f"{job.case.name} on {job.machine.name}")
        if self.path is None:
            return
        record(self.path, [of_row(row) for row in schedules])
        journal = self.journal(job.machine, result.threads)
        for one in result.cases:
            for trial in one.trials:
                journal.keep(one.problem, trial)
            journal.finish(one, self.budget / len(self.selected))

    def journal(self, machine: Machine, threads: int | None = None) -> Journal:
        """The journal of a machine."""
        limit, x = threads or self.options["threads"] or machine.threads, self.options
        return Journal(self.path, limit, x["cold"], machine, x["search"], x["most"])


def tuned_there(case: Case, options: dict[str, Any]) -> tuple[Tuning, list[dict[str, Any]]]:
    """A case searched by this process, which is a worker: the result, and the rows of its tuned schedules."""
    with TemporaryDirectory(prefix="portmm-tune-") as folder:
        path = Path(folder, "tuned.sqlite")
        result = tune([case], database=path, **options)
        return replace(result, database=""), [x.row() for x in rows(path)] if path.exists() else []


def tune_on(
    executor: Executor,
    suite: str | Iterable[Case | Sequence[int]] = "quick",
    *,
    threads: int | None = None,
    budget_s: float = 120.0,
    cold: bool = False,
    database: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Tuning, ...]:
    """Tune on the workers of an executor, as `tune` does here, and merge what they find into one database.

    Ctrl-C ends it, and the results so far are returned.

    Args:
        executor: see `executors.connect`.
        suite: as for `tune`.
        threads: the most threads of a call; None for the number that calls use on each worker.
        budget_s: seconds for the whole search; a case has its share, times the workers of a kind of machine.
        cold: as for `tune`.
        database: likewise, of this machine.
        progress: called with the seconds that are left and a text about the last result.
        options: others of `tune`.

    Returns:
        The result of each kind of machine.

    Raises:
        ValueError: a suite is unknown, or an argument makes no sense.
        DatabaseError: the file cannot be used.
        PortmmError: there are no workers.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; give seconds above 0")
    selected = merged(cases(suite) if isinstance(suite, str) else map(shaped, suite))
    path = tuned_database() if database is None else Path(database)
    common = {"search": "auto", "most": None, **options, "threads": threads, "cold": cold}
    farm = _Farm(executor, common, budget_s, path, selected, time.monotonic(), progress or (lambda _left, _text: None))
    interrupted = False
    try:
        _run(farm)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for _, future in farm.running.values():
            executor.cancel(future)
    if path is not None and path == tuned_database():
        renew()
    return tuple(_joined(farm, machine, interrupted=interrupted) for machine in farm.waiting)


def _run(farm: _Farm) -> None:
    """Search until every case is done, the budget is spent, or no worker is left."""
    alive = farm.survey()
    if not alive:
        raise PortmmError("the executor has no workers; start some, and try again")
    surveyed = seen = time.monotonic()
    while farm.open:
        farm.assign(alive)
        time.sleep(POLL)
        farm.collect()
        now = time.monotonic()
        if now - surveyed >= SURVEY:
            alive, surveyed = farm.survey(), now
        if farm.running:
            seen = now
        elif farm.left < LEAST or now - seen > PATIENCE:
            return


def _joined(farm: _Farm, machine: Machine, *, interrupted: bool) -> Tuning:
    """The results of a kind of machine as one."""
    results = farm.results.get(machine, [])
    tuned = farm.tuned[machine]
    late = [x.case.name for x in farm.waiting[machine]]
    notes = dict.fromkeys((*farm.notes[machine], *(note for x in results for note in x.notes)))
    if late:
        notes[f"no time, or no worker, was left for: {', '.join(late)}"] = None
    return Tuning(
        machine=machine.name,
        chip=machine.chip,
        threads=results[0].threads if results else farm.options["threads"] or machine.threads,
        cold=farm.options["cold"],
        cases=tuple(tuned[x.name] for x in farm.selected if x.name in tuned),
        spent=time.monotonic() - farm.start,
        date=datetime.now(UTC).date().isoformat(),
        database=str(farm.path or ""),
        interrupted=interrupted,
        notes=tuple(notes),
    )
