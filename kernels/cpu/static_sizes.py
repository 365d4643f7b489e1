"""Sizes and strides that are compiled in: names of a kernel's arguments, with their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule


def constants(s: Schedule) -> tuple[tuple[str, int], ...]:
    """m, n, k and the strides of dense operands of a static schedule; nothing of another."""
    if s.static is None:
        return ()
    m, n, k = s.static
    a = (("a_m", k), ("a_k", 1)) if s.a.layout == "row" else (("a_m", 1), ("a_k", m))
    b = (("b_k", n), ("b_n", 1)) if s.b.layout == "row" else (("b_k", 1), ("b_n", k))
    return (("m", m), ("n", n), ("k", k), ("c_m", n), ("c_n", 1), *a, *b)
