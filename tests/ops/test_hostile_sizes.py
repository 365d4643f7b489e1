"""Sizes that are claimed, but not given, cost neither memory nor time; errors are portmm's own."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import portmm as pm
from portmm.errors import PackError
from portmm.ops import int4_panels, prepack
from portmm.weights import safetensors

HUGE = 2**28
LIMIT = """
import resource, numpy as np, portmm as pm
pm.matmul(np.ones((2, 8), np.float32), pm.pack(pm.quantize(np.ones((8, 4), np.float32), group=8)))
pm.pack(np.ones((8, 4), np.int8)), pm.pack(np.ones((8, 4), np.float32))
here = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (here + (64 << 20),) * 2)
N = 2**28
none = np.empty((0, N // 8), np.int32)
"""
CLAIMS = {
    "gguf": "pm.pack(pm.from_gguf(b'', (0, N)))",
    "gguf without columns": "pm.dequantize(pm.from_gguf(b'', (2**40, 0)))",
    "gguf without columns, packed": "w = pm.pack(pm.from_gguf(b'', (2**40, 0))); w.nbytes",
    "gptq": "pm.pack(pm.from_gptq(np.empty((0, N), np.int32), none, np.empty((0, N), 'f4')))",
    "awq": "pm.pack(pm.from_awq(none, none, np.empty((0, N), 'f4')))",
    "int4": "import ml_dtypes; pm.pack(pm.from_int4(np.empty((0, N), ml_dtypes.int4), np.empty((0, N), 'f4')))",
    "quantize": "pm.pack(pm.quantize(np.empty((0, N), 'f4')))",
    "quantize without columns": "pm.pack(pm.quantize(np.empty((2**40, 0), 'f4'), group=32))",
    "pack": "pm.pack(np.empty((0, N), np.int8)), pm.pack(np.empty((0, N), 'f4'))",
    "batch": "pm.pack(np.empty((2**20, 0, 2**20), np.int8))",
    "unpickled": "import pickle; pickle.loads(pickle.dumps(pm.pack(np.empty((0, N), np.int8))))",
    "folded": "import pickle; w = pickle.loads(pickle.dumps(pm.pack(pm.from_gguf(b'', (0, N))))); repr(w)",
    "written": "pm.save_packed(pm.pack(np.empty((0, N), np.int8)), P); assert pm.load_packed(P).shape == (0, N)",
}


@pytest.mark.rest("takes long for what it finds")
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_claim_costs_nothing(claim, tmp_path):
    script = f"{LIMIT}P = {str(tmp_path / 'w')!r}\n{claim}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shape", [(0, 5), (7, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_empty_weights_multiply(shape, dtype):
    b, a = np.empty(shape, dtype), np.ones((3, shape[0]), dtype)
    w = pm.pack(b)
    np.testing.assert_array_equal(pm.matmul(a, w), np.zeros((3, shape[1])))
    np.testing.assert_array_equal(np.asarray(w), b)
    if dtype == np.int8:
        np.testing.assert_array_equal(pm.linear(a, w), np.zeros((3, shape[1])))
    else:
        w = pm.pack(pm.quantize(b, group=8))
        np.testing.assert_array_equal(pm.matmul(a, w), np.zeros((3, shape[1])))
        assert int4_panels.unpack_int4(w).shape == shape


EXTENTS = [(2**32, 2**32, 4, 4), (2**70, 0), (0, 2**70), (2**62, 0), (0, 2**62), (2**40, 2**40, 0, 8), (2**64, 0, 0)]


@pytest.mark.parametrize("shape", EXTENTS)
def test_extents_beyond_what_can_be_addressed(shape):
    """Their product, modulo 2**64, may be 0; and an extent of 0 hides the others."""
    for family, dtype in (("f32x32", np.float32), ("s8x32k4s", np.int8)):
        with pytest.raises(PackError, match="shape"):
            prepack.restore(np.empty(0, dtype), shape, family.partition("x")[0], family)
    with pytest.raises(PackError, match="shape"):
        int4_panels.restore(np.empty(0, np.int32), shape, "u4x32k8g32")


@pytest.mark.parametrize("shape", EXTENTS)
@pytest.mark.parametrize("family", ["f32x32", "s8x32k4s", "u4x32k8g32"])
def test_huge_extents_in_a_file(tmp_path, shape, family):
    place = tmp_path / "w"
    dtype = {"f": np.float32, "s": np.int8, "u": np.int32}[family[0]]
    about = {"weight": {"shape": list(shape), "family": family}}
    words = {"format": "portmm.ops.prepack", "version": "2", "weights": json.dumps(about), "one": "True"}
    safetensors.write(place, {"weight": np.empty(0, dtype)}, words)
    with pytest.raises(PackError):
        pm.load_packed(place)


@pytest.mark.parametrize("shape", [(2**70, 0), (0, 2**70), (2**63, 0), (0, 2**63)])
def test_huge_extents_of_a_format(shape):
    with pytest.raises(ValueError, match="shape"):
        pm.from_gguf(b"", shape)


def test_a_huge_extent_in_a_quantized_file(tmp_path):
    place = tmp_path / "q"
    words = {"format": "portmm.weights.quantized", "version": "1", "bits": "4", "group": "32", "rows": str(2**63)}
    tensors = {"codes": np.empty((2**62, 0), np.uint8), "scales": np.empty((2**58, 0), np.float32)}
    safetensors.write(place, tensors, words)
    with pytest.raises(PackError):
        pm.load_quantized(place)


@pytest.mark.parametrize("load", [pm.load_packed, pm.load_quantized])
def test_a_pipe_is_no_file_of_weights(tmp_path, load):
    place = tmp_path / "pipe"
    os.mkfifo(place)
    with pytest.raises(PackError, match="regular"):
        load(place)


def test_a_weight_whose_pickle_lies():
    w = pm.pack(np.ones((8, 8), np.float32))
    function, args = w.__reduce__()
    assert function(*args).shape == (8, 8)
    with pytest.raises(PackError):
        function(args[0], (8, 2**40), *args[2:])
    assert pickle.loads(pickle.dumps(w)).shape == (8, 8)  # noqa: S301 - its own
