"""Checkpoints of models: shards, the formats of their layers, and damaged files."""

from __future__ import annotations

import importlib.util
import json
import random

import ml_dtypes
import numpy as np
import pytest

import portmm as pm
from portmm.weights.safetensors import write

RNG = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)
INDEX = "model.safetensors.index.json"


def folder(path, tensors, config=None, metadata=None, shards=1):
    """A model's folder, in shards with an index."""
    names = list(tensors)
    if shards == 1:
        write(path / "model.safetensors", tensors, metadata)
    else:
        places = {n: f"model-{1 + i % shards:05}-of-{shards:05}.safetensors" for i, n in enumerate(names)}
        for shard in set(places.values()):
            write(path / shard, {n: tensors[n] for n in names if places[n] == shard}, metadata)
        (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    if config is not None:
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def nibbles(x, axis, order=range(8)):
    """Words of eight values along an axis, the first of `order` in the lowest bits."""
    parts = np.moveaxis(x, axis, -1).reshape(*np.moveaxis(x, axis, -1).shape[:-1], -1, 8).astype(np.uint32)
    words = sum(parts[..., e] << np.uint32(4 * i) for i, e in enumerate(order))
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def layer(k=64, n=16, group=32, dtype=np.float16, bits=4):
    """Integers, zero points and scales (inputs, outputs), and the weight as formats compute it: one rounding."""
    codes, zeros = RNG.integers(0, 2**bits, (k, n)), RNG.integers(1, 2**bits, (-(-k // group), n))
    scales = (RNG.random(zeros.shape) * 0.1 + 0.01).astype(dtype)
    want = (codes - np.repeat(zeros, group, 0)[:k]).astype(np.float32) * np.repeat(scales.astype(np.float32), group, 0)[
        :k
    ]
    return codes, zeros, scales, want.astype(dtype)


def same(file, name, want):
    found = file.layers[name]
    got = found.dequantized()
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))
    q, order = found.quantized()
    rows = want if order is None else want[order]
    rounded = np.abs(want.astype(np.float64)).max() * 2.0**-8
    np.testing.assert_allclose(pm.dequantize(q, np.float64), rows.astype(np.float64), rtol=0, atol=rounded)
    return q, order


@pytest.mark.parametrize("shards", [1, 3])
def test_awq(tmp_path, shards):
    codes, zeros, scales, want = layer()
    awq = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": nibbles(codes, 1, awq), "qzeros": nibbles(zeros, 1, awq), "scales": scales}
    tensors = {f"model.up_proj.{n}": x for n, x in parts.items()} | {"norm.weight": np.arange(3, dtype=BF16)}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    file = pm.open_checkpoint(folder(tmp_path, tensors, config, shards=shards))
    assert (list(file.layers), set(file.tensors)) == (["model.up_proj"], set(tensors))
    q, order = same(file, "model.up_proj", want)
    assert (q.group, order, file.tensors["norm.weight"].flags.writeable) == (32, None, False)
    np.testing.assert_array_equal(file.tensors["norm.weight"].astype(int), [0, 1, 2])
    older = {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quant_config.json").write_text(json.dumps(older))
    same(pm.open_checkpoint(tmp_path), "model.up_proj", want)
    same(pm.open_checkpoint(tmp_path / INDEX if shards > 1 else tmp_path / "model.safetensors"), "model.up_proj", want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gptq(tmp_path, dtype):
    codes, zeros, scales, want = layer(dtype=np.dtype(dtype) if dtype != "bfloat16" else BF16)
    g_idx = np.arange(64, dtype=np.int32) // 32
    for order in (np.arange(64), RNG.permutation(64)):
        for version in ("gptq", "gptq_v2"):
            stored = (zeros - (version == "gptq")) & 15
            tensors = {
                "l.qweight": nibbles(codes[order], 0),
                "l.qzeros": nibbles(stored, 1),
                "l.scales": scales,
                "l.g_idx": g_idx[order],
                "l.bias": np.ones(16, np.float16),
            }
            config = {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 32,
                "desc_act": True,
                "checkpoint_format": version,
            }
            q, found = same(pm.open_checkpoint(folder(tmp_path, tensors, config)), "l", want[order])
            assert (q.group, found is None) == (32, bool((np.diff(order) > 0).all()))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors(tmp_path, bits, dtype):
    half = 2 ** (bits - 1)
    for strategy, group in (("group", 32), ("channel", 64), ("tensor", 64)):
        codes, zeros, scales, want = layer(group=group, dtype=dtype, bits=bits)
        if strategy == "tensor":
            scales, zeros = scales[:, :1], zeros[:, :1]
            want = ((codes - zeros).astype(np.float32) * scales.astype(np.float32)).astype(dtype)

        def words(x):
            return nibbles(x, 1) if bits == 4 else np.ascontiguousarray(x.astype(np.uint8)).view("<i4")

        tensors = {
            "weight_packed": words(codes.T),
            "weight_shape": np.array([16, 64]),
            "weight_scale": scales.T if strategy != "tensor" else scales.reshape(1),
            "weight_zero_point": words(zeros).T if strategy != "tensor" else (zeros - half).astype(np.int8).reshape(1),
        }
        weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": False}
        weights["group_size"] = group if strategy == "group" else None
        config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
        named = {f"a.b.{n}": np.ascontiguousarray(x) for n, x in tensors.items()}
        q, _ = same(pm.open_checkpoint(folder(tmp_path, named, config)), "a.b", want)
        assert (q.bits, q.group) == (bits, group)
        del named["a.b.weight_zero_point"]  # symmetric
        step = np.broadcast_to(np.repeat(scales.astype(np.float32), group, 0), (64, 16 if strategy != "tensor" else 1))
        plain = ((codes - half).astype(np.float32) * step).astype(dtype)
        q, _ = same(pm.open_checkpoint(folder(tmp_path, named, config)), "a.b", plain)
        assert q.symmetric
    integers = {"x.weight": (codes.T - half).astype(np.int8), "x.weight_scale": np.full((16, 1), 0.5, dtype)}
    found = pm.open_checkpoint(folder(tmp_path, integers, {"quant_method": "compressed-tensors"}))
    same(found, "x", ((codes - half) * 0.5).astype(dtype))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_floats_of_four_bits_of_compressed_tensors(tmp_path, kind):
    """Scales are e4m3 over a reciprocal of one float32, or exponents; the weight is rounded once, to bfloat16."""
    size = {"nvfp4": 16, "mxfp4": 32}[kind]
    codes, table = RNG.integers(0, 16, (64, 24)), np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    tensors = {"weight_packed": (codes[::2] | codes[1::2] << 4).T.astype(np.uint8)}
    if kind == "nvfp4":
        scales, whole = (RNG.random((24, 4)) * 400 + 1).astype(ml_dtypes.float8_e4m3fn), np.float32(1234.5)
        tensors |= {"weight_scale": scales, "weight_global_scale": np.array([whole])}
        steps = scales.astype(np.float32) / whole
    else:
        tensors["weight_scale"] = RNG.integers(100, 140, (24, 2)).astype(np.uint8)
        steps = 2.0 ** (tensors["weight_scale"].astype(np.float32) - 127)
    values = np.where(codes < 8, 1, -1) * table[codes % 8]
    want = (values * np.repeat(steps.T, size, 0)).astype(np.float32).astype(BF16)
    about = {"num_bits": 4, "type": "float", "group_size": size, "strategy": "tensor_group", "symmetric": True}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": about}}}
    named = {f"a.{n}": np.ascontiguousarray(x) for n, x in tensors.items()}
    q, _ = same(pm.open_checkpoint(folder(tmp_path, named, config)), "a", want)
    assert (q.values, q.group) == ("e2m1", size)
    np.testing.assert_array_equal(pm.dequantize(q, np.float64), values * np.repeat(steps.T.astype(np.float64), size, 0))
    damaged = [
        ({"a.weight_scale": np.ones((24, 4), np.float16)}, about, "float16"),
        ({"a.weight_packed": named["a.weight_packed"].astype(np.int32)}, about, "int32"),
        ({"a.weight_packed": named["a.weight_packed"][:7]}, about, "shape"),
        ({"a.weight_scale": named["a.weight_scale"][:, :1]}, about, "groups of 64 inputs"),
        ({"a.weight_zero_point": np.zeros((24, 4), np.int8)}, about, "zero points"),
        ({"a.weight_global_scale": np.zeros(1, np.float32)}, about, "finite"),
        ({"a.weight_global_scale": np.zeros(2, np.float32)}, about, "one float32"),
        ({}, about | {"num_bits": 8}, "floats of 8 bits"),
        ({}, about | {"type": "complex"}, "'complex'"),
    ]
    for more, weights, match in damaged:
        config["config_groups"]["g"]["weights"] = weights
        file = pm.open_checkpoint(folder(tmp_path, named | more, config))
        with pytest.raises(pm.CheckpointError, match=match):
            file.layers["a"].dequantized()


@pytest.mark.skipif(not importlib.util.find_spec("compressed_tensors"), reason="compressed-tensors is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_files_of_floats_of_four_bits_of_compressed_tensors(tmp_path, kind):
    import torch
    from compressed_tensors.compressors import mxfp4, nvfp4
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from safetensors.torch import save_file

    if kind == "nvfp4":
        compressor, size, more = nvfp4.NVFP4PackedCompressor, 16, {"strategy": "tensor_group"}
        state = {"weight_scale": torch.rand(24, 4) * 400 + 1, "weight_global_scale": torch.tensor([777.25])}
    else:
        compressor, size, more = mxfp4.MXFP4PackedCompressor, 32, {"strategy": "group"}
        state = {"weight_scale": 2.0 ** torch.randint(-9, 5, (24, 2))}
    args = QuantizationArgs(num_bits=4, symmetric=True, type="float", group_size=size, **more)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = compressor.compress({"weight": torch.randn(24, 64).bfloat16()} | state, scheme)
    save_file({f"l.{n}": x for n, x in state.items()}, tmp_path / "model.safetensors")
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": args.model_dump(mode="json")}}}
    got = pm.open_checkpoint(tmp_path, config=config).layers["l"].dequantized()
    np.testing.assert_array_equal(got.T.astype(np.float32), compressor.decompress(state, scheme)["weight"].float())


def torchao(kind, block, **more):
    return json.dumps({"_type": kind, "_data": {"block_size": block, **more}})


@pytest.mark.parametrize("shards", [1, 2])
def test_torchao(tmp_path, shards):
    codes, zeros, scales, want = layer(dtype=BF16)
    floats = (RNG.random((2, 16)) - 0.5).astype(BF16)
    both = (codes.T ^ 8).astype(np.uint8)
    tensors = {
        "0._weight_qdata": (both[:, ::2] | (both[:, 1::2] << 4)).view(np.int8),
        "0._weight_scale": scales,
        "0._weight_zero_point": floats,
        "1._weight_qdata": (codes.T - 8).astype(np.int8),
        "1._weight_scale": np.ascontiguousarray(scales.T),
        "1._weight_zero_point": (zeros.T - 8).astype(np.int8),
        "2._weight_qdata": (codes.T - 8).astype(np.int8),
        "2._weight_scale": np.full((16, 1), 0.1, np.float32),
        "3._weight_packed_weights": np.zeros(3, np.int8),
        "3.bias": np.zeros(3, np.float32),
    }
    named = {"_type": "torch.dtype", "_data": "bfloat16"}
    metadata = {
        "0.weight": torchao("Int4Tensor", [1, 32], shape=[16, 64]),
        "1.weight": torchao("IntxUnpackedToInt8Tensor", [1, 32], target_dtype=named | {"_data": "int4"}, dtype=named),
        "2.weight": torchao("Int8Tensor", [1, 64], dtype=named),
        "3.weight": torchao("IntxOpaqueTensor", [1, 64]),
        "3.bias": json.dumps({"_type": "Tensor"}),
        "tensor_names": json.dumps(["0.weight", "1.weight", "2.weight", "3.weight", "3.bias"]),
    }
    file = pm.open_checkpoint(folder(tmp_path, tensors, metadata=metadata, shards=shards))
    assert set(file.layers) == {"0.weight", "1.weight", "2.weight", "3.weight"}
    step = np.repeat(scales.astype(np.float32), 32, 0)
    affine = (codes - 8).astype(np.float32) * step + np.repeat(floats.astype(np.float32), 32, 0)
    same(file, "0.weight", affine.astype(BF16))
    q, _ = same(file, "1.weight", want)
    assert (q.bits, q.group) == (4, 32)
    same(file, "2.weight", ((codes - 8).astype(np.float32) * np.float32(0.1)).astype(BF16))
    with pytest.raises(pm.CheckpointError, match=r"IntxOpaqueTensor.*those that are read are Int4Tensor"):
        file.layers["3.weight"].dequantized()


@pytest.mark.skipif(not importlib.util.find_spec("compressed_tensors"), reason="compressed-tensors is not installed")
@pytest.mark.filterwarnings("ignore")
def test_files_of_compressed_tensors(tmp_path):
    import torch
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Compressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from safetensors.torch import save_file

    for bits, symmetric, size in ((4, True, 32), (4, False, 128), (8, True, 32), (8, False, 64)):
        args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=size, type="int")
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        scale = (torch.rand(24, 256 // size) + 0.1).bfloat16()
        zero = (
            torch.zeros(scale.shape, dtype=torch.int8)
            if symmetric
            else torch.randint(-8, 8, scale.shape).to(torch.int8)
        )
        state = {"weight": torch.randn(24, 256).bfloat16(), "weight_scale": scale, "weight_zero_point": zero}
        state = Compressor.compress(state, scheme)
        save_file({f"l.{n}": x for n, x in state.items()}, tmp_path / "model.safetensors")
        config = {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": args.model_dump(mode="json")}},
        }
        got = pm.open_checkpoint(tmp_path, config=config).layers["l"].dequantized()
        np.testing.assert_array_equal(got.T.astype(np.float32), Compressor.decompress(state, scheme)["weight"].float())


def small(path, **config):
    codes, zeros, scales, _ = layer()
    parts = {"qweight": nibbles(codes, 0), "qzeros": nibbles(zeros, 1), "scales": scales}
    tensors = {f"l.{n}": x for n, x in parts.items()}
    return folder(path, tensors, {"quant_method": "gptq", "bits": 4, **config}, shards=2)


def test_indices_that_cannot_be_followed(tmp_path):
    small(tmp_path)
    whole = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    first, second = sorted(set(whole.values()))
    cases = [
        ("[]", "not an object"),
        ("{", "no JSON"),
        ("[" * 100000, "no JSON"),
        ('{"weight_map": 3}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        (json.dumps({"weight_map": whole | {"x": first}}), "it does not"),
        (json.dumps({"weight_map": whole | {"l.scales": "none.safetensors"}}), "is not there"),
        (json.dumps({"weight_map": dict.fromkeys(whole, first)}), "it does not"),
        (json.dumps({"weight_map": {n: x for n, x in whole.items() if n != "l.scales"}}), "does not name"),
        *((json.dumps({"weight_map": {"a": x}}), "in its folder") for x in ("../a", "/etc/passwd", "", "..", "a\0b")),
    ]
    for text, match in cases:
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(pm.PortmmError, match=match):
            pm.open_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": whole}))
    (tmp_path / second).write_bytes((tmp_path / second).read_bytes()[:-1])
    with pytest.raises(pm.PortmmError, match="take"):
        pm.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "hqq"}, "'hqq'; known are gptq, awq"),
        ({"quant_method": ["gptq"]}, "known are"),
        ({"bits": "4"}, "bits is '4'"),
        ({"bits": 3}, "bits is 3"),
        ({"bits": 1 << 70}, "not a number"),
        ({"group_size": 8}, "scales has shape"),
        ({"checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq"}, "both be"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv'"),
    ],
)
def test_layers_that_do_not_fit(tmp_path, config, match):
    with pytest.raises(pm.CheckpointError, match=match):
        pm.open_checkpoint(small(tmp_path, **config)).layers["l"].quantized()


def test_quantized_tensors_need_a_configuration(tmp_path):
    small(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(pm.CheckpointError, match="pass its quantization_config"):
        pm.open_checkpoint(tmp_path)


def broken(rng, tensors, metadata, config):
    """One of many ways to be wrong."""
    name = rng.choice(sorted(tensors))
    x, way = tensors[name], rng.randrange(6)
    if way == 0:
        del tensors[name]
    elif way == 1:
        tensors[name] = x[: rng.randrange(len(x) + 1)]
    elif way == 2:
        tensors[name] = x.astype(rng.choice(("int8", "int32", "int64", "float32", "uint8", "bool")))
    elif way == 3:
        tensors[name] = x.reshape(rng.choice(((-1,), (1, -1), (-1, 1), (1, 1, -1))))
    elif way == 4:
        size = rng.choice((0, 1, 2, 3, 8, 1 << 20, 1 << 62, -1, None, "x", 1.5))
        weights = {"num_bits": size, "group_size": size}
        config.update({"bits": size, "group_size": size, "config_groups": {"g": {"weights": weights}}})
    else:
        metadata.update(
            {n: v.replace(rng.choice("[]{}132"), rng.choice(("", "9", "]")), 1) for n, v in metadata.items()}
        )


def test_damaged_layers_are_refused_or_read(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    codes, zeros, scales, _ = layer()
    packed = {"weight_packed": nibbles(codes.T, 1), "weight_shape": np.array([16, 64]), "weight_scale": scales.T}
    formats = {
        "gptq": {
            "qweight": nibbles(codes, 0),
            "qzeros": nibbles(zeros, 1),
            "scales": scales,
            "g_idx": np.arange(64) // 32,
        },
        "awq": {"qweight": nibbles(codes, 1), "qzeros": nibbles(zeros, 1), "scales": scales},
        "compressed-tensors": packed | {"weight_zero_point": nibbles(zeros, 1).T, "weight_g_idx": np.arange(64) % 2},
        "torchao": {
            "_weight_qdata": np.ascontiguousarray(nibbles(codes.T, 1)).view(np.int8),
            "_weight_scale": scales,
            "_weight_zero_point": scales,
        },
    }
    rng, read = random.Random(2), 0  # noqa: S311 - no secret
    for i in range(240):
        method = list(formats)[i % len(formats)]
        tensors = {f"l.{n}": np.ascontiguousarray(x) for n, x in formats[method].items()}
        kind = rng.choice(("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"))
        metadata = {"l.weight": torchao(kind, [1, 32]), "tensor_names": '["l.weight"]'} if method == "torchao" else {}
        config = {"quant_method": method, "bits": 4}
        for _ in range(rng.randrange(3)):
            if tensors:
                broken(rng, tensors, metadata, config)
        write(tmp_path / "model.safetensors", tensors, metadata)
        try:
            for found in pm.open_checkpoint(tmp_path, config=config).layers.values():
                assert found.dequantized().size <= 1 << 16
                read += 1
        except pm.PortmmError:
            continue
    assert read > 60
