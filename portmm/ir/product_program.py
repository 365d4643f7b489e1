"""Block programs of matrix products: a contraction along k, and expressions of its sums.

Owns `of_product`, the record of a problem, and `product_of`, what kernels of products read of a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from portmm.errors import ScheduleError
from portmm.ir.block_program import BlockProgram, TileGemm, TileTransfer
from portmm.spec.dtype import accumulator, spell, types
from portmm.spec.epilogue import C, Fused, Operand, acc, column_sum, contraction, load, parse
from portmm.spec.expr import Expr, const, ordered, real
from portmm.spec.expr_functions import substituted

if TYPE_CHECKING:
    from portmm.spec.problem import Problem

A, B, RESULT = range(3)
"""Numbers of the operands of a problem's record; those of its epilogue follow, then scales of rows of A, if any."""


def of_product(p: Problem) -> BlockProgram:
    """The record of a problem. Elements of quantized operands are integers, and those of int4 values what they mean.

    Operands have a label "b" where there is a batch.
    """
    a, b, c = p.types
    kind = "s32" if p.acc == "s32" else "f32"
    fused = parse(p.fused) if p.fused else Fused((), ((C, acc(kind)),))
    batch = "b" * (p.batch > 1 or any("b" in x.axes for x in fused.operands))
    operands = [*(Operand(*x) for x in ((a, f"{batch}mk"), (b, f"{batch}kn"), (c, f"{batch}mn"))), *fused.operands]
    sums = contraction(load(A, a), load(B, b), "k", kind)
    columns = contraction(const(1.0), load(B, b), "k", kind)
    scales = load(len(operands), "f32")
    if p.source:
        operands.append(Operand("f32", f"{batch}m"))

    def change(x: Expr) -> Expr | None:
        if x.op == "load":
            return load(x.args[0] + 3, operands[x.args[0] + 3].dtype)
        if x.op == "acc":
            return sums if x.dtype == kind else real(sums)
        return {"column_sum": columns, "row_scale": scales}.get(x.op)

    done: dict[Expr, Expr] = {}
    stores = [TileTransfer(i + 3 if i != C else RESULT, substituted(x, change, done)) for i, x in fused.results]
    used = set(ordered(tuple(x.value for x in stores)))
    gemms = tuple(TileGemm(x) for x in (sums, columns) if x in used)
    return BlockProgram(f"{batch}mn", "k", tuple(operands), (gemms, tuple(stores)))


class Product(NamedTuple):
    """Parts of a record that kernels of products read.

    Attributes:
        a, b: numbers of the operands that are multiplied.
        reads: of those that expressions read.
        results: numbers of those that are written, the product's own first, and their values: loads are numbered as in
            `reads`, sums are `epilogue.acc`.
        operands: those that expressions read, then further ones that are written.
        dtype: types of A, B and C, as in a `Problem`.
    """

    a: int
    b: int
    reads: tuple[int, ...]
    results: tuple[tuple[int, Expr], ...]
    operands: tuple[Operand, ...]
    dtype: str

    @property
    def epilogue(self) -> str:
        """The expressions as in a `Problem`, or an empty string."""
        first = len(self.reads) - 1
        results = tuple((first + i if i else C, x) for i, (_, x) in enumerate(self.results))
        return "" if self.plain else str(Fused(self.operands, results))

    @property
    def plain(self) -> bool:
        """Whether the sums are the only result."""
        (_, value), (a, b, c) = self.results[0], types(self.dtype)
        whole = value.dtype == c == "s32"
        return len(self.results) == 1 and value.op == "acc" and whole == (accumulator(a, b) == "s32")


def product_of(program: BlockProgram) -> Product:
    """The product that a record computes, with labels b, m, n and k.

    Raises:
        ScheduleError: no kernel of products computes it.
    """
    gemms = {x.value for one in program.passes for x in one if isinstance(x, TileGemm)}
    pairs = [x for x in gemms if all(y.op == "load" for y in x.inner)]
    if len(program.passes) != 2 or len(pairs) != 1 or not set(program.grid) <= set("bmn") or program.loop != "k":
        raise ScheduleError("kernels of products take one contraction of two operands along k, for points b, m and n")
    (sums,), stores = pairs, [x for x in program.passes[1] if isinstance(x, TileTransfer)]
    a, b = (x.args[0] for x in sums.inner)
    if not set(program.operands[a].axes) <= set("bmk") or not set(program.operands[b].axes) <= set("bkn"):
        raise ScheduleError(f"{program.operands[a]} and {program.operands[b]} are no A along m and k, B along k and n")
    stores.sort(key=lambda x: not {"m", "n"} <= set(program.operands[x.operand].axes))
    written = {x.operand for x in stores}
    loaded = {x.args[0] for x in program.fused.steps if x.op == "load" and x not in set(sums.inner)}
    reads = [i for i in range(len(program.operands)) if i not in (a, b) and (i in loaded or i not in written)]

    def change(x: Expr) -> Expr | None:
        if x is sums:
            return acc(x.dtype)
        if x.op == "float" and x.args[0] is sums:
            return acc()
        if x.op == "contract" and x.args[1] is const(1.0) and x.args[2] is sums.args[2]:
            return column_sum()
        return load(reads.index(x.args[0]), program.operands[x.args[0]].dtype) if x.op == "load" else None

    done: dict[Expr, Expr] = {}
    results = tuple((x.operand, substituted(x.value, change, done)) for x in stores)
    if any(x.op == "contract" for x in ordered(tuple(x for _, x in results))):
        raise ScheduleError("kernels of products have one product: another contraction is read")
    operands = tuple(program.operands[i] for i in (*reads, *(x.operand for x in stores[1:])))
    kinds = [program.operands[i].dtype for i in (a, b, stores[0].operand)]
    return Product(a, b, tuple(reads), results, operands, spell(*kinds))
