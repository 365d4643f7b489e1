"""Comparison of portmm with other libraries for matrix products.

Owns everything of `portmm compare`: the suite of shapes, one adapter per
library, the worker process that each library runs in, the coordinator that
alternates between them, and the report.

A ratio is only as good as its measurement, so: one process per library, because a
library's spinning threads and dispatch variables disturb the others; only
one process runs at a time; contenders alternate within each round, so that a drift
of the clock affects all of them; the ratio is formed within a round and the
median taken over rounds; inputs are random; every result is checked against a
wider type before and after it is timed.

Importing this package imports no library and starts no process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portmm.comparison.case import Case
    from portmm.comparison.contest import compare
    from portmm.comparison.peers import CONTENDERS, Contender
    from portmm.comparison.report import Entrant, Entry, Report, Result
    from portmm.comparison.shapes import cases

__all__ = ["CONTENDERS", "Case", "Contender", "Entrant", "Entry", "Report", "Result", "cases", "compare"]

# The command line needs only the command's options from here, so the rest is loaded on first use.
_LATER = {
    "compare": "contest",
    **dict.fromkeys(("CONTENDERS", "Contender"), "peers"),
    **dict.fromkeys(("Entrant", "Entry", "Report", "Result"), "report"),
    **dict.fromkeys(("Case", "cases"), "shapes"),
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'portmm.comparison' has no attribute {name!r}")
    from importlib import import_module

    return globals().setdefault(name, getattr(import_module(f"portmm.comparison.{_LATER[name]}"), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
