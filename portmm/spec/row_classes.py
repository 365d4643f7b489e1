"""Classes of values of M that share one schedule.

Owns the boundaries of classes. Up to `SINGLE` rows each M is a class of its own: kernels keep that many rows in
registers, and one more slice of rows matters. Above, a class covers the values of M that round
up to the same number of five significant bits, so that there are `PER_OCTAVE` classes between a power of two and
the next. A class is a function of M alone: neither the order of calls nor the process changes the schedule of a
product. The C of the runtime computes the same classes (`last_of_class` in runtime/matmul.c), and looks up the route
of a class without calling Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.util.records import replace

if TYPE_CHECKING:
    from portmm.spec.problem import Problem

SINGLE = 32
"""M up to which a class is one value."""
PER_OCTAVE = 16
"""Classes from a power of two to the next: M varies by at most 1/16 within one."""


def row_class(m: int) -> tuple[int, int]:
    """The least and the largest M of the class of `m`."""
    if m <= SINGLE:
        return m, m
    step = 1 << ((m - 1).bit_length() - PER_OCTAVE.bit_length())
    last = -(-m // step) * step
    return last - step + 1, last


def last_of_class(m: int) -> int:
    """The largest M of the class of `m`."""
    return m if m <= SINGLE else row_class(m)[1]


def rows(p: Problem) -> tuple[int, int]:
    """The least and the largest M for which problems like `p` have the same schedule.

    Sizes that are compiled in are exact. Where C is by columns the kernel's rows are the columns of `p`.
    """
    return (p.m, p.m) if p.static or p.c == "col" else row_class(p.m)


def of_class(p: Problem) -> Problem:
    """The representative of the class of `p`: the problem with the largest M."""
    _, last = rows(p)
    return p if last == p.m else replace(p, m=last)
