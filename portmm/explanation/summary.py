"""Common part of explanations for CPUs and devices.

Owns `Selected`, their base class, with what both print and their JSON form.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

from portmm.schedule.text import spell
from portmm.util.text import flop, size, terms, time

if TYPE_CHECKING:
    from portmm.dispatch.schedule_choice import Choice
    from portmm.schedule.roofline import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Target


SHOWN = 5
"""Runners-up in the printed form; all are in the record."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A selected schedule, with its problem and prediction; subclasses have `source` and `notes`.

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
        return float(self.choice.cost.seconds)

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

    def as_dict(self) -> dict[str, Any]:
        """All fields but the artifact, in types of JSON."""
        of_target, of_kernel = self._data()
        return {
            "problem": {**asdict(self.problem), "flops": self.problem.flops, "bytes": self.problem.bytes},
            "target": self.target.name,
            **of_target,
            "origin": self.origin,
            "schedule": spell(self.schedule),
            "description": str(self.schedule),
            "cost": asdict(self.cost),
            "gflops": self.gflops,
            "runners_up": [
                {"schedule": spell(s), "description": str(s), "cost": asdict(cost)} for s, cost in self.runners_up
            ],
            **of_kernel,
            "notes": list(self.notes),  # type: ignore[attr-defined]
            "source": self.source,  # type: ignore[attr-defined]
        }

    def _data(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Further fields of the JSON form: of the target, and of the kernels."""
        raise NotImplementedError

    def _shown(self) -> tuple[str, dict[str, Any]]:
        """Name of the template of the printed form, and its further values."""
        raise NotImplementedError

    def summary(self) -> str:
        """The printed form without the source."""
        from portmm.util.templates import render

        command = f"portmm emit --schedule {quote(spell(self.schedule))}"
        functions = {x.__name__: x for x in (flop, size, terms, time)}
        name, values = self._shown()
        text = render(__file__, name, e=self, shown=SHOWN, command=command, **functions, **values)
        return "\n".join(line.rstrip() for line in text.splitlines())

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.source}"  # type: ignore[attr-defined]
