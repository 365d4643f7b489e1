"""The caches of a machine.

Owns the record of a memory level, and its checks.
"""

from __future__ import annotations

from portmm.target.toml_schema import require
from portmm.util.records import dataclass


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """A cache or memory.

    Attributes:
        name: "L1", "L2", "L3"; main memory is not listed.
        bytes: capacity seen by one core (whole cache if `shared`).
        line: bytes of a line.
        ways: associativity; 8 is assumed where it is not known.
        shared: more than one core uses it.
        cores: cores that share it, 0 if unknown.
        load_bytes_per_cycle: bytes that one core can read from it per cycle, 0 if unknown.
        source: source of the numbers.
    """

    name: str
    bytes: int
    line: int = 64
    ways: int = 8
    shared: bool = False
    cores: int = 0
    load_bytes_per_cycle: float = 0.0
    source: str = ""

    @property
    def share(self) -> int:
        """Bytes per core when all cores that share the level use it equally."""
        return self.bytes // max(1, self.cores) if self.shared else self.bytes


def check_level(level: MemoryLevel, where: str) -> MemoryLevel:
    """The level itself, after its checks.

    Raises:
        TargetError: a number is out of range.
    """
    where = f"{where} {level.name}"
    require(level.bytes > 0, where, f"bytes must be positive, got {level.bytes}")
    require(level.line > 0 and level.line & (level.line - 1) == 0, where, f"line {level.line} is no power of two")
    require(level.ways > 0, where, f"ways must be positive, got {level.ways}")
    require(level.cores >= 0, where, f"cores must not be negative, got {level.cores}")
    require(level.load_bytes_per_cycle >= 0, where, "load_bytes_per_cycle must not be negative")
    return level
