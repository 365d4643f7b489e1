"""Launch of block programs of products and of attention on arrays.

Owns `launch_products`: what kernels read of a record takes the place of a traced function.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, numpy_arrays, operand
from portmm.arrays.grid_call import Product
from portmm.arrays.libraries import on_device
from portmm.errors import ScheduleError
from portmm.ir.attention_program import attention_of
from portmm.ir.block_program import TileGemm
from portmm.ir.product_program import product_of
from portmm.ops import fused_matmul, grid_attention, grid_product, host_matmul
from portmm.ops.attention_kernel import make_kernel
from portmm.ops.attention_shapes import lengths_of, shape_of, starts_of
from portmm.ops.fused_matmul_kernel import FusedProduct
from portmm.ops.kernel_call import copy
from portmm.trace.recorder import Source, described
from portmm.trace.tracer import Traced
from portmm.util.array_subclasses import refuse_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.ir.block_program import BlockProgram
    from portmm.spec.expr import Expr

Array = np.ndarray[Any, Any]


def launch_products(program: BlockProgram, arrays: tuple[Any, ...]) -> None:
    """Run a block program with contractions on the host or, asynchronously, on the stream or queue of its left operand.

    Raises:
        ScheduleError: no kernel computes it.
        TypeError: an array is of another type than its operand, or elsewhere than the first.
        ValueError: shapes do not match, or a result shares memory with another array.
    """
    there = interop.adopt_all({f"array {i}": x for i, x in enumerate(arrays)}) if on_device(arrays[0]) else {}
    views = list(there.values()) or list(arrays)
    if program.fused.numbers:
        raise ScheduleError("a program that is launched takes no numbers: read an array")
    _check(program, views)
    gemms = sum(isinstance(x, TileGemm) for one in program.passes for x in one)
    (_attention if gemms > 1 else _product)(_Launch(program, views))


def _check(program: BlockProgram, views: list[Any]) -> None:
    """Check of types, shapes and memory.

    Raises:
        TypeError: a type differs.
        ValueError: shapes do not match, or results share memory.
    """
    if len(views) != len(program.operands):
        raise ValueError(f"{len(views)} arrays for {len(program.operands)} operands: pass one for each, in order")
    extents: dict[str, int] = {}
    written = {i for i, _ in program.fused.results}
    for i, (x, view) in enumerate(zip(program.operands, views, strict=True)):
        array = isinstance(view, np.ndarray)
        if array:
            refuse_class(view, f"array {i}", matrix=False)
        dtype = numpy_arrays.name_of(view.dtype) if array else getattr(view, "dtype", type(view).__name__)
        if dtype != x.dtype:
            raise TypeError(f"array {i} is of {dtype}; the operand is an array of {x.dtype}, where the first one is")
        if len(view.shape) != len(x.axes):
            raise ValueError(f"array {i} has shape {view.shape}; the operand is along {x.axes}")
        for label, extent in zip(x.axes, view.shape, strict=True):
            if extents.setdefault(label, extent) != extent:
                raise ValueError(f"array {i} has {extent} along {label}, and another {extents[label]}")
        if array and i in written and not view.flags.writeable:
            raise ValueError(f"array {i} is read-only; pass a writeable array")
        others = [y for j, y in enumerate(views) if j != i] if i in written else []
        if operand.overlap(view, tuple(others)) if not array else any(np.may_share_memory(view, y) for y in others):
            raise ValueError(f"array {i} is written and shares memory with another one: pass a copy")


class _Launch:
    """A block program with its arrays: NumPy's, or operands on a device."""

    def __init__(self, program: BlockProgram, views: list[Any]) -> None:
        self.program, self.views, self.host = program, views, isinstance(views[0], np.ndarray)

    def along(self, i: int, labels: str) -> Any:
        """An array with its dimensions in the order of these labels; a dimension of 1 where its operand lacks one."""
        x, axes = self.views[i], self.program.operands[i].axes
        steps = [(x.shape[axes.index(y)], x.strides[axes.index(y)]) if y in axes else (1, 0) for y in labels]
        shape, strides = tuple(n for n, _ in steps), tuple(s for _, s in steps)
        if self.host:
            return np.lib.stride_tricks.as_strided(x, shape, strides)
        return replace(x, shape=shape, strides=strides)

    def traced(self, values: list[tuple[Expr, Any]], reads: Sequence[int]) -> tuple[Traced, dict[Any, Any]]:
        """Expressions in the form of a traced function, and its closure: their loads are numbered as in `reads`."""
        arrays = [(x, ()) if self.host else (operand.standin(x), x.device) for x in (self.views[i] for i in reads)]
        views = [tuple(self.program.operands[i].axes) for i in reads]
        sources = tuple(
            Source((i,), array, view, exact=True, device=device)
            for i, view, (array, device) in zip(reads, views, arrays, strict=True)
        )
        operands = tuple(described(x.array, x.view) for x in sources)
        closure = {(i,): self.views[i] if self.host else self.views[i].source for i in reads}
        return Traced(tuple(values), len(values) > 1, operands, sources, ()), closure

    def copied(self, results: list[Any], outs: list[Any]) -> None:
        """Copy results that kernels did not write where they belong."""
        for x, to in zip(results, outs, strict=True):
            if x is not to and self.host:
                np.copyto(to, x)
            elif x is not to:
                copy(x, to)


def _product(x: _Launch) -> None:
    """A product with expressions of its sums."""
    found = product_of(x.program)
    axes = [x.program.operands[i].axes for i in (found.a, found.b, *(i for i, _ in found.results))]
    batch = "b" * ("b" in axes[0] + axes[1])
    if any(("b" in y) > bool(batch) for y in axes[2:]):
        raise ScheduleError("a result has a batch, and neither of the operands that are multiplied")
    a, b = (x.along(i, batch * ("b" in y) + z) for i, y, z in zip((found.a, found.b), axes, ("mk", "kn"), strict=False))
    outs = [x.along(i, batch + "mn") for i, _ in found.results]
    if found.plain:
        if x.host:
            host_matmul.product(a, b, outs[0])
        else:
            grid_product.multiply(Product(a, b, outs[0]))
        return
    values = [(y, numpy_arrays.numpy_of(x.program.operands[i].dtype)) for i, y in found.results]
    traced, closure = x.traced(values, found.reads)
    if not x.host:
        call = grid_product.prepared(Product(a, b, outs[0]), "", traced)
        x.copied(call.run({"a": a, "b": b}, a, outs[0], closure), outs)
        return
    product = FusedProduct(a, b, None, None)
    ready = product.ready(traced)
    if isinstance(ready, ScheduleError):
        raise ready
    dense = [y if y.flags.c_contiguous else np.empty_like(y, order="C") for y in outs]
    fused_matmul.execute(ready, product, closure, dense)
    x.copied(dense, outs)


def _attention(x: _Launch) -> None:
    """Attention."""
    found = attention_of(x.program)
    if x.program.loop != "n":
        raise ScheduleError("attention is launched with its keys along n, whatever kernels have along lanes")
    at, form = found.at, found.form
    if form.bounds.window and found.window is None:
        raise ScheduleError("the window of a program that is launched is a literal")
    q, k, v = (x.along(i, y) for i, y in ((at.q, "bhmd"), (at.k, "bHnd"), (at.v, "bHne")))
    outs = [x.along(at.o, "bhme")] + ([] if at.lse is None else [x.along(at.lse, "bhm")])
    many, starts = (None if i is None else x.views[i] for i in (at.lengths, at.starts))
    traced, closure = x.traced([(form.score.results[0][1], None)], found.reads)
    if not x.host:
        options = grid_attention.Options(None, None, None, form.bounds.causal, found.window, many, starts, form.lse)
        x.copied(grid_attention.launch((q, k, v, outs[0]), options, traced, closure), outs)
        return
    shape = shape_of(q, k, v)
    many = None if many is None else lengths_of(many, shape)
    starts = None if starts is None else starts_of(starts, shape)
    dense = [y if y.flags.c_contiguous else np.empty_like(y, order="C") for y in outs]
    if 0 in (shape.items, shape.heads, shape.m, shape.dv, shape.n):
        dense[0][...], dense[1:] = 0, [np.full_like(y, -np.inf) for y in dense[1:]]
    else:
        flags = (form.bounds.causal, not form.bounds.window, form.lse, many is None, starts is None)
        kernel = make_kernel(traced, shape, flags, dense[0])
        far = shape.n if found.window is None else min(found.window, shape.m + shape.n)
        results = [dense[0], *(y[..., None] for y in dense[1:]), *(y for y in (many, starts) if y is not None)]
        kernel.execute(shape, shape.operands, closure, results, far)
    x.copied(dense, outs)
