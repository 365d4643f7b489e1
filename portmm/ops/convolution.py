"""Convolution: `conv`.

Owns the public function and the fast path of calls without functions. `convolution_options` has the checks,
`convolution_call` the calls, `convolution_kernel` the kernels, `convolution_weights` the filters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from portmm.arrays import libraries, numpy_arrays
from portmm.dispatch import config
from portmm.errors import ConvolutionError
from portmm.ops import host_matmul
from portmm.ops.convolution_call import Repeated, Wanted, channels_first, convolved, prologue, readable
from portmm.ops.convolution_options import Options, hashable, sizes
from portmm.ops.convolution_weights import PackedConv, filter_type, misfits, pack_conv, unpack_conv
from portmm.util.memo import Memory

Array = np.ndarray[Any, Any]
MOST = 1024
"""Kinds of calls remembered before the memo is emptied."""

_sizes, _repeated, _kinds = Memory(MOST), Memory(MOST), Memory(MOST)


def conv(
    x: Any,
    w: Any,
    out: Any = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: Any = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    layout: str = "NHWC",
    padding_value: int = 0,
    dtype: Any = None,
    epilogue: Callable[..., Any] | None = None,
    prologue_a: Callable[..., Any] | None = None,
) -> Any:
    """Convolution (cross-correlation, as in PyTorch and ONNX) over one, two or three dimensions.

    Windows of the images are a view that the kernels of products read: nothing is gathered to memory first, and no
    copy of the images is padded. Types are summed as in `matmul`.

    Args:
        x: images in `layout`, of any strides; the types of `matmul`.
        w: filters (outputs, channels of a group, *kernel), or those of `pack_conv`, which are packed once.
        out: the array of the result, of any strides.
        stride: of windows: a number, or one for each dimension.
        padding: zeros around the images: a number, one for each dimension, a pair (before, after) for each, or "same".
        dilation: distance of the taps of a filter.
        groups: of channels, each convolved by itself.
        layout: "NHWC" or "NCHW", or those of one or three dimensions: "NWC", "NCW", "NDHWC", "NCDHW".
        padding_value: in the place of zeros: the zero point of int8 or uint8 images.
        dtype: type of the result, as in `matmul`.
        epilogue: a function (acc, i) of the sums, as in `matmul`: i.b is the image, i.m the pixel of the result and
            i.n its channel, in any layout. Arrays without indices are broadcast to (image, pixel, channel), or
            (image, channel, pixel) with channels first.
        prologue_a: a function (a, i) of the images, with i.k the channel; padding stays zero.

    Returns:
        The result in `layout`; `out` if given; of several results of an epilogue, a tuple.

    Raises:
        ConvolutionError: shapes or options do not fit together.
        TypeError: a dtype is not supported.
        TraceError: a function cannot be traced.
    """
    kind = None
    if prologue_a is None and type(x) is np.ndarray and type(w) is PackedConv:
        kind = _kind(stride, padding, dilation, groups, layout, padding_value, dtype, w.kind, config.limit())
        result = NotImplemented if kind is None else _again(kind, x, w, out, epilogue)
        if result is not NotImplemented:
            return result
    if where := libraries.place_of(x, w, out):
        from portmm.arrays.interop import elsewhere

        more = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "layout": layout}
        more |= {"padding_value": padding_value, "dtype": dtype, "epilogue": epilogue, "prologue_a": prologue_a}
        return elsewhere(where, conv, _there, (x, w, out), more, "call_conv_")
    images = numpy_arrays.as_operand(x, "x", matrix=False)
    packed = isinstance(w, PackedConv)
    w = w if packed else numpy_arrays.as_operand(w, "w", matrix=False)
    groups = w.groups if packed and groups == 1 else groups
    options = Options(hashable(stride), hashable(padding), hashable(dilation), groups, layout, hashable(padding_value))
    about = (images.shape, tuple(w.shape), options)
    size = _sizes.get(about) or _sizes.keep(about, sizes(*about))
    if padding_value and not _holds(images.dtype, padding_value):
        raise ConvolutionError(f"padding_value is {padding_value}, which images of {images.dtype} do not have")
    wanted, passed = filter_type(w, images.dtype, layout), w
    if not packed or (w.layout, w.groups, w.dtype) != (layout, groups, wanted) or misfits(w, images.dtype):
        filters = unpack_conv(w) if packed else w
        w = pack_conv(filters.astype(wanted, copy=False), groups=groups, layout=layout, activations=images.dtype)
    if images.dtype == np.uint8 and not (w.channels_last or w.depthwise):
        # No unit multiplies signed filters by unsigned images.
        more = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "dtype": dtype}
        more |= {"padding_value": padding_value, "epilogue": epilogue, "prologue_a": prologue_a}
        swapped = conv(np.moveaxis(images, 1, -1), unpack_conv(w), layout=layout.replace("C", "") + "C", **more)
        return channels_first(swapped, out)
    if prologue_a is not None:
        images = prologue(prologue_a, images, last=w.channels_last)
    read, dtype = readable(images, w), None if dtype is None else np.dtype(dtype)
    kind = kind if w is passed and read is x else None
    repeat = None if kind is None or w.panels is None else _repeat(kind, read, w, out, epilogue)
    to = Wanted(out, dtype, repeat)
    result = convolved(read, w, size, to, epilogue)
    if kind is not None and (ready := Repeated.of(read, w, size, to, fused=epilogue is not None)) is not None:
        _repeated.keep(_key(kind, read, out, epilogue), ready)
    return result


def _there(*operands: Any, **options: Any) -> Any:
    """The convolution of arrays on a device."""
    from portmm.ops.grid_convolution import convolution as on_device

    return on_device(*operands, **options)


def _holds(dtype: np.dtype[Any], value: int) -> bool:
    """Whether a type of integers has a value."""
    return dtype.kind in "iu" and bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)


def _kind(*options: Any) -> tuple[Any, ...] | None:
    """The one object for these options, by which the runtime knows them; None if an option is a list."""
    try:
        kind: tuple[Any, ...] = _kinds.get(options) or _kinds.keep(options, options)
    except TypeError:
        return None
    return kind


def _again(kind: tuple[Any, ...], x: Array, w: PackedConv, out: Any, epilogue: Any) -> Any:
    """The result of a call of a kind that is known; NotImplemented for others."""
    if w.panels is not None:
        result = host_matmul.again(*_repeat(kind, x, w, out, epilogue), config.current())
        if result is not NotImplemented:
            return result
    repeated = _repeated.get(_key(kind, x, out, epilogue))
    return NotImplemented if repeated is None else repeated(x, w, out, epilogue)


def _repeat(kind: tuple[Any, ...], x: Array, w: PackedConv, out: Any, epilogue: Any) -> tuple[Any, ...]:
    """A call as the runtime repeats it."""
    operands = (x, w.panels) if w.channels_last else (w.panels, x)
    return (epilogue or _sums, *operands, out, kind)


def _key(kind: tuple[Any, ...], x: Array, out: Any, epilogue: Any) -> tuple[Any, ...]:
    """The kind of a call that Python repeats."""
    return (kind, x.shape, x.strides, x.dtype, x.flags.aligned, out is None, epilogue is None, config.current())


def _sums(acc: Any, i: Any) -> Any:
    """The epilogue of calls without one, by which the runtime knows them."""
    del i
    return acc
