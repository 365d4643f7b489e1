"""Equivalence of an emitted kernel and its record: its text or its loops on symbols, the record over finite fields.

Owns `check_kernel`. A kernel over rows, of a product or of attention is called on arrays of a reduced shape as its
caller calls it; the expressions of all elements that it writes are evaluated in the fields where the record is. Its
text is judged in the same way, compiled with symbols for floats.
"""

from __future__ import annotations

import gc
import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from portmm.errors import PortmmError
from portmm.ir import block_meaning
from portmm.ir.attention_program import attention_of
from portmm.ir.block_program import BlockProgram, TileGemm
from portmm.ir.grid_kernel import GridKernel
from portmm.ir.mugraph import Binding, MuGraph, Step, Tensor
from portmm.ir.nodes import FIELDS, Kernel
from portmm.ir.product_program import product_of
from portmm.ir.tile_program import PREFIX, extent_fields, stride_field
from portmm.spec.expr import Expr, ordered
from portmm.spec.function_patterns import add
from portmm.spec.problem import AXES
from portmm.verification import device_text, emitted_text, symbolic
from portmm.verification.batches import decays, evaluate_all, unguarded_exponential
from portmm.verification.bounds import REDRAWS, Size, element_sizes, sizes, tests_for
from portmm.verification.emitted_text import NARROW, Arrays
from portmm.verification.equivalence import Verdict, fields
from portmm.verification.values import Residues, UnsupportedError, Value

ATTENTION = ("portmm_attention_", "portmm_mma_attention_")
"""Starts of the names of kernels of attention on devices."""
KEYS = 4
"""Keys of a block of attention, or those of one step of a unit."""
GAP = 4
"""Elements between rows of an operand, of which each has its own multiples: no two strides are alike."""


class Call(NamedTuple):
    """A call of a kernel on dense arrays.

    Attributes:
        names: the kernel's name of each operand.
        ints: integer fields.
        scratch: floats of an array `work` of a device.
    """

    names: tuple[str, ...]
    ints: dict[str, int]
    scratch: int = 0


class Layout(NamedTuple):
    """Operands with gaps between their rows, so that no two strides are alike.

    Attributes:
        program, extents: of the operands.
        dense: operands that have none.
        keys: of a block of attention.
        scores: operands of scores of attention, in which queries are contiguous.
    """

    program: BlockProgram
    extents: Mapping[str, int]
    dense: frozenset[int] = frozenset()
    keys: int = KEYS
    scores: frozenset[int] = frozenset()

    @classmethod
    def of(cls, program: BlockProgram, extents: Mapping[str, int], kernel: Kernel | GridKernel) -> Layout:
        """The layout of a kernel's call: that of attention has dense logarithms, and for few queries dense rows."""
        if not program.is_attention or kernel.name.startswith(PREFIX):
            return cls(program, extents)
        at = attention_of(program).at
        few = program.loop == "n" and not isinstance(kernel, GridKernel)
        keys = kernel.atom.k if isinstance(kernel, Kernel) and kernel.atom.tiled else KEYS
        dense = frozenset(x for x in (at.lse, *(at.q, at.o) * few) if x is not None)
        return cls(program, extents, dense, keys, frozenset(range(len(program.operands))) - {*at})

    def strides(self, operand: int) -> dict[str, int]:
        """Strides of an operand, by label."""
        strides, step, axes = {}, 1, self.program.operands[operand].axes
        if operand in self.scores:
            queries = "nm"["nm".index(self.program.loop) - 1]
            axes = "".join(sorted(axes, key=queries.__eq__))
        for i, x in enumerate(reversed(axes), 1):
            strides[x.lower()] = step
            step = step * self.extents[x] + (GAP * (operand + i) if operand not in self.dense else 0)
        return strides

    def places(self, operand: int) -> list[int]:
        """The place of each element of an operand."""
        strides, axes = self.strides(operand), self.program.operands[operand].axes
        steps = [range(0, self.extents[x] * strides[x.lower()], strides[x.lower()]) for x in axes]
        return [sum(x) for x in itertools.product(*steps)]


def check_kernel(
    program: BlockProgram, kernel: Kernel | GridKernel, extents: Mapping[str, int], *, seed: int | None = None,
    text: str = "", further: Sequence[tuple[GridKernel, str]] = (), runs: int = 1,
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
    """
    seed = secrets.randbits(63) if seed is None else seed
    collects = gc.isenabled()
    gc.disable()  # expressions have no cycles, and a collection visits all of them
    try:
        return _checked(program, _Texts(kernel, text, tuple(further), runs), dict(extents), seed)
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

    def expressions(self, call: Call, arrays: Arrays) -> dict[str, list[Any]]:
        """The expressions that they write."""
        if not self.text:
            if arrays.narrow or self.further:
                raise UnsupportedError("loops of elements of 16 bits, or of several kernels, are no symbols")
            return symbolic.run(self.kernel, call.ints, arrays.shapes, arrays.results)
        if isinstance(self.kernel, GridKernel):
            return device_text.run(((self.kernel, self.text), *self.further), call.ints, arrays)
        return emitted_text.run(self.text, self.kernel, call.ints, arrays)


def _checked(program: BlockProgram, texts: _Texts, extents: dict[str, int], seed: int) -> Verdict:
    _spellings()
    shapes = [tuple(extents[x] for x in y.axes) for y in program.operands]
    layout = Layout.of(program, extents, texts.kernel)
    places = [layout.places(i) for i in range(len(shapes))]
    if any(x.dtype not in ("f32", *NARROW) for x in program.operands):
        raise UnsupportedError("operands of other types than f32, bf16 and f16 are no symbols")
    if program.fused.numbers:
        raise UnsupportedError("scalar arguments are no symbols yet")
    kernel = texts.kernel
    call = call_of(layout, kernel.name)
    if isinstance(kernel, GridKernel):
        attends = kernel.name.startswith(ATTENTION)
        on_device = _attention_on_device(layout, texts.runs) if attends else call
        call = on_device._replace(names=tuple(f"{x}_all" if x.startswith("x") else x for x in on_device.names))
    written = dict(program.fused.results)
    arrays = Arrays(
        {call.names[i]: 1 + max(x, default=-1) for i, x in enumerate(places)}, [call.names[i] for i in written],
        frozenset(call.names[i] for i, x in enumerate(program.operands) if x.dtype in NARROW), call.scratch,
        _literals(program),
    )  # fmt: skip
    expressions = texts.expressions(call, arrays)
    for i in written:
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


def call_of(layout: Layout, name: str = "") -> Call:
    """A call of the kernel of a record, which has this name if it is one of a general block program."""
    if name.startswith(PREFIX):
        return _block(layout)
    gemms = sum(isinstance(x, TileGemm) for one in layout.program.passes for x in one)
    return (_attention if gemms > 1 else _product if gemms else _rows)(layout)


def _block(layout: Layout) -> Call:
    """A call of the kernel of a general block program."""
    program, extents, *_ = layout
    ints = dict.fromkeys(FIELDS, 0) | {"workers": 2}
    ints |= {field: extents[x] for x, field in extent_fields(program).items()}
    for i, x in enumerate(program.operands):
        strides = layout.strides(i)
        ints |= {f"x{i}_{field}": strides[y] for y in x.axes if (field := stride_field(x.axes, y))}
    return Call(tuple(f"x{i}" for i in range(len(program.operands))), ints)


def _further(layout: Layout, numbers: Mapping[int, str]) -> dict[str, int]:
    """Strides of the operands of expressions."""
    ints: dict[str, int] = {}
    for i, name in numbers.items():
        strides = layout.strides(i)
        ints |= {f"{name}_{x}": strides.get(x, 0) for x in AXES}
    return ints


def _rows(layout: Layout) -> Call:
    program, extents, *_ = layout
    names = {i: f"x{i}" for i in range(len(program.operands))}
    ints = {"m": extents.get("m", 1), "n": extents.get("n", 1), "k": 1, "batch": extents.get("b", 1), "workers": 2}
    ints |= {f"{x}_{y}": 0 for x in "abc" for y in ("m", "n", "k", "batch")}
    return Call(tuple(names.values()), ints | _further(layout, names))


def _product(layout: Layout) -> Call:
    program, extents, *_ = layout
    parts = product_of(program)
    c = parts.results[0][0]
    rest = {i: f"x{j}" for j, i in enumerate((*parts.reads, *(i for i, _ in parts.results[1:])))}
    names = {parts.a: "a", parts.b: "b", c: "c"} | rest
    ints = {"m": extents["m"], "n": extents["n"], "k": extents["k"], "batch": extents.get("b", 1), "workers": 2}
    for i, name in ((parts.a, "a"), (parts.b, "b"), (c, "c")):
        strides = layout.strides(i)
        ints |= {f"{name}_{'batch' if x == 'b' else x}": strides.get(x, 0) for x in "bmnk"}
    ints["rows"] = extents["m"]
    return Call(tuple(names[i] for i in range(len(names))), ints | _further(layout, rest))


def _attention(layout: Layout) -> Call:
    program, extents, *_ = layout
    parts = attention_of(program)
    if parts.form.lengths or parts.form.starts or parts.form.bounds.window:
        raise UnsupportedError("operands of scores and of items are no symbols yet")
    at, names = parts.at, {i: f"x{i}" for i in range(len(program.operands))}
    queries = "nm"["nm".index(program.loop) - 1]
    m, n = extents[queries], extents[program.loop]
    heads, few = extents["h"], extents.get("H", extents["h"])
    ints = dict.fromkeys(("a_batch", "b_batch", "b_k"), 0)
    ints |= {"m": m, "n": n, "k": extents["d"], "batch": extents["b"] * heads, "workers": 2, "a_m": heads}
    ints |= {"a_k": heads // few, "b_n": layout.keys, "c_m": n - m, "c_n": extents["e"]}
    ints["c_batch"] = 2 * layout.keys
    for i, name in names.items():
        axes = program.operands[i].axes
        strides = layout.strides(i)
        if i not in at:
            ints |= {f"{name}_{x}": strides.get(x, 0) for x in AXES}
            continue
        rows = "m" if program.loop == "n" else "n"
        row, column = (rows, "e" if i in (at.v, at.o) else "d") if i in (at.q, at.o) else (program.loop, axes[-1])
        if i == at.lse:
            row, column = queries, ""
        ints |= {f"{name}_b": strides["b"], f"{name}_h": strides["h"], f"{name}_m": strides[row]}
        ints[f"{name}_n"] = strides.get(column, 1)
    return Call(tuple(names.values()), ints)


def _literals(program: BlockProgram) -> frozenset[float]:
    """The literals of a record."""
    every = ordered(tuple(x for _, x in program.fused.results))
    return frozenset(float(x.args[0]) for x in every if x.op == "const" and x.dtype == "f32")


def _attention_on_device(layout: Layout, runs: int) -> Call:
    program, extents, *_ = layout
    at, queries = attention_of(program).at, "nm"["nm".index(program.loop) - 1]
    heads, few, m, n = extents["h"], extents.get("H", extents["h"]), extents[queries], extents[program.loop]
    ints = {"m": m, "n": n, "heads": heads, "group": heads // few, "few": few, "items": extents["b"]}
    ints |= {"window": 0, "offset": n - m}
    names = {at.q: "q", at.k: "k", at.v: "v", at.o: "o"} | ({} if at.lse is None else {at.lse: "lse"})
    for i, name in names.items():
        strides = layout.strides(i)
        row = "n" if name in ("k", "v") else "m"
        ints |= {f"{name}_b": strides["b"], f"{name}_h": strides["h"]}
        ints[f"{name}_{row}"] = strides[program.loop if row == "n" else queries]
    rows, dv = extents["b"] * heads * m, extents["e"]
    ints |= {"runs": runs, "run": -(-n // runs), "all_rows": rows, "mosts_at": runs * rows * dv}
    ints |= {"sums_at": runs * rows * (dv + 1)}
    return Call(tuple(names[i] for i in range(len(names))), ints, runs * rows * (dv + 2) if runs > 1 else 0)


_added: list[bool] = []


def _spellings() -> None:
    """Add spellings of functions that only kernels have."""
    if not _added:
        from portmm.kernels.cpu.online_softmax import decay

        add("exp", decay, decays=True)
        _added.append(True)
