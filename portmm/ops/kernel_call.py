"""Kernels of one kind of call on a device, without the addresses and numbers of a single call.

Owns `KernelCall`, which every function of arrays on a device makes once for each kind of operands, and which fills in
addresses and launches; `Captures`, what it reads of a user's function; `over_rows`; and copies between arrays. All is
on the stream or queue of one operand, asynchronously.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portmm.arrays import grid_call, numpy_arrays, operand
from portmm.arrays.interop import adopt, empty_like
from portmm.arrays.operand import Operand, address
from portmm.dispatch.device_routes import launches as launches_over_rows
from portmm.dispatch.machine import Launch, Machine, machine_of
from portmm.ops import row_kernels
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import Fused, load
from portmm.spec.epilogue import Operand as Element
from portmm.spec.expr import Expr, const, real
from portmm.spec.expr_functions import rounded
from portmm.trace.bind import WRITTEN, bind_rows, dense, located
from portmm.trace.buffers import walk
from portmm.trace.closures import resolve
from portmm.trace.recorder import Source, element, readable_in_place

if TYPE_CHECKING:
    import numpy as np

    from portmm.spec import epilogue
    from portmm.trace.tracer import Traced

Result = tuple[str, tuple[int, ...], str]
"""The parameter of kernels for a result, its shape and its type."""
Closure = dict[Any, Any]
Moves = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Captures:
    """Arrays and numbers that kernels read of a function's closure.

    Attributes:
        sources: parameter of kernels, captured array, and the offset of its first element in bytes.
        numbers: keys of the numbers of a call.
        strides: elements along a batch, rows, columns, and heads, of each captured array.
    """

    sources: tuple[tuple[str, Source, int], ...] = ()
    numbers: tuple[tuple[Any, ...], ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, traced: Traced, size: tuple[int, ...], what: str = "the epilogue", first: int = 0) -> Captures:
        """The captures of a traced function, whose first array is operand `first` of its kernels.

        Raises:
            TypeError: an array is in the host's memory, or of a type that kernels do not read.
            ValueError: one is too short.
        """
        for x in traced.sources:
            if not x.device:
                raise TypeError(f"{what} captures an array in the host's memory; copy it to the device of the operands")
            if not readable_in_place(x.array):
                raise TypeError(f"{what} captures an array of {x.array.dtype}, which kernels cannot read; convert it")
        every = [(x, located(x.array, x, size)) for x in traced.sources]
        sources = tuple((f"x{first + i}_all", x, steps[0]) for i, (x, steps) in enumerate(every))
        return cls(sources, traced.numbers, tuple(steps[1:] for _, steps in every))

    def arrays(self, closure: Closure, like: Operand) -> list[Operand]:
        """The arrays of a call, on the device of an operand."""
        arrays = []
        for _, source, _ in self.sources:
            x = adopt(closure[source.key] if source.key in closure else resolve(source.key, closure))
            assert x is not None  # noqa: S101 - it was adopted when the function was traced
            operand.same_device([like, x])
            arrays.append(x)
        return arrays

    def values(self, read: list[Operand], closure: Closure) -> dict[str, Any]:
        """The arguments of kernels, by name."""
        values = {name: address(x, at) for (name, _, at), x in zip(self.sources, read, strict=True)}
        return values | {f"number_{i}": float(resolve(key, closure)) for i, key in enumerate(self.numbers)}


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """The kernels of one kind of call.

    Attributes:
        on: the device.
        results: what is written.
        launches: kernels, each with the operands that it moves: name, elements, and bytes of an element.
        workspace: elements that kernels share, and their type.
        several: the call returns a tuple.
        captures: what the call's function captures.
        converts: an `out` of another type than the first result takes a copy of it.
        copies: relayout copies that come first.
        swapped: kernels compute C^T = B^T . A^T, so that their A is B.
    """

    on: Machine
    results: tuple[Result, ...]
    launches: tuple[tuple[Launch, Moves], ...]
    workspace: tuple[int, str] = (0, "f32")
    several: bool = False
    captures: Captures = Captures()
    converts: bool = False
    copies: tuple[grid_call.Copy, ...] = ()
    swapped: bool = False

    def run(
        self,
        operands: dict[str, Operand],
        like: Operand,
        out: Operand | None = None,
        closure: Closure | None = None,
        read: list[Operand] | None = None,
        **values: Any,
    ) -> list[Operand]:
        """Launch the kernels and return the results; the first is `out` if there is one.

        Args:
            operands: by the name of kernels' parameters.
            like: the operand whose queue is used.
            out: the array of the first result.
            closure: what the function captures, and
            read: the arrays of these, if they are known.
            values: further numbers of kernels.
        """
        direct = out is not None and not self.converts
        results = [empty_like(like, shape, dtype) for _, shape, dtype in self.results[direct:]]
        if out is not None and direct:
            results.insert(0, out)
        if self.launches:
            values |= {name: address(x) for name, x in operands.items()}
            if self.swapped:
                values["a"], values["b"] = values["b"], values["a"]
            for (name, *_), x in zip(self.results, results, strict=True):
                values[name] = address(x)
            if self.captures.sources or self.captures.numbers:
                closure = closure or {}
                read = self.captures.arrays(closure, like) if read is None else read
                values |= self.captures.values(read, closure)
            copies = grid_call.run_copies(self.copies, self.on, values, like)
            start(self.on, self.launches, values, like, self.workspace)
            del copies  # their library frees them when the queue is done with them
        if out is not None and self.converts:
            copy(results[0], out)
            results[0] = out
        return results

    def returned(self, results: list[Operand]) -> Any:
        """The values that the call returns: the arrays of the results, or the only one."""
        return tuple([x.source for x in results]) if self.several else results[0].source


def start(
    on: Machine,
    launches: tuple[tuple[Launch, Moves], ...],
    values: dict[str, Any],
    like: Operand,
    workspace: tuple[int, str] = (0, "f32"),
) -> None:
    """Launch kernels with these arguments on the queue of an operand, with a workspace of elements of a type."""
    scratch = None
    if workspace[0]:
        scratch = empty_like(like, (workspace[0],), workspace[1])
        values["work"] = address(scratch)
    for launch, moves in launches:
        here = values
        if moves:
            here = values | {name: _advanced(values[name], elements, size) for name, elements, size in moves}
        launch.run(on, here, like.queue)
    del scratch  # its library frees it when the queue is done with it


def _advanced(there: Any, elements: int, size: int) -> Any:
    return there + elements * size if isinstance(there, int) else (there[0], there[1] + elements)


def via_temporary(out: Operand, like: Operand, dtype: str, run: Callable[[Operand], Any]) -> Any:
    """The result of `run` for a new array of a type, which is copied to `out` and replaced by it."""
    temporary = empty_like(replace(out, queue=like.queue), out.shape, dtype)
    result = run(temporary)
    copy(temporary, out)
    return (out.source, *result[1:]) if isinstance(result, tuple) else out.source


# -- rows ------------------------------------------------------------------------------


def over_rows(function: Any, arrays: tuple[Operand, ...], *options: Any, **more: Any) -> Any:
    """The results of a function over rows of operands on one device: see `rowwise.over_rows`."""
    return row_kernels.over(GridRows(arrays), function, *options, **more)


class GridRows:
    """Arrays on one device: see `rowwise.HostRows`."""

    def __init__(self, arrays: tuple[Operand, ...]) -> None:
        operand.same_device(arrays)
        *self.lead, m, n = arrays[0].shape
        self.like, self.size = arrays[0], (m, n, math.prod(self.lead))
        self.values = [flat(_readable(x), self.size) for x in arrays]
        self.kinds = tuple([x.kind for x in self.values])
        self.types = tuple([element(numpy_arrays.numpy_of(x.dtype))[0] for x in self.values])

    def usual(self, dtype: Any) -> np.dtype[Any]:
        """The type of results without a `cast`."""
        return numpy_arrays.numpy_of(operand.named(dtype) if dtype is not None else self.like.dtype)

    def kernel(
        self, traced: Traced, columns: tuple[epilogue.Operand, ...], usual: np.dtype[Any], closure: dict[Any, Any]
    ) -> KernelCall:
        """The kernel of a function, or of its sums down columns; `columns` are results of these, read again."""
        size, on = self.size, machine_of(self.like)
        layouts: list[tuple[tuple[int, ...], int]] = [(operand.elements(x), x.at) for x in self.values]
        layouts += [(dense("bn", size), operand.WIDEST)] * len(columns)
        captures = Captures.of(traced, size, "the function", len(layouts))
        step, shapes, written = bind_rows(self, traced, [operand.standin(x) for x in self.values], columns, usual)
        ats = [x.at + at for x, (*_, at) in zip(captures.arrays(closure, self.like), captures.sources, strict=True)]
        layouts += zip(captures.strides, ats, strict=True)
        first = len(layouts)
        layouts += [(x, operand.WIDEST) for x in written]
        aligned = [math.gcd(at, operand.WIDEST) for _, at in layouts]
        every, workspace = launches_over_rows(step.text, size, [s for s, _ in layouts], aligned, on)
        types = [numpy_arrays.name_of(t) for t in step.types]
        results = tuple((f"x{first + i}_all", *x) for i, x in enumerate(zip(shapes, types, strict=True)))
        unmoved = tuple((launch, ()) for launch in every)
        return KernelCall(on, results, unmoved, (workspace, "f32"), captures=captures)

    def run(
        self, kernel: KernelCall, closure: dict[Any, Any], values: list[Operand], out: Operand | None
    ) -> tuple[list[Operand], bool]:
        """Run a kernel: the results, and whether the first was written to `out`."""
        read = kernel.captures.arrays(closure, self.like)
        direct = out if out is not None and _takes(out, kernel, [*values, *read]) else None
        named = {f"x{i}_all": x for i, x in enumerate(values)}
        return kernel.run(named, self.like, direct, closure, read), direct is not None

    def put(self, result: Operand, out: Operand) -> None:
        """Copy a result to an array of the user."""
        operand.check_out(out, result.shape)
        operand.check_type(out, result.dtype)
        copy(result, out)


def _readable(x: Operand) -> Operand:
    """The array, if expressions read its type."""
    if x.dtype not in WRITTEN:
        raise TypeError(f"expressions on a device read {', '.join(WRITTEN)}, not {x.dtype}: convert the array first")
    return x


def flat(x: Operand, size: tuple[int, int, int]) -> Operand:
    """The array as (batch, m, n), copied where its batch is not evenly strided."""
    m, n, batch = size
    *_, row, column = operand.elements(x)
    step, width = operand.item_step(x, 2), BY_NAME[x.dtype].bytes
    if step is None:
        return flat(contiguous(x), size)
    return replace(x, shape=(batch, m, n), strides=(step * width, row * width, column * width))


def _takes(out: Operand, kernel: KernelCall, operands: list[Operand]) -> bool:
    """Whether kernels can write their first result to `out`: dense, aligned, and no overlap with operands."""
    _, shape, dtype = kernel.results[0]
    operand.check_out(out, shape)
    operand.check_type(out, dtype)
    aligned = out.at % operand.WIDEST == 0
    return aligned and operand.is_dense(out) and out.dtype == dtype and not operand.overlap(out, tuple(operands))


# -- copies ----------------------------------------------------------------------------


def contiguous(x: Operand, dtype: str = "") -> Operand:
    """A C-contiguous copy, of another type if one is requested."""
    to = empty_like(x, x.shape, dtype or x.dtype)
    copy(x, to)
    return to


def clear(to: Operand) -> None:
    """Write zeros to an array, whatever its strides, on its queue."""
    copy(to, to, const(0.0))


def copy(x: Operand, to: Operand, value: Expr | None = None) -> None:
    """Copy the elements of an array to another of its shape, whatever the strides of both, on the queue of `x`.

    What is written in their place is `value`, if there is one.
    """
    if not x.size:
        return
    if x.dtype == to.dtype == "f64":
        x, to = _words(x), _words(to)
    steps = [(0, 0, *operand.elements(y)) for y in (x, to)]
    elements = Element(x.dtype, "bmn", dense=False), Element(to.dtype, "bmn", dense=steps[1][-1] == 1)
    value = load(0, x.dtype) if value is None else value
    value = real(value) if to.dtype != "s32" else rounded(value) if value.dtype == "f32" else value
    w = walk((1, 1, *x.shape)[:-1], [s[:-1] for s in steps])
    size = w.rows[0], x.shape[-1] if x.shape else 1, w.batch[0]
    strides = [(w.batch[1][i], w.rows[1][i], steps[i][-1]) for i in range(2)]
    on = machine_of(x)
    every, workspace = launches_over_rows(str(Fused(elements, ((1, value),))), size, strides, [1, 1], on)
    sizes = [BY_NAME[y.dtype].bytes for y in (x, to)]
    names = "x0_all", "x1_all"
    moved = [(launch, tuple(zip(names, at, sizes, strict=True))) for at in w.repeats for launch in every]
    start(on, tuple(moved), dict(zip(names, (address(x), address(to)), strict=True)), x, (workspace, "f32"))


def _words(x: Operand) -> Operand:
    """An array of float64 as one of pairs of s32: expressions have no float64."""
    return replace(x, shape=(*x.shape, 2), strides=(*x.strides, 4), dtype="s32")
