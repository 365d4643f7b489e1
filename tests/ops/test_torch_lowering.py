"""Graphs that are lowered in one pass, and those that are left to AOT autograd: results of both are PyTorch's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing of portmm.torch is tested")
from torch import nn  # noqa: E402

from portmm.torch import backend  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_torch")

QUICKLY = True
F = nn.functional
LAYER, NORM = nn.Linear(8, 8), nn.BatchNorm1d(8)


def changed(x):
    y = LAYER(x)
    y += 1
    return y


def halves(x):
    return LAYER(x).chunk(2, -1)


GRAPHS = {
    "layers": (lambda x: F.gelu(LAYER(x)) @ x.mT, True),
    "a norm": (lambda x: F.layer_norm(x, (8,)).softmax(-1).mean(0), True),
    "attention": (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True), True),
    "integers as indices": (lambda x: LAYER(x)[torch.arange(2)], True),
    "a new tensor": (lambda x: LAYER(x) + torch.ones(3, 8), True),
    "a choice by bits": (lambda x: torch.where(x > 0, x, -x) + 1, True),
    "a change in place": (changed, False),
    "a change of the input": (lambda x: x.mul_(2) + 1, False),
    "outputs in the same memory": (halves, False),
    "an output in the input's memory": (lambda x: (x[1:], x + 1), False),
    "the input, which Dynamo returns": (lambda x: (x, x + 1), True),
    "extents that depend on elements": (lambda x: LAYER(x)[torch.ones(3, dtype=torch.bool)].sum(), False),
    "a batch norm that learns": (lambda x: NORM(x) * 2, False),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_results_are_pytorchs(name, monkeypatch):
    function, once = GRAPHS[name]
    graphs, lowered = [], backend.lowered

    def noted(*args):
        graphs.append(lowered(*args))
        return graphs[-1]

    monkeypatch.setattr(backend, "lowered", noted)
    compiled = torch.compile(function, backend=backend.compile_graph)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for _ in range(2):
            x = torch.randn(3, 8)
            y = x.clone()
            NORM.reset_running_stats()
            got, kept = compiled(x), NORM.running_mean.clone()
            NORM.reset_running_stats()
            torch.testing.assert_close(got, function(y), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close((x, kept), (y, NORM.running_mean))
    assert [x is not None for x in graphs] == [once]


def test_gradients_symbols_and_chosen_types_are_left_to_pytorch():
    x = torch.randn(3, 8)

    def lowered(**options):
        graphs = []

        def kept(module, _):
            graphs.append(backend.lowered(module, {}))
            return module.forward

        torch._dynamo.reset()
        torch.compile(lambda y: LAYER(y) * 2, backend=kept, **options)(x)
        return graphs[0]

    assert lowered() is None, "parameters require gradients"
    with torch.no_grad():
        assert lowered(dynamic=True) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert lowered() is None
        graph, fixed = lowered()
    assert len(fixed) == len([*LAYER.parameters()])
    assert sum(node.op == "call_function" for node in graph.graph.nodes) == 3, "t, addmm, mul"


def test_outputs_that_are_views_of_one_memory_stay_so():
    def function(x):
        y = torch.tanh(LAYER(x))
        y[:, :1] = y[:, 1:2]
        return y.chunk(2, -1)[1], y, y.T, x + 1

    x = torch.randn(3, 8)
    with torch.no_grad():
        got, want = torch.compile(function, backend=backend.compile_graph)(x), function(x)
        for y in (got, want):
            y[0].add_(1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [y.stride() for y in got] == [y.stride() for y in want]


CLONES = {
    "of the input": lambda x: (x.clone(), x + 1),
    "of a view": lambda x: (x.T.contiguous(), x[1:].clone(), x.view(-1, 4).clone().T),
    "of another output": lambda x: (y := torch.tanh(x), y.clone(), y.view(-1).clone()),
    "of a parameter": lambda x: (LAYER.weight.clone(), LAYER.weight.T.contiguous(), x + 1),
    "of constants": lambda x: (LAYER.weight * 2, torch.arange(3.0), x + 1),
}


@pytest.mark.parametrize("name", CLONES)
def test_clones_have_memory_of_their_own(name):
    x, compiled = torch.randn(3, 8), torch.compile(CLONES[name], backend=backend.compile_graph)
    with torch.no_grad():
        for _ in range(2):
            got, want, kept = compiled(x), CLONES[name](x), (x.clone(), LAYER.weight.clone())
            for i, y in enumerate(want):
                for z in (got, want):
                    z[i].add_(i + 1)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
                assert got[i].stride() == y.stride()
            torch.testing.assert_close((x, LAYER.weight), kept, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at that of the input
def test_what_is_kept_for_gradients_outlives_a_change_of_the_input():
    def function(x):
        y = x.view(3, 4, 2)
        y.clamp_(-1, 1)
        return F.gelu(y)

    grads = []
    x = torch.randn(3, 8)
    for f in (function, torch.compile(function, backend=backend.compile_graph)):
        y = x.clone().requires_grad_()
        f(y * 1).sum().backward()
        grads.append(y.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_changed_parameters_are_seen():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(3, 8)
    compiled = torch.compile(model, backend=backend.compile_graph)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
            model[0].weight.mul_(1.5)
    assert len(backend._graphs) == 1
