"""The backend of `torch.compile`: results of modules are those of PyTorch, and reports say who computed them."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import numpy as np
import pytest
from places import ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing of portmm.torch is tested")
from torch import nn  # noqa: E402

from portmm.torch import backend, quantize_  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_torch")

QUICKLY = True
F = nn.functional


def compiled(model, **options):
    return torch.compile(model, backend=backend.compile_graph, fullgraph=True, **options)


def close(got, want, tolerance=2e-5):
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for x, y in zip(got, want, strict=True):
            close(x, y, tolerance)
        return
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


class Block(nn.Module):
    """An encoder's layer, with a mask."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask=None, causal=False):
        def split(y):
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        h = self.norm(x)
        y = F.scaled_dot_product_attention(*(split(p(h)) for p in (self.q, self.k, self.v)), mask, is_causal=causal)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


def kernels():
    """The kernels of the programs that were made, by their kinds."""
    return [k for g in backend._graphs.values() for e in g.explained.values() for k in e.kernels]


def blocked():
    return [why for g in backend._graphs.values() for e in g.explained.values() for _, why in e.blocked]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_an_encoder_layer(mask, causal):
    if mask != "none" and causal:
        pytest.skip("PyTorch takes one of them")
    model, x = Block().eval(), torch.randn(2, 9, 32)
    seen = torch.rand(2, 1, 9, 9) > 0.3
    seen[:, :, 3] = False  # a query that sees no key
    given = {"none": None, "bool": seen, "float": torch.randn(2, 4, 9, 9)}[mask]
    with torch.no_grad():
        close(compiled(model)(x, given, causal), model(x, given, causal))
    assert sum(k.kind == "product" for k in kernels()) == (4 if causal else 6)
    assert [k.what for k in kernels() if k.kind in ("attention", "numpy")] == ["attention"] * causal
    assert not any("aten" in why for why in blocked())


def test_dynamic_shapes_do_not_recompile():
    model, graphs = Block().eval(), []

    def counted(*args):
        graphs.append(args)
        return backend.compile_graph(*args)

    f = torch.compile(model, backend=counted, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (5, 9, 17, 5):
            x = torch.randn(2, n, 32)
            close(f(x), model(x))
            if n == 5:
                first = len(graphs)  # Dynamo may restart its analysis once
    assert len(graphs) == first
    (graph,) = backend._graphs.values()
    assert len(graph.programs) == 3
    assert len(graph.constants.packed) == 6, "weights are packed once"


def test_gradients():
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        torch._dynamo.reset()
        model = Block().to(dtype)
        x, y = (torch.randn(2, 9, 32).to(dtype).requires_grad_() for _ in range(2))
        got = compiled(model)(x)
        want = model(y := x.detach().clone().requires_grad_())
        close(got, want, tolerance)
        weights = torch.randn_like(want)
        ours = torch.autograd.grad(got, [x, *model.parameters()], weights)
        theirs = torch.autograd.grad(want, [y, *model.parameters()], weights)
        for g, w in zip(ours, theirs, strict=True):
            close(g, w, tolerance * max(1.0, w.abs().max().item()))


def test_training_follows_pytorch():
    def losses(model, run):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(4):
            optimizer.zero_grad()
            loss = (run(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.item()

    x, target = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    first, second = Block(), Block()
    second.load_state_dict(first.state_dict())
    np.testing.assert_allclose([*losses(first, compiled(first))], [*losses(second, second)], rtol=1e-4)


def test_changed_parameters_are_seen():
    model, x = Block().eval(), torch.randn(2, 9, 32)
    f = compiled(model)
    with torch.no_grad():
        close(f(x), model(x))
        model.up.weight.mul_(2)
        close(f(x), model(x))
        model.norm.bias.add_(1)  # read in place
        close(f(x), model(x))
        model.load_state_dict(Block().state_dict())
        close(f(x), model(x))
        model.down = nn.Linear(64, 32)
        close(f(x), model(x))
        model.q.weight = nn.Parameter(torch.randn(32, 32))
        close(f(x), model(x))
    with torch.inference_mode():
        close(f(x), model(x))


def test_narrow_types():
    for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.01), (torch.float64, 1e-9)):
        torch._dynamo.reset()
        model, x = Block().eval().to(dtype), torch.randn(2, 9, 32, dtype=dtype)
        with torch.no_grad():
            close(compiled(model)(x), model(x), tolerance)


def test_operators_of_one_element():
    def function(x, y, n, mask):
        a = F.silu(x) + F.gelu(y, approximate="tanh") * 2 - 1 / (x * x + 1)
        b = torch.where(x > y, x, torch.tanh(y)).masked_fill(mask, -3.0).clamp(-2, 2)
        c = (x**2 + y.abs().sqrt() - torch.rsub(x, 2, alpha=3)).softmax(-1) + F.rms_norm(y, (7,)).mean(-1, keepdim=True)
        d = torch.cat([a, b], 1)[:, 1:, None].expand(-1, -1, 2)
        e = F.leaky_relu(x.permute(1, 0).contiguous(), 0.2) + F.hardswish(y.t()) + F.softplus(x.t())
        f, g = (n + 1).float() * x.sum(-1, keepdim=True), torch.topk(x, 2).indices
        return a, b.unbind(0)[1], c, d.split(1, 2)[1], e, f, g, (mask & (x > 0)).logical_not(), x.to(torch.bfloat16) * 3

    x, y, n, mask = torch.randn(5, 7), torch.randn(5, 7), torch.arange(5)[:, None], torch.rand(5, 7) > 0.5
    with torch.no_grad():
        close(compiled(function)(x, y, n, mask), function(x, y, n, mask))
    assert any("aten.topk: no kernel computes it" in why for why in blocked())
    assert "test_torch_compile.py" in backend.reports()[0]


def test_layouts_of_inputs():
    function = compiled(lambda x, w: F.relu(x @ w) + x.sum())
    with torch.no_grad():
        for x in (torch.randn(6, 6), torch.randn(6, 6).t(), torch.randn(6, 12)[:, ::2], torch.randn(1, 6).expand(6, 6)):
            w = torch.randn(6, 6)
            close(function(x, w), F.relu(x @ w) + x.sum())


def test_inputs_that_are_changed_and_returned():
    def function(x, cache):
        cache[:, 1:3] = x * 2
        return cache, x, x.view(-1), cache.sum(-1)

    x, cache, other = torch.randn(3, 2), torch.zeros(3, 5), torch.zeros(3, 5)
    with torch.no_grad():
        got, want = compiled(function)(x, cache), function(x, other)
    close(got, want)
    close(cache, other)
    assert got[1].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_an_element_is_assigned(dtype):
    def function(x):
        y = x.clone()
        y[0] = 1
        return y

    with torch.no_grad():
        x = torch.full((3,), 7, dtype=dtype)
        close(compiled(function)(x), function(x))


VIEWS = {
    "a part": lambda y: y[y.shape[0] // 2 :],
    "a transposed view": lambda y: y.view(y.shape[0] // 2, 2).t(),
    "an expanded one": lambda y: y.expand(y.shape[0], -1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_other_outputs_lie_where_pytorch_looks_for_them(name):
    """With gradients, PyTorch makes views whose extents are symbols by the strides and offsets of the outputs."""

    def function(x):
        y = x * 2
        return y, VIEWS[name](y)

    x = torch.randn(16, requires_grad=True)
    got, want = compiled(function, dynamic=True)(x), function(x)
    close(got, want)
    assert got[1].untyped_storage().data_ptr() == got[0].untyped_storage().data_ptr()


def test_randomness_is_pytorchs():
    f = compiled(lambda x: F.dropout(x @ x, 0.5) + torch.rand_like(x))
    x = torch.randn(6, 6)
    with torch.no_grad():
        first = f(x)
        assert not torch.equal(first, f(x))
        assert ((first - torch.floor(first)) != 0).any()


def test_graphs_that_kernels_do_not_take():
    x = torch.randn(4, 4, dtype=torch.complex64)
    with torch.no_grad():
        close(compiled(lambda x: (x @ x).abs() + 1)(x), (x @ x).abs() + 1)
        close(compiled(lambda x: x[:0] @ x.mT)(torch.randn(3, 3)), torch.zeros(0, 3))


def test_constants_are_folded():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 1))
            self.register_buffer("step", torch.tensor(0.5))

        def forward(self, x):
            return F.linear(x, self.weight * self.scale) * self.step + torch.arange(8)

    model, x = Scaled().eval(), torch.randn(3, 8)
    f = compiled(model)
    with torch.no_grad():
        for change in (lambda: None, lambda: model.scale.mul_(2), lambda: model.step.add_(1)):
            change()
            close(f(x), model(x))
    assert [k.kind for k in kernels()] == ["product"]


def test_the_entry_point_is_the_backend():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["torch_dynamo_backends"] == {"portmm": f"{backend.__name__}:{backend.compile_graph.__name__}"}


def test_a_process_that_has_no_quantized_layers():
    script = """
import torch
from portmm.torch import backend
model, x = torch.nn.Linear(8, 4), torch.ones(3, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend=backend.compile_graph)(x), model(x))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["int8-dynamic", "int4"])
def test_layers_of_the_same_rows_have_outputs_and_biases_of_their_own(kind):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)
            self.third, self.added = nn.Linear(64, 32, bias=False), nn.Parameter(torch.randn(32))

        def forward(self, x):
            y = self.second
            computed = torch.ops.portmm.quantized_linear(
                x, y.weight, y.scales, y.offsets, self.added * 3, y.kind, y.group
            )
            return self.first(x), computed, self.third(x)

    model, x = quantize_(Pair(), kind).eval(), torch.randn(7, 64)
    with torch.no_grad():
        got, want = compiled(model)(x), model(x)
    close(got, want)
    assert [y.stride() for y in got] == [y.stride() for y in want]


def test_quantization_is_a_part_of_norms_and_of_what_follows_layers():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    model, x = quantize_(model, "int8-dynamic").eval(), torch.randn(2, 7, 64)
    x[0, 3] = torch.nan
    with torch.no_grad():
        got, want = compiled(model)(x), model(x)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02, equal_nan=True)
    found = [(k.kind, k.fused) for k in kernels()]
    assert [kind for kind, _ in found] == ["rows", "product", "rows", "product"]
    assert found[1][1] == ("gelu",), "magnitudes are reduced where they are read again, not stored"
