"""A step of Stable Diffusion 1.5's U-Net with seeded random weights: its ONNX graph, and PyTorch's module.

The graph is that of diffusers' module of this configuration, operator by operator as exporters write it; its arrays
have the names of the module's parameters. Only the module needs the packages diffusers and torch; a model takes 3.5 GB
of disk.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from graph_writer import FileWriter, gelu
from onnx import TensorProto, helper

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "sample_size": 64, "in_channels": 4, "out_channels": 4, "layers_per_block": 2, "cross_attention_dim": 768,
    "attention_head_dim": 8, "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
}  # fmt: skip
"""Of the U-Net of Stable Diffusion 1.5, for images of 512 by 512."""
SMALL = {
    **CONFIG, "sample_size": 8, "layers_per_block": 1, "block_out_channels": (32, 64), "cross_attention_dim": 32,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
"""Of one with few channels and blocks, for tests."""
NAMES = ("sample", "timestep", "encoder_hidden_states")
TOKENS = 77
NORM_GROUPS = 32


def feeds(config: Any = None, seed: int = 1) -> dict[str, Any]:
    """Inputs of a step: latent images, the time, and the states of 77 tokens."""
    c, rng = config or CONFIG, np.random.default_rng(seed)
    shapes = ((1, c["in_channels"], c["sample_size"], c["sample_size"]), (1, TOKENS, c["cross_attention_dim"]))
    sample, states = (rng.standard_normal(x).astype(np.float32) for x in shapes)
    return dict(zip(NAMES, (sample, np.int64([500]), states), strict=True))


def write(path: Path, config: Any = None) -> None:
    """Write the graph of a step, its weights in a file beside it."""
    c = config or CONFIG
    net = _Net(FileWriter(path), c)
    net.whole()
    kinds = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT)
    values = feeds(c)
    inputs = [helper.make_tensor_value_info(n, kind, values[n].shape) for n, kind in zip(NAMES, kinds, strict=True)]
    result = helper.make_tensor_value_info("noise", TensorProto.FLOAT, values["sample"].shape)
    net.w.save("unet", inputs, [result])


class _Net:
    """The operators of a step."""

    def __init__(self, w: FileWriter, config: Any) -> None:
        self.w, self.c = w, config
        self.time = ""

    def array(self, name: str, *shape: int, around: float | None = None) -> str:
        """A parameter: a weight that keeps variances, or a vector around a value."""
        fan = math.prod(shape[1:]) if len(shape) > 2 else shape[0]
        values = self.w.rng.standard_normal(shape, np.float32)
        return self.w.constant(values / math.sqrt(fan) if around is None else around + 0.02 * values, name)

    def conv(self, x: str, name: str, channels: tuple[int, int], kernel: int, stride: int = 1) -> str:
        inside, outside = channels
        return str(self.w.op(
            "Conv", x, self.array(f"{name}.weight", outside, inside, kernel, kernel),
            self.array(f"{name}.bias", outside, around=0), kernel_shape=[kernel] * 2, strides=[stride] * 2,
            pads=[kernel // 2] * 4, name=name,
        ))  # fmt: skip

    def linear(self, x: str, name: str, inside: int, outside: int, *, bias: bool = True) -> str:
        y = str(self.w.op("MatMul", x, self.array(f"{name}.weight", inside, outside), name=name))
        return str(self.w.op("Add", y, self.array(f"{name}.bias", outside, around=0))) if bias else y

    def silu(self, x: str) -> str:
        return str(self.w.op("Mul", x, self.w.op("Sigmoid", x)))

    def group_norm(self, x: str, name: str, channels: int, eps: float = 1e-5) -> str:
        w = self.w
        ones, zeros = (w.constant(np.full(NORM_GROUPS, y, np.float32)) for y in (1, 0))
        groups = w.op("Reshape", x, w.constant(np.int64([0, NORM_GROUPS, -1])))
        y = w.op("InstanceNormalization", groups, ones, zeros, epsilon=eps)
        y = w.op("Reshape", y, w.op("Shape", x))
        for kind, part, around in (("Mul", "weight", 1), ("Add", "bias", 0)):
            vector = self.array(f"{name}.{part}", channels, around=around)
            y = w.op(kind, y, w.op("Unsqueeze", vector, w.constant(np.int64([1, 2]))))
        return str(y)

    def layer_norm(self, x: str, name: str, width: int) -> str:
        vectors = (self.array(f"{name}.{n}", width, around=y) for n, y in (("weight", 1), ("bias", 0)))
        return str(self.w.op("LayerNormalization", x, *vectors, axis=-1, epsilon=1e-5))

    def attention(self, x: str, of: str, name: str, width: int, inside: int) -> str:
        """Attention of the rows of x among those of another array, of so many columns."""
        w, heads = self.w, self.c["attention_head_dim"]
        parts = []
        for part, value, columns in (("q", x, width), ("k", of, inside), ("v", of, inside)):
            y = self.linear(value, f"{name}.to_{part}", columns, width, bias=False)
            y = w.op("Reshape", y, w.constant(np.int64([0, -1, heads, width // heads])))
            parts.append(w.op("Transpose", y, perm=[0, 2, 3, 1] if part == "k" else [0, 2, 1, 3]))
        scores = w.op("Mul", w.op("MatMul", *parts[:2]), w.constant(np.float32(1 / math.sqrt(width // heads))))
        y = w.op("Transpose", w.op("MatMul", w.op("Softmax", scores, axis=-1), parts[2]), perm=[0, 2, 1, 3])
        return self.linear(w.op("Reshape", y, w.constant(np.int64([0, -1, width]))), f"{name}.to_out.0", width, width)

    def feed_forward(self, x: str, name: str, width: int) -> str:
        """A layer gated by GELU."""
        y = self.linear(x, f"{name}.net.0.proj", width, 8 * width)
        up, gate = self.w.op("Split", y, self.w.constant(np.int64([4 * width] * 2)), outputs=2, axis=-1)
        return self.linear(self.w.op("Mul", up, gelu(self.w, gate)), f"{name}.net.2", 4 * width, width)

    def transformer(self, x: str, name: str, channels: int, side: int) -> str:
        """A transformer's layer of pixels, with the states of tokens."""
        w, at, states = self.w, f"{name}.transformer_blocks.0", self.c["cross_attention_dim"]
        y = self.conv(self.group_norm(x, f"{name}.norm", channels, 1e-6), f"{name}.proj_in", (channels,) * 2, 1)
        y = w.op("Reshape", w.op("Transpose", y, perm=[0, 2, 3, 1]), w.constant(np.int64([0, -1, channels])))
        normal = self.layer_norm(y, f"{at}.norm1", channels)
        y = w.op("Add", self.attention(normal, normal, f"{at}.attn1", channels, channels), y)
        normal = self.layer_norm(y, f"{at}.norm2", channels)
        y = w.op("Add", self.attention(normal, NAMES[2], f"{at}.attn2", channels, states), y)
        y = w.op("Add", self.feed_forward(self.layer_norm(y, f"{at}.norm3", channels), f"{at}.ff", channels), y)
        y = w.op("Reshape", y, w.constant(np.int64([0, side, side, channels])))
        y = self.conv(w.op("Transpose", y, perm=[0, 3, 1, 2]), f"{name}.proj_out", (channels,) * 2, 1)
        return str(w.op("Add", y, x))

    def resnet(self, x: str, name: str, inside: int, outside: int) -> str:
        """A block of two convolutions, between which the time is added."""
        w, of_time = self.w, 4 * self.c["block_out_channels"][0]
        y = self.silu(self.group_norm(x, f"{name}.norm1", inside))
        y = self.conv(y, f"{name}.conv1", (inside, outside), 3)
        time = self.linear(self.silu(self.time), f"{name}.time_emb_proj", of_time, outside)
        y = w.op("Add", y, w.op("Unsqueeze", time, w.constant(np.int64([2, 3]))))
        y = self.silu(self.group_norm(y, f"{name}.norm2", outside))
        y = self.conv(y, f"{name}.conv2", (outside,) * 2, 3)
        x = x if inside == outside else self.conv(x, f"{name}.conv_shortcut", (inside, outside), 1)
        return str(w.op("Add", x, y))

    def embedded_time(self, width: int) -> str:
        """The states of the time."""
        w, half = self.w, width // 2
        rates = np.exp(-math.log(10000) * np.arange(half, dtype=np.float32) / half)
        time = w.op("Unsqueeze", w.op("Cast", NAMES[1], to=TensorProto.FLOAT), w.constant(np.int64([1])))
        angles = w.op("Mul", time, w.constant(rates[None]))
        y = w.op("Concat", w.op("Cos", angles), w.op("Sin", angles), axis=-1)
        y = self.silu(self.linear(y, "time_embedding.linear_1", width, 4 * width))
        return self.linear(y, "time_embedding.linear_2", 4 * width, 4 * width)

    def whole(self) -> None:
        """All of a step."""
        w, c = self.w, self.c
        widths, side = c["block_out_channels"], c["sample_size"]
        self.time = self.embedded_time(widths[0])
        x = self.conv(NAMES[0], "conv_in", (c["in_channels"], widths[0]), 3)
        kept, inside = [(x, widths[0])], widths[0]
        for i, (kind, width) in enumerate(zip(c["down_block_types"], widths, strict=True)):
            at = f"down_blocks.{i}"
            for j in range(c["layers_per_block"]):
                x, inside = self.resnet(x, f"{at}.resnets.{j}", inside, width), width
                x = self.transformer(x, f"{at}.attentions.{j}", width, side) if "Attn" in kind else x
                kept.append((x, width))
            if i + 1 < len(widths):
                x, side = self.conv(x, f"{at}.downsamplers.0.conv", (width,) * 2, 3, 2), side // 2
                kept.append((x, width))
        x = self.resnet(x, "mid_block.resnets.0", inside, inside)
        x = self.transformer(x, "mid_block.attentions.0", inside, side)
        x = self.resnet(x, "mid_block.resnets.1", inside, inside)
        for i, (kind, width) in enumerate(zip(c["up_block_types"], widths[::-1], strict=True)):
            at = f"up_blocks.{i}"
            for j in range(c["layers_per_block"] + 1):
                skip, more = kept.pop()
                x = self.resnet(w.op("Concat", x, skip, axis=1), f"{at}.resnets.{j}", inside + more, width)
                inside = width
                x = self.transformer(x, f"{at}.attentions.{j}", width, side) if "Attn" in kind else x
            if i + 1 < len(widths):
                x = w.op("Resize", x, "", w.constant(np.float32([1, 1, 2, 2])), mode="nearest",
                         coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
                x, side = self.conv(x, f"{at}.upsamplers.0.conv", (width,) * 2, 3), side * 2
        x = self.silu(self.group_norm(x, "conv_norm_out", inside))
        x = self.conv(x, "conv_out", (inside, c["out_channels"]), 3)
        w.nodes.append(helper.make_node("Identity", [x], ["noise"], "result"))


def module_of(path: Path, config: Any = None) -> Any:
    """Diffusers' module of the step in a file: a function of the inputs that returns the predicted noise."""
    import onnx
    import torch
    from diffusers import UNet2DConditionModel
    from onnx import numpy_helper

    with torch.device("meta"):
        net = UNet2DConditionModel(**(config or CONFIG)).eval()
    arrays = {x.name: x for x in onnx.load(path).graph.initializer}

    def parameter(name: str) -> Any:
        value = torch.from_numpy(np.array(numpy_helper.to_array(arrays.pop(name))))
        return value.T.contiguous() if value.ndim == 2 else value

    net.load_state_dict({name: parameter(name) for name in net.state_dict()}, assign=True)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, sample: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
            return self.net(sample, timestep, encoder_hidden_states, return_dict=False)[0]

    return Step().eval()
