"""Statements of a block program at the points of its grid, on cores and by threads alike.

Owns `Lowering`. Lanes of a vector, and neighbouring threads, are neighbours along n. Where n is the loop, each lane has
a part of an accumulator, which a machine combines; where it is of the grid, each lane has a point of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portmm.ir.block_program import TileMap, TileReduce, TileTransfer
from portmm.ir.index import Ptr, const, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import For, Scratch, Verb
from portmm.spec.epilogue import REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.block_program import BlockProgram, Pass
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.elementwise import Elements
    from portmm.spec.expr import Expr

    Step = Callable[..., tuple[Stmt, ...]]
    """Statements of a vector: of its column, the name of a number of remaining columns, and a chain."""


@dataclass
class Lowering:
    """Statements of a block program on one kind of machine.

    Attributes:
        program: the block program.
        at: statements of its expressions.
        rows: the rows that passes down columns reduce: the first, and their end.
        chains: registers of each accumulator along a row.
        live: registers that all passes read: those of accumulators of passes down columns.
    """

    program: BlockProgram
    at: Elements
    rows: tuple[Index, Index] = (const(0), var("m"))
    chains: int = 1
    live: dict[Expr, str] = field(default_factory=dict)
    totals: dict[Expr, str] = field(init=False)
    tiles: dict[Expr, str] = field(init=False)

    def __post_init__(self) -> None:
        self.totals = {x: f"r{i}" for i, x in enumerate(self.program.accumulators)}
        self.tiles = {x: f"kept{i}" for i, x in enumerate(self.program.tiles)}

    @property
    def down(self) -> bool:
        """Whether passes go down columns."""
        return self.program.loop == "m"

    def scratch(self) -> list[Stmt]:
        """Scratch for what passes along a row leave in accumulators."""
        return [] if self.down else [Scratch(x, 1, "f32") for x in self.totals.values()]

    def passes(self, j: Index | None = None, few: str = "") -> tuple[Stmt, ...]:
        """Statements of all passes: down columns those of the vector at column j, see `Elements.compute`."""
        self.live = {}
        return tuple(s for one in self.program.passes for s in self.one_pass(one, j or const(0), few))

    def one_pass(self, operators: Pass, j: Index, few: str = "") -> list[Stmt]:
        """Statements of one pass."""
        at, fused = self.at, self.at.fused
        reduced = [x.value for x in operators if isinstance(x, TileReduce)]
        maps = [x.value for x in operators if isinstance(x, TileMap)]
        stores = [(x.operand, x.value) for x in operators if isinstance(x, TileTransfer)]
        along = [(i, x) for i, x in stores if self.program.loop in fused.operands[i].axes]
        single = [(i, x) for i, x in stores if self.program.loop not in fused.operands[i].axes]
        wanted = [*(x.args[1] for x in reduced), *maps, *(x for _, x in along)]
        at.names = dict(self.live)
        body = list(at.once([*wanted, *(x for _, x in single)], self.program.grid, j, few))
        body += self.begun(reduced)
        body += self.singles(single, j, few)
        fixed = dict(at.names)

        def step(j: Index, few: str = "", chain: int = 0) -> tuple[Stmt, ...]:
            at.names = dict(fixed)
            stmts = list(at.compute(wanted, j, few))
            stmts += [Verb("store", at.names[x], p=self.tile(x, j), of=at.real.name) for x in maps]
            stmts += [s for x in reduced for s in self.reduced(x, self.register(x, chain), few)]
            return (*stmts, *(s for i, x in along for s in at.store(x, i, j, few)))

        if self.down:
            rows = step(j, few) if wanted else ()
            body += [For("i", *self.rows, const(1), rows)] if rows else []
            self.live = fixed | {x: self.register(x) for x in reduced}
        elif wanted:
            body += self.along(step, wanted, reduced, tuple(i for i, _ in along))
            body += self.combined(reduced) if reduced else []
            at.stored |= {x: self.totals[x] for x in reduced} | {x: self.tiles[x] for x in maps}
        at.names = dict(self.live)
        return body

    def register(self, x: Expr, chain: int = 0) -> str:
        """Register of a chain of an accumulator."""
        if self.down:
            return f"all{self.totals[x][1:]}"
        return f"all_{self.totals[x]}" if self.chains == 1 else f"all_{self.totals[x]}_{chain}"

    def begun(self, reduced: list[Expr]) -> list[Stmt]:
        """Accumulators of nothing."""
        all_ = [(self.register(x, e), REDUCTIONS[x.args[0]]) for x in reduced for e in range(self.chains)]
        return [Map("literal", to, (start,), "f32", "f32", self.at.real.name) for to, start in all_]

    def taken(self, x: Expr, into: str, register: str) -> Stmt:
        """Reduction of a register into an accumulator."""
        return Map(x.args[0], into, (into, register), "f32", "f32", self.at.real.name)

    def reduced(self, x: Expr, into: str, few: str) -> list[Stmt]:
        """Reduction of a vector of values into an accumulator."""
        del few  # lanes past the last column are never stored
        register, before = self.at.value(x.args[1])
        return [*before, self.taken(x, into, register)]

    def singles(self, results: list[tuple[int, Expr]], j: Index, few: str) -> list[Stmt]:
        """Stores of results that do not vary along the loop."""
        at = self.at
        return [s for i, x in results for s in (at.store(x, i, j, few) if self.down else at.single(x, i))]

    def tile(self, x: Expr, j: Index) -> Ptr:
        """Address of the current element of a tile."""
        return Ptr(self.tiles[x], j)

    def along(self, step: Step, wanted: list[Expr], reduced: list[Expr], written: tuple[int, ...]) -> list[Stmt]:
        """Loop along a row: `step` makes the statements of a vector; it writes some operands."""
        raise NotImplementedError

    def combined(self, reduced: list[Expr]) -> list[Stmt]:
        """Reduction of what lanes and threads have of accumulators, in the scratch of each."""
        raise NotImplementedError
