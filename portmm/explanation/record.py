"""Explanations of schedules that were selected, for CPUs and devices.

Owns `Explanation`, the record that `explain` returns, with its printed and its JSON form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

from portmm.dispatch.schedule_choice import ANALYTICAL, Choice
from portmm.errors import ScheduleError
from portmm.host import detect
from portmm.schedule import cpu_textbook
from portmm.schedule.cpu_table import DEFAULT_BYTES_PER_CYCLE
from portmm.schedule.legality import device_registers, footprint, occupancy, shared_bytes
from portmm.schedule.text import spell
from portmm.spec.row_classes import rows
from portmm.target.model import CPU as MODEL
from portmm.util.text import flop, size, terms, time

if TYPE_CHECKING:
    from portmm.schedule.roofline import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.target import Target

SHOWN = 5
"""Runners-up in the printed form; all are in the record."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of a problem's kernels: schedule, prediction, source. `print` it.

    Attributes:
        choice: the problem, the target, the selected schedule and the runners-up.
        kernels: in the order in which they run; of a CPU, one.
        language: "c", "cuda" or "opencl".
        source: the source of the kernels, one after the other.
        notes: further remarks.
    """

    choice: Choice
    kernels: tuple[Any, ...]
    language: str
    source: str
    notes: tuple[str, ...] = ()

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

    @property
    def kernel(self) -> Any:
        """The first kernel: the loop nest of the schedule."""
        return self.kernels[0]

    @property
    def workers(self) -> int:
        """Threads that share the work."""
        return self.choice.workers

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags of the instruction set."""
        return tuple(self.kernel.isa.flags)

    @property
    def rates(self) -> dict[str, tuple[float, str]]:
        """Rates of the prediction -> value, and its origin: "measured", "described" or "assumed".

        Multiply-adds in GFLOP/s or, unless measured, instructions per cycle;
        memory levels in GB/s or, unless measured, bytes per cycle.
        """
        target, atom = self.target, self.kernel.atom.name
        known = _rate(target, atom)
        rates_ = {atom: known} if known else {}
        for name, assumed in DEFAULT_BYTES_PER_CYCLE.items():
            level = target.level(name)
            if level is None and name != "memory":
                continue
            described = level.load_bytes_per_cycle if level else 0.0
            rates_[name] = (described, "described") if described else (assumed, "assumed")
        return rates_ | {x: (target.measured[x], "measured") for x in rates_ if x in target.measured}

    @property
    def runs_here(self) -> bool:
        """Test whether this machine can run the kernel."""
        return not detect.missing(self.kernel.isa) and self.target.arch in ("any", detect.host().arch)

    @property
    def artifact(self) -> Any:
        """The first kernel, compiled now or loaded from the cache: an `Artifact`, or a `Cubin` by NVRTC.

        For another architecture it is cross-compiled.

        Raises:
            ScheduleError: only a device's driver compiles its language.
            NoCompilerError: there is no compiler for the target.
            BuildError: the compiler failed.
        """
        if self.language == "c":
            from portmm.dispatch.cpu_kernels import build_kernel

            return build_kernel(self.kernel)
        from portmm.build.nvrtc import compile_cuda
        from portmm.dispatch.machine import source

        device = self.target.device
        if self.language != "cuda" or device is None or not device.architecture:
            raise ScheduleError(f"{self.language} for {self.target.name} is compiled by the driver of the device")
        return compile_cuda(source(self.kernel, "cuda"), self.kernel.name, device.architecture)

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
            "notes": list(self.notes),
            "source": self.source,
        }

    def _data(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Further fields of the JSON form: of the target, and of the kernels."""
        if self.language != "c":
            return {"language": self.language}, {"kernels": [x.name for x in self.kernels]}
        rates = {name: {"value": value, "origin": origin} for name, (value, origin) in self.rates.items()}
        kernel = {"kernel": self.kernel.name, "flags": list(self.flags), "runs_here": self.runs_here}
        return {"rates": rates, "threads": self.workers}, kernel

    def _shown(self) -> tuple[str, dict[str, Any]]:
        """Name of the template of the printed form, and its further values."""
        s = self.schedule
        if self.language != "c":
            return "gpu.txt", {
                "device": self.target.device, "registers": device_registers(s), "blocks": occupancy(s, self.target),
                "shared": shared_bytes(s),
            }  # fmt: skip
        from portmm.dispatch.cpu_kernels import workspace_bytes

        return "cpu.txt", {
            "footprint": footprint(s, self.problem, self.kernel.atom),
            "workspace": workspace_bytes(self.kernel, self.problem, self.workers), "others": list(self._others()),
            "speed": _speed, "textbook": cpu_textbook.ORIGIN, "within": MODEL.within,
            "why": self._why_not_the_fastest(),
        }  # fmt: skip

    def _why_not_the_fastest(self) -> list[str]:
        """Why runners-up that are predicted to be faster were not selected by the cost model."""
        if self.origin != ANALYTICAL:
            return []
        faster = [s for s, cost in self.runners_up if cost.seconds < self.seconds]
        excluded = [s for s in faster if self.target.searches and cpu_textbook.follows(s, self.problem, self.target)]
        why = []
        if excluded:
            why.append(
                "runners-up that are predicted faster are textbook blockings, which are not selected on this chip: "
                "the cost model was fitted to its stored searches, which have none"
            )
        if len(faster) > len(excluded):
            least, most = rows(self.problem)
            why.append(
                f"one schedule for every M from {least} to {most}: the fastest at {most} that is predicted to lose at "
                f"most {100 * (MODEL.class_loss - 1):.0f}% at the others"
            )
        return why

    def _others(self) -> Iterator[tuple[Schedule, Cost, str]]:
        """The best schedule of each instruction set not shown yet, with the rate of its atom."""
        seen = {self.schedule.isa, *(s.isa for s, _ in self.runners_up[:SHOWN])}
        for s, cost in self.runners_up[SHOWN:]:
            atom = self.target.atom(s.isa, s.dtype, s.atom.lanes)
            if s.isa not in seen and atom is not None:
                seen.add(s.isa)
                rate = _rate(self.target, atom.name)
                yield s, cost, f" ({_speed(atom, rate)})" if rate else ""

    def summary(self) -> str:
        """The printed form without the source."""
        from portmm.util.templates import render

        command = f"portmm emit --schedule {quote(spell(self.schedule))}"
        functions = {x.__name__: x for x in (flop, size, terms, time)}
        name, values = self._shown()
        text = render(__file__, name, e=self, shown=SHOWN, command=command, **functions, **values)
        return "\n".join(line.rstrip() for line in text.splitlines())

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.source}"


def _rate(target: Target, atom: str) -> tuple[float, str] | None:
    """The rate of an atom's multiply-adds: GFLOP/s if measured, else instructions per cycle."""
    if atom in target.measured:
        return target.measured[atom], "measured"
    return (target.rates[atom], "described") if atom in target.rates else None


def _speed(atom: Atom, rate: tuple[float, str]) -> str:
    value, origin = rate
    unit = "GFLOP/s" if origin == "measured" else f"macs of {atom.m}x{atom.n}x{atom.k} a cycle"
    return f"{atom.name}: {value:.4g} {unit}, {origin}"
