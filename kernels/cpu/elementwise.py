"""Element-wise expressions as statements on vectors of a row.

Owns `Elements`, which computes expressions for a vector of neighbours along n, loads
their operands, and stores their results. Values that do not vary along n are computed once
for a row. Operands that are contiguous along n are loaded as vectors; others, and the
last few elements of a row on machines without masks, are copied through a vector of
scratch, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.index import Index, Ptr, const, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import For, If, Let, Move, Param, Prefetch, Scratch, Verb
from portmm.kernels.cpu.packing import keep
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import varies
from portmm.spec.expr_ops import OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

OWN = {"column_sum": ("column_sums", "s32"), "row_scale": ("row_scales", "f32")}
"""Leaf -> the pointer to the vector that the product's kernel has computed, and its type."""


@dataclass(slots=True)
class Elements:
    """Statements for the expressions of one function.

    Attributes:
        isa: the instruction set.
        real: its atom for f32, whose lanes are computed.
        fused: the expressions.
        inner: the current row, counted in the function's rows.
        row: the current row, counted in all rows.
        column: the first column of the function, counted in all columns.
        names: expression -> its register.
        stored: expression -> its scratch, for a whole row, or the one value of a reduction.
        cell: index of the current column in such scratch, if not its own number.
        parts: operand -> address of its current element, where vectors of it are loaded or stored by the caller.
        further: axes besides those of products and heads -> the current index along each.
        ahead: prefetch distance of operands that vary by row, in elements of f32; 0 for none.
        suffix: end of the names of registers, of one of several rows that are computed together.
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
    further: dict[str, Index] = field(default_factory=dict)
    ahead: int = 0
    suffix: str = ""
    numbered: dict[Expr, str] = field(default_factory=dict)
    axes: dict[Expr, frozenset[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.axes = varies(self.fused.steps, self.fused.operands)

    def scratch(self) -> tuple[Stmt, ...]:
        """Scratch for operands that are not loaded or stored as vectors."""
        kinds = dict.fromkeys(x.dtype for x in self.fused.operands)
        return tuple(Scratch(f"few_{x}", self.real.n, x) for x in kinds)

    def name(self, x: Expr) -> str:
        """Register of an expression: the same wherever it is computed."""
        kind = x.op[0] if x.op in {"acc", "load"} else "t"
        return self.numbered.setdefault(x, f"{kind}{len(self.numbered)}{self.suffix}")

    def once(self, wanted: list[Expr], axes: str, j: Index | None = None, few: str = "") -> tuple[Stmt, ...]:
        """Statements for the parts of the `wanted` expressions that vary along `axes` at most, at column j."""
        fixed = [x for x in self.under(wanted) if x.op != "const" and self.axes[x] <= set(axes)]
        used = {id(y) for x in self.under(wanted) if not self.axes[x] <= set(axes) for y in x.args}
        ends = [x for x in fixed if id(x) in used or any(x is y for y in wanted)]
        return self.compute(ends, j or const(0), few)

    def under(self, wanted: list[Expr]) -> list[Expr]:
        """Subexpressions that some expressions need, down to those in registers or scratch."""
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
        """Statements that compute expressions in registers, for the vector at column j of the function.

        Args:
            wanted: expressions.
            j: a column.
            few: the name of the number of remaining columns, where they are fewer than a vector; else empty.
        """
        stmts: list[Stmt] = []
        for x in self.under(wanted):
            if x.op == "const":
                continue
            if x in self.stored:
                stmts += self.kept(x, j)
            else:
                stmts += self.leaf(x, j, few) if x.op not in OPS else [self.operation(x)]
            self.names[x] = self.name(x)
        return tuple(stmts)

    def kept(self, x: Expr, j: Index) -> tuple[Stmt, ...]:
        """Load of a value that an earlier pass over the row has stored."""
        here = Ptr(self.stored[x])
        return (
            self.broadcast(x, here)
            if x.op == "reduce"
            else (Verb("load_c", self.name(x), p=here + (j if self.cell is None else self.cell), of=self.real.name),)
        )

    def operation(self, x: Expr) -> Stmt:
        """Statement for one operation on registers and literals."""
        operands = [y.args[0] if y.op == "const" else self.names[y] for y in x.args]
        return Map(x.op, self.name(x), tuple(operands), x.dtype, x.args[-1].dtype, self.real.name)

    def leaf(self, x: Expr, j: Index, few: str) -> tuple[Stmt, ...]:
        """Statements for a leaf of an expression: a number, an index, an extent or an element."""
        d = self.name(x)
        if x.op == "number":
            return spread(self.real, d, Ptr("numbers", const(x.args[0])))
        if x.op == "index":
            if x.args == ("n",):
                return (Map("lanes", d, (), "s32", "s32", self.real.name, self.column + j),)
            at = {"m": self.row, "h": var("head"), "b": var("item"), **self.further}[x.args[0]]
            return (Map("whole", d, (), "s32", "s32", self.real.name, at),)
        if x.op == "extent":
            return (Map("whole", d, (), "s32", "s32", self.real.name, var(x.args[0])),)
        if x.op in OWN:
            return self.own(x, j)
        if x.op != "load":
            raise ScheduleError(f"{x!r} cannot be computed where it is used")
        return self.load(x, j, few)

    def own(self, x: Expr, j: Index) -> tuple[Stmt, ...]:
        """Load of what the product's kernel has computed; sums of columns are whole vectors, as panels are."""
        name, dtype = OWN[x.op]
        if dtype == "f32":
            return self.broadcast(x, Ptr(name, self.inner))
        whole = self.isa.vector(dtype, self.real.n)
        assert whole is not None  # noqa: S101 - the sums have such vectors
        return (Verb("load_c", self.name(x), p=Ptr(name, j), of=whole.name),)

    def load(self, x: Expr, j: Index, few: str) -> tuple[Stmt, ...]:
        """Load of a vector of an operand."""
        number, d = x.args[0], self.name(x)
        operand = self.fused.operands[number]
        here = Ptr(f"x{number}")
        if "m" in operand.axes:
            here += self.inner * var(f"x{number}_m")
        if "n" not in operand.axes:
            return self.broadcast(x, here)
        whole = x.dtype == "s32"
        of = self.isa.vector("s32", self.real.n) if whole else self.real
        assert of is not None  # noqa: S101 - `lacks` has checked it
        if operand.dense and not few:
            load = Verb("load_c", d, p=self.parts.get(number, here + j), of=of.name)
            if not self.ahead or "m" not in operand.axes:
                return (load,)
            far = here + (j + self.ahead * BY_NAME["f32"].bytes // BY_NAME[operand.dtype].bytes)
            return (Prefetch(far), load)
        if operand.dense:
            return self.few_of(d, here + j, few, operand.dtype, of)
        e, scratch = var("e"), f"few_{operand.dtype}"
        end = var(few) if few else const(self.real.n)
        gather = For("e", const(0), end, const(1), (Move(Ptr(scratch, e), here + (j + e) * var(f"x{number}_n")),))
        return (gather, Verb("load_c", d, p=Ptr(scratch), of=of.name))

    def few_of(self, d: str, here: Ptr, few: str, dtype: str, of: Atom) -> tuple[Stmt, ...]:
        """Load of fewer neighbours than a vector has: `few` of them, of a type, into register d of an atom."""
        if self.isa.spelling(of, "load_mask", dtype):
            return (Verb("load_mask", d, p=here, mask="few", of=of.name),)
        e, scratch = var("e"), f"few_{dtype}"
        gather = For("e", const(0), var(few), const(1), (Move(Ptr(scratch, e), here + e),))
        return (gather, Verb("load_c", d, p=Ptr(scratch), of=of.name))

    def broadcast(self, x: Expr, here: Ptr) -> tuple[Stmt, ...]:
        """Load of an element that is the same for all columns, into every lane."""
        d = self.name(x)
        if x.dtype == "s32":
            lanes = self.isa.vector("s32", self.real.n)
            assert lanes is not None  # noqa: S101 - `lacks` has checked it
            return (Verb("load_a", d, p=here, of=lanes.name, to="s32"),)
        return spread(self.real, d, here)

    def few(self, count: Index) -> tuple[Stmt, ...]:
        """Mask of the first `count` lanes, where the machine has masks."""
        return (keep(self.real, "few", count, self.real.name),) if self.real.mask else ()

    def store(self, x: Expr, operand: int, j: Index, few: str) -> tuple[Stmt, ...]:
        """Store of a vector of results to an operand."""
        to = self.fused.operands[operand]
        if operand in self.parts:
            return self.write(x, to.dtype, self.parts[operand], const(0), few, const(1))
        here = Ptr(f"x{operand}", self.inner * var(f"x{operand}_m")) if "m" in to.axes else Ptr(f"x{operand}")
        return self.write(x, to.dtype, here, j, few, const(1) if to.dense else var(f"x{operand}_n"))

    def write(  # noqa: PLR0917 - an address takes three
        self, x: Expr, dtype: str, here: Ptr, j: Index, few: str, step: Index
    ) -> tuple[Stmt, ...]:
        """Store of a vector of results of a type at an address."""
        lanes = self.isa.vector("s32", self.real.n) if dtype == "s32" else self.real
        assert lanes is not None  # noqa: S101 - `lacks` has checked it
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
        """Store of the one result of a row, which is in every lane."""
        to = self.fused.operands[operand]
        lanes = self.isa.vector("s32", self.real.n) if to.dtype == "s32" else self.real
        assert lanes is not None  # noqa: S101 - `lacks` has checked it
        value, before = self.value(x)
        scratch = f"few_{to.dtype}"
        here = Ptr(f"x{operand}", self.inner * var(f"x{operand}_m")) if "m" in to.axes else Ptr(f"x{operand}")
        return (*before, Verb("store", value, p=Ptr(scratch), of=lanes.name), Move(here, Ptr(scratch)))

    def value(self, x: Expr) -> tuple[str, tuple[Stmt, ...]]:
        """Register of a result, with the statement that loads it where it is a literal."""
        if x.op != "const":
            return self.names[x], ()
        d = self.name(x)
        return d, (Map("literal", d, x.args, x.dtype, x.dtype, self.real.name),)


def spread(real: Atom, d: str, p: Ptr) -> tuple[Stmt, ...]:
    """Load of one f32 into every lane."""
    one = f"{d}_one"
    return (Verb("load_a", one, p=p, of=real.name), Map("splat", d, (one,), "f32", "f32", real.name))


def vectors(at: Elements, begin: Index, end: Index, body: Callable[[Index, str], Iterable[Stmt]]) -> list[Stmt]:
    """Loop over vectors of columns, and a last one of fewer."""
    whole, lanes = end - end % at.real.n, at.real.n
    stmts: list[Stmt] = [For("j", begin, whole, const(lanes), tuple(body(var("j"), "")))]
    if lanes > 1:
        rest = (Let("j", whole), Let("left", end - whole), *at.few(end - whole))
        stmts.append(If(whole.lt(end), (*rest, *body(var("j"), "left"))))
    return stmts


def own(fused: Fused) -> list[str]:
    """The leaves of `OWN` that expressions read."""
    return [name for name in OWN if any(x.op == name for x in fused.steps)]


def parameters(fused: Fused) -> list[Param]:
    """Parameters of a function for its operands: pointers and strides."""
    written = dict(fused.results)
    params = [Param("numbers", "f32", readonly=True)] if fused.numbers else []
    for i, x in enumerate(fused.operands):
        params.append(Param(f"x{i}", x.dtype, readonly=i not in written))
        params += [Param(f"x{i}_m")] if "m" in x.axes else []
        params += [] if x.dense else [Param(f"x{i}_n")]
    return params


def arguments(fused: Fused, item: Index, row: Index, column: Index) -> list[Index | Ptr]:
    """Arguments for `parameters`, at an element of the result."""
    args: list[Index | Ptr] = [Ptr("numbers")] if fused.numbers else []
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
        args.append(Ptr(f"x{i}", at))
        args += [var(f"x{i}_m")] if "m" in x.axes else []
        args += [] if x.dense else [var(f"x{i}_n")]
    return args
