"""Relayout of an operand: a copy that is contiguous along k, in lines padded with zeros.

Fragments of bytes cannot be loaded transposed, and asynchronous copies to shared memory need aligned vectors.
A block moves 32 rows of 32 words along k through shared memory: its warps read along the contiguous axis of
memory, and write words along k. A row of the array in shared memory has one element more than there are rows, so that
both directions have no bank conflicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, ceil_div, const, var
from portmm.ir.nodes import If, Let, LetPtr, Move, Scratch
from portmm.ir.thread_nodes import Barrier, Shared, Vector
from portmm.kernels.gpu.loops import unrolled
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

TILE = 32
"""Rows of a tile, and words along k: as many as there are banks."""
WARPS = 8
"""Groups of as many threads, each with a row or a column at a time."""
WORD = 4
ALIGNED = 16
"""Alignment of lines in bytes."""


def lines(k: int, size: int) -> int:
    """Number of elements of a line of the copy, for k elements of `size` bytes."""
    each = ALIGNED // size
    return -(-k // each) * each


def build(isa: Isa, atom: Atom, dtype: str, along: str) -> GridKernel:
    """Kernel for elements of a type; `along` is "row" where memory is contiguous along rows, else "k"."""
    each = WORD // BY_NAME[dtype].bytes
    tile_k, across = TILE * each, TILE + 1
    row, k, lane, warp, turn, e = (var(x) for x in ("row", "at", "lane", "warp", "turn", "e"))
    inside, line = var("inside"), var("beside")
    here = Ptr("x_item", row * var("x_m") + k * var("x_k"))
    element = Ptr("tile", inside * across + line)
    read = (If(row.lt(var("m")) * k.lt(var("k")), (Move(element, here),), (Move(element, None),)),)
    if along == "row":
        place = (Let("inside", warp + turn * WARPS), Let("beside", lane))
        turns = tile_k // WARPS
    else:
        place = (
            Let("inside", lane + turn % each * TILE),
            Let("beside", warp + turn // each * WARPS),
        )
        turns = TILE // WARPS * each
    fetch = (*place, Let("row", var("row_0") + line), Let("at", var("k_0") + inside), *read)
    gather = unrolled("e", each, Move(Ptr("word", e), Ptr("tile", (lane * each + e) * across + line)))  # fmt: skip
    put = (
        Let("beside", warp + turn * WARPS),
        Let("row", var("row_0") + line),
        Let("at", var("k_0") + lane * each),
        If(
            row.lt(var("m")) * k.lt(var("line")),
            (gather, Vector(Ptr("to_item", row * var("to_m") + k), Ptr("word"), WORD)),
        ),
    )
    down = ceil_div(var("m"), TILE)
    right = ceil_div(var("line"), tile_k)
    body: tuple[Stmt, ...] = (
        Shared("tile", tile_k * across, dtype),
        Scratch("word", each, dtype),
        Let("lane", var("thread") % TILE),
        Let("warp", var("thread") // TILE),
        Let("item", var("block") // (down * right)),
        Let("row_0", var("block") % (down * right) // right * TILE),
        Let("k_0", var("block") % right * tile_k),
        LetPtr("x_item", Ptr("x", var("item") * var("x_batch")), dtype, readonly=True),
        LetPtr("to_item", Ptr("to", var("item") * var("to_batch")), dtype),
        unrolled("turn", turns, *fetch),
        Barrier(),
        unrolled("turn", TILE // WARPS, *put),
    )
    params = (
        *(Argument(x, "int") for x in ("m", "k", "line", "batch")),
        Argument("x", "pointer", dtype, readonly=True, alone=True),
        *(Argument(x, "long") for x in ("x_m", "x_k", "x_batch")),
        Argument("to", "pointer", dtype),
        *(Argument(x, "long") for x in ("to_m", "to_batch")),
    )
    grid = (down * right * var("batch"), const(1))
    return GridKernel(f"portmm_lines_{dtype}_{along}", isa, atom, params, TILE * WARPS, grid, body)
