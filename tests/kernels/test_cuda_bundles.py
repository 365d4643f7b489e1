"""Kernels for CUDA in bundles: cubins, a table of launches that the shim follows, and look-ups without NVRTC."""

import json

import cuda_shim
import numpy as np
import pytest
from typer.testing import CliRunner

from portmm.build import kernel_store, nvrtc
from portmm.build.bundle import open_bundle, packed
from portmm.cli.main import app
from portmm.errors import BundleError, NoCompilerError
from portmm.ops import bundle_check, bundle_devices, bundle_shapes

SHAPES = """
5,40 32 64 f32 packed
40 24 48 f16 col
"""


@pytest.fixture(autouse=True)
def _only_here():
    yield
    kernel_store.forget()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A bundle, its files for programs, and the sources of its kernels by name and architecture."""
    try:
        nvrtc.find_nvrtc()
    except NoCompilerError:
        pytest.skip("no NVRTC")
    folder, sources = tmp_path_factory.mktemp("cuda"), {}
    (folder / "shapes.txt").write_text(SHAPES)
    with pytest.MonkeyPatch.context() as patch:

        def compiled(text, name, architecture):
            sources[name, f"sm_{architecture}"] = text
            return nvrtc.compile_cuda(text, name, architecture)

        patch.setattr(bundle_devices, "compile_cuda", compiled)
        words = ["bundle", str(folder / "x.bundle"), "--shapes", str(folder / "shapes.txt"), "--for", "sm_80,t4"]
        done = CliRunner().invoke(app, [*words, "--c", str(folder / "lib"), "--check"])
    assert done.exit_code == 0, done.output
    assert "kernels for CUDA not run" in done.output
    return folder, sources


def launched(row, sources, arrays, workspace):
    """Run the kernels of a row of the table by the shim."""
    for x in row["kernels"]:
        kernel = cuda_shim.compile(sources[x["entry"], x["architecture"]], x["entry"])
        memory = {
            "a": arrays[row["a"]], "b": arrays[row["b"]], "c": arrays["c"], "work": workspace,
            "counters": np.zeros(max(x["zeros"], 1), np.int32),
        }  # fmt: skip
        arguments = [memory[y["name"]] if y["type"] == "pointer" else (y["type"], y["value"]) for y in x["arguments"]]
        kernel.launch(tuple(x["grid"]), x["block"][0], arguments, shared=x["shared"])


@pytest.mark.parametrize("key", ["t4 5 32 64 f32 row", "a100 40 32 64 f32 row", "a100 40 24 48 f16 col"])
def test_the_table_is_all_that_a_launch_needs(made, key):
    folder, sources = made
    row = json.loads((folder / "lib/cuda/launches.json").read_text())[key]
    bundle = open_bundle(folder / "x.bundle")
    assert json.loads(bundle.answer(bundle_devices.LAUNCHES + key)[0]) == row
    for x in row["kernels"]:
        code = (folder / "lib/cuda" / x["file"]).read_bytes()
        assert code[:4] == b"\x7fELF"
        assert x["entry"].encode() in code
    _, m, n, k, types, layout = key.split()
    m, n, k, rng = int(m), int(n), int(k), np.random.default_rng(0)
    dtype = {"f32": np.float32, "f16": np.float16}[types]
    a, b = rng.integers(-2, 3, (m, k)).astype(dtype), rng.integers(-2, 3, (k, n)).astype(dtype)
    right = np.ascontiguousarray(b.T) if layout == "col" else b
    c = np.full((m, n), np.nan, dtype)
    launched(row, sources, {"a": a, "b": right, "c": c}, np.full(max(row["workspace"] // 4, 1), np.nan, np.float32))
    np.testing.assert_array_equal(c, a.astype(np.float64) @ b)


def test_a_bundle_comes_before_nvrtc(made, monkeypatch):
    folder, sources = made

    def missing():
        raise NoCompilerError("there is none")

    monkeypatch.setattr(nvrtc, "find_nvrtc", missing)
    (name, architecture), text = next(iter(sources.items()))
    with pytest.raises(NoCompilerError):
        nvrtc.compile_cuda(text, name, architecture[3:])
    kernel_store.use(open_bundle(folder / "x.bundle"))
    found = nvrtc.compile_cuda(text, name, architecture[3:])
    assert found.cached
    assert found.code[:4] == b"\x7fELF"
    with pytest.raises(NoCompilerError):
        nvrtc.compile_cuda(text + " ", name, architecture[3:])


def test_a_launch_without_its_cubin_is_damage(made, tmp_path):
    bundle = open_bundle(made[0] / "x.bundle")
    question = next(x for x in bundle.answer(bundle_devices.TABLE) if x)
    table = {bundle_devices.TABLE: (None, (question,)), question: (None, tuple(bundle.answer(question)))}
    for text, words in ((table[question][1][0], "has no cubin"), ("{}", "other fields"), ("text", "other fields")):
        path = tmp_path / "damaged.bundle"
        path.write_bytes(packed(table | {question: (None, (text,))}))
        with pytest.raises(BundleError, match=words):
            bundle_check.check(open_bundle(path))


def test_names_of_devices():
    processors, devices = bundle_shapes.targets_of(["sm_90", "zen4", "p5.48xlarge"])
    assert ([x.name for x in processors], [x.name for x in devices]) == (["zen4"], ["h100"])
    with pytest.raises(BundleError, match="driver"):
        bundle_shapes.targets_of(["mi300x"])
