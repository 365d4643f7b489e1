"""Calls of kernels for their verification: extents, layouts of operands, and the integers of an argument block.

Owns `Shape`, `Layout`, and `call_of`, which calls a kernel of a record as its caller does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from portmm.ir.attention_program import attention_of
from portmm.ir.block_program import BlockProgram, TileGemm
from portmm.ir.grid_kernel import GridKernel
from portmm.ir.nodes import FIELDS, Kernel
from portmm.ir.product_program import product_of
from portmm.ir.tile_program import PREFIX, extent_fields, stride_field
from portmm.spec.problem import AXES
from portmm.verification.values import UnsupportedError

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


class Shape(NamedTuple):
    """Extents of a record's labels at which its kernel is called.

    Attributes:
        extents: of labels.
        keys: of a block of attention, but for those of one step of a unit.
    """

    extents: Mapping[str, int]
    keys: int = KEYS


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
    def of(
        cls, program: BlockProgram, extents: Mapping[str, int], kernel: Kernel | GridKernel, keys: int = KEYS
    ) -> Layout:
        """The layout of a kernel's call: that of attention has dense logarithms, and for few queries dense rows."""
        if not program.is_attention or kernel.name.startswith(PREFIX):
            return cls(program, extents)
        at = attention_of(program).at
        few = program.loop == "n" and not isinstance(kernel, GridKernel)
        keys = kernel.atom.k if isinstance(kernel, Kernel) and kernel.atom.tiled else keys
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


def attention_on_device(layout: Layout, runs: int) -> Call:
    """A call of attention on a device, whose keys are in runs."""
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
