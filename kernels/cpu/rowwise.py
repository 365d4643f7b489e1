"""Row-wise kernels: element-wise expressions and reductions over rows, without a product.

    for each share of the rows          <- threads
      for each pass over the row        (the row stays in L1 or L2)
        for each vector of it

A pass computes the sums and maxima that depend only on those of earlier passes; the
last one writes. A softmax takes three: the maximum, the sum of exponentials, their
quotients. Values that take many operations and are needed again by a later pass are kept in
scratch, so that an exponential is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, minimum, round_up, var
from portmm.ir.lane_nodes import Map, Total
from portmm.ir.nodes import Call, For, Function, If, Kernel, Let, LetPtr, Parallel, Param, Scratch, Verb
from portmm.kernels.cpu.elementwise import Elements, arguments, parameters
from portmm.spec.epilogue import REDUCTIONS, operand_types
from portmm.spec.expr_ops import OPS

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

TASKS_PER_WORKER = 4
CHAINS = 4
"""Independent accumulators of a sum: an addition takes four cycles."""
RUN = 64
"""Vectors of a chain after which sums restart (`summation`), and sums of runs after which theirs do: a row of a
million elements has 16 thousand runs of one lane. Errors are NumPy's, whose sums are pairwise."""
WORTH_KEEPING = 6
"""Operations from which a value is kept for a later pass: a store and a load take as long as some of them."""


def build(isa: Isa, real: Atom, fused: Fused) -> Kernel:
    """Kernel that computes expressions over all rows."""
    passes = Passes(fused)
    m, n, task = var("m"), var("n"), var("task")
    total = m * var("batch")
    tasks = minimum(total, var("workers") * TASKS_PER_WORKER)
    width = round_up(n, 64)
    kept = [f"kept{i}" for i in range(len(passes.kept))]
    scratch = [LetPtr(x, Ptr("work", (var("worker") * len(kept) + i) * width), "f32") for i, x in enumerate(kept)]
    here = arguments(fused, var("item"), var("row"), const(0))
    line = Call(row_function(isa, real, fused), (m, n, var("item"), var("row"), *here, *map(Ptr, kept)))
    body = (Let("item", var("r") // m), Let("row", var("r") % m), line)
    rows = For("r", total * task // tasks, total * (task + 1) // tasks, const(1), body)
    share = Function("some_rows", "task", (), (*scratch, rows), "A share of the rows")
    entry = Function("entry", "entry", (), (Parallel(share, tasks),), "All rows")
    operands = operand_types(str(fused))
    work = width * (var("workers") * len(kept)) + 64
    return Kernel(f"portmm_rows_{real.name}", isa, real, entry, work, operands=operands)


@dataclass(frozen=True, slots=True, init=False)
class Passes:
    """Reductions and stored values of each pass over a row.

    Attributes:
        reductions: those of each pass but the last.
        kept: value stored by a pass for later ones -> the pass.
    """

    reductions: tuple[tuple[Expr, ...], ...]
    kept: dict[Expr, int]

    def __init__(self, fused: Fused) -> None:
        depth: dict[Expr, int] = {}
        for x in fused.steps:
            inner = max((depth[y] for y in x.inner), default=0)
            depth[x] = inner + (x.op == "reduce")
        last = max(depth.values(), default=0)
        passes = tuple(tuple(x for x in fused.reductions if depth[x] == i + 1) for i in range(last))
        object.__setattr__(self, "reductions", passes)
        object.__setattr__(self, "kept", _kept(fused, passes, depth))


def _kept(fused: Fused, passes: tuple[tuple[Expr, ...], ...], depth: dict[Expr, int]) -> dict[Expr, int]:
    """Largest subexpressions that a pass computes and a later one needs again, if worth storing."""
    wanted = [[x.args[1] for x in one] for one in passes] + [[x for _, x in fused.results]]
    stored: dict[Expr, int] = {}
    for i, roots in enumerate(wanted[:-1]):
        computed = inside(roots, stored)
        later = [x for one in wanted[i + 1 :] for x in one]
        stack = list(later)
        while stack:
            x = stack.pop()
            if x.op == "reduce" or x in stored:
                continue
            kept = x.op in OPS and x.dtype == "f32" and x in computed and depth[x] <= i
            if kept and _operations(x) >= WORTH_KEEPING:
                stored[x] = i
                continue
            stack += x.inner
    return stored


def inside(roots: list[Expr], known: dict[Expr, int]) -> set[Expr]:
    """Subexpressions of some values, without reductions and `known` ones."""
    needed: set[Expr] = set()
    stack = list(roots)
    while stack:
        x = stack.pop()
        if x in needed or x.op == "reduce" or x in known:
            continue
        needed.add(x)
        stack += x.inner
    return needed


def _operations(x: Expr) -> int:
    return sum(y.op in OPS for y in inside([x], {}))


def row_function(isa: Isa, real: Atom, fused: Fused) -> Function:
    """Function for all passes over one row."""
    passes = Passes(fused)
    at = Elements(isa, real, fused, row=var("row"))
    names = {x: f"kept{i}" for i, x in enumerate(passes.kept)}
    sums = {x: f"r{i}" for i, x in enumerate(fused.reductions)}
    body: list[Stmt] = [*at.scratch(), *(Scratch(x, 1, "f32") for x in sums.values())]
    body += [Scratch("lane", real.n, "f32")] if sums else []
    for i, reductions in enumerate(passes.reductions):
        keeps = [x for x, when in passes.kept.items() if when == i]
        body += _pass(at, [(x, sums[x]) for x in reductions], [(x, names[x]) for x in keeps], ())
        at.stored |= {x: sums[x] for x in reductions} | {x: names[x] for x in keeps}
    body += _pass(at, [], [], fused.results)
    params = [Param("m"), Param("n"), Param("item"), Param("row"), *parameters(fused)]
    params += [Param(x, "f32") for x in names.values()]
    return Function("one_row", "inner", tuple(params), tuple(body), "Expressions over one row")


def _pass(
    at: Elements,
    reductions: list[tuple[Expr, str]],
    keeps: list[tuple[Expr, str]],
    results: tuple[tuple[int, Expr], ...],
) -> tuple[Stmt, ...]:
    """Statements of one pass over a row: reductions, stored values, and results."""
    at.names.clear()
    n, lanes, whole = var("n"), at.real.n, var("n") - var("n") % at.real.n
    along = [(i, x) for i, x in results if "n" in at.fused.operands[i].axes]
    wanted = [x.args[1] for x, _ in reductions] + [x for x, _ in keeps] + [x for _, x in along]
    single = [(i, x) for i, x in results if "n" not in at.fused.operands[i].axes]
    body: list[Stmt] = list(at.once([*wanted, *(x for _, x in single)], "bm"))
    chains = CHAINS if reductions else 1
    for x, to in reductions:
        start = (REDUCTIONS[x.args[0]],)
        body += [Map("literal", f"all_{to}_{e}", start, "f32", "f32", at.real.name) for e in range(chains)]
    body += [s for i, x in single for s in at.single(x, i)]
    if not wanted:
        return tuple(body)
    fixed = dict(at.names)

    def step(j: Index, few: str, chain: int = 0) -> tuple[Stmt, ...]:
        at.names = dict(fixed)
        stmts = list(at.compute(wanted, j, few))
        for x, to in keeps:
            stmts.append(Verb("store", at.names[x], p=Ptr(to, j), of=at.real.name))
        for x, to in reductions:
            stmts += _reduced(at, x, f"all_{to}_{chain}", few)
        for i, x in along:
            stmts += at.store(x, i, j, few)
        return tuple(stmts)

    several = n - n % (chains * lanes) if chains > 1 else const(0)
    if chains > 1:
        side = tuple(s for e in range(chains) for s in step(var("j") + e * lanes, "", e))
        body += _runs(
            at, [f"{to}_{e}" for x, to in reductions if x.args[0] == "add" for e in range(chains)], several, side
        )
    body.append(For("j", several, whole, const(lanes), step(var("j"), "")))
    if lanes > 1:
        count = (Let("j", whole), Let("left", n - whole), *at.few(n - whole))
        body.append(If(whole.lt(n), (*count, *step(var("j"), "left"))))
    for x, to in reductions:
        body += [
            Map(x.args[0], f"all_{to}_0", (f"all_{to}_0", f"all_{to}_{e}"), "f32", "f32", at.real.name)
            for e in range(1, chains)
        ]
        body.append(Verb("store", f"all_{to}_0", p=Ptr("lane"), of=at.real.name))
        body.append(Total(x.args[0], Ptr(to), Ptr("lane"), lanes))
    at.names = {}
    return tuple(body)


def _runs(at: Elements, sums: list[str], end: Index, side: tuple[Stmt, ...]) -> list[Stmt]:
    """Loop over a row; the registers all_* of `sums` restart with each run, those of runs with each block."""
    real, step = at.real.name, CHAINS * at.real.n
    if not sums:
        return [For("j", const(0), end, const(step), side)]
    run, block = RUN * step, RUN * RUN * step
    j_run, j_block = var("j_run"), var("j_block")

    def none(level: str) -> list[Stmt]:
        return [Map("literal", f"{level}_{x}", (0.0,), "f32", "f32", real) for x in sums]

    def added(to: str, level: str, more: str) -> list[Stmt]:
        return [Map("add", f"{to}_{x}", (f"{level}_{x}", f"{more}_{x}"), "f32", "f32", real) for x in sums]

    once = For("j", j_run, minimum(end, j_run + run), const(step), side)
    after_run = If((j_run + run).lt(end), (*added("runs", "runs", "all"), *none("all")))
    runs = For("j_run", j_block, minimum(end, j_block + block), const(run), (once, after_run))
    after_block = If((j_block + block).lt(end), (*added("blocks", "blocks", "runs"), *none("runs")))
    return [
        *none("runs"),
        *none("blocks"),
        For("j_block", const(0), end, const(block), (runs, after_block)),
        *added("all", "runs", "all"),
        *added("all", "blocks", "all"),
    ]


def _reduced(at: Elements, x: Expr, into: str, few: str) -> tuple[Stmt, ...]:
    """Reduction of a vector of values into a register; of a last one only the valid lanes."""
    kind, value = x.args
    register, before = at.value(value)
    stmts = list(before)
    if few:
        lanes, count, there, kept = (f"{into}_{y}" for y in ("at", "count", "there", "kept"))
        real = at.real.name
        stmts += [
            Map("lanes", lanes, (), "s32", "s32", real, const(0)),
            Map("whole", count, (), "s32", "s32", real, var(few)),
            Map("lt", there, (lanes, count), "mask", "s32", real),
            Map("select", kept, (there, register, REDUCTIONS[kind]), "f32", "f32", real),
        ]
        register = kept
    return (*stmts, Map(kind, into, (into, register), "f32", "f32", at.real.name))
