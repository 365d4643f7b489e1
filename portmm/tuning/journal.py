"""Journal of a search, from which an interrupted one continues.

Owns `Journal`: each trial is written as it ends, each case as it ends, to two tables of
the file that holds the tuned schedules. Nothing is measured twice for the same problem,
threads, caches, target and generator; several processes may write at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from portmm.comparison.case import Case
from portmm.dispatch.tuning_database import opened
from portmm.tuning.records import Trial

_KEY = "what TEXT, threads INTEGER, cold INTEGER, machine TEXT, generator TEXT"
_TABLES = (
    f"""CREATE TABLE IF NOT EXISTS trials ({_KEY}, schedule TEXT, workers INTEGER, state TEXT, predicted REAL,
        seconds REAL, reason TEXT,
        PRIMARY KEY (what, threads, cold, machine, generator, schedule, workers))""",
    f"""CREATE TABLE IF NOT EXISTS tuned_cases ({_KEY}, share REAL, found TEXT,
        PRIMARY KEY (what, threads, cold, machine, generator))""",
)
_SAME = "what = ? AND threads = ? AND cold = ? AND machine = ? AND generator = ?"
_FIELDS = "schedule, workers, state, predicted, seconds, reason"
_TRIALS = f"SELECT {_FIELDS} FROM trials WHERE {_SAME} ORDER BY rowid"  # noqa: S608 - of constants
_OUTCOME = f"SELECT share, found FROM tuned_cases WHERE {_SAME}"  # noqa: S608 - of constants


@dataclass(frozen=True, slots=True)
class Journal:
    """The tables, restricted to the rows of one run of `tune`.

    Attributes:
        path: the file; None to store nothing.
        threads: the most threads of a call.
        cold: caches are emptied before each call.
        machine: the target, and the model name of the processor.
        generator: version of portmm's files that generate kernels.
        effort: kind and size of the search: a smaller one does not finish a case for a larger one.
    """

    path: Path | None
    threads: int
    cold: bool
    machine: str
    generator: str
    effort: str = ""

    def trials(self, problem: str) -> list[Trial]:
        """Trials of a problem, in the order in which they were measured."""
        if self.path is None:
            return []
        with self._open() as base:
            rows = base.execute(_TRIALS, self._key(problem))
            return [Trial(*row) for row in rows]

    def keep(self, problem: str, trial: Trial) -> None:
        """Store a trial."""
        if self.path is None:
            return
        values = (trial.schedule, trial.workers, trial.state, trial.predicted, trial.seconds, trial.reason)
        with self._open() as base:
            base.execute(
                "INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*self._key(problem), *values),
            )

    def finished(self, case: Case, share: float) -> dict[str, Any] | None:
        """Stored outcome of a case whose search was complete, or had at least `share` seconds; None without one."""
        if self.path is None:
            return None
        with self._open() as base:
            row = base.execute(_OUTCOME, self._key(self._text(case))).fetchone()
        outcome: dict[str, Any] | None = json.loads(row[1]) if row else None
        return outcome if outcome and (outcome["finished"] or row[0] >= share) else None

    def finish(self, case: Case, share: float, outcome: dict[str, Any]) -> None:
        """Store the outcome of a case that was searched for `share` seconds."""
        if self.path is None:
            return
        with self._open() as base:
            base.execute(
                "INSERT OR REPLACE INTO tuned_cases VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*self._key(self._text(case)), share, json.dumps(outcome)),
            )

    def _text(self, case: Case) -> str:
        return json.dumps([asdict(case), self.effort], sort_keys=True)

    def _key(self, problem: str) -> tuple[str, int, int, str, str]:
        return problem, self.threads, int(self.cold), self.machine, self.generator

    @contextmanager
    def _open(self) -> Iterator[Connection]:
        """The file, in a transaction.

        Raises:
            DatabaseError: it is no such database, or cannot be written.
        """
        assert self.path is not None  # noqa: S101 - callers test it first
        with opened(self.path, write=True) as base:
            for table in _TABLES:
                base.execute(table)
            yield base
