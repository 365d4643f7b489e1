"""Layers of checkpoints, packed: products are those of the dequantized weights."""

from __future__ import annotations

import numpy as np
import pytest

import portmm as pm
from portmm.weights.safetensors import write

QUICKLY = True
RNG = np.random.default_rng(0)


def words(x):
    return np.ascontiguousarray(x).view("<i4")


def test_layers_multiply(tmp_path):
    n, k = 48, 64
    tensors, options = {}, {}
    for name, bits, group in (("four", 4, 32), ("odd", 4, 4), ("eight", 8, k), ("grouped", 8, 32)):
        codes = RNG.integers(0, 2**bits, (n, k), np.uint8)
        packed = codes if bits == 8 else codes[:, ::2] | (codes[:, 1::2] << 4)
        scale = (RNG.random((n, k // group)) + 0.5).astype(np.float16)
        tensors |= {f"{name}.weight_packed": words(packed), f"{name}.weight_shape": np.array([n, k])}
        tensors[f"{name}.weight_scale"] = scale
        options[name] = {"config_groups": {"g": {"weights": {"num_bits": bits, "group_size": group}}}}
    tensors["four.weight_g_idx"] = RNG.permutation(k) // 32
    write(tmp_path / "model.safetensors", tensors)
    x = RNG.standard_normal((3, k), np.float32)
    for name, config in options.items():
        file = pm.open_checkpoint(tmp_path, config={"quant_method": "compressed-tensors", **config})
        (layer,) = pm.pack_checkpoint(file, filter=name.__eq__, progress=True).values()
        want = x @ file.layers[name].dequantized().astype(np.float32)
        for dynamic in (None, True) if name == "four" else (None,):
            error = np.abs(layer(x, dynamic=dynamic) - want).max() / np.abs(want).max()
            assert error < (1e-3 if name == "four" and not dynamic else 0.02)
    assert (layer.order, layer.scales) == (None, None)


def test_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: its files are not packed")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    x = RNG.standard_normal((48, 64)).astype(np.float32)
    for kind in ("Q4_0", "Q8_0"):
        of = getattr(gguf.GGMLQuantizationType, kind)
        writer.add_tensor(kind, gguf.quants.quantize(x, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    packed = pm.pack_checkpoint(tmp_path / "m.gguf")
    rows = RNG.standard_normal((3, 64)).astype(np.float32)
    want = rows @ pm.open_gguf(tmp_path / "m.gguf").tensors["Q4_0"].dequantized().T
    np.testing.assert_allclose(packed["Q4_0"](rows), want, rtol=1e-5, atol=1e-4)
    assert list(packed) == ["Q4_0"]
