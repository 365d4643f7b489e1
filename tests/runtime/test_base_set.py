"""The base set of a wheel: made by tools/base_set.py, and used by processes with and without a compiler."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from portmm.build import kernel_store
from portmm.build.bundle import open_bundle
from portmm.build.compiler import find_compiler
from portmm.dispatch import base_kernels
from portmm.errors import NoCompilerError
from portmm.host.detect import host
from portmm.host.features import CPUID, HWCAP, HWCAP2, features
from portmm.host.host_probe import snapshot
from portmm.ops.bundle_build import SCHEDULES
from portmm.ops.bundle_check import RAN, check
from portmm.ops.bundle_operands import Result
from portmm.runtime import cpu as cpu_runtime
from portmm.target.target import names

TOOLS = str(Path(__file__).parents[2] / "tools")
ARCH = os.uname().machine

CALLS = """
import json, sys, warnings
import numpy as np
if {bare}:
    sys.modules["ziglang"] = None
import portmm as pm
r = np.random.default_rng(0)
wrong, selected = [], []
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    for m, n, k in ((64, 80, 96), (1, 80, 96), (3, 33, 17), (8, 5, 7), (100, 255, 31), (13, 64, 64)):
        a, b = r.random((m, k), np.float32), r.random((k, n), np.float32)
        first = pm.matmul(a, b)
        selected.append("portmm.dispatch.schedule_choice" in sys.modules)
        wrong.append(not np.allclose(first, a @ b, rtol=1e-5))
        if not {bare}:
            from portmm.dispatch import cpu_background
            for _ in range(3):
                wrong.append(not np.array_equal(pm.matmul(a, b), first))
                cpu_background.wait()
print(json.dumps([any(wrong), [str(x.message) for x in heard], selected]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory of a small base set for this machine."""
    here = host()
    if here.name not in names("chip"):
        pytest.skip("the host is no described chip")
    try:
        find_compiler()
    except NoCompilerError:
        pytest.skip("no compiler")
    sys.path.insert(0, TOOLS)
    import base_products
    import base_set

    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_set, "ProcessPoolExecutor", ThreadPoolExecutor)
        patch.setattr(base_set, "OVER_ROWS", (("softmax", 0), ("rms_norm", 1)))
        patch.setattr(base_set, "run_time", run_time)
        for axis, values in (("MS", (*range(1, 9), 12, 64)), ("NS", (63,)), ("NS_OF_WIDE", (63,)), ("KS", (63,))):
            patch.setattr(base_products, axis, values)
        levels = {"none": (here.name, "no_such_feature"), "here": (here.name, "sse2" if ARCH == "x86_64" else "asimd")}
        fused = [x for x in base_products.FUSED if x.steps == ("relu",) and x.b == "packed"]
        codes = [base_products.Kind("f32-u4-f32", "row", "codes", 32, symmetric=x) for x in (False, True)]
        kinds = [base_products.Kind("f32"), *fused, *codes]
        patch.setattr(base_products, "MS_OF_FUSED", (1, 32))
        patch.setattr(base_products, "AXES_OF_FUSED", (63,))
        base_set.make(folder, ARCH, "gnu", levels, kinds)
    return folder


def run_time(_, folder, *__):
    """The extension by this machine's compiler: zig takes seconds."""
    artifact = cpu_runtime._build_extension()
    (folder / f"{cpu_runtime.MODULE}{cpu_runtime.interface()}").write_bytes(artifact.code)


OTHERS = """
import json, sys, warnings
import numpy as np
sys.modules["ziglang"] = None
import portmm as pm
r = np.random.default_rng(0)
x, w = r.random((40, 96), np.float32), r.random((96, 80), np.float32)
q, bias = r.random((1, 2, 33, 24), np.float32), r.random(80, np.float32)
s = q.astype(float) @ q.swapaxes(-1, -2) / np.sqrt(24)
seen = np.where(np.tri(33, dtype=bool), s, -np.inf)
def attended(s):
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ q
wrong = []
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    for _ in range(3):
        packed, small = pm.pack(w), [pm.quantize(w, bits=4, group=32, symmetric=x) for x in (False, True)]
        for m in (1, 3, 40):
            y = pm.matmul(x[:m], packed, epilogue=lambda acc, i: pm.relu(acc + bias[i.n]))
            wrong.append(not np.allclose(y, np.maximum(x[:m] @ w + bias, 0), rtol=1e-5))
            for q4 in small:
                y = pm.matmul(x[:m], pm.pack(q4))
                wrong.append(not np.allclose(y, x[:m] @ pm.dequantize(q4), rtol=1e-5))
        wrong.append(not np.allclose(pm.attention(q, q, q), attended(s), rtol=1e-5))
        wrong.append(not np.allclose(pm.attention(q, q, q, causal=True), attended(seen), rtol=1e-5))
        wrong.append(not np.allclose(pm.attention(q[:, :, :1], q, q), attended(s)[:, :, :1], rtol=1e-5))
    f = pm.fuse(pm.softmax)
    wrong += [not np.allclose(f(y), np.exp(y) / np.exp(y).sum(-1, keepdims=True)) for y in (x, x[:3], x[0])]
    f = pm.fuse(pm.rms_norm)  # its kernel is passed the number of columns
    for y in (x, x[:3], x[:, :33].copy(), np.full((5, 7), 1e-3, np.float32)):
        w = r.random(y.shape[-1], np.float32)
        for _ in range(2):
            wrong.append(not np.allclose(f(y, w), y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * w, rtol=1e-5))
late = ("portmm.codegen.c_kernel", "portmm.target.target")
print(json.dumps([any(wrong), [str(x.message) for x in heard], any(x in sys.modules for x in late)]))
"""


FIRST = """
import json, sys
import numpy as np
sys.modules["ziglang"] = None
import portmm as pm
r = np.random.default_rng(0)
x, w, bias = r.random((40, 96), np.float32), r.random((96, 80), np.float32), r.random(80, np.float32)
q, packed, count = r.random((1, 2, 33, 24), np.float32), pm.pack(w), 0
def look(frame, event, _):
    global count
    count += event == "call" and "portmm" in frame.f_code.co_filename
def first(function):
    global count
    count = 0
    sys.setprofile(look)
    function()
    sys.setprofile(None)
    return count
def rectified(acc, i):
    return pm.relu(acc + bias[i.n])
made = []
def multiplied():
    made.append(pm.matmul(x, packed, epilogue=rectified))
counts = [first(multiplied), "portmm.trace.tracer" in sys.modules, first(lambda: pm.attention(q, q, q))]
multiplied()
counts += ["portmm.ops.attention_scores" in sys.modules, "portmm.trace.tracer" in sys.modules, np.array_equal(*made)]
fused, rows = pm.fuse(pm.softmax), []
counts.append(first(lambda: rows.append(fused(x))))
counts.append("portmm.fusion.tracing" in sys.modules)
def scaled(x):
    return pm.rms_norm(x, weight)
def scaled_as_well(x, weight):
    return pm.rms_norm(x, weight)
weight = r.random(96, np.float32)
for f, args in ((pm.fuse(scaled), ()), (pm.fuse(scaled_as_well), (weight,)), (pm.fuse(pm.rms_norm), (weight,))):
    rows.append(f(x, *args))
counts.append("portmm.fusion.tracing" in sys.modules)
other = pm.fuse(lambda x: pm.softmax(x) * 2), pm.fuse(lambda x: pm.rms_norm(x, weight[::2]))
doubled, short = other[0](x), other[1](x[:, :48])
counts.append("portmm.fusion.tracing" in sys.modules)
weight = weight * 2  # what a function captures is looked up in each call
again = [fused(x), pm.fuse(scaled)(x), rows[1] * 2]
same = [np.array_equal(rows[0], again[0]), np.array_equal(again[1], again[2])]
same += [np.array_equal(rows[1], y) for y in rows[2:]] + [np.allclose(doubled, 2 * rows[0])]
print(json.dumps([*counts, all(same)]))
"""
MOST = (220, 290, 160)
"""Calls of Python, of modules as they are defined as well, in first calls with an epilogue, of attention and of a fused
softmax, beside what the first call of all loads."""


def run(folder, tmp_path, *, bare, calls=CALLS):
    (tmp_path / "empty").mkdir(exist_ok=True)
    changed = {"PORTMM_BASE": str(folder), "PORTMM_CACHE": str(tmp_path / "cache")}
    changed |= {"PATH": str(tmp_path / "empty")} if bare else {}
    kept = {k: v for k, v in os.environ.items() if not bare or k != "CC"}
    command = [sys.executable, "-c", calls.replace("{bare}", str(bare))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=kept | changed)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_first_calls_need_neither_a_compiler_nor_a_selection(made, tmp_path):
    wrong, heard, selected = run(made, tmp_path, bare=True)
    assert not wrong
    assert heard == []
    assert not any(selected)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_packed_weights_epilogues_and_attention_need_no_source(made, tmp_path):
    wrong, heard, emitted = run(made, tmp_path, bare=True, calls=OTHERS)
    assert not wrong
    assert heard == []
    assert not emitted


def test_first_calls_of_other_operations_take_few_calls(made, tmp_path):
    epilogue, traced, attention, scored, traced_again, same, rows, *late, equal = run(
        made, tmp_path, bare=True, calls=FIRST
    )
    assert late == [False, False, True]
    assert equal
    assert not traced
    assert not scored
    assert traced_again
    assert same
    assert epilogue <= MOST[0]
    assert attention <= MOST[1]
    assert rows <= MOST[2]


def test_a_better_kernel_with_the_same_bits_follows(made, tmp_path):
    wrong, heard, selected = run(made, tmp_path, bare=False)
    assert not wrong
    assert heard == []
    assert not selected[0]


def test_the_level_is_the_first_whose_features_are_here(made, monkeypatch):
    monkeypatch.setenv("PORTMM_BASE", str(made))
    base_kernels.forget()
    kernel_store.forget()
    try:
        assert base_kernels.level() == "here"
        monkeypatch.setenv("PORTMM_BASE", "off")
        base_kernels.forget()
        kernel_store.forget()
        assert base_kernels.level() == ""
        assert not base_kernels.leads()
    finally:
        monkeypatch.undo()
        base_kernels.forget()
        kernel_store.forget()
    assert open_bundle(made / f"{ARCH}.bundle").answer("levels")


BESIDE = """
import json, sys, warnings
sys.modules["ziglang"] = None
import numpy as np
import portmm as pm
warnings.simplefilter("error")
a, b = np.ones((64, 96), np.float32), np.ones((96, 80), np.float32)
before = pm.matmul(a, b).min() if "before" in sys.argv else 96
pm.use_bundle(sys.argv[1])
from portmm.dispatch import base_kernels
print(before == pm.matmul(a, b).min() == pm.matmul(a, pm.pack(b)).min() == 96, base_kernels.leads())
"""


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("words", [[], ["before"]])
def test_a_bundle_leads_unless_it_is_for_other_machines(made, tmp_path, words, *, other):
    from portmm.ops import bundle_build, bundle_shapes

    maker, path = bundle_build.Maker(), tmp_path / "layers.bundle"
    bundle_build.add_shapes(
        maker, bundle_shapes.shapes_of("64 80 96 f32 row\n64 80 96 f32 packed\n"), [host()], (1, 64)
    )
    if other:
        maker.machines = {"other": ("unknown",)}
        maker.isas.add("unknown")
    path.write_bytes(maker.pack((1, 64), lambda *_: None))
    (tmp_path / "empty").mkdir()
    env = {k: v for k, v in os.environ.items() if k != "CC"} | {
        "PORTMM_BASE": str(made),
        "PATH": str(tmp_path / "empty"),
    }
    env |= {"PORTMM_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", BESIDE, path, *words], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True", str(other)], done.stderr


def test_kernels_of_the_library_compute_products(made):
    """Kernels with epilogues and kernels of int4 weights are checked, too."""
    bundle = open_bundle(made / f"{ARCH}.bundle")
    assert check(bundle) == {RAN: len(bundle.answer(SCHEDULES))}


def test_results_of_epilogues_agree_within_their_rounding():
    for dtype, near, far in (("f32", 1 + 1e-6, 1.001), ("f16", 1.001, 1.01)):
        x = Result(np.array([[1.0], [2.0]]), dtype)
        for first, wrong in ((near, 0), (far, 1)):
            memory = np.array([first, 2], {"f32": np.float32, "f16": np.float16}[dtype]).tobytes()
            assert x.differing(memory) == x._replace(columns=True).differing(memory) == wrong
            assert x._replace(exact=True).differing(memory) == 1


def test_the_run_time_reads_the_features_that_a_snapshot_has():
    read = getattr(cpu_runtime.runtime(), "features", None)
    if read is None:
        pytest.skip("the run time through cffi has no features")
    table = {x for bits in CPUID.values() for x in bits} if ARCH == "x86_64" else {*HWCAP.values(), *HWCAP2.values()}
    words = {x for x in read().split() if x in table and not x.startswith("amx_")}
    assert words == {x for x in features(snapshot()) & table if not x.startswith("amx_")}
