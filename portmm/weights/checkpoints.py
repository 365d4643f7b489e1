"""Quantised weights of other libraries' formats.

Owns the importers of GPTQ, AWQ, GGUF and int4 arrays, each by its format's
public description. Arrays of `ml_dtypes` have its types without an import here.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from portmm.spec.layouts import row_major
from portmm.weights.fp4 import powers_of_two
from portmm.weights.quantized import FLOATS, Quantized, checked_bits

if TYPE_CHECKING:
    from portmm.weights.safetensors import Array

# QK4_0, QK4_1 and QK_MXFP4 of llama.cpp: rows per block.
GGUF_BLOCK = 32
GGUF_KINDS = {"Q4_0": [("d", "<f2")], "Q4_1": [("d", "<f2"), ("m", "<f2")], "MXFP4": [("e", "u1")]}
"""Types of four bits, with the fields of a block before its values."""


@overload
def from_gptq(
    qweight: Any, qzeros: Any, scales: Any, g_idx: Any = ..., *, bits: int = ..., v1: bool = ...,
    group: int | None = ..., reorder: Literal[False] = ...,
) -> Quantized: ...  # fmt: skip
@overload
def from_gptq(
    qweight: Any, qzeros: Any, scales: Any, g_idx: Any = ..., *, bits: int = ..., v1: bool = ...,
    group: int | None = ..., reorder: Literal[True],
) -> tuple[Quantized, Array]: ...  # fmt: skip
def from_gptq(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    g_idx: Any = None,
    *,
    bits: int = 4,
    v1: bool = True,
    group: int | None = None,
    reorder: bool = False,
) -> Quantized | tuple[Quantized, Array]:
    """A linear layer of a GPTQ checkpoint: w = scale * (q - zero).

    The layout is that of AutoGPTQ's QuantLinear (auto_gptq/nn_modules/qlinear)
    and its successor GPTQModel.

    Args:
        qweight: int32, (k * bits / 32, n); a word has consecutive rows, the first in the lowest bits.
        qzeros: int32, (groups, n * bits / 32); a word has consecutive columns likewise.
        scales: float, (groups, n).
        g_idx: integers, (k,): the group of each row; k // group unless `reorder` is set.
        bits: 4 or 8.
        v1: qzeros are zero - 1, modulo 2**bits, as in checkpoint_format "gptq" and
            all files without the entry; False for "gptq_v2". Symmetric weights of 4 bits
            store 7 in v1 and 8 in v2: some writers name the wrong one.
        group: rows per group; by default from g_idx, or k / groups.
        reorder: take rows in any order of groups (`desc_act`, activation order), and return a tuple: the record with
            its rows sorted by group, and the order p of the input's columns, so that w.T @ x is `x[..., p]` times it.

    Returns:
        The record, or with `reorder` the record and the order.

    Raises:
        TypeError: an array has another dtype.
        ValueError: shapes do not fit, or the rows are in activation order without `reorder`.
    """
    bits = checked_bits(bits)
    codes = _fields("qweight", qweight, bits)
    k = codes.shape[0] * codes.shape[2]
    zeros = _fields("qzeros", qzeros, bits)
    steps, zeros = _floats("scales", scales), zeros.reshape(zeros.shape[0], zeros.shape[1] * zeros.shape[2])
    if g_idx is not None and not reorder:
        group = _plain_order(np.asarray(g_idx), k, group)
    # AutoGPTQ masks after it adds (a zero point of 0 is stored as -1), as uint8 does for 8 bits.
    plain = (zeros + np.uint8(v1)) & np.uint8(2**bits - 1)
    rows = row_major(*codes.shape).permute(0, 2, 1).merge(0, 2).gather(codes)
    if not reorder:
        return _affine(rows, steps, plain, bits, group)
    plain_order = np.arange(k) // (group or -(-k // max(len(steps), 1)) or 1)
    order, group = sorted_order(plain_order if g_idx is None else np.asarray(g_idx), k, len(steps), group)
    return _affine(rows[order], steps, plain, bits, group), order


def sorted_order(g_idx: Array, k: int, groups: int, group: int | None) -> tuple[Array, int]:
    """The rows sorted by group, each group in the order of the file, and the rows of a group."""
    if g_idx.shape != (k,) or g_idx.dtype.kind not in "iu" or (k and not 0 <= g_idx.min() <= g_idx.max() < groups):
        raise ValueError(f"g_idx has dtype {g_idx.dtype} and shape {g_idx.shape}; {k} rows need groups below {groups}")
    counts = np.bincount(g_idx, minlength=groups)
    size = group or int(counts.max(initial=1))
    wrong = np.flatnonzero(counts[:-1] != size)
    if wrong.size or counts[-1:].sum() > size:
        at = int(wrong[0]) if wrong.size else groups - 1
        raise ValueError(f"group {at} has {counts[at]} rows; each has {size}, and the last one no more")
    return np.argsort(g_idx, kind="stable"), size


def _plain_order(g_idx: Array, k: int, group: int | None) -> int:
    """The rows per group of a g_idx without activation order."""
    if g_idx.shape != (k,) or g_idx.dtype.kind not in "iu":
        raise ValueError(f"g_idx has dtype {g_idx.dtype} and shape {g_idx.shape}; {k} rows need integers, {(k,)}")
    rows = group or max(int(np.count_nonzero(g_idx == 0)), 1)
    wrong = np.flatnonzero(g_idx != np.arange(k) // rows)
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(
            f"g_idx puts row {i} into group {g_idx[i]}, not {i // rows}: the rows are in activation order: "
            "set reorder=True, and permute the columns of the input by the order that is returned"
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
        row_major(*x.shape[:2], 2, 4).permute(0, 1, 3, 2).merge(1, 3).gather(x.reshape(*x.shape[:2], 2, 4))
        for x in (_fields("qweight", qweight, 4), _fields("qzeros", qzeros, 4))
    )
    return _affine(codes, _floats("scales", scales), zeros, 4, group)


def from_gguf(data: Any, shape: tuple[int, int], *, kind: str = "Q4_0") -> Quantized:
    """A matrix of a GGUF file, of type Q4_0: w = d * (q - 8), Q4_1: w = d * q + m, or MXFP4: floats of four bits.

    The layout is that of block_q4_0 and block_q4_1 in llama.cpp (ggml-common.h,
    ggml-quants.c). GGUF stores the transpose: rows are output features n, and blocks
    of 32 are along k. A block is d in float16, for Q4_1 also m, then 16 bytes with
    elements 0 to 15 in the low nibbles and 16 to 31 in the high nibbles. One of MXFP4 is a power of two, and these.

    Args:
        data: the tensor's bytes, or a contiguous buffer of them.
        shape: (k, n), which is the order of GGUF's own `ne`.
        kind: "Q4_0", "Q4_1" or "MXFP4".

    Raises:
        ValueError: the kind is not supported, 32 does not divide k, the number of bytes is not that of the shape, or a
            scale is no number.
    """
    if kind not in GGUF_KINDS:
        raise ValueError(f"kind is {kind!r}; known are {', '.join(GGUF_KINDS)}")
    k, n = (operator.index(x) for x in shape)
    if k < 0 or n < 0 or k % GGUF_BLOCK:
        raise ValueError(f"shape is {(k, n)}; k must be a multiple of {GGUF_BLOCK}, the rows of a block")
    if max(k, 1) * max(n, 1) >= 1 << 63:  # too large also where the other extent is 0
        raise ValueError(f"shape is {(k, n)}, more than can be addressed")
    block = np.dtype([*GGUF_KINDS[kind], ("q", "u1", 16)])
    raw = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
    if raw.nbytes != n * (k // GGUF_BLOCK) * block.itemsize:
        raise ValueError(
            f"data has {raw.nbytes} bytes; {kind} of shape {(k, n)} has {n * (k // GGUF_BLOCK)} blocks "
            f"of {block.itemsize}, {n * (k // GGUF_BLOCK) * block.itemsize} bytes"
        )
    blocks = raw.view(block).reshape(n, k // GGUF_BLOCK)
    codes = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=2).reshape(n, k).T
    if kind == "MXFP4":
        scales = powers_of_two(np.ascontiguousarray(blocks["e"].T))
        return Quantized(codes, scales, np.zeros_like(scales), 4, GGUF_BLOCK, "e2m1")
    scales = blocks["d"].T.astype(np.float32)
    offsets = blocks["m"].T.astype(np.float32) if kind == "Q4_1" else -8 * scales
    return Quantized(codes, scales, offsets, 4, GGUF_BLOCK)


def from_int4(w: Any, scales: Any, zeros: Any = None, *, group: int | None = None) -> Quantized:
    """A weight in an array of ml_dtypes.int4 or uint4: w = scale * (q - zero).

    Args:
        w: int4 or uint4, (k, n).
        scales: float, (groups, n).
        zeros: numbers, (groups, n), integers or not, in the domain of `w`; None for 0.
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
    # Values outside the range of float32 become infinite, which the record rejects with a message.
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
            raise ValueError(f"{k} rows do not divide into {len(scales)} groups; set the rows of a group with group=")
        group = max(k // max(len(scales), 1), 1)
    with np.errstate(over="ignore", invalid="ignore"):
        offsets = ((0.0 - zeros.astype(np.float64)) * scales).astype(np.float32)
    return Quantized(codes, scales, offsets, bits, group)
