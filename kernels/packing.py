"""Panels: the layouts that micro-kernels read, and how operands get into them.

A panel of B is to[k][NR]: NR columns side by side for each k, padded at the
right edge with copies of the last valid column (padding is computed with and
never stored). A panel of A is to[k][rows] with the true number of rows. Both
depend on the micro-kernel's width only, never on a blocking, so a packed B
serves every M, and a block of k is a contiguous part of each panel.

Operands that run along k are turned in registers: log2(L) rounds of perfect
shuffles transpose an L x L block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.dtype import BY_NAME
from portmm.ir import (
    Call,
    For,
    Function,
    If,
    Kernel,
    Let,
    LetPtr,
    Move,
    Parallel,
    Param,
    Prefetch,
    Ptr,
    Shuffle,
    Verb,
    ceil_div,
    const,
    maximum,
    minimum,
    var,
)
from portmm.naming import KernelName

if TYPE_CHECKING:
    from portmm.ir import Index, Stmt
    from portmm.target import Atom, Isa


def line_of(atom: Atom) -> int:
    """Elements of a cache line, at least one vector."""
    return max(atom.n, 64 // BY_NAME[atom.acc].bytes)


def keep(atom: Atom, register: str, count: Index) -> Verb:
    """A mask of the first `count` lanes; `count` may be out of range on either side."""
    return Verb("mask", register, count=maximum(0, minimum(count, atom.n)))


@dataclass(frozen=True, slots=True)
class _Lines:
    """An operand as lines to be laid side by side.

    Attributes:
        name: pointer to the operand.
        along: stride within a line, the stride of k.
        across: stride from one line to the next.
        valid: how many lines there are; past that, the last one is repeated.
        width: lines in a panel.
    """

    name: str
    along: str
    across: str
    valid: str
    width: Index

    def line(self, j: Index | int) -> Ptr:
        """Start of line j, or of the last one."""
        return Ptr(self.name, minimum(j, var(self.valid) - 1) * var(self.across))


def pack_b_rows(atom: Atom, nr: int, panels: int, prefetch: int) -> Function:
    """to[q][p][j] = B[p][q * NR + j]: whole panels at once, from long runs of each row.

    A row at a stride of pages is a miss in cache and address translation each
    time; the longer the run that is read there, the less that shows, and rows
    further down are asked for meanwhile.
    """
    p = var("p")
    lanes, line = atom.n, line_of(atom)
    row = Ptr("b", p * var("b_k"))
    asks = tuple(Prefetch(row + (var("b_k") * prefetch + j)) for j in range(0, panels * nr, line))
    copy: list[Stmt] = []
    for v in range(0, panels * nr, lanes):
        to = Ptr("to", var("panel_step") * (v // nr) + p * nr + v % nr)
        copy += [Verb("load_b", f"v{v // lanes % 4}", p=row + v), Verb("store", f"v{v // lanes % 4}", p=to)]
    params = (Param("k"), Param("b", atom.b, readonly=True), Param("b_k"), Param("to", atom.b), Param("panel_step"))
    loop = For("p", const(0), var("k"), const(1), (*asks, *copy))
    comment = f"to[{panels}][k][{nr}] = B[k][{panels * nr}], row layout"
    return Function("pack_b_rows", "inner", params, (loop,), comment)


def pack_b(isa: Isa, atom: Atom, nr: int, layout: str) -> Function:
    """to[p][j] = B[p][j] for p < k, j < NR; columns past `columns` repeat the last."""
    params = (
        Param("k"),
        Param("columns"),
        Param("b", atom.b, readonly=True),
        Param("b_k"),
        Param("b_n"),
        Param("to", atom.b),
    )
    lines = _Lines("b", "b_k", "b_n", "columns", const(nr))
    if layout == "row":
        body = _rows(atom, nr, lines)
    elif layout == "col" and isa.shuffles and atom.n > 1:
        body = tuple(x for g in range(0, nr, atom.n) for x in _turn(atom, lines, g))
        body += _gather(lines, atom.n)
    else:
        body = _gather(lines)
    return Function("pack_b", "inner", params, body, f"to[k][{nr}] = B[k][columns], {layout} layout, padded")


def pack_a(isa: Isa, atom: Atom, mr: int, layout: str) -> Function:
    """to[p][i] = A[i][p] for p < k, i < rows; up to a vector past the end is overwritten."""
    params = (
        Param("k"),
        Param("rows"),
        Param("a", atom.a, readonly=True),
        Param("a_m"),
        Param("a_k"),
        Param("to", atom.a),
    )
    rows = var("rows")
    lines = _Lines("a", "a_k", "a_m", "rows", rows)
    body: tuple[Stmt, ...] = ()
    if layout == "row" and isa.shuffles and atom.n > 1:
        # Stores are whole vectors, so each spills over onto what follows: later
        # groups of rows go first, and a smaller k goes before a larger one.
        for g in reversed(range(0, mr, atom.n)):
            body += (If(const(g).lt(rows), _turn(atom, lines, g)),)
        body += _gather(lines, atom.n)
    elif layout == "col" and atom.mask:
        body = _columns(atom, mr)
    else:
        body = _gather(lines)
    return Function("pack_a", "inner", params, body, f"to[k][rows] = A[rows][k], {layout} layout")


def _gather(lines: _Lines, block: int = 0) -> tuple[Stmt, ...]:
    """Element by element; from the first k that whole blocks of `block` leave over."""
    p, j = var("p"), var("j")
    begin = var("k") - var("k") % block if block else const(0)
    move = Move(Ptr("to", p * lines.width + j), lines.line(j) + p * var(lines.along))
    inner = For("j", const(0), lines.width, const(1), (move,))
    return (For("p", begin, var("k"), const(1), (inner,)),)


def _rows(atom: Atom, nr: int, lines: _Lines) -> tuple[Stmt, ...]:
    """B already runs along n: copy rows."""
    p, vectors = var("p"), range(nr // atom.n)
    copy = tuple(
        x
        for v in vectors
        for x in (
            Verb("load_b", f"v{v}", p=Ptr("b", p * var("b_k") + v * atom.n)),
            Verb("store", f"v{v}", p=Ptr("to", p * nr + v * atom.n)),
        )
    )
    full = (For("p", const(0), var("k"), const(1), copy, 4),)
    if nr == 1:
        return full
    edge: tuple[Stmt, ...]
    if atom.mask:
        masks = tuple(keep(atom, f"m{v}", var("columns") - v * atom.n) for v in vectors)
        kept = tuple(
            x
            for v in vectors
            for x in (
                Verb("load_mask", f"v{v}", p=Ptr("b", p * var("b_k") + v * atom.n), mask=f"m{v}"),
                Verb("store", f"v{v}", p=Ptr("to", p * nr + v * atom.n)),
            )
        )
        edge = (*masks, For("p", const(0), var("k"), const(1), kept))
    else:
        edge = _gather(lines)
    return (If(var("columns").lt(nr), edge, full),)


def _columns(atom: Atom, mr: int) -> tuple[Stmt, ...]:
    """A already runs along m: copy columns, each store spilling onto the next."""
    p, rows = var("p"), var("rows")
    groups = range(0, mr, atom.n)
    masks = tuple(keep(atom, f"m{g}", rows - g) for g in groups)
    copy = tuple(
        x
        for g in groups
        for x in (
            Verb("load_mask", f"v{g}", p=Ptr("a", p * var("a_k") + g), mask=f"m{g}"),
            Verb("store_mask", f"v{g}", p=Ptr("to", p * rows + g), mask=f"m{g}"),
        )
    )
    return (*masks, For("p", const(0), var("k"), const(1), copy, 2))


def _turn(atom: Atom, lines: _Lines, group: int) -> tuple[Stmt, ...]:
    """Transpose whole L x L blocks of the L lines from `group` on, which run along k."""
    lanes, p = atom.n, var("p")
    names = [f"{lines.name}{group + j}" for j in range(lanes)]
    starts = tuple(LetPtr(x, lines.line(group + j), atom.b, readonly=True) for j, x in enumerate(names))
    load = tuple(Verb("load_b", f"t0_{j}", p=Ptr(x, p)) for j, x in enumerate(names))
    turn, last = transpose(lanes)
    store = tuple(Verb("store", r, p=Ptr("to", (p + i) * lines.width + group)) for i, r in enumerate(last))
    end = var("k") - (lanes - 1)
    return (*starts, For("p", const(0), end, const(lanes), (*load, *turn, *store)))


def transpose(lanes: int) -> tuple[tuple[Stmt, ...], list[str]]:
    """Shuffles that transpose registers t0_0 ... t0_{lanes-1}, and the names of the results.

    One round pairs register i with i + lanes/2 and interleaves their lanes; after
    log2(lanes) rounds, lane j of register i has become lane i of register j.
    """
    half = lanes // 2
    low = tuple(x for i in range(half) for x in (i, lanes + i))
    high = tuple(x for i in range(half, lanes) for x in (i, lanes + i))
    body: list[Stmt] = []
    now = [f"t0_{j}" for j in range(lanes)]
    for rnd in range(1, lanes.bit_length()):
        then = [f"t{rnd}_{j}" for j in range(lanes)]
        for i in range(half):
            body.append(Shuffle(then[2 * i], now[i], now[i + half], low))
            body.append(Shuffle(then[2 * i + 1], now[i], now[i + half], high))
        now = then
    return tuple(body), now


def build(isa: Isa, atom: Atom, nr: int, layout: str) -> Kernel:
    """The kernel that packs each item of a batch of B: C[panel][k][NR] = B[k][n]."""
    n, k, task = var("n"), var("k"), var("task")
    panels = ceil_div(n, nr)
    item, panel = task // panels, task % panels
    body = (
        Let("item", item),
        Let("panel", panel),
        Call(
            pack_b(isa, atom, nr, layout),
            (
                k,
                minimum(n - var("panel") * nr, nr),
                Ptr("b", var("item") * var("b_batch") + var("panel") * nr * var("b_n")),
                var("b_k"),
                var("b_n"),
                Ptr("c", var("item") * var("c_batch") + var("panel") * (k * nr)),
            ),
        ),
    )
    one = Function("panel_of_b", "task", (), body, "One panel of one item")
    entry = Function("entry", "entry", (), (Parallel(one, panels * var("batch")),), "Every panel of every item")
    name = KernelName("pack", atom.acc, atom.a, atom.b, 1, nr, atom.k_pack, isa.name)
    return Kernel(str(name), isa, atom, entry, const(64))
