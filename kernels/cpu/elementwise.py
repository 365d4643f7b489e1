"""Fused expressions, as statements on vectors of a row.

Owns `Elements`: what computes expressions for a vector of neighbours along n, loads
what they read, and stores what they give. What does not vary along n is computed once
for a row. Operands are loaded whole where neighbours in memory are neighbours
along n; others, and the last few of a row on machines without masks, pass
through a few elements of scratch, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.nodes import For, Index, Map, Move, Param, Ptr, Scratch, Verb, const, var
from portmm.kernels.cpu.packing import keep
from portmm.spec.epilogue import varies
from portmm.spec.expr import OPS

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused
    from portmm.spec.expr import Expr
    from portmm.target.target import Atom, Isa


@dataclass(slots=True)
class Elements:
    """Statements for the expressions of one function.

    Attributes:
        isa: the instruction set.
        real: its atom for f32, whose lanes are computed.
        fused: the expressions.
        inner: the current row, of those that the function was given.
        row: where that is, among all of them.
        column: where the first column of the function is, among all of them.
        names: expression -> the register that holds it.
        stored: expression -> scratch that holds it for a whole row, or the one value of a reduction.
        cell: where in such scratch the current column is, if not at its own number.
        parts: operand -> where its current element is, if it was loaded, or will be stored, with others.
    """

    isa: Isa
    real: Atom
    fused: Fused
    inner: Index = field(default_factory=lambda: const(0))
    row: Index = field(default_factory=lambda: const(0))
    column: Index = field(default_factory=lambda: const(0))
    names: dict[Expr, str] = field(default_factory=dict)
    stored: dict[Expr, str] = field(default_factory=dict)
    cell: Index | None = None
    parts: dict[int, Ptr] = field(default_factory=dict)
    numbered: dict[Expr, str] = field(default_factory=dict)
    axes: dict[Expr, frozenset[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.axes = varies(self.fused.steps, self.fused.operands)

    def scratch(self) -> tuple[Stmt, ...]:
        """What operands that are not loaded whole pass through."""
        kinds = dict.fromkeys(x.dtype for x in self.fused.operands)
        return tuple(Scratch(f"few_{x}", self.real.n, x) for x in kinds)

    def name(self, x: Expr) -> str:
        """The register of an expression: the same wherever it is computed."""
        return self.numbered.setdefault(x, f"{x.op[0] if x.op in ('acc', 'load') else 't'}{len(self.numbered)}")

    def once(self, wanted: list[Expr], axes: str, j: Index | None = None, few: str = "") -> tuple[Stmt, ...]:
        """What varies along no axis but those given, of all that is wanted; at column j, where n is one of them."""
        fixed = [x for x in self.under(wanted) if x.op != "const" and self.axes[x] <= set(axes)]
        used = {id(y) for x in self.under(wanted) if not self.axes[x] <= set(axes) for y in x.args}
        ends = [x for x in fixed if id(x) in used or any(x is y for y in wanted)]
        return self.compute(ends, j or const(0), few)

    def under(self, wanted: list[Expr]) -> list[Expr]:
        """What must be computed for some expressions: what they are made of, down to what is there already."""
        needed: dict[int, Expr] = {}
        stack = list(wanted)
        while stack:
            x = stack.pop()
            if id(x) in needed or x in self.names:
                continue
            needed[id(x)] = x
            if x not in self.stored:
                stack += x.inner
        return [x for x in self.fused.steps if id(x) in needed]

    def compute(self, wanted: list[Expr], j: Index, few: str) -> tuple[Stmt, ...]:
        """Leave expressions in registers, for the vector at column j of the function.

        Args:
            wanted: expressions.
            j: a column.
            few: the name of how many columns are left, where they are fewer than a vector; else empty.
        """
        found: list[Stmt] = []
        for x in self.under(wanted):
            if x.op == "const":
                continue
            if x in self.stored:
                found += self.kept(x, j)
            else:
                found += self.leaf(x, j, few) if x.op not in OPS else [self.operation(x)]
            self.names[x] = self.name(x)
        return tuple(found)

    def kept(self, x: Expr, j: Index) -> tuple[Stmt, ...]:
        """What an earlier pass over the row has found."""
        here = Ptr(self.stored[x])
        return (
            self.broadcast(x, here)
            if x.op == "reduce"
            else (Verb("load_c", self.name(x), p=here + (j if self.cell is None else self.cell), of=self.real.name),)
        )

    def operation(self, x: Expr) -> Stmt:
        """One operation on registers and literals."""
        given = [y.args[0] if y.op == "const" else self.names[y] for y in x.args]
        return Map(x.op, self.name(x), tuple(given), x.dtype, x.args[-1].dtype, self.real.name)

    def leaf(self, x: Expr, j: Index, few: str) -> tuple[Stmt, ...]:
        """What an expression is made of in the end."""
        d = self.name(x)
        if x.op == "number":
            one = Verb("load_a", f"{d}_one", p=Ptr("numbers", const(x.args[0])), of=self.real.name)
            return (one, Map("splat", d, (f"{d}_one",), "f32", "f32", self.real.name))
        if x.op == "index":
            if x.args == ("n",):
                return (Map("lanes", d, (), "s32", "s32", self.real.name, self.column + j),)
            at = self.row if x.args == ("m",) else var("head" if x.args == ("h",) else "item")
            return (Map("whole", d, (), "s32", "s32", self.real.name, at),)
        if x.op == "extent":
            return (Map("whole", d, (), "s32", "s32", self.real.name, var(x.args[0])),)
        if x.op != "load":
            raise ScheduleError(f"{x!r} cannot be computed where it is used")
        return self.load(x, j, few)

    def load(self, x: Expr, j: Index, few: str) -> tuple[Stmt, ...]:
        """The elements of an operand."""
        number, d = x.args[0], self.name(x)
        operand = self.fused.operands[number]
        here = Ptr(f"x{number}")
        if "m" in operand.axes:
            here += self.inner * var(f"x{number}_m")
        if "n" not in operand.axes:
            return self.broadcast(x, here)
        whole = x.dtype == "s32"
        of = self.isa.vector("s32", self.real.n) if whole else self.real
        assert of is not None  # noqa: S101 - `lacks` said so
        if operand.dense and not few:
            return (Verb("load_c", d, p=self.parts.get(number, here + j), of=of.name),)
        if operand.dense and self.isa.spelling(of, "load_mask", operand.dtype):
            return (Verb("load_mask", d, p=here + j, mask="few", of=of.name),)
        e, scratch = var("e"), f"few_{operand.dtype}"
        step = const(1) if operand.dense else var(f"x{number}_n")
        end = var(few) if few else const(self.real.n)
        gather = For("e", const(0), end, const(1), (Move(Ptr(scratch, e), here + (j + e) * step),))
        return (gather, Verb("load_c", d, p=Ptr(scratch), of=of.name))

    def broadcast(self, x: Expr, here: Ptr) -> tuple[Stmt, ...]:
        """An element that is the same for all columns."""
        d, real = self.name(x), self.real.name
        if x.dtype == "s32":
            lanes = self.isa.vector("s32", self.real.n)
            assert lanes is not None  # noqa: S101 - `lacks` said so
            return (Verb("load_a", d, p=here, of=lanes.name, to="s32"),)
        return (Verb("load_a", f"{d}_one", p=here, of=real), Map("splat", d, (f"{d}_one",), "f32", "f32", real))

    def few(self, count: Index) -> tuple[Stmt, ...]:
        """A mask of the first `count` lanes, where the machine has them."""
        return (keep(self.real, "few", count, self.real.name),) if self.real.mask else ()

    def store(self, x: Expr, operand: int, j: Index, few: str) -> tuple[Stmt, ...]:
        """Write a vector of results to an operand."""
        to = self.fused.operands[operand]
        if operand in self.parts:
            return self.write(x, to.dtype, self.parts[operand], const(0), few, const(1))
        here = Ptr(f"x{operand}", self.inner * var(f"x{operand}_m")) if "m" in to.axes else Ptr(f"x{operand}")
        return self.write(x, to.dtype, here, j, few, const(1) if to.dense else var(f"x{operand}_n"))

    def write(  # noqa: PLR0917 - an address is three of them
        self, x: Expr, dtype: str, here: Ptr, j: Index, few: str, step: Index
    ) -> tuple[Stmt, ...]:
        """Write a vector of results of a type to an address."""
        lanes = self.isa.vector("s32", self.real.n) if dtype == "s32" else self.real
        assert lanes is not None  # noqa: S101 - `lacks` said so
        (value, before) = self.value(x)
        dense = step == const(1)
        if dense and not few:
            return (*before, Verb("store", value, p=here + j, of=lanes.name))
        if dense and self.isa.spelling(lanes, "store_mask", dtype):
            return (*before, Verb("store_mask", value, p=here + j, mask="few", of=lanes.name))
        e, scratch = var("e"), f"few_{dtype}"
        end = var(few) if few else const(self.real.n)
        one = Move(here + (j + e) * step, Ptr(scratch, e))
        return (
            *before,
            Verb("store", value, p=Ptr(scratch), of=lanes.name),
            For("e", const(0), end, const(1), (one,)),
        )

    def single(self, x: Expr, operand: int) -> tuple[Stmt, ...]:
        """Write the one result of a row, which is in every lane."""
        to = self.fused.operands[operand]
        lanes = self.isa.vector("s32", self.real.n) if to.dtype == "s32" else self.real
        assert lanes is not None  # noqa: S101 - `lacks` said so
        value, before = self.value(x)
        scratch = f"few_{to.dtype}"
        here = Ptr(f"x{operand}", self.inner * var(f"x{operand}_m")) if "m" in to.axes else Ptr(f"x{operand}")
        return (*before, Verb("store", value, p=Ptr(scratch), of=lanes.name), Move(here, Ptr(scratch)))

    def value(self, x: Expr) -> tuple[str, tuple[Stmt, ...]]:
        """The register of a result; a literal is put in one first."""
        if x.op != "const":
            return self.names[x], ()
        d = self.name(x)
        return d, (Map("literal", d, x.args, x.dtype, x.dtype, self.real.name),)


def parameters(fused: Fused) -> list[Param]:
    """What a function takes for its operands: where they are, their strides."""
    written = dict(fused.results)
    found = [Param("numbers", "f32", readonly=True)] if fused.numbers else []
    for i, x in enumerate(fused.operands):
        found.append(Param(f"x{i}", x.dtype, readonly=i not in written))
        found += [Param(f"x{i}_m")] if "m" in x.axes else []
        found += [] if x.dense else [Param(f"x{i}_n")]
    return found


def arguments(fused: Fused, item: Index, row: Index, column: Index) -> list[Index | Ptr]:
    """The arguments for `parameters`, at an element of the result."""
    found: list[Index | Ptr] = [Ptr("numbers")] if fused.numbers else []
    for i, x in enumerate(fused.operands):
        at = const(0)
        if "b" in x.axes:
            at += item * var(f"x{i}_b")
        if "h" in x.axes:
            at += var("head") * var(f"x{i}_h")
        if "m" in x.axes:
            at += row * var(f"x{i}_m")
        if "n" in x.axes:
            at += column if x.dense else column * var(f"x{i}_n")
        found.append(Ptr(f"x{i}", at))
        found += [var(f"x{i}_m")] if "m" in x.axes else []
        found += [] if x.dense else [var(f"x{i}_n")]
    return found
