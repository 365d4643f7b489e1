"""Candidate schedules of a problem: those of the cost model, and others beyond them.

Owns `Candidate` and `ranked`; and `Proposals`, which searches the space of legal schedules by Optuna's tree-structured
Parzen estimator (TPE), seeded, where Optuna is installed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portmm.dispatch.schedule_choice import schedule_cost
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_neighbourhood import Neighbourhood, neighbourhood_of
from portmm.schedule.cpu_textbook import preferred
from portmm.schedule.schedule import Schedule
from portmm.schedule.text import spell
from portmm.spec.problem import Problem
from portmm.target.target import Target
from portmm.tuning.records import OK, Trial


@dataclass(frozen=True)
class Candidate:
    """A schedule and the number of threads that run it.

    Attributes:
        schedule: the schedule.
        workers: threads.
        predicted: seconds of a call.
    """

    schedule: Schedule
    workers: int
    predicted: float

    @property
    def text(self) -> str:
        """The schedule in one word."""
        cache = self.__dict__  # functools.cached_property has a lock, which a forked child may find held
        if "text" not in cache:
            cache["text"] = spell(self.schedule)
        return cache["text"]

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the candidate: schedule and threads."""
        return self.text, self.workers


def ranked(p: Problem, target: Target, threads: int) -> list[Candidate]:
    """All candidates for `threads` threads and for one, by predicted time, but the cost model's selection first."""
    counts = dict.fromkeys((1, max(1, threads)))
    order = [Candidate(s, w, schedule_cost(p, s, target, w).seconds) for s in candidates(p, target) for w in counts]
    order.sort(key=lambda x: x.predicted)
    first = preferred([(x.predicted, x.schedule) for x in order], p, target)
    return [order[first], *order[:first], *order[first + 1 :]]


MOST = 64
"""Most schedules proposed for one case: more do not improve the estimator."""
VAIN = 200
"""Consecutive proposals that are illegal, known or hopeless, after which the space counts as searched."""
REJECT_RATIO = 1.5
"""Multiple of the least predicted time above which a proposal is not measured."""
FIRST = 10
"""Random proposals before those of the estimator."""
MISSING = "Optuna is not installed: only the cost model's candidates were measured; pip install 'portmm[tune]'"


@dataclass(slots=True)
class Proposals:
    """Search of one case beyond its candidates.

    Attributes:
        space: the search neighbourhood of the candidates.
        counts: numbers of threads that may share the work.
        least: the least predicted time among the candidates.
        study: Optuna's study.
        left: number of proposals that are left.
    """

    space: Neighbourhood
    counts: tuple[int, ...]
    least: float
    study: Any
    left: int = MOST
    _pending: dict[tuple[str, int], Any] = field(default_factory=dict)

    def ask(self, count: int, known: Mapping[tuple[str, int], Trial]) -> list[Candidate]:
        """At most `count` candidates that are not known yet; none at the end of the search."""
        proposed: list[Candidate] = []
        vain = 0
        while len(proposed) < min(count, self.left) and vain < VAIN:
            trial = self.study.ask()
            one = self._candidate(trial)
            if one is None or one.key in self._pending or one.predicted > REJECT_RATIO * self.least:
                self.study.tell(trial, state=_state("FAIL"))
            elif one.key in known:
                self._tell(trial, known[one.key])
            else:
                self._pending[one.key] = trial
                proposed.append(one)
                continue
            vain += 1
        self.left -= len(proposed)
        return proposed

    def _candidate(self, trial: Any) -> Candidate | None:
        values = {name: trial.suggest_categorical(name, list(of)) for name, of in self.space.knobs.items()}
        workers = trial.suggest_categorical("workers", list(self.counts))
        schedule = self.space.schedule(values)
        if schedule is None:
            return None
        cost = schedule_cost(self.space.problem, schedule, self.space.target, workers)
        return Candidate(schedule, workers, cost.seconds)

    def tell(self, trial: Trial) -> None:
        """Pass the measurement of a proposed candidate to the estimator."""
        pending = self._pending.get((trial.schedule, trial.workers))
        if pending is not None:
            self._tell(pending, trial)

    def _tell(self, pending: Any, trial: Trial) -> None:
        if trial.state == OK and trial.seconds > 0:
            self.study.tell(pending, math.log(trial.seconds))
        else:
            self.study.tell(pending, state=_state("FAIL"))


def _state(name: str) -> Any:
    from optuna.trial import TrialState

    return TrialState[name]


def installed() -> bool:
    """Whether Optuna is installed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        return False
    return True


def proposals(p: Problem, target: Target, order: Sequence[Candidate], seed: int) -> Proposals:
    """Search over the legal schedules of a problem in the neighbourhood of `order`, its candidates."""
    import optuna

    listed = list(dict.fromkeys(x.schedule for x in order))
    counts = tuple(sorted({x.workers for x in order}))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        # Optuna marks the joint estimation of several parameters as experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=FIRST, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    return Proposals(neighbourhood_of(p, target, listed), counts, order[0].predicted, study)
