"""Calls of convolutions: where results go, the kernels of a kind of call, and NumPy in place of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import config
from portmm.errors import BuildError, ScheduleError
from portmm.ops import host_matmul
from portmm.ops.call_fastpath import keep_item
from portmm.ops.convolution_kernel import ConvolutionKernel, HostConvolution
from portmm.ops.convolution_weights import PackedConv, of_filters, single_groups, unpack_conv
from portmm.ops.epilogues import CHANNELS_FIRST, NAMES, NOT_F64, VALUES, VALUES_FIRST
from portmm.ops.product_kernel import first_type
from portmm.spec.problem import family
from portmm.trace.bind import UserFunction
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.ops.depthwise import DepthwiseKernel
    from portmm.spec.convolution import Convolution

Array = np.ndarray[Any, Any]
MOST = 1024
"""Kinds of calls without an epilogue remembered before the memo is emptied."""

_kinds = Memory(MOST)


def readable(x: Array, w: PackedConv) -> Array:
    """Images in a form that kernels read, copied only if they must be."""
    dtype = x.dtype.newbyteorder("=")
    if w.depthwise or w.grouped:
        dtype = numpy_arrays.types_of(dtype, w.dtype)[0]
    elif not w.channels_last:
        dtype = numpy_arrays.types_of(w.dtype, dtype)[1]
    elif hasattr(w.weight[0], "element"):
        dtype = numpy_arrays.types_of(dtype, w.dtype)[0]
    unit = w.weight[0].panels.unit if w.grouped else family(w.weight[0].family).kr if w.stacked else 1
    apart = (w.grouped or w.stacked) and not _in_units(x, unit)
    if numpy_arrays.addressable(x, dtype) and min(x.strides, default=0) >= 0 and not apart:
        return x
    return np.require(np.ascontiguousarray(x), dtype, ("C", "A"))


def _in_units(x: Array, unit: int) -> bool:
    """Whether channels are contiguous, and pixels whole units of them apart."""
    return x.strides[-1] == x.itemsize and not any(s % (unit * x.itemsize) for s in x.strides[:-1])


class Wanted(NamedTuple):
    """Options of a call that concern its result.

    Attributes:
        out: the array of the result, or None.
        dtype: its type, or None.
        repeat: the call as `call_fastpath.keep_item` takes it, if it may be repeated.
    """

    out: Any = None
    dtype: np.dtype[Any] | None = None
    repeat: tuple[Any, ...] | None = None


class _Place(NamedTuple):
    """Memory of the first result.

    Attributes:
        array: the user's array as (image, pixel, channel), or with channels first (image, channel, pixel); or None.
        strides: of rows and items, in elements; where pixels are at no equal distances also of a row of pixels.
    """

    array: Array | None
    strides: tuple[int, ...]


def convolved(x: Array, w: PackedConv, size: Convolution, wanted: Wanted, epilogue: Any) -> Any:
    """The convolution with its epilogue."""
    call = _call(x, w, size, wanted, fused=epilogue is not None)
    host_matmul.begin()
    if 0 in (*call.shape, size.depth):
        return _finished(_by_numpy(call, epilogue), call, wanted)
    place = _place(wanted.out, call)
    kernel: Any
    function = None if epilogue is None else UserFunction(epilogue)
    try:
        kernel = _plain(call, place) if function is None else _fused(call, place, function)
    except BuildError as error:
        fall_back(error)
        return _finished(_by_numpy(call, epilogue), call, wanted)
    none = isinstance(kernel, ScheduleError)
    if none and len(place.strides) == 2:
        return _finished(_split(call, epilogue) if epilogue else _by_numpy(call, None), call, wanted)
    to, closure = place.array, None if function is None else function.closure
    if none or (to is not None and not _writes(kernel, to, closure)):
        result = convolved(x, w, size, Wanted(None, wanted.dtype or call.first), epilogue)
        return _copied(result, wanted.out)
    shape, dtype = kernel.results[0]
    results = [np.empty(shape, dtype) if to is None else to, *(np.empty(s, t) for s, t in kernel.results[1:])]
    row, item, *_ = place.strides
    kernel.run(x, w, (results[0], row, item), closure, results[1:])
    lasting = (function is None or function.lasting) and (wanted.out is None or to is not None)
    if wanted.repeat is not None and lasting and (kernel.several or wanted.dtype in {None, results[0].dtype}):
        keep_item(wanted.repeat, kernel, (row, item), [y.shape for y in _shaped(results, call)])
    if to is None:
        return _finished((results, kernel.several), call, wanted)
    return (wanted.out, *_shaped(results[1:], call)) if kernel.several else wanted.out


def _writes(kernel: Any, to: Array, closure: Any) -> bool:
    """Whether a kernel writes its first result to an array: of its type, and apart from the epilogue's operands.

    Where channels are computed twice no operand is the result itself.
    """
    bound = kernel.bound
    places = () if getattr(kernel, "overlaps", False) else ("b", "m", "n")
    return bool(to.dtype == kernel.results[0][1] and (not bound or bound.apart(to, places, closure or {})))


def _call(x: Array, w: PackedConv, size: Convolution, wanted: Wanted, *, fused: bool) -> HostConvolution:
    """The convolution, with results of the requested type where kernels write them; others are converted afterwards."""
    (out, dtype, _), kind, size = wanted, _kind_of(w), of_filters(size, w)
    first = first_type(out, dtype)
    if fused:
        return kind(x, w, size, dtype, first)
    call = kind(x, w, size, first if dtype is None else dtype, None)
    return call if call.wanted is None or call.writes() else kind(x, w, size, None, None)


def _kind_of(w: PackedConv) -> type[HostConvolution]:
    """The class of convolutions by filters."""
    if w.grouped or w.stacked:
        from portmm.ops.grouped_convolution import HostGrouped, HostStacked

        return HostGrouped if w.grouped else HostStacked
    if not w.depthwise:
        return HostConvolution
    from portmm.ops.depthwise import HostDepthwise  # it traces, which products without an epilogue do not

    return HostDepthwise


def _plain(call: HostConvolution, place: _Place) -> ConvolutionKernel | DepthwiseKernel | ScheduleError:
    """The kernel without an epilogue."""
    key = (call.kind, place.strides, config.current(), config.limit())
    kernel: ConvolutionKernel | DepthwiseKernel | ScheduleError
    kernel = _kinds.get(key) or _kinds.keep(key, call.ready(None, place.strides))
    return kernel


def _fused(call: HostConvolution, place: _Place, function: UserFunction) -> Any:
    """The kernel with an epilogue."""
    key, values = ("conv", *call.kind, place.strides), VALUES if call.last else VALUES_FIRST
    return function.ready(key, lambda traced: call.ready(traced, place.strides), values, 3)


# -- the fast path ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repeated:
    """A further call of a kind that Python makes: of several products, or of filters of single channels.

    Attributes:
        kernel: the kernel; None with an epilogue.
        key: the kind by which a function knows its kernel.
        shape: of the result.
        dtype: that was asked for, or None.
        strides: of rows and items of a dense result, in elements.
    """

    kernel: ConvolutionKernel | DepthwiseKernel | None
    key: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    strides: tuple[int, int]

    @classmethod
    def of(cls, x: Array, w: PackedConv, size: Convolution, wanted: Wanted, *, fused: bool) -> Repeated | None:
        """The record of a call that was made; None where it is not to be repeated like this."""
        call, kernel, dtype = _call(x, w, size, wanted, fused=fused), None, wanted.dtype
        if 0 in (*call.shape, size.depth) or not (fused or dtype is None or call.writes()):
            return None
        strides = _dense(call.shape)
        if not fused:
            kernel = _kinds.get((call.kind, strides, config.current(), config.limit()))
            if kernel is None or isinstance(kernel, ScheduleError):
                return None
        return cls(kernel, ("conv", *call.kind, strides), _user_shape(call), dtype, strides)

    def __call__(self, x: Array, w: PackedConv, out: Any, epilogue: Any) -> Any:
        """The result; NotImplemented if no kernel is known, or if it has several or cannot be written to `out`."""
        kernel: Any = self.kernel
        closure = None
        if epilogue is not None:
            function = UserFunction(epilogue)
            kernel, closure = function.known(self.key), function.closure
            if kernel is None or isinstance(kernel, ScheduleError) or kernel.several:
                return NotImplemented
        shape, dtype = kernel.results[0]
        if self.dtype not in {None, dtype}:
            return NotImplemented
        if out is None:
            out = np.empty(self.shape, dtype)
        else:
            dense = type(out) is np.ndarray and out.shape == self.shape and numpy_arrays.dense_at(out, dtype, x)
            if not (dense and _writes(kernel, out.reshape(shape), closure)):
                return NotImplemented
        kernel.run(x, w, (out, *self.strides), closure)
        return out


# -- memory of results -----------------------------------------------------------


def _dense(shape: tuple[int, int, int]) -> tuple[int, int]:
    return shape[2], shape[1] * shape[2]


def _place(out: Any, call: HostConvolution) -> _Place:
    """Memory of the first result: the user's, where kernels can write it.

    Raises:
        TypeError: `out` is no array.
        ValueError: it has another shape, or is read-only.
    """
    shape = call.shape
    nowhere = _Place(None, _dense(shape))
    if out is None:
        return nowhere
    numpy_arrays.check_out(out, _user_shape(call), np.dtype(np.int8))
    addressable = numpy_arrays.addressable(out, out.dtype.newbyteorder("=")) and min(out.strides, default=0) >= 0
    if not addressable or np.may_share_memory(out, call.x):
        return nowhere
    view = out.view()
    try:
        view.shape = shape
    except AttributeError:  # pixels are at no equal distances
        return _lines(view, call) or nowhere
    item, row, element = (s // out.itemsize for s in view.strides)
    item = row * shape[1] if shape[0] == 1 else item
    rows = (element == 1 or shape[2] == 1) and row >= shape[2] and item >= row * (shape[1] - 1) + shape[2]
    return _Place(view, (row, item)) if rows else nowhere


def _lines(out: Array, call: HostConvolution) -> _Place | None:
    """Memory whose rows of pixels are apart, as every other pixel of an image; None if kernels do not write it."""
    if not call.last or len(call.convolution.out) != 2 or call.w.depthwise or call.w.grouped or call.w.stacked:
        return None
    item, line, row, element = (s // out.itemsize for s in out.strides)
    _, lines, pixels, channels = out.shape
    apart = row >= channels and line >= row * (pixels - 1) + channels and item >= line * (lines - 1) + row * pixels
    adjacent = element == 1 or channels == 1
    return _Place(out, (row, item, line)) if adjacent and (apart or len(out) == 1) else None


def _copied(result: Any, out: Array) -> Any:
    """A result copied to an array that kernels do not write."""
    several = isinstance(result, tuple)
    first, *rest = result if several else (result,)
    numpy_arrays.put(numpy_arrays.check_out(out, first.shape, first.dtype), first)
    return (out, *rest) if several else out


def channels_first(result: Any, out: Any) -> Any:
    """Results with channels last, copied to the other layout."""
    several = isinstance(result, tuple)
    each = [np.ascontiguousarray(np.moveaxis(x, -1, 1)) for x in (result if several else (result,))]
    whole = tuple(each) if several else each[0]
    return whole if out is None else _copied(whole, out)


def _user_shape(call: HostConvolution) -> tuple[int, ...]:
    """The shape of a result in the layout of the images."""
    images, *rest = call.shape
    return (images, *call.convolution.out, rest[1]) if call.last else (images, rest[0], *call.convolution.out)


def _shaped(results: Sequence[Array], call: HostConvolution) -> list[Array]:
    """Results in the layout of the images; of one that varies along no channel or no pixel, with an extent of 1."""
    spatial, shaped = call.convolution.out, []
    for x in results:
        images, m, n = x.shape
        pixels, channels = (m, n) if call.last else (n, m)
        along = spatial if pixels == call.convolution.pixels else (1,) * len(spatial)
        shaped.append(x.reshape((images, *along, channels) if call.last else (images, channels, *along)))
    return shaped


def _finished(computed: tuple[Sequence[Array], bool], call: HostConvolution, wanted: Wanted) -> Any:
    """Results in the layout of the images, the first copied to `out`, or of the requested type."""
    (results, several), (out, dtype, _) = computed, wanted
    first, *rest = _shaped(results, call)
    if out is not None:
        return _copied((first, *rest) if several else first, out)
    if dtype is not None and not several:
        if not np.can_cast(first.dtype, dtype, casting="same_kind"):
            raise TypeError(f"dtype is {dtype}, which cannot hold {first.dtype} results")
        first = first.astype(dtype, copy=False)
    return (first, *rest) if several else first


# -- in place of one kernel ------------------------------------------------------


def _split(call: HostConvolution, epilogue: Any) -> tuple[list[Array], bool]:
    """The convolution first, then the epilogue over its rows."""
    from portmm.ops.rowwise import over_rows

    sums = call.sums()
    if sums == "f64":
        raise TypeError(NOT_F64)
    whole = np.dtype(np.int32 if sums == "s32" and not call.int4 else np.float32)
    size = single_groups(call.convolution, call.w)
    product = convolved(call.x, call.w, size, Wanted(None, whole), None).reshape(call.shape)
    names = NAMES if call.last else CHANNELS_FIRST
    usual = call.usual()
    results, several = over_rows(
        epilogue, (product.astype(np.float32, copy=False),), names, dtype=usual, first=call.first
    )
    return list(results), several


def _by_numpy(call: HostConvolution, epilogue: Any) -> tuple[Sequence[Array], bool]:
    """The convolution computed by NumPy, from copies of the windows."""
    from portmm.spec.convolution import windows
    from portmm.spec.layout import Layout

    size, x = single_groups(call.convolution, call.w), call.x if call.last else np.moveaxis(call.x, 1, -1)
    filters, acc = unpack_conv(call.w), numpy_arrays.numpy_of(call.sums())
    sums = np.zeros((call.images * size.pixels, size.groups * size.outputs), acc)
    if sums.size and size.depth:
        dense = Layout((call.images, *size.spatial, size.channels)).stride
        view = windows(size, [int(s) for s in dense]).bind(images=call.images)
        for group in range(size.groups):
            inputs, outputs = (slice(group * n, (group + 1) * n) for n in (size.channels, size.outputs))
            inside = x[..., inputs].astype(acc) - acc.type(size.padding)
            matrix = view.gather(inside) + acc.type(size.padding)
            rows = np.moveaxis(filters[outputs], 1, -1).reshape(size.outputs, size.depth)
            sums[:, outputs] = matrix @ rows.T.astype(acc)
    product = sums.reshape(call.images, size.pixels, size.groups * size.outputs)
    product = product if call.last else np.ascontiguousarray(product.swapaxes(1, 2))
    if epilogue is None:
        return [product.astype(call.types()[2])], False
    from portmm.ops.rowwise import by_numpy

    names = NAMES if call.last else CHANNELS_FIRST
    usual = call.usual() if call.first is None else call.first
    return by_numpy(epilogue, (product.astype(np.float32),), names, usual)


def prologue(function: Callable[..., Any], x: Array, *, last: bool) -> Array:
    """The images after a prologue.

    Raises:
        TraceError: it returns a tuple.
    """
    from portmm.ops.row_kernels import before
    from portmm.ops.rowwise import over_rows, spread

    if not x.size:
        return x
    rows = x.reshape((len(x), -1, x.shape[-1]) if last else (len(x), x.shape[1], -1))
    done: Array = before(over_rows, spread, function, rows, "a" if last else "planes")
    return done.reshape(x.shape)
