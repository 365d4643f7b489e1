"""PyTorch's modules of the models of `model_graphs`, with the weights of their graphs.

run = module_of(Path("bert-base.onnx"))     # a function of tensors by name, as a module
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import model_graphs
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as f

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def arrays_of(path: Path) -> Iterator[Any]:
    """The float constants of a graph with dimensions, in the order in which it was written."""
    for x in onnx.load(path).graph.initializer:
        if x.data_type == onnx.TensorProto.FLOAT and x.dims:
            yield torch.from_numpy(np.array(numpy_helper.to_array(x)))


def _parameters(layer: Any, *values: Any) -> Any:
    for x, y in zip(("weight", "bias"), values, strict=False):
        setattr(layer, x, nn.Parameter(y.contiguous(), requires_grad=False))
    return layer


def _linear(arrays: Iterator[Any], *, swapped: bool = True) -> Any:
    weight, bias = next(arrays), next(arrays)
    weight = weight.T if swapped else weight
    return _parameters(nn.Linear(weight.shape[1], weight.shape[0], device="meta"), weight, bias)


def _norm(arrays: Iterator[Any], eps: float) -> Any:
    weight, bias = next(arrays), next(arrays)
    return _parameters(nn.LayerNorm(weight.shape[0], eps, device="meta"), weight, bias)


class Layer(nn.Module):
    """A layer of an encoder: norms after additions, as BERT's, or before, as ViT's."""

    def __init__(self, arrays: Iterator[Any], e: Any, *, before: bool) -> None:
        super().__init__()
        self.heads, self.before = e.heads, before
        first = _norm(arrays, e.eps) if before else None
        parts = [_linear(arrays) for _ in range(3)]
        weight, bias = (torch.cat([getattr(x, n) for x in parts]) for n in ("weight", "bias"))
        self.qkv = _parameters(nn.Linear(weight.shape[1], weight.shape[0], device="meta"), weight, bias)
        self.output = _linear(arrays)
        self.second = _norm(arrays, e.eps)
        self.up, self.down = _linear(arrays), _linear(arrays)
        self.first = first or _norm(arrays, e.eps)

    def attended(self, x: Any, mask: Any) -> Any:
        """Attention of the rows of x among each other."""
        n, rows, width = x.shape
        q, k, v = self.qkv(x).reshape(n, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = f.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.output(y.transpose(1, 2).reshape(n, rows, width))

    def forward(self, x: Any, mask: Any = None) -> Any:
        """The layer's result."""
        if self.before:
            x = x + self.attended(self.first(x), mask)
            return x + self.down(f.gelu(self.up(self.second(x))))
        x = self.second(x + self.attended(x, mask))
        return self.first(x + self.down(f.gelu(self.up(x))))


class Bert(nn.Module):
    """An encoder of token ids."""

    def __init__(self, arrays: Iterator[Any], e: Any) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(next(arrays), requires_grad=False) for _ in range(3)])
        self.norm = _norm(arrays, e.eps)
        self.layers = nn.ModuleList([Layer(arrays, e, before=False) for _ in range(e.layers)])

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
        """States of the last layer."""
        tokens, types, places = self.tables
        x = self.norm(tokens[input_ids] + types[token_type_ids] + places[: input_ids.shape[1]])
        mask = ((1 - attention_mask[:, None, None].to(x.dtype)) * -10000.0).expand(-1, 1, input_ids.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Vit(nn.Module):
    """A vision transformer."""

    def __init__(self, arrays: Iterator[Any], e: Any) -> None:
        super().__init__()
        weight, bias = next(arrays), next(arrays)
        self.patches = _parameters(nn.Conv2d(3, e.width, weight.shape[2], weight.shape[2], device="meta"), weight, bias)
        self.tables = nn.ParameterList([nn.Parameter(next(arrays), requires_grad=False) for _ in range(2)])
        self.layers = nn.ModuleList([Layer(arrays, e, before=True) for _ in range(e.layers)])
        self.norm = _norm(arrays, e.eps)
        self.head = _linear(arrays, swapped=False)

    def forward(self, image: Any) -> Any:
        """Logits."""
        first, places = self.tables
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([first.expand(len(x), -1, -1), x], 1) + places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Resnet(nn.Module):
    """ResNet-50, its batch norms folded."""

    def __init__(self, arrays: Iterator[Any]) -> None:
        super().__init__()

        def conv(stride: int = 1) -> Any:
            weight, bias = next(arrays), next(arrays)
            outside, inside, kernel, _ = weight.shape
            layer = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, device="meta")
            return _parameters(layer, weight, bias)

        self.first = conv(2)
        self.blocks = nn.ModuleList()
        for stage, (_, count) in enumerate(model_graphs.STAGES):
            for block in range(count):
                stride = 2 if stage and not block else 1
                self.blocks.append(nn.ModuleList([conv(), conv(stride), conv(), *([] if block else [conv(stride)])]))
        self.head = _linear(arrays, swapped=False)

    def forward(self, image: Any) -> Any:
        """Logits."""
        x = f.max_pool2d(f.relu(self.first(image)), 3, 2, 1)
        for block in self.blocks:
            y = block[2](f.relu(block[1](f.relu(block[0](x)))))
            x = f.relu(y + (block[3](x) if len(block) > 3 else x))
        return self.head(x.mean((2, 3)))


MODULES = {
    "minilm": lambda a: Bert(a, model_graphs.MINILM),
    "bert-base": lambda a: Bert(a, model_graphs.BERT_BASE),
    "vit-b16": lambda a: Vit(a, model_graphs.VIT_B16),
    "resnet50": lambda a: Resnet(a).to(memory_format=torch.channels_last),
}


def module_of(path: Path) -> Any:
    """The module of the model in a file.

    Raises:
        ImportError: there is none.
    """
    if path.stem not in MODULES:
        raise ImportError(f"{path.stem} has no module")
    return MODULES[path.stem](arrays_of(path)).eval()
