"""What to try beyond the candidates of the cost model.

Owns `Proposals`, which walks the space of legal schedules by Optuna's estimator of
densities (TPE), seeded. Imports `dispatch.cpu`, `schedule.neighbourhood`, `tuning.model`; Optuna when there is one.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portmm.dispatch.cpu import predicted
from portmm.schedule.neighbourhood import Neighbourhood, neighbourhood_of
from portmm.tuning.model import Candidate
from portmm.tuning.records import OK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portmm.spec.problem import Problem
    from portmm.target.target import Target
    from portmm.tuning.records import Trial

MOST = 64
"""Schedules proposed for one case: the estimator has seen what it can by then."""
VAIN = 200
"""Proposals in a row that are illegal, known or hopeless, after which the space counts as searched."""
HOPELESS = 1.5
"""Times of the least predicted time past which a proposal is not measured."""
FIRST = 10
"""Random proposals before the estimator sets in."""
MISSING = "Optuna is not installed: only the cost model's candidates were measured; pip install 'portmm[tune]'"


@dataclass(slots=True)
class Proposals:
    """One case's search.

    Attributes:
        space: what may be tried.
        counts: numbers of threads that may share the work.
        least: the least predicted time among the candidates.
        study: Optuna's.
        left: proposals to go.
    """

    space: Neighbourhood
    counts: tuple[int, ...]
    least: float
    study: Any
    left: int = MOST
    _asked: dict[tuple[str, int], Any] = field(default_factory=dict)

    def ask(self, count: int, known: Mapping[tuple[str, int], Trial]) -> list[Candidate]:
        """Some candidates that are not known yet; none when the search has come to its end."""
        found: list[Candidate] = []
        vain = 0
        while len(found) < min(count, self.left) and vain < VAIN:
            trial = self.study.ask()
            one = self._made(trial)
            if one is None or one.key in self._asked or one.predicted > HOPELESS * self.least:
                self.study.tell(trial, state=_state("FAIL"))
            elif one.key in known:
                self._told(trial, known[one.key])
            else:
                self._asked[one.key] = trial
                found.append(one)
                continue
            vain += 1
        self.left -= len(found)
        return found

    def _made(self, trial: Any) -> Candidate | None:
        values = {name: trial.suggest_categorical(name, list(of)) for name, of in self.space.knobs.items()}
        workers = trial.suggest_categorical("workers", list(self.counts))
        schedule = self.space.schedule(values)
        if schedule is None:
            return None
        cost = predicted(self.space.problem, schedule, self.space.target, workers)
        return Candidate(schedule, workers, cost.seconds)

    def told(self, trial: Trial) -> None:
        """Learn what became of a candidate."""
        asked = self._asked.get((trial.schedule, trial.workers))
        if asked is not None:
            self._told(asked, trial)

    def _told(self, asked: Any, trial: Trial) -> None:
        if trial.state == OK and trial.seconds > 0:
            self.study.tell(asked, math.log(trial.seconds))
        else:
            self.study.tell(asked, state=_state("FAIL"))


def _state(name: str) -> Any:
    from optuna.trial import TrialState

    return TrialState[name]


def installed() -> bool:
    """Optuna is there."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        return False
    return True


def proposals(p: Problem, target: Target, order: Sequence[Candidate], seed: int) -> Proposals:
    """A search over the schedules that are legal for a problem, of which `order` are the candidates."""
    import optuna

    listed = list(dict.fromkeys(x.schedule for x in order))
    counts = tuple(sorted({x.workers for x in order}))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        # That several parameters are estimated together is experimental to Optuna.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=FIRST, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    return Proposals(neighbourhood_of(p, target, listed), counts, order[0].predicted, study)
