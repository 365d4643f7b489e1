"""The roofline: the time of terms that overlap, and of terms that do not, on CPUs and devices alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def roofline(overlapped: Sequence[Any], added: Sequence[Any], exposed: float) -> Any:
    """Seconds of a kernel: the longest overlapped term, a share of the others, and all added terms.

    Args:
        overlapped: seconds of terms that overlap, or columns of them; overlap is never perfect.
        added: of those that do not.
        exposed: share of the shorter overlapped terms that adds to the time.
    """
    longest = total = overlapped[0]
    for each in overlapped[1:]:
        longest, total = np.maximum(longest, each), total + each
    return longest + exposed * (total - longest) + sum(added)
