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

from typing import TYPE_CHECKING

from portmm.spec.dtype import accumulator

if TYPE_CHECKING:
    from portmm.target.isa import Atom

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


def runs_in(kc: int, kr: int) -> int:
    """Number of runs in a block of KC units of k."""
    return max(1, kc * kr // RUN)


def _shortest(kr: int) -> int:
    """KC in units from which a block of k consists of whole runs."""
    return RUN // kr // 4


def parts(kc: int, kr: int) -> bool:
    """Whether blocks of KC units are parts of a run; larger ones consist of whole runs.

    Sums of a run that has parts are stored and loaded once more in each of them, so only streams, of few rows, have
    them; KC from the size of L1 is 100 to 600, and panels of B of a whole run stream well from L2.
    """
    return 0 < kc < _shortest(kr)


def depth(kc: int, atom: Atom, most: int) -> int:
    """KC in units, rounded to whole runs where it is not much less than one.

    Args:
        kc: the depth that suits L1.
        atom: the multiply-add.
        most: the depth that fits L2; a longer run is split into parts.
    """
    if chained(atom) or parts(kc, atom.k_pack):
        return kc
    run = RUN // atom.k_pack
    if run > most:
        return max(1, min(most, _shortest(atom.k_pack) - 1))
    return run * max(1, min(round(kc / run), most // run))
