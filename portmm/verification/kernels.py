"""Equivalence of an emitted kernel and its record: its text or its loops on symbols, the record over finite fields.

Owns `check_kernel`. A kernel over rows, of a product or of attention is called on arrays of a reduced shape as its
caller calls it; the expressions of all elements that it writes are evaluated in the fields where the record is. Its
text is judged in the same way, compiled with symbols for floats.
"""

from __future__ import annotations

import gc
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.errors import PortmmError
from portmm.ir import block_meaning
from portmm.ir.grid_kernel import GridKernel
from portmm.ir.mugraph import Binding, MuGraph, Step, Tensor
from portmm.spec.expr import Expr, ordered
from portmm.spec.function_patterns import add
from portmm.verification import device_text, emitted_text, symbolic
from portmm.verification.batches import decays, evaluate_all, unguarded_exponential
from portmm.verification.bounds import REDRAWS, Size, element_sizes, sizes, tests_for
from portmm.verification.calls import Call, Layout, Shape, attention_on_device, call_of
from portmm.verification.emitted_text import NARROW, Arrays
from portmm.verification.equivalence import Verdict, fields
from portmm.verification.values import Residues, UnsupportedError, Value

if TYPE_CHECKING:
    from portmm.ir.block_program import BlockProgram
    from portmm.ir.nodes import Kernel

ATTENTION = ("portmm_attention_", "portmm_mma_attention_")
"""Starts of the names of kernels of attention on devices."""


def check_kernel(
    program: BlockProgram, kernel: Kernel | GridKernel, extents: Mapping[str, int], *, seed: int | None = None,
    text: str = "", further: Sequence[tuple[GridKernel, str]] = (), runs: int = 1, until: float = math.inf,
    more: Sequence[Shape] = (),
) -> Verdict:  # fmt: skip
    """Check that a kernel computes what its record means, at these extents of the record's labels.

    Args:
        program: the record, of floats.
        kernel: lowered from it, of a host or of a device.
        extents: of its labels: more than a tile, and no multiple of one.
        seed: see `equivalence.check`.
        text: the kernel's, which is compiled and run in the place of its loops.
        further: kernels of a device that are launched after it, and their texts.
        runs: into which keys of attention on a device are split.
        until: by the monotonic clock, when a text of a host that has not ended is given up.
        more: shapes at which a kernel of a host is called, too.

    Returns:
        The verdict at the first extents, with the largest probability of all; or that of the first where they differ.
    """
    seed = secrets.randbits(63) if seed is None else seed
    collects = gc.isenabled()
    gc.disable()  # expressions have no cycles, and a collection visits all of them
    try:
        texts = _Texts(kernel, text, tuple(further), runs, until)
        return _checked(program, texts, (Shape(extents), *more), seed)
    except (IndexError, KeyError, PortmmError, ValueError) as error:
        return Verdict(equal=False, reason=f"{type(error).__name__}: {error}", seed=seed)
    finally:
        if collects:
            gc.enable()


class _Texts(NamedTuple):
    """A kernel and its text, and those that follow."""

    kernel: Kernel | GridKernel
    text: str
    further: tuple[tuple[GridKernel, str], ...]
    runs: int
    until: float

    def expressions(self, calls: Sequence[_Called]) -> list[dict[str, list[Any]]]:
        """The expressions that they write, in each call."""
        if not self.text:
            if calls[0].arrays.narrow or self.further:
                raise UnsupportedError("loops of elements of 16 bits, or of several kernels, are no symbols")
            return [symbolic.run(self.kernel, x.call.ints, x.arrays.shapes, x.arrays.results) for x in calls]
        if isinstance(self.kernel, GridKernel):
            kernels = ((self.kernel, self.text), *self.further)
            return [device_text.run(kernels, x.call.ints, x.arrays) for x in calls]
        return emitted_text.run(self.text, self.kernel, [(x.call.ints, x.arrays) for x in calls], self.until)


class _Called(NamedTuple):
    """A call at some extents.

    Attributes:
        extents: of the record's labels.
        shapes: of operands.
        places: of the elements of each operand.
        call, arrays: the call, and its arrays.
    """

    extents: dict[str, int]
    shapes: list[tuple[int, ...]]
    places: list[list[int]]
    call: Call
    arrays: Arrays


def _checked(program: BlockProgram, texts: _Texts, shapes: Sequence[Shape], seed: int) -> Verdict:
    _spellings()
    calls = [_called(program, texts, x) for x in shapes]
    verdicts = []
    for of, expressions in zip(calls, texts.expressions(calls), strict=True):
        verdicts.append(_judged(program, of, expressions, seed))
        if not verdicts[-1]:
            return verdicts[-1]
    return replace(verdicts[0], bits=min(x.bits for x in verdicts))


def _called(program: BlockProgram, texts: _Texts, shape: Shape) -> _Called:
    """The call at a shape."""
    extents = dict(shape.extents)
    shapes = [tuple(extents[x] for x in y.axes) for y in program.operands]
    layout = Layout.of(program, extents, texts.kernel, shape.keys)
    places = [layout.places(i) for i in range(len(shapes))]
    if any(x.dtype not in ("f32", *NARROW) for x in program.operands):
        raise UnsupportedError("operands of other types than f32, bf16 and f16 are no symbols")
    if program.fused.numbers:
        raise UnsupportedError("scalar arguments are no symbols yet")
    kernel = texts.kernel
    call = call_of(layout, kernel.name)
    if isinstance(kernel, GridKernel):
        attends = kernel.name.startswith(ATTENTION)
        on_device = attention_on_device(layout, texts.runs) if attends else call
        call = on_device._replace(names=tuple(f"{x}_all" if x.startswith("x") else x for x in on_device.names))
    written = dict(program.fused.results)
    arrays = Arrays(
        {call.names[i]: 1 + max(x, default=-1) for i, x in enumerate(places)}, [call.names[i] for i in written],
        frozenset(call.names[i] for i, x in enumerate(program.operands) if x.dtype in NARROW), call.scratch,
        _literals(program),
    )  # fmt: skip
    return _Called(extents, shapes, places, call, arrays)


def _judged(program: BlockProgram, of: _Called, expressions: dict[str, list[Expr]], seed: int) -> Verdict:
    """The verdict on the expressions that a call writes."""
    extents, shapes, places, call, _ = of
    for i in dict(program.fused.results):
        every = expressions[call.names[i]]
        expressions[call.names[i]] = [every[at] for at in places[i]]
        if sum(x is not None for x in every) > len(places[i]):
            return Verdict(equal=False, reason="what is between the rows of a result is written", seed=seed)
    if any(x is None for y in expressions.values() for x in y):
        return Verdict(equal=False, reason="an element of a result is not written", seed=seed)
    if why := next(filter(None, map(unguarded_exponential, expressions.values())), ""):
        return Verdict(equal=False, reason=why, seed=seed)
    pairs = _sizes(program, expressions, call, extents)
    tests, bits = tests_for(pairs)
    for i in range(REDRAWS):
        numbers = Residues(fields(seed + i, tests), keeps=not any(map(decays, expressions.values())))
        try:
            why = _difference(program, (call, expressions, places), shapes, numbers)
        except ZeroDivisionError:
            continue
        primes = tuple(int(x) for x in numbers.field.p)
        return Verdict(not why, why, -bits, tests, seed + i, tuple(extents.items()), primes)
    return Verdict(equal=False, reason="a divisor is zero in every field", seed=seed)


def _difference(
    program: BlockProgram, of: tuple[Call, dict[str, list[Expr]], list[list[int]]], shapes: list[tuple[int, ...]],
    numbers: Residues,
) -> str:  # fmt: skip
    """The first result that differs, or an empty string."""
    call, expressions, places = of
    written = dict(program.fused.results)
    operands = [
        numbers.empty(x, f"result {i}") if i in written else numbers.drawn(x, f"input {i}")
        for i, x in enumerate(shapes)
    ]
    block_meaning.run(program, operands, None, (), numbers)
    exponents = numbers.exponents()
    order = {name: i for i, name in enumerate(call.names)}
    leaves: dict[Expr, tuple[Any, int]] = {}
    for i, x in enumerate(operands):
        if i not in written:
            rows = Value.of(y.reshape(-1, y.shape[-1]) for y in x.parts())
            leaves |= {symbolic.element(i, at): (rows, j) for j, at in enumerate(places[i])}
    for name, elements in expressions.items():
        got, meant = evaluate_all(elements, leaves, numbers), operands[order[name]]
        want, low = (x.reshape(-1, x.shape[-1]) for x in (meant.p, meant.low))
        same = (got.low == low) & np.where(low, got.low, got.p == want)
        if not same.all():
            return f"operand {order[name]} differs in {np.count_nonzero(~same.all(-1))} of {len(same)} elements"
    if numbers.exponents() - exponents:
        return "an exponential has another argument than the record's have: it may overflow"
    return ""


def _sizes(
    program: BlockProgram, expressions: dict[str, list[Expr]], call: Call, extents: Mapping[str, int]
) -> list[tuple[Size, Size]]:
    """Sizes of each result, as the record has it and as the kernel does."""
    graph = graph_of(program)
    record = sizes(graph, extents)
    each = element_sizes(expressions[call.names[i]] for i in graph.results)
    return list(zip(record, each, strict=True))


def graph_of(program: BlockProgram) -> MuGraph:
    """The graph of one kernel."""
    tensors = tuple(Tensor(f"x{i}", x.axes, x.dtype) for i, x in enumerate(program.operands))
    written = dict(program.fused.results)
    inputs = tuple(i for i in range(len(tensors)) if i not in written)
    return MuGraph(tensors, (Step(program, tuple(map(Binding, range(len(tensors))))),), inputs, tuple(written))


def _literals(program: BlockProgram) -> frozenset[float]:
    """The literals of a record."""
    every = ordered(tuple(x for _, x in program.fused.results))
    return frozenset(float(x.args[0]) for x in every if x.op == "const" and x.dtype == "f32")


_added: list[bool] = []


def _spellings() -> None:
    """Add spellings of functions that only kernels have."""
    if not _added:
        from portmm.kernels.cpu.online_softmax import decay

        add("exp", decay, decays=True)
        _added.append(True)
