"""Autotuner: measures schedules and stores the fastest of this machine.

Owns everything of `portmm tune`: the search over schedules, the child process that
candidates run in, the journal that lets an interrupted search continue, and the report.

The cost model's selection is measured first, and every other candidate has to beat it:
alternating with it, twice, and with the right result. So a search can end at any time, and
the schedules that it stores are never slower than those of the cost model.

Importing this package imports no optimiser and starts no process.
"""

from portmm.tuning.records import Trial, TunedCase, Tuning
from portmm.tuning.tuner import tune

__all__ = ["Trial", "TunedCase", "Tuning", "tune"]
