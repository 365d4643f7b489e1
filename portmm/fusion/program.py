"""Python programs of fused functions: one call of a kernel after the other.

Owns `Text`, a function of a call's arrays as text, with all shapes and strides in it; `Writer`, that of a program on
the CPU; `Kernel`, the description of a step, and `Explained`, that of a program. The invariant state of a program on
the CPU is a tuple: the arguments of kernels, the tables of their operands, and arrays between kernels, whose memory is
the scratch arena of a thread. A call fills in addresses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from portmm.arrays import numpy_arrays, scratch_arena
from portmm.errors import TraceError
from portmm.runtime.cpu import runtime
from portmm.spec.problem import AXES, Problem
from portmm.trace.buffers import Arena, Place
from portmm.util.records import dataclass

ROW = 1 + len(AXES)
"""Integers of an operand in the argument block: an address, strides."""
WORDS = 20
"""Integers of a step of `execute_all`."""
ARENA, TABLE, NUMBERS = "A", "t", "n"
"""Roots of addresses in a state: of memory between kernels, of operands, of numbers."""
MOST_STATES = 2
"""States kept of a program without memory between kernels: calls in as many threads allocate nothing."""
_APART = str.maketrans(dict.fromkeys("()[]{},.:;=+-*/%<>!&|^~@'\"", " "))
"""Separators of names -> spaces; a regular expression takes longer to compile than a program to write."""


@dataclass(eq=False, slots=True)
class Kernel:
    """One step of a program.

    Attributes:
        kind: "product", "rows", "copy", "numpy", or the name of a function of portmm.
        what: the first operation, as the user named it.
        lines: lines of its operations.
        fused: names of the operations fused with the first.
        text: the fused expressions, or "".
        detail: the problem, or the iteration shape.
        notes: further remarks.
        problem: of a product.
        flop: multiplications and additions of a product or convolution.
        types: of attention: of queries, keys and values, and of the result.
    """

    kind: str
    what: str
    lines: tuple[str, ...]
    fused: tuple[str, ...] = ()
    text: str = ""
    detail: str = ""
    notes: tuple[str, ...] = ()
    problem: Problem | None = None
    flop: int = 0
    types: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Explained:
    """An explanation of a fused function for one kind of arguments.

    Attributes:
        name: of the function.
        kernels: in the order in which they run.
        blocked: line, and the reason why an operation there is not fused.
        notes: further remarks.
        source: the Python that calls the kernels.
        finding: the result of a search, or None: see `superoptimizer.Finding`.
    """

    name: str
    kernels: tuple[Kernel, ...]
    blocked: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    source: str
    finding: Any = None

    def graph(self) -> str:
        """A picture of the kernels and their operators as SVG, of a function that was searched.

        Raises:
            TraceError: it was not.
        """
        from portmm.fusion.mugraph_svg import svg

        graphs = () if self.finding is None else self.finding.graphs
        if not graphs:
            raise TraceError(f"{self.name} has no graph of labelled operations: fuse it with search=True")
        return svg(*graphs)

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.kernels)} kernel{'s' * (len(self.kernels) != 1)}"]
        for i, k in enumerate(self.kernels, 1):
            kind = "NumPy: " if k.kind == "numpy" else "" if k.kind == k.what else f"{k.kind}: "
            lines.append(f"  {i}. {kind}{k.what}{f'  {k.detail}' if k.detail else ''}  [{', '.join(k.lines)}]")
            if k.fused:
                lines.append(f"     fused: {', '.join(k.fused)}")
            lines += [f"     {x}" for x in k.notes]
        if self.blocked:
            lines.append("not fused:")
            lines += [f"  {where}: {why}" for where, why in self.blocked]
        lines += [f"note: {x}" for x in self.notes]
        return "\n".join(lines)


class Text:
    """A builder of a program's text.

    Attributes:
        lines: of its function.
        names: values in it.
    """

    def __init__(self, **names: Any) -> None:
        self.lines: list[str] = []
        self.names = names

    def name(self, prefix: str, value: Any) -> str:
        """A new name in the text, bound to a value."""
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def line(self, text: str) -> None:
        """Add a line that does not depend on pending kernels."""
        self.lines.append(text)

    def function(self, lines: list[str]) -> tuple[Callable[[Any], Any], str]:
        """The function of `leaves`, the arrays, weights and numbers of a call, and its text."""
        text = "def run(leaves):\n" + "".join(f"  {x}\n" for x in lines)
        namespace = dict(self.names)
        exec(compile(text, "<portmm.fuse>", "exec"), namespace)  # noqa: S102 - the text above, of literals and our names
        return namespace["run"], text


class Writer(Text):
    """A builder of the text and the state of a program on the CPU."""

    def __init__(self) -> None:
        super().__init__(empty=np.empty, execute=runtime().execute_all, address=runtime().address)
        self.arena = Arena()
        self.table: list[int] = []
        self.words: list[int] = []
        self.fixed: list[tuple[str, int, str, int]] = []
        self.pending: list[Any] = []
        self.numbers = 0
        self.arrays: list[tuple[int, tuple[int, ...], Any]] = []

    def flush(self) -> None:
        """Add a line that runs the pending kernels."""
        if self.pending:
            routes = self.name("r", tuple(self.pending))
            start = len(self.words) - WORDS * len(self.pending)
            self.lines.append(f"execute({routes}, w+{8 * start})")
            self.pending = []

    def put(self, where: str, at: int, root: str, offset: int) -> None:
        """Set an address in an argument block or a table: part of the state, or filled in by each call."""
        if root in (ARENA, TABLE, NUMBERS) or root.isdigit():
            self.fixed.append((where, at, root, offset))
        else:
            self.lines.append(f"{where}[{at}] = {root}{f'+{offset}' if offset else ''}")

    def execute(
        self, route: Any, numbers: list[int], addresses: list[tuple[str, int] | None], outer: Any = None
    ) -> None:
        """Add a kernel: m, n, k, batch, strides of A, B and C; then addresses of A, B, C, operands and numbers."""
        start = len(self.words)
        m, rest = numbers[:4], numbers[4:]
        words = [*m, 0, *rest[:3], 0, *rest[3:6], 0, *rest[6:], *(0,) * 4]
        if outer is not None:
            self.names[f"u{len(self.names)}"] = outer  # kept alive by the program
            words[16:18] = runtime().address(outer), len(outer)
        self.words += words
        for index, address in zip((4, 8, 12, 18, 19), addresses, strict=True):
            if address is not None:
                self.put("W", start + index, *address)
        self.pending.append(route)

    def operands(
        self, buffers: list[Place], strides: Sequence[tuple[int, ...]], offsets: tuple[int, ...]
    ) -> tuple[str, int]:
        """Add the operands of one run of a kernel to the table; their address in it."""
        start = len(self.table)
        for buffer, step, moved in zip(buffers, strides, offsets, strict=True):
            self.put("T", len(self.table), buffer.root, buffer.offset + moved * buffer.like.itemsize)
            self.table += [0, *step, *(0,) * (ROW - 1 - len(step))]
        return TABLE, 8 * start

    def pass_numbers(self, leaves: list[int], fixed: tuple[float, ...] = ()) -> tuple[str, int] | None:
        """Add the scalars of a kernel to the table of numbers, and then fixed ones; their address in it."""
        words = [*(f"L{i}" for i in leaves), *map(repr, fixed)]
        if not words:
            return None
        start = self.numbers
        for word in words:
            self.lines.append(f"N[{self.numbers}] = {word}")
            self.numbers += 1
        return NUMBERS, 4 * start

    def arena_array(self, like: Any, at: int) -> str:
        """A name for an array in the memory between kernels; S[0] is all of that memory."""
        self.arrays.append((at, like.shape, like.dtype))
        return f"S[{len(self.arrays)}]"

    def program(self, leaves: int, result: str) -> tuple[Callable[[Any], Any], str]:
        """The function of the arrays, weights and numbers of a call, and its text."""
        self.flush()
        read = {*"\n".join([*self.lines, result]).translate(_APART).split()}
        named = [f"L{i}" if f"L{i}" in read else "_" for i in range(leaves)]
        unpack = [f"{', '.join(named)}, = leaves"] if leaves else []
        body = ["T, W, N, S, w = state", *unpack, *self.lines]
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
        self.names |= names
        return self.function(lines)

    def maker(self, body: list[str]) -> scratch_arena.Make:
        """The constructor of a program's state: its tables, and the arrays between kernels that its text names."""
        fixed, text = self.fixed, "\n".join(body)
        arrays = [x if f"S[{i}]" in text else None for i, x in enumerate(self.arrays, 1)]
        table, words, numbers = self.table or [0], self.words or [0], [0.0] * max(self.numbers, 1)

        def make(memory: np.ndarray[Any, Any], address: int) -> tuple[Any, ...]:
            tables: dict[str, Any] = {"T": array("q", table), "W": array("q", words), "N": array("f", numbers)}
            roots = {ARENA: address}
            roots |= {TABLE: tables["T"].buffer_info()[0], NUMBERS: tables["N"].buffer_info()[0]}
            for where, at, root, offset in fixed:
                tables[where][at] = (int(root) if root.isdigit() else roots[root]) + offset
            views = [None if x is None else np.ndarray(x[1], x[2], memory, x[0]) for x in arrays]
            return (*tables.values(), (memory, *views), tables["W"].buffer_info()[0])

        return make
