"""portmm beside the libraries that a user could call instead.

Owns everything of `portmm compare`: the suite of shapes, one adapter per
library, the worker process that each library runs in, the coordinator that
takes turns between them, and the report. On the top floor, F8: it may import
anything of portmm, and nothing of portmm imports it but the command line.

A ratio is only worth its measurement, so: one process per library, because a
library's spinning threads and dispatch variables disturb its neighbours; only
one process runs at a time; contenders take turns within each round, so that a
clock that drifts drifts for all; the ratio is formed within a round and the
median taken over rounds; inputs are random; every result is checked against a
wider type before and after it is timed.

Importing this package imports no library and starts no process.
"""

from portmm.comparison.contest import compare
from portmm.comparison.peers import CONTENDERS, Contender
from portmm.comparison.report import Entrant, Entry, Report, Result
from portmm.comparison.suite import Case, cases

__all__ = ["CONTENDERS", "Case", "Contender", "Entrant", "Entry", "Report", "Result", "cases", "compare"]
