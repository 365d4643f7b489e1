"""Weights of 4 and 8 bits, as data.

Owns `QuantizedMatrix`, the record `Quantized`, its quantization and dequantization, and its
files. Has no kernels; formats of other libraries are read by `weights.checkpoints`.

A weight w[k, n] is stored as codes q[k, n] (int4 or int8 values), with a scale and an
offset for each column of a group of rows:
w ~= scale[g, n] * q[k, n] + offset[g, n], g = k // group.
Codes of 4 bits may be floats, e2m1, without offsets: those of MXFP4 and NVFP4.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from portmm.errors import PackError
from portmm.spec.dtype import CODES_AT, CODES_KR, E2M1
from portmm.util.array_subclasses import refuse_class
from portmm.util.records import dataclass
from portmm.weights.kinds import ArrayLike, WeightKind

if TYPE_CHECKING:
    from portmm.weights.safetensors import Array, Location

BITS = (4, 8)
VALUES = ("int", "e2m1")
FLOATS = ("float16", "bfloat16", "float32", "float64")
FORMAT = "portmm.weights.quantized"
VERSION = "1"

_FLOATS = np.array(E2M1, np.float32) / 2
"""The number of each code of e2m1."""

# A smaller scale would be subnormal, with few bits, and zero where a kernel flushes subnormals.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


class QuantizedMatrix(ArrayLike):
    """Attributes that a quantized weight shares with the matrix of floats that it represents."""

    __slots__ = ()

    @property
    def dtype(self) -> np.dtype[np.float32]:
        """The type of its dequantized values, scale * code + offset: float32."""
        return np.dtype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Quantized(QuantizedMatrix):
    """A weight w[k, n] ~= scales[g, n] * codes[k, n] + offsets[g, n], g = k // group.

    Signed codes are stored biased, q + 2**(bits - 1), and the offset removes the bias, so
    that one formula serves all weights. The formula is finite in float32 for every
    code, product and sum, which `__post_init__` checks. The arrays are kept as
    read-only views and copied only if they are strided: do not modify the originals.

    Attributes:
        codes: uint8, (k, n), from 0 to 2**bits - 1.
        scales: float32, (groups, n); may be negative or zero.
        offsets: float32, (groups, n).
        bits: 4 or 8. Kernels multiply those of 4; those of 8 are for `dequantize`.
        group: rows per group; the last group is short where it does not divide k.
        values: "int", or "e2m1": codes of 4 bits are floats, 0, 0.5, 1, 1.5, 2, 3, 4, 6, and with 8 added to the code
            the same below 0; offsets are 0.

    Raises:
        ValueError: a dtype, a shape or a value is not as described here.
    """

    weight_kind: ClassVar[WeightKind] = WeightKind.QUANTIZED
    codes: Array
    scales: Array
    offsets: Array
    bits: int
    group: int
    values: str = "int"

    def __post_init__(self) -> None:
        bits, group = checked_bits(self.bits), operator.index(self.group)
        if group < 1:
            raise ValueError(f"group is {group}; a group has at least one row")
        codes = _matrix("codes", self.codes, np.uint8)
        scales = _matrix("scales", self.scales, np.float32)
        offsets = _matrix("offsets", self.offsets, np.float32)
        k, n = codes.shape
        for name, array in (("scales", scales), ("offsets", offsets)):
            if array.shape != (-(-k // group), n):
                raise ValueError(
                    f"{name} has shape {array.shape}; codes of shape {codes.shape} in groups of {group} "
                    f"rows need {(-(-k // group), n)}"
                )
        if codes.size and codes.max() >= 2**bits:
            raise ValueError(f"codes has a value {codes.max()}; codes of {bits} bits end at {2**bits - 1}")
        if self.values not in VALUES or (self.e2m1 and (bits != 4 or offsets.any())):
            raise ValueError(
                f"values is {self.values!r}, with {bits} bits; use 'int', or 'e2m1' with 4 bits and without offsets"
            )
        _check_finite(scales, offsets, float(_FLOATS.max()) if self.e2m1 else 2**bits - 1)
        for name, value in zip(self.__slots__, (codes, scales, offsets, bits, group, self.values), strict=True):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Quantized, (self.codes, self.scales, self.offsets, self.bits, self.group, self.values)

    @property
    def e2m1(self) -> bool:
        """Whether codes are floats of four bits."""
        return self.values == "e2m1"

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's (k, n)."""
        k, n = self.codes.shape
        return k, n

    @property
    def groups(self) -> int:
        """Number of groups of rows."""
        return int(self.scales.shape[0])

    @property
    def symmetric(self) -> bool:
        """Whether offsets follow from scales: exactly -2**(bits - 1) times these, or 0 where codes are floats."""
        return self.e2m1 or bool((self.offsets == -(2 ** (self.bits - 1)) * self.scales).all())

    @property
    def nbytes(self) -> int:
        """Bytes in packed form: codes, scales, and offsets unless they follow from the scales."""
        packed = -(-self.codes.size * self.bits // 8)
        return int(packed + self.scales.nbytes + (0 if self.symmetric else self.offsets.nbytes))


def checked_bits(bits: int) -> int:
    """The number of bits itself, if it is supported.

    Raises:
        ValueError: it is not.
    """
    bits = operator.index(bits)
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; codes have 4 or 8 bits")
    return bits


def _matrix(name: str, x: Any, dtype: type[np.generic]) -> Array:
    """A read-only, contiguous and aligned view of `x`, a matrix of exactly this type."""
    array = np.asarray(x)
    if array.dtype != dtype or array.ndim != 2:
        wanted = np.dtype(dtype).name
        raise ValueError(f"{name} has dtype {array.dtype} and shape {array.shape}; it must be a matrix of {wanted}")
    view = np.require(array, requirements=("C", "A")).view()
    view.flags.writeable = False
    return view


def _check_finite(scales: Array, offsets: Array, largest: float) -> None:
    # Weights are linear in what codes stand for: only extremes matter. A kernel without FMA rounds the product first.
    with np.errstate(over="ignore", invalid="ignore"):
        top = scales * np.float32(largest)
        bad = ~(np.isfinite(top) & np.isfinite(offsets) & np.isfinite(top + offsets))
    if bad.any():
        g, j = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"group {g} of column {j} has scale {scales[g, j]} and offset {offsets[g, j]}, "
            f"which yield no finite float32 weights for values up to {largest:g}"
        )


def quantize(w: Any, *, bits: int = 4, group: int | None = 128, symmetric: bool = True) -> Quantized:
    """A weight rounded to codes of 4 or 8 bits.

    Symmetric: scale = absmax / 7 (127 for 8 bits), never negative; q = w / scale
    rounded half to even is a signed code from -7 to 7 (-127 to 127), stored with
    8 (128) added. Asymmetric: the range includes 0, scale = (max - min) / (2**bits - 1),
    and the zero point is an integer code, so that 0 stays exactly 0. In both, a weight
    differs from its dequantized value by at most half a scale, and float32 rounding.
    Scales are at least the smallest normal float32, and all-zero groups stay zeros.

    Args:
        w: float16, bfloat16, float32 or float64, (k, n), finite.
        bits: 4 or 8. Kernels multiply those of 4; those of 8 are for `dequantize`.
        group: rows of k that share a scale, usually 32, 64 or 128; None or 0 for all of them.
        symmetric: no zero points, for weights around 0.

    Returns:
        The codes, scales and offsets.

    Raises:
        TypeError: `w` has another dtype.
        ValueError: `w` is not a matrix or not finite, its values exceed what float32
            can scale (about 1.5e38), or `bits` or `group` is not as above.
    """
    refuse_class(w, "w")
    weight = np.asarray(w)
    if weight.dtype.name not in FLOATS:
        raise TypeError(f"w has dtype {weight.dtype}; quantize takes {', '.join(FLOATS)}")
    if weight.ndim != 2:
        raise ValueError(f"w has shape {weight.shape}; a weight to quantize has two dimensions, k and n")
    bits = checked_bits(bits)
    k, n = weight.shape
    rows = operator.index(group or max(k, 1))
    if rows < 0:
        raise ValueError(f"group is {group}; use the number of rows of a group, or None for all of them")
    codes = np.empty((k, n), np.uint8)
    scales, offsets = (np.empty((-(-k // rows), n), np.float32) for _ in range(2))
    for g in range(len(scales) if n else 0):  # without columns the number of rows has no limit
        part = weight[g * rows : (g + 1) * rows].astype(np.float64)
        if not np.isfinite(part).all():
            i, j = (int(x) for x in np.argwhere(~np.isfinite(part))[0])
            raise ValueError(f"w[{g * rows + i}, {j}] is {part[i, j]}; only finite weights can be quantized")
        scales[g], zero = _scale_and_zero(part, bits, symmetric=symmetric)
        offsets[g] = (0.0 - zero) * scales[g].astype(np.float64)
        codes[g * rows : (g + 1) * rows] = np.clip(np.rint(part / scales[g]) + zero, 0, 2**bits - 1)
    return Quantized(codes, scales, offsets, bits, rows)


def _scale_and_zero(part: Array, bits: int, *, symmetric: bool) -> tuple[Array, Array]:
    """Scales in float32 and the codes of zero, for the columns of a group."""
    half, top = 2 ** (bits - 1), 2**bits - 1
    low, high = np.minimum(part.min(axis=0), 0.0), np.maximum(part.max(axis=0), 0.0)
    with np.errstate(over="ignore"):
        exact = np.maximum(-low, high) / (half - 1) if symmetric else (high - low) / top
        scale: Array = np.maximum(exact, SMALLEST_SCALE).astype(np.float32)
        beyond = ~np.isfinite(scale * np.float32(top))
    if beyond.any():
        j = int(np.argmax(beyond))
        raise ValueError(
            f"column {j} of w reaches from {low[j]:.4g} to {high[j]:.4g}, beyond what "
            f"{bits} bits with a float32 scale can hold: scale w down"
        )
    zero = np.full(low.shape, float(half)) if symmetric else np.clip(np.rint(-low / scale), 0, top)
    return scale, zero


def dequantize(q: Quantized, dtype: Any = np.float32) -> Array:
    """The float weight of a record.

    Args:
        q: a quantized weight.
        dtype: float16, bfloat16, float32 or float64. float64 is computed in
            float64; the others in float32, product and sum rounded, and then cast.

    Returns:
        (k, n), of `dtype`.

    Raises:
        TypeError: `dtype` is not one of these.
    """
    to = np.dtype(dtype)
    if to.name not in FLOATS:
        raise TypeError(f"dtype is {to}; weights are dequantized to {', '.join(FLOATS)}")
    computed = np.float64 if to.name == "float64" else np.float32
    out = np.empty(q.shape, to)
    for g in range(q.groups if q.codes.size else 0):
        rows = slice(g * q.group, (g + 1) * q.group)
        codes = _FLOATS[q.codes[rows]].astype(computed) if q.e2m1 else q.codes[rows].astype(computed)
        scaled = codes * q.scales[g].astype(computed)
        out[rows] = scaled if q.e2m1 else scaled + q.offsets[g]
    return out


def int4_words(codes: Array, multiple: int = CODES_KR) -> Array:
    """Words (k / 8, n) of eight int4 values along k, at the bits of `CODES_AT`; a padded k is a multiple of this."""
    from portmm.spec.layouts import row_major

    rows = row_major(*codes.shape).pad_to(0, multiple).gather(codes)
    fields = (rows[e::CODES_KR].astype(np.uint32) << np.uint32(bit) for e, bit in enumerate(CODES_AT))
    return reduce(operator.or_, fields)


def save_quantized(q: Quantized, path: Location) -> None:
    """Write a quantized weight to a self-describing safetensors file.

    Codes of 4 bits are packed, two rows to a byte, the even row in the low
    nibble; offsets that follow from the scales are omitted.

    Raises:
        OSError: the file cannot be written; no partial file remains.
    """
    from portmm.weights import safetensors

    codes = q.codes
    if q.bits == 4:
        codes = codes[0::2].copy()
        codes[: q.shape[0] // 2] |= q.codes[1::2] << 4
    tensors = {"codes": codes, "scales": q.scales} | ({} if q.symmetric else {"offsets": q.offsets})
    numbers = {"bits": q.bits, "group": q.group, "rows": q.shape[0]} | ({"values": q.values} if q.e2m1 else {})
    about = {"format": FORMAT, "version": VERSION} | {name: str(x) for name, x in numbers.items()}
    safetensors.write(path, tensors, about)


def load_quantized(path: Location) -> Quantized:
    """Read a file of `save_quantized`; codes of 8 bits stay in the mapped file.

    Raises:
        PackError: the file is malformed, or has another format.
        OSError: the file cannot be read.
    """
    from portmm.weights import safetensors

    tensors, about = safetensors.read(path)
    kind = about.get("format"), about.get("version")
    if kind != (FORMAT, VERSION):
        raise PackError(f"{path} has format {kind[0]!r}, version {kind[1]!r}; expected {FORMAT!r}, version {VERSION!r}")
    try:
        return _restored(tensors, about)
    except KeyError as error:
        raise PackError(f"{path} has no entry {error} and is no whole quantized weight") from error
    except (OverflowError, ValueError) as error:
        raise PackError(f"{path} is no sound quantized weight: {error}") from error


def _restored(tensors: dict[str, Array], about: dict[str, str]) -> Quantized:
    bits, group, k = checked_bits(int(about["bits"])), int(about["group"]), int(about["rows"])
    codes, scales = _matrix("codes", tensors["codes"], np.uint8), _matrix("scales", tensors["scales"], np.float32)
    if k < 0 or len(codes) != -(-k * bits // 8):
        raise ValueError(f"codes has {len(codes)} rows of bytes; {k} rows of {bits} bits need another number")
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=1).reshape(2 * len(codes), codes.shape[1])[:k]
    values = about.get("values", "int")
    zeros = np.zeros_like(scales) if values == "e2m1" else -(2 ** (bits - 1)) * scales
    return Quantized(codes, scales, tensors.get("offsets", zeros), bits, group, values)
