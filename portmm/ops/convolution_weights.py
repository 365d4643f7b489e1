"""Filters of convolutions, prepacked.

Owns `pack_conv` and the class it returns. With channels last the matrix (tap channel, output) of each group is in
panels, as `pack` makes them, or of groups of few channels in panels of several (`grouped_convolution`); with channels
first filters are rows, dense, which kernels read as they are. Filters of single channels are one array, a row for each
tap. Filters on a device are `DeviceFilters`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from portmm.arrays import libraries, numpy_arrays
from portmm.dispatch import config
from portmm.errors import ConvolutionError
from portmm.ops.convolution_groups import (
    GroupPanels,
    channels_to_units,
    grouped_panels,
    groups_in_tiles,
    in_tiles,
    joined,
    pack_groups,
    separate,
    unpack_groups,
)
from portmm.ops.convolution_options import LAYOUTS, layout_of
from portmm.ops.prepack import in_panels, pack
from portmm.spec.dtype import BY_NAME
from portmm.util.memo import Memory
from portmm.weights.kinds import ArrayLike, OnDevice, WeightKind

if TYPE_CHECKING:
    from portmm.arrays.operand import Operand
    from portmm.spec.convolution import Convolution
    from portmm.target.target import Target

Array = np.ndarray[Any, Any]
_misfits = Memory(256)
MOST_TAPS = 64
"""Taps of filters of single channels that one kernel over rows reads; larger ones are products."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedConv(ArrayLike):
    """Filters in the form that kernels read, usable as the `w` of `conv`.

    Attributes:
        weight: of each group, a packed one; with channels first the dense rows. Where each channel has a filter of its
            own, one array (tap, channel); of groups of few channels one `GroupPanels`, or of several groups together
            a matrix with zeros where channels and outputs are of different ones.
        shape: (outputs, channels of a group, *kernel).
        groups: of channels.
        layout: of the images.
        dtype: NumPy's type of the elements; of int4 values uint8.
        together: groups of a matrix.
        stacked: one packed weight (group, tap channel, output) has the panels of all groups, for tile units.
        filler: channels of zeros behind those of a group in its matrix, so that channels are whole units.
        grouped: one kernel of vectors convolves all groups, of few channels each.
        depthwise: each channel is convolved by itself, by a kernel over rows.
        int4: elements are of four bits.
        kind: what kernels depend on.
        panels: memory of the filters where these are those of a single product; else None.
    """

    weight_kind: ClassVar[WeightKind] = WeightKind.PANELS
    weight: tuple[Any, ...]
    shape: tuple[int, ...]
    groups: int
    layout: str
    dtype: np.dtype[Any]
    together: int = 1
    filler: int = 0
    stacked: bool = False
    grouped: bool = field(init=False, repr=False)
    depthwise: bool = field(init=False, repr=False)
    int4: bool = field(init=False, repr=False)
    kind: tuple[Any, ...] = field(init=False, repr=False)
    panels: Array | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        grouped = isinstance(self.weight[0], GroupPanels)
        depthwise = 1 == len(self.weight) < self.groups and not (grouped or self.stacked) and self.together == 1
        int4 = self.channels_last and not (depthwise or grouped or hasattr(self.weight[0], "element"))
        for name, value in (("grouped", grouped), ("depthwise", depthwise), ("int4", int4)):
            object.__setattr__(self, name, value)
        family = getattr(self.weight[0], "family", "") if self.weight else ""
        more = (self.together, self.filler, self.stacked)
        kind = (self.shape, self.groups, self.layout, self.dtype, family, self.depthwise, *more)
        object.__setattr__(self, "kind", kind)
        one = None if depthwise or len(self.weight) != 1 else getattr(self.weight[0], "owner", self.weight[0])
        object.__setattr__(self, "panels", one)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed filters."""
        return sum(int(x.nbytes) for x in self.weight)

    @property
    def channels_last(self) -> bool:
        """Whether images have their channels last."""
        return LAYOUTS[self.layout][1]

    def __repr__(self) -> str:
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        return f"<portmm.PackedConv {self.shape} {self.dtype}{groups}, {self.layout}>"


def pack_conv(
    w: Any, *, groups: int = 1, layout: str = "NHWC", activations: Any = None, bits: int | None = None,
    group: int | None = None,
) -> Any:  # fmt: skip
    """Filters prepacked for `conv`.

    Args:
        w: (outputs, channels of a group, *kernel), as in PyTorch and ONNX, of any strides; the types of `pack`.
            Filters on a device are packed there.
        groups: of channels.
        layout: of the images: "NHWC" or "NCHW", or those of one or three dimensions.
        activations: dtype of the images, if not that of `w`.
        bits: 4 to quantize the filters, with channels last.
        group: elements of a sum that share a scale then, by default 128; a multiple of 8.

    Raises:
        ConvolutionError: shapes or options do not fit together.
        TypeError: a dtype is not supported.
    """
    if libraries.is_tensor(w):
        from portmm.arrays.interop import as_numpy

        w = as_numpy(w)
    there, (spatial, last) = libraries.on_device(w), layout_of(layout)
    array: Any = w if there else numpy_arrays.as_operand(w, "w", matrix=False)
    if array.ndim != spatial + 2:
        raise ConvolutionError(
            f"w has shape {array.shape}; with {layout} it has {spatial + 2} dimensions: (outputs, channels, *kernel)"
        )
    if groups < 1 or array.shape[0] % groups:
        raise ConvolutionError(f"{array.shape[0]} outputs are not in {groups} groups of as many each")
    if bits is not None and (bits != 4 or not last):
        raise ConvolutionError(f"filters are quantized to 4 bits, with channels last; got {bits} bits, {layout}")
    if there:
        if bits is not None:
            raise ConvolutionError("filters of four bits are for images in the host's memory; pack them without bits")
        return _pack_for_device(w, groups, layout, last)
    outputs, channels = array.shape[0] // groups, array.shape[1]
    by_group = array.reshape(groups, outputs, channels, *array.shape[2:])
    depth, together, filler = channels * math.prod(array.shape[2:]), 1, 0
    dtype = array.dtype.newbyteorder("=")
    images = dtype if activations is None else np.dtype(activations).newbyteorder("=")
    kind = (tuple(array.shape), groups, (numpy_arrays.name_of(images), numpy_arrays.name_of(dtype)))
    one, stacked = None if bits is not None else _of_all_groups(by_group, kind, images, last=last), False
    if one is not None:
        weight: tuple[Any, ...] = (one,)
        stacked = len(getattr(one, "shape", ())) == 3
    elif not last:
        rows = np.array(by_group.reshape(groups, outputs, depth), dtype, order="C")
        rows.flags.writeable = False
        weight = tuple(rows)
    else:
        by_group, together, filler = _of_units(by_group, kind, bits)
        order = (0, *range(3, 3 + spatial), 2, 1)
        matrices = by_group.transpose(order).reshape(len(by_group), -1, outputs * together)
        weight = tuple(pack(x, activations=activations) if bits is None else _int4(x, group) for x in matrices)
        dtype = dtype if bits is None else np.dtype(np.uint8)
    return PackedConv(weight, tuple(array.shape), groups, layout, dtype, together, filler, stacked)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceFilters(OnDevice):
    """Filters on a device, a dense copy whose rows are in the order in which kernels sum, usable as the `w` of `conv`.

    Attributes:
        array: of the library that the filters came from, (outputs, sum).
        shape: (outputs, channels of a group, *kernel).
        groups: of channels.
        layout: of the images.
        element: portmm's name of the elements' type.
    """

    array: Any
    shape: tuple[int, ...]
    groups: int
    layout: str
    element: str

    def __repr__(self) -> str:
        return f"<portmm.DeviceFilters {self.shape} {self.element}, {self.layout}>"


def filter_rows(w: Operand, *, last: bool, copied: bool = False) -> Operand:
    """Filters on a device as (outputs, sum), dense, in the order (tap, channel) or, with channels first, its reverse.

    They are copied only if they must be, or if that is asked for.
    """
    from portmm.arrays.operand import is_dense
    from portmm.ops.kernel_call import contiguous

    order = (0, *range(2, len(w.shape)), 1) if last else tuple(range(len(w.shape)))
    w = replace(w, shape=tuple(w.shape[i] for i in order), strides=tuple(w.strides[i] for i in order))
    w = w if is_dense(w) and not copied else contiguous(w)
    depth, width = math.prod(w.shape[1:]), BY_NAME[w.dtype].bytes
    return replace(w, shape=(w.shape[0], depth), strides=(depth * width, width))


def _pack_for_device(w: Any, groups: int, layout: str, last: bool) -> DeviceFilters:
    """Filters on a device, packed there."""
    from portmm.arrays.interop import adopt

    filters = adopt(w)
    assert filters is not None  # noqa: S101 - `libraries.on_device` is true
    packed = filter_rows(filters, last=last, copied=True)
    return DeviceFilters(packed.source.reshape(packed.shape), filters.shape, groups, layout, filters.dtype)


def is_depthwise(w: tuple[int, ...], groups: int, dtype: str) -> bool:
    """Whether filters of a shape and a type are of single channels, which kernels over rows compute (`depthwise`)."""
    return groups == w[0] > 1 == w[1] and dtype != "f64" and math.prod(w[2:]) <= MOST_TAPS


def of_filters(size: Convolution, w: PackedConv) -> Convolution:
    """The convolution with so many groups together, and channels of zeros, as matrices of filters have them."""
    return replace(size, filler=w.filler) if w.filler else whole_groups(size, w.together)


def whole_groups(size: Convolution, n: int) -> Convolution:
    """The convolution with so many groups together."""
    if n == 1:
        return size
    return replace(size, groups=-(-size.groups // n), channels=size.channels * n, outputs=size.outputs * n)


def single_groups(size: Convolution, w: PackedConv) -> Convolution:
    """The convolution of groups as users have them."""
    n = w.together
    if n == 1:
        return replace(size, filler=0) if size.filler else size
    return replace(size, groups=w.groups, channels=size.channels // n, outputs=size.outputs // n)


def filter_type(w: Any, images: np.dtype[Any], layout: str) -> np.dtype[Any]:
    """The type of filters that kernels read beside images of a type.

    Raises:
        TypeError: filters and images have no product.
    """
    dtype: np.dtype[Any] = w.dtype.newbyteorder("=")
    last = layout_of(layout)[1]
    if isinstance(w, PackedConv) and w.int4 and last:
        return dtype
    dtype = np.dtype(np.float32) if isinstance(w, PackedConv) and w.int4 else dtype
    # With channels first filters are A; images of bytes are swapped to channels last later.
    first = last or images == np.uint8 or getattr(w, "depthwise", False)
    return numpy_arrays.types_of(images, dtype)[1] if first else numpy_arrays.types_of(dtype, images)[0]


def _of_all_groups(
    by_group: Array, kind: tuple[tuple[int, ...], int, tuple[str, str]], images: np.dtype[Any], *, last: bool
) -> Any:
    """The filters of all groups for one kernel; None where each group has a product.

    Args:
        by_group: filters (group, output, channel, *kernel).
        kind: their shape, groups, and names of the types of images and filters.
        images: type of the images.
        last: channels are last.
    """
    groups, outputs, channels, *kernel = by_group.shape
    depth, target, dtype = channels * math.prod(kernel), config.target(), by_group.dtype.newbyteorder("=")
    if is_depthwise(kind[0], groups, kind[2][1]):
        taps = np.array(by_group.reshape(groups, depth).T, dtype, order="C")
        taps.flags.writeable = False
        return taps
    if vectors := in_tiles(*kind, target, last=last):
        matrices = by_group.transpose(0, *range(3, by_group.ndim), 2, 1).reshape(groups, depth, outputs)
        types = numpy_arrays.types_of(images, dtype)
        return in_panels(np.ascontiguousarray(matrices, dtype), numpy_arrays.word(types), vectors)
    panels = grouped_panels(*kind, target, last=last)
    return None if panels is None else pack_groups(by_group, panels)


def _of_units(
    by_group: Array, kind: tuple[tuple[int, ...], int, tuple[str, str]], bits: int | None
) -> tuple[Array, int, int]:
    """Filters (group, output, channel, *kernel) of whole units, the groups of a matrix, and channels that were added.

    Args:
        by_group: the filters.
        kind: their shape, groups, and names of the types of images and filters.
        bits: of elements that are quantized, which are taken as they are.
    """
    if bits is not None:
        return by_group, 1, 0
    together = max(1, groups_in_tiles(*kind, config.target(), last=True))
    if together > 1:
        return joined(by_group, together), together, 0
    filler = channels_to_units(kind[0], kind[2], config.target())
    behind = ((0, 0), (0, 0), (0, filler), *[(0, 0)] * (by_group.ndim - 3))
    return (np.pad(by_group, behind) if filler else by_group), 1, filler


def _int4(matrix: Array, group: int | None) -> Any:
    """A matrix of filters, quantized to four bits and packed."""
    from portmm.ops.int4_panels import pack_int4
    from portmm.weights.quantized import quantize

    kept = 128 if group is None else group
    return pack_int4(quantize(matrix.astype(np.float32, copy=False), bits=4, group=kept))


def misfits(w: PackedConv, images: np.dtype[Any]) -> bool:
    """Whether filters of groups are in panels of another machine than the current one, or in units of other images."""
    if not (w.grouped or w.stacked):
        return False
    target, image = config.target(), numpy_arrays.name_of(images.newbyteorder("="))
    key = (w.kind, image, id(target))
    known = _misfits.get(key) or _misfits.keep(key, (target, _misfit(w, image, target)))  # the entry keeps it alive
    return bool(known[1])


def _misfit(w: PackedConv, image: str, target: Target) -> bool:
    """The answer of `misfits`, of a type of images and a machine."""
    of = numpy_arrays.name_of(w.dtype)
    if w.stacked:
        return not in_tiles(w.shape, w.groups, (image, of), target, last=True)
    panels = w.weight[0].panels
    here = grouped_panels(w.shape, w.groups, (image if of == "s8" else of, of), target, last=True)
    return bool(here != panels) or (panels.unit > 1 and image != of != "s8")


def unpack_conv(w: PackedConv) -> Array:
    """The filters of packed ones, as an array; of int4 values, in float32."""
    from portmm.ops.result_dtype import numbers

    if w.grouped:
        return unpack_groups(w.weight[0]).reshape(w.shape).astype(w.dtype)
    outputs, channels, *kernel = w.shape
    each = outputs // w.groups
    if w.depthwise:
        return np.ascontiguousarray(w.weight[0].T).reshape(w.shape)
    matrices = list(numbers(w.weight[0])) if w.stacked else list(map(numbers, w.weight))
    if w.together > 1:
        matrices = separate(matrices, (w.groups, channels, each), w.together)
    if not w.channels_last:
        return np.concatenate(matrices).reshape(w.shape)
    every = np.stack(matrices).reshape(w.groups, *kernel, channels + w.filler, each)[..., :channels, :]
    order = (0, every.ndim - 1, every.ndim - 2, *range(1, every.ndim - 2))
    return np.ascontiguousarray(every.transpose(order)).reshape(w.shape)
