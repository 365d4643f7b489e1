"""Block programs of attention: two contractions with an online softmax between them, in one pass along the keys.

Owns `Form`, the kind of attention that a kernel computes, `of_attention`, its record, and `attention_of`, what kernels
read of a record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from portmm.errors import ScheduleError
from portmm.ir.block_program import REDUCED, BlockProgram, Pass, TileGemm, TileReduce, TileTransfer
from portmm.ir.index import Index, maximum, minimum
from portmm.ir.index import const as index_of
from portmm.spec.epilogue import C, Fused, Operand, acc, contraction, extent, index, load
from portmm.spec.expr import Expr, apply, const, node, ordered
from portmm.spec.expr_functions import select, substituted
from portmm.spec.vector_math import exp, log
from portmm.util.memo import cached

LOWEST = -3.0e38
"""Maximum of no scores: less than any, and finite, as -inf - -inf is NaN."""

REFUSED = "kernels of attention take the passes of attention_program.of_attention, with any score"


class Bounds(NamedTuple):
    """Mask of the keys that a query sees, in addition to the score's own.

    Attributes:
        causal: no keys after its own position.
        window: no keys as far away as the width of the window.
    """

    causal: bool = False
    window: bool = False

    def __bool__(self) -> bool:
        return self.causal or self.window

    def seen(self, at: Expr, to: Expr, width: Expr) -> Expr:
        """Whether a key is seen from a position."""
        seen = to <= at if self.causal else None
        if self.window:
            near = at - width < to
            seen = near if seen is None else seen & near
            seen = seen if self.causal else seen & (to < at + width)
        assert seen is not None  # noqa: S101 - there are bounds
        return seen

    def keys(self, end: Index, at: tuple[Index, Index, Index], window: Index) -> tuple[Index, Index]:
        """First and end of the keys before `end` that queries at positions `at` see: the first, the last, their end."""
        low, high, past = at
        if self.causal:
            end = minimum(end, past)
        elif self.window:
            end = minimum(end, high + window)
        return maximum(0, low + 1 - window) if self.window else index_of(0), end

    def edge(self, edge: Index, keys: tuple[Index, Index], at: tuple[Index, Index], window: Index) -> Index:
        """Condition `edge`, or that queries at positions `at` do not all see all `keys`; both are first and end."""
        (key, far), (low, past) = keys, at
        if self.causal:
            edge += (low + 1).lt(far)
        if self.window:
            edge += key.lt(past - window)
            edge += index_of(0) if self.causal else (low + window).lt(far)
        return edge


class Form(NamedTuple):
    """Kind of attention that a kernel computes.

    Attributes:
        score: expression of a score in terms of its product, and the operands that it reads; after it there may be that
            of a factor of each key's values, which the sum of weights does not have.
        dtype: type of Q, K and V.
        to: type of the result; weights are as exact.
        bounds: the mask of keys.
        lengths: each item has a number of keys of its own.
        starts: each item has a position of its own for its first query.
        lse: the logarithms of sums of exponentials are stored.
    """

    score: Fused
    dtype: str
    to: str
    bounds: Bounds = Bounds()
    lengths: bool = False
    starts: bool = False
    lse: bool = False


class Places(NamedTuple):
    """Numbers of the operands of attention in a record."""

    q: int
    k: int
    v: int
    o: int
    lse: int | None = None
    lengths: int | None = None
    starts: int | None = None


@cached("kernels", 256)
def of_attention(form: Form, loop: str = "n", window: int | None = None) -> BlockProgram:
    """The record of a kind of attention, whose operands are those of the score, then in the order of `Places`.

    Labels are items b, heads h, elements d of a head of Q and K, and e of one of V; heads of K and V each serve a block
    of heads of Q.

    Args:
        form: the kind.
        loop: the label of keys, "n" or "m"; the other one is that of queries, in the score too.
        window: the width of a window, by default the extent of a label w.
    """
    queries, first = "nm"["nm".index(loop) - 1], len(form.score.operands)
    operands = [*form.score.operands, Operand(form.dtype, f"bh{queries}d")]
    operands += [Operand(form.dtype, f"bH{loop}{x}") for x in "de"] + [Operand(form.to, f"bh{queries}e")]
    more: list[int | None] = []
    for there, dtype, axes in (
        (form.lse, "f32", f"bh{queries}"),
        (form.lengths, "s32", "b"),
        (form.starts, "s32", "b"),
    ):
        more.append(len(operands) if there else None)
        operands += [Operand(dtype, axes)] if there else []
    at = Places(first, first + 1, first + 2, first + 3, *more)
    score, *factors = (x for _, x in form.score.results)
    width = extent("w") if window is None else const(window, "s32")
    passes = _passes(score, form, at, width, loop, factors=factors)
    program = BlockProgram(f"bh{queries}", loop, tuple(operands), passes)
    program.__dict__["attention"] = Attention(form, at, tuple(range(first)), window)
    return program


def _passes(
    score: Expr, form: Form, at: Places, width: Expr, loop: str, *, guarded: bool = True, factors: Iterable[Expr] = ()
) -> tuple[Pass, ...]:  # fmt: skip
    """The passes of attention; `guarded`: a query that sees no key has a result of zeros."""
    queries, one = "nm"["nm".index(loop) - 1], REDUCED["nm".index(loop)]
    dot = contraction(load(at.q, form.dtype), load(at.k, form.dtype), "d")
    score = substituted(score, lambda x: dot if x.op == "acc" else None, {})
    seen = []
    if form.bounds:
        start = extent(loop) - extent(queries) if at.starts is None else load(at.starts, "s32")
        seen.append(form.bounds.seen(index(queries) + start, index(loop), width))
    seen += [] if at.lengths is None else [index(loop) < load(at.lengths, "s32")]
    if seen:
        score = select(seen[0] if len(seen) == 1 else seen[0] & seen[1], score, float("-inf"))
    top = node(one, ("max", score), "f32")
    most = apply("max", top, LOWEST) if guarded else top
    weight = exp(score - most)
    total = node(one, ("add", weight), "f32")
    mixed = contraction(math.prod(factors, start=weight), load(at.v, form.dtype), loop)
    result = mixed / (select(total > 0.0, total, 1.0) if guarded else total)
    stores = [TileTransfer(at.o, result), *([] if at.lse is None else [TileTransfer(at.lse, most + log(total))])]
    return (TileGemm(dot), TileReduce(top), TileReduce(total, most), TileGemm(mixed, most)), tuple(stores)


class Attention(NamedTuple):
    """Parts of a record that kernels of attention read.

    Attributes:
        form: the kind.
        at: numbers of operands.
        reads: numbers of those that the score reads.
        window: the width of a window that is a literal, or None.
    """

    form: Form
    at: Places
    reads: tuple[int, ...]
    window: int | None


def attention_of(program: BlockProgram) -> Attention:
    """The attention that a record computes: its labels are as in `of_attention`, its operands in any order.

    Raises:
        ScheduleError: no kernel of attention computes it.
    """
    if "attention" in program.__dict__:
        return program.__dict__["attention"]
    every, loop, (gemms, tops, stores) = program.operands, program.loop, _parts(program)
    loads = [x.args[0] for y in gemms for x in y.inner if x.op == "load"]
    if not (len(gemms) == 2 and len(tops) == 1 and loop in ("n", "m") and len(loads) == 3 and 1 <= len(stores) <= 2):
        raise ScheduleError(REFUSED)
    dot, masked, factors = gemms[0], tops[0].args[1], _factors(gemms[1])
    items = [i for i, x in enumerate(every) if x.dtype == "s32" and x.axes == "b" and i not in (*loads, *stores)]
    literals = [x for x in ordered((masked,)) if x.op == "const" and x.dtype == "s32"]
    loaded = {x.args[0] for x in ordered((masked,)) if x.op == "load"}
    some: tuple[int | None, ...] = (*items, None)
    # Masks by bounds are not in the score: kernels skip whole blocks of keys by them. The strictest bounds come first.
    for causal, window, lengths, starts, guarded in product((True, False), (True, False), some, some, (True, False)):
        bounds, at = Bounds(causal, window), Places(*loads, *stores)._replace(lengths=lengths, starts=starts)
        used = (lengths is None or lengths in loaded) and (starts is None or (starts in loaded) == bool(bounds))
        if not used or (lengths == starts is not None):
            continue
        inner = masked.args[1] if (bounds or lengths is not None) and masked.op == "select" else masked
        reads = tuple(i for i in range(len(every)) if i not in at)
        there = lengths is not None, starts is not None, at.lse is not None
        form = Form(Fused((), ()), every[at.q].dtype, every[at.o].dtype, bounds, *there)
        score = substituted(inner, lambda x: acc() if x is dot else None, {})
        for width in (extent("w"), *literals) if window else (extent("w"),):
            if _same(_passes(score, form, at, width, loop, guarded=guarded, factors=factors), program.passes):
                form = form._replace(score=_alone((score, *factors), reads, every))
                return Attention(form, at, reads, width.args[0] if width.op == "const" else None)
    raise ScheduleError(REFUSED)


def _parts(program: BlockProgram) -> tuple[list[Expr], list[Expr], list[int]]:
    """The contractions and the maxima of a record, and the numbers of its results."""
    every = [x for one in program.passes for x in one]
    return (
        [x.value for x in every if isinstance(x, TileGemm)],
        [x.value for x in every if isinstance(x, TileReduce) and x.value.args[0] == "max"],
        [x.operand for x in every if isinstance(x, TileTransfer)],
    )


def _factors(mixed: Expr) -> list[Expr]:
    """Factors of weights in the sum of values, at most one: that of each key's values, which an operand has."""
    left = mixed.args[1]
    last = left.args[1] if left.op == "mul" else left
    return [last] if last.op == "load" else []


def _alone(scores: tuple[Expr, ...], reads: tuple[int, ...], every: tuple[Operand, ...]) -> Fused:
    """A score, and a factor if there is one, with the operands that they read."""

    def change(x: Expr) -> Expr | None:
        return load(reads.index(x.args[0]), every[x.args[0]].dtype) if x.op == "load" else None

    return Fused(tuple(every[i] for i in reads), tuple((C, substituted(x, change, {})) for x in scores))


def _same(one: tuple[Pass, ...], other: tuple[Pass, ...]) -> bool:
    """Whether passes are equal: equal expressions are one object."""

    def key(x: Any) -> tuple[Any, ...]:
        return type(x), id(x.value), id(getattr(x, "rescaled", None)), getattr(x, "operand", None)

    return [list(map(key, x)) for x in one] == [list(map(key, x)) for x in other]
