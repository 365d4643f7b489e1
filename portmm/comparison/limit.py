"""What the machine could reach.

Owns the limit that rates are held against, and which ISA a target allows.
Imports `candidates`, `detect`, `comparison.suite`, and `calibrate` when asked. The
limit is the roofline: the measured multiply-add rate, or, where the operands
outgrow the caches, the measured bandwidth of the memory they live in, over the
compulsory traffic.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.candidates import units
from portmm.comparison.suite import cases
from portmm.detect import host, resolve
from portmm.errors import ScheduleError

if TYPE_CHECKING:
    from portmm.comparison.case import Case
    from portmm.target import MemoryLevel


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates of this machine.

    Attributes:
        rates: "<atom>" in GFLOP/s, "<level>" and "memory" in GB/s, of one core.
        levels: the caches, nearest first.
        atoms: types that are multiplied -> name of the atom that computes them.
    """

    rates: dict[str, float] = field(default_factory=dict)
    levels: tuple[MemoryLevel, ...] = ()
    atoms: dict[str, str] = field(default_factory=dict)

    def of(self, case: Case, threads: int, *, cold: bool = False) -> float | None:
        """GFLOP/s that could be reached on `case`, None if that is not known.

        Bandwidth is known for one core only, and what several cores share of it
        is not: there is no limit for cases that memory holds back on many threads. With cold
        caches all operands come from memory.
        """
        peak = self.rates.get(self.atoms.get(case.problem.dtype, ""))
        if peak is None:
            return None
        level = next((x.name for x in self.levels if case.bytes <= x.bytes and not cold), "memory")
        bandwidth = self.rates.get(level)
        if bandwidth is None:
            return peak * threads
        bound = bandwidth * case.flops / case.bytes
        if bound < peak and threads > 1:
            return None
        return min(peak, bound) * threads


def measured(target: str) -> Limits:
    """Probe this machine as `target`; empty `Limits` where portmm cannot."""
    try:
        probe: Any = import_module("portmm.calibrate").probe
    except ImportError:
        return Limits()
    wanted = resolve(target)
    # The first atom of a type is the ISA's widest; the best ISA comes first.
    atoms = {t.a: t.name for isa in reversed(wanted.isas) for t in reversed(isa.atoms) if t.a == t.b}
    rates = dict(probe(wanted))
    for word in {case.problem.dtype for case in cases("narrow")}:
        with suppress(ScheduleError):
            names = [atom.name for _, atom in units(word, wanted)]
            atoms[word] = max(names, key=lambda name: rates.get(name, 0.0))
    return Limits(rates, host().levels, atoms)


def forced_isa(target: str) -> str:
    """The ISA that `target` holds this machine to, empty if it holds it to none.

    Raises:
        TargetError: there is no such target, or this machine cannot run it.
    """
    best = resolve(target).isas[0].name
    return "" if best == host().isas[0].name else best


def chip() -> str:
    """The processor: what portmm takes it for, and its own name for itself."""
    own = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return f"{host().title}, {own}" if own else host().title


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
