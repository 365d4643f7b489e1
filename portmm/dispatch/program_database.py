"""Programs that a search has found, in the tuning database: rewrites of a function's structure, with a certificate.

Owns their table. The key is a digest of the function's graph of labelled operations, which has no sizes: what was found
for some sizes is verified and used for others.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.build.cache import tuned_database
from portmm.dispatch.tuning_database import opened
from portmm.errors import DatabaseError

if TYPE_CHECKING:
    from pathlib import Path

_TABLE = (
    "CREATE TABLE IF NOT EXISTS found_programs (key TEXT NOT NULL, chip TEXT NOT NULL, threads INTEGER NOT NULL, "
    "path TEXT NOT NULL, certificate TEXT NOT NULL, trust REAL NOT NULL, PRIMARY KEY (key, chip, threads))"
)


class Entry(NamedTuple):
    """A stored program.

    Attributes:
        path: names of rewrites, each with its number among the alternatives.
        certificate: of its equivalence.
        trust: its measured gain over the predicted one, which predictions for other sizes are multiplied with.
    """

    path: tuple[tuple[str, int], ...]
    certificate: dict[str, Any]
    trust: float


def store(key: str, chip: str, threads: int, entry: Entry) -> None:
    """Store a program, in the place of an earlier one; a database that cannot be written is left alone."""
    file = tuned_database()
    if file is None:
        return
    with suppress(DatabaseError), opened(file, write=True) as base:
        base.execute(_TABLE)
        row = (key, chip, threads, json.dumps(list(entry.path)), json.dumps(entry.certificate), entry.trust)
        base.execute("INSERT OR REPLACE INTO found_programs VALUES (?, ?, ?, ?, ?, ?)", row)


def present() -> bool:
    """Whether the tuning database has programs; looked up again when its file changes."""
    file = tuned_database()
    try:
        stamp = (str(file), file.stat().st_mtime_ns) if file is not None else None
    except OSError:
        stamp = None
    if stamp is None or file is None:
        return False
    if stamp not in _present:
        _present.clear()
        _present[stamp] = _has_programs(file)
    return _present[stamp]


_present: dict[tuple[str, int], bool] = {}


def _has_programs(file: Path) -> bool:
    with suppress(DatabaseError), opened(file) as base:
        return bool(base.execute("SELECT count(*) FROM sqlite_master WHERE name = 'found_programs'").fetchone()[0])
    return False


def count(file: Path) -> int:
    """The number of programs in a database."""
    with suppress(DatabaseError, OSError), opened(file) as base:
        if base.execute("SELECT count(*) FROM sqlite_master WHERE name = 'found_programs'").fetchone()[0]:
            return int(base.execute("SELECT count(*) FROM found_programs").fetchone()[0])
    return 0


def find(key: str, chip: str, threads: int) -> Entry | None:
    """The program of a structure on a chip, or None."""
    file = tuned_database()
    if file is None or not present():
        return None
    with suppress(DatabaseError, ValueError), opened(file) as base:
        query = "SELECT path, certificate, trust FROM found_programs WHERE key = ? AND chip = ? AND threads = ?"
        row = base.execute(query, (key, chip, threads)).fetchone()
        if row is not None:
            path, certificate = map(json.loads, row[:2])
            return Entry(tuple((str(name), int(i)) for name, i in path), certificate, float(row[2]))
    return None
