"""The search for one case.

Owns `Race`, which measures candidates beside the analytical choice, and `search`,
which decides who is next. Imports `dispatch.tuning_database`, and `tuning`'s lane, model, journal and records.

No time is compared with one taken earlier: a candidate and the analytical choice are
timed in turns, and the median of the ratios counts. A candidate that is plainly slower
than the best one is given up after a few turns. The best meet the analytical choice
once more at the end, since the least of many noisy ratios is too good, and in other
processes, since where its pages lie may favour one kernel for as long as a process lives;
a schedule that does not win in each of them is not chosen.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from portmm.dispatch.tuning_database import problem_text
from portmm.schedule.schedule import parse
from portmm.tuning.lane import LostError
from portmm.tuning.model import Candidate
from portmm.tuning.records import CRASHED, OK, UNBUILDABLE, WRONG, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from portmm.spec.problem import Problem
    from portmm.tuning.journal import Journal
    from portmm.tuning.lane import Lane

NEAR = 2.0
"""Times of the least predicted time up to which a candidate is measured before the search goes beyond candidates."""
SHORT = 8
"""Candidates that are measured, whatever is predicted."""
FASTER = 0.99
"""Ratio of times below which a schedule counts as faster."""
SLOWER = 1.05
"""Ratio of times after `FEW` turns above which a candidate is given up."""
FIRST, FEW, PAIRS, LAST = 3, 2, 6, 10
"""Turns to find out how long the first takes, who is plainly slower, who is faster, and who is chosen."""
FINALISTS, PROCESSES = 3, 2
"""Candidates that meet the analytical choice once more, and in how many processes each."""
RESERVE = 0.2
"""Share of the time that is kept for that."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How candidates are measured.

    Attributes:
        turn: seconds of one turn.
        abreast: kernels that are compiled at once.
        deadline: when to end, by `time.monotonic`.
    """

    turn: float = 0.01
    abreast: int = 2
    deadline: float = float("inf")

    @property
    def over(self) -> bool:
        """There is no time left."""
        return time.monotonic() >= self.deadline


@dataclass(frozen=True, slots=True)
class Standing:
    """Somebody who computes the right result, and in how many seconds."""

    candidate: Candidate
    seconds: float


@dataclass(slots=True)
class Race:
    """One case while it is searched.

    Attributes:
        lane: where candidates run.
        problem: what is computed.
        rules: how.
        journal: where trials are written down.
        trials: what was tried, by schedule and workers, in that order.
        base: the first that was right: the analytical choice, unless that fails.
        chosen: `base`, or who was faster once more at the end.
    """

    lane: Lane
    problem: Problem
    rules: Rules
    journal: Journal
    trials: dict[tuple[str, int], Trial] = field(default_factory=dict)
    base: Standing | None = None
    chosen: Standing | None = None

    @property
    def best(self) -> float:
        """The least seconds until now."""
        return min((x.seconds for x in self.trials.values() if x.state == OK), default=0.0)

    def begin(self, order: Sequence[Candidate]) -> None:
        """Find the first candidate that is right; what earlier runs know is known."""
        self.trials = {(x.schedule, x.workers): x for x in self.journal.trials(problem_text(self.problem))}
        for one in order:
            before = self.trials.get(one.key)
            if before and before.state == WRONG:
                continue
            before = before if before and before.state == OK else None  # what else failed may have been bad luck
            state, reason = self._tried(one, *self.lane.build([one.text]))
            seconds = before.seconds if before else 0.0
            if state == OK and not before:
                try:
                    seconds = statistics.median(self._seconds(one, one.predicted) for _ in range(FIRST))
                except LostError as lost:
                    state, reason = lost.state, str(lost)
            if state != OK or not before:
                self._keep(one, state, reason, seconds)
            if state == OK:
                self.base = self.chosen = Standing(one, seconds)
                return

    def run(self, candidates: Iterable[Candidate]) -> Iterator[Trial]:
        """Measure candidates that were not yet, as long as there is time; what became of each."""
        for some in _chunks((x for x in candidates if x.key not in self.trials), self.rules.abreast):
            if self.rules.over:
                return
            reasons = self.lane.build([x.text for x in some])
            for one, reason in zip(some, reasons, strict=True):
                if self.rules.over:
                    return
                yield self.measure(one, reason)

    def measure(self, one: Candidate, refused: str = "") -> Trial:
        """Check a candidate whose kernel is built, unless it was refused, and time it in turns with the base."""
        assert self.base  # noqa: S101 - it was found first
        state, reason = self._tried(one, refused)
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
        """Whether the best are faster than the analytical choice, measured afresh, and right after many calls."""
        if not self.base:
            return
        faster = (x for x in self.trials.values() if x.state == OK and x.seconds < FASTER * self.base.seconds)
        for trial in sorted(faster, key=lambda x: x.seconds)[:FINALISTS]:
            if self.chosen is not self.base and self.rules.over:
                return
            one = _candidate(trial)
            ratio = self._final(one)
            if ratio < math.inf:
                self._keep(one, OK, "", self.base.seconds * ratio)
            if ratio < FASTER and self.base.seconds * ratio < self.chosen.seconds:  # type: ignore[union-attr]
                self.chosen = Standing(one, self.base.seconds * ratio)

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
        """Ratio of the times of a candidate and the base; infinite if it fails."""
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
        state, reason = self._tried(one, "")
        if state != OK:
            self._keep(one, state, f"after timing, {reason}" if state == WRONG else reason)
            return math.inf
        return statistics.median(ratios)

    def _pair(self, one: Candidate, turn: int) -> float:
        """Seconds of a candidate over those of the base, one after the other, now this one first, now that one."""
        assert self.base  # noqa: S101 - it was found first
        usual = self.base.seconds
        mine = 0.0 if turn % 2 else self._seconds(one, usual)
        try:
            other = self._seconds(self.base.candidate, usual)
        except LostError as lost:
            raise LostError(CRASHED, f"the analytical choice, right before, failed beside this one: {lost}") from None
        return (mine or self._seconds(one, usual)) / other

    def _seconds(self, one: Candidate, usual: float) -> float:
        return self.lane.time(one.text, one.workers, self.rules.turn, usual)

    def _tried(self, one: Candidate, refused: str) -> tuple[str, str]:
        """Whether a candidate computes the right result."""
        if refused:
            return UNBUILDABLE, refused
        return self.lane.check(one.text, one.workers, self.base.seconds if self.base else one.predicted)

    def _keep(self, one: Candidate, state: str, reason: str, seconds: float = 0.0) -> Trial:
        trial = Trial(one.text, one.workers, state, one.predicted, seconds if state == OK else 0.0, reason)
        self.trials[one.key] = trial
        self.journal.keep(problem_text(self.problem), trial)
        return trial


def _candidate(trial: Trial) -> Candidate:
    """What a trial was of."""
    return Candidate(parse(trial.schedule), trial.workers, trial.predicted)


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Some at a time, each asked for only when it is needed."""
    some: list[Any] = []
    for x in items:
        some.append(x)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some


def short_list(order: Sequence[Candidate], *, everything: bool) -> Sequence[Candidate]:
    """The candidates that are worth measuring, best first."""
    if everything:
        return order
    least = min(x.predicted for x in order)
    return [x for i, x in enumerate(order) if i < SHORT or x.predicted <= NEAR * least]


def search(
    race: Race, order: Sequence[Candidate], listed: Sequence[Candidate], tell: Callable[[Trial], None], proposals: Any
) -> bool:
    """Measure the short list, then what is proposed; whether there was time for all of it.

    Args:
        race: the case.
        order: its candidates, by predicted time, of which the first is the analytical choice.
        listed: those that are measured before anything is proposed.
        tell: called with each trial.
        proposals: what else to try: `ask`ed for some candidates at a time, none at the end, and `told` each trial;
            None for nothing.
    """
    race.begin(order)
    if not race.base:
        return False
    whole = race.rules
    left = whole.deadline - time.monotonic()
    race.rules = replace(whole, deadline=whole.deadline - RESERVE * max(left, 0.0))
    for trial in race.run(listed):
        tell(trial)
    while proposals is not None and not race.rules.over:
        some = proposals.ask(race.rules.abreast, race.trials)
        if not some:
            break
        for trial in race.run(some):
            proposals.told(trial)
            tell(trial)
    over = race.rules.over
    race.rules = whole
    race.confirm()
    return not over
