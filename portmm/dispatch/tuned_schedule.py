"""Tuned schedules: the fastest measured schedule of a problem, as a record, as a row of the database and as TOML.

Owns `Tuned` and both of its texts. TOML is for review, for export and for the tables that the package ships.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from portmm.errors import DatabaseError
from portmm.schedule.schedule import Schedule
from portmm.schedule.text import parse, spell
from portmm.spec.dequantization import of_words
from portmm.spec.problem import Problem
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from pathlib import Path

    from portmm.target.target import Target

SHORTEST, LONGEST = 1e-10, 1e6
"""Bounds in seconds of a plausible measurement."""
COLUMNS = {
    "chip": "TEXT",
    "architecture": "TEXT",
    "vendor": "TEXT",
    "problem": "TEXT",
    "threads": "INTEGER",
    "cold": "INTEGER",
    "schedule": "TEXT",
    "workers": "INTEGER",
    "seconds": "REAL",
    "analytical": "REAL",
    "date": "TEXT",
    "version": "TEXT",
    "title": "TEXT",
}
"""Columns of a table of tuned schedules, with their types in SQL."""
_NUMBERS = {"threads": int, "workers": int, "seconds": float, "analytical": float}


@dataclass(frozen=True, slots=True)
class Tuned:
    """The fastest measured schedule of a problem.

    Attributes:
        problem: the problem.
        threads: the limit of threads.
        schedule: the fastest.
        workers: threads that share its work.
        seconds: its time.
        analytical: time of the model's schedule, measured interleaved with it.
        chip: name of the target.
        architecture: see `architecture`.
        vendor: maker of the chip.
        cold: operands were not in any cache.
        date: ISO date.
        version: portmm's.
        title: the brand name of the chip.
    """

    problem: Problem
    threads: int
    schedule: Schedule
    workers: int
    seconds: float
    analytical: float
    chip: str
    architecture: str
    vendor: str
    cold: bool = False
    date: str = ""
    version: str = ""
    title: str = ""

    @property
    def gain(self) -> float:
        """The speed-up over the model's schedule."""
        return self.analytical / self.seconds if self.seconds else 1.0

    def row(self) -> dict[str, Any]:
        """The columns of the database, by name."""
        plain = {name: getattr(self, name) for name in COLUMNS}
        return {
            **plain,
            "problem": problem_text(self.problem),
            "schedule": spell(self.schedule),
            "cold": int(self.cold),
        }


def architecture(target: Target) -> str:
    """The key shared by targets that run the same kernels: "x86_64/avx512vnni"."""
    return f"{target.arch}/{target.isas[0].name}"


def problem_text(p: Problem) -> str:
    """A problem as JSON: its sizes, and fields that differ from their defaults."""
    usual = Problem(0, 0, 0)
    changed = {k: v for k, v in asdict(p).items() if v != getattr(usual, k) or k in ("m", "n", "k")}
    return json.dumps(changed, sort_keys=True)


def problem_from(text: str) -> Problem:
    """The problem in a text of `problem_text`; not checked: a database is data of others."""
    values = json.loads(text)
    if post := values.pop("post", ""):
        values["fused"] = of_words(post, values.get("fused", ""), dynamic=bool(values.get("source")))
    return Problem(**values)


def of_row(row: dict[str, Any]) -> Tuned:
    """The tuned schedule of a row of the database.

    Raises:
        ValueError: the row is invalid.
    """
    try:
        values = {x.name: row[x.name] for x in fields(Tuned) if x.name in row}
        values["problem"] = problem_from(row["problem"])
        values["schedule"] = parse(row["schedule"])
        numbers = {name: kind(row[name]) for name, kind in _NUMBERS.items()}
        strange = [x for x in ("seconds", "analytical") if not SHORTEST < numbers[x] < LONGEST]
        strange += [x for x, kind in COLUMNS.items() if kind == "TEXT" and x in values and not _plain(values[x])]
        if strange:
            raise ValueError(f"no tuned schedule: {', '.join(strange)} of {row}")
        return Tuned(**{**values, **numbers, "cold": bool(row.get("cold"))})
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no tuned schedule: {error!r} in {row}") from error


def _plain(x: Any) -> bool:
    return isinstance(x, str | Problem | Schedule)


def to_toml(schedules: Iterable[Tuned]) -> str:
    """Tuned schedules as TOML, a table each, for review and for shipping."""
    parts = []
    for x in schedules:
        row = x.row()
        size = {f"problem.{name}": value for name, value in json.loads(row.pop("problem")).items()}
        row["cold"] = x.cold
        lines = (f"{name} = {_literal(value)}" for name, value in {**size, **row}.items() if value not in ("", False))
        parts.append("\n".join(("[[tuned]]", *lines)))
    return "\n\n".join(parts) + "\n" if parts else ""


def _literal(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def from_toml(text: str) -> list[Tuned]:
    """The tuned schedules in a text of `to_toml`.

    Raises:
        ValueError: the text is not of that form.
    """
    import tomllib

    usual = {"date": "", "version": "", "title": "", "cold": False}
    table = tomllib.loads(text).get("tuned", [])
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise ValueError("tuned is no list of tables")
    return [of_row({**usual, **row, "problem": json.dumps(row.get("problem"))}) for row in table]


def read_toml(path: Path) -> list[Tuned]:
    """The tuned schedules in a file of TOML.

    Raises:
        DatabaseError: the file is invalid.
    """
    try:
        return from_toml(path.read_text())
    except (OSError, ValueError) as error:
        raise DatabaseError(f"{path} has no tuned schedules ({error}); `portmm tuned --export` writes them") from error
