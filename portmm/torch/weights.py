"""Weights of quantized layers, packed.

Owns the forms in which layers keep them, tensors that every library can store, and `packed`, their panels: made at the
first product, and again when a tensor was changed.

An int8 weight is (outputs, inputs) with one scale for each output. An int4 weight has two values in a byte, those of
inputs 2 i and 2 i + 1 in the low and the high half, (outputs, inputs / 2), and scales and offsets of groups of inputs,
(outputs, groups): a weight is scale * value + offset.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import numpy as np
import torch

from portmm.arrays.interop import as_numpy
from portmm.ops.prepack import pack
from portmm.weights.quantized import Quantized, quantize

KINDS = ("int8-dynamic", "int4", "int4-dynamic", "bf16")
LEAST = 1.5e-36
"""The magnitude below which a row of a weight is zeros."""


_packed: dict[int, tuple[Any, tuple[Any, ...], dict[Any, Any]]] = {}


def packed(codes: Any, scales: Any, offsets: Any, kind: str, group: int, activations: Any) -> Any:
    """The panels of a weight for activations of a type."""
    tensors = [x for x in (codes, scales, offsets) if x is not None]
    state = tuple([(id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors])  # noqa: SLF001
    key = id(codes)
    alive, known, panels = _packed.get(key, (None, (), {}))
    if alive is None or alive() is not codes or known != state:
        panels = {}
        _packed[key] = ref(codes, lambda _: _packed.pop(key, None)), state, panels
    if activations not in panels:
        panels[activations] = _pack(codes, scales, offsets, kind, group, activations)
    return panels[activations]


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


def int8_values(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 weight (outputs, inputs) and its scales, each by the largest magnitude of a row."""
    rows = weight.detach().float()
    most = rows.abs().amax(1)
    inverse = torch.where(most >= LEAST, 127 / most.clamp(min=LEAST), 0.0)
    return (rows * inverse[:, None]).round().clamp(-127, 127).to(torch.int8), most / 127


def int4_values(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An int4 weight in bytes, its scales, and its offsets."""
    q = quantize(as_numpy(weight.detach().float().t()), bits=4, group=group)
    both = (q.codes[::2] | (q.codes[1::2] << 4)).T
    return tuple([torch.from_numpy(np.array(x, order="C")) for x in (both, q.scales.T, q.offsets.T)])
