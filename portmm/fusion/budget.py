"""Time of a search of programs: what candidates may take, with what its end takes kept back.

Owns `Budget`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from portmm.fusion import turns

PROOF = 0.6
"""Seconds of a kernel's proof, or of its compiler, on an idle core (Granite Rapids: 0.2 to 1.3)."""
KEPT = 0.6
"""Most of a budget that is kept back for its end."""
TURN = 0.02
"""Share of a budget for runs of a program in a turn."""
MOST_LOAD = 4.0


class Budget:
    """A budget in seconds.

    Attributes:
        start: of the search, by the monotonic clock: by default now.
        seconds: of all of it.
        kernels: whose proofs are at its end.
        load: seconds that pass for one of processor time.
        longest: seconds of the longest candidate so far.
    """

    def __init__(self, seconds: float, kernels: int = 2, start: float | None = None) -> None:
        self.start = time.monotonic() if start is None else start
        self.seconds, self.kernels = seconds, kernels
        self.load, self.longest = 1.0, 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        """Seconds to its end; below 0 from there on."""
        return self.seconds - self.elapsed

    @property
    def end(self) -> float:
        """When it ends, by the monotonic clock: a proof of a kernel that lasts until then is given up."""
        return self.start + self.seconds

    @property
    def turn(self) -> float:
        """Seconds of all runs of a program in a turn."""
        return min(turns.LONGEST, TURN * self.seconds)

    @property
    def proof(self) -> float:
        """Seconds of the certificate."""
        return PROOF * self.kernels * self.load

    @property
    def kept(self) -> float:
        """Seconds that are kept back for the last draw and the certificate."""
        draw = 2 * turns.FINAL * self.short(turns.SHORT) * self.load
        return min(KEPT * self.seconds, draw + self.proof)

    @property
    def lasts(self) -> bool:
        """Whether another candidate may be compiled and measured, which takes as long as the longest so far."""
        return self.left - self.kept > self.longest

    @property
    def lasts_for_kernel(self) -> bool:
        """Whether a kernel of the whole function may be, which is always compiled."""
        return self.lasts and self.left - self.kept > PROOF * self.load

    def short(self, most: float) -> float:
        """Seconds of all runs of a program in a turn of the last draw."""
        return min(most, TURN * self.seconds)

    @contextmanager
    def candidate(self) -> Iterator[None]:
        """Count the time of a candidate."""
        began = time.monotonic()
        yield
        self.longest = max(self.longest, time.monotonic() - began)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the load by what one thread does without waiting."""
        began, own = time.perf_counter(), time.thread_time()
        yield
        passed, worked = time.perf_counter() - began, time.thread_time() - own
        self.load = min(MOST_LOAD, max(1.0, passed / worked if worked > 0 else 1.0))
