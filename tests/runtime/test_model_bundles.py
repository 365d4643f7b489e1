"""Bundles of the kernels that a model calls: recorded for a machine, and used where there is no compiler."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from portmm.build.compiler import find_compiler
from portmm.cli.main import app
from portmm.cli.model_calls import sizes_of
from portmm.errors import BundleError, NoCompilerError
from portmm.host.detect import host
from portmm.target.target import names

RUN = """
import json, sys, warnings
import numpy as np
sys.modules["ziglang"] = None
import portmm as pm, portmm.onnx
pm.use_bundle(sys.argv[2])
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    session = portmm.onnx.load(sys.argv[1])
    results = [session.run({"x": np.full((m, 24), 0.5, np.float32)})[0].tolist() for m in (1, 9)]
print(json.dumps([results, [str(x.message) for x in heard]]))
"""


def test_a_model_runs_from_its_bundle_without_a_compiler(tmp_path):
    try:
        find_compiler()
    except NoCompilerError:
        pytest.skip("no compiler")
    if host().name not in names("chip"):
        pytest.skip("the host is no described chip")
    rng = np.random.default_rng(0)
    arrays = {"w": rng.random((24, 40), np.float32), "b": rng.random(40, np.float32)}
    nodes = [("MatMul", ["x", "w"], ["p"]), ("Add", ["p", "b"], ["s"]), ("Relu", ["s"], ["y"])]
    graph = helper.make_graph(
        [helper.make_node(*x) for x in nodes],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 24])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 40])],
        [numpy_helper.from_array(v, k) for k, v in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    paths = str(tmp_path / "model.onnx"), str(tmp_path / "model.bundle")
    words = ["bundle", paths[1], "--from-onnx", paths[0], "--sizes", "rows=1,9", "--threads", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "called by models" in done.output
    (tmp_path / "empty").mkdir()
    kept = {k: v for k, v in os.environ.items() if k != "CC"}
    changed = {"PATH": str(tmp_path / "empty"), "PORTMM_CACHE": str(tmp_path / "cache"), "PORTMM_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", RUN, *paths], capture_output=True, text=True, check=False, env=kept | changed
    )
    assert child.returncode == 0, child.stderr
    results, heard = json.loads(child.stdout)
    assert heard == []
    for m, result in zip((1, 9), results, strict=True):
        want = np.maximum(np.full((m, 24), 0.5) @ arrays["w"] + arrays["b"], 0)
        np.testing.assert_allclose(result, want, rtol=1e-5)


def test_sizes_of_axes():
    assert sizes_of("batch=1 sequence=16,128") == {"batch": (1,), "sequence": (16, 128)}
    with pytest.raises(BundleError, match="sequence=x"):
        sizes_of("sequence=x")
