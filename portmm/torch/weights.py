"""Weights of quantized layers, packed.

Owns the forms in which layers keep them, tensors that every library can store, and `packed`, their panels: made at the
first product, and again when a tensor was changed.

An int8 weight is (outputs, inputs) with one scale for each output. An int4 weight has two values in a byte, those of
inputs 2 i and 2 i + 1 in the low and the high half, (outputs, inputs / 2), and scales and offsets of groups of inputs,
(outputs, groups): a weight is scale * value + offset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import numpy as np
import torch

from portmm.arrays.interop import as_numpy
from portmm.arrays.pages import adjoining_empty, scratch_empty
from portmm.ops.epilogues import NAMES
from portmm.ops.prepack import pack
from portmm.ops.rowwise import over_rows
from portmm.runtime.cpu import joiner
from portmm.spec import elementwise as ew
from portmm.spec.dtype import ZERO_CODE
from portmm.weights.quantized import SMALLEST_SCALE, Quantized

KINDS = ("int8-dynamic", "int4", "int4-dynamic", "bf16")
BLOCK = 1 << 22
"""Values that are quantized at a time: with fewer, rows of each block wait for memory anew (Granite Rapids)."""
PIECE = 1 << 15
"""Values of four bits that are joined in bytes at a time: they stay in L2 between the steps."""


_packed: dict[int, tuple[Any, tuple[Any, ...], dict[Any, Any]]] = {}


def packed(codes: Any, scales: Any, offsets: Any, kind: str, group: int, activations: Any) -> Any:
    """The panels of a weight for activations of a type."""
    return kept((codes, scales, offsets), activations, lambda: _pack(codes, scales, offsets, kind, group, activations))


def kept(tensors: tuple[Any, ...], key: Any, make: Callable[[], Any]) -> Any:
    """A value of tensors, the first of which it lives with, and of a key: made once, and again when they change."""
    state = tuple([(id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors if x is not None])  # noqa: SLF001
    owner = tensors[0]
    number = id(owner)
    alive, known, values = _packed.get(number, (None, (), {}))
    if alive is None or alive() is not owner or known != state:
        values = {}
        _packed[number] = ref(owner, lambda _: _packed.pop(number, None)), state, values
    if key not in values:
        values[key] = make()
    return values[key]


def _pack(codes: Any, scales: Any, offsets: Any, kind: str, group: int, activations: Any) -> Any:
    values = as_numpy(codes.detach()).T
    if kind == "bf16":
        return pack(values, activations=as_numpy(torch.empty(0, dtype=activations)).dtype)
    if kind == "int8-dynamic":
        return pack(values, activations=np.int8)
    return pack(record(codes, scales, offsets, group))


def record(codes: Any, scales: Any, offsets: Any, group: int) -> Quantized:
    """The record of an int4 weight, (inputs, outputs)."""
    both = as_numpy(codes.detach())
    values = np.empty((both.shape[1] * 2, both.shape[0]), np.uint8)
    values[::2], values[1::2] = (both & 15).T, (both >> 4).T
    steps, zeros = (np.ascontiguousarray(as_numpy(x.detach()).T) for x in (scales, offsets))
    return Quantized(values, steps, zeros, 4, group)


def bf16_values(weight: torch.Tensor) -> torch.Tensor:
    """A weight rounded to bfloat16."""
    if weight.device.type != "cpu":
        return weight.detach().to(torch.bfloat16)
    values = _empty(weight, weight.shape, np.uint16).view(torch.bfloat16)
    if _scratch(weight) is not None or weight.is_meta or not weight.numel():
        return values.copy_(weight.detach())
    into = as_numpy(values)
    over_rows(_same, (as_numpy(weight.detach()),), NAMES, into, into.dtype)
    return values


def int8_values(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 weight (outputs, inputs) and its scales, each by the largest magnitude of a row.

    Raises:
        ValueError: a value is not finite.
    """
    scratch = _scratch(weight)
    codes, scales = _empty(weight, weight.shape, np.int8), torch.zeros(weight.shape[:1], device=weight.device)
    step = max(1, len(weight)) if scratch is None else _step(weight)
    for rows, values in _blocks(weight, scratch, step):
        _rounded(ew.quantize_rows, values, codes[rows], scales[rows])
    _check_scales(scales[:, None])
    return codes, scales


def int4_values(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An int4 weight in bytes, its scales, and its offsets; values are within one of those of `portmm.quantize`.

    Raises:
        ValueError: a value is not finite, or too large for a scale.
    """
    outputs, inputs = weight.shape
    scratch, block = _scratch(weight), (min(_step(weight), outputs), inputs)
    unpacked = torch.from_numpy(scratch_empty(math.prod(block)).reshape(block))
    both = _empty(weight, (outputs, inputs // 2), np.uint8)
    scales = _empty(weight, (outputs, -(-inputs // max(group, 1))), np.float32)
    for rows, values in _blocks(weight, scratch, _step(weight)):
        codes = unpacked[: len(values)]
        if inputs % group == 0:
            groups = -1, group
            _rounded(_int4_rows, values.view(groups), codes.view(groups), scales[rows].view(-1))
        else:  # the last group is short
            for g, part in enumerate(values.split(group, 1)):
                into, steps = torch.empty(part.shape, dtype=torch.uint8), torch.empty(len(part))
                _rounded(_int4_rows, part.contiguous(), into, steps)
                codes[:, g * group : g * group + part.shape[1]], scales[rows, g] = into, steps
        _join(as_numpy(codes), as_numpy(both[rows]))
    _check_scales(scales)
    return both, scales, torch.mul(scales, -ZERO_CODE, out=_empty(weight, scales.shape, np.float32))


def _join(codes: Any, both: Any) -> None:
    """Write values (rows, n) of a byte each as (rows, n / 2) bytes."""
    join = joiner()
    if join is not None:
        join(codes, both)
        return
    pairs, into = codes.view("<u2").reshape(-1), both.reshape(-1)
    shifted = np.empty(min(PIECE, pairs.size), np.uint16)
    for first in range(0, pairs.size, PIECE):
        # The low byte is a value of an even input, the high byte the next.
        some = pairs[first : first + PIECE]
        high = np.right_shift(some, 4, out=shifted[: some.size])
        np.copyto(into[first : first + PIECE], np.bitwise_or(high, some, out=high), casting="unsafe")


def _empty(weight: torch.Tensor, shape: Any, dtype: Any) -> torch.Tensor:
    """A new tensor in memory of NumPy, which asks for huge pages: a page takes longer than to fill it."""
    if weight.is_meta:
        return torch.from_numpy(np.empty(0, dtype)).new_empty(tuple(shape), device="meta")
    values = adjoining_empty(math.prod(shape), dtype)
    return torch.from_numpy(np.empty(tuple(shape), dtype) if values is None else values.reshape(tuple(shape)))


def _step(weight: torch.Tensor) -> int:
    """Rows of a block."""
    return max(1, BLOCK // max(int(weight.shape[1]), 1))


def _scratch(weight: torch.Tensor) -> torch.Tensor | None:
    """Memory for the float32 values of a block, where those of the weight cannot be read.

    It is allocated before results, so that the next weight finds it free again below them.
    """
    if weight.is_meta or (weight.dtype is torch.float32 and weight.is_contiguous()):
        return None
    return torch.empty((min(_step(weight), weight.shape[0]), weight.shape[1]))


def _blocks(weight: torch.Tensor, scratch: torch.Tensor | None, step: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows of a weight at a time, and their float32 values: little memory beside the weight's."""
    none = weight.is_meta or not weight.shape[1]
    for first in range(0, 0 if none else weight.shape[0], step):
        rows = slice(first, first + step)
        values = weight[rows].detach()
        yield rows, values if scratch is None else scratch[: len(values)].copy_(values)


def _rounded(function: Callable[[Any], Any], values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Codes and scales of rows by a function of them."""
    (_, steps), _ = over_rows(function, (as_numpy(values),), NAMES, as_numpy(codes), np.float32)
    as_numpy(scales)[...] = steps[:, 0]


def _same(x: Any) -> Any:
    return x


def _int4_rows(x: Any) -> tuple[Any, Any]:
    """Rows as int4 values from 1 to 15, of which 8 is zero, and their scales."""
    scale = ew.maximum(ew.max(abs(x)) / (ZERO_CODE - 1), SMALLEST_SCALE)
    return ew.cast(x * (1.0 / scale) + float(ZERO_CODE), np.uint8), scale


def _check_scales(scales: torch.Tensor) -> None:
    """Refuse scales by which values are not finite.

    Raises:
        ValueError: there is one.
    """
    if scales.is_meta or not scales.numel() or math.isfinite(float(scales.max()) * (2 * ZERO_CODE - 1)):
        return
    bad = ~torch.isfinite(scales * (2 * ZERO_CODE - 1))
    if bad.any():
        row, group = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"group {group} of output {row} has values that are not finite or exceed 1.5e38: only finite weights can "
            "be quantized"
        )
