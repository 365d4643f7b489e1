"""Convolutions with quantized filters.

Owns `portmm::quantized_conv`, which quantized layers call, its place among the operators of a graph, and the matrix of
filters that is quantized: (outputs, depth), where depth counts the channels of a group within taps, as kernels with
channels last sum them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._prims_common import suggest_memory_format
from torch.library import custom_op

from portmm.arrays.interop import as_numpy, as_tensor
from portmm.ops.convolution import conv
from portmm.ops.convolution_weights import PackedConv, pack_conv
from portmm.ops.epilogues import NAMES
from portmm.ops.int4_panels import pack_int4
from portmm.ops.rowwise import over_rows
from portmm.spec import elementwise as ew
from portmm.torch import convolutions
from portmm.torch.aten import HANDLERS, Unsupported
from portmm.torch.weights import kept, record
from portmm.trace.closures import traced_through
from portmm.trace.placeholders import Array

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensor = Any
else:
    Tensor = torch.Tensor  # `custom_op` reads it

QUANTIZED = "portmm.quantized_conv.default"


def matrix_of(weight: torch.Tensor) -> torch.Tensor:
    """Filters (outputs, channels of a group, *kernel) as (outputs, depth)."""
    return weight.movedim(1, -1).reshape(weight.shape[0], -1)


def _panels(codes: Any, scales: Any, offsets: Any, kind: str, group: int, kernel: list[int], groups: int,
            activations: Any) -> PackedConv:  # fmt: skip
    """Filters in panels for images with channels last of a type."""
    outputs = codes.shape[0]
    layout, images = convolutions.LAYOUTS[len(kernel) + 2], as_numpy(torch.empty(0, dtype=activations)).dtype
    depth = codes.shape[1] * (2 if kind == "int4" else 1)
    shape = (outputs, depth // math.prod(kernel), *kernel)
    if kind != "int4":
        filters = codes.detach().unflatten(1, (*kernel, shape[1])).movedim(-1, 1)
        return pack_conv(as_numpy(filters), groups=groups, layout=layout, activations=images)
    each = outputs // groups
    parts = [slice(g * each, (g + 1) * each) for g in range(groups)]
    weight = tuple([pack_int4(record(codes[part], scales[part], offsets[part], group)) for part in parts])
    return PackedConv(weight, shape, groups, layout, np.dtype(np.uint8))


def _filters(codes: Any, scales: Any, offsets: Any, kind: str, group: int, kernel: list[int], groups: int,
             activations: Any) -> PackedConv:  # fmt: skip
    """Packed panels of the filters, made once."""
    images = torch.int8 if kind == "int8-dynamic" else activations
    make = lambda: _panels(codes, scales, offsets, kind, group, kernel, groups, images)  # noqa: E731
    return kept((codes, scales, offsets), (images, groups, *kernel), make)


def _epilogue(by_image: Any, factor: Any, added: Any, residual: Any, *, relu: bool) -> Callable[..., Any]:
    """Sums times a factor of the image and one of the channel, and what follows."""

    @traced_through
    def epilogue(acc: Any, i: Any) -> Any:
        y = acc if factor is None else acc * (factor[i.n] if by_image is None else by_image[i.b] * factor[i.n])
        y = y if added is None else y + added[i.n]
        y = y if residual is None else y + residual[i.b, i.m, i.n]
        return ew.relu(y) if relu else y

    return epilogue


def _convolved(x: Any, panels: PackedConv, factor: Any, added: Any, residual: Any, options: dict[str, Any], *,
               relu: bool = False) -> Any:  # fmt: skip
    """A convolution of images with channels last; those for filters of int8 are rounded to int8, each by its scale."""
    x = np.ascontiguousarray(x)
    dtype, by_image = x.dtype, None
    if panels.dtype == np.int8:
        codes = np.empty(x.shape, np.int8)
        rows = x.reshape(len(x), -1)
        (_, steps), _ = over_rows(ew.quantize_rows, (rows,), NAMES, codes.reshape(rows.shape), np.float32)
        x, by_image = codes, np.ascontiguousarray(steps[:, 0])
    plain = factor is None and added is None and residual is None and not relu
    epilogue = None if plain else _epilogue(by_image, factor, added, residual, relu=relu)
    return conv(x, panels, layout=panels.layout, groups=panels.groups, epilogue=epilogue, dtype=dtype, **options)


def _options(stride: list[int], padding: list[int], dilation: list[int]) -> dict[str, Any]:
    pairs = tuple(zip(padding[::2], padding[1::2], strict=True))
    return {"stride": tuple(stride), "padding": pairs, "dilation": tuple(dilation)}


@custom_op("portmm::quantized_conv", mutates_args=())
def _quantized_conv(
    x: Tensor, codes: Tensor, scales: Tensor | None, offsets: Tensor | None, bias: Tensor | None, kind: str, group: int,
    kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    like = suggest_memory_format(x)
    images = x.detach()
    if not images.numel():
        return _empty(x, codes, kernel, stride, padding, dilation)
    panels = _filters(codes, scales, offsets, kind, group, kernel, groups, x.dtype)
    factor = as_numpy(scales.detach()) if kind == "int8-dynamic" and scales is not None else None
    added = None if bias is None else as_numpy(bias.detach().float())
    y = _convolved(as_numpy(images.movedim(1, -1)), panels, factor, added, None, _options(stride, padding, dilation))
    return as_tensor(y).movedim(-1, 1).contiguous(memory_format=like)


def _empty(x: Tensor, codes: Tensor, kernel: list[int], stride: list[int], padding: list[int],
           dilation: list[int]) -> Tensor:  # fmt: skip
    each = zip(x.shape[2:], padding[::2], padding[1::2], dilation, kernel, stride, strict=True)
    extents = [(n + before + after - d * (k - 1) - 1) // s + 1 for n, before, after, d, k, s in each]
    shape = (x.shape[0], codes.shape[0], *extents)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=suggest_memory_format(x))


@_quantized_conv.register_fake
def _(
    x: Tensor, codes: Tensor, scales: Tensor | None, offsets: Tensor | None, bias: Tensor | None, kind: str, group: int,
    kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    del scales, offsets, bias, kind, group, groups
    return _empty(x, codes, kernel, stride, padding, dilation)


def _translated(
    t: Any, x: Any, codes: Any, scales: Any, offsets: Any, bias: Any, kind: str, group: int, kernel: Any, stride: Any,
    padding: Any, dilation: Any, groups: int,
) -> Any:  # fmt: skip
    """The layer in a graph, with the normalisation, the residual and the ReLU that follow it."""
    images = t.array(x)
    if any(isinstance(y, Array) for y in (codes, scales, offsets, bias)):
        raise Unsupported("filters that are no parameters")
    if images.dtype.name not in ("float32", "float16", "bfloat16") or 0 in images.shape:
        raise Unsupported(f"convolutions of {images.dtype} {images.shape}")
    val = t.now.meta["val"]
    shape = tuple(map(t.extent, val.shape))
    tail = convolutions.tail_of(t, t.now, shape, images.dtype)
    tensors = [y for y in (codes, scales, offsets) if y is not None]
    panels = t.constants.panels(
        tensors,
        lambda: _filters(codes, scales, offsets, kind, group, [*kernel], groups, val.dtype),
        "filters", groups, *kernel,
    )  # fmt: skip
    of_bytes = scales if kind == "int8-dynamic" else None
    vectors = [y for y in (of_bytes, bias, *tail.norm[:4]) if y is not None]
    factor, added = None, None
    if vectors:
        factor, added = t.constants.panels(
            vectors, lambda: _vectors(of_bytes, bias, tail.norm), "vectors", *tail.norm[4:]
        )
    options, relu = _options([*stride], [*padding], [*dilation]), tail.relu
    pixels = (shape[0], math.prod(shape[2:]), shape[1])

    def plain(y: Any, residual: Any = None) -> Any:
        more = None if residual is None else residual.reshape(pixels)
        return _convolved(y, panels, factor, added, more, options, relu=relu)

    return convolutions.placed(t, plain, images, tail, shape)


def _vectors(scales: Any, bias: Any, norm: tuple[Any, ...]) -> tuple[Any, Any]:
    """The factor of each channel, and what is added to it; None where there is none."""
    factor = None if scales is None else scales.detach().float()
    added = None if bias is None else bias.detach().float()
    if norm:
        by, shift = convolutions.factors(norm)
        factor = by if factor is None else factor * by
        added = shift if added is None else added * by + shift
    as_vector: Callable[[Any], Any] = lambda y: None if y is None else np.array(as_numpy(y))  # noqa: E731
    return as_vector(factor), as_vector(added)


HANDLERS[QUANTIZED] = _translated
