"""Tables of tuning: the analytical choice beside the tuned one, and predicted beside measured time.

Owns the tables made of what `portmm tune --save` stores. Imports
`comparison.tables_cells`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def tuning(runs: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """A table for each chip."""
    return []


def tuning_cases(stem: str, data: dict[str, Any]) -> str:
    """Every case of a run."""
    return ""
