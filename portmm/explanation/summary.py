"""Common part of explanations for CPUs and devices.

Owns `Selected`, their base class, with what both print and their JSON form.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

from portmm.schedule.text import spell
from portmm.util.text import field, flop, size, terms, time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.dispatch.schedule_choice import Choice
    from portmm.schedule.cpu_cost import Cost
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

    def summary(self) -> str:
        """The printed form without the source."""
        return "\n".join(line.rstrip() for line in self._lines())

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.source}"  # type: ignore[attr-defined]

    def _lines(self) -> Iterator[str]:
        p, others = self.problem, self.runners_up
        yield field("problem", f"{p}; {flop(p.flops)}, at least {size(p.bytes)} moved")
        if p.fused:
            yield field("fused", p.fused)
        yield from self._target_lines()
        yield from self._choice_lines(f"{self.origin}, from {len(others) + 1} candidates")
        yield field("predicted", f"{time(self.seconds)}, {self.gflops:.4g} GFLOP/s; {self.cost.bound} decides")
        yield field("", f"the largest of {terms(self.cost.overlapped)}")
        yield field("", f"plus {terms(self.cost.added)}")
        for i, (s, cost) in enumerate(others[:SHOWN]):
            yield field("" if i else "runners-up", f"{time(cost.seconds)} ({cost.seconds / self.seconds:.3g}x) {s}")
            yield from self._runner_up_lines(cost)
        yield from self._other_lines()
        if len(others) > SHOWN:
            yield field("", f"and {len(others) - SHOWN} more in .runners_up")
        yield from self._kernel_lines(f"portmm emit --schedule {quote(spell(self.schedule))}")
        for note in self.notes:  # type: ignore[attr-defined]
            yield field("note", note)

    def _target_lines(self) -> Iterator[str]:
        raise NotImplementedError

    def _choice_lines(self, selection: str) -> Iterator[str]:
        raise NotImplementedError

    def _runner_up_lines(self, _cost: Cost) -> Iterator[str]:
        yield from ()

    def _other_lines(self) -> Iterator[str]:
        yield from ()

    def _kernel_lines(self, command: str) -> Iterator[str]:
        raise NotImplementedError
