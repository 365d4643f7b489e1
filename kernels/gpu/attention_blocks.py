"""Thread blocks of attention on a GPU: parameters, and tile coordinates.

Owns `AttentionBlocks`, the base of the kernels of all units: parameters, the queries of a block, and the keys
that some of these see. Where there are few queries, those of all heads that share keys form one tile, and blocks
are distributed over runs of keys along the grid's second axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import Let, LetPtr, Read
from portmm.kernels.gpu.attention_scores import Request
from portmm.kernels.gpu.parameters import integers, longs, of_fused

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

_AXES = {"q": "bhm", "k": "bhn", "v": "bhn", "o": "bhm"}


def rows_of(name: str, dtype: str, loose: str, *, readonly: bool = True) -> list[Argument]:
    """Parameters of an operand."""
    params = [Argument(name, "pointer", dtype, readonly=readonly, alone=readonly)]
    return params + longs(*(f"{name}_{x}" for x in _AXES[name]), *((f"{name}_d",) if name in loose else ()))


@dataclass(frozen=True, slots=True)
class AttentionBlocks(Request):
    """Parameters and tile coordinates of a kernel."""

    @property
    def height(self) -> Index:
        """Number of rows of queries that share keys: of a group of heads, or of one."""
        return var("group") * var("m") if self.t.runs else var("m")

    def arguments(self) -> tuple[Argument, ...]:
        """Parameters of the kernel."""
        form, t = self.form, self.t
        params = integers("m", "n", "heads", "group", "window", "offset")
        for name in "qkv":
            params += rows_of(name, form.dtype, t.loose)
        if t.runs:
            params += [*integers("few", "run"), Argument("work", "pointer", "f32")]
            params += longs("all_rows", "mosts_at", "sums_at")
        else:
            params += rows_of("o", form.to, t.loose, readonly=False)
            params += [Argument("lse", "pointer", "f32")] if form.lse else []
        optional = (("lengths", form.lengths), ("starts", form.starts))
        params += [Argument(name, "pointer", "s32", readonly=True) for name, there in optional if there]
        return (*params, *of_fused(form.score))

    @property
    def grid(self) -> tuple[Index, Index]:
        """Number of blocks along both axes."""
        heads = var("few") if self.t.runs else var("heads")
        blocks = var("items") * heads * ceil_div(self.height, self.t.queries)
        return blocks, var("runs") if self.t.runs else const(1)

    # -- tile coordinates ----------------------------------------------------

    def coordinates(self) -> tuple[Stmt, ...]:
        """Head and queries of a block, and rows of a thread."""
        t, block, blocks = self.t, var("block"), var("blocks")
        heads = var("few") if t.runs else var("heads")
        first: tuple[Stmt, ...] = (
            Let("blocks", ceil_div(self.height, t.queries)),
            Let("item", block // blocks // heads),
        )
        if t.runs:
            first += (
                Let("other", block // blocks % heads),
                Let("row_0", block % blocks * t.queries),
                Let("low", const(0)),
                Let("high", var("m") - 1),
            )
        else:
            first += (
                Let("head", block // blocks % heads),
                Let("other", var("head") // var("group")),
                # Under causal bounds the last queries see most keys: the longest blocks are first.
                Let("row_0", (blocks - 1 - block % blocks) * t.queries),
                Let("low", var("row_0")),
                Let("high", minimum(var("m"), var("row_0") + t.queries) - 1),
            )
        return (*first, Let("last", self.height - 1), *self.lanes(), *self.items())

    def items(self) -> tuple[Stmt, ...]:
        """Addresses of a block's head of Q, K and V."""
        head = var("other") * var("group") if self.t.runs else var("head")
        return (
            LetPtr("q_item", Ptr("q", var("item") * var("q_b") + head * var("q_h")), self.form.dtype, readonly=True),
            *(
                LetPtr(f"{x}_item", Ptr(x, var("item") * var(f"{x}_b") + var("other") * var(f"{x}_h")), self.form.dtype)
                for x in "kv"
            ),
        )

    def lanes(self) -> tuple[Stmt, ...]:
        """Coordinates of a thread in its block."""
        return ()

    def reach(self) -> tuple[Stmt, ...]:
        """Range of keys that some query of the block sees: from `first` to `end`."""
        form = self.form
        stmts: list[Stmt] = []
        start: Index = var("offset")
        if form.starts:
            stmts.append(Read("start", Ptr("starts", var("item"))))
            start = var("start")
        stmts.append(Let("at", start))
        end: Index = var("n")
        if form.lengths:
            stmts.append(Read("length", Ptr("lengths", var("item"))))
            end = maximum(0, minimum(end, var("length")))
        low, high = var("at") + var("low"), var("at") + var("high")
        first, end = form.bounds.keys(end, (low, high, high + 1), var("window"))
        if self.t.runs:
            first = maximum(first, var("slice") * var("run"))
            end = minimum(end, (var("slice") + 1) * var("run"))
        return (*stmts, Let("first", first), Let("end", end))

    def query(self, row: Index) -> Index:
        """Offset of a row of the tile, in elements past `q_item`."""
        if self.t.runs:
            return row // var("m") * var("q_h") + row % var("m") * var("q_m")
        return row * var("q_m")

    def result(self) -> tuple[Stmt, ...]:
        """Address `to` of the result of `row`."""
        if self.t.runs:
            return (
                Let("head", var("other") * var("group") + var("row") // var("m")),
                Let("number", (var("item") * var("heads") + var("head")) * var("m") + var("row") % var("m")),
                Let("place", var("slice") * var("all_rows") + var("number")),
                LetPtr("to", Ptr("work", var("place") * self.t.dv), "f32"),
            )
        at = var("item") * var("o_b") + var("head") * var("o_h") + var("row") * var("o_m")
        return (LetPtr("to", Ptr("o", at), self.form.to),)

    def along(self, name: str) -> Index:
        """Stride in elements between columns of an operand."""
        return var(f"{name}_d") if name in self.t.loose else const(1)
