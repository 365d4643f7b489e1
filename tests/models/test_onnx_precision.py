"""Products of float32 models in a narrower type: results, what is rounded, and kernels."""

import numpy as np
import pytest
from onnx import TensorProto
from places import BENCH
from test_onnx import FLOAT, model

import portmm as pm
import portmm.onnx
from portmm.onnx import OnnxError
from portmm.spec import elementwise as e

QUICKLY = True
rng = np.random.default_rng(0)
BOUND = 2.0**-6
"""Errors over the largest result: operands have 8 bits."""


def error(found, want):
    return np.abs(found.astype(np.float64) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_a_transformer_s_layer_is_as_many_kernels_as_in_float32(monkeypatch, precision):
    monkeypatch.syspath_prepend(str(BENCH))
    import model_graphs

    made = model_graphs.bert(model_graphs.Encoder(32, 4, 64, 2), vocabulary=50)
    x = model_graphs.feeds(made, batch=2, length=9)
    x["input_ids"] %= 50
    plain, session = portmm.onnx.load(made), portmm.onnx.load(made, precision=precision)
    (want,), (found,) = plain.run(None, x), session.run(None, x)
    assert found.dtype == np.float32
    assert 0 < error(found, want) < BOUND
    report = session.report(x)
    assert len(report.rows) <= len(plain.report(x).rows)
    products = [row for row in report.rows if row.kind == "product"]
    assert all(row.detail.split("(")[0].split()[-1].startswith(precision) for row in products)
    assert report.constants < plain.report(x).constants


def test_convolutions_read_what_is_rounded_once(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import model_graphs

    made = model_graphs.resnet50(image=32, stages=((8, 2),), classes=10)
    x = model_graphs.feeds(made, batch=2)
    plain, session = portmm.onnx.load(made), portmm.onnx.load(made, precision="bf16")
    assert error(session.run(None, x)[0], plain.run(None, x)[0]) < BOUND
    rows = [row for row in session.report(x).rows if row.kind == "rows"]
    assert len(rows) == 2  # of the images, and of the means
    assert not session.report(x).numpy


def test_attention_is_one_launch_among_kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import model_graphs

    made = model_graphs.bert(model_graphs.Encoder(64, 2, 64, 2), vocabulary=50)
    x = model_graphs.feeds(made, batch=2, length=48)
    x["input_ids"] %= 50
    x["attention_mask"][1, 30:] = 0
    session = portmm.onnx.load(made, precision="bf16")
    want = portmm.onnx.load(made).run(None, x)[0]
    assert error(session.run(None, x)[0], want) < BOUND
    assert error(session.run(None, x)[0], want) < BOUND  # in other memory
    rows = [row for row in session.report(x).rows if row.kind == "attention"]
    assert [row.detail for row in rows] == ["2 x 2 x 48 x 48 x 32"] * 2


def test_error_functions_of_rounded_results_are_fast_ones():
    grid = np.linspace(-9, 9, 4096, dtype=np.float32).reshape(64, 64)
    exact = e.erf(grid.astype(np.float64))
    assert np.abs(pm.fuse(e.fast_erf)(grid) - exact).max() < 2.5e-5
    nodes = [("Div", ["x", "c"], ["a"]), ("Erf", ["a"], ["b"]), ("MatMul", ["b", "w"], ["y"])]
    made = model(nodes, [("x", FLOAT, [64, 64])], [("y", FLOAT, [64, 64])],
                 {"c": np.float32(1.7), "w": np.eye(64, dtype=np.float32)})  # fmt: skip
    want = e.erf(grid.astype(np.float64) / np.float32(1.7))
    assert np.abs(portmm.onnx.load(made).run({"x": grid})[0] - want).max() < 1e-6
    assert np.abs(portmm.onnx.load(made, precision="bf16").run({"x": grid})[0] - want).max() < 2.0**-8


def test_fast_error_functions_end_at_one():
    far = np.float32([3.01, 3.5, 9, 1e4, 1e30, np.inf])
    for sign in (1, -1):
        np.testing.assert_array_equal(pm.fuse(e.fast_erf)(sign * far), np.full(far.shape, sign, np.float32))
    x = np.tile(np.float32([-np.inf, -1e30, -1e4, -9, -5, 0, 5, 9]), (8, 1))
    made = model([("Gelu", ["x"], ["g"]), ("MatMul", ["g", "w"], ["y"])], [("x", FLOAT, [8, 8])],
                 [("y", FLOAT, [8, 8])], {"w": np.eye(8, dtype=np.float32)}, opset=20)  # fmt: skip
    want = np.tile(np.float32([0, 0, 0, 0, 0, 0, 5, 9]), (8, 1))
    np.testing.assert_array_equal(portmm.onnx.load(made, precision="bf16").run({"x": x})[0], want)


@pytest.mark.parametrize("op", ["Erf", "Gelu"])
@pytest.mark.parametrize("read", ["g", "s", "z"])
def test_error_functions_that_are_read_in_float32_are_exact(op, read):
    """Also where a product reads them, rounded."""
    nodes = [(op, ["x"], ["g"]), ("Add", ["g", "c"], ["s"]), ("MatMul", ["s", "w"], ["y"]), ("Softmax", ["g"], ["z"])]
    made = model([n for n in nodes if n[0] != "Softmax" or read == "z"], [("x", FLOAT, [64, 64])],
                 [(x, FLOAT, [64, 64]) for x in (read, "y")],
                 {"c": np.float32(1), "w": np.eye(64, dtype=np.float32)}, opset=20)  # fmt: skip
    x = {"x": np.linspace(-4, 4, 4096, dtype=np.float32).reshape(64, 64)}
    want = portmm.onnx.load(made).run(x)[0]
    np.testing.assert_allclose(portmm.onnx.load(made, precision="bf16").run(x)[0], want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_filters_of_few_channels_have_zeros_to_whole_steps(channels, dilation):
    w, b = (rng.integers(-3, 4, n).astype(np.float32) for n in ((8, channels, 5, 5), 8))
    how = {"pads": [2, 1, 2, 3], "strides": [2, 2], "dilations": [dilation] * 2}
    made = model([("Conv", ["x", "w", "b"], ["y"], how)], [("x", FLOAT, [2, channels, 13, 14])], [("y", FLOAT, None)],
                 {"w": w, "b": b})  # fmt: skip
    x = rng.integers(-3, 4, (2, channels, 13, 14)).astype(np.float32)
    want = portmm.onnx.load(made).run({"x": x})[0]
    np.testing.assert_array_equal(portmm.onnx.load(made, precision="bf16").run({"x": x})[0], want)


def test_results_and_other_readers():
    """A result that a product reads is not rounded; constants that others read stay as they are."""
    w = rng.standard_normal((16, 16)).astype(np.float32)
    nodes = [
        ("Add", ["x", "x"], ["a"]), ("Reshape", ["a", "s"], ["r"]), ("MatMul", ["r", "w"], ["p"]),
        ("Add", ["p", "w"], ["y"]), ("Mul", ["r", "y"], ["z"]),
    ]  # fmt: skip
    made = model(
        nodes, [("x", FLOAT, [4, 64])], [("a", FLOAT, [4, 64]), ("r", FLOAT, [16, 16]), ("z", FLOAT, [16, 16])],
        {"w": w, "s": np.int64([16, 16])},
    )  # fmt: skip
    x = rng.standard_normal((4, 64)).astype(np.float32)
    a, r, z = portmm.onnx.load(made, precision="bf16").run({"x": x})
    np.testing.assert_array_equal(a, x + x)
    assert error(r, (x + x).reshape(16, 16)) < 2.0**-8
    y = (x + x).reshape(16, 16).astype(np.float64) @ w + w
    assert error(z, (x + x).reshape(16, 16) * y) < BOUND


def test_models_of_narrow_types_and_other_names():
    half = TensorProto.FLOAT16
    w = rng.standard_normal((16, 8)).astype(np.float16)
    made = model([("MatMul", ["x", "w"], ["y"])], [("x", half, [4, 16])], [("y", half, [4, 8])], {"w": w})
    x = {"x": rng.standard_normal((4, 16)).astype(np.float16)}
    want = portmm.onnx.load(made).run(x)[0]
    np.testing.assert_array_equal(portmm.onnx.load(made, precision="bf16").run(x)[0], want)
    with pytest.raises(OnnxError, match="precision 'half' is unknown; products multiply in f32, bf16, f16"):
        portmm.onnx.load(made, precision="half")
