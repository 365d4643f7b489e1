"""Launch of block programs on arrays.

Owns `launch_block`. What kernels of products and attention read of a record takes the place of a traced function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, numpy_arrays, operand
from portmm.arrays.grid_call import Product
from portmm.arrays.libraries import on_device
from portmm.dispatch import config, cpu_routes
from portmm.dispatch.device_routes import launches
from portmm.dispatch.machine import machine_of
from portmm.errors import ScheduleError
from portmm.ir import block_meaning
from portmm.ir.attention_program import attention_of
from portmm.ir.block_program import BlockProgram, TileGemm
from portmm.ir.product_program import product_of
from portmm.ops import fused_matmul, grid_attention, grid_product, host_matmul
from portmm.ops.attention_kernel import make_kernel
from portmm.ops.attention_shapes import Options, by_item, shape_of
from portmm.ops.kernel_call import copy, start
from portmm.ops.product_kernel import HostProduct
from portmm.runtime.cpu import runtime
from portmm.trace.recorder import Source, described
from portmm.trace.tracer import Traced

if TYPE_CHECKING:
    from portmm.arrays.operand import Operand
    from portmm.spec import epilogue
    from portmm.spec.expr import Expr

Array = np.ndarray[Any, Any]


def launch_block(program: BlockProgram, arrays: tuple[Any, ...]) -> None:
    """Run a block program, on the host or, asynchronously, on the stream or queue of the first array.

    Raises:
        TypeError: an array is of another type than its operand, or elsewhere than the first.
        ValueError: shapes do not match, an array cannot be written or shares memory with another one in part, or
            elements along n are not neighbours in memory.
    """
    gemms = sum(isinstance(x, TileGemm) for one in program.passes for x in one)
    there = interop.adopt_all({f"x{i}_all": x for i, x in enumerate(arrays)}) if on_device(arrays[0]) else {}
    x = _Launch(program, [operand.standin(y) for y in there.values()] or list(arrays), list(there.values()))
    x.check(dimensions=bool(gemms))
    (_attention if gemms > 1 else _product if gemms else _rows)(x)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A block program with its arrays.

    Attributes:
        program: the block program.
        views: arrays in the host's memory, or stand-ins.
        there: operands on a device, or an empty list.
    """

    program: BlockProgram
    views: list[Any]
    there: list[Operand]

    def check(self, *, dimensions: bool) -> None:
        """Check of types, of memory, and, of a program with contractions, of dimensions."""
        program, extents = self.program, dict[str, int]()
        if program.fused.numbers:
            raise ScheduleError("a program that is launched takes no numbers: read an array")
        if len(self.views) != len(program.operands):
            raise ValueError(
                f"{len(self.views)} arrays for {len(program.operands)} operands: pass one for each, in order"
            )
        for i, (x, view) in enumerate(zip(program.operands, self.views, strict=True)):
            _check_operand(i, x, view)
            if dimensions and view.ndim != len(x.axes):
                raise ValueError(f"array {i} has shape {view.shape}; the operand is along {x.axes}")
            for label, extent in zip(x.axes, view.shape, strict=True) if dimensions else ():
                if extents.setdefault(label, extent) != extent:
                    raise ValueError(f"array {i} has {extent} along {label}, and another {extents[label]}")
        for i in {i for i, _ in program.fused.results}:
            if self.there:
                operand.check_out(self.there[i], self.there[i].shape)
            elif not self.views[i].flags.writeable:
                raise ValueError(f"array {i} is read-only; pass a writeable array")
            self._check_overlap(i, whole=not dimensions)

    def _check_overlap(self, i: int, *, whole: bool) -> None:
        """Check that an array that is written shares no memory with another one; `whole`: or all of it."""
        to = self.views[i]
        for j, x in enumerate(self.views):
            if self.there:
                shared = not whole and operand.overlap(self.there[i], (self.there[j],))
            else:
                shared = not (whole and _laid(x) == _laid(to)) and np.may_share_memory(x, to)
            if i != j and shared:
                part = " in part" if whole else ""
                raise ValueError(f"array {i} is written and shares memory with array {j}{part}: pass a copy")

    def along(self, i: int, labels: str) -> Any:
        """An array with its dimensions in the order of these labels; a dimension of 1 where its operand lacks one."""
        x: Any = (self.there or self.views)[i]
        axes = self.program.operands[i].axes
        steps = [(x.shape[axes.index(y)], x.strides[axes.index(y)]) if y in axes else (1, 0) for y in labels]
        shape, strides = tuple(n for n, _ in steps), tuple(s for _, s in steps)
        if not self.there:
            return np.lib.stride_tricks.as_strided(x, shape, strides)
        return replace(x, shape=shape, strides=strides)

    def traced(self, values: list[tuple[Expr, Any]], reads: Sequence[int]) -> tuple[Traced, dict[Any, Any]]:
        """Expressions in the form of a traced function, and its closure: their loads are numbered as in `reads`."""
        sources = tuple(
            Source(
                (i,), self.views[i], tuple(self.program.operands[i].axes), exact=True,
                device=self.there[i].device if self.there else (),
            ) for i in reads
        )  # fmt: skip
        operands = tuple(described(x.array, x.view) for x in sources)
        closure = {(i,): self.there[i].source if self.there else self.views[i] for i in reads}
        return Traced(tuple(values), len(values) > 1, operands, sources, ()), closure

    def copied(self, results: list[Any], outs: list[Any]) -> None:
        """Copy results that kernels did not write where they belong."""
        for x, to in zip(results, outs, strict=True):
            if x is not to:
                (copy if self.there else np.copyto)(*((x, to) if self.there else (to, x)))


def _laid(x: Array) -> tuple[Any, ...]:
    """The memory of an array, and its order there."""
    return x.ctypes.data, [(n, s) for n, s in zip(x.shape, x.strides, strict=True) if n > 1]


def _check_operand(i: int, x: epilogue.Operand, view: Any) -> None:
    """Check that a block program can read an array."""
    if not isinstance(view, np.ndarray) or numpy_arrays.name_of(view.dtype) != x.dtype:
        actual = view.dtype if isinstance(view, np.ndarray) else f"a {type(view).__name__}"
        raise TypeError(f"array {i} is of {actual}; the operand is an array of {x.dtype}, on the first one's device")
    numpy_arrays.check_readable(f"array {i}", view)


def _rows(x: _Launch) -> None:
    """Expressions over rows or columns."""
    (batch, m, n), strides = _broadcast(x.program, x.views)
    if not x.there:
        host_matmul.begin()
        route = cpu_routes.rows_route(x.program, (m, n, batch), config.target(), config.get_num_threads())
        table = np.array([(runtime().address(y), *s, 0) for y, s in zip(x.views, strides, strict=True)], np.int64)
        if m and batch:
            runtime().execute(route, m, n, 1, batch, *(0,) * 12, None, table, None)
        return
    on, aligned = machine_of(x.there[0]), [math.gcd(y.at, operand.WIDEST) for y in x.there]
    every, work = launches(x.program, (m, n, batch), strides, aligned, on)
    addresses = {f"x{i}_all": operand.address(y) for i, y in enumerate(x.there)}
    start(on, tuple((y, ()) for y in every), addresses, x.there[0], (work, "f32"))


def _broadcast(program: BlockProgram, views: list[Any]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The extents of a batch, rows and columns, and the strides of each operand along them, in elements."""
    if deep := [i for i, x in enumerate(views) if x.ndim > 3]:
        raise ValueError(f"array {deep[0]} has shape {views[deep[0]].shape}; a block program takes (batch, m, n)")
    shape, strides = np.broadcast_shapes((1, 1, 1), *(x.shape for x in views)), []
    if program.loop == "m" and not shape[1]:
        raise ValueError(f"arrays of {shape} have no rows to reduce")
    for i, (x, view) in enumerate(zip(program.operands, views, strict=True)):
        whole = tuple(extent if axis in x.axes else 1 for axis, extent in zip("bmn", shape, strict=True))
        if (1,) * (3 - view.ndim) + view.shape != whole:
            raise ValueError(f"array {i} is {view.shape}, operand {x} of {shape} takes {whole}")
        steps = np.broadcast_to(view, whole).strides
        strides.append(tuple(s // view.itemsize if axis in x.axes else 0 for axis, s in zip("bmn", steps, strict=True)))
        if x.dense and "n" in x.axes and shape[2] > 1 and view.size and strides[-1][2] != 1:
            raise ValueError(f"elements of array {i} are {strides[-1][2]} apart along n: pass a contiguous one")
    return shape, strides


def _product(x: _Launch) -> None:
    """A product with expressions of its sums."""
    parts = product_of(x.program)
    axes = [x.program.operands[i].axes for i in (parts.a, parts.b, *(i for i, _ in parts.results))]
    batch = "b" * ("b" in axes[0] + axes[1])
    if any(("b" in y) > bool(batch) for y in axes[2:]):
        raise ScheduleError("a result has a batch, and neither of the operands that are multiplied")
    a, b = (x.along(i, batch * ("b" in y) + z) for i, y, z in zip((parts.a, parts.b), axes, ("mk", "kn"), strict=False))
    outs = [x.along(i, batch + "mn") for i, _ in parts.results]
    if parts.plain:
        if x.there:
            grid_product.GridProduct(Product(a, b, outs[0])).plain()
        else:
            host_matmul.product(a, b, outs[0])
        return
    if not x.there and 0 in (*a.shape, *b.shape):
        block_meaning.run(x.program, x.views)
        return
    values = [(y, numpy_arrays.numpy_of(x.program.operands[i].dtype)) for i, y in parts.results]
    traced, closure = x.traced(values, parts.reads)
    if x.there:
        call = grid_product.GridProduct(Product(a, b, outs[0])).prepared(traced)
        x.copied(call.run({"a": a, "b": b}, a, outs[0], closure), outs)
        return
    host_matmul.begin()
    product = HostProduct(a, b, None, None)
    ready = product.ready(traced)
    if isinstance(ready, ScheduleError):
        raise ready
    dense = [y if y.flags.c_contiguous else np.empty_like(y, order="C") for y in outs]
    fused_matmul.run(ready, product, closure, dense)
    x.copied(dense, outs)


def _attention(x: _Launch) -> None:
    """Attention."""
    parts = attention_of(x.program)
    if x.program.loop != "n":
        raise ScheduleError("attention is launched with its keys along n, whatever kernels have along lanes")
    at, form = parts.at, parts.form
    if form.bounds.window and parts.window is None:
        raise ScheduleError("the window of a program that is launched is a literal")
    q, k, v = (x.along(i, y) for i, y in ((at.q, "bhmd"), (at.k, "bHnd"), (at.v, "bHne")))
    outs = [x.along(at.o, "bhme")] + ([] if at.lse is None else [x.along(at.lse, "bhm")])
    many, starts = (None if i is None else (x.there or x.views)[i] for i in (at.lengths, at.starts))
    traced, closure = x.traced([(form.score.results[0][1], None)], parts.reads)
    if x.there:
        options = Options(None, None, None, form.bounds.causal, parts.window, many, starts, form.lse)
        x.copied(grid_attention.launch((q, k, v, outs[0]), options, traced, closure), outs)
        return
    shape = shape_of(*numpy_arrays.rows_of(q=q, k=k, v=v))
    many = None if many is None else by_item(many, "lengths", shape, 0)
    starts = None if starts is None else by_item(starts, "offsets", shape, -shape.m)
    dense = [y if y.flags.c_contiguous else np.empty_like(y, order="C") for y in outs]
    if 0 in (shape.items, shape.heads, shape.m, shape.dv, shape.n):
        dense[0][...], dense[1:] = 0, [np.full_like(y, -np.inf) for y in dense[1:]]
    else:
        flags = (form.bounds.causal, not form.bounds.window, form.lse, many is None, starts is None)
        kernel = make_kernel(traced, shape, flags, dense[0])
        results = [dense[0], *(y[..., None] for y in dense[1:]), *(y for y in (many, starts) if y is not None)]
        kernel.execute(shape, shape.operands, closure, results, shape.far(parts.window))
    x.copied(dense, outs)
