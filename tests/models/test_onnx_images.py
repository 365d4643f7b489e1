"""Models of images: convolutions with what follows them, pooling, group norms, and copies of images."""

from collections import Counter

import numpy as np
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from places import BENCH
from test_onnx import FLOAT, model, rng

import portmm.onnx

QUICKLY = True


@pytest.mark.filterwarnings("ignore")  # those of onnx's reference evaluator
def test_convolutions_take_what_follows_them(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import model_graphs
    from onnx.reference import ReferenceEvaluator

    made = model_graphs.resnet50(image=32, stages=((8, 2),), classes=10)
    x = model_graphs.feeds(made, batch=2)
    session = portmm.onnx.load(made)
    (want,) = ReferenceEvaluator(made).run(None, x)
    np.testing.assert_allclose(session.run(None, x)[0], want, rtol=1e-4, atol=1e-4)
    report = session.report(x)
    assert not report.numpy
    assert {row.kind for row in report.rows if "Relu" in row.what} == {"copy", "conv", "product"}
    assert not any(row.what.startswith(("Relu", "Add")) for row in report.rows)


@pytest.mark.parametrize(("order", "after"), [("DCR", "Relu"), ("CRD", ""), ("CRD", "Add")])
def test_convolutions_store_blocks_of_pixels(order, after):
    w, bias = (np.float32(rng.integers(-3, 4, n)) for n in ((12, 5, 3, 3), 12))
    nodes = [
        ("Conv", ["x", "w", "b"], ["y"], {"pads": [1] * 4}),
        ("DepthToSpace", ["y"], ["s"], {"blocksize": 2, "mode": order}),
        *([(after, ["s", *["s"] * (after == "Add")], ["z"])] if after else []),
    ]
    result = "z" if after else "s"
    made = model(nodes, [("x", FLOAT, [2, 5, 8, 7])], [(result, FLOAT, [2, 3, 16, 14])], {"w": w, "b": bias})
    x = np.float32(rng.integers(-3, 4, (2, 5, 8, 7)))
    session = portmm.onnx.load(made)
    np.testing.assert_array_equal(session.run({"x": x})[0], ReferenceEvaluator(made).run(None, {"x": x})[0])
    kinds = [(row.kind, row.what.count(",")) for row in session.report({"x": x}).rows]
    assert kinds[0][0] == "copy"  # of the images, to channels last
    assert [kind for kind, _ in kinds[1:]] == ["conv", *["rows"] * (after == "Add")]
    assert kinds[1][1] == 1 + (after == "Relu")


@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_of_other_convolutions_are_copied(groups):
    w = np.float32(rng.integers(-3, 4, (8, 4 // groups, 3)))
    nodes = [("Conv", ["x", "w"], ["y"], {"group": groups}), ("Unsqueeze", ["y", "at"], ["u"]),
             ("DepthToSpace", ["u"], ["z"], {"blocksize": 2})]  # fmt: skip
    made = model(nodes, [("x", FLOAT, [1, 4, 9])], [("z", FLOAT, [1, 2, 2, 14])], {"w": w, "at": np.array([2])})
    x = np.float32(rng.integers(-3, 4, (1, 4, 9)))
    want = ReferenceEvaluator(made).run(None, {"x": x})[0]
    np.testing.assert_array_equal(portmm.onnx.load(made).run({"x": x})[0], want)
    w = np.float32(rng.integers(-3, 4, (8, 4 // groups, 1, 1)))
    nodes = [("Conv", ["x", "w"], ["y"], {"group": groups}), ("DepthToSpace", ["y"], ["z"], {"blocksize": 2})]
    for kind in (FLOAT, TensorProto.FLOAT16):
        dtype = np.float32 if kind == FLOAT else np.float16
        made = model(nodes, [("x", kind, [1, 4, 3, 5])], [("z", kind, [1, 2, 6, 10])], {"w": w.astype(dtype)})
        x = rng.integers(-3, 4, (1, 4, 3, 5)).astype(dtype)
        want = ReferenceEvaluator(made).run(None, {"x": x})[0]
        np.testing.assert_array_equal(portmm.onnx.load(made).run({"x": x})[0], want)


def test_element_wise_operators_keep_channels_last():
    w = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    scale = rng.standard_normal((4, 1, 1)).astype(np.float32)
    nodes = [
        ("Conv", ["x", "w"], ["y"], {"pads": [1] * 4}),
        ("Mul", ["y", "s"], ["t"]),
        ("Sigmoid", ["t"], ["g"]),
        ("Mul", ["t", "g"], ["z"]),
    ]
    made = model(nodes, [("x", FLOAT, [2, 3, 6, 5])], [("z", FLOAT, [2, 4, 6, 5])], {"w": w, "s": scale})
    session = portmm.onnx.load(made)
    x = rng.standard_normal((2, 3, 6, 5)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    t = np.einsum("bchwij,ocij->bohw", windows.astype(np.float64), w) * scale
    (z,) = session.run({"x": x})
    np.testing.assert_allclose(z, t / (1 + np.exp(-t)), rtol=1e-4, atol=1e-5)
    assert z.flags.c_contiguous
    assert [row.kind for row in session.report({"x": x}).rows] == ["copy", "conv"]


def test_convolutions_and_pooling_of_an_image_are_kernels():
    filters = {
        f"w{i}": rng.standard_normal(s).astype(np.float32) * 0.2 for i, s in enumerate([(6, 3, 5, 5), (6, 6, 3, 3)])
    }
    nodes = [
        ("Conv", ["x", "w0"], ["a"], {"strides": [2, 2], "pads": [2, 2, 2, 2]}),
        ("MaxPool", ["a"], ["b"], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("Conv", ["b", "w1"], ["c"], {"pads": [1, 1, 1, 1]}),
        ("Sigmoid", ["c"], ["d"]),
        ("Add", ["d", "b"], ["e"]),
        ("AveragePool", ["e"], ["f"], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "count_include_pad": 0}),
        ("AveragePool", ["e"], ["g"], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
        ("Add", ["f", "g"], ["z"]),
    ]
    made = model(nodes, [("x", FLOAT, ["n", 3, 19, 16])], [("z", FLOAT, None)], filters)
    session = portmm.onnx.load(made)
    for n in (1, 2):
        x = rng.standard_normal((n, 3, 19, 16)).astype(np.float32)
        want = portmm.onnx.load(made)
        want.executor.run_part = want.executor.interpret  # NumPy computes each node
        np.testing.assert_allclose(session.run({"x": x})[0], want.run({"x": x})[0], rtol=1e-4, atol=1e-5)
        kinds = [row.kind for row in session.report({"x": x}).rows]
        assert kinds[:4] == ["copy", "conv", "pool", "conv"]
        assert kinds.count("pool") == 3
        assert "numpy" not in kinds


@pytest.mark.parametrize("shape", [(2, 12, 5, 3), (1, 12, 7)])
def test_a_group_norm_and_what_follows_it_store_images_once(shape):
    arrays = {"s": rng.random(12, np.float32), "b": rng.random(12, np.float32)}
    arrays["c"] = rng.random((12, *(1,) * (len(shape) - 2)), np.float32)
    nodes = [
        ("GroupNormalization", ["x", "s", "b"], ["y"], {"num_groups": 3}), ("Sigmoid", ["y"], ["g"]),
        ("Mul", ["y", "g"], ["a"]), ("Add", ["a", "x"], ["d"]), ("Mul", ["d", "c"], ["z"]),
    ]  # fmt: skip
    made = model(nodes, [("x", FLOAT, shape)], [("z", FLOAT, shape)], arrays)
    made.opset_import[0].version, made.ir_version = 21, 10
    x = rng.standard_normal(shape).astype(np.float32) + 3
    session = portmm.onnx.load(made)
    groups = x.astype(np.float64).reshape(shape[0], 3, -1)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    scale, bias = (arrays[i].reshape(arrays["c"].shape) for i in "sb")
    y = normal.reshape(shape) * scale + bias
    np.testing.assert_allclose(session.run({"x": x})[0], (y / (1 + np.exp(-y)) + x) * arrays["c"], rtol=1e-4, atol=1e-5)
    assert [row.kind for row in session.report({"x": x}).rows] == ["rows", "rows"]


def test_images_of_a_unet_are_added_joined_and_repeated_by_kernels():
    arrays = {
        f"w{i}": rng.standard_normal(s).astype(np.float32) * 0.2 for i, s in enumerate([(6, 3, 3, 3), (5, 6, 1, 1)])
    }
    arrays |= {"t": np.float32([1, 1, 2, 2]), "c": rng.standard_normal((6, 4)).astype(np.float32)}
    nodes = [
        ("Conv", ["x", "w0"], ["a"], {"pads": [1] * 4}),
        ("Gemm", ["e", "c"], ["p"], {"transB": 1}),
        ("Unsqueeze", ["p", "axes"], ["q"]),
        ("Add", ["a", "q"], ["b"]),  # one number for each image and channel
        ("Relu", ["b"], ["d"]),
        ("Conv", ["d", "w1"], ["f"]),
        ("Concat", ["f", "d"], ["g"], {"axis": 1}),
        ("Resize", ["g", "", "t"], ["h"], {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
        ("Concat", ["h", "h"], ["z"], {"axis": 3}),
    ]
    arrays["axes"] = np.int64([2, 3])
    made = model(nodes, [("x", FLOAT, ["n", 3, 7, 6]), ("e", FLOAT, ["n", 4])], [("z", FLOAT, None)], arrays)
    session, plain = portmm.onnx.load(made), portmm.onnx.load(made)
    plain.executor.run_part = plain.executor.interpret  # NumPy computes each node
    for n in (1, 2):
        x = {"x": rng.standard_normal((n, 3, 7, 6)).astype(np.float32)}
        x["e"] = rng.standard_normal((n, 4)).astype(np.float32)
        np.testing.assert_allclose(session.run(x)[0], plain.run(x)[0], rtol=1e-4, atol=1e-5)
        kinds = Counter(row.kind for row in session.report(x).rows)
        assert (kinds["conv"], kinds["product"], kinds["numpy"]) == (1, 2, 0), kinds


@pytest.mark.parametrize(("n", "shape"), [(1, "images"), (2, "images"), (1, "of")])
def test_a_group_norm_of_a_convolution_keeps_channels_last(n, shape):
    arrays = {
        "w": rng.standard_normal((12, 3, 3, 3)).astype(np.float32), "one": np.ones(4, np.float32),
        "zero": np.zeros(4, np.float32), "rows": np.int64([0, 4, -1]), "images": np.int64([n, 12, 7, 6]),
        "s": rng.random((12, 1, 1), np.float32), "b": rng.random((12, 1, 1), np.float32),
    }  # fmt: skip
    nodes = [
        ("Conv", ["x", "w"], ["a"], {"pads": [1] * 4}), ("Reshape", ["a", "rows"], ["g"]),
        ("InstanceNormalization", ["g", "one", "zero"], ["i"], {"epsilon": 1e-5}), ("Shape", ["a"], ["of"]),
        ("Reshape", ["i", shape], ["j"]),
        ("Mul", ["s", "j"], ["k"]), ("Add", ["k", "b"], ["l"]), ("Sigmoid", ["l"], ["m"]), ("Mul", ["l", "m"], ["z"]),
    ]  # fmt: skip
    made = model(nodes, [("x", FLOAT, [n, 3, 7, 6])], [("z", FLOAT, [n, 12, 7, 6])], arrays)
    x = {"x": rng.standard_normal((n, 3, 7, 6)).astype(np.float32) + 3}
    (want,) = ReferenceEvaluator(made).run(None, x)
    session = portmm.onnx.load(made)
    np.testing.assert_allclose(session.run(x)[0], want, rtol=1e-4, atol=1e-5)
    rows = session.report(x).rows
    assert [row.kind for row in rows] == ["copy", "conv", "norm"]
    assert {"Sigmoid", "Mul"} <= {word.partition("_")[0] for row in rows for word in row.what.split(", ")}, rows


@pytest.mark.parametrize(
    "how", [{}, {"coordinate_transformation_mode": "align_corners"}, {"mode": "linear"}, {"nearest_mode": "ceil"}]
)
def test_images_are_resized_as_by_the_reference(how):
    sizes = {"s": np.int64([1, 2, 6, 10])}
    made = model(
        [("Resize", ["x", "", "", "s"], ["y"], how)], [("x", FLOAT, [1, 2, 3, 5])], [("y", FLOAT, None)], sizes
    )
    x = rng.standard_normal((1, 2, 3, 5)).astype(np.float32)
    (want,) = ReferenceEvaluator(made).run(None, {"x": x})
    np.testing.assert_allclose(portmm.onnx.load(made).run({"x": x})[0], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("stride", "dilation", "kernel"), [(1, 1, 3), (2, 1, 3), (1, 2, 3), (3, 1, 2)])
def test_convolutions_of_each_channel_by_itself_are_kernels_over_rows(stride, dilation, kernel):
    w, b = rng.standard_normal((20, 1, kernel, kernel)).astype(np.float32), rng.random(20, np.float32)
    one = {"strides": [stride] * 2, "dilations": [dilation] * 2, "pads": [dilation, 1, 0, dilation]}
    nodes = [
        ("Conv", ["x", "w", "b"], ["a"], one | {"group": 20}), ("Relu", ["a"], ["c"]),
        ("Conv", ["x", "w"], ["d"], one | {"group": 20}), ("Add", ["d", "c"], ["z"]),
    ]  # fmt: skip
    made = model(nodes, [("x", FLOAT, ["n", 20, 9, 7])], [("z", FLOAT, None)], {"w": w, "b": b})
    session, plain = portmm.onnx.load(made), portmm.onnx.load(made)
    plain.executor.run_part = plain.executor.interpret  # NumPy computes each node
    for n in (1, 2):
        x = rng.standard_normal((n, 20, 9, 7)).astype(np.float32)
        np.testing.assert_allclose(session.run({"x": x})[0], plain.run({"x": x})[0], rtol=1e-4, atol=1e-5)
    report = session.report({"x": x})
    assert [row.kind for row in report.rows if row.kind != "copy"] == ["conv", "conv"]
    assert not report.numpy
