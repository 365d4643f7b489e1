"""Quantized layers in the place of a model's.

Owns `quantize_`, and `QuantizedLinear`, the layer that it puts in the place of `torch.nn.Linear` and of the `Conv1D` of
Hugging Face's models. Their weights are buffers, so that `state_dict` and safetensors keep them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portmm.arrays.pages import adjoining
from portmm.errors import PortmmError
from portmm.torch import operators  # noqa: F401 - registers portmm::quantized_linear
from portmm.torch.weights import KINDS, bf16_values, int4_values, int8_values

if TYPE_CHECKING:
    from collections.abc import Callable

GROUPS = (128, 64, 32)
"""Inputs of a group of an int4 weight: the largest that divides them."""


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight, for inference.

    Attributes:
        in_features: inputs.
        out_features: outputs.
        kind: "int8-dynamic", "int4", "int4-dynamic" or "bf16".
        group: inputs of a group that has a scale, of an int4 weight.
        weight: int8 or bfloat16 (outputs, inputs), or two int4 values in a byte (outputs, inputs / 2).
        scales: float32 (outputs,), or (outputs, groups).
        offsets: float32 (outputs, groups), of an int4 weight.
        bias: (outputs,), or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, group: int = 0) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kind, self.group = kind, group
        scales = offsets = None
        if kind == "bf16":
            values = bf16_values(weight)
        elif kind == "int8-dynamic":
            values, scales = int8_values(weight)
        else:
            self.group = group or next((g for g in GROUPS if self.in_features % g == 0), self.in_features)
            values, scales, offsets = int4_values(weight, self.group)
        self.register_buffer("weight", values)
        self.register_buffer("scales", scales)
        self.register_buffer("offsets", offsets)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        """Move the buffers: a conversion of a model to another type of floats is one of the bias alone."""
        kept = self.weight, self.scales, self.offsets
        super()._apply(fn, recurse)
        for name, was in zip(("weight", "scales", "offsets"), kept, strict=True):
            now = getattr(self, name)
            if now is not None and now.dtype != was.dtype:
                setattr(self, name, was.to(now.device))
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs for rows of inputs."""
        result: torch.Tensor = torch.ops.portmm.quantized_linear(
            x, self.weight, self.scales, self.offsets, self.bias, self.kind, self.group
        )
        return result

    def extra_repr(self) -> str:
        """Sizes and kind."""
        group = f", group={self.group}" if self.group else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind!r}{group}"


def quantize_(
    model: nn.Module,
    kind: str,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,  # noqa: A002 - as in PyTorch's own
    group: int = 0,
) -> nn.Module:
    """Quantize the linear layers of a model, in place.

    Layers are `torch.nn.Linear` (projections of queries, keys and values in one among them) and the `Conv1D` of Hugging
    Face's models, but no subclasses. Layers that are not quantized keep a weight that they share with others.

    Args:
        model: a module; a linear layer itself cannot be replaced in place.
        kind: "int8-dynamic": int8 weights by output, activations rounded to int8 by row. "int4": int4 weights in groups
            of inputs, multiplied as floats; "int4-dynamic" rounds activations to int8, too. "bf16": weights rounded to
            bfloat16, multiplied by activations of their own type.
        filter: a function of the name and the layer that is true for those to quantize; all by default.
        group: inputs that share a scale of an int4 weight; by default the largest of 128, 64 and 32 that divides them.

    Returns:
        The model.

    Raises:
        PortmmError: the kind is unknown, `group` is no number of inputs, the model is no module or is a linear layer,
            or a layer cannot have this kind or has values that are not finite.
    """
    if kind not in KINDS:
        raise PortmmError(f"kind is {kind!r}; weights are quantized to {', '.join(KINDS)}")
    if not isinstance(model, nn.Module):
        raise PortmmError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if _weight(model) is not None:
        raise PortmmError("the model is a linear layer, which cannot be replaced in place; put it into a Sequential")
    if type(group) is not int or group < 0:
        raise PortmmError(
            f"group is {group!r}; use a number of inputs, or 0 for the largest of {GROUPS} that divides it"
        )
    with adjoining():
        for prefix, parent in [*model.named_modules()]:
            for name, layer in [*parent.named_children()]:
                path = f"{prefix}.{name}" if prefix else name
                weight = _weight(layer)
                if weight is not None and (filter is None or filter(path, layer)):
                    setattr(parent, name, _quantized(weight, layer.bias, path, kind, group))
    return model


def _quantized(weight: torch.Tensor, bias: Any, path: str, kind: str, group: int) -> QuantizedLinear:
    """The quantized layer of a linear one.

    Raises:
        PortmmError: it cannot have this kind, or has values that are not finite.
    """
    if kind.startswith("int4") and weight.shape[1] % 2:
        raise PortmmError(
            f"{path} has {weight.shape[1]} inputs, not an even number, as int4 needs: leave it out by filter"
        )
    try:
        return QuantizedLinear(weight, bias, kind, group)
    except ValueError as error:
        raise PortmmError(f"{path}: {error}") from error


def _weight(layer: Any) -> torch.Tensor | None:
    """The weight (outputs, inputs) of a linear layer; None for another layer."""
    if type(layer) is nn.Linear:
        return layer.weight.detach()
    hf = type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")
    return layer.weight.detach().t() if hf else None
