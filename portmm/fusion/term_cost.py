"""Predicted time of terms on a CPU: a roofline over what kernels compute and move.

Owns `Rates`, `predicted` and `predicted_kernel`, which is of terms as one kernel. A product reads its operands and
writes its result, and what follows it element by element costs nothing; reductions and other operations read and write
theirs; attention stores no scores. `optimistic` leaves out what a better kernel could: its prediction is a bound, below
which no form of the same terms is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from portmm.fusion.term_rewrites import joined_extents, subterms
from portmm.ir.tile_program import row_label
from portmm.spec.epilogue import summed, varies

if TYPE_CHECKING:
    from portmm.fusion.terms import Term
    from portmm.ir.block_program import BlockProgram
    from portmm.schedule.schedule import Schedule
    from portmm.target.target import Target

GIGAHERTZ = 3.0
"""Clock of a target that names none."""
MEMORY, CACHE = 20e9, 80e9
"""Bytes per second of one core, from memory and from caches, where nothing was measured."""
KERNEL = 2e-6
"""Seconds of a kernel besides its work."""
SHARE = 0.7
"""Share of the peak that products reach."""
FUNCTIONS = 8.0
"""Multiply-adds of an elementary function."""


class Rates(NamedTuple):
    """Rates of one core.

    Attributes:
        flops: multiply-adds per second.
        memory, cache: bytes per second.
        near: bytes of the caches of one core.
    """

    flops: float
    memory: float
    cache: float
    near: float

    @classmethod
    def of(cls, target: Target) -> Rates:
        """The rates of a target."""
        atoms = [x for isa in target.isas if (x := isa.atom("f32")) is not None]
        lanes = max((x.n * target.rates.get(x.name, 1.0) for x in atoms), default=4.0)
        measured, level = target.measured, target.level("L2")
        cache = measured.get("L2", CACHE / 1e9) * 1e9
        near = float(level.bytes) if level is not None else 1 << 20
        hertz = (target.frequency_ghz or GIGAHERTZ) * 1e9
        return cls(lanes * hertz, measured.get("memory", MEMORY / 1e9) * 1e9, cache, near)

    def moved(self, size: float) -> float:
        """Seconds for bytes that are read or written once."""
        return size / (self.cache if size <= self.near else self.memory)


def elements(x: Term, extents: Mapping[str, int]) -> int:
    """Number of elements of a term."""
    return math.prod(extents[y] for y in x.labels)


def predicted(roots: tuple[Term, ...], extents: Mapping[str, int], rates: Rates, *, optimistic: bool = False) -> float:
    """Seconds that some terms take."""
    share, extents = 1.0 if optimistic else SHARE, joined_extents(roots, extents)
    total = 0.0
    for x in subterms(roots):
        if x.op in ("input", "const"):
            continue
        size = 4.0 * elements(x, extents)
        read = sum(4.0 * elements(y, extents) for y in x.args)
        if x.op in ("dot", "attention"):
            total += max(_work(x, extents) / (rates.flops * share), rates.moved(read + size))
            total += 0.0 if optimistic else KERNEL
        elif not optimistic and not (x.args[0].op == "dot" and set(x.labels) == set(x.args[0].labels)):
            total += rates.moved(read + size) + FUNCTIONS * size / 4 / rates.flops
    return total


def _work(x: Term, extents: Mapping[str, int]) -> float:
    """Multiply-adds of a product, or of attention with its exponentials."""
    if x.op == "dot":
        return float(elements(x, extents) * extents[x.data])
    h = x.data
    scores = math.prod(extents[y] for y in h.heads + h.groups + h.queries + h.keys)
    return scores * (math.prod(extents[y] for y in h.elements + h.columns[:0]) + extents[h.columns] + FUNCTIONS)


def predicted_kernel(program: BlockProgram, sizes: Mapping[str, int], s: Schedule, rates: Rates) -> float:
    """Seconds of a general block program: each tile of its grid computes and reads again what does not vary with it."""
    result = program.operands[program.fused.results[0][0]].axes
    rows, columns = row_label(program), result[-1]
    tall, wide = s.tile("L1").m, s.tile("L2").n or sizes[columns]
    by = dict.fromkeys(result, 1) | {rows: tall, columns: wide}

    def tiles(axes: frozenset[str] | str) -> int:
        """Number of tiles of the grid that need the same value."""
        return math.prod(-(-sizes[x] // by[x]) for x in result if x not in axes)

    computed = 0.0
    for x, axes in varies(program.fused.steps, program.operands).items():
        if x.op not in ("load", "const"):
            along = summed(x) if x.op == "contract" else ""
            computed += math.prod(sizes[y] for y in {*axes, *along}) * tiles(axes)
    moved = 0.0
    for operand in program.operands:
        size = 4.0 * math.prod(sizes[y] for y in operand.axes)
        moved += rates.moved(size) + size * (tiles(operand.axes) - 1) / rates.cache
    return max(computed / (rates.flops * SHARE), moved) + KERNEL
