"""Int4 weights in words, on devices.

Owns `DeviceInt4`, a quantized weight in a device's memory. One layout
serves few rows and many: for each column, words of eight int4 values along k (`dtype.CODES_AT`), zero-padded to a
multiple of four words, so that a thread's 16 bytes are 32 values; and for each column the scales, and the offsets, of
its groups. Words are dequantized in registers, or on their way to shared memory (`kernels/gpu/w4a16*.py`).
Sums are f32; results have A's type, or that of `out`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from portmm.arrays.interop import adopt, empty_like
from portmm.arrays.operand import Operand
from portmm.errors import PackError
from portmm.ops.int4_panels import group_of
from portmm.spec.dtype import CODES_KR
from portmm.spec.problem import Family
from portmm.weights.kinds import OnDevice, WeightKind
from portmm.weights.quantized import Quantized, QuantizedMatrix, int4_words

TOGETHER = 4
"""Words of a vector load."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInt4(QuantizedMatrix, OnDevice):
    """An int4 weight on a device: w[k, n] ~= scale * code + offset. Built by `to_device`.

    Attributes:
        words: (n, words) of s32.
        scales: (n, groups) of f32.
        offsets: (n, groups) of f32.
        shape: the weight's (k, n).
        group: rows of k that share a scale, a multiple of 8; 0 for all.
    """

    weight_kind: ClassVar[WeightKind] = WeightKind.DEVICE_INT4
    words: Operand
    scales: Operand
    offsets: Operand
    shape: tuple[int, int]
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 4 * (self.words.size + self.scales.size + self.offsets.size)

    @property
    def vector(self) -> int:
        """Values of a vector access, all of one group."""
        return next(x for x in (32, 16, 8) if self.group % x == 0)

    @property
    def codes(self) -> Operand:
        """The weight as an array of u4, k times n, by shape and strides."""
        return replace(self.words, shape=self.shape, strides=(1, self.words.shape[1] * CODES_KR), dtype="u4")

    @property
    def parts(self) -> dict[str, Operand]:
        """Pointer parameters of kernels -> their arrays."""
        return {"b": self.words, "scales": self.scales, "offsets": self.offsets}

    @property
    def family(self) -> str:
        """Its layout, as in a `Problem`."""
        return str(Family("u4", 1, CODES_KR, group=self.group))

    @property
    def numbers(self) -> dict[str, int]:
        """Number parameters of kernels -> their values."""
        return {"words": self.words.shape[1], "groups": self.scales.shape[1]}

    def __rmatmul__(self, a: Any) -> Any:
        from portmm.ops import grid_product

        return grid_product.product(a, self)


def to_device(w: Quantized, like: Any) -> DeviceInt4:
    """A copy of a quantized weight on the device of an array, in an array of the same library.

    Raises:
        TypeError: `like` is in the host's memory.
        PackError: the weight has another number of bits, is of floats, or has groups of no multiples of 8 rows.
    """
    where = like if isinstance(like, Operand) else adopt(like)
    if where is None:
        raise TypeError(f"like is a {type(like).__name__} in the host's memory; pass an array on a device")
    group = group_of(w)
    if w.e2m1:
        raise PackError("kernels of devices have no weights of e2m1: dequantize it, or quantize it to int4 values")
    parts = (_words(w.codes), _columns(w.scales), _columns(w.offsets))
    words, scales, offsets = (_uploaded(where, x) for x in parts)
    return DeviceInt4(words, scales, offsets, w.shape, group)


def _columns(x: Any) -> Any:
    """The scales, or offsets, transposed; at least one for each column."""
    return np.ascontiguousarray((x if len(x) else np.zeros((1, x.shape[1]), np.float32)).T)


def _words(codes: Any) -> Any:
    """The packed words of all columns."""
    some = codes if len(codes) else np.zeros((1, codes.shape[1]), np.uint8)
    return np.ascontiguousarray(int4_words(some, CODES_KR * TOGETHER).T).view(np.int32)


def _uploaded(like: Operand, x: Any) -> Operand:
    """A copy on a device."""
    described = empty_like(like, x.shape, {"int32": "s32", "float32": "f32"}[x.dtype.name])
    array = described.source
    if hasattr(array, "copy_"):
        array.copy_(sys.modules["torch"].from_numpy(x.copy()))
    elif x.size:
        array.set(x)
    return described
