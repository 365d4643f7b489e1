"""Weights of 4 and 8 bits, as data.

Owns the record `Quantized`, how a float weight becomes one and back, and how
others' formats are read: GPTQ, AWQ, GGUF and int4 arrays. Has no kernels.
Imports NumPy, `errors` and `tensorfile`; arrays of `ml_dtypes` bring their
types with them.

A weight w[k, n] is stored as codes q[k, n], with a scale and an offset for each
column of a group of rows: w ~= scale[g, n] * q[k, n] + offset[g, n], g = k // group.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm import tensorfile
from portmm.errors import PackError

if TYPE_CHECKING:
    from portmm.tensorfile import Array, Location

BITS = (4, 8)
FLOATS = ("float16", "bfloat16", "float32", "float64")
FORMAT = "portmm.quantized"
VERSION = "1"

# A smaller scale would be subnormal, of few bits, and zero where a kernel flushes those.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
# In AWQ's words column i of eight lies in the nibble of this number: the inverse of 0 2 4 6 1 3 5 7.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
# QK4_0 and QK4_1 of llama.cpp: rows per block.
GGUF_BLOCK = 32


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A weight w[k, n] ~= scales[g, n] * codes[k, n] + offsets[g, n], g = k // group.

    Signed codes are stored biased, q + 2**(bits - 1), and the offset undoes it, so
    that one formula serves all weights. The formula is finite in float32 for every
    code, product and sum, which `__post_init__` checks. The arrays are kept as
    read-only views and copied only if they are strided: leave what they came from alone.

    Attributes:
        codes: uint8, (k, n), from 0 to 2**bits - 1.
        scales: float32, (groups, n); may be negative or zero.
        offsets: float32, (groups, n).
        bits: 4 or 8.
        group: rows per group; the last group is short where it does not divide k.

    Raises:
        ValueError: a dtype, a shape or a value is not as described here.
    """

    codes: Array
    scales: Array
    offsets: Array
    bits: int
    group: int

    def __post_init__(self) -> None:
        bits, group = _checked_bits(self.bits), operator.index(self.group)
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
        _check_finite(scales, offsets, bits)
        for name, value in zip(self.__slots__, (codes, scales, offsets, bits, group), strict=True):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's (k, n)."""
        k, n = self.codes.shape
        return k, n

    @property
    def groups(self) -> int:
        """Groups of rows."""
        return int(self.scales.shape[0])

    @property
    def symmetric(self) -> bool:
        """All offsets are -2**(bits - 1) * scale exactly: signed codes without a zero point."""
        return bool((self.offsets == -(2 ** (self.bits - 1)) * self.scales).all())

    @property
    def nbytes(self) -> int:
        """Bytes of the information: packed codes, scales, and offsets unless they follow from the scales."""
        packed = -(-self.codes.size * self.bits // 8)
        return int(packed + self.scales.nbytes + (0 if self.symmetric else self.offsets.nbytes))


def _checked_bits(bits: int) -> int:
    bits = operator.index(bits)
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; codes have 4 or 8 bits")
    return bits


def _matrix(name: str, x: Any, dtype: type[np.generic]) -> Array:
    """`x` as a read-only, contiguous and aligned matrix of exactly this type."""
    array = np.asarray(x)
    if array.dtype != dtype or array.ndim != 2:
        wanted = np.dtype(dtype).name
        raise ValueError(f"{name} has dtype {array.dtype} and shape {array.shape}; it must be a matrix of {wanted}")
    view = np.require(array, requirements=("C", "A")).view()
    view.flags.writeable = False
    return view


def _check_finite(scales: Array, offsets: Array, bits: int) -> None:
    # Linear in the code, so the ends decide. A kernel without FMA rounds the product first.
    with np.errstate(over="ignore", invalid="ignore"):
        top = scales * np.float32(2**bits - 1)
        bad = ~(np.isfinite(top) & np.isfinite(offsets) & np.isfinite(top + offsets))
    if bad.any():
        g, j = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"group {g} of column {j} has scale {scales[g, j]} and offset {offsets[g, j]}, "
            f"which give no finite float32 weights for codes up to {2**bits - 1}"
        )


def quantize(w: Any, *, bits: int = 4, group: int | None = 128, symmetric: bool = True) -> Quantized:
    """Round a weight to codes of few bits.

    Symmetric: scale = absmax / 7 (127 for 8 bits), never negative; q = w / scale
    rounded half to even is a signed code from -7 to 7 (-127 to 127), stored with
    8 (128) added. Asymmetric: the range includes 0, scale = (max - min) / (2**bits - 1),
    and the zero point is a whole code, so that 0 stays exactly 0. In both, a weight
    differs from what it becomes by at most half a scale, and float32 rounding.
    Scales are at least the smallest normal float32, and all-zero groups give zeros.

    Args:
        w: float16, bfloat16, float32 or float64, (k, n), finite.
        bits: 4 or 8.
        group: rows of k that share a scale, usually 32, 64 or 128; None or 0 for all of them.
        symmetric: no zero points: half of the arithmetic, for weights around 0.

    Returns:
        The codes, scales and offsets.

    Raises:
        TypeError: `w` has another dtype.
        ValueError: `w` is not a matrix or not finite, its values exceed what float32
            can scale (about 1.5e38), or `bits` or `group` is not as above.
    """
    weight = np.asarray(w)
    if weight.dtype.name not in FLOATS:
        raise TypeError(f"w has dtype {weight.dtype}; quantize takes {', '.join(FLOATS)}")
    if weight.ndim != 2:
        raise ValueError(f"w has shape {weight.shape}; a weight to quantize has two dimensions, k and n")
    bits = _checked_bits(bits)
    k, n = weight.shape
    rows = operator.index(group or max(k, 1))
    if rows < 0:
        raise ValueError(f"group is {group}; give the rows of a group, or None for all of them")
    codes = np.empty((k, n), np.uint8)
    scales, offsets = (np.empty((-(-k // rows), n), np.float32) for _ in range(2))
    for g in range(len(scales)):
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
    """The weight that a record stands for.

    Args:
        q: a quantized weight.
        dtype: float16, bfloat16, float32 or float64. float64 is computed in
            float64; the others in float32, product and sum rounded, and then cast.

    Returns:
        (k, n), of `dtype`.

    Raises:
        TypeError: `dtype` is another.
    """
    to = np.dtype(dtype)
    if to.name not in FLOATS:
        raise TypeError(f"dtype is {to}; weights are dequantized to {', '.join(FLOATS)}")
    wide = np.float64 if to.name == "float64" else np.float32
    out = np.empty(q.shape, to)
    for g in range(q.groups):
        rows = slice(g * q.group, (g + 1) * q.group)
        out[rows] = q.codes[rows].astype(wide) * q.scales[g].astype(wide) + q.offsets[g]
    return out


def from_gptq(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    g_idx: Any = None,
    *,
    bits: int = 4,
    v1: bool = True,
    group: int | None = None,
) -> Quantized:
    """A linear layer of a GPTQ checkpoint: w = scale * (q - zero).

    The layout is that of AutoGPTQ's QuantLinear (auto_gptq/nn_modules/qlinear)
    and its successor GPTQModel.

    Args:
        qweight: int32, (k * bits / 32, n); a word has consecutive rows, the first in the lowest bits.
        qzeros: int32, (groups, n * bits / 32); a word has consecutive columns likewise.
        scales: float, (groups, n).
        g_idx: integers, (k,): the group of each row. Only k // group is taken.
        bits: 4 or 8.
        v1: qzeros holds zero - 1, modulo 2**bits, which is checkpoint_format "gptq" and
            all files without the entry; False for "gptq_v2". Symmetric weights of 4 bits
            store 7 in v1 and 8 in v2: some writers name the wrong one.
        group: rows per group; by default from g_idx, or k / groups.

    Raises:
        TypeError: an array has another dtype.
        ValueError: shapes do not fit, or the rows are in activation order.
    """
    bits = _checked_bits(bits)
    codes = _fields("qweight", qweight, bits)
    k, n = codes.shape[0] * codes.shape[2], codes.shape[1]
    zeros = _fields("qzeros", qzeros, bits)
    steps, zeros = _floats("scales", scales), zeros.reshape(zeros.shape[0], zeros.shape[1] * zeros.shape[2])
    if g_idx is not None:
        group = _plain_order(np.asarray(g_idx), k, group)
    # AutoGPTQ masks after it adds (a zero point of 0 is stored as -1), as uint8 does for 8 bits.
    plain = (zeros + np.uint8(v1)) & np.uint8(2**bits - 1)
    return _affine(codes.transpose(0, 2, 1).reshape(k, n), steps, plain, bits, group)


def _plain_order(g_idx: Array, k: int, group: int | None) -> int:
    """The rows per group of a g_idx without activation order."""
    if g_idx.shape != (k,) or g_idx.dtype.kind not in "iu":
        raise ValueError(f"g_idx has dtype {g_idx.dtype} and shape {g_idx.shape}; {k} rows need integers, {(k,)}")
    rows = group or max(int(np.count_nonzero(g_idx == 0)), 1)
    wrong = np.flatnonzero(g_idx != np.arange(k) // rows)
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(
            f"g_idx puts row {i} into group {g_idx[i]}, not {i // rows}: the rows are in activation order. Reorder: "
            "with p = numpy.argsort(g_idx, kind='stable'), permute the unpacked rows and the columns of the input by p"
        )
    return rows


def from_awq(qweight: Any, qzeros: Any, scales: Any, *, bits: int = 4, group: int | None = None) -> Quantized:
    """A linear layer of an AWQ checkpoint of version "gemm": w = scale * (q - zero).

    The layout is that of AutoAWQ's WQLinear_GEMM (awq/utils/packing_utils.py): the
    nibbles of a word, from the lowest, are columns 0, 2, 4, 6, 1, 3, 5, 7 of eight.

    Args:
        qweight: int32, (k, n / 8).
        qzeros: int32, (groups, n / 8), packed likewise; zero points as they are.
        scales: float, (groups, n).
        bits: 4, the only width that has this order.
        group: rows per group; by default k / groups.

    Raises:
        TypeError: an array has another dtype.
        ValueError: shapes do not fit, or `bits` is not 4.
    """
    if bits != 4:
        raise ValueError(f"bits is {bits}; AWQ's layout is defined for 4")
    codes, zeros = (
        x[:, :, AWQ_NIBBLES].reshape(x.shape[0], x.shape[1] * 8)
        for x in (_fields("qweight", qweight, 4), _fields("qzeros", qzeros, 4))
    )
    return _affine(codes, _floats("scales", scales), zeros, 4, group)


def from_gguf(data: Any, shape: tuple[int, int], *, kind: str = "Q4_0") -> Quantized:
    """A matrix of a GGUF file, of type Q4_0: w = d * (q - 8), or Q4_1: w = d * q + m.

    The layout is that of block_q4_0 and block_q4_1 in llama.cpp (ggml-common.h,
    ggml-quants.c). GGUF stores the transpose: rows are output features n, and blocks
    of 32 lie along k. A block is d in float16, for Q4_1 also m, then 16 bytes whose
    low nibbles are elements 0 to 15 and whose high nibbles are 16 to 31.

    Args:
        data: the tensor's bytes, or a contiguous buffer of them.
        shape: (k, n), which is the order of GGUF's own `ne`.
        kind: "Q4_0" or "Q4_1".

    Raises:
        ValueError: the kind is another, 32 does not divide k, or the bytes are not as many as the shape needs.
    """
    if kind not in ("Q4_0", "Q4_1"):
        raise ValueError(f"kind is {kind!r}; known are Q4_0 and Q4_1")
    k, n = (operator.index(x) for x in shape)
    if k < 0 or n < 0 or k % GGUF_BLOCK:
        raise ValueError(f"shape is {(k, n)}; k must be a multiple of {GGUF_BLOCK}, the rows of a block")
    fields = [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]
    block = np.dtype([f for f in fields if f[0] != "m" or kind == "Q4_1"])
    raw = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
    if raw.nbytes != n * (k // GGUF_BLOCK) * block.itemsize:
        raise ValueError(
            f"data has {raw.nbytes} bytes; {kind} of shape {(k, n)} has {n * (k // GGUF_BLOCK)} blocks "
            f"of {block.itemsize}, {n * (k // GGUF_BLOCK) * block.itemsize} bytes"
        )
    blocks = raw.view(block).reshape(n, k // GGUF_BLOCK)
    codes = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=2).reshape(n, k).T
    scales = blocks["d"].T.astype(np.float32)
    offsets = blocks["m"].T.astype(np.float32) if kind == "Q4_1" else -8 * scales
    return Quantized(codes, scales, offsets, 4, GGUF_BLOCK)


def from_int4(w: Any, scales: Any, zeros: Any = None, *, group: int | None = None) -> Quantized:
    """A weight in an array of ml_dtypes.int4 or uint4: w = scale * (q - zero).

    Args:
        w: int4 or uint4, (k, n).
        scales: float, (groups, n).
        zeros: numbers, (groups, n), whole or not, in the domain of `w`; None for 0.
        group: rows per group; by default k / groups.

    Raises:
        TypeError: an array has another dtype.
        ValueError: shapes do not fit.
    """
    weight = np.asarray(w)
    if weight.dtype.name not in ("int4", "uint4"):
        raise TypeError(f"w has dtype {weight.dtype}; from_int4 takes ml_dtypes.int4 and ml_dtypes.uint4")
    if weight.ndim != 2:
        raise ValueError(f"w has shape {weight.shape}; a weight has two dimensions, k and n")
    bias = 8 if weight.dtype.name == "int4" else 0
    steps = _floats("scales", scales)
    points = np.zeros(steps.shape) if zeros is None else np.asarray(zeros).astype(np.float64)
    codes = (weight.astype(np.int8) + np.int8(bias)).astype(np.uint8)
    return _affine(codes, steps, points + bias, 4, group)


def _fields(name: str, words: Any, bits: int) -> Array:
    """The fields of 32-bit words from the lowest, uint8, (rows, columns, fields)."""
    array = np.asarray(words)
    if array.dtype.newbyteorder("=") not in (np.int32, np.uint32):
        raise TypeError(f"{name} has dtype {array.dtype}; packed words are int32")
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {array.shape}; packed words have two dimensions")
    raw = array.astype(array.dtype.newbyteorder("<"), order="C").view(np.uint8).reshape(*array.shape, 4)
    return raw if bits == 8 else np.stack([raw & 15, raw >> 4], axis=-1).reshape(*array.shape, 8)


def _floats(name: str, x: Any) -> Array:
    array = np.asarray(x)
    if array.dtype.name not in FLOATS:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be one of {', '.join(FLOATS)}")
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {array.shape}; it must be (groups, n)")
    # What float32 cannot hold becomes infinite, which the record refuses by name.
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _affine(codes: Array, scales: Array, zeros: Array, bits: int, group: int | None) -> Quantized:
    """The record of w = scale * (q - zero)."""
    k, n = codes.shape
    if scales.shape[1] != n or zeros.shape != scales.shape:
        raise ValueError(
            f"the weight has shape {codes.shape}, scales {scales.shape} and zero points {zeros.shape}; "
            f"the last two must both be (groups, {n})"
        )
    if group is None:
        if k % max(len(scales), 1):
            raise ValueError(f"{k} rows do not divide into {len(scales)} groups; say how many rows with group=")
        group = max(k // max(len(scales), 1), 1)
    with np.errstate(over="ignore", invalid="ignore"):
        offsets = ((0.0 - zeros.astype(np.float64)) * scales).astype(np.float32)
    return Quantized(codes, scales, offsets, bits, group)


def save_quantized(q: Quantized, path: Location) -> None:
    """Write a quantized weight to a safetensors file that describes itself.

    Codes of 4 bits are packed, two rows to a byte, the even row in the low
    nibble; offsets that follow from the scales are left out.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    codes = q.codes
    if q.bits == 4:
        codes = codes[0::2].copy()
        codes[: q.shape[0] // 2] |= q.codes[1::2] << 4
    tensors = {"codes": codes, "scales": q.scales} | ({} if q.symmetric else {"offsets": q.offsets})
    numbers = {"bits": q.bits, "group": q.group, "rows": q.shape[0]}
    about = {"format": FORMAT, "version": VERSION} | {name: str(x) for name, x in numbers.items()}
    tensorfile.write(path, tensors, about)


def load_quantized(path: Location) -> Quantized:
    """Read what `save_quantized` wrote; codes of 8 bits stay in the mapped file.

    Raises:
        PackError: the file is malformed, or holds something else.
        OSError: the file cannot be read.
    """
    tensors, about = tensorfile.read(path)
    kind = about.get("format"), about.get("version")
    if kind != (FORMAT, VERSION):
        raise PackError(f"{path} has format {kind[0]!r}, version {kind[1]!r}; expected {FORMAT!r}, version {VERSION!r}")
    try:
        return _restored(tensors, about)
    except KeyError as error:
        raise PackError(f"{path} has no entry {error} and is no whole quantized weight") from error
    except ValueError as error:
        raise PackError(f"{path} is no sound quantized weight: {error}") from error


def _restored(tensors: dict[str, Array], about: dict[str, str]) -> Quantized:
    bits, group, k = _checked_bits(int(about["bits"])), int(about["group"]), int(about["rows"])
    codes, scales = _matrix("codes", tensors["codes"], np.uint8), _matrix("scales", tensors["scales"], np.float32)
    if k < 0 or len(codes) != -(-k * bits // 8):
        raise ValueError(f"codes has {len(codes)} rows of bytes; {k} rows of {bits} bits need another number")
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=1).reshape(2 * len(codes), codes.shape[1])[:k]
    offsets = tensors["offsets"] if "offsets" in tensors else -(2 ** (bits - 1)) * scales
    return Quantized(codes, scales, offsets, bits, group)
