"""Operators of `torch.library` and quantized layers: values, gradients, fake tensors, compilation, files."""

from __future__ import annotations

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing of portmm.torch is tested")
from torch import nn  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.library import opcheck  # noqa: E402

import portmm.torch as pt  # noqa: E402
from portmm.errors import PortmmError  # noqa: E402
from portmm.torch import weights  # noqa: E402
from portmm.weights.quantized import dequantize, quantize  # noqa: E402

QUICKLY = True
# PyTorch's own `opcheck` reads gradients of tensors that are no leaves.
pytestmark = [
    pytest.mark.usefixtures("fresh_torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
F = nn.functional
SHAPES = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (3, 4, 2)),
    ((4,), (4, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (4,)),
]


def leaves(*shapes, dtype=torch.float64):
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_products(shapes):
    a, b = leaves(*shapes)
    torch.testing.assert_close(pt.matmul(a, b), torch.matmul(a, b))
    assert gradcheck(pt.matmul, (a, b))
    if a.ndim == b.ndim == 2:
        assert gradgradcheck(pt.matmul, (a, b))
        opcheck(torch.ops.portmm.matmul.default, tuple(x.detach().float().requires_grad_() for x in (a, b)))


def test_linear_layers():
    x, w, bias = leaves((2, 3, 4), (5, 4), (5,))
    torch.testing.assert_close(pt.linear(x, w, bias), F.linear(x, w, bias))
    assert gradcheck(pt.linear, (x, w, bias))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_attention(heads, mask):
    q, k, v = leaves((2, heads[0], 5, 4), (2, heads[1], 5, 4), (2, heads[1], 5, 3))
    seen = torch.rand(5, 5) > 0.4
    seen[2] = False
    added = torch.randn(2, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    given = {"bool": seen, "float": added}.get(mask)
    causal = mask == "causal"

    def ours(q, k, v, given=given):
        return pt.attention(q, k, v, given, causal=causal)

    want = F.scaled_dot_product_attention(q, k, v, given, is_causal=causal, enable_gqa=True)
    if mask == "bool":
        want = torch.where(seen.any(-1)[:, None], want, 0.0)
    torch.testing.assert_close(ours(q, k, v), want)
    assert gradcheck(ours, (q, k, v, added) if mask == "float" else (q, k, v))
    narrow = [x.detach().float().requires_grad_() for x in (q, k, v)]
    added = (
        None
        if given is None
        else torch.zeros(5, 5).masked_fill(~seen, -torch.inf)
        if mask == "bool"
        else added.detach().float()
    )
    got = pt.attention(*narrow, given if mask == "bool" else added, causal=causal)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(got)
    theirs = torch.autograd.grad(want, (q, k, v), weights.double())
    for x, y in zip(torch.autograd.grad(got, narrow, weights), theirs, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-3)
    if heads == (4, 2):
        opcheck(torch.ops.portmm.attention.default, (*narrow, added, causal, 0.5), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": (1, 0)}, {"dilation": 2, "groups": 2}], ids=str)
def test_convolutions(options):
    x, w, bias = leaves((2, 4, 7, 6), (6, 4 // options.get("groups", 1), 3, 2), (6,), dtype=torch.float32)
    for b in (None, bias):
        got, want = pt.conv(x, w, b, **options), F.conv2d(x, w, b, **options)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        inputs = (x, w) if b is None else (x, w, b)
        for g, h in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (got, want)), strict=True):
            torch.testing.assert_close(g, h, rtol=1e-3, atol=1e-3)
    opcheck(
        torch.ops.portmm.conv.default,
        (x, w, bias, [1, 1], [0, 0], [1, 1], options.get("groups", 1)),
        rtol=1e-3,
        atol=1e-3,
    )


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64, bias=False)
        self.mlp = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def test_options_that_do_not_fit_are_named():
    x, w = torch.ones(1, 3, 8, 8), torch.ones(3, 3, 3, 3)
    with pytest.raises(PortmmError, match="pass a whole number, or 2"):
        pt.conv(x, w, padding="same")
    with pytest.raises(PortmmError, match="pass a whole number, or 2"):
        pt.conv(x, w, stride=(1, 1, 1))
    with pytest.raises(PortmmError, match="x has 2 dimensions"):
        pt.conv(x[0, 0], w)
    with pytest.raises(PortmmError, match=r"not a torch\.nn\.Module"):
        pt.quantize_(3, "int4")
    layer = nn.Linear(64, 32)
    for group in (-1, 2.5):
        with pytest.raises(PortmmError, match="group is"):
            pt.quantize_(nn.Sequential(layer), "int4", group=group)
    with torch.no_grad():
        layer.weight[1, 2] = torch.nan
    for kind in ("int8-dynamic", "int4"):
        with pytest.raises(PortmmError, match=r"^0: .* of output 1 has values that are not finite"):
            pt.quantize_(nn.Sequential(layer), kind)


ERRORS = {"bf16": 0.01, "int8-dynamic": 0.02, "int4": 0.15, "int4-dynamic": 0.15}


@pytest.mark.parametrize("kind", ERRORS)
def test_quantized_layers(kind, tmp_path):
    from safetensors.torch import load_file, save_file

    model, x = Layers().eval(), torch.randn(2, 9, 64)
    want = model(x).detach()
    saved = {n: p.clone() for n, p in model.state_dict().items()}
    assert pt.quantize_(model, kind) is model
    assert sum(isinstance(m, pt.QuantizedLinear) for m in model.modules()) == 4
    got = model(x)
    assert (got - want).norm() / want.norm() < ERRORS[kind]
    assert sum(b.nbytes for b in model.buffers()) < sum(p.nbytes for p in saved.values()) * 0.6
    opcheck(
        torch.ops.portmm.quantized_linear.default,
        (x, model.qkv.weight, model.qkv.scales, model.qkv.offsets, model.qkv.bias, kind, model.qkv.group),
    )
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = pt.quantize_(Layers().eval(), kind)
    assert not torch.equal(other(x), got)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(x), got), "packed again"
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(model, backend=pt.compile_graph, fullgraph=True)
        torch.testing.assert_close(run(x), got, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ERRORS)
def test_quantized_layers_are_copied_saved_and_converted(kind):
    def made():
        return pt.quantize_(nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 32, bias=False)), kind)

    model, x, file = made(), torch.randn(5, 96), io.BytesIO()
    want = model(x)
    assert torch.equal(copy.deepcopy(model)(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), want)  # noqa: S301 - its own
    torch.save(model.state_dict(), file)
    assert file.tell() < 1 << 16, "a tensor is saved by itself, not with the memory that layers adjoin in"
    file.seek(0)
    state = torch.load(file, weights_only=True)
    with torch.device("meta"):
        other = made()  # without memory, until its tensors are those of a file
    other.load_state_dict(state, strict=True, assign=True)
    assert torch.equal(other(x), want)
    torch.testing.assert_close(model(x[0]), want[0], rtol=1e-4, atol=1e-4)
    assert model(x[:0]).shape == (0, 32)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = copy.deepcopy(model).to(dtype)
        got = narrow(x.to(dtype))
        kept = {n: y.dtype for n, y in narrow.state_dict().items() if not n.endswith("bias")}
        assert kept == {n: state[n].dtype for n in kept}
        assert got.dtype is dtype
        assert (got.float() - want).norm() / want.norm() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_rounded_to_nearest(dtype):
    for outputs, inputs, group in ((48, 256, 64), (7, 100, 100), (5, 90, 64)):
        w = torch.randn(outputs, inputs).to(dtype)
        codes, scales = weights.int8_values(w)
        w = w.float()
        assert torch.equal(scales, w.abs().amax(1) / 127)
        assert ((codes * scales[:, None] - w).abs() <= scales[:, None] * 0.50001).all()
        both, scales, offsets = weights.int4_values(w, group)
        got = torch.from_numpy(dequantize(weights.record(both, scales, offsets, group))).T
        want = quantize(w.T.numpy(), group=group)
        assert (scales.numpy() == want.scales.T).all()
        assert (offsets.numpy() == want.offsets.T).all()
        steps = scales.repeat_interleave(group, 1)[:, :inputs]
        assert ((got - w).abs() <= steps * 0.50001).all()
    w[3, 70] = torch.nan
    with pytest.raises(ValueError, match=r"group 1 of output 3 has values that are not finite"):
        weights.int4_values(w, 64)


def test_some_layers_are_quantized():
    model = pt.quantize_(
        Layers(), "int8-dynamic", filter=lambda name, layer: name.startswith("mlp") and layer.bias is not None
    )
    assert [n for n, m in model.named_modules() if isinstance(m, pt.QuantizedLinear)] == ["mlp.0", "mlp.2"]
    for model, kind, match in (
        (nn.Linear(4, 4), "int4", "Sequential"),
        (nn.Sequential(nn.Linear(5, 4)), "int4", "0 has 5 inputs"),
        (Layers(), "int3", "'int3'; weights are quantized to"),
    ):
        with pytest.raises(PortmmError, match=match):
            pt.quantize_(model, kind)
