"""Summation runs on a GPU: sums of floats over k in runs (see `portmm.target.summation`).

Owns the loop over runs, and the storage of a thread's totals of earlier runs: a second set of registers,
or private words of shared memory, where registers are scarce and sums few. A run ends with one addition
for each sum, less than 1 % of the multiply-adds of its 320 elements; the loop inside is the one without runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, minimum, var
from portmm.ir.nodes import Add, For, Let, Move, Scratch
from portmm.ir.thread_nodes import Clear
from portmm.kernels.gpu.loops import unrolled
from portmm.target.summation import chained

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.target.atom import Atom


def accumulators(atom: Atom, count: int) -> list[Stmt]:
    """Registers for `count` sums whose totals are in registers, too."""
    names = ("acc",) if chained(atom) else ("acc", "run_acc")
    return [Scratch(name, count, atom.acc) for name in names]


def current(atom: Atom) -> str:
    """Name of the registers that products are added to where totals are in registers."""
    return "acc" if chained(atom) else "run_acc"


def in_runs(atom: Atom, count: int, loop: For, run: Index) -> tuple[Stmt, ...]:
    """Loop over k that adds products to `count` registers, nested in one over runs of `run` of its values."""
    if chained(atom):
        return (loop,)
    i = var("i")
    add = unrolled("i", count, Add(Ptr("acc", i), Ptr("run_acc", i)))
    return _over(loop, run, (Clear("run_acc", count),), (add,))


def in_runs_shared(atom: Atom, count: int, loop: For, run: Index, total: Callable[[Index], Ptr]) -> tuple[Stmt, ...]:
    """Loop as by `in_runs`, with totals in the thread's private memory, and in the registers `acc` at the end."""
    if chained(atom):
        return (loop,)
    i = var("i")
    acc = Ptr("acc", i)
    clear = Clear("acc", count)
    first = unrolled("i", count, Move(total(i), acc))
    add = unrolled("i", count, Add(acc, total(i)), Move(total(i), acc))
    return (clear, first, *_over(loop, run, (clear,), (add,)))


def _over(loop: For, run: Index, before: tuple[Stmt, ...], after: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Loop over runs, with statements before and after each."""
    begin = var("run_begin")
    one = replace(loop, begin=begin, end=var("run_end"))
    body = (Let("run_end", minimum(begin + var("run"), loop.end)), *before, one, *after)
    return (Let("run", run), For("run_begin", loop.begin, loop.end, var("run"), body))
