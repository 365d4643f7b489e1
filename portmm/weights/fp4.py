"""Weights of floats of four bits: MXFP4 and NVFP4.

Owns `from_fp4`, which reads their arrays, and `quantize_fp4`. An element is an e2m1 of the OCP Microscaling Formats
(MX) 1.0: two bits of exponent and one of mantissa. MXFP4 has one scale for 32 of them, a power of two in a byte (e8m0);
NVFP4 has one for 16, a float of eight bits (e4m3), times one float32 for the matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.spec.dtype import E2M1
from portmm.util.array_subclasses import refuse_class
from portmm.weights.quantized import FLOATS, Quantized

if TYPE_CHECKING:
    from portmm.weights.safetensors import Array

GROUP = {"mxfp4": 32, "nvfp4": 16}
"""Rows that share a scale."""
_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_BETWEEN = (np.array(E2M1[:7]) + np.array(E2M1[1:8])) / 4
"""Numbers half way between neighbours of e2m1."""


def powers_of_two(exponents: Array) -> Array:
    """The numbers of e8m0, of which 255 is no number."""
    with np.errstate(over="ignore"):
        numbers: Array = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    numbers[exponents == 255] = np.nan
    return numbers


def from_fp4(packed: Any, scales: Any, global_scale: float = 1.0) -> Quantized:
    """A weight of MXFP4 or NVFP4 in arrays: w = global_scale * scale * value.

    Args:
        packed: uint8, (outputs, inputs / 2): of two neighbouring inputs, the first in the low half of a byte.
        scales: (outputs, groups): uint8, exponents of two with a bias of 127 (e8m0); or floats, float8_e4m3fn of
            `ml_dtypes` among them.
        global_scale: of all of them; files of compressed-tensors have its reciprocal.

    Returns:
        The record (inputs, outputs); a product of scales is rounded to float32 once.

    Raises:
        TypeError: an array has another dtype.
        ValueError: shapes do not fit, or scales are not finite.
    """
    codes, steps = np.asarray(packed), np.asarray(scales)
    if codes.dtype != np.uint8:
        raise TypeError(f"packed has dtype {codes.dtype}; two values of four bits are a uint8")
    if steps.dtype.name not in (*FLOATS, "uint8", "float8_e4m3fn"):
        raise TypeError(f"scales has dtype {steps.dtype}; scales are uint8 (e8m0), float8_e4m3fn or floats")
    if codes.ndim != 2 or steps.ndim != 2 or len(codes) != len(steps):
        raise ValueError(f"packed has shape {codes.shape} and scales {steps.shape}; both are matrices with the outputs")
    k, groups = 2 * codes.shape[1], steps.shape[1]
    if k % max(groups, 1):
        raise ValueError(f"{k} inputs do not divide into {groups} groups")
    values = powers_of_two(steps) if steps.dtype == np.uint8 else steps.astype(np.float32)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(values.T) * np.float32(global_scale)
    both = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), k)
    return Quantized(both.T, values, np.zeros_like(values), 4, max(k // max(groups, 1), 1), "e2m1")


def quantize_fp4(w: Any, kind: str = "mxfp4") -> Quantized:
    """A weight rounded to floats of four bits.

    Values are rounded to the nearest of e2m1 times its scale, half way to the even one, and larger ones to the largest.
    A scale of MXFP4 is the power of two by which the largest magnitude of a group is between 4 and 8, as OCP's
    specification has it; one of NVFP4 makes it 6, rounded to e4m3 over the float32 by which the largest one is 448.

    Args:
        w: float16, bfloat16, float32 or float64, (k, n), finite.
        kind: "mxfp4" or "nvfp4".

    Raises:
        TypeError: `w` has another dtype.
        ValueError: `w` is no matrix, or not finite, or the kind is unknown.
    """
    refuse_class(w, "w")
    weight = np.asarray(w)
    if kind not in GROUP:
        raise ValueError(f"kind is {kind!r}; use {' or '.join(map(repr, GROUP))}")
    if weight.dtype.name not in FLOATS:
        raise TypeError(f"w has dtype {weight.dtype}; quantize_fp4 takes {', '.join(FLOATS)}")
    if weight.ndim != 2 or not np.isfinite(weight.astype(np.float64)).all():
        raise ValueError(f"w has shape {weight.shape}; a weight to quantize is a finite matrix, (k, n)")
    (k, n), rows = weight.shape, GROUP[kind]
    groups = -(-k // rows)
    padded = np.zeros((groups * rows, n))
    padded[:k] = weight
    parts = padded.reshape(groups, rows, n)
    scales = (_powers if kind == "mxfp4" else _e4m3)(np.abs(parts).max(axis=1, initial=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(scales[:, None] > 0, np.abs(parts) / scales[:, None].astype(np.float64), 0)
    below, at = (np.searchsorted(_BETWEEN, ratio, side=side).astype(np.uint8) for side in ("left", "right"))
    codes = np.where(below % 2 == 0, below, at) | (np.signbit(parts).astype(np.uint8) << 3)
    codes = codes.reshape(groups * rows, n)[:k].astype(np.uint8)
    return Quantized(codes, scales, np.zeros_like(scales), 4, rows, "e2m1")


def _powers(largest: Array) -> Array:
    """Scales of MXFP4."""
    exponents = np.frexp(largest)[1] - 3  # of the power of two at most the largest, less that of 4
    return np.ldexp(np.float32(1), np.clip(exponents, -126, 127) * (largest > 0))


def _e4m3(largest: Array) -> Array:
    """Scales of NVFP4, as float32."""
    most = np.float32(largest.max(initial=0) / (_LARGEST * _LARGEST_SCALE))
    if not most > 0:
        return np.zeros(largest.shape, np.float32)
    wanted = largest / _LARGEST / np.float64(most)
    # The last place of e4m3 is an eighth of the power of two at most a number, and a 512th for the smallest ones.
    unit = np.ldexp(1.0, np.maximum(np.frexp(wanted)[1] - 1, -6) - 3)
    steps = np.minimum(np.rint(wanted / unit) * unit, _LARGEST_SCALE)
    return steps.astype(np.float32) * most
