"""Weights of bundles: packed for each machine in files that map into memory, and wheels of bundles."""

import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest

import portmm as pm
from portmm.build import kernel_store
from portmm.build.bundle import open_bundle
from portmm.build.compiler import find_compiler
from portmm.cli.main import app
from portmm.dispatch import config
from portmm.errors import BundleError, NoCompilerError
from portmm.host.detect import host
from portmm.ops import bundle_build, bundle_check, bundle_shapes, bundle_weights
from portmm.target.target import load_target
from portmm.weights.safetensors import write

N, K = 48, 64
OF_A_WHEEL = """
import sys
import numpy as np, portmm as pm
import some_layers
some_layers.use()
x = np.arange(192, dtype=np.float32).reshape(2, 96) % 5
(layer,) = pm.bundled_layers().values()
print((layer(x) == x @ np.load(sys.argv[1]).T).all())
"""


@pytest.fixture(autouse=True)
def _only_here():
    try:
        find_compiler()
    except NoCompilerError:
        pytest.skip("no compiler")
    yield
    kernel_store.forget()
    pm.forget()


def checkpoint(folder, rng, bits, group, *, order=False):
    """A model's folder with one quantized layer of compressed-tensors, and two matrices of floats."""
    codes = rng.integers(0, 2**bits, (N, K), np.uint8)
    words = (codes if bits == 8 else codes[:, ::2] | (codes[:, 1::2] << 4)).view("<i4")
    name = f"of{bits}"
    tensors = {f"{name}.weight_packed": words, f"{name}.weight_shape": np.array([N, K])}
    tensors[f"{name}.weight_scale"] = (rng.random((N, K // group)) + 0.5).astype(np.float16)
    if order:
        tensors[f"{name}.weight_g_idx"] = rng.permutation(K) // group
    dense = rng.standard_normal((80, K)).astype(np.float32)
    folder.mkdir()
    write(folder / "model.safetensors", tensors | {f"dense{bits}.weight": dense, "other.weight": dense.T})
    about = {"config_groups": {"g": {"weights": {"num_bits": bits, "group_size": group}}}}
    whole = {"quantization_config": {"quant_method": "compressed-tensors", **about}}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder, dense


def test_layers_are_packed_for_each_machine_and_mapped(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    shapes = bundle_shapes.shapes_of(f"3 80 {K} f32 packed\n3 {N} {K} f32-u4-f32 packed\n")
    makers, wants = {}, {}
    x = rng.standard_normal((3, K), np.float32)
    for bits, group, order in ((4, 32, True), (8, K, False)):
        path, dense = checkpoint(tmp_path / str(bits), rng, bits, group, order=order)
        makers |= bundle_weights.layers_of(path, shapes)
        wants[f"dense{bits}.weight"] = x @ dense.T
        wants[f"of{bits}"] = x @ pm.open_checkpoint(path).layers[f"of{bits}"].dequantized().astype(np.float32)
    assert set(makers) == set(wants)
    machines = [host(), load_target("armv8a")]
    maker = bundle_build.Maker()
    for target in machines:
        maker.add_machine(target)
    path = tmp_path / "some.bundle"
    files = bundle_weights.write(maker, makers, machines, path)
    path.write_bytes(maker.pack((1,), lambda *_: None))
    before = [x.read_bytes() for x in files]
    assert [x.read_bytes() for x in bundle_weights.write(maker, makers, machines, path)] == before
    pm.use_bundle(path)
    layers = pm.bundled_layers()
    for name, want in wants.items():
        assert np.abs(layers[name](x) - want).max() / np.abs(want).max() < (0.02 if name == "of8" else 1e-3)
    assert layers["of4"].order is not None
    assert layers["of8"].scales is not None
    mapped = pm.load_packed(next(x for x in files if f".{layers['of4'].weight.family}." in x.name))
    assert np.array_equal(mapped["of4"].owner, layers["of4"].weight.owner)
    monkeypatch.setattr(kernel_store, "base", lambda: None)
    with config.described(host()):
        assert {n: x.weight.family for n, x in pm.pack_checkpoint(tmp_path / "4").items()} == {
            "of4": layers["of4"].weight.family
        }
    assert bundle_check.check(open_bundle(path))[bundle_check.LAYERS] == sum(len(pm.load_packed(x)) for x in files)
    files[0].write_bytes(before[0][:-1] + bytes([before[0][-1] ^ 1]))
    with pytest.raises(BundleError, match="SHA-256"):
        bundle_check.check(open_bundle(path))
    for each in files:
        each.unlink()
    with pytest.raises(BundleError, match="copy it again"):
        pm.bundled_layers()


def test_a_file_without_layers_is_refused(tmp_path):
    write(tmp_path / "model.safetensors", {"w": np.ones((4, 5), np.float32)})
    for line in ("3 5 4 f32 packed", "3 4 5 f32", "3 4 5 f32-u4-f32 packed"):
        with pytest.raises(BundleError, match="no quantized layers"):
            bundle_weights.layers_of(tmp_path / "model.safetensors", bundle_shapes.shapes_of(line))


def test_a_wheel_brings_kernels_and_weights(tmp_path, capsys):
    weight = np.random.default_rng(0).integers(-4, 4, (80, 96)).astype(np.float32)
    np.save(tmp_path / "w.npy", weight)
    write(tmp_path / "model.safetensors", {"w": weight})
    (tmp_path / "shapes.txt").write_text("2 80 96 f32 packed\n")
    path = tmp_path / "some_layers-1.0-py3-none-any.whl"
    words = ["bundle", str(path), "--shapes", str(tmp_path / "shapes.txt"), "--threads", "1"]
    words += ["--weights", str(tmp_path / "model.safetensors")]
    app([*words, "--check"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "1 layers packed" in out
    first = path.read_bytes()
    app(words, standalone_mode=False)
    assert path.read_bytes() == first
    site = tmp_path / "site"
    words = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(path)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (tmp_path / "empty").mkdir()
    changed = {"PATH": str(tmp_path / "empty"), "PORTMM_CACHE": str(tmp_path / "cache"), "PORTMM_MISSING": "error"}
    changed |= {"PYTHONPATH": os.pathsep.join([str(site), *sys.path]), "PORTMM_NUM_THREADS": "1"}
    program = 'import sys\nsys.modules["ziglang"] = None\n' + OF_A_WHEEL
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "w.npy")], capture_output=True, text=True, check=False,
        env={k: v for k, v in os.environ.items() if k != "CC"} | changed,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("some_layers/__init__.py", "")
    with pytest.raises(BundleError, match="no wheel of a bundle"):
        app(["bundle", str(path), "--check"], standalone_mode=False)
    with pytest.raises(BundleError, match=r"layers-1\.0-py3-none-any"):
        app(["bundle", str(tmp_path / "x.whl"), "--check"], standalone_mode=False)


OF_THE_COMMAND_LINE = """
import sys
import numpy as np
import portmm as pm
pm.bundled_layers()
pm.fuse(lambda x: pm.tanh(x) + 1.5)(np.ones((4, 8), np.float32))
print({"typer", "rich", "jinja2"} & set(sys.modules))
"""


def test_layers_of_a_bundle_and_traced_functions_load_nothing_of_the_command_line():
    done = subprocess.run([sys.executable, "-c", OF_THE_COMMAND_LINE], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
