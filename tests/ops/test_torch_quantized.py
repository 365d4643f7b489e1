"""Quantized convolutions and attention: values, fake tensors, compilation, files."""

from __future__ import annotations

import io

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing of portmm.torch is tested")
from torch import nn  # noqa: E402
from torch.library import opcheck  # noqa: E402

import portmm.torch as pt  # noqa: E402

QUICKLY = True
pytestmark = [
    pytest.mark.usefixtures("fresh_torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths"),
]
ERRORS = {"bf16": 0.02, "int8-dynamic": 0.04, "int4": 0.25, "int4-dynamic": 0.25}


def floats_of(layer):
    """The filters that a quantized convolution has, in float64."""
    w = layer.weight
    if layer.kind.startswith("int4"):
        w = torch.stack([w & 15, w >> 4], -1).flatten(1)
        scales, offsets = (
            x.repeat_interleave(layer.group, 1)[:, : w.shape[1]].double() for x in (layer.scales, layer.offsets)
        )
        w = w * scales + offsets
    elif layer.kind == "int8-dynamic":
        w = w.double() * layer.scales[:, None].double()
    return w.double().unflatten(1, (*layer.kernel_size, -1)).movedim(-1, 1)


CASES = [
    (2, {"padding": 1}, 1, (2, 32, 9, 7)),
    (2, {"padding": "same", "kernel_size": (2, 4)}, 1, (1, 16, 8, 8)),
    (2, {"padding": (0, 2), "stride": (2, 1), "dilation": (1, 2), "bias": False}, 4, (2, 32, 9, 9)),
    (2, {"padding": 1}, 32, (1, 32, 6, 6)),
    (1, {"padding": "valid"}, 1, (2, 32, 20)),
    (3, {"padding": 1}, 1, (1, 8, 4, 5, 6)),
    (2, {"kernel_size": 1}, 1, (2, 64, 5, 5)),
]


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolutions(case, kind):
    dimensions, options, groups, shape = case
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    original = make(shape[1], 32, **{"kernel_size": 3, "groups": groups} | options).eval()
    model = pt.quantize_(nn.Sequential(original), kind)
    layer, x = model[0], torch.randn(shape)
    if groups == shape[1] and kind.startswith("int4"):
        assert layer is original, "nine elements are no pairs"
        return
    got = model(x)
    assert (got.shape, got.dtype) == (original(x).shape, torch.float32)
    padded = nn.functional.pad(
        x.double(), [n for pair in zip(layer.padding[-2::-2], layer.padding[::-2], strict=True) for n in pair]
    )
    function = getattr(nn.functional, f"conv{dimensions}d")
    bias = None if layer.bias is None else layer.bias.double()
    want = function(padded, floats_of(layer), bias, layer.stride, 0, layer.dilation, groups)
    # Images are rounded to int8 by a step of a 127th of the largest pixel.
    assert (got - want).norm() / want.norm() < (0.02 if kind == "int8-dynamic" else 1e-4)
    assert (got - original(x)).norm() / want.norm() < ERRORS[kind]
    torch.testing.assert_close(model(x[0]), got[0], rtol=1e-4, atol=1e-4)
    assert model(x[:0]).shape == (0, *got.shape[1:])


class Blocks(nn.Module):
    """A residual block, with all that a convolution's kernel computes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.second, self.last = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 16, 1)
        with torch.no_grad():
            for x in (self.norm.weight, self.norm.running_var):
                x.uniform_(0.5, 2)
            self.norm.running_mean.normal_()

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(y) + y))


@pytest.mark.parametrize("kind", ERRORS)
def test_convolutions_are_compiled_and_saved(kind, tmp_path):
    from safetensors.torch import load_file, save_file

    model, x = Blocks().eval(), torch.randn(2, 16, 10, 12)
    want = model(x).detach()
    pt.quantize_(model, kind)
    assert sum(isinstance(m, pt.QuantizedConv) for m in model.modules()) == 3
    with torch.no_grad():
        got = model(x)
        last = model(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, got, rtol=1e-4, atol=1e-4)
    assert (got - want).norm() / want.norm() < ERRORS[kind]
    layer = model.first
    options = [*layer.kernel_size], [*layer.stride], layer.padding, [*layer.dilation], layer.groups
    kept = layer.kind.replace("int4-dynamic", "int4"), layer.group
    opcheck(
        torch.ops.portmm.quantized_conv.default,
        (x, layer.weight, layer.scales, layer.offsets, layer.bias, *kept, *options),
    )
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = pt.quantize_(Blocks().eval(), kind)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True, assign=True)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(other(x), got)
        run = torch.compile(model, backend=pt.compile_graph, fullgraph=True)
        torch.testing.assert_close(run(x), got, rtol=0.03, atol=0.03)
    report = "\n".join(pt.reports())
    assert report.count("conv") >= 3
    assert "PyTorch computes" not in report


@pytest.mark.parametrize("kind", ["bf16", "int8-dynamic", "int4"])
def test_attention(kind):
    options = {"embed_dim": 64, "num_heads": 4, "batch_first": True, "dropout": 0.5}
    original = nn.MultiheadAttention(**options).eval()
    other = nn.MultiheadAttention(**options, kdim=32, vdim=48, bias=False).eval()
    model = pt.quantize_(nn.ModuleList([original, other]), kind)
    assert [type(m) for m in model] == [pt.QuantizedAttention] * 2
    x, k, v = torch.randn(2, 7, 64), torch.randn(2, 5, 32), torch.randn(2, 5, 48)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    for more in ({}, {"key_padding_mask": padding}, {"attn_mask": causal, "is_causal": True},
                 {"attn_mask": torch.rand(8, 7, 7) > 0.9}, {"average_attn_weights": False}):  # fmt: skip
        want, seen = original(x, x, x, **more)
        got, ours = model[0](x, x, x, **more)
        assert (got - want).norm() / want.norm() < ERRORS[kind]
        assert (ours - seen).norm() / seen.norm() < ERRORS[kind]
        plain, none = model[0](x, x, x, need_weights=False, **more)
        assert none is None
        torch.testing.assert_close(plain, got, rtol=1e-4, atol=1e-4)
    want, got = other(x, k, v)[0], model[1](x, k, v)[0]
    assert (got - want).norm() / want.norm() < ERRORS[kind]
    torch.testing.assert_close(model[0](x[0], x[0], x[0])[0], model[0](x, x, x)[0][0], rtol=1e-4, atol=1e-4)
    tokens_first = pt.quantize_(nn.Sequential(nn.MultiheadAttention(64, 4)), kind)[0]
    tokens_first.load_state_dict(model[0].state_dict())
    y = x.transpose(0, 1)
    torch.testing.assert_close(tokens_first(y, y, y)[0].transpose(0, 1), model[0](x, x, x)[0], rtol=1e-4, atol=1e-4)


def test_encoders_of_pytorch():
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, 64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
        for kept in (None, lambda name, _: "self_attn" not in name):
            state, quantized = io.BytesIO(), nn.TransformerEncoder(layer, 2).eval()
            quantized.load_state_dict(model.state_dict())
            pt.quantize_(quantized, "int8-dynamic", filter=kept)
            got = quantized(x, src_key_padding_mask=padding)
            assert (got - want)[~padding].norm() / want[~padding].norm() < 0.03
            torch.save(quantized.state_dict(), state)
            state.seek(0)
            quantized.load_state_dict(torch.load(state, weights_only=True))
        torch._dynamo.reset()
        run = torch.compile(quantized, backend=pt.compile_graph)
        torch.testing.assert_close(run(x), quantized(x), rtol=0.02, atol=0.02)


class Conv1D(nn.Module):
    """A layer as of Hugging Face's models: its weight is (inputs, outputs)."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize("kind", ERRORS)
def test_layers_of_hugging_face(kind, tmp_path):
    from safetensors.torch import load_file, save_file

    model, x = nn.Sequential(Conv1D(192, 64)), torch.randn(9, 64)
    want = model(x)
    got = pt.quantize_(model, kind)(x)
    assert type(model[0]) is pt.QuantizedLinear
    assert (got - want).norm() / want.norm() < ERRORS[kind]
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = pt.quantize_(nn.Sequential(Conv1D(192, 64)), kind)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(x), got)
