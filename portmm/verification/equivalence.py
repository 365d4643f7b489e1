"""Equivalence of two graphs of kernels, by random tests over finite fields at reduced shapes.

Owns `check`, and `Verdict`, its result. Each label has an extent of its own of a few elements, and each block a tile of
one less: two tiles and two trips of a loop, of which the last one is shorter. Both graphs take the same random tensors.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from portmm.errors import ScheduleError
from portmm.ir import block_meaning
from portmm.ir.block_meaning import Arithmetic
from portmm.ir.block_program import TileTransfer
from portmm.util.memo import Memory
from portmm.verification.bounds import MOST_TESTS, REDRAWS, Size, sizes, tests_for
from portmm.verification.field import Field
from portmm.verification.values import Residues, UnsupportedError, Value

if TYPE_CHECKING:
    from portmm.ir.mugraph import Binding, MuGraph, Step
    from portmm.spec.expr import Expr

LEAST, MOST = 3, 40
"""Extents of labels, and the largest literal that an index is compared with."""


class Numbers(Arithmetic, Protocol):
    """An arithmetic with operands that are not written yet."""

    def empty(self, shape: tuple[int, ...], name: str) -> Any:
        """Such an operand, by name."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check.

    Attributes:
        equal: the tests found no difference.
        reason: of a refusal, or "".
        bits: an unequal pair passes with a probability of at most 2**-bits.
        tests: number of independent fields.
        seed: of all that is random.
        extents: of labels.
        primes: of the fields.
    """

    equal: bool
    reason: str
    bits: float = 0.0
    tests: int = 0
    seed: int = 0
    extents: tuple[tuple[str, int], ...] = ()
    primes: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if not self.equal:
            return f"not equal: {self.reason}"
        at = ", ".join(f"{x} {n}" for x, n in self.extents)
        return f"equal but for a probability of 2**-{self.bits:.0f}, by {self.tests} tests at {at}"


def labels_of(graph: MuGraph) -> list[str]:
    """Labels of a graph's tensors."""
    parts = {x for _, y in graph.joined for x in y}
    return sorted({x for y in graph.tensors for x in y.axes if x != "1"} | parts)


def reduced(*graphs: MuGraph) -> dict[str, int]:
    """Small extents for the labels of graphs that share labels; larger ones where an index is compared with a literal.

    No two are alike, so that no label passes for another.

    Raises:
        UnsupportedError: the literal is too large.
    """
    literals = [x for graph in graphs for step in graph.steps for x in _positions(step)]
    least = max([LEAST, *(x + 2 for x in literals)])
    if least > MOST:
        raise UnsupportedError(f"an index is compared with {least - 2}: shapes that show its meaning are too large")
    labels = sorted({x for graph in graphs for x in labels_of(graph)})
    extents = {x: least + i for i, x in enumerate(labels)}
    for label, parts in (x for graph in graphs for x in graph.joined):
        extents[label] = sum(extents[x] for x in parts)
    return extents


def _positions(step: Step) -> list[int]:
    """Literals that a program combines with an index."""
    positions: set[Expr] = set()
    literals: list[int] = []
    for x in step.program.fused.steps:
        if x.op == "index" or (x.dtype != "f32" and positions & {*x.inner}):
            positions.add(x)
            literals += [abs(int(y.args[0])) for y in x.inner if y.op == "const"]
    return literals


@lru_cache(maxsize=4)
def _fields(seed: int, tests: int) -> Field:
    return Field.of(seed, tests)


def fields(seed: int, tests: int) -> Field:
    """Fields of a seed: more tests of a seed have those of fewer."""
    some = next(n for n in (2, 4, 6, 8, 32, 128, MOST_TESTS) if n >= tests)
    return _fields(seed, some).part(tests)


def check(
    reference: MuGraph, candidate: MuGraph, *, seed: int | None = None, extents: Mapping[str, int] | None = None
) -> Verdict:
    """Check that a candidate computes the results of a reference, for inputs in the same order with the same labels.

    Args:
        reference: computed operation by operation.
        candidate: computed tile by tile.
        seed: of all that is random; by default from the operating system, so that no candidate can be made for it.
        extents: of labels, in the place of those of `reduced`.
    """
    seed = secrets.randbits(63) if seed is None else seed
    why = _mismatch(reference, candidate)
    if why:
        return Verdict(equal=False, reason=why, seed=seed)
    try:
        small = dict(extents or reduced(reference, candidate))
        pairs = list(zip(_sizes(reference, small), sizes(candidate, small), strict=True))
        tests, bits = tests_for(pairs)
        for i in range(REDRAWS):
            field = fields(seed + i, tests)
            try:
                why = _difference(reference, candidate, Residues(field), small)
            except ZeroDivisionError:
                continue
            primes = tuple(int(x) for x in field.p)
            return Verdict(not why, why, -bits, tests, seed + i, tuple(small.items()), primes)
    except (UnsupportedError, ScheduleError, ValueError) as error:
        return Verdict(equal=False, reason=str(error), seed=seed)
    except (KeyError, IndexError) as error:
        return Verdict(equal=False, reason=f"a value is read that no pass computes: {error!r}", seed=seed)
    return Verdict(equal=False, reason="a divisor is zero in every field", seed=seed)


def _mismatch(a: MuGraph, b: MuGraph) -> str:
    """The reason why two graphs cannot be compared, or an empty string."""
    for kind, x, y in (("inputs", a.inputs, b.inputs), ("results", a.results, b.results)):
        one, other = ([graph.tensors[i][1:] for i in at] for graph, at in ((a, x), (b, y)))
        if one != other:
            return f"{kind} are {one} and {other}"
    return ""


def _difference(a: MuGraph, b: MuGraph, numbers: Residues, extents: Mapping[str, int]) -> str:
    """The first result that differs, or an empty string."""
    inputs, one = _reference(a, numbers, extents)
    other = evaluate(b, inputs, numbers, extents)
    for i, x, y in zip(a.results, one, other, strict=True):
        if not _same(x, y):
            return f"{a.tensors[i].name} differs"
    return ""


_references = Memory(16, "kernels")
_sized = Memory(16, "kernels")


def _sizes(graph: MuGraph, extents: Mapping[str, int]) -> list[Size]:
    """Sizes of the results of a reference, which serve all candidates."""
    key = (graph, tuple(extents.items()))
    if key not in _sized:
        _sized.keep(key, sizes(graph, extents))
    return _sized[key]


def _reference(graph: MuGraph, numbers: Residues, extents: Mapping[str, int]) -> tuple[list[Any], list[Any]]:
    """Random inputs of a reference, and its results, which serve all candidates."""
    key = (graph, numbers.field.seed, numbers.field.tests, tuple(extents.items()))
    if key not in _references:
        inputs = [_drawn(graph, i, numbers, extents) for i in graph.inputs]
        _references.keep(key, (inputs, evaluate(graph, inputs, numbers, extents, tiled=False)))
    return _references[key]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Value) and isinstance(y, Value):
        return bool((np.where(x.low, y.low, x.p == y.p) & (x.low == y.low)).all())
    return not isinstance(x, Value) and not isinstance(y, Value) and bool((x == y).all())


def _drawn(graph: MuGraph, i: int, numbers: Residues, extents: Mapping[str, int]) -> Any:
    """A random input."""
    x = graph.tensors[i]
    shape = tuple(extents.get(y, 1) for y in x.axes)
    if x.dtype == "s32":
        raise UnsupportedError(f"{x.name} has integers, with which a wrong program may differ for few values only")
    return numbers.drawn(shape, f"input {i}")


def evaluate(
    graph: MuGraph, inputs: list[Any], numbers: Numbers, extents: Mapping[str, int], *, tiled: bool = True
) -> list[Any]:
    """The results of a graph for some inputs.

    Args:
        graph: the graph.
        inputs: one for each of its inputs.
        numbers: the arithmetic.
        extents: of labels.
        tiled: with a border of tiles before the last element of each label, where a step has accumulators.
    """
    known = dict(zip(graph.inputs, inputs, strict=True))
    for number, step in enumerate(graph.steps):
        written = {step.operands[j].tensor for j, _ in step.program.fused.results}
        for i in written - known.keys():
            known[i] = _unwritten(graph, i, numbers, extents, f"{'tiles' if tiled else 'whole'} {number} {i}")
        views = [_view(graph, at, known[at.tensor], extents) for at in step.operands]
        local = _local(graph, step, extents)
        tiles = {x: max(1, n - 1) for x, n in local.items()} if tiled and not _by_elements(step) else None
        block_meaning.run(step.program, views, tiles, (), numbers, nested=True, **local)
        for j, _ in step.program.fused.results:
            known[step.operands[j].tensor] = _back(
                graph, step.operands[j], views[j], known[step.operands[j].tensor], extents
            )
    return [known[i] for i in graph.results]


def _by_elements(step: Step) -> bool:
    """Whether a step has no state that tiles share: no accumulators, and it writes nothing that it reads."""
    program = step.program
    read = {step.operands[x.args[0]].tensor for x in program.fused.steps if x.op == "load"}
    stores = all(isinstance(x, TileTransfer) for one in program.passes for x in one)
    return stores and not read & {step.operands[i].tensor for i, _ in program.fused.results}


def _local(graph: MuGraph, step: Step, extents: Mapping[str, int]) -> dict[str, int]:
    """Extents of a program's labels.

    Raises:
        ScheduleError: one is bound to different labels of tensors, whose extents may be equal here and nowhere else.
    """
    local: dict[str, int] = {}
    known: dict[str, list[str]] = {}
    for x, at in zip(step.program.operands, step.operands, strict=True):
        for y, group in zip(x.axes, graph.labels(at), strict=True):
            of = sorted(z for z in group if z != "1")
            if known.setdefault(y, of) != of:
                raise ScheduleError(f"the label {y} is bound to {'.'.join(known[y])} and to {'.'.join(of)}")
            local[y] = math.prod(extents.get(z, 1) for z in group)
    return local


def _unwritten(graph: MuGraph, i: int, numbers: Numbers, extents: Mapping[str, int], name: str) -> Any:
    x = graph.tensors[i]
    shape = tuple(extents.get(y, 1) for y in x.axes)
    return np.full(shape, -1, np.int32) if x.dtype == "s32" else numbers.empty(shape, name)


def _arranged(x: Any, order: list[int], shape: list[int]) -> Any:
    """A copy with its dimensions in another order and shape; of a value, without that of the tests."""
    if isinstance(x, Value):
        parts = (y.transpose(*order, y.ndim - 1).reshape(*shape, y.shape[-1]).copy() for y in x.parts())
        return Value.of(parts, positive=x.positive)
    return x.transpose(order).reshape(shape).copy()


def _slice(at: Binding, extents: Mapping[str, int]) -> tuple[slice, ...]:
    """Index of the part of a concatenation."""
    if at.part is None:
        return ()
    dim, before, own = at.part
    start = sum(extents[x] for x in before)
    return (*(slice(None),) * dim, slice(start, start + extents[own]))


def _part(x: Any, index: tuple[slice, ...]) -> Any:
    """A part of an array or of a value."""
    return Value.of((y[index] for y in x.parts()), positive=x.positive) if isinstance(x, Value) else x[index]


def _arrangement(graph: MuGraph, at: Binding) -> tuple[list[int], list[int]]:
    """Dimensions of a tensor that an operand lacks, and those that it has, in its order."""
    every = range(len(graph.tensors[at.tensor].axes))
    order = list(every) if at.dims is None else [i for group in at.dims for i in group]
    return [i for i in every if i not in order], order


def _view(graph: MuGraph, at: Binding, x: Any, extents: Mapping[str, int]) -> Any:
    """A tensor as an operand."""
    if at.part is not None:
        x = _part(x, _slice(at, extents))
    if at.dims is None:
        return x if at.part is None else _arranged(x, list(range(len(x.shape))), list(x.shape))
    rest, order = _arrangement(graph, at)
    if any(x.shape[i] != 1 for i in rest):
        raise UnsupportedError("a dimension of a tensor is bound to no label")
    return _arranged(x, rest + order, [math.prod(x.shape[i] for i in group) for group in at.dims])


def _back(graph: MuGraph, at: Binding, view: Any, x: Any, extents: Mapping[str, int]) -> Any:
    """The tensor of an operand that was written."""
    if at.dims is None and at.part is None:
        return view
    inside = x if at.part is None else _part(x, _slice(at, extents))
    rest, order = _arrangement(graph, at)
    full = [*rest, *order]
    spread = _arranged(view, list(range(len(view.shape))), [inside.shape[i] for i in full])
    back = _arranged(spread, [full.index(i) for i in range(len(full))], list(inside.shape))
    if at.part is None:
        return back
    pairs = zip(x.parts(), back.parts(), strict=True) if isinstance(x, Value) else ((x, back),)
    for to, part in pairs:
        to[_slice(at, extents)] = part
    return x
