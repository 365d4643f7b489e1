"""Sessions: the interface, graphs that are fused, shapes that depend on data, and refusals."""

import json
import re
from xml.etree import ElementTree as ET

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from places import BENCH
from typer.testing import CliRunner

import portmm.onnx
from portmm.cli.main import app
from portmm.onnx import OnnxError

QUICKLY = True
rng = np.random.default_rng(0)


def model(nodes, inputs, outputs, arrays=(), opset=17):
    def value(name, kind, shape):
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        [helper.make_node(*n[:3], **(n[3] if len(n) > 3 else {})) for n in nodes], "graph",
        [value(*x) for x in inputs], [value(*x) for x in outputs],
        [numpy_helper.from_array(v, k) for k, v in dict(arrays).items()],
    )  # fmt: skip
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    )
    made.ir_version = 8
    return made


FLOAT = TensorProto.FLOAT
W = rng.standard_normal((24, 48)).astype(np.float32)
B = rng.standard_normal(48).astype(np.float32)
DENSE = model(
    [("MatMul", ["x", "w"], ["p"]), ("Add", ["p", "b"], ["s"]), ("Relu", ["s"], ["r"]), ("Add", ["r", "y"], ["z"])],
    [("x", FLOAT, ["rows", 24]), ("y", FLOAT, ["rows", 48])], [("z", FLOAT, ["rows", 48])], {"w": W, "b": B},
)  # fmt: skip


def inputs_of(rows):
    return {
        "x": rng.standard_normal((rows, 24)).astype(np.float32),
        "y": rng.standard_normal((rows, 48)).astype(np.float32),
    }


def test_one_kernel_has_product_bias_activation_and_residual():
    session = portmm.onnx.load(DENSE.SerializeToString())
    for rows in (5, 9, 5):
        x = inputs_of(rows)
        (z,) = session.run(None, x)
        want = np.maximum(x["x"].astype(np.float64) @ W + B, 0) + x["y"]
        np.testing.assert_allclose(z, want, rtol=1e-5, atol=1e-5)
    report = session.report(x)
    assert [row.kind for row in report.rows] == ["product"]
    assert not report.numpy
    assert "1 product" in str(report)


def test_the_interface_is_that_of_onnx_runtime(tmp_path):
    path = tmp_path / "dense.onnx"
    path.write_bytes(DENSE.SerializeToString())
    with pytest.warns(RuntimeWarning, match="CUDAExecutionProvider"):
        session = portmm.onnx.load(path, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert [(x.name, x.type, x.shape) for x in session.get_inputs()] == [
        ("x", "tensor(float)", ["rows", 24]), ("y", "tensor(float)", ["rows", 48])
    ]  # fmt: skip
    assert [x.name for x in session.get_outputs()] == ["z"]
    assert session.get_providers() == ["PortmmExecutionProvider"]
    x = inputs_of(3)
    (first,), (second,) = session.run(["z"], x), session.run(x)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, session.run([x["x"], x["y"]])[0])


def test_constants_in_another_file_are_mapped(tmp_path):
    made = model(
        [("Conv", ["x", "w"], ["y"]), ("BatchNormalization", ["y", "s", "b", "m", "v"], ["n"]),
         ("Flatten", ["n"], ["f"]), ("MatMul", ["f", "u"], ["z"])],
        [("x", FLOAT, [1, 3, 4, 4])], [("z", FLOAT, [1, 32])],
        {"w": rng.random((8, 3, 1, 1), np.float32), "u": rng.random((128, 32), np.float32),
         **{i: rng.random(8, np.float32) for i in "sbmv"}},
    )  # fmt: skip
    x = {"x": rng.random((1, 3, 4, 4), np.float32)}
    (want,) = portmm.onnx.load(made).run(x)
    path = tmp_path / "model.onnx"
    onnx.save(made, path, save_as_external_data=True, location="constants", size_threshold=0)
    session = portmm.onnx.load(path)
    assert not any("did not run" in x for x in session.model.notes)
    for _ in range(2):
        np.testing.assert_array_equal(session.run(x)[0], want)
    (tmp_path / "constants").unlink()
    with pytest.raises(OnnxError, match="in another file"):
        portmm.onnx.load(path)


def test_results_of_earlier_calls_stay():
    session = portmm.onnx.load(DENSE)
    x, other = inputs_of(4), inputs_of(4)
    (kept,) = session.run(None, x)
    before = kept.copy()
    session.run(None, other)
    np.testing.assert_array_equal(kept, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("y"), "input 'y' is missing"),
        (lambda x: x.update(x=x["x"].astype(np.float64)), r"input 'x' is float64; the model takes float32"),
        (lambda x: x.update(x=x["x"][:, :5]), r"input 'x' has shape \(4, 5\); the model takes \(rows, 24\)"),
        (lambda x: x.update(t=x["x"]), "the model has no input 't'"),
    ],
)
def test_wrong_inputs_are_refused(change, message):
    x = inputs_of(4)
    change(x)
    with pytest.raises(OnnxError, match=message):
        portmm.onnx.load(DENSE).run(None, x)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(OnnxError, match="there is no model at"):
        portmm.onnx.load(tmp_path / "none.onnx")
    with pytest.raises(OnnxError, match="is no ONNX model"):
        portmm.onnx.load(b"no model")
    for nodes in (
        [("Add", ["x", "lost"], ["z"])],
        [("Neg", ["x"], ["y"])],
        [("Abs", ["y"], ["z"]), ("Neg", ["x"], ["y"])],
    ):
        with pytest.raises(OnnxError, match=r"nothing before its use computes '(lost|z|y)'"):
            portmm.onnx.load(model(nodes, [("x", FLOAT, [2])], [("z", FLOAT, [2])]))
    with pytest.raises(OnnxError, match="is damaged"):
        portmm.onnx.load(model([("Abs", ["x"], ["z"])], [("x", 99, [2])], [("z", FLOAT, [2])]))
    unknown = model([("Frobnicate", ["x"], ["z"])], [("x", FLOAT, [2])], [("z", FLOAT, [2])])
    with pytest.raises(OnnxError, match="operator Frobnicate is not supported"):
        portmm.onnx.load(unknown)
    with pytest.raises(OnnxError, match="no output 'q'"):
        portmm.onnx.load(DENSE).run(["q"], inputs_of(2))


def test_shapes_may_depend_on_data():
    made = model(
        [("NonZero", ["x"], ["i"]), ("Transpose", ["i"], ["t"]), ("Shape", ["t"], ["s"]),
         ("ConstantOfShape", ["s"], ["c"]), ("Cast", ["t"], ["f"], {"to": FLOAT}), ("Add", ["f", "c"], ["z"])],
        [("x", FLOAT, ["n"])], [("z", FLOAT, None)],
    )  # fmt: skip
    session = portmm.onnx.load(made)
    for x in (np.float32([0, 1, 2]), np.float32([0, 0, 2]), np.float32([0, 0, 0])):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.argwhere(x).astype(np.float32))


def test_values_that_decide_on_shapes_select_programs():
    made = model(
        [("Reshape", ["x", "s"], ["r"]), ("Neg", ["r"], ["z"])],
        [("x", FLOAT, [6]), ("s", TensorProto.INT64, [2])],
        [("z", FLOAT, None)],
    )
    session = portmm.onnx.load(made)
    x = np.arange(6, dtype=np.float32)
    for shape in ((2, 3), (3, 2), (2, 3)):
        np.testing.assert_array_equal(session.run(None, {"x": x, "s": np.int64(shape)})[0], -x.reshape(shape))


def test_weights_of_four_bits_are_a_kernel():
    k, n, group = 64, 32, 32
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales = rng.random((n, k // group), np.float32)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(n, k // group, group // 2)
    node = (
        "MatMulNBits",
        ["x", "w", "s"],
        ["z"],
        {"domain": "com.microsoft", "K": k, "N": n, "bits": 4, "block_size": group},
    )
    made = model([node], [("x", FLOAT, [5, k])], [("z", FLOAT, [5, n])], {"w": packed, "s": scales.reshape(-1)})
    session = portmm.onnx.load(made)
    x = rng.standard_normal((5, k)).astype(np.float32)
    want = x.astype(np.float64) @ ((codes.astype(np.float64) - 8) * np.repeat(scales, group, 1)).T
    np.testing.assert_allclose(session.run({"x": x})[0], want, rtol=1e-4, atol=1e-4)
    assert [row.kind for row in session.report({"x": x}).rows] == ["product"]


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_integers_are_exact(kind):
    low, high = np.iinfo(kind).min, np.iinfo(kind).max + 1
    b = rng.integers(low, high, (96, 40)).astype(kind)
    made = model(
        [("MatMulInteger", ["a", "b", "za", "zb"], ["z"])],
        [("a", TensorProto.UINT8, [7, 96])],
        [("z", TensorProto.INT32, [7, 40])],
        {"b": b, "za": np.uint8(13), "zb": kind(5)},
    )
    a = rng.integers(0, 256, (7, 96)).astype(np.uint8)
    session = portmm.onnx.load(made)
    np.testing.assert_array_equal(session.run({"a": a})[0], (a.astype(np.int64) - 13) @ (b.astype(np.int64) - 5))
    assert not session.report({"a": a}).numpy


def test_the_command_reports_steps_and_keeps_results(tmp_path):
    path, kept, given = tmp_path / "dense.onnx", tmp_path / "results.npz", tmp_path / "inputs.npz"
    path.write_bytes(DENSE.SerializeToString())
    x = inputs_of(4)
    np.savez(given, **x)
    options = ["run", str(path), "--inputs", str(given), "--save", str(kept), "--seconds", "0.01"]
    shown = CliRunner().invoke(app, [*options, "--json"])
    assert shown.exit_code == 0
    data = json.loads(shown.stdout)
    assert [row["kind"] for row in data["rows"]] == ["product"]
    assert data["rows"][0]["seconds"] > 0
    np.testing.assert_array_equal(np.load(kept)["z"], portmm.onnx.load(DENSE).run(x)[0])
    picture = tmp_path / "time.svg"
    options = ["--dim", "rows=3", "--seconds", "0.01", "--picture", str(picture)]
    shown = CliRunner().invoke(app, ["run", str(path), *options])
    drawn = [x.text for x in ET.fromstring(picture.read_text()).iter() if x.tag.endswith("text")]  # noqa: S314 - our own
    assert re.match(r"dense: .* in 1 step, products and convolutions at \d+% of the float32 rate", drawn[0])
    assert re.match(r"product \d+%: ", drawn[-1])
    assert "3 x 48 x 24 f32" in shown.stdout


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_products_of_integers_take_scales_and_bias(kind):

    zero = kind(0 if kind is np.int8 else 120)
    b = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, (32, 12)).astype(kind)
    arrays = {"b": b, "zb": zero, "sb": np.float32(0.02), "bias": rng.random(12, np.float32)}
    nodes = [
        ("DynamicQuantizeLinear", ["x"], ["q", "sx", "zx"]),
        ("Mul", ["sx", "sb"], ["s"]),
        ("MatMulInteger", ["q", "b", "zx", "zb"], ["i"]),
        ("Cast", ["i"], ["f"], {"to": FLOAT}),
        ("Mul", ["f", "s"], ["y"]),
        ("Add", ["y", "bias"], ["z"]),
    ]
    made = model(nodes, [("x", FLOAT, [2, 5, 32])], [("z", FLOAT, [2, 5, 12])], arrays)
    x = rng.standard_normal((2, 5, 32)).astype(np.float32)
    session = portmm.onnx.load(made)
    (want,) = ReferenceEvaluator(made).run(None, {"x": x})
    np.testing.assert_allclose(session.run({"x": x})[0], want, rtol=1e-5, atol=1e-5)
    report = session.report({"x": x})
    assert [row.kind for row in report.rows].count("product") == 1
    assert {row.kind for row in report.rows} == {"rows", "product"}
    assert not report.numpy


@pytest.mark.parametrize("shape", [(3, 40), (1, 1), (2, 5, 7), (9,)])
def test_dynamic_quantization_is_exact(shape):
    node = ("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    kinds = [("q", TensorProto.UINT8, None), ("s", FLOAT, None), ("z", TensorProto.UINT8, None)]
    session = portmm.onnx.load(model([node], [("x", FLOAT, shape)], kinds))
    for low, high in ((-1, 1), (0, 3), (-5, -1), (0, 0), (-127.5, 127.5)):
        x = rng.uniform(low, high, shape).astype(np.float32)
        x.flat[:1] = low
        x.flat[-1:] = high
        x = np.rint(x * 2) / 2 if high > 100 else x  # with codes halfway between integers
        least, most = np.float32(min(x.min(), 0)), np.float32(max(x.max(), 0))
        scale = (most - least) / np.float32(255) or np.float32(1)
        zero = np.rint((0 - least) / scale)
        codes, got, point = session.run({"x": x})
        np.testing.assert_array_equal(codes, np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8))
        assert (codes.shape, got.shape, point.shape, got, point) == (shape, (), (), scale, zero)
    assert {row.kind for row in session.report({"x": x}).rows} == {"rows"}


def test_a_transformer_s_layer_is_few_kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import model_graphs

    made = model_graphs.bert(model_graphs.Encoder(32, 2, 64, 1), vocabulary=50)
    session = portmm.onnx.load(made)
    x = model_graphs.feeds(made, batch=2, length=6)
    x["input_ids"] %= 50

    (want,) = ReferenceEvaluator(made).run(None, x)
    np.testing.assert_allclose(session.run(None, x)[0], want, rtol=1e-4, atol=1e-4)
    report = session.report(x)
    assert report.numpy.keys() == {"Gather", "Cast"}
    assert len(report.rows) <= 17
