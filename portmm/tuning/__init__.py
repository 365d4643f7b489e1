"""The fastest schedules of this machine, measured.

Owns everything of `portmm tune`: the search over schedules, the child process that
candidates run in, the journal that lets a search go on, and what is reported. On the top
floor, F8: it may import anything of portmm, and nothing of portmm imports it but the
command line.

The cost model's choice is measured first, and is what everything else has to beat: in
turns, twice, and with the right result. So a search can end at any time, and what
it leaves is never slower than what there was.

Importing this package imports no optimiser and starts no process.
"""

from portmm.tuning.records import Trial, TunedCase, Tuning
from portmm.tuning.tuner import tune

__all__ = ["Trial", "TunedCase", "Tuning", "tune"]
