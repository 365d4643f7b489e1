"""Prepacked weights on a device.

Owns `PackedThere`, the result of `pack` for an array on a device. A device's kernels arrange tiles in shared memory,
whatever the strides, so that a packed weight is only a dense copy: vector accesses of 16 bytes are
always possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from portmm.arrays import device_array, interop
from portmm.arrays.numpy_arrays import numpy_of
from portmm.ops import rowwise_gpu
from portmm.spec.dtype import BY_NAME
from portmm.weights.kinds import WeightKind

if TYPE_CHECKING:
    import numpy as np

    from portmm.arrays.device_array import DeviceArray


@dataclass(frozen=True, slots=True, eq=False)
class PackedThere:
    """A dense copy of a weight, usable as any `b`.

    Attributes:
        array: of the library that the weight came from, dense.
        shape: of the weight.
        element: portmm's name of its elements' type.
    """

    weight_kind: ClassVar[WeightKind] = WeightKind.DEVICE_PANELS
    array: Any
    shape: tuple[int, ...]
    element: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's type of the weight's elements.

        Raises:
            TypeError: NumPy lacks the type, and there is no ml_dtypes.
        """
        return numpy_of(self.element)

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Dimensions of the weight."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.size * BY_NAME[self.element].bytes

    def __repr__(self) -> str:
        return f"<portmm.PackedThere {self.shape} {self.element}>"


def pack(weight: Any) -> PackedThere:
    """A weight on a device, for products on it: see `prepack.pack`.

    Raises:
        ValueError: it has fewer than two dimensions.
    """
    b = interop.adopt(weight)
    assert b is not None  # noqa: S101 - `libraries.on_device` is true
    if len(b.shape) < 2:
        raise ValueError(f"b has shape {b.shape}; a weight has at least two dimensions")
    if 0 in b.shape:
        return PackedThere(interop.empty_like(b, b.shape, b.dtype)[0], b.shape, b.dtype)
    transposed = _by_columns(b)
    # A weight that is contiguous along k stays so: kernels support that.
    source = device_array.transposed(b) if transposed else b
    dense, _ = rowwise_gpu.contiguous(source)
    return PackedThere(_swapped(dense) if transposed else dense, b.shape, b.dtype)


def _by_columns(b: DeviceArray) -> bool:
    return b.strides[-2] == BY_NAME[b.dtype].bytes < b.strides[-1]


def _swapped(x: Any) -> Any:
    """The array with its last two dimensions exchanged."""
    axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return x.permute(axes) if hasattr(x, "permute") else x.transpose(axes)
