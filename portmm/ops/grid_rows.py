"""Kernels over the rows of arrays on a device.

Owns `over_rows` of operands there, and `GridRows`, their kernels. These are launched on the stream or queue of the
first array, asynchronously.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from portmm.arrays import numpy_arrays, operand
from portmm.arrays.operand import WIDEST, Operand
from portmm.dispatch.device_routes import launches
from portmm.dispatch.machine import machine_of
from portmm.ops import row_kernels
from portmm.ops.kernel_call import Captures, KernelCall, contiguous, copy
from portmm.spec.dtype import BY_NAME
from portmm.trace.bind import WRITTEN, bind_operands, dense
from portmm.trace.recorder import described, element

if TYPE_CHECKING:
    import numpy as np

    from portmm.spec import epilogue
    from portmm.trace.tracer import Traced


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
        size, (m, n, _) = self.size, self.size
        views = tuple([described(operand.standin(x), ("b", "m", "n")) for x in self.values])
        layouts: list[tuple[tuple[int, ...], int]] = [(operand.elements(x), x.at) for x in self.values]
        layouts += [(dense("bn", size), WIDEST)] * len(columns)
        captures = Captures.of(traced, size, "the function", len(layouts))
        step = bind_operands(traced, (*views, *columns), usual, ends=False)
        ats = [x.at + at for x, (*_, at) in zip(captures.arrays(closure, self.like), captures.sources, strict=True)]
        layouts += zip(captures.strides, ats, strict=True)
        first = len(layouts)
        layouts += [(dense(x, size), WIDEST) for x in step.axes]
        on, aligned = machine_of(self.like), [math.gcd(at, WIDEST) for _, at in layouts]
        every, workspace = launches(step.text, size, [s for s, _ in layouts], aligned, on)
        shapes = [(*self.lead, m if "m" in x else 1, n if "n" in x else 1) for x in step.axes]
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
    """The array, if expressions read its type.

    Raises:
        TypeError: they do not.
    """
    if x.dtype not in WRITTEN:
        raise TypeError(f"expressions on a device read {', '.join(WRITTEN)}, not {x.dtype}: convert the array first")
    return x


def flat(x: Operand, size: tuple[int, int, int]) -> Operand:
    """The array as (batch, m, n), copied where its batch is not evenly strided."""
    m, n, batch = size
    *lead, row, column = operand.elements(x)
    dims = [(count, s) for count, s in zip(x.shape[:-2], lead, strict=True) if count > 1]
    if any(s != count * t for (_, s), (count, t) in pairwise(dims)):
        return flat(contiguous(x), size)
    step = dims[-1][1] if dims else 0
    width = BY_NAME[x.dtype].bytes
    return replace(x, shape=(batch, m, n), strides=(step * width, row * width, column * width))


def _takes(out: Operand, kernel: KernelCall, operands: list[Operand]) -> bool:
    """Whether kernels can write their first result to `out`: dense, aligned, and no overlap with operands.

    Raises:
        TypeError: it cannot take the type of the result.
        ValueError: it cannot take the result at all.
    """
    _, shape, dtype = kernel.results[0]
    operand.check_out(out, shape)
    operand.check_type(out, dtype)
    aligned = out.at % WIDEST == 0
    return aligned and operand.is_dense(out) and out.dtype == dtype and not operand.overlap(out, tuple(operands))
