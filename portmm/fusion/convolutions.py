"""Convolutions that a fused function calls: `portmm.conv` of traced images.

Owns `recorded`. With packed filters in the host's memory and channels last, a convolution is a node of its own
(`plan_windows`), and what follows it is its epilogue; other convolutions are steps by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.interop import adopt
from portmm.arrays.libraries import on_device
from portmm.arrays.numpy_arrays import name_of, numpy_of, types_of
from portmm.arrays.operand import result_type
from portmm.fusion.graph import FLOATS, refuse
from portmm.fusion.plan_windows import Filter
from portmm.ops.convolution_options import Options, hashable, layout_of, sizes
from portmm.ops.convolution_weights import DeviceFilters, PackedConv
from portmm.trace.placeholders import Placeholder

if TYPE_CHECKING:
    from portmm.spec.convolution import Convolution


def recorded(there: Any, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Record `conv` of traced arrays.

    Args:
        there: the recorder.
        function: `conv`.
        args: images, filters and `out`.
        options: its options.

    Raises:
        TraceError: it writes to an array, or filters are packed on a device.
        ConvolutionError: shapes or options do not fit together.
    """
    x, w, out = args
    if out is not None:
        raise refuse("out= changes an array in place; use what conv returns")
    how = dict(options)
    epilogue, prologue, dtype = (how.pop(name) for name in ("epilogue", "prologue_a", "dtype"))
    filters = there.leaves[w.node.leaf] if isinstance(w, Placeholder) and w.node.leaf >= 0 else w
    if isinstance(filters, DeviceFilters):
        raise refuse("filters that are packed on a device are no part of a fused function; pass their array")
    if isinstance(filters, PackedConv) and how["groups"] == 1:
        how["groups"] = filters.groups
    last = layout_of(how["layout"])[1]
    images = there.whole(x)
    about = Options(**{name: hashable(y) for name, y in how.items()})
    size = sizes(tuple(images.shape), tuple(filters.shape), about)
    if prologue is not None:
        rows = images.reshape(_rows(images.shape, last=last))
        images = there.applied(prologue, rows, "mk" if last else "km").reshape(images.shape)
    channels = size.groups * size.outputs
    whole = (images.shape[0], *size.out, channels) if last else (images.shape[0], channels, *size.out)
    known = _fits(filters, images.dtype, about, size, dtype)
    wanted = np.dtype(dtype) if dtype is not None and known else None

    shape = whole if epilogue is None else _rows(whole, last=last)

    def alone(x: Any, *w: Any) -> Any:
        return function(x, *(w or (filters,)), **how, dtype=wanted if known else dtype).reshape(shape)

    if known:
        y = there.over_windows("conv", images, Filter(filters, size), shape, alone, wanted)
    else:
        operands = (images.node,) if isinstance(filters, PackedConv) else (images.node, there.node_of(w))
        kind = _result(images.dtype, filters, dtype)
        y = there.wrap(there.call("conv", alone, operands, "", shape=shape, dtype=kind, own=True))
    if epilogue is None:
        return y
    results = there.applied(epilogue, y, "mn" if last else "nm")
    several = isinstance(results, tuple)
    each = [_shaped(z, size, last=last) for z in (results if several else (results,))]
    return tuple(each) if several else each[0]


def _rows(shape: tuple[int, ...], *, last: bool) -> tuple[int, ...]:
    """The shape of images as (image, pixel, channel), or (image, channel, pixel)."""
    return (shape[0], prod(shape[1:-1]), shape[-1]) if last else (*shape[:2], prod(shape[2:]))


def _shaped(x: Any, size: Convolution, *, last: bool) -> Any:
    """A result of an epilogue in the layout of images; of one that varies along no pixel, with extents of 1."""
    count, m, n = x.shape
    pixels, channels = (m, n) if last else (n, m)
    along = size.out if pixels == size.pixels else (1,) * len(size.out)
    return x.reshape((count, *along, channels) if last else (count, channels, *along))


def _fits(filters: Any, images: Any, how: Options, size: Convolution, dtype: Any) -> bool:
    """Whether kernels of the program compute a convolution, with what follows it."""
    packed = isinstance(filters, PackedConv) and not (filters.int4 or filters.depthwise) and size.groups == 1
    if not packed or (filters.layout, filters.dtype) != (how.layout, images) or not filters.channels_last:
        return False
    plain = images.name in FLOATS and (dtype is None or np.dtype(dtype).name in ("float32", images.name))
    return plain and 0 not in (size.pixels, size.depth)


def _result(images: np.dtype[Any], filters: Any, dtype: Any) -> np.dtype[Any]:
    """The type of the result of a convolution by itself."""
    if dtype is not None:
        return np.dtype(dtype)
    if (layout := adopt(filters) if on_device(filters) else None) is not None:
        return numpy_of(result_type(name_of(images), layout.dtype))
    if isinstance(filters, PackedConv) and filters.int4:
        return np.dtype(np.float32) if images.kind in "iu" else images
    return types_of(images, np.dtype(filters.dtype))[2]
