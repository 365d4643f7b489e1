"""Database of tuned schedules, measured to be faster than the cost model's: one SQLite file, and tables of the package.

Owns the file: its schema, transactions, merging and clearing; and `find`, the look-up on the way to a kernel: by chip,
then by architecture (its best instruction set), then by vendor; each in the user's database before the shipped one.
Callers must check that a schedule is legal (`cpu_neighbourhood.unsound`): a database is data, perhaps of another
version or from another person.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from portmm.build.cache import tuned_database
from portmm.dispatch.tuned_schedule import (
    COLUMNS,
    Tuned,
    architecture,
    from_toml,
    of_row,
    problem_from,
    problem_text,
    read_toml,
)
from portmm.errors import DatabaseError
from portmm.util import locks

if TYPE_CHECKING:
    from pathlib import Path
    from sqlite3 import Connection

    from portmm.spec.problem import Problem
    from portmm.target.target import Target

SCHEMA = 1
PATIENCE = 30.0
"""Seconds to wait for another process that is writing."""
_KEY = ("chip", "architecture", "problem", "threads", "cold")


@contextmanager
def opened(path: Path, *, write: bool = False) -> Iterator[Connection]:
    """A connection to a database, created if it is missing and to be written; writes are one transaction.

    Raises:
        DatabaseError: the file is no such database, is of another version, or cannot be used.
    """
    try:
        import sqlite3
    except ImportError as error:
        raise DatabaseError(
            f"{path} cannot be used: this Python has no SQLite ({error}); use no database with PORTMM_TUNED=off"
        ) from error
    try:
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
        mode = "rwc" if write else "ro"
        place = f"{path.absolute().as_uri()}?mode={mode}"
        # A fork waits: a child would find locks of SQLite's held for ever.
        with locks.starting, closing(sqlite3.connect(place, uri=True, timeout=PATIENCE)) as base:
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
        columns = ", ".join(f"{name} {kind} NOT NULL" for name, kind in COLUMNS.items())
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
    table = [x.row() for x in schedules]
    names = ", ".join(COLUMNS)
    marks = ", ".join(f":{name}" for name in COLUMNS)
    with opened(path, write=True) as base:
        base.executemany(f"INSERT OR REPLACE INTO findings ({names}) VALUES ({marks})", table)  # noqa: S608
    return len(table)


def rows(path: Path) -> list[Tuned]:
    """All tuned schedules of a database, in an order that does not depend on their dates.

    Raises:
        DatabaseError: it is no such database.
    """
    return selected(path, f"1 ORDER BY {', '.join(_KEY)}")


def selected(path: Path, where: str, values: tuple[Any, ...] = ()) -> list[Tuned]:
    """The tuned schedules of the rows for which a condition in SQL holds.

    Raises:
        DatabaseError: it is no such database, or one of these rows is invalid.
    """
    with opened(path) as base:
        cursor = base.execute(f"SELECT {', '.join(COLUMNS)} FROM findings WHERE {where}", values)  # noqa: S608
        table = [dict(zip(COLUMNS, row, strict=True)) for row in cursor]
    try:
        return [of_row(row) for row in table]
    except ValueError as error:
        raise DatabaseError(f"{path}: {error}; remove the row, or move the file away") from error


def problems(path: Path) -> list[tuple[str, int]]:
    """The problems that have tuned schedules, as texts, with their limits of threads.

    Raises:
        DatabaseError: it is no such database.
    """
    with opened(path) as base:
        return base.execute("SELECT DISTINCT problem, threads FROM findings").fetchall()


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


def _key(x: Tuned) -> tuple[Any, ...]:
    row = x.row()
    return tuple(row[name] for name in _KEY)


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


LEVELS = ("chip", "architecture", "vendor")
"""Levels of a lookup, the nearest first."""


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
        # Rows of older versions spell a problem in another way: their field `post` was replaced by `fused`.
        near = """(problem = ? OR problem LIKE '%"post"%') AND threads = ? AND (architecture = ? OR vendor = ?)"""
        kept = [x for x in selected(path, near, (text, threads, isa_key, target.vendor)) if x.problem == p]
    known = kept + ([] if path is None else _shipped(target.vendor, isa_key).get((text, threads), []))
    wanted = {"chip": target.name, "architecture": isa_key, "vendor": target.vendor}
    matches = []
    for level in LEVELS:
        like = [x for x in known if _same(x, level, wanted) and x not in matches]
        matches += sorted(like, key=lambda x: x.cold)
    return matches


def _same(x: Tuned, level: str, wanted: dict[str, str]) -> bool:
    """Test whether a schedule was tuned on this chip, on this architecture, or on this vendor's with the same ISA."""
    if level == "chip":
        return (x.chip, x.architecture) == (wanted["chip"], wanted["architecture"])
    if level == "architecture":
        return x.architecture == wanted["architecture"]
    return x.vendor == wanted["vendor"] and x.architecture.partition("/")[0] == wanted["architecture"].partition("/")[0]


def tuned_rows(p: Problem, target: Target, threads: int) -> frozenset[int]:
    """Values of M that may have tuned schedules, of problems that equal `p` except for M.

    Raises:
        DatabaseError: the user's database cannot be read.
    """
    path = tuned_database()
    if path is None:
        return frozenset()
    try:
        info = os.stat(path)  # noqa: PTH116 - on the path of every new class of shapes
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
    try:
        return _by_kind((problem_from(text), int(threads)) for text, threads in problems(path))
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DatabaseError(f"{path} has a problem that is none ({error!r}); remove the row") from error


@lru_cache(maxsize=16)
def _rows_shipped(vendor: str, built: str) -> dict[Any, frozenset[int]]:
    return _by_kind((x.problem, x.threads) for schedules in _shipped(vendor, built).values() for x in schedules)


def _by_kind(tuned: Iterable[tuple[Problem, int]]) -> dict[Any, frozenset[int]]:
    rows: dict[Any, set[int]] = {}
    for p, threads in tuned:
        rows.setdefault((p.but_rows, threads), set()).add(p.m)
    return {key: frozenset(values) for key, values in rows.items()}


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
