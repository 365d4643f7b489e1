"""Plans, fused functions and weights in pickles: in this process, in another one, by value and by name."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import portmm as pm
from portmm.dispatch import config
from portmm.errors import BuildError, DeviceError, PortmmError
from portmm.fusion.fuse import FusedFunction
from portmm.ops import host_matmul, plan_state
from portmm.ops.grid_product import Plan
from portmm.ops.int4_words import DeviceInt4
from portmm.ops.prepack import DevicePacked
from portmm.runtime.cffi_records import PlainPlan

QUICKLY = True
RNG = np.random.default_rng(5)
X, W = (RNG.random(s, np.float32) for s in ((6, 40), (40, 24)))


@pm.fuse
def gated(x, w):
    return pm.silu(x @ w) * 2.0


class Layer:
    def __init__(self, w):
        self.w = w

    @pm.fuse
    def rows(self, x):
        return np.maximum(x @ W, 0)


def again(x, module=pickle):
    return module.loads(module.dumps(x))


# -- in this process -------------------------------------------------------------------


def plans():
    """Plans and their operands: batches, strides, packed weights, columns, narrow types."""
    batch = RNG.random((3, 6, 40), np.float32)
    yield pm.plan(X, W), (X, W)
    yield pm.plan(X, pm.pack(W)), (X,)
    yield pm.plan(batch, W), (batch, W)
    yield pm.plan(batch[:, ::2, ::-1], W[::-1]), (batch[:, ::2, ::-1], W[::-1])
    yield pm.plan(X, W, np.empty((24, 6), np.float32).T), (X, W, np.empty((24, 6), np.float32).T)
    yield pm.plan(X[0], W[:, 0]), (X[0], W[:, 0])
    codes = RNG.integers(-9, 9, (40, 8), np.int8)
    yield pm.plan(codes.T, codes), (codes.T, codes)


def test_plans_compute_the_same_from_their_descriptions():
    for plan, operands in plans():
        want = np.array(plan(*operands))
        for copied in (again(plan), again(again(plan)), copy.deepcopy(plan)):
            assert type(copied) is type(plan)
            assert (np.asarray(copied(*operands)) == want).all()


def test_a_plan_of_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x, w = X.astype(ml_dtypes.bfloat16), W.astype(ml_dtypes.bfloat16)
    plan = pm.plan(x, pm.pack(w))
    assert (again(plan)(x) == plan(x)).all()


def test_a_description_is_small_and_has_no_addresses():
    x = np.ones((512, 512), np.float32)
    text = pickle.dumps(pm.plan(x, x))
    assert len(text) < 1000
    assert pickle.loads(text)(x, x)[0, 0] == 512  # noqa: S301 - made here


def test_a_plan_keeps_the_settings_of_its_block():
    with pm.config(target="scalar", deterministic=True):
        plan = pm.plan(X, W)
    assert plan.detail.settings == {"target": "scalar", "deterministic": True}
    copied = again(plan)
    assert copied.detail == plan.detail
    assert (copied(X, W) == plan(X, W)).all()
    assert pm.plan(X, W).detail.settings == {}
    assert config.overrides() == {}


def test_plans_of_numpy_are_descriptions_too(monkeypatch):
    def fail(*_args, **_options):
        raise BuildError("no compiler")

    monkeypatch.setattr(plan_state, "make_plan", fail)
    monkeypatch.setattr(plan_state, "fall_back", lambda _error: None)
    by_numpy = pm.plan(X, W)
    assert type(again(by_numpy)) is type(by_numpy) is PlainPlan
    assert (again(by_numpy)(X, W) == X @ W).all()
    monkeypatch.undo()
    assert type(again(by_numpy)) is not PlainPlan


def test_plans_of_a_memo_are_refused():
    call = host_matmul.make_plan(X, W, None, bind=False)
    assert type(call) is type(pm.plan(X, W))
    with pytest.raises(PortmmError, match=r"portmm\.plan"):
        pickle.dumps(call)


@pytest.mark.parametrize(("cls", "count"), [(Plan, 3), (DevicePacked, 3), (DeviceInt4, 5)])
def test_what_is_on_a_device_stays_there(cls, count):
    with pytest.raises(DeviceError, match="device"):
        pickle.dumps(cls(*[None] * count))


def test_weights():
    q = pm.quantize(W, group=16)
    copied = again(q)
    assert not copied.codes.flags.writeable
    assert (pm.dequantize(copied) == pm.dequantize(q)).all()
    packed = pm.pack(q)
    assert (pm.matmul(X, again(packed)) == pm.matmul(X, packed)).all()
    assert (pm.matmul(X, again(pm.pack(W))) == pm.matmul(X, pm.pack(W))).all()


def test_a_quantized_weight_whose_pickle_lies():
    make, args = pm.quantize(W, group=16).__reduce__()
    with pytest.raises(ValueError, match="codes"):
        make(np.full_like(args[0], 99), *args[1:])


def test_public_functions_are_found_by_name():
    for name in pm.__all__:
        value = getattr(pm, name)
        if callable(value):
            assert again(value) is value, name
    linear = partial(pm.linear, w_scale=0.5, x_scale=2.0)
    codes = RNG.integers(-9, 9, (40, 8), np.int8)
    assert (again(linear)(codes.T, codes) == linear(codes.T, codes)).all()


def test_decorated_functions_are_found_by_name():
    want = gated(X, W)
    assert again(gated) is gated
    assert again(again(gated)) is gated
    assert gated.__qualname__ == "gated"
    assert again(Layer.rows) is Layer.rows
    assert (again(Layer(W).rows)(X) == Layer(W).rows(X)).all()
    assert (gated(X, W) == want).all()


def plain(x):
    return np.maximum(x, 0)


def test_a_function_that_is_fused_later_keeps_its_name():
    fused = pm.fuse(plain, on_unfusable="error")
    copied = again(fused)
    assert copied is not fused
    assert copied.strict
    assert plain.__qualname__ == "plain"
    assert (copied(-X) == 0).all()


# -- in another process ----------------------------------------------------------------

LOADS = """
import pickle, sys
sys.modules["ziglang"] = None  # the package of a compiler
import numpy as np
import portmm as pm
with open(sys.argv[1], "rb") as f:
    made, operands = pickle.load(f)
results = [np.asarray(f(*x)) for f, x in zip(made, operands)]
with open(sys.argv[2], "wb") as f:
    pickle.dump(results, f)
"""


def elsewhere(tmp_path, text, **environment):
    """The results of functions and their operands, which were pickled, in a process of its own."""
    (tmp_path / "made").write_bytes(text)
    paths = [str(Path(pm.__file__).parents[1]), str(Path(__file__).parent)]
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "PORTMM_MISSING": "error"} | environment
    command = [sys.executable, "-c", LOADS, str(tmp_path / "made"), str(tmp_path / "results")]
    subprocess.run(command, check=True, env=env, timeout=100)
    return pickle.loads((tmp_path / "results").read_bytes())  # noqa: S301 - made here


def test_another_process_finds_the_kernels_in_the_cache(tmp_path):
    text = pickle.dumps(([pm.plan(X, pm.pack(W)), gated], [(X,), (X, W)]))
    own = {"PORTMM_CACHE": str(tmp_path / "cache")}
    first = elsewhere(tmp_path, text, **own)
    # Without a compiler a kernel that is missing is an error.
    second = elsewhere(tmp_path, text, PATH="", CC="", **own)
    assert all((x == y).all() for x, y in zip(first, second, strict=True))


@pytest.mark.rest("takes long for what it finds")
def test_cloudpickle_takes_closures(tmp_path):
    cloudpickle = pytest.importorskip("cloudpickle")
    bias = RNG.random(24, np.float32)

    @pm.fuse
    def layer(x, w):
        return pm.gelu(x @ w + bias)

    assert isinstance(again(layer, cloudpickle), FusedFunction)
    assert again(gated, cloudpickle) is gated
    want = [layer(X, W), pm.matmul(X, W, epilogue=lambda acc, i: acc + bias[i.n])]
    made = [layer, lambda x, w: pm.matmul(x, w, epilogue=lambda acc, i: acc + bias[i.n])]
    text = cloudpickle.dumps((made, [(X, W)] * 2))
    # Where another process's compiler, or this one's, was late, NumPy has rounded in another order.
    for x, y in zip(elsewhere(tmp_path, text), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


SCRIPT = """
import pickle, sys
import cloudpickle
import numpy as np
import portmm as pm
@pm.fuse
def doubled(x):
    return x @ x + x
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    x = np.ones((4, 4), np.float32)
    sys.stdout.buffer.write(cloudpickle.dumps(([doubled], [(x,)])))
"""


@pytest.mark.rest("takes long for what it finds")
def test_a_script_sends_its_functions_by_value(tmp_path):
    pytest.importorskip("cloudpickle")
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(Path(pm.__file__).parents[1])}
    command = [sys.executable, str(tmp_path / "script.py")]
    text = subprocess.run(command, check=True, env=env, timeout=100, capture_output=True).stdout
    assert (elsewhere(tmp_path, text)[0] == 5).all()


def test_joblib_runs_plans_and_fused_functions():
    joblib = pytest.importorskip("joblib")
    plan = pm.plan(X, W)
    calls = [joblib.delayed(f)(X, W) for f in (plan, gated, pm.matmul)]
    want = [plan(X, W), gated(X, W), pm.matmul(X, W)]
    got = joblib.Parallel(n_jobs=2)(calls)
    assert all((x == y).all() for x, y in zip(got, want, strict=True))
