"""The runs of k over which floats are summed: blocked summation.

Owns their length. A single chain of K additions has an error that grows with K; here each run of k has accumulators
of its own, which start at zero, and the sums of runs are added in their order, so that the error grows with the length
of a run and with their number instead (Higham, "Accuracy and Stability of Numerical
Algorithms", 2002, section 4.2; Castaldo, Whaley and Chronopoulos, SIAM J. Sci. Comput. 31(2), 2008). Runs depend on K
alone, not on blocking, threads or rows, and so do results. There are exceptions: those of split-K start
where the k of a thread starts, and those of dot products and of int4 values that are multiplied in place count
vectors and groups. `deterministic` excludes all three. Integer sums are exact and have no runs.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from portmm.spec.dtype import accumulator

if TYPE_CHECKING:
    from portmm.target.atom import Atom

RUN = 320
"""Longest run, in elements of k. OpenBLAS adds to C once per block of k, of 320 to 448 elements on x86-64, and its
errors are the reference: for uniform values rms 2.0 units (2**-24) at K = 1024 where OpenBLAS for Haswell, whose runs
are as long, has 2.0, and 6.3 at K = 262,144 where it has 6.3. With runs of 384 C of 4 x 16, which OpenBLAS sums in
several chains, had more than twice its errors."""
STEP = 32
"""Divisor of runs: a multiple of units, of words of int4 values, and of the blocks of k of streams."""


def chained(atom: Atom) -> bool:
    """Whether sums of an atom are one chain over all of k.

    Sums of integers are exact. Sums of tiles can only be added through memory, which would take 3 % of the time
    at runs of 4096.
    """
    return atom.acc == "s32" or atom.tiled


def sets(a: str, b: str) -> int:
    """Accumulators of a thread of a device for each of its sums of products of two types: of all runs, and of one."""
    return 1 if accumulator(a, b) == "s32" else 2


class BlockOfK(Enum):
    """Relation of a block of k to runs."""

    CHAIN = "sums are one chain over all of k, without runs"
    PART = "part of a run"
    RUN = "one run"
    RUNS = "several runs"

    @property
    def continues(self) -> bool:
        """Whether accumulators start with the sums of the block before; else at zero."""
        return self in (BlockOfK.CHAIN, BlockOfK.PART)


def block_of_k(kc: int, kr: int, k: int | None = None) -> BlockOfK:
    """Relation of blocks of KC units to runs, of sums that have runs.

    Sums of a run that has parts are stored and loaded once more in each of them, so only streams, of few rows, have
    them; KC from the size of L1 is 100 to 600, and panels of B of a whole run stream well from L2.

    Args:
        kc: KC in units, 0 for all of k in one block.
        kr: elements of k in a unit.
        k: elements of k where their number is compiled in.
    """
    if not kc:
        return BlockOfK.RUNS if k is None or k > RUN else BlockOfK.RUN
    if kc < _shortest(kr):
        return BlockOfK.PART
    return BlockOfK.RUNS if runs_in(kc, kr) > 1 else BlockOfK.RUN


def runs_in(kc: int, kr: int) -> int:
    """Number of runs in a block of KC units of k that has no part of one."""
    return max(1, kc * kr // RUN)


def _shortest(kr: int) -> int:
    """KC in units from which a block of k consists of whole runs."""
    return RUN // kr // 4


def depth(kc: int, atom: Atom, most: int) -> int:
    """KC in units, rounded to whole runs where it is not much less than one.

    Args:
        kc: the depth that suits L1.
        atom: the multiply-add.
        most: the depth that fits L2; a longer run is split into parts.
    """
    if chained(atom) or block_of_k(kc, atom.k_pack) is BlockOfK.PART:
        return kc
    run = RUN // atom.k_pack
    if run > most:
        return max(1, min(most, _shortest(atom.k_pack) - 1))
    return run * max(1, min(round(kc / run), most // run))
