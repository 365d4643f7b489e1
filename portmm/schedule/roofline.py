"""The roofline: the time of a kernel from its work, by term, on CPUs and devices alike.

Owns `Work`, the record of a predicted time, and the function from one to the other. The time of a kernel is that of
the longest of its overlapped terms, a share of the others, since overlap is never perfect, and all terms that do not
overlap. All of them are kept, so that `explain` can show the reasons of a selection. Numbers are floats, or arrays by
value of M, then by candidate, so that all candidates are predicted at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from portmm.util.records import dataclass

OPTIONAL = frozenset(("L3", "memory", "sums"))
"""Terms of CPUs that only some problems and schedules have."""


class Work(NamedTuple):
    """Work of a kernel in counts, which `roofline` divides by rates; of devices, that of the busiest processor.

    Attributes:
        counts: by the name of a term: multiply-adds, bytes, words, vectors, instructions, or cycles of computation
            and of latency; of memory, bytes that all processors load and store.
        waiting: cycles that nothing overlaps.
        filled: share of the rate of its units that a processor's warps reach.
    """

    counts: dict[str, Any]
    waiting: Any
    filled: float = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds, by term; of several candidates, by value of M, then by candidate.

    Attributes:
        seconds: the prediction.
        overlapped: terms of which the largest counts; 0 for levels that no data comes from.
        added: terms that add up.
    """

    seconds: Any
    overlapped: dict[str, Any]
    added: dict[str, Any]

    @property
    def bound(self) -> str:
        """The largest overlapped term."""
        return max(self.overlapped, key=self.overlapped.__getitem__)

    def at(self, row: int) -> list[Cost]:
        """The costs of all candidates for one value of M."""
        shape = self.seconds.shape

        def terms(arrays: dict[str, Any]) -> list[dict[str, float]]:
            every = [np.broadcast_to(x, shape)[row].tolist() for x in arrays.values()]
            named = (dict(zip(arrays, one, strict=True)) for one in zip(*every, strict=True))
            return [{name: x for name, x in one.items() if x or name not in OPTIONAL} for one in named]

        return list(map(Cost, self.seconds[row].tolist(), terms(self.overlapped), terms(self.added)))


def roofline(
    counts: Mapping[str, Any], rates: Mapping[str, Any], added: dict[str, Any], exposed: float,
    *, hertz: float = 0.0, scale: Any = 1.0,
) -> Cost:  # fmt: skip
    """The predicted time of counts.

    Args:
        counts: of overlapped terms.
        rates: of these, per cycle; terms without one are in cycles.
        added: seconds of terms that do not overlap.
        exposed: share of the shorter overlapped terms that adds to the time.
        hertz: cycles per second,
        scale: or seconds per cycle, times the share of the work that the busiest core has.
    """
    cycles = {name: count / rates[name] if name in rates else count for name, count in counts.items()}
    overlapped = {name: x / hertz if hertz else x * scale for name, x in cycles.items()}
    first, *others = overlapped.values()
    longest = total = first
    larger = max if isinstance(first, float) else np.maximum
    for each in others:
        longest, total = larger(longest, each), total + each
    return Cost(longest + exposed * (total - longest) + sum(added.values()), overlapped, added)
