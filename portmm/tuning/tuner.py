"""Tuning of a suite within a time budget.

Owns `tune`, which divides the budget among cases.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from portmm.build.cache import tuned_database
from portmm.comparison.case import Case
from portmm.comparison.limit import chip
from portmm.comparison.measure import enough
from portmm.comparison.peers import Setup
from portmm.comparison.shapes import cases, merged, shaped
from portmm.dispatch import config
from portmm.dispatch.overrides import renew
from portmm.dispatch.tuned_schedule import Tuned, architecture, problem_text
from portmm.dispatch.tuning_database import record
from portmm.errors import ScheduleError
from portmm.host import machine_load
from portmm.schedule.text import parse
from portmm.spec.problem import Problem
from portmm.target.target import Target
from portmm.tuning.journal import Journal, identify
from portmm.tuning.lane import OPENER, Lane
from portmm.tuning.proposals import MISSING, installed, proposals, ranked
from portmm.tuning.records import OK, Trial, TunedCase, Tuning
from portmm.tuning.search import Race, Rules, search, short_list
from portmm.version import VERSION

Progress = Callable[[float, str], None]
"""Function that is called with the seconds that are left and a text about the current step."""

SEARCHES = ("auto", "candidates")
PASSES = 3
"""Most passes over the unfinished cases, each of which divides the rest of the budget among them."""
WORTHWHILE = 1.0
"""Least seconds for each case in a further pass."""
TURN, COLD_TURN = 0.01, 0.1


@dataclass(slots=True)
class _Run:
    """State of one call of `tune`."""

    lane: Lane
    journal: Journal
    target: Target
    rules: Rules
    search: str
    most: int
    tell: Callable[[str], None]
    path: Path | None
    results: dict[str, TunedCase] = field(default_factory=dict)


def tune(
    suite: str | Sequence[Case | Sequence[int]] = "quick",
    *,
    threads: int | None = None,
    budget_s: float = 120.0,
    cold: bool = False,
    database: str | os.PathLike[str] | None = None,
    search: str = "auto",
    most: int | None = None,
    seed: int = 0,
    device: str | None = None,
    turn_s: float | None = None,
    patience_s: float = 10.0,
    opener: str = OPENER,
    progress: Progress | None = None,
) -> Tuning:
    """Measure which schedules are fastest, each in a child process, and store them for later calls.

    Ctrl-C ends it, and the results so far are returned; the same call continues from there.

    Args:
        suite: name of a suite, group or case as `compare` has them, several joined with commas; or cases; or shapes:
            (m, n, k) or (batch, m, n, k) of float32.
        threads: the most threads of a call; None for the number that calls use now.
        budget_s: seconds for the whole search.
        cold: each call finds its operands in memory, and nothing in the caches.
        database: the file that stores schedules; None for the usual one, which
            PORTMM_TUNED names.
        search: "auto": the model's short list, then a search beyond it by Optuna; or "candidates": every candidate
            of the model and no other schedule.
        most: candidates of each case, at most.
        seed: of the inputs and of the search.
        device: only None: devices are not tuned yet.
        turn_s: seconds of one measurement; None for 0.01, or 0.1 with cold caches.
        patience_s: seconds after which a candidate that hangs is ended, in addition to 50 times the base's time.
        opener: "module:function" that opens the bench in the child process.
        progress: called with the seconds that are left and a text about the current step.

    Returns:
        The result of each case, with every trial.

    Raises:
        ValueError: a suite is unknown, or an argument makes no sense.
        DatabaseError: the file cannot be used.
        PortmmError: the child process cannot start.
    """
    if device:
        raise ValueError(f"device is {device!r}: only kernels for the processor are tuned; leave it out")
    if search not in SEARCHES:
        raise ValueError(f"search is {search!r}; use {' or '.join(SEARCHES)}")
    if most is not None and most < 1:
        raise ValueError(f"most is {most}; give at least 1")
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; give seconds above 0")
    selected = merged(cases(suite) if isinstance(suite, str) else map(shaped, suite))
    start = time.monotonic()
    target = config.target()
    threads = config.get_num_threads() if threads is None else threads or max(1, target.cores)
    path = tuned_database() if database is None else Path(database)
    flushed = enough(target.levels, threads) if cold else 0
    setup = Setup(threads, cold=flushed, target=config.current().target or os.environ.get("PORTMM_TARGET", ""))
    rules = Rules(turn_s or (COLD_TURN if cold else TURN), max(1, machine_load.cores()), start + budget_s)
    before = machine_load.snapshot()
    run = _Run(
        Lane(setup, seed, patience_s, opener),
        Journal(path, threads, cold, identify(), search, most),
        target,
        rules,
        search,
        most or sys.maxsize,
        lambda text: (progress or (lambda _left, _text: None))(max(0.0, rules.deadline - time.monotonic()), text),
        path,
    )
    interrupted = False
    try:
        _passes(run, selected, budget_s)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        run.lane.close()
    if path is not None and path == tuned_database():
        renew()
    results = tuple(run.results[x.name] for x in selected if x.name in run.results)
    return Tuning(
        machine=target.name,
        chip=chip(),
        threads=threads,
        cold=cold,
        cases=results,
        spent=time.monotonic() - start,
        date=datetime.now(UTC).date().isoformat(),
        database=str(path or ""),
        interrupted=interrupted,
        notes=(*_notes(run, selected), *_load(before)),
    )


def _load(before: machine_load.Snapshot) -> tuple[str, ...]:
    """Warning about the load of other processes on this machine; empty without such a load."""
    load = machine_load.others(before, machine_load.snapshot())
    return (
        (machine_load.sentence(load, machine_load.cores()),) if machine_load.is_busy(load, machine_load.cores()) else ()
    )


def _passes(run: _Run, selected: Sequence[Case], budget: float) -> None:
    """Search every case for its share of the budget, then the unfinished ones for the rest of it."""
    usual = budget / max(1, len(selected))
    for x in selected:
        stored = run.journal.finished(x, usual)
        if stored is not None:
            run.results[x.name] = stored
    fresh = [x for x in selected if x.name not in run.results]
    for i in range(PASSES):
        open_ = [x for x in fresh if x.name not in run.results or not run.results[x.name].finished]
        left = run.rules.deadline - time.monotonic()
        if not open_ or (i and left < WORTHWHILE * len(open_)):
            return
        for j, case in enumerate(open_):
            if run.rules.over:
                return
            share = (run.rules.deadline - time.monotonic()) / (len(open_) - j)
            _tune(run, case, share, usual)


def _tune(run: _Run, case: Case, share: float, usual: float) -> None:
    """Search one case for about `share` seconds."""
    run.tell(case.name)
    deadline = min(run.rules.deadline, time.monotonic() + share)
    p = run.lane.prepare(case)
    try:
        order = ranked(p, run.target, run.journal.threads) if isinstance(p, Problem) else []
    except ScheduleError as error:
        p = str(error)
    if not isinstance(p, Problem):
        run.results[case.name] = TunedCase(case, finished=True, reason=p)
        return
    beyond = run.search == "auto" and installed()
    race = Race(run.lane, p, replace(run.rules, deadline=deadline), run.journal)
    listed = short_list(order, everything=not beyond)[: run.most]
    more = proposals(p, run.target, order, run.lane.seed) if beyond and run.most > len(listed) else None

    def tell(trial: Trial) -> None:
        last = "" if trial.state == OK else f", the last {trial.state}"
        run.tell(f"{case.name}: {len(race.trials)} tried, at best {race.best * 1e6:.1f} us{last}")

    try:
        finished = search(race, order, listed, tell, more)
    except KeyboardInterrupt:
        run.results.setdefault(case.name, _result(case, race, finished=False))
        raise
    result = run.results[case.name] = _result(case, race, finished=finished)
    run.journal.finish(result, usual)
    _record(run, p, result)


def _result(case: Case, race: Race, *, finished: bool) -> TunedCase:
    """Result of a race."""
    trials = tuple(race.trials.values())
    base, winner = race.base, race.winner
    if base is None or winner is None:
        why = trials[-1].reason if trials else "interrupted"
        return TunedCase(
            case, problem_text(race.problem), trials=trials, finished=finished, reason=f"nothing worked: {why}"
        )
    return TunedCase(
        case,
        problem_text(race.problem),
        *base.candidate.key,
        *winner.candidate.key,
        base.seconds,
        winner.seconds,
        base.candidate.predicted,
        trials,
        finished,
    )


def _record(run: _Run, p: Problem, result: TunedCase) -> None:
    """Store a schedule for later calls: the analytical choice, too, in place of the result of an older search."""
    if run.path is None or not result.seconds:
        return
    one = Tuned(
        p,
        run.journal.threads,
        parse(result.tuned),
        result.tuned_workers,
        result.seconds,
        result.analytical_seconds,
        run.target.name,
        architecture(run.target),
        run.target.vendor,
        run.journal.cold,
        datetime.now(UTC).date().isoformat(),
        VERSION,
        chip(),
    )
    record(run.path, [one])


def _notes(run: _Run, selected: Sequence[Case]) -> tuple[str, ...]:
    """Remarks for the reader: a missing optimiser, cases without time, results that are not stored."""
    notes = []
    if run.search == "auto" and not installed():
        notes.append(MISSING)
    late = [x.name for x in selected if x.name not in run.results]
    if late:
        notes.append(f"no time was left for: {', '.join(late)}; the same command goes on with them")
    if run.path is None:
        notes.append("nothing is remembered: PORTMM_TUNED is off")
    return tuple(notes)
