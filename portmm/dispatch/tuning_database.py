"""Database of tuned schedules, measured to be faster than the cost model's.

Owns `Tuned`, and the database of them: one SQLite file, and TOML for export and for
the tables that the package ships. `tuning` measures.

A tuned schedule is looked up by chip, then by architecture (its best
instruction set), then by vendor; each in the user's database before the shipped
one. Callers must check that it is legal (`cpu_neighbourhood.unsound`): a database
is data, perhaps of another version or from another person.
"""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from portmm.build.cache import tuned_database
from portmm.errors import DatabaseError
from portmm.schedule.schedule import Schedule, parse, spell
from portmm.spec.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from sqlite3 import Connection

    from portmm.target.target import Target

SCHEMA = 1
PATIENCE = 30.0
"""Seconds to wait for another process that is writing."""
SHORTEST, LONGEST = 1e-10, 1e6
"""Bounds in seconds of a plausible measurement."""
LEVELS = ("chip", "architecture", "vendor")
"""Levels of a lookup, the nearest first."""
_COLUMNS = {
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
_NUMBERS = {"threads": int, "workers": int, "seconds": float, "analytical": float}
_KEY = ("chip", "architecture", "problem", "threads", "cold")


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
        plain = {name: getattr(self, name) for name in _COLUMNS}
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


def _tuned(row: dict[str, Any]) -> Tuned:
    """The tuned schedule of a row of the database.

    Raises:
        ValueError: the row is invalid.
    """
    try:
        values = {x.name: row[x.name] for x in fields(Tuned) if x.name in row}
        values["problem"] = Problem(**json.loads(row["problem"]))
        values["schedule"] = parse(row["schedule"])
        numbers = {name: kind(row[name]) for name, kind in _NUMBERS.items()}
        strange = [x for x in ("seconds", "analytical") if not SHORTEST < numbers[x] < LONGEST]
        strange += [x for x, kind in _COLUMNS.items() if kind == "TEXT" and x in values and not _plain(values[x])]
        if strange:
            raise ValueError(f"no tuned schedule: {', '.join(strange)} of {row}")
        return Tuned(**{**values, **numbers, "cold": bool(row.get("cold"))})
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no tuned schedule: {error!r} in {row}") from error


def _plain(x: Any) -> bool:
    return isinstance(x, str | Problem | Schedule)


@contextmanager
def opened(path: Path, *, write: bool = False) -> Iterator[Connection]:
    """A connection to a database, created if it is missing and to be written; writes are one transaction.

    Raises:
        DatabaseError: the file is no such database, is of another version, or cannot be used.
    """
    import sqlite3

    try:
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
        mode = "rwc" if write else "ro"
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=PATIENCE)) as base:
            if write:
                base.isolation_level = None
                base.execute("BEGIN IMMEDIATE")
            _checked(base, path, write=write)
            yield base
            if write:
                base.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise DatabaseError(
            f"{path} cannot be used as portmm's database of tuned schedules ({error}); move it away, "
            "or name another file in PORTMM_TUNED, or use none with PORTMM_TUNED=off"
        ) from error


def _checked(base: Connection, path: Path, *, write: bool) -> None:
    (version,) = base.execute("PRAGMA user_version").fetchone()
    if version == 0 and write and not base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        columns = ", ".join(f"{name} {kind} NOT NULL" for name, kind in _COLUMNS.items())
        base.execute(f"CREATE TABLE findings ({columns}, PRIMARY KEY ({', '.join(_KEY)}))")
        base.execute("CREATE INDEX problems ON findings (problem, threads)")
        base.execute(f"PRAGMA user_version = {SCHEMA}")
    elif version != SCHEMA:
        raise DatabaseError(
            f"{path} is a database of version {version}, and this portmm reads {SCHEMA}; "
            "export it with the portmm that made it, or name another file in PORTMM_TUNED"
        )


def record(path: Path, schedules: Iterable[Tuned]) -> int:
    """Store tuned schedules, replacing those of the same problems, in one transaction.

    Returns:
        Their number.

    Raises:
        DatabaseError: the database cannot be written.
    """
    return _put(path, [x.row() for x in schedules])


def _put(path: Path, table: list[dict[str, Any]]) -> int:
    names = ", ".join(_COLUMNS)
    marks = ", ".join(f":{name}" for name in _COLUMNS)
    with opened(path, write=True) as base:
        base.executemany(f"INSERT OR REPLACE INTO findings ({names}) VALUES ({marks})", table)  # noqa: S608
    return len(table)


def rows(path: Path) -> list[Tuned]:
    """All tuned schedules of a database, in an order that does not depend on their dates.

    Raises:
        DatabaseError: it is no such database.
    """
    return list(_sound(_select(path, f"1 ORDER BY {', '.join(_KEY)}", ()), path))


def _select(path: Path, where: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
    with opened(path) as base:
        cursor = base.execute(f"SELECT {', '.join(_COLUMNS)} FROM findings WHERE {where}", values)  # noqa: S608
        return [dict(zip(_COLUMNS, row, strict=True)) for row in cursor]


def _sound(table: Iterable[dict[str, Any]], path: Path) -> Iterator[Tuned]:
    for row in table:
        try:
            yield _tuned(row)
        except ValueError as error:
            raise DatabaseError(f"{path}: {error}; remove the row, or move the file away") from error


def merge(path: Path, others: Iterable[Path]) -> int:
    """Merge other databases, or files in TOML, into one: problems that it lacks, and greater gains.

    Returns:
        The number of schedules taken over.

    Raises:
        DatabaseError: one of them is no such database.
    """
    kept = {_key(x): x for x in rows(path)} if path.exists() else {}
    taken: dict[tuple[Any, ...], Tuned] = {}
    for other in others:
        for x in read_toml(other) if other.suffix == ".toml" else rows(other):
            known = taken.get(_key(x)) or kept.get(_key(x))
            if known is None or (x.gain, x.date) > (known.gain, known.date):
                taken[_key(x)] = x
    return record(path, taken.values())


def clear(path: Path) -> int:
    """Delete all tuned schedules and the journal of tuning, so that tuning starts from the beginning.

    Returns:
        The number of schedules deleted.

    Raises:
        DatabaseError: it is no such database.
    """
    with opened(path, write=True) as base:
        count = base.execute("SELECT count(*) FROM findings").fetchone()[0]
        tables = base.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in tables:
            base.execute(f'DELETE FROM "{name}"')  # noqa: S608 - names of its own tables
    return int(count)


def _key(x: Tuned) -> tuple[Any, ...]:
    row = x.row()
    return tuple(row[name] for name in _KEY)


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
    return [_tuned({**usual, **row, "problem": json.dumps(row.get("problem"))}) for row in table]


def read_toml(path: Path) -> list[Tuned]:
    """The tuned schedules in a file of TOML.

    Raises:
        DatabaseError: the file is invalid.
    """
    try:
        return from_toml(path.read_text())
    except (OSError, ValueError) as error:
        raise DatabaseError(f"{path} has no tuned schedules ({error}); `portmm tuned --export` writes them") from error


def find(p: Problem, target: Target, threads: int) -> list[Tuned]:
    """Tuned schedules of a problem, by chip, architecture, vendor; the user's before the shipped ones.

    Those with warm caches come before those with cold ones.

    Raises:
        DatabaseError: the user's database cannot be read.
    """
    path = tuned_database()
    text, isa_key = problem_text(p), architecture(target)
    kept: list[Tuned] = []
    if path is not None and path.exists():
        near = "problem = ? AND threads = ? AND (architecture = ? OR vendor = ?)"
        kept = list(_sound(_select(path, near, (text, threads, isa_key, target.vendor)), path))
    known = kept + ([] if path is None else _shipped(target.vendor, isa_key).get((text, threads), []))
    wanted = {"chip": target.name, "architecture": isa_key, "vendor": target.vendor}
    matches = []
    for level in LEVELS:
        like = [x for x in known if _same(x, level, wanted) and x not in matches]
        matches += sorted(like, key=lambda x: x.cold)
    return matches


def tuned_rows(p: Problem, target: Target, threads: int) -> frozenset[int]:
    """Values of M that may have tuned schedules, of problems that equal `p` except for M.

    Raises:
        DatabaseError: the user's database cannot be read.
    """
    path = tuned_database()
    if path is None:
        return frozenset()
    try:
        info = path.stat()
    except OSError:
        kept: dict[Any, frozenset[int]] = {}
    else:
        kept = _rows_kept(path, (info.st_mtime_ns, info.st_ino, info.st_size))
    shipped = _rows_shipped(target.vendor, architecture(target))
    if not (kept or shipped):
        return frozenset()
    key = (p.but_rows, threads)
    return kept.get(key, frozenset()) | shipped.get(key, frozenset())


@lru_cache(maxsize=4)
def _rows_kept(path: Path, state: tuple[int, int, int]) -> dict[Any, frozenset[int]]:
    """Values of M in a database, by kind of problem; `state` changes when the file is written."""
    del state
    with opened(path) as base:
        pairs = base.execute("SELECT DISTINCT problem, threads FROM findings").fetchall()
    try:
        return _by_kind((Problem(**json.loads(text)), int(threads)) for text, threads in pairs)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DatabaseError(f"{path} has a problem that is none ({error!r}); remove the row") from error


@lru_cache(maxsize=16)
def _rows_shipped(vendor: str, built: str) -> dict[Any, frozenset[int]]:
    return _by_kind((x.problem, x.threads) for schedules in _shipped(vendor, built).values() for x in schedules)


def _by_kind(problems: Iterable[tuple[Problem, int]]) -> dict[Any, frozenset[int]]:
    rows: dict[Any, set[int]] = {}
    for p, threads in problems:
        rows.setdefault((p.but_rows, threads), set()).add(p.m)
    return {key: frozenset(values) for key, values in rows.items()}


def _same(x: Tuned, level: str, wanted: dict[str, str]) -> bool:
    """Test whether a schedule was tuned on this chip, on this architecture, or on this vendor's with the same ISA."""
    if level == "chip":
        return (x.chip, x.architecture) == (wanted["chip"], wanted["architecture"])
    if level == "architecture":
        return x.architecture == wanted["architecture"]
    return x.vendor == wanted["vendor"] and x.architecture.partition("/")[0] == wanted["architecture"].partition("/")[0]


@lru_cache(maxsize=16)
def _shipped(vendor: str, built: str) -> dict[tuple[str, int], list[Tuned]]:
    """Shipped schedules of a vendor or an architecture, by problem and threads."""
    by_problem: dict[tuple[str, int], list[Tuned]] = {}
    marks = (f'\nvendor = "{vendor}"\n', f'\narchitecture = "{built}"\n')
    for file in sorted(resources.files("portmm.targets.tuned").iterdir(), key=lambda x: x.name):
        # Parsing TOML is slow: only files with a matching row are parsed.
        if file.name.endswith(".toml") and any(mark in (text := file.read_text()) for mark in marks):
            for x in from_toml(text):
                by_problem.setdefault((problem_text(x.problem), x.threads), []).append(x)
    return by_problem
