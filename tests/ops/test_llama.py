"""The example of a decoder: its cache changes no token, and its tokens are those of the framework."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
from places import ROOT

import portmm as pm

QUICKLY = True
LOGITS = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.05, "int4": 0.45, "int4-dynamic": 0.45}


@pytest.fixture
def llama(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("llama")


def test_the_cache_changes_no_token(llama):
    config = dataclasses.replace(llama.SIZES["tiny"], layers=2, vocabulary=64)
    weights = llama.random_weights(config)
    exact = llama.build(config, weights, "float32")
    prompt = np.random.default_rng(2).integers(0, 64, (2, 7))
    tokens = exact.generate(prompt, 5)
    so_far = prompt
    for i in range(5):
        logits = exact.logits(so_far, llama.Cache(config, 2, so_far.shape[1]))
        np.testing.assert_array_equal(logits.argmax(-1), tokens[:, i])
        so_far = np.concatenate([so_far, tokens[:, i : i + 1]], 1)
    for kind, bound in LOGITS.items():
        got = llama.build(config, weights, kind).logits(so_far, llama.Cache(config, 2, 12, kind))
        want = exact.logits(so_far, llama.Cache(config, 2, 12))
        assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)
    sampled = exact.generate(prompt, 5, temperature=2.0)
    np.testing.assert_array_equal(sampled, exact.generate(prompt, 5, temperature=2.0))
    assert (sampled != tokens).any()


def test_rows_of_long_prompts_are_rounded_to_bfloat16_where_that_is_faster(llama, monkeypatch):
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed: NumPy has no bfloat16")
    rng = np.random.default_rng(0)
    product = llama.Product(rng.standard_normal((96, 48)).astype(np.float32), "int4-dynamic")
    x = rng.standard_normal((llama.PROMPT, 96)).astype(np.float32)
    exact, errors = pm.matmul(x, product.weight), []
    for fast in (True, False):
        monkeypatch.setattr(llama, "multiplies_bfloat16", lambda fast=fast: fast)
        got = product(x)
        assert got.dtype == np.float32
        errors.append(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    assert errors[0] < 0.004 < errors[1] < 0.02
    np.testing.assert_allclose(product(x[:3]), got[:3], rtol=1e-5, atol=1e-5)  # few rows are int8


def test_tokens_are_those_of_transformers(llama):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: tokens are not compared with its own")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: no tokens to compare with"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=160,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 96, (8, 9))
    with torch.no_grad():
        so_far = prompt
        for _ in range(12):
            so_far = torch.cat([so_far, module(so_far).logits[:, -1].argmax(-1)[:, None]], 1)
    tokens = llama.from_module(module, "float32").generate(prompt.numpy(), 12)
    np.testing.assert_array_equal(tokens, so_far[:, 9:].numpy())


def test_weights_of_floats_of_four_bits(llama):
    """Side by side, and beside others."""
    rng = np.random.default_rng(0)
    w = [rng.standard_normal((64, 32)).astype(np.float32) for _ in range(3)]
    small = [pm.quantize_fp4(x) for x in w]
    for weights in (small, [small[0], pm.quantize(w[1], group=32), w[2].T]):
        joined = llama.side_by_side(weights)
        parts = [pm.dequantize(x) if isinstance(x, pm.Quantized) else x.T for x in weights]
        got = pm.dequantize(joined) if isinstance(joined, pm.Quantized) else joined
        np.testing.assert_array_equal(got, np.concatenate(parts, 1))
    turned = llama._halves(small[0], 2)
    assert turned.values == "e2m1"
    np.testing.assert_array_equal(pm.dequantize(turned)[:, :4], pm.dequantize(small[0])[:, [0, 2, 4, 6]])


def test_tokens_of_a_gguf_file_are_those_of_its_values(llama, tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: no file of a decoder")
    monkeypatch.syspath_prepend(ROOT / "bench")
    config, kind = dataclasses.replace(llama.SIZES["tiny"], layers=2, vocabulary=64), gguf.GGMLQuantizationType.Q4_0
    monkeypatch.setitem(llama.SIZES, "small", config)
    importlib.import_module("decoders").write(tmp_path / "small.gguf", "small")
    weights = {
        n: w if w.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind)
        for n, w in llama.random_weights(config).items()
    }
    prompt, exact = np.random.default_rng(2).integers(0, 64, (2, 7)), llama.build(config, weights, "float32")
    got = llama.from_gguf(tmp_path / "small.gguf", "float32").generate(prompt, 5)
    np.testing.assert_array_equal(got, exact.generate(prompt, 5))
    want = exact.logits(prompt, llama.Cache(config, 2, 7))
    in_place = llama.from_gguf(tmp_path / "small.gguf", "int4").logits(prompt, llama.Cache(config, 2, 7))
    assert np.linalg.norm(in_place - want) <= 1e-5 * np.linalg.norm(want)
