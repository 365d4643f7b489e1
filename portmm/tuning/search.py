"""The search for one case.

Owns `Race`, which measures candidates against the best one until then, and `search`,
which decides who is next. Imports `tuned`, and `tuning`'s lane, model, journal and records.

No time is compared with one taken earlier: a candidate and the best one until then
are timed in turns, and the median of the ratios counts. A candidate that is plainly
slower is given up after a few turns. Whoever wins meets the analytical choice once
more at the end, afresh, since the best of many noisy ratios is too good; a schedule
that does not win there is not chosen.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portmm.tuned import told
from portmm.tuning.lane import LostError
from portmm.tuning.records import CRASHED, OK, UNBUILDABLE, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from portmm.problem import Problem
    from portmm.tuning.journal import Journal
    from portmm.tuning.lane import Lane
    from portmm.tuning.model import Candidate

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


@dataclass(frozen=True, slots=True)
class Rules:
    """How candidates are measured.

    Attributes:
        cold: caches are emptied before each call.
        turn: seconds of one turn.
        abreast: kernels that are compiled at once.
        deadline: when to end, by `time.monotonic`.
    """

    cold: bool = False
    turn: float = 0.01
    abreast: int = 2
    deadline: float = float("inf")

    @property
    def over(self) -> bool:
        """There is no time left."""
        return time.monotonic() >= self.deadline


@dataclass(slots=True)
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
        best: who has beaten all others.
        chosen: `base`, or who has beaten it once more at the end.
    """

    lane: Lane
    problem: Problem
    rules: Rules
    journal: Journal
    trials: dict[tuple[str, int], Trial] = field(default_factory=dict)
    base: Standing | None = None
    best: Standing | None = None
    chosen: Standing | None = None

    def begin(self, order: Sequence[Candidate]) -> None:
        """Find the first candidate that is right, and what earlier runs know."""
        known = self.journal.trials(told(self.problem))
        self.trials = {(x.schedule, x.workers): x for x in known}
        for one in order:
            before = self.trials.get(one.key)
            if before and before.state != OK:
                continue
            state, reason = self._tried(one, *self.lane.build([one.text]))
            seconds = before.seconds if before else 0.0
            if state == OK and not before:
                try:
                    seconds = statistics.median(self._seconds(one, one.predicted) for _ in range(FIRST))
                except LostError as lost:
                    state, reason = lost.state, str(lost)
            if not before or state != OK:
                self._keep(one, state, reason, seconds, won=state == OK)
            if state == OK:
                self.base = self.best = self.chosen = Standing(one, seconds)
                self._resume(known)
                return

    def _resume(self, known: Sequence[Trial]) -> None:
        """Go on with who had won when an earlier run ended."""
        winners = [x for x in known if x.won and x.state == OK]
        if winners and not self.lane.build([winners[-1].schedule])[0]:
            self.best = Standing(_candidate(winners[-1]), winners[-1].seconds)

    def run(self, candidates: Iterable[Candidate]) -> Iterator[Trial]:
        """Measure candidates that were not yet, as long as there is time; what became of each."""
        for some in _chunks((x for x in candidates if x.key not in self.trials), self.rules.abreast):
            if self.rules.over:
                return
            reasons = self.lane.build([x.text for x in some])
            for one, reason in zip(some, reasons, strict=True):
                if self.rules.over:
                    return
                if one.key not in self.trials:
                    yield self.measure(one, reason)

    def measure(self, one: Candidate, refused: str = "") -> Trial:
        """Check a candidate whose kernel is built, unless it was refused, and time it in turns with the best."""
        assert self.best  # noqa: S101 - there is a base
        state, reason = self._tried(one, refused)
        if state != OK:
            return self._keep(one, state, reason)
        ratios: list[float] = []
        try:
            for turn in range(PAIRS):
                ratios.append(self._pair(one, turn))
                if len(ratios) >= FEW and statistics.median(ratios) > SLOWER:
                    break
        except LostError as lost:
            return self._keep(one, lost.state, str(lost))
        ratio = statistics.median(ratios)
        seconds = self.best.seconds * ratio
        won = len(ratios) >= PAIRS and ratio < FASTER
        if won:
            # A race between threads may show only after many calls.
            state, reason = self._tried(one, "")
            if state != OK:
                return self._keep(one, state, f"after timing, {reason}")
            self.best = Standing(one, seconds)
        return self._keep(one, OK, "", seconds, won=won)

    def _pair(self, one: Candidate, turn: int) -> float:
        """Seconds of a candidate over those of the best, one after the other, now this one first, now that one."""
        assert self.best  # noqa: S101 - there is a base
        usual = self.best.seconds
        mine = 0.0 if turn % 2 else self._seconds(one, usual)
        try:
            other = self._seconds(self.best.candidate, usual)
        except LostError as lost:
            raise LostError(CRASHED, f"a schedule that was right before failed beside this one: {lost}") from None
        return (mine or self._seconds(one, usual)) / other

    def confirm(self) -> None:
        """Whether the best is faster than the analytical choice, measured afresh."""
        if not self.base or not self.best or self.best is self.base:
            return
        rival, self.best = self.best, self.base
        try:
            ratio = statistics.median(self._pair(rival.candidate, turn) for turn in range(LAST))
        except LostError:
            return
        if ratio < FASTER:
            self.chosen = Standing(rival.candidate, self.base.seconds * ratio)

    def _seconds(self, one: Candidate, usual: float) -> float:
        return self.lane.time(one.text, one.workers, self.rules.turn, usual, cold=self.rules.cold)

    def _tried(self, one: Candidate, refused: str) -> tuple[str, str]:
        """Whether a candidate computes the right result."""
        if refused:
            return UNBUILDABLE, refused
        usual = self.best.seconds if self.best else one.predicted
        return self.lane.check(one.text, one.workers, usual)

    def _keep(self, one: Candidate, state: str, reason: str, seconds: float = 0.0, *, won: bool = False) -> Trial:
        trial = Trial(one.text, one.workers, state, one.predicted, seconds if state == OK else 0.0, won, reason)
        self.trials[one.key] = trial
        self.journal.keep(told(self.problem), trial)
        return trial


def _candidate(trial: Trial) -> Candidate:
    """What a trial was of."""
    from portmm.schedule import parse
    from portmm.tuning.model import Candidate

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
    least = order[0].predicted
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
        return True
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
    race.confirm()
    return not over
