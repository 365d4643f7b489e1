"""Models between quantizations: codes between kernels, against the reference."""

import numpy as np
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from test_onnx import FLOAT, model, rng

import portmm.onnx

QUICKLY = True


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("channels", [3, 8])
def test_convolutions_and_products_between_quantizations_are_of_integers(kind, channels):
    point = kind(121 if kind is np.uint8 else -7)
    arrays = {
        "s": np.float32(0.02), "z": point, "w": rng.integers(-127, 128, (12, channels, 3, 3)).astype(np.int8),
        "ws": rng.uniform(0.001, 0.01, 12).astype(np.float32), "wz": np.zeros(12, np.int8),
        "b": rng.integers(-999, 999, 12).astype(np.int32), "t": np.float32(0.15), "o": np.int64([0, -1, 12]),
        "m": rng.integers(-127, 128, (12, 10)).astype(np.int8), "ms": np.float32(0.01), "mz": np.int8(3),
    }  # fmt: skip
    arrays["bs"] = arrays["s"] * arrays["ws"]
    nodes = [
        ("QuantizeLinear", ["x", "s", "z"], ["q"]), ("DequantizeLinear", ["q", "s", "z"], ["a"]),
        ("DequantizeLinear", ["w", "ws", "wz"], ["f"], {"axis": 0}),
        ("DequantizeLinear", ["b", "bs"], ["c"], {"axis": 0}),
        ("Conv", ["a", "f", "c"], ["d"], {"pads": [1, 1, 1, 1], "strides": [2, 1]}),
        ("Relu", ["d"], ["e"]),
        ("QuantizeLinear", ["e", "t", "z"], ["g"]), ("DequantizeLinear", ["g", "t", "z"], ["h"]),
        ("Transpose", ["h"], ["i"], {"perm": [0, 2, 3, 1]}), ("Reshape", ["i", "o"], ["j"]),
        ("QuantizeLinear", ["j", "t", "z"], ["k"]), ("DequantizeLinear", ["k", "t", "z"], ["l"]),
        ("DequantizeLinear", ["m", "ms", "mz"], ["n"]), ("MatMul", ["l", "n"], ["y"]),
    ]  # fmt: skip
    made = model(
        nodes, [("x", FLOAT, ["n", channels, 7, 6])], [("g", TensorProto.UINT8, None), ("y", FLOAT, None)], arrays
    )
    made.graph.output[0].type.tensor_type.elem_type = TensorProto.UINT8 if kind is np.uint8 else TensorProto.INT8
    session = portmm.onnx.load(made)
    for n in (1, 2):
        x = rng.standard_normal((n, channels, 7, 6)).astype(np.float32)
        codes, y = session.run({"x": x})
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        q = np.clip(np.rint(x / arrays["s"]) + point, low, high).astype(np.float64) - point
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(q, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))
        sums = np.einsum("bchwij,ocij->bohw", windows[:, :, ::2], arrays["w"]) + arrays["b"].reshape(-1, 1, 1)
        d = np.maximum(sums * arrays["bs"].reshape(-1, 1, 1).astype(np.float64), 0)
        want = np.clip(np.rint(d / arrays["t"]) + point, low, high)
        apart = np.abs(codes - want)
        assert apart.max() <= 1  # next to a tie
        assert np.count_nonzero(apart) <= 2
        left = (codes.astype(np.float64) - point).transpose(0, 2, 3, 1).reshape(n, -1, 12)
        product = left @ (arrays["m"].astype(np.float64) - 3) * (np.float64(arrays["t"]) * arrays["ms"])
        np.testing.assert_allclose(y, product, rtol=1e-5, atol=1e-4)
    report = session.report({"x": x})
    assert not report.numpy
    assert {"ScaledConv", "ScaledMatMulInteger"} <= set(report.operators)
    assert any(row.kind == "conv" and "-s8-" in row.detail for row in report.rows)


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_values_between_a_convolution_and_a_residual_are_rounded_in_place(kind):
    point = kind(121 if kind is np.uint8 else -7)
    arrays = {
        "s": np.float32(0.03), "z": point, "w": rng.integers(-127, 128, (8, 8, 1, 1)).astype(np.int8),
        "ws": np.float32(0.0041), "wz": np.int8(0), "t": np.float32(0.0517), "u": np.float32(0.0613),
    }  # fmt: skip
    nodes = [
        ("QuantizeLinear", ["x", "s", "z"], ["q"]), ("DequantizeLinear", ["q", "s", "z"], ["a"]),
        ("DequantizeLinear", ["w", "ws", "wz"], ["f"]), ("Conv", ["a", "f"], ["d"]),
        ("QuantizeLinear", ["d", "t", "z"], ["e"]), ("DequantizeLinear", ["e", "t", "z"], ["h"]),
        ("Add", ["h", "a"], ["i"]), ("Relu", ["i"], ["j"]), ("QuantizeLinear", ["j", "u", "z"], ["y"]),
    ]  # fmt: skip
    made = model(nodes, [("x", FLOAT, ["n", 8, 9, 7])], [("y", TensorProto.UINT8, None)], arrays, opset=21)
    made.graph.output[0].type.tensor_type.elem_type = TensorProto.UINT8 if kind is np.uint8 else TensorProto.INT8
    session = portmm.onnx.load(made)
    x = rng.standard_normal((2, 8, 9, 7)).astype(np.float32) * 2
    (codes,), (want,) = session.run({"x": x}), ReferenceEvaluator(made).run(None, {"x": x})
    apart = np.abs(codes.astype(int) - want)
    assert apart.max() <= 1  # next to a tie
    assert np.count_nonzero(apart) <= 4
    report = session.report({"x": x})
    assert [row.kind for row in report.rows] == ["rows", "copy", "conv", "rows"]
    assert report.operators["RoundToCodes"] == 1


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("swapped", [0, 1])
def test_pooling_and_a_head_between_quantizations_are_of_codes(kind, swapped):
    point = kind(9 if kind is np.uint8 else -100)
    weight = rng.integers(-127, 128, (48, 10)).astype(np.int8)
    arrays = {
        "s": np.float32(0.03), "z": point, "w": weight.T.copy() if swapped else weight, "wz": np.zeros(10, np.int8),
        "ws": rng.uniform(0.001, 0.01, 10).astype(np.float32), "b": rng.integers(-999, 999, 10).astype(np.int32),
    }  # fmt: skip
    arrays["bs"] = arrays["s"] * arrays["ws"]
    same = {"axis": 1 - swapped}
    nodes = [
        ("QuantizeLinear", ["x", "s", "z"], ["q"]), ("DequantizeLinear", ["q", "s", "z"], ["a"]),
        ("MaxPool", ["a"], ["c"], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("QuantizeLinear", ["c", "s", "z"], ["d"]), ("DequantizeLinear", ["d", "s", "z"], ["e"]),
        ("Flatten", ["e"], ["f"]), ("QuantizeLinear", ["f", "s", "z"], ["g"]),
        ("DequantizeLinear", ["g", "s", "z"], ["h"]), ("DequantizeLinear", ["w", "ws", "wz"], ["v"], same),
        ("DequantizeLinear", ["b", "bs"], ["u"], {"axis": 0}), ("Gemm", ["h", "v", "u"], ["y"], {"transB": swapped}),
    ]  # fmt: skip
    made = model(nodes, [("x", FLOAT, ["n", 8, 6, 3])], [("y", FLOAT, ["n", 10])], arrays, opset=21)
    session = portmm.onnx.load(made)
    for n in (1, 3):
        x = np.float32(rng.integers(-200, 200, (n, 8, 6, 3)) * 0.03)
        (want,) = ReferenceEvaluator(made).run(None, {"x": x})
        np.testing.assert_allclose(session.run({"x": x})[0], want, rtol=1e-5, atol=1e-4)
    report = session.report({"x": x})
    assert not report.numpy
    assert "Gemm" not in report.operators
    assert report.operators["QuantizeLinear"] == report.operators["ScaledMatMulInteger"] == 1


def test_large_values_saturate_between_kernels():
    large = np.float32([-np.inf, -3e38, -(2.0**24), -(2.0**22), -300, 0, 300, 2.0**22, 2.0**24, 3e38, np.inf, 1])
    nodes = [("Mul", ["x", "x1"], ["y"]), ("QuantizeLinear", ["y", "s", "z"], ["q"])]
    made = model(nodes, [("x", FLOAT, [1, 12])], [("q", TensorProto.UINT8, None)],
                 {"x1": np.float32(1), "s": np.float32(1), "z": np.uint8(7)}, opset=21)  # fmt: skip
    np.testing.assert_array_equal(portmm.onnx.load(made).run({"x": large[None]})[0], [[0] * 5 + [7] + [255] * 5 + [8]])


def test_pooling_of_values_that_are_quantized_otherwise_is_not_of_codes():
    arrays = {"s": np.float32(0.03), "t": np.float32(0.05), "z": np.uint8(128), "n": np.float32(-0.03)}
    for before, after in (("s", "t"), ("n", "n")):
        nodes = [
            ("DequantizeLinear", ["q", before, "z"], ["a"]), ("MaxPool", ["a"], ["c"], {"kernel_shape": [2, 2]}),
            ("QuantizeLinear", ["c", after, "z"], ["y"]),
        ]  # fmt: skip
        codes = TensorProto.UINT8
        made = model(nodes, [("q", codes, [1, 2, 4, 4])], [("y", codes, None)], arrays, opset=21)
        q = rng.integers(0, 256, (1, 2, 4, 4)).astype(np.uint8)
        (want,) = ReferenceEvaluator(made).run(None, {"q": q})
        assert np.abs(portmm.onnx.load(made).run({"q": q})[0].astype(int) - want).max() <= 1


def test_products_of_one_quantized_array_are_joined():
    nodes, arrays = [("DynamicQuantizeLinear", ["x"], ["q", "sx", "zx"])], {}
    for i in range(3):
        arrays |= {f"b{i}": rng.integers(-128, 128, (32, 192)).astype(np.int8), f"zb{i}": np.int8(0)}
        arrays |= {f"sb{i}": np.float32(0.01 * (i + 1)), f"bias{i}": rng.random(192, np.float32)}
        nodes += [
            ("Mul", ["sx", f"sb{i}"], [f"s{i}"]), ("MatMulInteger", ["q", f"b{i}", "zx", f"zb{i}"], [f"i{i}"]),
            ("Cast", [f"i{i}"], [f"f{i}"], {"to": FLOAT}), ("Mul", [f"f{i}", f"s{i}"], [f"y{i}"]),
            ("Add", [f"y{i}", f"bias{i}"], [f"z{i}"]),
        ]  # fmt: skip
    made = model(nodes, [("x", FLOAT, [5, 32])], [(f"z{i}", FLOAT, [5, 192]) for i in range(3)], arrays)
    x = rng.standard_normal((5, 32)).astype(np.float32)
    session = portmm.onnx.load(made)
    for i, z in enumerate(session.run({"x": x})):
        scale = np.float32(x.max() - x.min()) / np.float32(255)
        zero = np.rint(-x.min() / scale)
        codes = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
        want = codes @ arrays[f"b{i}"].astype(np.float64) * scale * arrays[f"sb{i}"] + arrays[f"bias{i}"]
        np.testing.assert_allclose(z, want, rtol=1e-5, atol=1e-5)
    assert [row.kind for row in session.report({"x": x}).rows].count("product") == 1
