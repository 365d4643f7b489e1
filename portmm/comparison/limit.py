"""Limits of the rates on this machine.

Owns the limit of a case, and the ISA that a target restricts contenders to. The limit is the
roofline: the measured multiply-add rate, or the rate at which the nearest level of memory that
holds all operands delivers the compulsory traffic. `comparison.limit_worker` measures both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from portmm.host.detect import host, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.comparison.case import Case
    from portmm.target.cache_levels import MemoryLevel

MEMORY = "memory"
"""Name of the last level of memory, which holds every case."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates of this machine.

    Attributes:
        rates: "<atom>" in GFLOP/s, "<level>" and "memory" in GB/s, of one core.
        levels: the caches, nearest first.
        atoms: word of types -> name of the atom that multiplies them.
    """

    rates: dict[str, float] = field(default_factory=dict)
    levels: tuple[MemoryLevel, ...] = ()
    atoms: dict[str, str] = field(default_factory=dict)

    def of(self, case: Case, threads: int, *, cold: bool = False) -> float | None:
        """Limit of `case` in GFLOP/s, None if it is unknown.

        Bandwidth is known for one core only, and the share of each of several cores
        is not: there is no limit for memory-bound cases on many threads. With cold
        caches all operands come from memory.
        """
        peak = self.rates.get(self.atoms.get(case.problem.dtype, ""))
        if peak is None:
            return None
        bound = self._bound(case, cold=cold)
        if bound < peak and threads > 1:
            return None
        return min(peak, bound) * threads

    def roof(self, case: Case, *, cold: bool = False) -> str:
        """Name of the rate that sets the limit of a case."""
        atom = self.atoms.get(case.problem.dtype, "")
        peak = self.rates.get(atom, 0.0)
        return level_of(case, self.levels, cold=cold) if self._bound(case, cold=cold) < peak else atom

    def _bound(self, case: Case, *, cold: bool) -> float:
        """GFLOP/s of one core that bandwidth allows, infinite if the bandwidth is unknown."""
        bandwidth = self.rates.get(level_of(case, self.levels, cold=cold), inf)
        return bandwidth * case.flops / case.bytes


def level_of(case: Case, levels: Sequence[MemoryLevel], *, cold: bool = False) -> str:
    """Name of the nearest level that holds all operands of a case; with cold caches they come from memory."""
    return next((x.name for x in levels if case.bytes <= x.bytes and not cold), MEMORY)


def forced_isa(target: str) -> str:
    """ISA that `target` restricts this machine to, empty if it is the machine's best one.

    Raises:
        TargetError: the target is unknown, or this machine cannot run it.
    """
    best = resolve(target).isas[0].name
    return "" if best == host().isas[0].name else best


def chip() -> str:
    """Name of the processor: portmm's title of its target, and its model name in /proc/cpuinfo."""
    own = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return f"{host().title}, {own}" if own else host().title


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
