"""Convolutions of PyTorch's: gradients of the operator, and models in compiled graphs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing of portmm.torch is tested")
from torch import nn  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.library import opcheck  # noqa: E402

import portmm.torch as pt  # noqa: E402
from portmm.torch import backend  # noqa: E402

QUICKLY = True
# PyTorch's own `opcheck` reads gradients of tensors that are no leaves.
pytestmark = [
    pytest.mark.usefixtures("fresh_torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
F = nn.functional


def leaves(*shapes, dtype=torch.float64):
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


CASES = [
    ((2, 2, 5, 4), (3, 2, 3, 2), {}),
    ((1, 4, 5, 6), (2, 2, 2, 3), {"stride": (2, 1), "padding": (1, 0), "groups": 2}),
    ((2, 2, 7), (3, 2, 3), {"dilation": 2, "stride": 2}),
    ((1, 1, 3, 4, 3), (2, 1, 2, 2, 2), {"padding": 1}),
]


@pytest.mark.parametrize(("image", "filters", "options"), CASES, ids=str)
def test_gradients_are_those_of_differences(image, filters, options):
    x, w, bias = leaves(image, filters, filters[:1])
    theirs = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
    torch.testing.assert_close(pt.conv(x, w, bias, **options), theirs(x, w, bias, **options))
    assert gradcheck(lambda *y: pt.conv(*y, **options), (x, w, bias))
    assert gradgradcheck(lambda *y: pt.conv(*y, **options), (x, w, bias))


def test_operators_of_gradients_are_whole():
    x, w = leaves((2, 4, 7, 6), (6, 2, 3, 2), dtype=torch.float32)
    how = [2, 1], [1, 0], [1, 2], 2
    y = pt.conv(x, w, stride=how[0], padding=how[1], dilation=how[2], groups=2)
    dy = torch.randn_like(y).requires_grad_()
    near = {"rtol": 1e-3, "atol": 1e-3}
    opcheck(torch.ops.portmm.conv_input_gradient.default, (dy, w, [7, 6], *how), **near)
    opcheck(torch.ops.portmm.conv_filter_gradient.default, (x, dy, [3, 2], *how), **near)


def test_gradients_of_narrow_types_are_rounded_once():
    x, w = leaves((2, 4, 7, 6), (6, 4, 3, 3), dtype=torch.bfloat16)
    of_x, of_w = torch.autograd.grad(pt.conv(x, w).sum(), (x, w))
    assert of_x.dtype == of_w.dtype == torch.bfloat16
    wide = [y.detach().float().requires_grad_() for y in (x, w)]
    for got, want in zip((of_x, of_w), torch.autograd.grad(F.conv2d(*wide).sum(), wide), strict=True):
        torch.testing.assert_close(got.float(), want, rtol=0.01, atol=0.01)


class Basic(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(n, outputs, 3, s, padding=1, bias=False) for n, s in ((inputs, stride), (outputs, 1))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.shortcut(x))


def residual(width=8):
    """A small ResNet with statistics that were not made now."""
    stem = [nn.Conv2d(3, width, 7, 2, padding=3), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [Basic(width, width), Basic(width, 2 * width, 2), Basic(2 * width, 2 * width)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)).eval()
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                    values.copy_(torch.rand_like(values) + 0.5)
    return model


@pytest.mark.parametrize("shape", [(2, 3, 32, 40), (1, 3, 33, 33)], ids=str)
def test_a_residual_network_is_convolutions_with_what_follows(shape):
    model, x = residual(), torch.randn(shape)
    run = torch.compile(model, backend=backend.compile_graph, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
        report = backend.reports()[-1]
        model[0].weight.mul_(2)
        model[4].norms[0].running_var.add_(1)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
        last = x.to(memory_format=torch.channels_last)
        torch.testing.assert_close(run(last), model(x), rtol=1e-4, atol=1e-4)
    assert report.count(". conv  [") == sum(isinstance(x, nn.Conv2d) for x in model.modules()) == 8
    assert "Sequential: 11 kernels" in report, "and pooling, a mean, and a product"


def test_shapes_vary_without_another_graph():
    model = residual()
    run = torch.compile(model, backend=backend.compile_graph, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 3, 32, 40), (3, 3, 32, 40), (2, 3, 64, 33)):
            x = torch.randn(shape)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(backend._graphs) == 1


class Odd(nn.Module):
    """Convolutions whose results are read more than once, or by something else."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Conv2d(4, 4, 1)
        self.norm, self.up = nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 2, 2)

    def forward(self, x):
        y = self.a(x)
        z = self.b(y) + self.b(y)
        return F.relu(y) + self.norm(z) + self.norm(x), self.up(y), F.relu(self.b(x) + y.mean())


def test_results_that_are_read_twice_stay():
    model, x = Odd().eval(), torch.randn(2, 4, 6, 5)
    with torch.no_grad():
        got = torch.compile(model, backend=backend.compile_graph, fullgraph=True)(x)
        for y, want in zip(got, model(x), strict=True):
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    assert "a transposed convolution" in "\n".join(backend.reports())


class Shared(nn.Module):
    """A convolution before two normalisations of the same parameters."""

    def __init__(self):
        super().__init__()
        self.conv, self.near, self.far = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.BatchNorm2d(16, eps=1.0)
        for name in ("weight", "bias", "running_mean", "running_var"):
            setattr(self.far, name, getattr(self.near, name))

    def forward(self, x):
        return self.near(self.conv(x)), self.far(self.conv(-x))


@pytest.mark.parametrize("kind", ["", "bf16", "int8-dynamic", "int4"])
def test_normalisations_that_differ_in_what_they_add_to_the_variance(kind):
    model, x = Shared().eval(), torch.randn(2, 16, 6, 5)
    if kind:
        pt.quantize_(model, kind)
    with torch.no_grad():
        want = model(x)
        assert (want[0] - want[1]).abs().max() > 0.1
        got = torch.compile(model, backend=backend.compile_graph, fullgraph=True)(x)
        for y, z in zip(got, want, strict=True):
            torch.testing.assert_close(y, z, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(dtype):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model, x = model.to(dtype).eval(), torch.randn(2, 4, 6, 5).to(dtype)
    with torch.no_grad():
        got = torch.compile(model, backend=backend.compile_graph, fullgraph=True)(x)
        want = model.float()(x.float())
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=0.03, atol=0.03)


def test_training_steps_are_those_of_pytorch():
    model, x = residual().train(), torch.randn(2, 3, 32, 32)
    run = torch.compile(model, backend=backend.compile_graph)
    grads = []
    for f in (run, model):
        model.zero_grad()
        f(x).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
