"""GEMM as dot products: A by rows and B by columns, both contiguous along k.

    for each share of the columns   <- threads
      for each MR rows
        for each NR columns
          MR x NR accumulators, vectors along k

Nothing is packed or transposed: x . W^T with W in place. Only the few columns of a B by
rows, or of one packed panel, are copied first, each along k; threads then share the rows of C. Each element of
C is a sum over lanes, so its order of additions differs from the other programs'
and `deterministic` excludes this one. Runs (`summation`) are counted in steps of all
lanes. A register tile of MR x NR loads (MR + NR) / (MR * NR) vectors per multiply-add;
4 x 4 keeps two load ports and two multiply-add ports about equally busy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.lane_nodes import Reduce, Shuffle
from portmm.ir.nodes import (
    Call,
    For,
    Function,
    If,
    Kernel,
    Let,
    Mac,
    Move,
    Parallel,
    Param,
    Prefetch,
    Scratch,
    Switch,
    Verb,
)
from portmm.kernels.cpu.blocking import TASKS_PER_WORKER, M, N, constants
from portmm.spec.dtype import BY_NAME
from portmm.target.summation import RUN, chained

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


MANY = 8
"""Accumulators with which the loop over k is not unrolled."""
BLOCK = 16
"""Bytes of the parts of a vector inside which shuffles are cheap."""
K = var("k")


def build(s: Schedule, isa: Isa, atom: Atom) -> Kernel:
    """Kernel that computes C = A . B by schedule `s`."""
    if s.b.packed:
        return _few_columns(s, isa, atom)
    groups = ceil_div(N, s.nr)
    chunks = maximum(1, minimum(groups, (var("workers") - 1) * TASKS_PER_WORKER))
    task = var("task")
    body: tuple[Stmt, ...] = (
        Let("chunks", chunks),
        Let("item", task // var("chunks")),
        Let("share", task % var("chunks")),
        Let("first", groups * var("share") // var("chunks") * s.nr),
        Let("last", minimum(N, groups * (var("share") + 1) // var("chunks") * s.nr)),
        *_tiles(s, atom),
    )
    block = Function("columns_of_c", "task", (), body, "A share of the columns of C, all rows")
    entry = Function("entry", "entry", (), (Parallel(block, chunks * var("batch")),), "All products of the batch")
    types = tuple(zip("abc", s.types, strict=True))
    return Kernel(str(s.name(atom)), isa, atom, entry, const(0), swap=s.atom.swap, types=types, constants=constants(s))


def _few_columns(s: Schedule, isa: Isa, atom: Atom) -> Kernel:
    """Kernel by schedule `s` for a B of a few columns: copies of them, each along k, then shares of the rows of C."""
    j, p, item, task = (var(x) for x in ("j", "p", "item", "task"))
    step = ceil_div(K, atom.n) * atom.n
    # The columns of a panel are adjacent: the stride of a packed B along n is that of panels.
    across = const(1) if s.b.layout == "packed" else var("b_n")
    element = Ptr("b", item * var("b_batch") + p * var("b_k") + j * across)
    copy = For("j", const(0), N, const(1), (Move(Ptr("work", j * step + p), element),))
    slices = ceil_div(M, s.mr)
    tasks = maximum(1, minimum(slices, (var("workers") - 1) * TASKS_PER_WORKER))
    share = (
        Let("first", slices * task // tasks * s.mr),
        Let("last", minimum(M, slices * (task + 1) // tasks * s.mr)),
        Let("whole", var("first") + (var("last") - var("first")) // s.mr * s.mr),
        For("i", var("first"), var("whole"), const(s.mr), _columns(s, atom, s.mr, step)),
        *((For("i", var("whole"), var("last"), const(1), _columns(s, atom, 1, step)),) if s.mr > 1 else ()),
    )
    rows = Function("rows_of_c", "task", (Param("item"),), share, "A share of the rows of C, all columns")
    body = (For("p", const(0), K, const(1), (copy,)), Parallel(rows, tasks, (item,)))
    items = For("item", const(0), var("batch"), const(1), body)
    entry = Function("entry", "entry", (), (items,), "All products of the batch")
    types = tuple(zip("abc", s.types, strict=True))
    return Kernel(
        str(s.name(atom)), isa, atom, entry, N * step + 64, swap=s.atom.swap, types=types, constants=constants(s)
    )


def _columns(s: Schedule, atom: Atom, rows: int, step: Index) -> tuple[Stmt, ...]:
    """Loops over the columns of some rows of C, by copies of them that are `step` elements apart."""
    j, whole = var("j"), N // s.nr * s.nr

    def call(columns: int) -> tuple[Stmt, ...]:
        return (_call(s, atom, rows, columns, (Ptr("work", j * step), step)),)

    tiles = For("j", const(0), whole, const(s.nr), call(s.nr))
    return (tiles, For("j", whole, N, const(1), call(1))) if s.nr > 1 else (tiles,)


def _tiles(s: Schedule, atom: Atom) -> tuple[Stmt, ...]:
    """Loops over register tiles, columns outermost: their lines stay in cache while all rows of A are read."""
    last = var("last")
    whole = var("first") + (last - var("first")) // s.nr * s.nr
    return (
        For("j", var("first"), whole, const(s.nr), _rows(s, atom, s.nr)),
        *_behind(s, atom, whole),
    )


def _behind(s: Schedule, atom: Atom, whole: Index) -> tuple[Stmt, ...]:
    """Loops over the columns behind the last whole tile: a tile that ends with them, or single ones if there are fewer.

    The columns that this tile and the one before it have in common are computed again, to the same sums.
    """
    last = var("last")
    if s.nr == 1:
        return ()
    again = (If(whole.lt(last), (Let("j", last - s.nr), *_rows(s, atom, s.nr))),)
    single = (For("j", whole, last, const(1), _rows(s, atom, 1)),)
    return (If(var("first").lt(last - s.nr), again, single),)


def _rows(s: Schedule, atom: Atom, columns: int) -> tuple[Stmt, ...]:
    """Loops over rows of C: tiles of MR rows and single ones, or slices of nearly equal heights."""
    if len(s.heights) > 1:
        n, slices = var("slice"), ceil_div(M, s.mr)
        height, taller = M // slices, M % slices
        bounds = (Let("h", height + n.lt(taller)), Let("i", n * height + minimum(n, taller)))
        cases = tuple((h, (_call(s, atom, h, columns),)) for h in s.heights)
        return (For("slice", const(0), slices, const(1), (*bounds, Switch(var("h"), cases))),)
    whole = M // s.mr * s.mr
    rows = (For("i", const(0), whole, const(s.mr), (_call(s, atom, s.mr, columns),)),)
    return rows if s.mr == 1 else (*rows, For("i", whole, M, const(1), (_call(s, atom, 1, columns),)))


def _call(s: Schedule, atom: Atom, rows: int, columns: int, b: tuple[Ptr, Index] | None = None) -> Stmt:
    """Call of the micro-kernel at row i and column j, whose column is at an address `b`, by its stride, or in place."""
    i, j, item = var("i"), var("j"), var("item")
    args: tuple[Index | Ptr, ...] = (
        K,
        Ptr("a", item * var("a_batch") + i * var("a_m")),
        var("a_m"),
        *(b or (Ptr("b", item * var("b_batch") + j * var("b_n")), var("b_n"))),
        Ptr("c", item * var("c_batch") + i * var("c_m") + j),
        var("c_m"),
    )
    return Call(micro_kernel(atom, rows, columns, s.types, depth=s.static[2] if s.static else 0), args)


def micro_kernel(
    atom: Atom,
    rows: int,
    columns: int,
    types: tuple[str, str, str],
    *,
    short: bool = False,
    depth: int = 0,
    ahead: int = 0,
) -> Function:
    """Micro-kernel C[rows][columns] = A[rows][k] . B[columns][k], lanes along k.

    Args:
        atom: the vectors.
        rows: rows of C.
        columns: columns of C.
        types: types of A, B and C.
        short: k is one run.
        depth: k, if it is compiled in.
        ahead: prefetch rows of B that many rows ahead, if not 0.
    """
    accumulators = [(i, j) for i in range(rows) for j in range(columns)]
    p, end = var("p"), K - K % atom.n

    def loaded(load: str, register: str, at: Ptr, mask: str, uses: int) -> tuple[Stmt, ...]:
        # Compilers would load a vector again for each of its uses.
        hold = (Verb("hold", register),) if atom.hold and uses > 1 else ()
        return (Verb(load, register, p=at, mask=mask), *hold)

    def step(load: str, mask: str) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for i in range(rows):
            out += loaded(load, f"a{i}", Ptr("a", const(i) * var("a_m") + p), mask, columns)
        for j in range(columns):
            there = Ptr("b", const(j + ahead) * var("b_n") + p)
            out += [Prefetch(there)] if ahead and not mask else []
            out += loaded(load, f"b{j % 2}", Ptr("b", const(j) * var("b_n") + p), mask, rows)
            out += [Verb("mac", f"c{i}_{j}", f"a{i}", f"b{j % 2}") for i in range(rows)]
        return tuple(out)

    unroll = max(depth // atom.n, 2 if len(accumulators) < MANY else 1)
    short = short or chained(atom) or 0 < depth <= RUN * atom.n
    loops, added = _over_k(atom, accumulators, step("load_b", ""), end, unroll, short=short)
    at = {(i, j): Ptr("c", const(i) * var("c_m") + j) for i, j in accumulators}
    tail: tuple[Stmt, ...] = ()
    if atom.mask:
        masked = (Verb("mask", "m0", count=K - end), *step("load_mask", "m0"))
        loops = (*loops, If(const(0).lt(K % atom.n), (Let("p", end), *masked)))
    elif atom.n > 1:
        scalar = tuple(
            Mac(at[i, j], Ptr("a", const(i) * var("a_m") + p), Ptr("b", const(j) * var("b_n") + p))
            for i, j in accumulators
        )
        tail = (For("p", end, K, const(1), scalar),)
    sums = _stored(atom, at)
    params = (
        Param("k"),
        Param("a", types[0], readonly=True),
        Param("a_m"),
        Param("b", types[1], readonly=True),
        Param("b_n"),
        Param("c", types[2]),
        Param("c_m"),
    )
    comment = f"C[{rows}][{columns}] = A[{rows}][k] . B[{columns}][k]"
    body = (*loops, *added, *sums, *tail)
    return Function(f"dot_{rows}x{columns}", "inner", params, body, comment, inline=depth > 0)


def _stored(atom: Atom, at: dict[tuple[int, int], Ptr]) -> tuple[Stmt, ...]:
    """Stores of the sums of the lanes of accumulators, of as many as a vector holds at once.

    A row is one store; where it is less than a vector and masks cost time, sums pass through the stack, one by one.
    """
    columns = len({j for _, j in at})
    names = {x: f"c{x[0]}_{x[1]}" for x in at}
    if len(at) == 1 or atom.reduce or atom.n == 1:
        return tuple(Reduce(names[x], p, const(0)) for x, p in at.items())
    wide = min(columns, atom.n)
    rows = columns % wide == 0 and (wide == atom.n or atom.mask_free)
    mask, verb = ("m1", "store_mask") if wide < atom.n else ("", "store")
    body: list[Stmt] = [] if rows else [Scratch("sums", atom.n, atom.acc)]
    body += [Verb("mask", mask, count=const(wide))] if rows and mask else []
    places, count = list(at), atom.n // wide * wide if rows else atom.n
    for some in (places[start : start + count] for start in range(0, len(places), count)):
        first = names[some[0]]
        body += summed(atom, [names[x] for x in some], "t")
        if not rows:
            body.append(Verb("store", first, p=Ptr("sums"), to=atom.acc))
            body += (Move(at[x], Ptr("sums", const(lane))) for lane, x in enumerate(some))
            continue
        body.append(Verb(verb, first, p=at[some[0]], mask=mask))
        for lane in range(wide, len(some), wide):
            rotated = tuple((i + lane) % atom.n for i in range(atom.n))
            body += (Shuffle("t", first, first, rotated), Verb(verb, "t", p=at[some[lane]], mask=mask))
    return tuple(body)


def _over_k(
    atom: Atom, accumulators: list[tuple[int, int]], step: tuple[Stmt, ...], end: Index, unroll: int, *, short: bool
) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
    """Loops over whole vectors of k, and what adds the sums of earlier runs, which are kept apart (`summation`)."""
    lanes, p_run, run = atom.n, var("p_run"), RUN * atom.n
    zero = tuple(Verb("zero", f"c{i}_{j}") for i, j in accumulators)
    if short:
        return (*zero, For("p", const(0), end, const(lanes), step, unroll)), ()
    kept = {x: Ptr("kept", const(number * lanes)) for number, x in enumerate(accumulators)}
    pairs = ((Verb("load_c", "t", p=kept[i, j]), Verb("add", f"c{i}_{j}", "t")) for i, j in accumulators)
    add: tuple[Stmt, ...] = tuple(s for pair in pairs for s in pair)
    store = (Verb("store", f"c{i}_{j}", p=kept[i, j]) for i, j in accumulators)
    once = For("p", p_run, minimum(end, p_run + run), const(lanes), step, unroll)
    keep = If((p_run + run).lt(end), (If(const(0).lt(p_run), add), *store, *zero))
    scratch = Scratch("kept", len(accumulators) * lanes, atom.acc, guarded=True)
    return (*zero, scratch, For("p_run", const(0), end, const(run), (once, keep))), (If(const(run).lt(end), add),)


def summed(atom: Atom, registers: list[str], spare: str) -> tuple[Stmt, ...]:
    """Statements after which lane i of the first register is the sum of the lanes of register i.

    Vectors are added in pairs, neighbouring lanes first: (x0 + x1, x2 + x3, y0 + y1, y2 + y3), which is the order of
    additions of `Reduce`, too. Sixteen vectors of sixteen lanes take 15 additions instead of 64.

    Args:
        atom: the vectors, of a power of two of lanes.
        registers: at most as many as a vector has lanes. All are overwritten.
        spare: a register.
    """
    body: list[Stmt] = []
    left, inner = list(registers), inner_lanes(atom)
    for parts, size in ((inner, 1), (atom.n // inner, inner)):
        for level in range(parts.bit_length() - 1):
            if len(registers) <= size:  # one vector, whose parts of `size` lanes are in the order of the registers
                body += _butterfly(atom.n, left[0], spare, size << level)
                continue
            pairs = [(x, (left[i : i + 2] or [x])[-1]) for i, x in enumerate(left)][::2]
            picks = [every_other(atom.n, parts, size, first) for first in (0, 1)]
            for x, y in pairs:
                body += (Shuffle(spare, x, y, picks[0]), Shuffle(x, x, y, picks[1]), Verb("add", x, spare))
            left = [x for x, _ in pairs]
    return tuple(body)


def _butterfly(lanes: int, x: str, spare: str, apart: int) -> tuple[Stmt, ...]:
    """Register x plus itself with lanes exchanged that are `apart`."""
    return Shuffle(spare, x, x, tuple(i ^ apart for i in range(lanes))), Verb("add", x, spare)


def inner_lanes(atom: Atom) -> int:
    """Lanes of the parts of a vector inside which shuffles are cheap."""
    return min(atom.n, BLOCK // BY_NAME[atom.acc].bytes)


def every_other(lanes: int, parts: int, size: int, first: int) -> tuple[int, ...]:
    """Lanes of two vectors: of each run of `parts` parts of `size` lanes every other part of one, then of the other."""
    halves = [(of, part) for of in (0, lanes) for part in range(first, parts, 2)]
    runs = range(0, lanes, parts * size)
    return tuple(of + run + part * size + i for run in runs for of, part in halves for i in range(size))
