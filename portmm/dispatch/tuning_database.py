"""Schedules that were measured to be faster than what the model chooses.

Owns `Tuned`, and the database of them: one SQLite file, and TOML for people and for
what the package ships. Imports `build.cache`, `errors`, `spec.problem`, `schedule.schedule`, `target.target`.
Nothing here measures; `tuning` does.

A finding is looked for under the chip, then under the architecture, its best
instruction set, then under the vendor; each in the user's database before the shipped
one. Whoever uses a finding checks first that it is sound (`space.unsound`): a database
is data, from another version perhaps, or another's hand.
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
"""Seconds to wait for another process that writes."""
SHORTEST, LONGEST = 1e-10, 1e6
"""Seconds; no product takes less, or more."""
LEVELS = ("chip", "architecture", "vendor")
"""Whose finding it is, the nearest first."""
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
    """The fastest schedule that was found for a problem.

    Attributes:
        problem: the problem.
        threads: the most that might be used.
        schedule: what was fastest.
        workers: threads that share its work.
        seconds: what it took.
        analytical: what the model's choice took, in turns with it.
        chip: name of the target.
        architecture: see `architecture`.
        vendor: maker of the chip.
        cold: operands were not in any cache.
        date: ISO date.
        version: portmm's.
        title: the chip, as it calls itself.
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
        """How many times as fast as the model's choice."""
        return self.analytical / self.seconds if self.seconds else 1.0

    def row(self) -> dict[str, Any]:
        """The columns of the database, by name."""
        plain = {name: getattr(self, name) for name in _COLUMNS}
        return {**plain, "problem": told(self.problem), "schedule": spell(self.schedule), "cold": int(self.cold)}


def architecture(target: Target) -> str:
    """What targets have in common that run the same kernels: "x86_64/avx512vnni"."""
    return f"{target.arch}/{target.isas[0].name}"


def told(p: Problem) -> str:
    """A problem as text: its sizes, and what is not usual, by name."""
    usual = Problem(0, 0, 0)
    said = {k: v for k, v in asdict(p).items() if v != getattr(usual, k) or k in ("m", "n", "k")}
    return json.dumps(said, sort_keys=True)


def _tuned(row: dict[str, Any]) -> Tuned:
    """What a row says.

    Raises:
        ValueError: it is not one.
    """
    try:
        given = {x.name: row[x.name] for x in fields(Tuned) if x.name in row}
        given["problem"] = Problem(**json.loads(row["problem"]))
        given["schedule"] = parse(row["schedule"])
        numbers = {name: kind(row[name]) for name, kind in _NUMBERS.items()}
        strange = [x for x in ("seconds", "analytical") if not SHORTEST < numbers[x] < LONGEST]
        strange += [x for x, kind in _COLUMNS.items() if kind == "TEXT" and x in given and not _plain(given[x])]
        if strange:
            raise ValueError(f"no tuned schedule: {', '.join(strange)} of {row}")
        return Tuned(**{**given, **numbers, "cold": bool(row.get("cold"))})
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no tuned schedule: {error!r} in {row}") from error


def _plain(x: Any) -> bool:
    return isinstance(x, str | Problem | Schedule)


@contextmanager
def opened(path: Path, *, write: bool = False) -> Iterator[Connection]:
    """A database, made if it is to be written and is not there; what is written is kept if all of it is.

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


def record(path: Path, found: Iterable[Tuned]) -> int:
    """Keep findings, in place of what was kept for the same problems; all or nothing.

    Returns:
        How many.

    Raises:
        DatabaseError: the database cannot be written.
    """
    return _put(path, [x.row() for x in found])


def _put(path: Path, table: list[dict[str, Any]]) -> int:
    names = ", ".join(_COLUMNS)
    marks = ", ".join(f":{name}" for name in _COLUMNS)
    with opened(path, write=True) as base:
        base.executemany(f"INSERT OR REPLACE INTO findings ({names}) VALUES ({marks})", table)  # noqa: S608
    return len(table)


def rows(path: Path) -> list[Tuned]:
    """All findings of a database, in an order that does not depend on when they were made.

    Raises:
        DatabaseError: it is no such database.
    """
    return list(_sound(_select(path, f"1 ORDER BY {', '.join(_KEY)}", ()), path))


def _select(path: Path, where: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
    with opened(path) as base:
        found = base.execute(f"SELECT {', '.join(_COLUMNS)} FROM findings WHERE {where}", values)  # noqa: S608
        return [dict(zip(_COLUMNS, row, strict=True)) for row in found]


def _sound(table: Iterable[dict[str, Any]], path: Path) -> Iterator[Tuned]:
    for row in table:
        try:
            yield _tuned(row)
        except ValueError as error:
            raise DatabaseError(f"{path}: {error}; remove the row, or move the file away") from error


def merge(path: Path, others: Iterable[Path]) -> int:
    """Take over what other databases, or files in TOML, know better: new problems, and greater gains.

    Returns:
        How many findings were taken.

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
    """Forget all findings, and all that tuning has tried, so that it begins anew.

    Returns:
        Findings that there were.

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


def to_toml(found: Iterable[Tuned]) -> str:
    """Findings as TOML, a table each, for people, for review, and to be shipped."""
    parts = []
    for x in found:
        row = x.row()
        size = {f"problem.{name}": value for name, value in json.loads(row.pop("problem")).items()}
        row["cold"] = x.cold
        lines = (f"{name} = {_literal(value)}" for name, value in {**size, **row}.items() if value not in ("", False))
        parts.append("\n".join(("[[tuned]]", *lines)))
    return "\n\n".join(parts) + "\n" if parts else ""


def _literal(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def from_toml(text: str) -> list[Tuned]:
    """What `to_toml` wrote.

    Raises:
        ValueError: it is not that.
    """
    import tomllib

    usual = {"date": "", "version": "", "title": "", "cold": False}
    table = tomllib.loads(text).get("tuned", [])
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise ValueError("tuned is no list of tables")
    return [_tuned({**usual, **row, "problem": json.dumps(row.get("problem"))}) for row in table]


def read_toml(path: Path) -> list[Tuned]:
    """Findings of a file in TOML.

    Raises:
        DatabaseError: it has others.
    """
    try:
        return from_toml(path.read_text())
    except (OSError, ValueError) as error:
        raise DatabaseError(f"{path} has no tuned schedules ({error}); `portmm tuned --export` writes them") from error


def find(p: Problem, target: Target, threads: int) -> list[Tuned]:
    """Findings for a problem, the nearest first: of this chip, architecture, vendor; the user's, then those shipped.

    Those with warm caches come before those with cold ones.

    Raises:
        DatabaseError: the user's database cannot be read.
    """
    path = tuned_database()
    text, built = told(p), architecture(target)
    kept: list[Tuned] = []
    if path is not None and path.exists():
        near = "problem = ? AND threads = ? AND (architecture = ? OR vendor = ?)"
        kept = list(_sound(_select(path, near, (text, threads, built, target.vendor)), path))
    known = kept + ([] if path is None else _shipped(target.vendor, built).get((text, threads), []))
    wanted = {"chip": target.name, "architecture": built, "vendor": target.vendor}
    found = []
    for level in LEVELS:
        like = [x for x in known if _same(x, level, wanted) and x not in found]
        found += sorted(like, key=lambda x: x.cold)
    return found


def tuned_rows(p: Problem, target: Target, threads: int) -> frozenset[int]:
    """Values of M for which there may be findings, of problems that are like `p` but for M.

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
    """Rows of the findings in a database; `state` tells whether it has been written since."""
    del state
    with opened(path) as base:
        found = base.execute("SELECT DISTINCT problem, threads FROM findings").fetchall()
    try:
        return _by_kind((Problem(**json.loads(text)), int(threads)) for text, threads in found)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DatabaseError(f"{path} has a problem that is none ({error!r}); remove the row") from error


@lru_cache(maxsize=16)
def _rows_shipped(vendor: str, built: str) -> dict[Any, frozenset[int]]:
    return _by_kind((x.problem, x.threads) for found in _shipped(vendor, built).values() for x in found)


def _by_kind(found: Iterable[tuple[Problem, int]]) -> dict[Any, frozenset[int]]:
    rows: dict[Any, set[int]] = {}
    for p, threads in found:
        rows.setdefault((p.but_rows, threads), set()).add(p.m)
    return {key: frozenset(values) for key, values in rows.items()}


def _same(x: Tuned, level: str, wanted: dict[str, str]) -> bool:
    """A finding is of this chip, of like ones, or of this vendor's for the same architecture family."""
    if level == "chip":
        return (x.chip, x.architecture) == (wanted["chip"], wanted["architecture"])
    if level == "architecture":
        return x.architecture == wanted["architecture"]
    return x.vendor == wanted["vendor"] and x.architecture.partition("/")[0] == wanted["architecture"].partition("/")[0]


@lru_cache(maxsize=16)
def _shipped(vendor: str, built: str) -> dict[tuple[str, int], list[Tuned]]:
    """Shipped findings of a vendor or an architecture, by problem and threads."""
    found: dict[tuple[str, int], list[Tuned]] = {}
    marks = (f'\nvendor = "{vendor}"\n', f'\narchitecture = "{built}"\n')
    for file in sorted(resources.files("portmm.targets.tuned").iterdir(), key=lambda x: x.name):
        # Reading TOML is slow: only what may be of use.
        if file.name.endswith(".toml") and any(mark in (text := file.read_text()) for mark in marks):
            for x in from_toml(text):
                found.setdefault((told(x.problem), x.threads), []).append(x)
    return found
