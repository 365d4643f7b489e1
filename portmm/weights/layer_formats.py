"""Linear layers of quantized checkpoints: GPTQ, AWQ, compressed-tensors and torchao.

Owns `Values`, the integers of a layer, and the decoders that make them of a layer's tensors, each by its format's
public description: that of GPTQ and AWQ as in `checkpoints`; compressed-tensors' `pack_to_int32` and `dequantize`;
the tensor classes of torchao's `quantize_/workflows`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.weights.checkpoints import from_awq, from_gptq, sorted_order
from portmm.weights.fp4 import from_fp4
from portmm.weights.quantized import FLOATS, Quantized, dequantize

if TYPE_CHECKING:
    from portmm.weights.safetensors import Array

    Tensors = Mapping[str, Array]
    Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Values:
    """The integers of a layer, with their scales.

    Attributes:
        matrix: codes, scales and offsets of the weight (inputs, outputs), rows sorted by group.
        dtype: the type in which the format computes weights.
        order: of rows in the file's; None where they are sorted already.
        zeros: (groups, outputs), weights of code 2**(bits - 1), where these are floats.
    """

    matrix: Quantized
    dtype: np.dtype[Any]
    order: Array | None = None
    zeros: Array | None = None

    def floats(self) -> Array:
        """The weight (inputs, outputs), to the bit as the format computes it."""
        q = self.matrix
        if q.e2m1:
            return dequantize(q).astype(self.dtype)
        out = np.empty(q.shape, self.dtype)
        with np.errstate(over="ignore"):  # as in the format, large ones are infinite in float16
            for g in range(q.groups if q.codes.size else 0):
                rows, scale = slice(g * q.group, (g + 1) * q.group), q.scales[g]
                codes = q.codes[rows].astype(np.float32)
                if self.zeros is None:  # offsets are integers times scales, rounded
                    zero = np.rint(np.divide(-q.offsets[g], scale, out=np.zeros_like(scale), where=scale != 0))
                    out[rows] = (codes - zero) * scale
                else:
                    out[rows] = (codes - np.float32(2 ** (q.bits - 1))) * scale + self.zeros[g]
        if self.order is not None:
            result = np.empty_like(out)
            result[self.order] = out
            return result
        return out


def _need(tensors: Tensors, *names: str) -> list[Array]:
    """Tensors of a layer."""
    missing = [n for n in names if n not in tensors]
    if missing:
        raise ValueError(f"it has no tensor {missing[0]}; there are {', '.join(sorted(tensors))}")
    return [tensors[n] for n in names]


def _number(config: Config, names: tuple[str, ...], default: int) -> int:
    value = next((config[n] for n in names if config.get(n) is not None), default)
    if type(value) is not int or not -1 <= value < 1 << 31:
        raise ValueError(f"{names[0]} is {value!r} in its configuration, not a number")
    return value


def _rows(config: Config) -> int | None:
    """Rows of a group as the configuration has them; None for what follows from shapes, and for all of them."""
    size = _number(config, ("group_size", "q_group_size"), -1)
    return size if size > 0 else None


def gptq(tensors: Tensors, config: Config) -> Values:
    """A layer of GPTQ, in versions 1 and 2, with or without activation order."""
    words, zeros, scales = _need(tensors, "qweight", "qzeros", "scales")
    version = config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format is {version!r}; known are gptq and gptq_v2")
    bits = _number(config, ("bits", "w_bit"), 4)
    g_idx = tensors.get("g_idx")
    plain = g_idx is None or (g_idx.ndim == 1 and bool((np.diff(g_idx) >= 0).all()))
    options: dict[str, Any] = {"bits": bits, "v1": version == "gptq", "group": _rows(config)}
    if plain:
        return Values(from_gptq(words, zeros, scales, g_idx, **options), scales.dtype)
    q, order = from_gptq(words, zeros, scales, g_idx, reorder=True, **options)
    return Values(q, scales.dtype, order)


def awq(tensors: Tensors, config: Config) -> Values:
    """A layer of AWQ in version "gemm"."""
    words, zeros, scales = _need(tensors, "qweight", "qzeros", "scales")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"version is {version!r}; AWQ is read in version 'gemm'")
    bits = _number(config, ("bits", "w_bit"), 4)
    return Values(from_awq(words, zeros, scales, bits=bits, group=_rows(config)), scales.dtype)


def _values(
    codes: Array, scales: Array, zeros: Array | None, bits: int, group: int, *, g_idx: Array | None = None
) -> Values:
    """Values of codes and zero points with a bias (outputs, inputs), and scales (outputs, groups)."""
    n, k = codes.shape
    if scales.dtype.name not in FLOATS:
        raise ValueError(f"scales have dtype {scales.dtype}; they must be one of {', '.join(FLOATS)}")
    groups = -(-k // group) if k else 0
    if scales.size not in (n * groups, 1) or (zeros is not None and zeros.size != scales.size):
        points = "" if zeros is None else f" and zero points {zeros.shape}"
        raise ValueError(
            f"values have shape {codes.shape}, scales {scales.shape}{points}: {groups} groups need {(n, groups)}"
        )
    steps = np.broadcast_to(scales.reshape((n, groups) if scales.size == n * groups else (1, 1)), (n, groups)).T
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = steps.astype(np.float32)
        if zeros is None:
            offsets = -np.float32(2 ** (bits - 1)) * narrow
        else:
            corners = zeros.reshape((n, groups) if zeros.size == n * groups else (1, 1))
            offsets = ((0.0 - np.broadcast_to(corners, (n, groups)).T.astype(np.float64)) * narrow).astype(np.float32)
    order, rows = None, codes.T
    if g_idx is not None:
        order, size = sorted_order(g_idx, k, groups, group)
        rows = rows[order]
        group = size
    return Values(Quantized(rows, narrow, offsets, bits, group), scales.dtype, order)


def _unpacked(name: str, words: Array, count: int, bits: int) -> Array:
    """Biased fields along the last dimension of 32-bit words, from the lowest."""
    if words.dtype.newbyteorder("=") != np.int32 or words.ndim != 2:
        raise ValueError(f"{name} has dtype {words.dtype} and shape {words.shape}; packed words are a matrix of int32")
    if words.shape[1] != -(-count * bits // 32):
        raise ValueError(
            f"{name} has {words.shape[1]} words in a row; {count} values of {bits} bits need another number"
        )
    raw = np.ascontiguousarray(words, "<i4").view(np.uint8)
    fields = raw if bits == 8 else np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(words), 8 * words.shape[1])
    return fields[:, :count]


def compressed(tensors: Tensors, config: Config) -> Values:
    """A layer of compressed-tensors: pack-quantized of 4 or 8 bits, integers of 8 bits (`int-quantized`), or fp4."""
    (scales,) = _need(tensors, "weight_scale")
    zeros, weights = tensors.get("weight_zero_point"), _arguments(config)
    if weights.get("type") == "float":
        return _compressed_fp4(tensors, weights)
    if "weight_packed" in tensors:
        words, shape = _need(tensors, "weight_packed", "weight_shape")
        if shape.shape != (2,) or shape.dtype.kind not in "iu" or not all(0 <= int(x) < 1 << 40 for x in shape):
            raise ValueError(f"weight_shape is {shape!r}; it has outputs and inputs")
        n, k = (int(x) for x in shape)
        bits = _number(weights, ("num_bits",), 4)
        if bits not in (4, 8):
            raise ValueError(f"num_bits is {bits}; values of 4 and 8 bits are read")
        codes = _unpacked("weight_packed", words, k, bits)
        if len(codes) != n:
            raise ValueError(f"weight_packed has {len(codes)} rows; weight_shape is {(n, k)}")
        if zeros is not None:
            packed = zeros.dtype.newbyteorder("=") == np.int32
            zeros = _unpacked("weight_zero_point", zeros.T, n, bits).T if packed else _biased(zeros, bits)
    else:
        (plain,) = _need(tensors, "weight")
        if plain.dtype != np.int8 or plain.ndim != 2:
            raise ValueError(f"weight has dtype {plain.dtype} and shape {plain.shape}; values are a matrix of int8")
        (n, k), bits, codes = plain.shape, 8, _biased(plain, 8)
        zeros = None if zeros is None else _biased(zeros, 8)
    size = weights.get("group_size")
    group = _number(weights, ("group_size",), -1) if size else -1
    columns = scales.shape[1] if scales.ndim == 2 else 1
    group = group if group > 0 and columns > 1 else max(-(-k // max(columns, 1)), 1)
    return _values(codes, scales, zeros, bits, group, g_idx=tensors.get("weight_g_idx"))


def _compressed_fp4(tensors: Tensors, weights: Config) -> Values:
    """A layer of NVFP4 or MXFP4 (`nvfp4-pack-quantized`, `mxfp4-pack-quantized`), which are unpacked to bfloat16."""
    bits, size = _number(weights, ("num_bits",), 4), weights.get("group_size")
    if bits != 4 or tensors.get("weight_zero_point") is not None:
        raise ValueError(f"its weights are floats of {bits} bits; those of 4 without zero points are read")
    packed, scales = _need(tensors, "weight_packed", "weight_scale")
    if scales.dtype.name not in ("uint8", "float8_e4m3fn") or packed.dtype != np.uint8:
        raise ValueError(
            f"it has values of {packed.dtype} and scales of {scales.dtype}, which are uint8 and a byte each"
        )
    whole = tensors.get("weight_global_scale")
    if whole is not None:  # files have its reciprocal
        if whole.size != 1 or whole.dtype.newbyteorder("=") != np.float32:
            raise ValueError(f"weight_global_scale is {whole.dtype} {whole.shape}; it is one float32")
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scales = scales.astype(np.float32) / np.float32(whole.reshape(()))
    q = from_fp4(packed, scales)
    if q.shape[0] and size is not None and q.group != size:
        raise ValueError(f"weight_scale has {q.groups} groups of {q.group} inputs; group_size is {size}")
    return Values(q, _float_type("bfloat16", q.scales.dtype))


def _biased(values: Array, bits: int) -> Array:
    """Signed values of 4 or 8 bits as codes."""
    half = 2 ** (bits - 1)
    if values.dtype != np.int8 or (bits < 8 and values.size and not -half <= values.min() <= values.max() < half):
        raise ValueError(f"values of dtype {values.dtype} are not int8 of {bits} bits")
    return (values.view(np.uint8) + np.uint8(half)) & np.uint8(2**bits - 1)


def _arguments(config: Config) -> Config:
    """Arguments of the quantization of weights, in which all groups of a configuration agree."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        return {}
    parsed = [g["weights"] for g in groups.values() if isinstance(g, dict) and isinstance(g.get("weights"), dict)]
    same = {n: parsed[0].get(n) for n in ("num_bits", "group_size", "strategy", "type")} if parsed else {}
    if any(x.get(n) != v for x in parsed for n, v in same.items()):
        raise ValueError("its configuration quantizes layers in more than one way, which is not read")
    if same.get("type") not in (None, "int", "float"):
        raise ValueError(f"its weights are of type {same['type']!r}; integers and floats of four bits are read")
    return {n: v for n, v in same.items() if v is not None}


def torchao(tensors: Tensors, config: Config) -> Values:
    """A weight of torchao, whose tensors have the names of its attributes."""
    kind, about = config.get("_type"), config.get("_data")
    if kind not in TORCHAO or not isinstance(about, dict):
        raise ValueError(f"it is a {kind!r} of torchao; those that are read are {', '.join(TORCHAO)}")
    if "act_pre_scale" in tensors:
        raise ValueError("it scales its activations first (act_pre_scale), which is not read")
    values, scales = _need(tensors, "qdata", "scale")
    block = about.get("block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(x) is int and x > 0 for x in block):
        raise ValueError(f"block_size is {block!r}; a weight has two numbers")
    if block[0] != 1 or values.dtype != np.int8 or values.ndim != 2:
        raise ValueError(f"blocks are {block} of {values.dtype} {values.shape}; groups of a matrix of int8 are read")
    zeros = tensors.get("zero_point")
    if kind != "Int4Tensor":
        bits = 4 if _nested(about, "target_dtype") == "int4" else 8
        zeros = None if zeros is None else _biased(zeros, bits)
        result = _values(_biased(values, bits), scales, zeros, bits, block[1])
        return Values(result.matrix, _float_type(_nested(about, "dtype"), result.dtype))
    raw = values.view(np.uint8)
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), 2 * raw.shape[1]) ^ np.uint8(8)
    (points,) = _need(tensors, "zero_point")
    result = _values(codes, np.ascontiguousarray(scales.T), None, 4, block[1])
    if points.shape != scales.shape or points.dtype.name not in FLOATS:
        raise ValueError(f"zero_point has dtype {points.dtype} and shape {points.shape}, scale {scales.shape}")
    q, floats = result.matrix, points.astype(np.float32)
    matrix = Quantized(q.codes, q.scales, floats - np.float32(8) * q.scales, 4, q.group)
    return Values(matrix, result.dtype, zeros=floats)


TORCHAO = ("Int4Tensor", "IntxUnpackedToInt8Tensor", "Int8Tensor")
"""Classes of torchao's tensors that are read."""


def _float_type(name: Any, default: np.dtype[Any]) -> np.dtype[Any]:
    """A type of floats by name."""
    if name not in FLOATS:
        return default
    if name == "bfloat16":
        import ml_dtypes  # a file with bfloat16 cannot be read without it

        name = ml_dtypes.bfloat16
    return np.dtype(name)


def _nested(about: Config, name: str) -> Any:
    """A value of torchao's description of an attribute."""
    value = about.get(name)
    return value.get("_data") if isinstance(value, dict) else value


DECODERS: dict[str, Callable[[Tensors, Config], Values]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "torchao": torchao,
}
"""Decoders of a layer's tensors, by the format's name in `quantization_config`."""
MARKS = {"gptq": ".qweight", "awq": ".qweight", "compressed-tensors": ".weight_scale"}
"""The end of the name of a tensor that each quantized layer of a format has."""


def torchao_weights(metadata: Mapping[str, str]) -> dict[str, Config]:
    """The quantized weights of a file's metadata, by name.

    Raises:
        ValueError: the metadata are not torchao's.
    """
    try:
        names = json.loads(metadata["tensor_names"])
        parsed = {n: json.loads(metadata[n]) for n in names if isinstance(n, str) and n in metadata}
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its metadata are not those of torchao: {error}") from error
    return {n: x for n, x in parsed.items() if isinstance(x, dict) and x.get("_type") != "Tensor"}
