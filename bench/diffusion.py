"""A step of Stable Diffusion 1.5's U-Net with seeded random weights: diffusers' module, and its export to ONNX.

It needs the packages diffusers, torch and onnxscript, about 8 GB of memory and 3.5 GB of disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "sample_size": 64, "in_channels": 4, "out_channels": 4, "layers_per_block": 2, "cross_attention_dim": 768,
    "attention_head_dim": 8, "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
}  # fmt: skip
"""Of the U-Net of Stable Diffusion 1.5, for images of 512 by 512."""
NAMES = ("sample", "timestep", "encoder_hidden_states")


def feeds(seed: int = 1) -> dict[str, Any]:
    """Inputs of a step: latent images, the time, and the states of 77 tokens."""
    rng = np.random.default_rng(seed)
    sample, states = (rng.standard_normal(x).astype(np.float32) for x in ((1, 4, 64, 64), (1, 77, 768)))
    return dict(zip(NAMES, (sample, np.int64([500]), states), strict=True))


def step() -> Any:
    """The module of a step: a function of the inputs that returns the predicted noise."""
    import torch
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    net = UNet2DConditionModel(**CONFIG).eval()

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, sample: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
            return self.net(sample, timestep, encoder_hidden_states, return_dict=False)[0]

    return Step()


def write(path: Path) -> None:
    """Export a step, its weights in a file beside the model."""
    import torch

    inputs = tuple(map(torch.from_numpy, feeds().values()))
    with torch.no_grad():
        program = torch.onnx.export(step(), inputs, dynamo=True, input_names=NAMES, output_names=["noise"])
    program.save(str(path), external_data=True)
