"""Attention, weights of four bits and functions by name in the library for C, and what is refused."""

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from portmm.arrays.numpy_arrays import numpy_of
from portmm.build.compiler import find_compiler
from portmm.cli import library_calls
from portmm.errors import BundleError, NoCompilerError
from portmm.host.detect import host
from portmm.ops import bundle_attention, bundle_build, bundle_shapes, c_library

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = """
attention 1,33 40 16 f32 heads=4 kv_heads=2 causal
attention 33 40 16 bf16 heads=4 kv_heads=2 lse window
5 64 256 f32-u4-f32 packed
"""
LINES = f"""
mlp {EXAMPLES}/layers.py:mlp 33x64 96
quantized {EXAMPLES}/layers.py:quantized 5x64 48  # rows in 8 bits
scaled {{here}}/own.py:scaled 2x4x33x16 2x2x40x16 2x2x40x16 number
model {{here}}/model.onnx rows=6
"""
OWN = """
import numpy as np, portmm as pm
def scaled(q, k, v, double):
    return pm.attention(q, k, v, causal=True) * double, q.sum(-1)
def ordered(x):
    return np.sort(x, -1) + 1
def seen(x):
    return x[::-1]
"""
long, address = ctypes.c_long, lambda x: x.ctypes.data_as(ctypes.c_void_p)


def made(folder, target, counts):
    (folder / "own.py").write_text(OWN)
    weight = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(4, 3), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    places = [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["rows", n]) for x, n in (("x", 4), ("z", 3))]
    graph = helper.make_graph(nodes, "small", places[:1], places[1:], [weight])
    (folder / "model.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    maker = bundle_build.Maker()
    bundle_build.add_shapes(maker, bundle_shapes.shapes_of(SHAPES), [target], counts)
    bundle_attention.add_attention(maker, bundle_shapes.attention_of(SHAPES, "shapes"), [target], counts)
    lines = library_calls.lines_of(LINES.format(here=folder), "functions")
    functions = library_calls.functions_of(lines, [target], counts)
    return c_library.write(maker, folder / "lib", target.arch, functions), functions


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        find_compiler()
    except NoCompilerError:
        pytest.skip("no compiler")
    path, _ = made(tmp_path_factory.mktemp("library"), host(), (1, 2))
    lib = ctypes.CDLL(str(path))
    lib.portmm_packed_bytes.restype = lib.portmm_group.restype = long
    return lib, path.parent


def guarded(shape, dtype=np.float32):
    """An array between words that must not change."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + 128, 77, np.uint8)
    start = -memory.ctypes.data % 64 + 32
    return memory[start : start + size].view(dtype).reshape(shape), memory, (start, start + size)


def intact(memory, inside):
    return bool((memory[: inside[0]] == 77).all() and (memory[inside[1] :] == 77).all())


def softmax_products(q, k, v, scale, *, causal, window=0):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * scale
    at, key = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], np.arange(k.shape[2])
    seen = (key <= at) | (not causal)
    seen &= (not window) | ((key > at - window) & (causal | (key < at + window)))
    w = np.where(seen, np.exp(s), 0)
    return w @ v / w.sum(-1, keepdims=True), np.log(w.sum(-1))


@pytest.mark.parametrize(("m", "threads"), [(1, 1), (33, 2), (21, 5)])
def test_attention_of_sizes_near_those_listed(library, m, threads):
    lib, rng = library[0], np.random.default_rng(0)
    lib.portmm_set_num_threads(long(threads))
    for word, causal, window, tolerance in ((b"f32", True, 0, 1e-5), (b"bf16", False, 17, 0.02)):
        dtype = numpy_of(word.decode())
        q, k, v = (
            rng.standard_normal(x, dtype=np.float32).astype(dtype)
            for x in ((3, 6, m, 24), (3, 3, 50, 24), (3, 3, 50, 20))
        )
        out, memory, inside = guarded((3, 6, m, 20), dtype)
        lse, more, within = guarded((3, 6, m))
        sizes = map(long, (3, 6, 3, m, 50, 24, 20))
        arrays = (address(q), address(k), address(v), ctypes.c_float(0.2))
        into = address(lse) if window else None
        status = lib.portmm_attention(word, *sizes, *arrays, int(causal), long(window), address(out), into)
        assert status == 0
        expected, logs = softmax_products(q, k, v, 0.2, causal=causal, window=window)
        np.testing.assert_allclose(out.astype(np.float64), expected, atol=tolerance, rtol=tolerance)
        assert intact(memory, inside)
        if window:
            np.testing.assert_allclose(lse, logs, atol=1e-3)
            assert intact(more, within)


def test_weights_of_four_bits(library):
    lib, rng, words = library[0], np.random.default_rng(1), b"f32-u4-f32"
    group = lib.portmm_group(words)
    for m, n, k in ((5, 64, 256), (5, 33, 100), (5, 1, 8)):
        groups = -(-k // group)
        codes, scales = rng.integers(0, 16, (k, n)).astype(np.uint8), np.full((groups, n), 0.5, np.float32)
        offsets = rng.integers(-4, 5, (groups, n)).astype(np.float32)
        packed = np.zeros(lib.portmm_packed_bytes(words, long(k), long(n)) + 64, np.uint8)
        packed = packed[-packed.ctypes.data % 64 :]
        arrays = map(address, (codes, scales, offsets, packed))
        assert lib.portmm_pack_int4(words, long(k), long(n), *arrays) == 0
        a = rng.integers(-3, 4, (m, k)).astype(np.float32)
        c, memory, inside = guarded((m, n))
        sizes = (long(m), long(n), long(k))
        call = (address(a), long(k), long(1), address(packed), address(c), long(n))
        assert lib.portmm_matmul_packed(words, *sizes, *call) == 0
        values = codes * np.repeat(scales, group, 0)[:k].astype(np.float64) + np.repeat(offsets, group, 0)[:k]
        np.testing.assert_array_equal(c, a.astype(np.float64) @ values)  # exact: halves below 2**23
        assert intact(memory, inside)
    assert lib.portmm_pack_int4(words, long(8), long(1), *[None] * 4) == 2
    assert lib.portmm_pack_int4(b"f32", long(8), long(1), *[None] * 4) == 1


def test_functions_by_name(library):
    lib, folder = library
    header, rng = (folder / "portmm.h").read_text(), np.random.default_rng(2)
    assert "x: 33x64 f32; bias: 96 f32 -> result0: 33x64 f32" in header
    assert "int portmm_scaled(const float *q, const float *k, const float *v, float double_3, " in header
    for threads in (1, 2):
        lib.portmm_set_num_threads(long(threads))
        x, bias = rng.standard_normal((5, 64), dtype=np.float32), rng.standard_normal(48, dtype=np.float32)
        y, memory, inside = guarded((5, 48))
        assert lib.portmm_quantized(*map(address, (x, bias, y))) == 0
        i, j = np.arange(64)[:, None], np.arange(48)
        scales = np.abs(x).max(1, keepdims=True).astype(np.float64) / 127
        codes = np.rint(x * (1 / scales))
        np.testing.assert_allclose(y, codes @ ((7 * i + 3 * j) % 13 - 6) / 16 * scales + bias, atol=0.05)
        assert intact(memory, inside)
        q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in ((2, 4, 33, 16), (2, 2, 40, 16), (2, 2, 40, 16)))
        out, sums = np.empty_like(q), np.empty((2, 4, 33), np.float32)
        arrays = map(address, (q, k, v))
        assert lib.portmm_scaled(*arrays, ctypes.c_float(3), address(out), address(sums)) == 0
        np.testing.assert_allclose(out, 3 * softmax_products(q, k, v, 0.25, causal=True)[0], atol=1e-5)
        np.testing.assert_allclose(sums, q.astype(np.float64).sum(-1), atol=1e-5)
        rows, z = rng.integers(-3, 4, (6, 4)).astype(np.float32), np.empty((6, 3), np.float32)
        assert lib.portmm_model(address(rows), address(z)) == 0
        np.testing.assert_array_equal(z, np.maximum(rows @ np.arange(12).reshape(4, 3), 0))


def test_wrong_arguments_have_a_status(library):
    lib = library[0]
    x, bias, y = np.ones((33, 64), np.float32), np.ones(97, np.float32), np.ones((33, 64), np.float32)
    odd = bias.view(np.uint8)[1:].ctypes.data_as(ctypes.c_void_p)
    assert lib.portmm_mlp(address(x), None, address(y)) == 2
    assert lib.portmm_mlp(address(x), odd, address(y)) == 2
    assert lib.portmm_mlp(address(x), address(bias), address(x)) == 2
    assert lib.portmm_mlp(address(x), address(bias), address(x[:, 1:])) == 2
    np.testing.assert_array_equal(x, 1)

    def attention(word, sizes, causal, *arrays):
        q, k, v, out = arrays or (address(x),) * 4
        return lib.portmm_attention(word, *map(long, sizes), q, k, v, ctypes.c_float(1), causal, long(0), out, None)

    assert attention(b"f32", (1, 4, 3, 4, 4, 16, 16), 1) == 2
    assert attention(b"f32", (1, 4, 2, -1, 4, 16, 16), 1) == 2
    assert attention(b"f32", (1, 4, 2, 0, 4, 16, 16), 1) == 0
    assert attention(b"f32", (1, 4, 2, 4, 4, 16, 16), 0) == 1
    assert attention(b"f64", (1, 4, 2, 4, 4, 16, 16), 1) == 1
    assert attention(b"f32", (1, 4, 2, 4, 4, 16, 16), 1, None, *[address(x)] * 3) == 2
    assert lib.portmm_matmul(b"f32", *[long(4)] * 3, None, long(4), long(1), None, long(4), long(1), None, long(4)) != 0
    assert lib.portmm_attention(None, *[long(1)] * 7, *[None] * 3, ctypes.c_float(1), 0, long(0), None, None) == 2


def test_the_example(library, tmp_path):
    program, folder = tmp_path / "layers", library[1]
    words = [str(EXAMPLES / "layers.c"), f"-I{folder}", f"-L{folder}", "-lportmm", f"-Wl,-rpath,{folder}", "-lm"]
    subprocess.run([*find_compiler().argv, "-Wall", "-Werror", *words, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong calls refused" in done.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sorted own.py:ordered 4x4", "sort in own.py:6 is computed by NumPy"),
        ("seen own.py:seen 4x4", "shares memory"),
        ("seen own.py:scaled 4x4", "no function of kernels alone"),
        ("seen own.py:ordered 4xy", "'4xy' is no argument"),
        ("seen own.py:ordered 4:f33", "'4:f33' is no argument"),
        ("seen own.py:missing 4", "names no function"),
        ("seen", "there is no function"),
        ("matmul own.py:ordered 4", "cannot be a name"),
        ("two own.py:ordered 4\ntwo own.py:ordered 4", "was there before"),
    ],
)
def test_what_is_no_function_of_kernels(tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    with pytest.raises(BundleError, match=r"line [12]") as raised:
        library_calls.functions_of(library_calls.lines_of(line, "functions.txt"), [host()], (1,))
    assert words in str(raised.value)


@pytest.mark.parametrize("line", ["1 2", "0 4 4", "4 4 4 f64", "4 4 4 heads=3 kv_heads=2", "4 4 4 width=1"])
def test_lines_that_are_no_attention(line):
    with pytest.raises(BundleError, match="line 1"):
        bundle_shapes.attention_of(f"attention {line}", "shapes")


@pytest.mark.emulated
def test_functions_for_aarch64(tmp_path):
    from crossing import program_compiler
    from machines import require

    compiler = program_compiler("aarch64")
    ((target,), _) = bundle_shapes.targets_of(["c7g"])
    path, functions = made(tmp_path, target, (1,))
    assert os.uname().machine == "aarch64" or {x.name for x in functions} == {"mlp", "quantized", "scaled", "model"}
    program, folder = tmp_path / "layers", path.parent
    words = [str(EXAMPLES / "layers.c"), f"-I{folder}", f"-L{folder}", "-lportmm", f"-Wl,-rpath,{folder}", "-lm"]
    subprocess.run([*compiler, *words, "-o", str(program)], check=True)
    emulator = [require("qemu-aarch64"), "-L", "/usr/aarch64-linux-gnu", "-cpu", "max,sve-default-vector-length=32"]
    done = subprocess.run([*emulator, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "neoverse_v1" in done.stdout
