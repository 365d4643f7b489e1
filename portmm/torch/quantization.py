"""Quantized layers in the place of a model's.

Owns `quantize_`, and the layers that it puts in the place of others: `QuantizedLinear` for `torch.nn.Linear` and the
`Conv1D` of Hugging Face's models, `QuantizedConv` for `torch.nn.Conv1d` to `Conv3d`, and `QuantizedAttention` for
`torch.nn.MultiheadAttention`. Their weights are buffers, so that `state_dict` and safetensors keep them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from portmm.arrays.pages import adjoining
from portmm.errors import PortmmError
from portmm.torch import operators  # noqa: F401 - registers portmm::quantized_linear
from portmm.torch.quantized_convolutions import matrix_of
from portmm.torch.weights import KINDS, bf16_values, int4_values, int8_values

GROUPS = (128, 64, 32)
"""Inputs of a group of an int4 weight: the largest that divides them."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class QuantizedLayer(nn.Module):
    """A layer with one quantized weight, a matrix (outputs, inputs), for inference.

    Attributes:
        kind: "int8-dynamic", "int4", "int4-dynamic" or "bf16".
        group: inputs of a group that has a scale, of an int4 weight.
        weight: int8 or bfloat16 (outputs, inputs), or two int4 values in a byte (outputs, inputs / 2).
        scales: float32 (outputs,), or (outputs, groups).
        offsets: float32 (outputs, groups), of an int4 weight.
        bias: (outputs,), or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, group: int = 0) -> None:
        super().__init__()
        self.kind, self.group = kind, group
        scales = offsets = None
        if kind == "bf16":
            values = bf16_values(weight)
        elif kind == "int8-dynamic":
            values, scales = int8_values(weight)
        else:
            inputs = weight.shape[1]
            self.group = group or next((g for g in GROUPS if inputs % g == 0), inputs)
            values, scales, offsets = int4_values(weight, self.group)
        self.register_buffer("weight", values)
        self.register_buffer("scales", scales)
        self.register_buffer("offsets", offsets)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLayer:
        """Move the buffers: a conversion of a model to another type of floats is one of the bias alone."""
        kept = self.weight, self.scales, self.offsets
        super()._apply(fn, recurse)
        for name, was in zip(("weight", "scales", "offsets"), kept, strict=True):
            now = getattr(self, name)
            if now is not None and now.dtype != was.dtype:
                setattr(self, name, was.to(now.device))
        return self

    def extra_repr(self) -> str:
        """Sizes and kind."""
        group = f", group={self.group}" if self.group else ""
        return f"{self._sizes()}, kind={self.kind!r}{group}"

    def _sizes(self) -> str:
        raise NotImplementedError


class QuantizedLinear(QuantizedLayer):
    """A linear layer with a quantized weight.

    Attributes:
        in_features: inputs.
        out_features: outputs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, group: int = 0) -> None:
        super().__init__(weight, bias, kind, group)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs for rows of inputs."""
        return torch.ops.portmm.quantized_linear(
            x, self.weight, self.scales, self.offsets, self.bias, self.kind, self.group
        )

    def _sizes(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class QuantizedConv(QuantizedLayer):
    """A convolution with quantized filters, over one to three dimensions.

    Its weight is a matrix (outputs, inputs), with the channels of a group within the taps of a filter as inputs. Images
    are rounded to int8 for "int8-dynamic", each by one scale, and multiplied as they are for the other kinds,
    "int4-dynamic" among them.

    Attributes:
        in_channels: channels of the images.
        out_channels: channels of the results.
        kernel_size: extents of a filter.
        stride: of windows.
        padding: zeros before and after the images, a pair for each dimension.
        dilation: distance of taps.
        groups: of channels.
    """

    def __init__(self, layer: Any, kind: str, group: int = 0) -> None:
        super().__init__(matrix_of(layer.weight.detach()), layer.bias, kind, group)
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size, self.stride = layer.kernel_size, layer.stride
        self.dilation, self.groups = layer.dilation, layer.groups
        self.padding = _pairs(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs for images (batch, channels, *extents), or for one image."""
        if x.ndim == len(self.kernel_size) + 1:
            return self.forward(x[None])[0]
        return torch.ops.portmm.quantized_conv(
            x, self.weight, self.scales, self.offsets, self.bias, self.kind.replace("int4-dynamic", "int4"), self.group,
            self.kernel_size, self.stride, self.padding, self.dilation, self.groups,
        )  # fmt: skip

    def _sizes(self) -> str:
        names = ("kernel_size", "stride", "padding", "dilation", "groups")
        return ", ".join([f"{self.in_channels}, {self.out_channels}", *[f"{x}={getattr(self, x)}" for x in names]])


def _pairs(layer: Any) -> list[int]:
    """Zeros before and after the images along each dimension, one pair after the other."""
    if layer.padding == "same":  # as PyTorch has it: one more after than before
        whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [x for n in whole for x in (n // 2, n - n // 2)]
    each = (0,) * len(layer.kernel_size) if layer.padding == "valid" else layer.padding
    return [x for n in each for x in (n, n)]


class QuantizedAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with quantized projections.

    Attributes:
        q: the projection of queries; `k` and `v` are those of keys and values.
        out_proj: that of the results.
        num_heads: heads of attention.
        batch_first: whether operands are (batch, tokens, features) rather than (tokens, batch, features).
        dropout: the share of weights that are dropped in training.
    """

    # `torch.nn.TransformerEncoderLayer` reads them: it does not multiply by the weights of this layer itself.
    _qkv_same_embed_dim = False
    in_proj_bias = None

    def __init__(self, layer: Any, kind: str, group: int = 0) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = layer.embed_dim, layer.num_heads, layer.head_dim
        self.batch_first, self.dropout = layer.batch_first, layer.dropout
        joined = layer.in_proj_weight
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if joined is None else joined.chunk(3)
        biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        self.q, self.k, self.v = (
            QuantizedLinear(w.detach(), b, kind, group) for w, b in zip(weights, biases, strict=True)
        )
        self.out_proj = QuantizedLinear(layer.out_proj.weight.detach(), layer.out_proj.bias, kind, group)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None, need_weights: bool = True,
        attn_mask: torch.Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """The results, and the weights of keys if wanted, as of `torch.nn.MultiheadAttention`.

        Raises:
            PortmmError: attention is causal, and there is no mask.
        """
        if is_causal and attn_mask is None:
            raise PortmmError("is_causal needs attn_mask, as in torch.nn.MultiheadAttention")
        single = query.ndim == 2
        operands = [query, key, value]
        if single:
            operands = [x[None] for x in operands]
        elif not self.batch_first:
            operands = [x.transpose(0, 1) for x in operands]
        layers = (self.q, self.k, self.v)
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for layer, x in zip(layers, operands, strict=True)
        )
        mask = self._mask(key_padding_mask, attn_mask, q, single=single)
        dropout, seen = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = q @ k.mT / math.sqrt(self.head_dim)
            seen = torch.softmax(scores if mask is None else scores + mask, -1)
            seen = nn.functional.dropout(seen, dropout) if dropout else seen
            y = seen @ v
            seen = seen.mean(1) if average_attn_weights else seen
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        y = self.out_proj(y.transpose(1, 2).flatten(-2))
        if single:
            return y[0], None if seen is None else seen[0]
        return y if self.batch_first else y.transpose(0, 1), seen

    def _mask(self, padding: Any, mask: Any, q: torch.Tensor, *, single: bool) -> Any:
        """Both masks as one that is added to scores (batch, heads, queries, keys); None if there are none."""
        added = None
        if mask is not None:
            added = _added(mask, q.dtype)
            added = added.unflatten(0, (-1, self.num_heads)) if added.ndim == 3 else added
        if padding is not None:
            both = _added(padding[None] if single else padding, q.dtype)[:, None, None]
            added = both if added is None else added + both
        return added

    def extra_repr(self) -> str:
        """Sizes."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as floats: booleans are true where a query does not see a key."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def quantize_(
    model: nn.Module,
    kind: str,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,  # noqa: A002 - as in PyTorch's own
    group: int = 0,
) -> nn.Module:
    """Quantize the layers of a model, in place.

    Layers are `torch.nn.Linear` (projections of queries, keys and values in one among them), the `Conv1D` of Hugging
    Face's models, `torch.nn.Conv1d` to `Conv3d` and `torch.nn.MultiheadAttention`, but no subclasses. Convolutions
    whose padding is not of zeros, filters of an odd number of elements for int4, and attention with a bias of keys or
    with zeros as a key stay as they are. Layers that are not quantized keep a weight that they share with others.

    Args:
        model: a module; a layer itself cannot be replaced in place.
        kind: "int8-dynamic": int8 weights by output, activations rounded to int8 by row. "int4": int4 weights in groups
            of inputs, multiplied as floats; "int4-dynamic" rounds activations to int8, too. "bf16": weights rounded to
            bfloat16, multiplied by activations of their own type.
        filter: a function of the name and the layer that is true for those to quantize; all by default.
        group: inputs that share a scale of an int4 weight; by default the largest of 128, 64 and 32 that divides them.

    Returns:
        The model.

    Raises:
        PortmmError: the kind is unknown, `group` is no number of inputs, the model is no module or is a layer,
            or a layer cannot have this kind or has values that are not finite.
    """
    if kind not in KINDS:
        raise PortmmError(f"kind is {kind!r}; weights are quantized to {', '.join(KINDS)}")
    if not isinstance(model, nn.Module):
        raise PortmmError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if _can_be_quantized(model, kind):
        name = type(model).__name__
        raise PortmmError(f"the model is a layer, {name}, which cannot be replaced in place; put it into a Sequential")
    if type(group) is not int or group < 0:
        raise PortmmError(
            f"group is {group!r}; use a number of inputs, or 0 for the largest of {GROUPS} that divides it"
        )
    with adjoining():
        for prefix, parent in [*model.named_modules()]:
            for name, layer in [*parent.named_children()]:
                path = f"{prefix}.{name}" if prefix else name
                if _can_be_quantized(layer, kind) and (filter is None or filter(path, layer)):
                    setattr(parent, name, _quantized(layer, path, kind, group).train(layer.training))
    for layer in model.modules():  # else PyTorch multiplies by weights of floats itself
        if isinstance(layer, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) and _has_quantized(layer):
            layer.activation_relu_or_gelu, layer.use_nested_tensor = 0, False
    return model


def _has_quantized(model: nn.Module) -> bool:
    return any(isinstance(x, (QuantizedLayer, QuantizedAttention)) for x in model.modules())


def _quantized(layer: Any, path: str, kind: str, group: int) -> nn.Module:
    """The quantized layer in the place of another.

    Raises:
        PortmmError: it cannot have this kind, or has values that are not finite.
    """
    weight = _weight(layer)
    if weight is not None and kind.startswith("int4") and weight.shape[1] % 2:
        raise PortmmError(
            f"{path} has {weight.shape[1]} inputs, not an even number, as int4 needs: leave it out by filter"
        )
    try:
        if weight is not None:
            return QuantizedLinear(weight, layer.bias, kind, group)
        other = QuantizedConv if type(layer) in CONVOLUTIONS else QuantizedAttention
        return other(layer, kind, group)
    except ValueError as error:
        raise PortmmError(f"{path}: {error}") from error


def _can_be_quantized(layer: Any, kind: str) -> bool:
    """Whether there is a quantized layer for one."""
    if type(layer) in CONVOLUTIONS:
        odd = kind.startswith("int4") and math.prod(layer.weight.shape[1:]) % 2
        return layer.padding_mode == "zeros" and not odd
    if type(layer) is nn.MultiheadAttention:
        return layer.bias_k is None and layer.bias_v is None and not layer.add_zero_attn
    return _weight(layer) is not None


def _weight(layer: Any) -> torch.Tensor | None:
    """The weight (outputs, inputs) of a linear layer; None for another layer."""
    if type(layer) is nn.Linear:
        return layer.weight.detach()
    hf = type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")
    return layer.weight.detach().t() if hf else None
