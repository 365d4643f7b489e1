"""Block programs as records: what is computed at each point of a grid, in passes along one loop.

Owns `BlockProgram`, its tile operators, and the programs of expressions over rows and down columns; those of products
and of attention are in `product_program` and `attention_program`. `block_meaning` says what a record computes.
`codegen.lower` lowers one for a core of a host, and for a block of threads of a device. Elements of operands are loaded
where expressions need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from portmm.errors import ScheduleError
from portmm.spec.epilogue import Fused, Operand, summed, varies
from portmm.spec.expr import Expr, ordered
from portmm.spec.expr_ops import OPS
from portmm.spec.vector_math import exp
from portmm.util.records import dataclass

REDUCED = ("reduce", "fold")
"""Operations of reductions: along rows, and down columns."""
ACCUMULATED = (*REDUCED, "contract")
"""Operations whose values are sums or maxima along a label."""
WORTH_KEEPING = 6
"""Operations from which a value is kept for a later pass: a store and a load take as long as some of them."""


class TileMap(NamedTuple):
    """A value that a pass leaves in a tile along the loop, for later passes.

    Attributes:
        value: an expression.
        level: of the tile: "L1", scratch of a core, or "registers" of threads.
    """

    value: Expr
    level: str


class TileReduce(NamedTuple):
    """A sum or maximum along the loop, in an accumulator that later passes read: see `epilogue.reduction`.

    Attributes:
        value: the reduction.
        rescaled: a value r of accumulators before it in its pass, if what is summed has a factor exp(-r): when r
            becomes r', the accumulator is multiplied by exp(r - r'). So an online softmax needs one pass.
    """

    value: Expr
    rescaled: Expr | None = None


class TileGemm(NamedTuple):
    """A sum of products, by the units for these: see `epilogue.contraction`.

    Along the loop it is in an accumulator that later passes read; along another label it is a tile of its pass.

    Attributes:
        value: the contraction.
        rescaled: see `TileReduce`.
    """

    value: Expr
    rescaled: Expr | None = None


class TileTransfer(NamedTuple):
    """A result that is stored to an operand, by its number."""

    operand: int
    value: Expr


Operator = TileMap | TileReduce | TileGemm | TileTransfer
Pass = tuple[Operator, ...]


@dataclass(frozen=True)
class BlockProgram:
    """A block program.

    Attributes:
        grid: labels whose points are independent of each other: tasks of cores, and blocks or threads of a device,
            share them out. "b" is a batch, "m" are rows, "n" columns, "h" heads.
        loop: the label that passes go along: of rows "n", as lanes do, or "m", of a product "k".
        operands: arrays, those that are read and those that are written. Labels that are neither of the grid nor the
            loop are whole in every tile: elements of a head.
        passes: the operators of each, in order. A pass may read accumulators and tiles of those before; the last one
            stores.

    Raises:
        ScheduleError: a value needs an accumulator that no earlier pass has, or that is along another label; an
            earlier pass stores; or a value varies along a label that the operand lacks where it is stored.
    """

    grid: str
    loop: str
    operands: tuple[Operand, ...]
    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        if not any(self.loop in x.axes for x in self.operands):
            raise ScheduleError(f"the loop is along {self.loop!r}; no operand has this label")
        known: set[Expr] = set()
        for one in self.passes:
            here: list[Operator] = []
            for x in one:
                if isinstance(x, TileTransfer) and one is not self.passes[-1]:
                    raise ScheduleError(f"operand {x.operand} is stored before the last pass: do so there")
                self._check(x, known, here)
                here.append(x)
            known |= {x.value for x in one if self.carried(x)}
        along = varies(self.fused.steps, self.operands)
        for i, value in self.fused.results:
            if lacking := sorted(along[value] - {*self.operands[i].axes}):
                raise ScheduleError(
                    f"operand {i} has no label {lacking[0]!r}, along which the value that is stored to it varies: "
                    f"points of the grid would overwrite each other; give the operand the label, or reduce along it"
                )

    def carried(self, x: Operator) -> bool:
        """Whether an operator has an accumulator."""
        return isinstance(x, (TileReduce, TileGemm)) and summed(x.value) == self.loop

    def _check(self, x: Operator, known: set[Expr], before: list[Operator]) -> None:
        """Check of an operator after others of its pass, and accumulators of those before.

        Raises:
            ScheduleError: it needs others.
        """
        if isinstance(x, TileTransfer) and not 0 <= x.operand < len(self.operands):
            raise ScheduleError(f"operand {x.operand} is stored; there are {len(self.operands)}")
        if isinstance(x, TileReduce) and (x.value.op not in REDUCED or not self.carried(x)):
            raise ScheduleError(f"{x.value!r} is no reduction along {self.loop}")
        if isinstance(x, TileGemm) and x.value.op != "contract":
            raise ScheduleError(f"{x.value!r} is no contraction")
        rescaled = None if isinstance(x, (TileMap, TileTransfer)) else x.rescaled
        ready = known | {y.value for y in before if not self.carried(y)}
        if rescaled is not None:
            moved = accumulated([rescaled])
            if not moved <= {y.value for y in before} or not decays(x.value, rescaled):
                raise ScheduleError(f"{x.value!r} has no factor exp(-r) of accumulators before it in its pass")
            ready |= moved
        missing = accumulated([x.value] if isinstance(x, (TileMap, TileTransfer)) else x.value.inner) - ready
        if missing:
            raise ScheduleError(
                f"no pass before has {next(iter(missing))!r}: put a TileReduce or TileGemm of it in one"
            )

    @property
    def accumulators(self) -> list[Expr]:
        """The reductions of all passes, in the order of expressions."""
        return [x for x in self.fused.steps if x.op in REDUCED]

    @property
    def is_attention(self) -> bool:
        """Whether there are the products of attention: more than one."""
        return sum(isinstance(x, TileGemm) for one in self.passes for x in one) > 1

    @property
    def tiles(self) -> list[Expr]:
        """The values of all passes that later ones read, elements of operands last."""
        values = (x.value for one in self.passes for x in one if isinstance(x, TileMap))
        return sorted(values, key=lambda x: x.op == "load")

    @property
    def fused(self) -> Fused:
        """Operands, expressions and results."""
        known = self.__dict__
        if "fused" not in known:
            stores = (x for one in self.passes for x in one if isinstance(x, TileTransfer))
            known["fused"] = Fused(self.operands, tuple((x.operand, x.value) for x in stores))
        return known["fused"]


def spelled(x: BlockProgram) -> str:
    """A block program as a line: one for each record.

    Raises:
        KeyError: a pass has a value that no result needs.
    """
    numbers = {value: i for i, value in enumerate(x.fused.steps)}

    def word(y: Operator) -> str:
        if isinstance(y, TileTransfer):
            return f"store {y.operand} {numbers[y.value]}"
        if isinstance(y, TileMap):
            return f"{y.level} {numbers[y.value]}"
        rescaled = "" if y.rescaled is None else f" {numbers[y.rescaled]}"
        return f"{type(y).__name__} {numbers[y.value]}{rescaled}"

    passes = " / ".join("; ".join(map(word, one)) for one in x.passes)
    return f"{x.grid} {x.loop} | {x.fused} | {passes}"


def accumulated(roots: Sequence[Expr]) -> set[Expr]:
    """The sums and maxima that values need, but not those that these need."""
    seen, stack = set(), list(roots)
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            stack += () if x.op in ACCUMULATED else x.inner
    return {x for x in seen if x.op in ACCUMULATED}


def decays(x: Expr, r: Expr) -> bool:
    """Whether what an expression sums is exp(y - r) times values, none of which, nor y, depends on r."""
    if x.op in ACCUMULATED:
        return x.args[0] != "max" and _one_decays(x.inner, r)
    apart = accumulated([r])
    subtracted = (y.args[0] for y in ordered((x,)) if y.op == "sub" and y.args[1] is r)
    if any(exp(y - r) is x and not apart & accumulated([y]) for y in subtracted):
        return True
    return x.op == "mul" and _one_decays(x.inner, r)


def _one_decays(values: tuple[Expr, ...], r: Expr) -> bool:
    """Whether one of some factors has a factor exp(-r), and the others do not depend on r."""
    bound = [x for x in values if accumulated([r]) & accumulated([x])]
    return len(bound) == 1 and decays(bound[0], r)


def program_of(fused: Fused, level: str = "") -> BlockProgram:
    """The program of expressions over rows, or of reductions down columns: see `of_rows`."""
    return of_columns(fused) if fused.column_reductions else of_rows(fused, level)


def of_columns(fused: Fused) -> BlockProgram:
    """The program of reductions down columns: a pass along the rows, and the results."""
    reductions = tuple(TileReduce(x) for x in fused.column_reductions)
    return BlockProgram("bn", "m", fused.operands, (reductions, tuple(TileTransfer(*x) for x in fused.results)))


def of_rows(fused: Fused, level: str = "") -> BlockProgram:
    """The program of expressions over rows.

    Each pass but the last has the sums and maxima that depend only on those of earlier ones; the last one stores. A
    softmax takes three: the maximum, the sum of exponentials, their quotients.

    Args:
        fused: the expressions.
        level: where values are kept that take many operations and are needed again: "L1", or "registers", which
            elements are kept in as well; if it is empty they are computed again.
    """
    depth: dict[Expr, int] = {}
    for x in fused.steps:
        depth[x] = max((depth[y] for y in x.inner), default=0) + (x.op == "reduce")
    last = max(depth.values(), default=0)
    reductions = [[x for x in fused.reductions if depth[x] == i + 1] for i in range(last)]
    wanted = [[x.args[1] for x in one] for one in reductions] + [[x for _, x in fused.results]]
    kept = _kept(wanted, depth) if level else {}
    if level == "registers":
        kept = _kept_in_registers(fused, wanted, kept)
    passes: list[Pass] = [
        (*(TileMap(x, level) for x, when in kept.items() if when == i), *map(TileReduce, one))
        for i, one in enumerate(reductions)
    ]
    return BlockProgram("bm", "n", fused.operands, (*passes, tuple(TileTransfer(*x) for x in fused.results)))


def _kept(wanted: list[list[Expr]], depth: dict[Expr, int]) -> dict[Expr, int]:
    """Largest subexpressions that a pass computes and a later one needs again, if worth storing -> the pass."""
    stored: dict[Expr, int] = {}
    for i, roots in enumerate(wanted[:-1]):
        computed = inside(roots, stored)
        stack = [x for one in wanted[i + 1 :] for x in one]
        while stack:
            x = stack.pop()
            if x.op in REDUCED or x in stored:
                continue
            kept = x.op in OPS and x.dtype == "f32" and x in computed and depth[x] <= i
            if kept and sum(y.op in OPS for y in inside([x], {})) >= WORTH_KEEPING:
                stored[x] = i
                continue
            stack += x.inner
    return stored


def _kept_in_registers(fused: Fused, wanted: list[list[Expr]], kept: dict[Expr, int]) -> dict[Expr, int]:
    """Values of the columns of a thread that later passes read: some of those that are `kept`, and elements."""
    along = varies(fused.steps, fused.operands)
    values = {x: i for x, i in kept.items() if "n" in along[x]}

    def reads(i: int) -> set[Expr]:
        roots = [*wanted[i], *(x for x, when in values.items() if when == i)]
        return inside(roots, {x: when for x, when in values.items() if when < i})

    every = [reads(i) for i in range(len(wanted))]
    for i, now in enumerate(every):
        later = set().union(*every[i + 1 :])
        loads = [x for x in fused.steps if x.op == "load" and x.dtype == "f32" and "n" in along[x]]
        values |= {x: i for x in loads if x in now & later and x not in values}
    return values


def inside(roots: list[Expr], known: dict[Expr, int]) -> set[Expr]:
    """Subexpressions of some values, without reductions and `known` ones."""
    needed: set[Expr] = set()
    stack = list(roots)
    while stack:
        x = stack.pop()
        if x in needed or x.op in ACCUMULATED or x in known:
            continue
        needed.add(x)
        stack += x.inner
    return needed
