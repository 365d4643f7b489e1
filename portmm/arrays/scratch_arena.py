"""Scratch memory between the kernels of fused programs: an arena for each thread that runs one, within one budget.

Owns `Arena`, and the statements by which a program acquires one.

A program takes an arena off a list that all programs and threads share, and puts it back at the end, so that a program
that runs inside it, or in another thread meanwhile, gets another arena: there are as many as programs run at once, and
threads that are idle or end hold none. The list is a stack: a single thread always gets the same arena. (A list for
each thread takes `threading.local`, 100 ns of a call of 2 us.)

Tables of operands contain addresses in an arena, so they belong to a program *and* an arena, and are stored in the
arena: a call whose tables are there computes no address, and has exclusive use of them. An arena that is too small is
replaced, and its tables are rebuilt.

All arenas together stay within `SHARE` of the budget, and the larger workspaces of kernels (runtime/host.c) within the
rest. A program for which there is no room even if all free arenas are dropped gets memory for one call.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

import numpy as np

from portmm.arrays import numpy_arrays, pages, scratch_budget
from portmm.runtime.cpu import runtime
from portmm.util.records import dataclass

SHARE = 0.4
"""Fraction of the budget for arenas: 64 MiB of the default."""
LEAST = 1 << 16
"""Least bytes of an arena: 16 pages."""
HUGE = 1 << 22
"""Bytes from which huge pages pay, as in NumPy."""
MOST_TABLES = 1 << 21
"""Bytes of tables in an arena before they are dropped: those of a thousand programs of a few kernels."""

OBJECTS = 512
"""Bytes of the objects that hold the tables of one program."""

_numbers = count()


class Memory:
    """The memory of an arena.

    Attributes:
        bytes: the memory itself.
        tables: bytes of the tables that point into it.
    """

    __slots__ = ("__weakref__", "bytes", "tables")

    def __init__(self, size: int, *, lasts: bool) -> None:
        self.bytes = _pages(size) if lasts else numpy_arrays.aligned_empty(size, np.uint8)
        self.tables = 0


Arena = dict[int, Any]
"""Tables of programs, by the programs' numbers, and at `OWN` the memory that they point into."""
OWN = -1

_waiting: list[Arena] = []
_NOTHING: Arena = {}
"""Stands for an arena where none is free."""


class Make(Protocol):
    """The maker of a program's tables for an arena at an address."""

    def __call__(self, memory: np.ndarray[Any, Any], address: int) -> tuple[Any, ...]:
        """The tables."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The scratch memory and tables that a program needs.

    Attributes:
        number: of the program.
        size: bytes of memory.
        tables: bytes of its tables.
        make: builds them.
    """

    number: int
    size: int
    tables: int
    make: Make


def layout(size: int, tables: int, make: Make) -> Layout:
    """The layout of a new program; `tables` are the bytes of its numbers alone."""
    return Layout(next(_numbers), size, tables + OBJECTS, make)


def fitted(arena: Arena, wanted: Layout) -> tuple[list[Arena], Arena, Any]:
    """The list that the arena returns to after the call, the arena, and the tables of a program in it.

    Args:
        arena: a free one that lacks the tables, or an empty one.
        wanted: the needs of the program.
    """
    after = _waiting
    if not arena or arena[OWN].bytes.size < wanted.size:
        after, arena = _larger(arena, wanted.size)
    memory: Memory = arena[OWN]
    if memory.tables > MOST_TABLES:
        arena.clear()
        arena[OWN], memory.tables = memory, 0
    tables = arena[wanted.number] = wanted.make(memory.bytes, memory.bytes.ctypes.data)
    memory.tables += wanted.tables
    return after, arena, tables


def _larger(old: Arena, size: int) -> tuple[list[Arena], Arena]:
    """A larger arena, and the list that it returns to after the call: none if it is beyond the budget."""
    most = int(scratch_budget.budget() * SHARE)
    with scratch_budget.lock:
        others = scratch_budget.kept() - (old[OWN].bytes.size if old else 0)
        with suppress(IndexError):  # no free one is left
            while most - others < size <= most:
                dropped = _waiting.pop(0)
                others -= dropped[OWN].bytes.size
                dropped.clear()
        room = most - others
        if size > room:
            if old:
                _waiting.append(old)  # for programs that it still fits
            return [], {OWN: Memory(size, lasts=False)}
        old.clear()
        # Doubled, so that slowly growing shapes do not replace it each time.
        doubled = max(LEAST, 1 << (size - 1).bit_length())
        memory = Memory(max(size, min(doubled, room)), lasts=True)
        scratch_budget.arenas.add(memory)
        scratch_budget.bound(runtime())
    return _waiting, {OWN: memory}


def _pages(size: int) -> np.ndarray[Any, Any]:
    """Memory that returns to the system as soon as its last reference goes."""
    memory = pages.anonymous(size)
    if size >= HUGE:
        pages.advise_huge(memory, 0, size)
    return np.frombuffer(memory, np.uint8)


def text(body: list[str], need: Layout) -> tuple[list[str], dict[str, Any]]:
    """The statements of a program around its body, which uses its tables as `state`, and the names that they need."""
    lines = [
        "after, arena = waiting, NOTHING",
        "try:", "  arena = waiting.pop()", f"  state = arena[{need.number}]",
        "except LookupError: after, arena, state = fitted(arena, need)",
        "try:", *(f"  {x}" for x in body), "finally: after.append(arena)",
    ]  # fmt: skip
    return lines, {"waiting": _waiting, "NOTHING": _NOTHING, "fitted": fitted, "need": need}


def _in_child() -> None:
    """Forget the arenas of programs that ran in other threads when this process was forked."""
    scratch_budget.arenas.clear()
    scratch_budget.arenas.update(x[OWN] for x in _waiting)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
