"""Terms as one kernel: a block program with a grid, one loop, and passes of accumulators along it.

Owns `kernel_of` and `one_kernels`. Sums along the loop are accumulators; one that needs another one is in a later pass,
or, where it is a sum of exponentials less a maximum, in the same pass and rescaled. Products along other labels are
tiles of a pass. A kernel is legal where its smallest tiles fit the caches of a core.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from portmm.errors import ScheduleError
from portmm.fusion.term_rewrites import subterms
from portmm.fusion.terms import Term, template_of
from portmm.ir.block_program import (
    ACCUMULATED,
    BlockProgram,
    Operator,
    Pass,
    TileGemm,
    TileReduce,
    TileTransfer,
    accumulated,
    decays,
)
from portmm.ir.mugraph import Binding, MuGraph, Step, Tensor
from portmm.spec.epilogue import Operand, contraction, load, reduction, summed
from portmm.spec.expr import Expr, const, ordered

POINTS, TRIP = 4, 16
"""Smallest tile along a label of the grid, and along the loop."""


class Kernel(NamedTuple):
    """A function as one kernel.

    Attributes:
        graph: its µGraph, of one step.
        loop: the label of the loop, as terms have it.
        passes: number of passes along the loop.
        tile: bytes of its smallest tiles and accumulators.
        moved: bytes that it reads and writes, where tiles of the grid are as large as caches allow.
        sizes: the extent of each label of its program.
    """

    graph: MuGraph
    loop: str
    passes: int
    tile: int
    moved: float
    sizes: dict[str, int]


def one_kernels(
    results: tuple[Term, ...], axes: Sequence[str], inputs: Sequence[str], extents: Mapping[str, int], near: float
) -> Iterator[Kernel]:
    """Terms as one kernel, for each loop with which they are one whose tiles fit in `near` bytes."""
    loops = sorted({x.data for x in subterms(results) if x.op in ("sum", "most", "dot") and x.data in extents})
    for loop in loops:
        kernel = kernel_of(results, axes, inputs, loop)
        if kernel is None:
            continue
        graph, names = kernel
        sizes = {names.get(x, x): n for x, n in extents.items()}
        program = graph.steps[0].program
        tile = _tile(program, sizes)
        if tile <= near:
            own = {y: sizes[y] for x in program.operands for y in x.axes}
            yield Kernel(graph, loop, len(program.passes), tile, _moved(program, sizes, near), own)


def _tile(program: BlockProgram, extents: Mapping[str, int]) -> int:
    """Bytes of the smallest tiles of operands, and of accumulators."""

    def part(label: str) -> int:
        least = TRIP if label == program.loop else POINTS if label in program.grid else extents[label]
        return min(least, extents[label])

    return 4 * sum(math.prod(part(y) for y in x.axes) for x in program.operands)


def _moved(program: BlockProgram, extents: Mapping[str, int], near: float) -> float:
    """Bytes moved: an operand is read again for each tile of the grid along labels that it lacks."""
    rows = max(1.0, near / 4 / max(extents.values(), default=1))
    total = 0.0
    for x in program.operands:
        again = math.prod(max(1.0, extents[y] / rows) for y in program.grid if y not in x.axes)
        total += 4.0 * math.prod(extents[y] for y in x.axes) * again
    return total


def kernel_of(
    results: tuple[Term, ...], axes: Sequence[str], inputs: Sequence[str], loop: str
) -> tuple[MuGraph, dict[str, str]] | None:
    """Terms as a graph of one kernel with a loop, and the names of labels that it changes; None if they are none."""
    maxima = {x.data for x in subterms(results) if x.op == "most"}
    if maxima - {loop} or any(x.op in ("attention", "concat") for x in subterms(results)):
        return None
    names = {loop: "n", "n": loop} if maxima and loop != "n" else {}

    def local(labels: str) -> str:
        return "".join(names.get(x, x) for x in labels if x != "1")

    known: dict[Term, Expr] = {}
    for x in subterms(results):
        known[x] = _expression(x, [known[y] for y in x.args], local)
    operands = (*(Operand("f32", local(x)) for x in inputs), *(Operand("f32", local(x)) for x in axes))
    values = [known[x] for x in results]
    try:
        passes = _passes(values, len(inputs), local(loop))
        sums = {summed(x) for x in ordered(tuple(values)) if x.op in ACCUMULATED}  # a tile has all of these
        grid = "".join(x for x in dict.fromkeys(local("".join(axes))) if x not in sums | {local(loop)})
        program = BlockProgram(grid, local(loop), operands, passes)
        return _graph(program, inputs, axes), names
    except ScheduleError:
        return None


def _expression(x: Term, args: list[Expr], local: Any) -> Expr:
    if x.op == "input":
        return load(x.data, "f32")
    if x.op == "const":
        return const(x.data)
    if x.op == "sum":
        return contraction(args[0], const(1.0), local(x.data))
    if x.op == "most":
        return reduction("max", args[0])
    if x.op == "dot":
        return contraction(args[0], args[1], local(x.data))
    return template_of(x.op, args)


def _graph(program: BlockProgram, inputs: Sequence[str], axes: Sequence[str]) -> MuGraph:
    tensors = [Tensor(f"x{i}", x) for i, x in enumerate(inputs)]
    tensors += [Tensor(f"y{i}", x.replace("1", "")) for i, x in enumerate(axes)]
    step = Step(program, tuple(map(Binding, range(len(tensors)))))
    count = len(inputs)
    return MuGraph(tuple(tensors), (step,), tuple(range(count)), tuple(range(count, len(tensors))))


def _passes(values: list[Expr], first: int, loop: str) -> tuple[Pass, ...]:
    """Passes along a loop, of which the last one stores."""
    depth: dict[Expr, int] = {}
    rescaled: dict[Expr, Expr] = {}
    carried = [x for x in ordered(tuple(values)) if x.op in ACCUMULATED and summed(x) == loop]
    for x in carried:
        below = {y for y in ordered(x.inner) if y in depth}
        last = max((depth[y] for y in below), default=0)
        deepest = [y for y in below if depth[y] == last]
        r = deepest[0] if len(deepest) == 1 and deepest[0].op == "reduce" else None
        together = r is not None and decays(x, r) and not any(y in rescaled for y in below)
        depth[x] = last if together else last + 1
        if together and r is not None:
            rescaled[x] = r
    passes: list[Pass] = []
    for i in range(1, max(depth.values(), default=0) + 1):
        one: list[Operator] = []
        for x in (y for y in carried if depth[y] == i):
            _tiles(x.inner, one, loop)
            one.append((TileReduce if x.op == "reduce" else TileGemm)(x, rescaled.get(x)))
        passes.append(tuple(one))
    end: list[Operator] = []
    _tiles(tuple(values), end, loop)
    return (*passes, (*end, *(TileTransfer(first + i, x) for i, x in enumerate(values))))


def _tiles(values: tuple[Expr, ...], one: list[Operator], loop: str) -> None:
    """Add products along other labels than the loop, which values of a pass need."""
    for x in sorted(accumulated(values), key=lambda y: len(ordered((y,)))):
        if summed(x) != loop and all(y.value is not x for y in one):
            _tiles(x.inner, one, loop)
            one.append(TileGemm(x))
