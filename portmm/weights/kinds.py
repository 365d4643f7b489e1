"""Kinds of weights.

Owns `WeightKind`, the attribute by which operations recognise a weight without importing the module of its class, and
`ArrayLike`, and `OnDevice`, bases of these classes.
"""

from __future__ import annotations

from enum import Enum
from math import prod
from typing import Any, ClassVar, NoReturn

from portmm.errors import DeviceError
from portmm.spec.dtype import BY_NAME


class ArrayLike:
    """Attributes that a weight shares with the array that it represents: those that follow from `shape`."""

    __slots__ = ()

    @property
    def ndim(self: Any) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self: Any) -> int:
        """Number of elements."""
        return prod(self.shape)


class WeightKind(Enum):
    """The representation of a weight, an attribute `weight_kind` of its class."""

    PANELS = "panels"
    """Packed, in panels on the host."""
    DEVICE_PANELS = "device panels"
    """Packed, on a device."""
    QUANTIZED = "quantized"
    """Integers with scales, not packed."""
    INT4_PANELS = "int4 panels"
    """Packed integers of four bits with scales, on the host."""
    DEVICE_INT4 = "device int4"
    """Packed integers of four bits with scales, on a device."""


class OnDevice(ArrayLike):
    """A weight in a device's memory, dense, of elements of one type."""

    __slots__ = ()
    weight_kind: ClassVar[WeightKind] = WeightKind.DEVICE_PANELS

    @property
    def nbytes(self: Any) -> int:
        """Bytes of the weight."""
        return self.size * BY_NAME[self.element].bytes

    def __reduce__(self) -> NoReturn:
        raise DeviceError("a weight on a device cannot be pickled; pickle the original, and pack it where it is used")


INTEGERS = frozenset((WeightKind.QUANTIZED, WeightKind.INT4_PANELS, WeightKind.DEVICE_INT4))
"""Kinds of quantized weights."""
ON_HOST = frozenset((WeightKind.PANELS, WeightKind.QUANTIZED, WeightKind.INT4_PANELS))
"""Kinds whose arrays are NumPy's."""


def weight_kind(x: object) -> WeightKind | None:
    """The kind of a weight; None for anything else."""
    kind = getattr(type(x), "weight_kind", None)
    return kind if isinstance(kind, WeightKind) else None
