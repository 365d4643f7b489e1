"""Dot products of a few rows with rows in place, by vectors of pairs: two elements of each of n / 2 rows.

    A, packed:  (a0[p], a0[p + 1], a1[p], a1[p + 1], ...)            p = 0, 2, 4, ...
    for each two elements along k
      for each row of B
        its two elements, repeated along a vector, times that of A

An accumulator has, for one row of B, two sums of each row of A. So the sums over lanes of n of them take n / 2
additions, where those of dot products with lanes along k (`kernels/cpu/dot.py`) take n - 1 for each n results, which
for heads of 64 elements is as long as their multiply-adds. The shuffles of these additions, and further ones without
additions, leave a row of results in each register.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.lane_nodes import Repeat, Shuffle
from portmm.ir.nodes import For, Function, LetPtr, Move, Param, Prefetch, Scratch, Verb
from portmm.kernels.cpu.dot import every_other, inner_lanes

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.target.atom import Atom

AT_ONCE = 8
"""Rows of B with accumulators at once: as many addresses as general registers hold."""
LINE = 16
"""Elements along k of each row of B that one prefetch brings."""
K = var("k")


def pack(atom: Atom) -> Function:
    """Function that packs some rows of A, at most n / 2, and zeros after them; k is even."""
    r, p, n = var("r"), var("p"), atom.n
    to, row = Ptr("to", p * (n // 2) + r * 2), Ptr("a", r * var("a_m") + p)
    both = (Move(to, row), Move(to + 1, row + 1))
    zeros = (Move(to, None), Move(to + 1, None))
    body = (
        For("r", const(0), var("rows"), const(1), (For("p", const(0), K, const(2), both),)),
        For("r", var("rows"), const(n // 2), const(1), (For("p", const(0), K, const(2), zeros),)),
    )
    params = (Param("k"), Param("rows"), Param("a", "f32", readonly=True), Param("a_m"), Param("to", "f32"))
    return Function("pack_pairs", "inner", params, body, f"to[k / 2][{n // 2}][2] = A[rows][k], and zeros")


def micro_kernel(atom: Atom, ahead: int, panels: int = 1) -> Function:
    """Micro-kernel C[panels * n / 2][n] = A . B[n][k], A packed by `pack`; prefetches of B are `ahead` rows ahead."""
    n, first, panel = atom.n, var("first"), var("panel")
    rows = n // 2
    sums = Ptr("sums", panel * (rows * n))
    added = (Verb("load_c", f"r{i}", p=sums + i * n) for i in range(rows))
    shuffles, last = _transposed(atom, [[f"r{i}"] for i in range(rows)])
    stores = (Verb("store", x, p=Ptr("c", (panel * rows + i) * var("c_m"))) for i, x in enumerate(last))
    body = (
        Scratch("sums", panels * rows * n, "f32"),
        For("first", const(0), const(n), const(AT_ONCE), _products(atom, first, ahead, panels)),
        For("panel", const(0), const(panels), const(1), (*added, *shuffles, *stores)),
    )
    params = (
        Param("k"), Param("a", "f32", readonly=True), Param("b", "f32", readonly=True), Param("b_n"),
        Param("c", "f32"), Param("c_m"),
    )  # fmt: skip
    return Function(f"pairs_{panels * rows}x{n}", "inner", params, body, f"C[{panels * rows}][{n}] = A . B, A in pairs")


def _products(atom: Atom, first: Index, ahead: int, panels: int) -> tuple[Stmt, ...]:
    """Products with some rows of B, from row `first` on, as sums of both elements of pairs: of two rows in a vector."""
    p, q, n = var("p"), var("q"), atom.n
    every = [(i, j) for i in range(panels) for j in range(AT_ONCE)]
    step: list[Stmt] = []
    for i in range(panels):
        step.append(Verb("load_b", f"a{i}", p=Ptr("a", (K * i + p) * (n // 2))))
        step += [Verb("hold", f"a{i}")] if atom.hold else []
    for j in range(AT_ONCE):
        step.append(Repeat("x", Ptr("rows", const(j) * var("b_n") + p)))
        step += [Verb("mac", f"c{i}_{j}", f"a{i}", "x") for i in range(panels)]
    asks = tuple(Prefetch(Ptr("rows", const(j + ahead) * var("b_n") + q)) for j in range(AT_ONCE))
    along = For("p", q, minimum(q + LINE, K), const(2), tuple(step))
    body: list[Stmt] = [LetPtr("rows", Ptr("b", first * var("b_n")), "f32", readonly=True)]
    body += (Verb("zero", f"c{i}_{j}") for i, j in every)
    body.append(For("q", const(0), K, const(LINE), (*asks, along)))
    even, odd = (every_other(n, inner_lanes(atom), 1, x) for x in (0, 1))
    for i, j in every[::2]:
        x, y = f"c{i}_{j}", f"c{i}_{j + 1}"
        body += (Shuffle("t", x, y, odd), Shuffle(x, x, y, even), Verb("add", x, "t"))
        body.append(Verb("store", x, p=Ptr("sums", (first + j) * (n // 2) + i * (n * n // 2))))
    return tuple(body)


def _transposed(atom: Atom, groups: list[list[str]]) -> tuple[tuple[Stmt, ...], list[str]]:
    """Shuffles of registers, each with two results of each row of A, and the registers that have the rows then."""
    body: list[Stmt] = []
    inner, level = inner_lanes(atom), 0
    while len(groups) > 1:
        parts, size = (inner, 1) if 2 << level < inner else (atom.n // inner, inner)
        level += 1
        picks = [every_other(atom.n, parts, size, x) for x in (0, 1)]
        merged: list[list[str]] = []
        for one, other in zip(groups[::2], groups[1::2], strict=True):
            names: list[str] = []
            for pick in picks:
                for x, y in zip(one, other, strict=True):
                    names.append(f"t{level}_{len(merged)}_{len(names)}")
                    body.append(Shuffle(names[-1], x, y, pick))
            merged.append(names)
        groups = merged
    return tuple(body), groups[0]
