"""Common part of explanations for CPUs and devices.

Owns `Selected`, their base class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portmm.dispatch.schedule_choice import Choice
    from portmm.schedule.cpu_cost import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Target


@dataclass(frozen=True, slots=True)
class Selected:
    """A selected schedule, with its problem and prediction.

    Attributes:
        choice: the problem, the target, the selected schedule and the runners-up.
    """

    choice: Choice

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.choice.problem

    @property
    def target(self) -> Target:
        """The target."""
        return self.choice.target

    @property
    def schedule(self) -> Schedule:
        """The selected schedule."""
        return self.choice.schedule

    @property
    def cost(self) -> Cost:
        """The predicted time, with its terms."""
        return self.choice.cost

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.choice.cost.seconds

    @property
    def gflops(self) -> float:
        """The predicted rate, in GFLOP/s."""
        return self.problem.flops / self.seconds / 1e9

    @property
    def runners_up(self) -> tuple[tuple[Schedule, Cost], ...]:
        """The other candidates with their predictions, best first."""
        return self.choice.runners_up

    @property
    def origin(self) -> str:
        """The origin: "analytical" (the cost model), "textbook" (`cpu_textbook.preferred`), or "tuned on" a chip."""
        return self.choice.origin
