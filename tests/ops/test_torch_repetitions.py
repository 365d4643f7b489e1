"""Operators that a graph has twice: computed once, where no caller can tell."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing of portmm.torch is tested")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from portmm.torch.backend import merge  # noqa: E402


def merged(function, *inputs):
    """The operators of a function after the merge, and the module."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    merge(module.graph)
    module.graph.lint()
    module.recompile()
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"], module


def test_the_same_operators_are_one():
    x = torch.randn(3, 4)
    names, module = merged(lambda x: (x + 1).exp() * (x + 1).exp() + (x + 1.0), x)
    assert names.count("aten.exp.default") == 1
    assert names.count("aten.add.Tensor") == 3, "1 and 1.0 are two operands"
    torch.testing.assert_close(module(x), (x + 1).exp().square() + x + 1)
    names, module = merged(lambda x: torch.maximum(x.clamp(min=0.0), x.clamp(min=-0.0)).split(2)[0].sum(), x)
    assert names.count("aten.clamp.default") == 2, "zeros of two signs"


def test_outputs_stay_apart():
    x = torch.randn(3, 4)
    _, module = merged(lambda x: (x + 1, (x + 1).view(12), (x + 1).t() * 2, (x + 1).t() * 2), x)
    first, second, third, fourth = module(x)
    first.zero_()
    third.zero_()
    torch.testing.assert_close(second, (x + 1).view(12))
    torch.testing.assert_close(fourth, (x + 1).t() * 2)


def test_random_numbers_and_new_memory_are_drawn_twice():
    x = torch.randn(3, 4)
    names, _ = merged(lambda x: torch.rand_like(x) - torch.rand_like(x) + x.new_empty(4) - x.new_empty(4), x)
    assert names.count("aten.rand_like.default") == names.count("aten.new_empty.default") == 2
