"""Database of tuned schedules, measured to be faster than the cost model's: one SQLite file.

Owns the file: its schema, transactions, merging and clearing. `tuning` measures, `tuned_lookup` reads on the way to a
kernel.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from portmm.dispatch.tuned_schedule import COLUMNS, Tuned, of_row, read_toml
from portmm.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from sqlite3 import Connection

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
