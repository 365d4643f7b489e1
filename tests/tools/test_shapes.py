"""Shapes of the user's own: files, ONNX models and PyTorch programs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from portmm.cli import main
from portmm.comparison import Case, Entrant, Entry, Report, Result
from portmm.comparison.onnx_shapes import from_onnx
from portmm.comparison.report import from_json
from portmm.comparison.shapes import from_csv, merged
from portmm.comparison.text import notes
from portmm.comparison.torch_shapes import from_torch


def read(folder, text, name="own.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return from_csv(path)


def sizes(cases):
    return [(c.m, c.n, c.k, c.batch, c.count) for c in cases]


# --- files -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "m,n,k\n3,4,5\n6,7,8\n",
        "M,N,K\r\n3,4,5\r\n6,7,8\r\n",
        "\ufeffm;n;k\n3;4;5\n6;7;8\n",
        "k\tm\tn\n5\t3\t4\n8\t6\t7",
        '# mine\n\n"m", "n", "k"\n"3",4, 5 # the first\n\n6,7,8,,\n',
        "3,4,5\n6,7,8\n",
        "3x4x5\n6X7x8\n",
        "1x3x4x5\n6,7,8,1\n",
        "m,n,k\n3\u00d74\u00d75\n6,7,8\n",
    ],
)
def test_one_list_in_many_spellings(tmp_path, text):
    found = read(tmp_path, text)
    assert sizes(found) == [(3, 4, 5, 1, 1), (6, 7, 8, 1, 1)]
    assert [c.name for c in found] == ["3x4x5", "6x7x8"]
    assert {c.group for c in found} == {"own"}


def test_every_field_can_be_said(tmp_path):
    text = (
        "name,m,n,k,batch,dtype,a,b,c,packed,dynamic,block,group,count\n"
        "Up,1,64,32,,F32-U4-F32,,,,yes,TRUE,32,Llama,7\n"
        "scores,16,16,8,12,bf16,row,col,,0,,,,\n"
    )
    assert read(tmp_path, text) == (
        Case("Up", "Llama", 1, 64, 32, packed=True, dtype="f32-u4-f32", dynamic=True, block=32, count=7),
        Case("scores", "own", 16, 16, 8, 12, b="col", dtype="bf16"),
    )


def test_what_is_said_twice_is_counted(tmp_path):
    found = read(tmp_path, "name,m,n,k,count\nq,1,8,8,\nk,1,8,8,2\nq,2,8,8,\n,3,4,5,\n")
    assert [(c.name, c.m, c.count) for c in found] == [("q", 1, 3), ("q-2", 2, 1), ("3x4x5", 3, 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m,n,k\n3,4,5\n3,x,5\n", r"own.csv, line 3: n is 'x', not a positive whole number"),
        ("m,n,k\n0,4,5\n", "line 2: m is 0"),
        ("m,n,k\n1.5,4,5\n", "line 2: m is '1.5'"),
        ("# a\n\nm,n,k\n3,4\n", "line 4: k is missing"),
        ("3,4,5\n3,4,5,6,7\n", "line 2: 5 values for 4 columns"),
        ("m,n\n3,4\n", "line 1: no column is called k"),
        ("m,n,k,colour\n", "line 1: no column is called 'colour'; known are name, group, m"),
        ("m,n,k,M\n", "line 1: two columns"),
        ("m,n,k,dtype\n3,4,5,f8\n", "line 2: dtype 'f8' is unknown"),
        ("m,n,k,b\n3,4,5,diagonal\n", "line 2: layout of b is 'diagonal'; use row or col"),
        ("m,n,k,packed\n3,4,5,perhaps\n", "line 2: packed is 'perhaps'; say yes or no"),
        ("m,n,k,dtype\n3,4,5,f32-u4-f32\n", "line 2: f32-u4-f32 needs weights that are packed"),
        ("m,n,k,block\n3,4,5,32\n", "line 2: block is 32"),
        ("m,n,k,dynamic\n3,4,5,yes\n", "line 2: dynamic is for"),
        ("# nothing\n", "has no shapes"),
        (b"\xff\xfem\x00,\x00", "is not text in UTF-8"),
    ],
)
def test_a_slip_is_named_with_its_line(tmp_path, text, said):
    with pytest.raises(ValueError, match=said):
        read(tmp_path, text)


def test_a_product_is_the_same_whatever_its_name():
    found = merged([Case("x", "a", 3, 4, 5), Case("y", "b", 3, 4, 5, count=2), Case("x", "a", 3, 4, 6)])
    assert found == (Case("x", "a", 3, 4, 5, count=3), Case("x-2", "a", 3, 4, 6))


# --- models ------------------------------------------------------------------


def weight(name, *shape, dtype=np.float32):
    helper = pytest.importorskip("onnx").numpy_helper
    return helper.from_array(np.ones(shape, dtype), name)


def save(path, nodes, inputs, outputs, initial):
    """An ONNX model of (operator, inputs, output, attributes)."""
    onnx = pytest.importorskip("onnx")
    make, number = onnx.helper, onnx.TensorProto
    made = [make.make_node(op, given, [out], **said) for op, given, out, said in nodes]
    values = [make.make_tensor_value_info(name, number.FLOAT, shape) for name, shape in inputs.items()]
    ends = [make.make_tensor_value_info(name, number.FLOAT, None) for name in outputs]
    graph = make.make_graph(made, "graph", values, ends, initial)
    sets = [make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)]
    onnx.save(make.make_model(graph, opset_imports=sets, ir_version=9), str(path))
    return path


@pytest.fixture
def layers(tmp_path):
    """Two layers that are alike, a Gemm, and scores of activations."""
    nodes = [
        ("MatMul", ["x", "w"], "y", {}),
        ("Add", ["y", "bias"], "z", {}),
        ("MatMul", ["z", "w"], "u", {}),
        ("Transpose", ["w"], "turned", {}),
        ("MatMul", ["u", "turned"], "v", {}),
        ("Transpose", ["v"], "vt", {"perm": [0, 2, 1]}),
        ("MatMul", ["v", "vt"], "scores", {}),
        ("Reshape", ["v", "flat"], "rows", {}),
        ("Gemm", ["rows", "head", "offset"], "logits", {"transB": 1}),
    ]
    flat = pytest.importorskip("onnx").numpy_helper.from_array(np.array([-1, 16]), "flat")
    initial = [weight("w", 16, 16), weight("bias", 16), weight("head", 10, 16), weight("offset", 10), flat]
    return save(tmp_path / "net.onnx", nodes, {"x": ["batch", "seq", 16]}, ["scores", "logits"], initial)


def test_the_products_of_a_model(layers):
    found = [(c.shape, c.count) for c in from_onnx(layers, {"batch": 2, "seq": 5})]
    assert ("2 x 5x5x16", 1) in found
    assert ("10x10x16 nt packed bias", 1) in found
    assert [x for x in found if x[0].startswith("10x16x16")] == [("10x16x16 packed bias", 1), ("10x16x16 packed", 2)]
    assert sum(count for _, count in found) == 5


def test_open_dimensions_are_asked_for(layers):
    with pytest.raises(ValueError, match="leaves seq open; say --dim seq=SIZE"):
        from_onnx(layers, {"batch": 2})
    with pytest.raises(ValueError, match="no open dimension 'rows'; open are batch, seq"):
        from_onnx(layers, {"batch": 2, "seq": 5, "rows": 3})


def test_a_dimension_without_a_name_is_called_by_its_place(tmp_path):
    path = save(tmp_path / "m.onnx", [("MatMul", ["x", "w"], "y", {})], {"x": [None, 4]}, ["y"], [weight("w", 4, 3)])
    with pytest.raises(ValueError, match=r"--dim x\.0=SIZE"):
        from_onnx(path)
    assert [c.shape for c in from_onnx(path, {"x.0": 7})] == ["7x3x4 packed"]


def test_shapes_that_only_a_run_tells(tmp_path):
    pytest.importorskip("onnxruntime")
    nodes = [
        ("NonZero", ["x"], "where", {}),
        ("Cast", ["where"], "floats", {"to": 1}),
        ("MatMul", ["floats", "w"], "y", {}),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [3, 4]}, ["y"], [weight("w", 12, 7)])
    assert [c.shape for c in from_onnx(path)] == ["2x7x12 packed"]


@pytest.mark.parametrize(
    ("node", "initial", "said"),
    [
        (
            ("MatMulNBits", ["x", "q", "s"], "y", {"K": 64, "N": 8, "bits": 4, "block_size": 32}),
            [("q", (8, 2, 16), np.uint8), ("s", (16,), np.float32)],
            "5x8x64 packed f32-u4-f32",
        ),
        (
            ("DynamicQuantizeMatMul", ["x", "q", "s"], "y", {}),
            [("q", (64, 8), np.int8), ("s", (8,), np.float32)],
            "5x8x64 packed f32-s8-f32, A in 8 bits",
        ),
    ],
)
def test_types_of_quantised_products(tmp_path, node, initial, said):
    given = [weight(name, *shape, dtype=dtype) for name, shape, dtype in initial]
    (found,) = from_onnx(save(tmp_path / "m.onnx", [node], {"x": [5, 64]}, ["y"], given))
    assert found.shape == said


def test_integers_are_summed(tmp_path):
    nodes = [("Cast", ["x"], "codes", {"to": 2}), ("MatMulInteger", ["codes", "q"], "y", {})]
    (found,) = from_onnx(save(tmp_path / "m.onnx", nodes, {"x": [5, 64]}, [], [weight("q", 64, 8, dtype=np.int8)]))
    assert found.shape == "5x8x64 packed u8-s8-s32"


def test_a_model_without_products_is_refused(tmp_path):
    path = save(tmp_path / "m.onnx", [("Relu", ["x"], "y", {})], {"x": [3]}, ["y"], [])
    with pytest.raises(ValueError, match=r"m\.onnx has no products"):
        from_onnx(path)


# --- programs ----------------------------------------------------------------

PROGRAM = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(3)])
        self.register_buffer("table", torch.ones(32, 8))

    def forward(self, x):
        y = torch.relu(self.first(x))
        for layer in self.layers:
            y = layer(y)
        return (y @ y.transpose(1, 2)) @ (y @ self.table)

def pair():
    return Net(), torch.ones(2, 5, 16)

def named():
    return Net(), {"x": torch.ones(2, 5, 16)}

def ready():
    net, x = pair()
    return lambda: net(x)

def itself():
    Net()(torch.ones(2, 5, 16))

def shared():
    weight = torch.ones(4, 6)
    for rows in (1, 1, 3):
        torch.ones(rows, 4) @ weight

def vector():
    return torch.mv, (torch.ones(4, 6), torch.ones(6))

def nothing():
    torch.zeros(3)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    (tmp_path / "their_net.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return lambda name: [(c.shape, c.count) for c in from_torch(f"their_net:{name}")]


def test_the_products_of_a_program(program):
    layers = [("10x32x16 nt packed bias+relu", 1), ("10x32x32 nt packed", 3), ("2 x 5x5x32 nt", 1)]
    found = [*layers, ("10x8x32 packed", 1), ("2 x 5x8x5", 1)]
    assert program("pair") == program("named") == program("ready") == found
    # A buffer that is made while the program runs is an operand like any other.
    assert program("itself") == [*layers, ("10x8x32", 1), ("2 x 5x8x5", 1)]


def test_an_operand_of_several_products_is_a_weight(program):
    assert program("shared") == [("1x6x4 packed", 2), ("3x6x4 packed", 1)]


def test_a_matrix_by_a_vector_is_one_row(program):
    assert program("vector") == [("1x4x6 nt", 1)]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("their_net:nothing", "computes no product"),
        ("their_net:nosuch", "module their_net has no function 'nosuch'"),
        ("their_net", "say module:function"),
    ],
)
@pytest.mark.usefixtures("program")
def test_a_program_that_is_none(spec, said):
    with pytest.raises(ValueError, match=said):
        from_torch(spec)


# --- the command, and the time of a run --------------------------------------


@pytest.fixture
def contest(monkeypatch):
    asked = {}

    def fake(suite, **options):
        asked.update(options, suite=suite)
        return Report("a chip", "machine", 1, "", "custom", (), ())

    monkeypatch.setattr("portmm.comparison.compare", fake)
    return asked


def command(*words):
    return CliRunner().invoke(main.app, ["compare", *map(str, words)], catch_exceptions=False)


def test_the_command_takes_shapes_from_everywhere(contest, layers, tmp_path):
    (tmp_path / "own.csv").write_text("3,4,5\n10,16,16\n")
    words = ("--shapes", tmp_path / "own.csv", "--from-onnx", layers, "--dim", "batch=2", "--dim", "seq=5")
    assert command(*words, "cube-64").exit_code == 0
    shapes = [c.shape for c in contest["suite"]]
    assert {"3x4x5", "2 x 5x5x16", "64x64x64"} <= set(shapes)
    assert len(shapes) == len(set(shapes))
    assert command("--shapes", tmp_path / "own.csv").exit_code == 0
    assert [c.shape for c in contest["suite"]] == ["3x4x5", "10x16x16"]


@pytest.mark.usefixtures("contest")
def test_the_command_explains_a_slip(layers):
    for words in (("--dim", "batch"), ("--dim", "batch=none"), ("--dim", "batch=0")):
        done = command("--from-onnx", layers, *words)
        assert done.exit_code == 2
        assert "NAME=SIZE" in done.output
    done = command("--save", "report.txt")
    assert done.exit_code == 2
    assert ".json" in done.output


def total(*counts, suite="custom"):
    entries = {"portmm": Entry("ok", 0.001, (0.001,)), "a": Entry("ok", 0.002, (0.002,)), "b": Entry("unsupported")}
    results = tuple(
        Result(Case(f"c{i}", "x", 8, 8, 8, count=count), entries, "a", 2.0) for i, count in enumerate(counts)
    )
    return Report("chip", "m", 1, "", suite, (Entrant("portmm", False, "ok", "1"),), results)


def test_the_time_of_a_run_counts_each_product():
    line = next(x for x in notes(total(3, 1)) if "one run" in x)
    assert line == "time in the 4 products of one run: portmm 4 ms, best peer of each 8 ms (2.00), a 8 ms"
    assert any("one run" in x for x in notes(total(2, suite="quick")))
    assert not any("one run" in x for x in notes(total(1, suite="quick")))


def test_counts_are_stored_where_they_say_something():
    report = total(3, 1)
    table = json.loads(report.to_json())
    assert [r["case"].get("count") for r in table["results"]] == [3, None]
    assert "cold" not in table
    assert from_json(report.to_json()) == report
