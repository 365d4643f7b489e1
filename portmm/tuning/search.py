"""Search for the fastest schedule of one case.

Owns `Race`, which measures candidates against the analytical choice, and `search`,
which sets the order of measurements.

No time is compared with one taken earlier: runs of a candidate and of the analytical
choice alternate, and the median of the ratios counts. A candidate that is clearly slower
than the best one is dropped after a few turns. The best are compared with the analytical
choice once more at the end, since the least of many noisy ratios is too optimistic, and in
new processes, since the physical pages of a process may favour one kernel for as long as
it lives; a schedule that does not win in each of them is not selected.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from portmm.dispatch.tuned_schedule import problem_text
from portmm.schedule.text import parse
from portmm.spec.problem import Problem
from portmm.tuning.journal import Journal
from portmm.tuning.lane import Lane, LostError
from portmm.tuning.proposals import Candidate
from portmm.tuning.records import CRASHED, OK, UNBUILDABLE, WRONG, Trial

NEAR = 2.0
"""Multiple of the least predicted time up to which a candidate is measured before further schedules are proposed."""
SHORT = 8
"""Candidates that are measured whatever their predicted time."""
FASTER = 0.99
"""Ratio of times below which a schedule counts as faster."""
SLOWER = 1.05
"""Ratio of times after `FEW` turns above which a candidate is dropped."""
FIRST, FEW, PAIRS, LAST = 3, 2, 6, 10
"""Turns that time the base, detect a clearly slower candidate, time a candidate, and time a finalist."""
FINALISTS, PROCESSES = 3, 2
"""Number of finalists, which are compared with the analytical choice once more, and of processes for each."""
RESERVE = 0.2
"""Share of the time that is reserved for the finalists."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of the measurement of candidates.

    Attributes:
        turn: seconds of one turn.
        parallel: kernels that are compiled in parallel.
        deadline: end of the search, by `time.monotonic`.
    """

    turn: float = 0.01
    parallel: int = 2
    deadline: float = float("inf")

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline


@dataclass(frozen=True, slots=True)
class Standing:
    """A candidate that computes the right result, and its seconds for a call."""

    candidate: Candidate
    seconds: float


@dataclass(slots=True)
class Race:
    """State of the search of one case.

    Attributes:
        lane: runs candidates.
        problem: the problem that is computed.
        rules: limits of the measurement.
        journal: stores trials.
        trials: trials by schedule and workers, in the order in which they were measured.
        base: the first candidate with a right result: the analytical choice, unless that fails.
        winner: `base`, or a finalist that was faster once more at the end.
    """

    lane: Lane
    problem: Problem
    rules: Rules
    journal: Journal
    trials: dict[tuple[str, int], Trial] = field(default_factory=dict)
    base: Standing | None = None
    winner: Standing | None = None

    @property
    def best(self) -> float:
        """The least seconds of a call so far."""
        return min((x.seconds for x in self.trials.values() if x.state == OK), default=0.0)

    def begin(self, order: Sequence[Candidate]) -> None:
        """Find the first candidate with a right result; trials of earlier runs are read from the journal."""
        self.trials = {(x.schedule, x.workers): x for x in self.journal.trials(problem_text(self.problem))}
        for one in order:
            before = self.trials.get(one.key)
            if before and before.state == WRONG:
                continue
            before = before if before and before.state == OK else None  # any other failure may not recur
            state, reason = self._checked(one, *self.lane.build([one.text]))
            seconds = before.seconds if before else 0.0
            if state == OK and not before:
                try:
                    seconds = statistics.median(self._seconds(one, one.predicted) for _ in range(FIRST))
                except LostError as lost:
                    state, reason = lost.state, str(lost)
            if state != OK or not before:
                self._keep(one, state, reason, seconds)
            if state == OK:
                self.base = self.winner = Standing(one, seconds)
                return

    def run(self, candidates: Iterable[Candidate]) -> Iterator[Trial]:
        """Measure candidates without a trial until the deadline, and yield their trials."""
        for some in _chunks((x for x in candidates if x.key not in self.trials), self.rules.parallel):
            if self.rules.over:
                return
            reasons = self.lane.build([x.text for x in some])
            for one, reason in zip(some, reasons, strict=True):
                if self.rules.over:
                    return
                yield self.measure(one, reason)

    def measure(self, one: Candidate, refused: str = "") -> Trial:
        """Time a candidate against the base, after a check; `refused` says why its kernel is not built."""
        assert self.base  # noqa: S101 - `begin` sets it
        state, reason = self._checked(one, refused)
        if state != OK:
            return self._keep(one, state, reason)
        enough = SLOWER * self.best / self.base.seconds
        ratios: list[float] = []
        try:
            for turn in range(PAIRS):
                ratios.append(self._pair(one, turn))
                if len(ratios) >= FEW and statistics.median(ratios) > enough:
                    break
        except LostError as lost:
            return self._keep(one, lost.state, str(lost))
        return self._keep(one, OK, "", self.base.seconds * statistics.median(ratios))

    def confirm(self) -> None:
        """Compare the finalists with the base in new processes, check them after many calls, and set the winner."""
        if not self.base:
            return
        faster = (x for x in self.trials.values() if x.state == OK and x.seconds < FASTER * self.base.seconds)
        for trial in sorted(faster, key=lambda x: x.seconds)[:FINALISTS]:
            if self.winner is not self.base and self.rules.over:
                return
            one = _candidate(trial)
            ratio = self._final(one)
            if ratio < math.inf:
                self._keep(one, OK, "", self.base.seconds * ratio)
            if ratio < FASTER and self.base.seconds * ratio < self.winner.seconds:  # type: ignore[union-attr]
                self.winner = Standing(one, self.base.seconds * ratio)

    def _final(self, one: Candidate) -> float:
        """The larger ratio of the times of a candidate and the base in two new processes; infinite if it fails."""
        worst = 0.0
        for _ in range(PROCESSES):
            self.lane.close()
            worst = max(worst, self._again(one))
            if worst >= FASTER:
                break
        return worst

    def _again(self, one: Candidate) -> float:
        """Ratio of the times of a candidate and the base in this process; infinite if it fails."""
        ratios: list[float] = []
        if self.lane.build([one.text])[0]:
            return math.inf
        try:
            for turn in range(LAST):
                ratios.append(self._pair(one, turn))
                if len(ratios) >= PAIRS and self.rules.over:
                    break
        except LostError as lost:
            self._keep(one, lost.state, str(lost))
            return math.inf
        # A race between threads may show only after many calls.
        state, reason = self._checked(one, "")
        if state != OK:
            self._keep(one, state, f"after timing, {reason}" if state == WRONG else reason)
            return math.inf
        return statistics.median(ratios)

    def _pair(self, one: Candidate, turn: int) -> float:
        """Seconds of a candidate over those of the base, timed one after the other; the first alternates by turn."""
        assert self.base  # noqa: S101 - `begin` sets it
        usual = self.base.seconds
        mine = 0.0 if turn % 2 else self._seconds(one, usual)
        try:
            other = self._seconds(self.base.candidate, usual)
        except LostError as lost:
            raise LostError(CRASHED, f"the analytical choice, right before, failed next to this one: {lost}") from None
        return (mine or self._seconds(one, usual)) / other

    def _seconds(self, one: Candidate, usual: float) -> float:
        return self.lane.time(one.text, one.workers, self.rules.turn, usual)

    def _checked(self, one: Candidate, refused: str) -> tuple[str, str]:
        """State and reason of a check of a candidate's result."""
        if refused:
            return UNBUILDABLE, refused
        return self.lane.check(one.text, one.workers, self.base.seconds if self.base else one.predicted)

    def _keep(self, one: Candidate, state: str, reason: str, seconds: float = 0.0) -> Trial:
        trial = Trial(one.text, one.workers, state, one.predicted, seconds if state == OK else 0.0, reason)
        self.trials[one.key] = trial
        self.journal.keep(problem_text(self.problem), trial)
        return trial


def _candidate(trial: Trial) -> Candidate:
    """The candidate of a trial."""
    return Candidate(parse(trial.schedule), trial.workers, trial.predicted)


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of at most `size` items, drawn lazily from an iterable."""
    drawn = iter(items)
    return iter(lambda: list(islice(drawn, size)), [])


def short_list(order: Sequence[Candidate], *, everything: bool) -> Sequence[Candidate]:
    """The candidates that are measured, best predicted first."""
    if everything:
        return order
    least = min(x.predicted for x in order)
    return [x for i, x in enumerate(order) if i < SHORT or x.predicted <= NEAR * least]


def search(
    race: Race, order: Sequence[Candidate], listed: Sequence[Candidate], tell: Callable[[Trial], None], proposals: Any
) -> bool:
    """Measure the short list, then proposed schedules; return whether the time sufficed for all of them.

    Args:
        race: the case.
        order: its candidates, by predicted time, of which the first is the analytical choice.
        listed: candidates that are measured before any schedule is proposed.
        tell: called with each trial.
        proposals: source of further candidates: `ask` returns some, none at the end, and `tell` takes each trial;
            None for no further candidates.
    """
    race.begin(order)
    if not race.base:
        return False
    rules = race.rules
    left = rules.deadline - time.monotonic()
    race.rules = replace(rules, deadline=rules.deadline - RESERVE * max(left, 0.0))
    for trial in race.run(listed):
        tell(trial)
    while proposals is not None and not race.rules.over:
        some = proposals.ask(race.rules.parallel, race.trials)
        if not some:
            break
        for trial in race.run(some):
            proposals.tell(trial)
            tell(trial)
    over = race.rules.over
    race.rules = rules
    race.confirm()
    return not over
