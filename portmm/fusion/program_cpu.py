"""The Python that calls kernels, one after the other.

Owns `Writer`, which writes a function of a call's arrays as text, with all shapes and
strides in it, and `Kernel`, what is told of a step. Imports `arrays.numpy_arrays`, `trace.buffers`, and the run
time. What does not change from call to call is kept, as a tuple: the arguments of kernels, the tables of
their operands, and arrays in the memory between kernels, which lies in the arena of a thread (`scratch`). A call
fills in addresses.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays, scratch_arena
from portmm.runtime.cpu import runtime
from portmm.spec.epilogue import AXES
from portmm.trace.buffers import Arena, Place

if TYPE_CHECKING:
    from collections.abc import Callable

ROW = 1 + len(AXES)
"""Integers of an operand in the argument block: an address, strides."""
WORDS = 26
"""Integers of a step of `execute_all`."""
ARENA, TABLE, NUMBERS = "A", "t", "n"
"""Addresses that belong to a state: of memory between kernels, of operands, of numbers."""
MOST_STATES = 2
"""States of a program without memory between kernels that are kept: calls in as many threads need nothing new."""
_USED = re.compile(r"\bS\[(\d+)\]")


class ChangedError(Exception):
    """A call of NumPy between kernels gave another shape or type than before."""


@dataclass(eq=False, slots=True)
class Kernel:
    """One step of a program.

    Attributes:
        kind: "product", "rows", "copy", "numpy", or a function of portmm's that is called as it is.
        what: the first operation, in the user's words.
        lines: where its operations are.
        fused: what it computes beside the first.
        text: the fused expressions, or nothing.
        detail: the problem, or the shape that is gone over.
        notes: what else there is to say.
    """

    kind: str
    what: str
    lines: tuple[str, ...]
    fused: tuple[str, ...] = ()
    text: str = ""
    detail: str = ""
    notes: tuple[str, ...] = ()


class Writer:
    """A program, while it is written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "empty": np.empty, "execute": runtime().execute_all, "address": runtime().address,
        }  # fmt: skip
        self.arena = Arena()
        self.table: list[int] = []
        self.words: list[int] = []
        self.fixed: list[tuple[str, int, str, int]] = []
        self.waiting: list[Any] = []
        self.numbers = 0
        self.held: list[tuple[int, tuple[int, ...], Any]] = []

    def name(self, prefix: str, value: Any) -> str:
        """A name for something in the text."""
        made = f"{prefix}{len(self.names)}"
        self.names[made] = value
        return made

    def line(self, text: str) -> None:
        """Something that does not depend on kernels that wait."""
        self.lines.append(text)

    def flush(self) -> None:
        """Run the kernels that wait."""
        if self.waiting:
            routes = self.name("r", tuple(self.waiting))
            start = len(self.words) - WORDS * len(self.waiting)
            self.lines.append(f"execute({routes}, w+{8 * start})")
            self.waiting = []

    def put(self, where: str, at: int, root: str, offset: int) -> None:
        """An address in an argument or a table: known to a state, or filled in by each call."""
        if root in (ARENA, TABLE, NUMBERS):
            self.fixed.append((where, at, root, offset))
        else:
            self.lines.append(f"{where}[{at}] = {root}{f'+{offset}' if offset else ''}")

    def execute(self, route: Any, numbers: list[int], places: list[tuple[str, int] | None], outer: Any = None) -> None:
        """A kernel: m, n, k, batch, strides of A, B and C, and where these, operands and numbers are."""
        start = len(self.words)
        m, rest = numbers[:4], numbers[4:]
        words = [*m, 0, *rest[:3], 0, *rest[3:6], 0, *rest[6:], *(0,) * 10]
        if outer is not None:
            self.names[f"u{len(self.names)}"] = outer  # lives as long as the program
            words[16:18] = runtime().address(outer), len(outer)
        self.words += words
        for at, place in zip((4, 8, 12, 24, 25), places, strict=True):
            if place is not None:
                self.put("W", start + at, *place)
        self.waiting.append(route)

    def operands(
        self, places: list[Place], strides: list[tuple[int, int, int]], offsets: tuple[int, ...]
    ) -> tuple[str, int]:
        """Operands of one run of a kernel: where they are in the table of all."""
        start = len(self.table)
        for place, step, moved in zip(places, strides, offsets, strict=True):
            self.put("T", len(self.table), place.root, place.offset + moved * place.like.itemsize)
            self.table += [0, *step, *(0,) * (ROW - 4)]
        return TABLE, 8 * start

    def give(self, leaves: list[int]) -> tuple[str, int] | None:
        """The numbers of a kernel: where they are among all."""
        if not leaves:
            return None
        start = self.numbers
        for i in leaves:
            self.lines.append(f"N[{self.numbers}] = L{i}")
            self.numbers += 1
        return NUMBERS, 4 * start

    def room(self, like: Any, at: int) -> str:
        """Memory between kernels, as an array in the text; the first is all of it."""
        self.held.append((at, like.shape, like.dtype))
        return f"S[{len(self.held)}]"

    def program(self, leaves: int, result: str) -> tuple[Callable[[Any], Any], str]:
        """A function of the arrays, weights and numbers of a call, and its text."""
        self.flush()
        given = [f"{''.join(f'L{i}, ' for i in range(leaves))}= leaves"] if leaves else []
        body = ["T, W, N, S, w = state", *given, *self.lines]
        make = self.maker([*body, result])
        if self.arena.size:
            need = scratch_arena.layout(self.arena.size, 8 * (len(self.table) + len(self.words)), make)
            lines, names = scratch_arena.text([*body, f"return {result}"], need)
        else:
            keep = f"if len(free) < {MOST_STATES}: free.append(state)"
            lines = [
                "try: state = free.pop()", "except IndexError: state = make()",
                *body, f"result = {result}", keep, "return result",
            ]  # fmt: skip
            names = {"free": [], "make": lambda: make(numpy_arrays.aligned_empty(1, np.uint8), 0)}
        text = "def run(leaves):\n" + "".join(f"  {x}\n" for x in lines)
        space = {**self.names, **names}
        exec(compile(text, "<portmm.fuse>", "exec"), space)  # noqa: S102 - the text above, of literals and our names
        return space["run"], text

    def maker(self, body: list[str]) -> scratch_arena.Make:
        """The maker of a program's tables, and of those arrays between kernels that its text names."""
        fixed = self.fixed
        used = {int(i) for line in body for i in _USED.findall(line)}
        held = [x if i in used else None for i, x in enumerate(self.held, 1)]
        table, words, numbers = self.table or [0], self.words or [0], [0.0] * max(self.numbers, 1)

        def make(memory: np.ndarray[Any, Any], address: int) -> tuple[Any, ...]:
            filled: dict[str, Any] = {"T": array("q", table), "W": array("q", words), "N": array("f", numbers)}
            roots = {ARENA: address}
            roots |= {TABLE: filled["T"].buffer_info()[0], NUMBERS: filled["N"].buffer_info()[0]}
            for where, at, root, offset in fixed:
                filled[where][at] = roots[root] + offset
            views = [None if x is None else np.ndarray(x[1], x[2], memory, x[0]) for x in held]
            return (*filled.values(), (memory, *views), filled["W"].buffer_info()[0])

        return make
