"""What every explanation says of a choice.

Owns `Chosen`, of which explanations for CPUs and for devices are made. Imports `dispatch.cpu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portmm.dispatch.selection import Choice
    from portmm.schedule.cpu_cost import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Target


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice, and what follows from it.

    Attributes:
        choice: the problem, the target, what was chosen for them and what was not.
    """

    choice: Choice

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return self.choice.problem

    @property
    def target(self) -> Target:
        """The machine that it is computed for."""
        return self.choice.target

    @property
    def schedule(self) -> Schedule:
        """How it is computed."""
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
        """Whose choice it is: "analytical" for the cost model's, "textbook" by `textbook.preferred`."""
        return self.choice.origin
