"""Blocks of rows of a convolution's result, and their tasks: the outer loops of kernels that read images in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portmm.ir.index import Index, Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Call, For, Function, Kernel, Let, LetPtr, Move, Parallel, Param
from portmm.kernels.cpu.blocking import TASKS_PER_WORKER, WORKERS, M, N
from portmm.kernels.cpu.elementwise import arguments
from portmm.kernels.cpu.epilogue import finish
from portmm.spec.epilogue import operand_types

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.nodes import Stmt
    from portmm.schedule.direct_convolution import Strip
    from portmm.schedule.schedule import Schedule
    from portmm.spec.convolution import Windows
    from portmm.spec.epilogue import Fused
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

IMAGE, FIRST, LAST, LOW = var("image"), var("first_row"), var("last_row"), var("low")
"""The image of a block, its first row of the result and that after its last, and the first row of the strip."""


def entry(block: tuple[Stmt, ...], tasks: Index, comment: str) -> Function:
    """Loop over the items of the batch, whose blocks are tasks."""
    task = Function("block", "task", (Param("item"),), block, comment)
    items = For("item", const(0), var("batch"), const(1), (Parallel(task, tasks, (var("item"),)),))
    return Function("entry", "entry", (), (items,), "All images")


def share(panels: Index) -> tuple[Index, Index]:
    """The first panel of a task, and that after its last."""
    chunk, chunks = var("task") % var("chunks"), var("chunks")
    return panels * chunk // chunks, panels * (chunk + 1) // chunks


def slices(x: Windows, tallest: int, tile: Callable[[int], tuple[Stmt, ...]]) -> list[Stmt]:
    """Loops over a row of the result: register tiles of nearly equal heights, which a function makes for a height."""
    count = -(-x.out[1] // tallest)
    height, taller = divmod(x.out[1], count)
    edge = taller * (height + 1)
    row = Let("row", IMAGE * x.pixels + var("y") * x.out[1] + var("z"))
    parts = ((height + 1, 0, edge), (height, edge, x.out[1]))
    return [For("z", const(a), const(b), const(rows), (row, *tile(rows))) for rows, a, b in parts if a < b]


def finished(  # noqa: PLR0917 - what is written, and where
    isa: Isa, atom: Atom, kind: str, fused: Fused | None, rows: Index, sums: tuple[Ptr, Index], into: tuple[Ptr, Index]
) -> Call:
    """The epilogue of a tile of sums, in the type `kind`."""
    place = (var("item"), var("row"), var("column"))
    more = (*place, *arguments(fused, *place)) if fused else ()
    end = finish(isa, isa.sum_row_atom(atom) or atom, atom.acc, kind, fused)
    return Call(end, (rows, var("columns"), *sums, *into, *more))


def rows_of_task(chunks: Index, blocks: Index | int, out: tuple[int, ...]) -> tuple[Stmt, ...]:
    """Names of the image and the rows of a task; `chunks` shares of panels have the same rows."""
    number = var("number")
    return (
        Let("chunks", chunks),
        Let("index", var("task") // var("chunks")),
        Let("image", var("index") // blocks),
        Let("number", var("index") % blocks),
        Let("first_row", number * out[0] // blocks),
        Let("last_row", (number + 1) * out[0] // blocks),
    )


@dataclass(frozen=True, slots=True)
class Loops:
    """Loops of one kernel whose filters are in panels.

    Attributes:
        s: a schedule for panels and register tiles.
        isa: the instruction set.
        atom: its multiply-adds.
        x: sizes of blocks.
    """

    s: Schedule
    isa: Isa
    atom: Atom
    x: Strip

    def kernel(self, block: tuple[Stmt, ...], own_size: Index) -> Kernel:
        """The kernel, of the statements for one block and the elements of a worker's scratch."""
        s, tasks = self.s, M // self.x.pixels * self.blocks * self.chunks
        types = (("a", s.types[0]), ("b", self.atom.right), ("c", s.types[2]))
        items = entry(block, tasks, "Rows of the result by some panels")
        more: dict[str, Any] = {"types": types, "operands": operand_types(s.fused)}
        return Kernel(str(s.name(self.atom)), self.isa, self.atom, items, own_size * WORKERS + 64, **more)

    @property
    def blocks(self) -> Index:
        """Number of blocks of rows of the result, of one image."""
        return const(-(-self.x.out[0] // self.x.rows))

    @property
    def panels(self) -> Index:
        """Panels of filters."""
        return ceil_div(N, self.s.nr)

    @property
    def chunks(self) -> Index:
        """Shares of panels, so that every thread has work, as much as the others where blocks are few."""
        every = M // self.x.pixels * self.blocks
        fewest = ceil_div((WORKERS - 1) * TASKS_PER_WORKER + 1, every)
        uneven = minimum(1, every % WORKERS) * every.lt(WORKERS * TASKS_PER_WORKER)
        return minimum(self.panels, fewest + uneven * (ceil_div(fewest, WORKERS) * WORKERS - fewest))

    @property
    def image(self) -> Ptr:
        """Address of an image, in elements."""
        return Ptr("a", var("item") * var("a_batch") + IMAGE * (self.x.image * (1 if self.x.few else self.s.atom.kr)))

    @property
    def read(self) -> str:
        """The type that images are read as."""
        return self.s.types[0] if self.x.few else self.atom.left

    def spread(self, begin: int) -> tuple[Stmt, ...]:
        """Copy of a row of pixels, with zeros behind channels that are no whole units, to `to` from unit `begin`."""
        x, z, channels = self.x, var("z"), self.x.channels * self.s.atom.kr
        at = LetPtr("pixel", Ptr("line", z * x.steps[1]), self.read, readonly=True)
        to = LetPtr("to_pixel", Ptr("to", z * x.channels + begin), self.read)
        moves = [Move(Ptr("to_pixel", const(c)), Ptr("pixel", const(c))) for c in range(x.few)]
        moves += [Move(Ptr("to_pixel", const(c)), None) for c in range(x.few, channels)]
        return (For("z", const(0), const(x.spatial[1]), const(1), (at, to, *moves), 4),)

    @property
    def panel(self) -> tuple[Stmt, ...]:
        """Names of the columns and the filters of a panel."""
        filters = Ptr("b", var("item") * var("b_batch") + var("j") * var("b_n"))
        return (
            Let("column", var("j") * self.s.nr),
            Let("columns", minimum(self.s.nr, N - var("column"))),
            LetPtr("bp", filters, self.atom.right, readonly=True),
        )
