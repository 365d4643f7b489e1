"""Operators of `torch.library`: products, convolutions and attention of portmm with gradients.

Owns `matmul`, `linear`, `conv` and `attention` of tensors, and `portmm::quantized_linear`, which quantized layers call.
They have implementations for real and for fake tensors, and formulas of their gradients, so that they may be compiled,
exported and differentiated twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.library import custom_op

from portmm.errors import ConvolutionError
from portmm.ops.attention import attention as array_attention
from portmm.ops.convolution import conv as array_conv
from portmm.ops.linear import linear as array_linear
from portmm.ops.matmul import matmul as array_matmul
from portmm.torch.convolution_gradients import LAYOUTS, conv_filter_gradient, conv_input_gradient
from portmm.torch.weights import packed
from portmm.trace.closures import traced_through

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensor = Any
else:
    Tensor = torch.Tensor  # `custom_op` reads it


@custom_op("portmm::matmul", mutates_args=())
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return array_matmul(a.detach(), b.detach())


@_matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    c = torch.matmul(a, b)
    return c.new_empty(c.shape)


def _matmul_backward(ctx: Any, g: Tensor) -> tuple[Any, Any]:
    a, b = ctx.saved_tensors
    first, second = a.ndim == 1, b.ndim == 1
    g = g.unsqueeze(-1) if second else g
    g = g.unsqueeze(-2) if first else g
    left, right = a.unsqueeze(0) if first else a, b.unsqueeze(1) if second else b
    of_a = _reduced(matmul(g, right.mT), left).reshape(a.shape) if ctx.needs_input_grad[0] else None
    of_b = _reduced(matmul(left.mT, g), right).reshape(b.shape) if ctx.needs_input_grad[1] else None
    return of_a, of_b


def _reduced(g: Tensor, like: Tensor) -> Tensor:
    """A gradient summed over the dimensions along which an operand was broadcast."""
    return g.sum_to_size(like.shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    ctx.save_for_backward(*inputs[:2])


_matmul.register_autograd(_matmul_backward, setup_context=_save)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of two tensors, as `torch.matmul`, with gradients.

    Args:
        a: (..., m, k) or (k,), of the types of `portmm.matmul`.
        b: (..., k, n) or (k,).

    Returns:
        (..., m, n).
    """
    return torch.ops.portmm.matmul(a, b)


def _biased(bias: Tensor) -> Callable[..., Any]:
    """An epilogue that adds a bias by column."""

    @traced_through
    def epilogue(acc: Any, i: Any) -> Any:
        return acc + bias[i.n]

    return epilogue


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer, as `torch.nn.functional.linear`, with gradients.

    Args:
        x: (..., k).
        weight: (n, k).
        bias: (n,).

    Returns:
        (..., n).
    """
    y = matmul(x, weight.t())
    return y if bias is None else y + bias


# -- convolution -----------------------------------------------------------------------

OPTIONS = ("stride", "padding", "dilation")


@custom_op("portmm::conv", mutates_args=())
def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    narrow = bias is not None and x.dtype is not torch.float64  # expressions of kernels are in float32
    epilogue = _biased(bias.detach()) if bias is not None and narrow else None
    y = array_conv(x.detach(), weight.detach(), layout=LAYOUTS[x.ndim], epilogue=epilogue, **options)
    return y if bias is None or narrow else y + bias.detach().reshape(-1, *(1,) * (x.ndim - 2))


@_conv.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    y = torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return x.new_empty(y.shape)


def _save_conv(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    x, weight, bias, *ctx.options = inputs
    del bias
    ctx.save_for_backward(x, weight)


def _conv_backward(ctx: Any, g: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    of_x = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = conv_input_gradient(g, weight, list(x.shape[2:]), *ctx.options)
    if ctx.needs_input_grad[1]:
        of_weight = conv_filter_gradient(x, g, list(weight.shape[2:]), *ctx.options)
    if ctx.needs_input_grad[2]:
        of_bias = g.sum([i for i in range(g.ndim) if i != 1])
    return of_x, of_weight, of_bias, None, None, None, None


_conv.register_autograd(_conv_backward, setup_context=_save_conv)


def _extents(name: str, value: Any, dimensions: int) -> list[int]:
    """An option with a number for each dimension.

    Raises:
        ConvolutionError: it is neither a number nor as many.
    """
    values = [value] * dimensions if isinstance(value, int) else value
    if not isinstance(values, (list, tuple)) or len(values) != dimensions:
        raise ConvolutionError(f"{name} is {value!r}; pass a whole number, or {dimensions} of them")
    return list(values)


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """A convolution over one to three dimensions, as `torch.nn.functional.conv2d`, with gradients.

    Args:
        x: images (batch, channels, *extents).
        weight: filters (outputs, channels of a group, *kernel).
        bias: (outputs,).
        stride: of windows: a number, or one for each dimension.
        padding: zeros on both sides, likewise.
        dilation: distance of taps, likewise.
        groups: of channels.

    Returns:
        (batch, outputs, *extents).

    Raises:
        ConvolutionError: shapes or options do not fit together.
    """
    if x.ndim not in LAYOUTS:
        raise ConvolutionError(f"x has {x.ndim} dimensions; images have 3 to 5: (batch, channels, *extents)")
    lists = [_extents(*option, x.ndim - 2) for option in zip(OPTIONS, (stride, padding, dilation), strict=True)]
    return torch.ops.portmm.conv(x, weight, bias, *lists, groups)


# -- attention -------------------------------------------------------------------------


@custom_op("portmm::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if q.dtype is torch.float64:
        weights, sums = _weights(q, k, mask, causal, scale)
        return torch.matmul(weights, _spread(v, q)), sums
    if mask is None:
        options: dict[str, Any] = {"scale": scale}
    else:
        added = mask.detach().broadcast_to((*q.shape[:-1], k.shape[-2])).reshape(-1, *q.shape[-3:-1], k.shape[-2])

        @traced_through
        def score(s: Any, i: Any) -> Any:
            return s * scale + added[i.b, i.h, i.q, i.kv]

        options = {"score": score}
    operands = [x.detach() for x in (q, k, v)]
    return array_attention(*operands, causal=causal, offset=0 if causal else None, return_lse=True, **options)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    del k, mask, causal, scale
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=kind)


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values once for each head of the queries."""
    return x if x.shape[-3] == q.shape[-3] else x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    s = matmul(q, _spread(k, q).mT) * scale
    s = s if mask is None else s + mask
    if causal:
        later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(later, -math.inf)
    return s


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The softmax of scores, zeros for a query without keys, and the logarithms of its divisors."""
    s = _scores(q, k, mask, causal, scale)
    sums = torch.logsumexp(s, -1)
    return torch.where(torch.isneginf(sums)[..., None], 0.0, torch.exp(s - sums[..., None])), sums


def _save_attention(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, output[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _attention_backward(ctx: Any, g: Tensor, _: Any) -> Any:
    q, k, v, mask, y, sums = ctx.saved_tensors
    # The derivative of softmax: ds = p * (dp - sum(dp * p)), and the sum is that of g * y along a row.
    s = _scores(q, k, mask, ctx.causal, ctx.scale)
    p = torch.where(torch.isneginf(sums)[..., None], 0.0, torch.exp(s - sums[..., None])).to(q.dtype)
    ds = p * (matmul(g, _spread(v, q).mT) - (g * y).sum(-1, keepdim=True))
    of_q = matmul(ds, _spread(k, q)) * ctx.scale
    of_k = _gathered(matmul(ds.mT, q) * ctx.scale, k)
    of_v = _gathered(matmul(p.mT, g), v)
    of_mask = _reduced(ds, mask) if mask is not None and ctx.needs_input_grad[3] else None
    return of_q, of_k, of_v, of_mask, None, None


def _gathered(g: Tensor, like: Tensor) -> Tensor:
    """A gradient of keys or values, summed over the heads of queries that share them."""
    if g.shape[-3] == like.shape[-3]:
        return g
    heads = like.shape[-3]
    return g.unflatten(-3, (heads, g.shape[-3] // heads)).sum(-3)


_attention.register_autograd(_attention_backward, setup_context=_save_attention)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention, as `torch.nn.functional.scaled_dot_product_attention`, with gradients.

    Args:
        q: queries (..., heads, queries, d).
        k: keys (..., heads of keys, keys, d); consecutive heads of queries share one.
        v: values (..., heads of keys, keys, dv).
        mask: booleans, true where a query sees a key, or floats that are added to the scores.
        causal: query i sees the keys up to i.
        scale: the factor of products, 1 / sqrt(d) by default.

    Returns:
        (..., heads, queries, dv); zeros for a query that sees no key.
    """
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(q.dtype)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return torch.ops.portmm.attention(q, k, v, mask, causal, factor)[0]


# -- quantized layers ------------------------------------------------------------------


@custom_op("portmm::quantized_linear", mutates_args=())
def _quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor | None, offsets: Tensor | None, bias: Tensor | None, kind: str, group: int
) -> Tensor:
    if x.ndim == 1:  # an epilogue takes matrices
        return _quantized_linear(x[None], codes, scales, offsets, bias, kind, group)[0]
    weight = packed(codes, scales, offsets, kind, group, x.dtype)
    rows = x.detach()
    if kind.endswith("dynamic"):
        steps: dict[str, Any] = {"w_scale": scales} if kind == "int8-dynamic" else {}
        return array_linear(rows, weight, bias, dynamic=True, dtype=x.dtype, **steps)
    if bias is None:
        return array_matmul(rows, weight).to(x.dtype)
    return array_matmul(rows, weight, epilogue=_biased(bias.detach())).to(x.dtype)


@_quantized_linear.register_fake
def _(
    x: Tensor, codes: Tensor, scales: Tensor | None, offsets: Tensor | None, bias: Tensor | None, kind: str, group: int
) -> Tensor:
    del scales, offsets, bias, kind, group
    return x.new_empty((*x.shape[:-1], codes.shape[0]))
