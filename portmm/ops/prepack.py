"""Prepacked weights.

Owns `pack` and the class it returns. The layout, panels of NR columns, belongs
to a micro-kernel family and not to one M, one blocking or one thread count:
see kernels/cpu/packing.py.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from portmm.arrays import numpy_arrays, numpy_fallback, pages
from portmm.arrays.libraries import is_tensor, on_device
from portmm.dispatch import config
from portmm.errors import BuildError, PackError
from portmm.ops import routes
from portmm.runtime.cpu import runtime, types
from portmm.spec.dtype import BY_NAME
from portmm.spec.problem import Family
from portmm.spec.problem import family as family_of
from portmm.util.records import dataclass, replace
from portmm.weights.kinds import INTEGERS, ArrayLike, OnDevice, WeightKind, weight_kind


def packed_class() -> type[Any]:
    """The class of packed weights: a subclass of the runtime's, which C reads without Python."""
    return _class_over(types().Packed)


def is_packed(b: Any) -> bool:
    """Whether an object is a packed weight."""
    return type(b) in _classes


def current(b: Any) -> Any:
    """A packed weight of the runtime's class: one that was packed before the runtime was built has another."""
    if is_packed(b) and type(b) is not packed_class():
        return _packed(b.owner, b.shape, family_of(b.family))
    return b


def fixed(b: Any) -> Any:
    """A packed weight in the form that plans in Python take."""
    from portmm.runtime.cffi_records import Packed

    return Packed(b.owner, b.k, b.n, b.element, b.family, b.b_k, b.b_n, b.b_batch, b.shape)


_classes: list[type[Any]] = []


@cache
def _class_over(base: Any) -> type[Any]:
    class Packed(base, ArrayLike):  # type: ignore[misc]
        """A weight in panels, usable as any `b`.

        Attributes:
            shape: shape of the weight.
            family: element type and panel width, for example "f32x32".
            element: portmm's name of the element type, for example "f32".
        """

        __slots__ = ("__weakref__",)
        __qualname__ = "Packed"
        weight_kind = WeightKind.PANELS

        def __reduce__(self) -> tuple[Any, ...]:
            return (restore, (np.asarray(self.owner), self.shape, self.element, self.family))

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
            del copy
            return unpack(self).astype(dtype or self.owner.dtype, copy=False)

        @property
        def dtype(self) -> np.dtype[Any]:
            """NumPy's type of the weight's elements."""
            return self.owner.dtype

        @property
        def nbytes(self) -> int:
            """Bytes of the panels."""
            return int(self.owner.nbytes)

        def __repr__(self) -> str:
            return f"<portmm.Packed {self.shape} {self.dtype}, family {self.family}>"

    _classes.append(Packed)
    return Packed


def restore(owner: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: str, family: str) -> Any:
    """A packed weight from its panels, as in unpickling.

    Raises:
        PackError: the panels have too few elements for the shape, or the family is invalid.
    """
    try:
        layout = family_of(family)
    except ValueError as error:
        raise PackError(str(error)) from error
    if layout.dtype != dtype or numpy_arrays.name_of(owner.dtype) != dtype or len(shape) < 2 or min(shape) < 0:
        raise PackError(f"a packed weight of shape {shape} and type {dtype} cannot be of family {family}")
    # Where an extent is 0 no elements are needed, so that only this bounds the others.
    if not pages.can_be_addressed(shape, layout.nr * layout.kr * owner.itemsize):
        raise PackError(f"a packed weight of shape {shape} is too large to be addressed")
    needed = layout.units(*shape[-2:]) * layout.kr * math.prod(shape[:-2])
    if owner.size < needed:
        raise PackError(f"packed weight of shape {shape} needs {needed} elements; it has {owner.size}")
    return _packed(pages.aligned_readonly(owner, needed), tuple(shape), layout)


def _packed(owner: np.ndarray[Any, Any], shape: tuple[int, ...], layout: Family) -> Any:
    k, n = shape[-2:]
    if layout.dtype == "bf16":
        register_bf16()
    strides = (layout.nr, layout.panel(k), layout.units(k, n))
    return packed_class()(owner, k, n, layout.dtype, str(layout), *strides, shape)


def register_bf16() -> None:
    """Register bfloat16 with the runtime, as it is not NumPy's."""
    _register(types())


@cache
def _register(runtime: Any) -> None:
    runtime.register_dtype("bf16", numpy_arrays.numpy_of("bf16"))


def _packed_int4(b: Any, like: Any) -> Any:
    """An int4 weight, packed in the host's memory or copied to a device."""
    if like is not None:
        from portmm.ops.int4_words import to_device

        return to_device(b, like)
    from portmm.ops.int4_panels import pack_int4

    return pack_int4(b)


def pack(b: Any, *, activations: Any = None, like: Any = None) -> Any:
    """A weight prepacked for the kernels of the current target.

    Args:
        b: float32, float64, float16, bfloat16, int8 or uint8, at least 2-D; (..., k, n);
            or a `Quantized` int4 weight; or an array on a device, which is copied there.
        activations: dtype of the left operand, if not its own. An
            int8 weight is packed for int8 or uint8, a uint8 weight for float32.
        like: an array on a device, to whose device a `Quantized` weight is copied.

    Returns:
        A packed weight: pass it as `b`. It is immutable, may be pickled, and
        serves every number of rows and threads. Activations of a type that the
        layout does not support are multiplied by the unpacked weight.

    Raises:
        TypeError: a dtype is not supported, or the two types have no product.
        ValueError: `b` has fewer than two dimensions.
    """
    if type(b).__name__ == "Quantized":
        return _packed_int4(b, like)
    if like is not None:
        raise TypeError("pack copies only a Quantized weight to a device; copy an array there, and pack that")
    if on_device(b):
        return _pack_for_device(b)
    if is_tensor(b):
        from portmm.arrays.interop import as_numpy

        b = as_numpy(b)
    array = numpy_arrays.as_operand(b, "b")
    if array.ndim < 2:
        raise ValueError(f"b has shape {array.shape}; a weight has at least two dimensions")
    dtype = array.dtype.newbyteorder("=")
    usual = np.float32 if dtype == np.uint8 else dtype
    types = numpy_arrays.types_of(np.dtype(usual if activations is None else activations), dtype)
    if types[1] != dtype:
        raise TypeError(
            f"a weight of {dtype} is not multiplied by {np.dtype(activations)} without conversion: convert it first"
        )
    return in_panels(array, numpy_arrays.word(types))


def in_panels(array: np.ndarray[Any, Any], word: str, vectors: int = 0) -> Any:
    """A packed weight of an array, for products of the types `word`, in panels of some vectors, by default the usual.

    Raises:
        ScheduleError: no unit of the target multiplies these types.
    """
    dtype, route = array.dtype.newbyteorder("="), None
    src = numpy_arrays.canonical(array, dtype)
    basic = None if vectors else routes.packing(word, src.layout, array.shape[-1], array.size)
    if basic is not None:
        layout, route = family_of(basic[0]), basic[1]
    else:
        layout = _layout(word, vectors, array.shape[-1])
    k, n = array.shape[-2:]
    item = layout.units(k, n) * layout.kr
    owner = pages.lasting_empty(item * math.prod(array.shape[:-2]), dtype)
    weight = _packed(owner, array.shape, layout)
    if owner.size and array.size:
        try:
            _pack_by_kernel(src, owner, layout, word, route)
        except BuildError as error:
            numpy_fallback.fall_back(error)
            numpy_fallback.pack(array.astype(dtype, copy=False), owner, layout)
    elif owner.size:
        owner[...] = 0  # empty sums
    owner.flags.writeable = False
    return weight


def _layout(word: str, vectors: int, n: int) -> Family:
    """The packed layout of `n` columns on the target, of panels of some vectors, by default what suits so many."""
    from portmm.dispatch import cpu_kernels
    from portmm.schedule.candidates import PACKED_VECTORS

    layout = family_of(cpu_kernels.family(word, config.target(), 0 if vectors else n))
    return replace(layout, nr=layout.nr // PACKED_VECTORS * vectors) if vectors else layout


def _pack_by_kernel(
    src: numpy_arrays.Operand, owner: np.ndarray[Any, Any], layout: Family, word: str, route: Any
) -> None:
    """Pack by a route, or if there is none yet by that of the target."""
    *batch, k, n = src.array.shape
    item, none = layout.units(k, n) * layout.kr, (0,) * len(batch)
    steps = (none, numpy_arrays.strides_over(src.array, batch), numpy_arrays.contiguous(batch, item))
    walk, dtype = numpy_arrays.collapse(batch, steps), owner.dtype
    if route is None:
        from portmm.dispatch import cpu_kernels, cpu_routes

        isa, _ = cpu_kernels.packing_unit(word, config.target())
        route = cpu_routes.pack_route(isa, word, layout.nr, src.layout, config.get_num_threads())
    address = int(owner.__array_interface__["data"][0])
    numbers = (1, n, k, walk.count, src.address, 0, 0, 0, src.address, src.row, src.col, walk.strides[1])
    # Each repeat of `outer` has another C, whose pages are unknown.
    ends = (0, 0) if walk.outer is not None else pages.page_ends(owner, layout.kr * dtype.itemsize)
    runtime().execute(route, *numbers, address, *ends, walk.strides[2] // layout.kr, walk.outer)


def join(weights: tuple[Any, ...]) -> Any:
    """Packed weights concatenated along columns; None where their panels do not fit together."""
    first = weights[0]
    layout, k = family_of(first.family), first.shape[-2]
    if any(len(w.shape) != 2 or w.shape[0] != k or w.family != first.family for w in weights):
        return None
    if any(w.shape[1] % layout.nr for w in weights[:-1]):
        return None
    parts = [w.owner[: layout.units(*w.shape) * layout.kr] for w in weights]
    owner = pages.adjoined(parts)
    if owner is None:
        owner = pages.lasting_empty(sum(x.size for x in parts), first.owner.dtype)
        np.concatenate(parts, out=owner)
        owner.flags.writeable = False
    return _packed(owner, (k, sum(w.shape[1] for w in weights)), layout)


def items(p: Any) -> list[Any]:
    """The matrices of a packed batch, each as a packed weight that shares the memory."""
    layout, (count, k, n) = family_of(p.family), p.shape
    item = layout.units(k, n) * layout.kr
    return [_packed(p.owner[i * item : (i + 1) * item], (k, n), layout) for i in range(count)]


def is_quantized(b: Any) -> bool:
    """Whether an object is a quantized weight."""
    return weight_kind(b) in INTEGERS


def unpack(p: Any) -> np.ndarray[Any, Any]:
    """The original weight of a packed one, as an ordinary array."""
    *batch, k, n = p.shape
    if 0 in p.shape:
        return np.empty(p.shape, p.owner.dtype)
    layout = family_of(p.family).layout(k, n, math.prod(batch))
    return np.ascontiguousarray(layout.gather(p.owner)).reshape(p.shape)


# -- on a device -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class DevicePacked(OnDevice):
    """A dense copy of a weight, usable as any `b`.

    Attributes:
        array: of the library that the weight came from, dense.
        shape: of the weight.
        element: portmm's name of its elements' type.
    """

    array: Any
    shape: tuple[int, ...]
    element: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's type of the weight's elements.

        Raises:
            TypeError: NumPy lacks the type, and there is no ml_dtypes.
        """
        return numpy_arrays.numpy_of(self.element)

    def __repr__(self) -> str:
        return f"<portmm.DevicePacked {self.shape} {self.element}>"


def _pack_for_device(weight: Any) -> DevicePacked:
    """A weight on a device, for products on it: a dense copy.

    Kernels arrange tiles in shared memory, whatever the strides, and need vector accesses of 16 bytes.
    """
    from portmm.arrays import interop, operand
    from portmm.ops.kernel_call import contiguous

    b = interop.adopt(weight)
    assert b is not None  # noqa: S101 - `libraries.on_device` is true
    if len(b.shape) < 2:
        raise ValueError(f"b has shape {b.shape}; a weight has at least two dimensions")
    # A weight that is contiguous along k stays so: kernels support that.
    by_columns = b.size and b.strides[-2] == BY_NAME[b.dtype].bytes < b.strides[-1]
    dense = contiguous(operand.transposed(b) if by_columns else b).source
    return DevicePacked(_swapped(dense) if by_columns else dense, b.shape, b.dtype)


def _swapped(x: Any) -> Any:
    """The array with its last two dimensions exchanged."""
    axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return x.permute(axes) if hasattr(x, "permute") else x.transpose(axes)
