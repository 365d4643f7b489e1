"""Lookup of tuned schedules, in the user's database and in the tables that the package ships.

A tuned schedule is looked up by chip, then by architecture (its best
instruction set), then by vendor; each in the user's database before the shipped
one. Callers must check that it is legal (`cpu_neighbourhood.unsound`): a database
is data, perhaps of another version or from another person.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from portmm.build.cache import tuned_database
from portmm.dispatch.tuned_schedule import Tuned, architecture, from_toml, problem_from, problem_text
from portmm.dispatch.tuning_database import problems, selected
from portmm.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from portmm.spec.problem import Problem
    from portmm.target.target import Target

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
