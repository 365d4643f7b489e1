"""Journal of a search, from which an interrupted one continues.

Owns `Machine`, what results depend on, and `Journal`: each trial is written as it ends, each case as it ends, to two
tables of the file that holds the tuned schedules. Nothing is measured twice for the same problem, threads, caches,
target and generator; several processes may write at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any, NamedTuple

from portmm.comparison.case import Case
from portmm.comparison.limit import chip
from portmm.dispatch import config
from portmm.dispatch.tuned_schedule import architecture
from portmm.dispatch.tuning_database import opened
from portmm.runtime import route_cache
from portmm.tuning.proposals import installed
from portmm.tuning.records import Trial, TunedCase
from portmm.version import VERSION

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


class Machine(NamedTuple):
    """A machine that tunes, as far as results depend on it.

    Attributes:
        name: of its target.
        chip: the model name of the processor.
        key: the target, its architecture, and the model name of the processor.
        generator: digest of everything that determines the code of a schedule.
        searches: Optuna is installed there.
        threads: the most threads of a call.
    """

    name: str
    chip: str
    key: str
    generator: str
    searches: bool
    threads: int


def identify() -> Machine:
    """The machine of this process."""
    target = config.target()
    key = f"{target.name} {architecture(target)} {chip()}"
    version = hashlib.sha256("\n".join((VERSION, *route_cache.generator())).encode()).hexdigest()[:16]
    return Machine(target.name, chip(), key, version, installed(), config.get_num_threads())


@dataclass(frozen=True, slots=True)
class Journal:
    """The tables, restricted to the rows of one run of `tune`.

    Attributes:
        path: the file; None to store nothing.
        threads: the most threads of a call.
        cold: caches are emptied before each call.
        machine: where trials run.
        search: the kind of search, and
        most: the most candidates of a case: a smaller search does not finish a case for a larger one.
    """

    path: Path | None
    threads: int
    cold: bool
    machine: Machine
    search: str
    most: int | None

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

    def finished(self, case: Case, share: float) -> TunedCase | None:
        """Stored result of a case whose search was complete, or had at least `share` seconds; None without one."""
        if self.path is None:
            return None
        with self._open() as base:
            row = base.execute(_OUTCOME, self._key(self._text(case))).fetchone()
        outcome: dict[str, Any] | None = json.loads(row[1]) if row else None
        if not outcome or not (outcome["finished"] or row[0] >= share):
            return None
        return TunedCase(case=case, trials=tuple(self.trials(outcome["problem"])), **outcome)

    def finish(self, result: TunedCase, share: float) -> None:
        """Store the result of a case that was searched for `share` seconds."""
        outcome = {name: value for name, value in asdict(result).items() if name not in ("case", "trials")}
        if self.path is None:
            return
        with self._open() as base:
            base.execute(
                "INSERT OR REPLACE INTO tuned_cases VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*self._key(self._text(result.case)), share, json.dumps(outcome)),
            )

    def _text(self, case: Case) -> str:
        effort = f"{self.search if self.machine.searches else 'candidates'} {self.most or 'all'}"
        return json.dumps([asdict(case), effort], sort_keys=True)

    def _key(self, problem: str) -> tuple[str, int, int, str, str]:
        return problem, self.threads, int(self.cold), self.machine.key, self.machine.generator

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
