"""Explaining: nothing about a choice is hidden, and it is the choice that would be made."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from machines import require

import portmm as pm
from portmm.dispatch import config
from portmm.explanation.product import target_called
from portmm.explanation.record import SHOWN
from portmm.host import calibrate, detect
from portmm.ops import routes
from portmm.runtime.cpu import runtime
from portmm.schedule.cpu_textbook import follows
from portmm.schedule.text import parse, spell
from portmm.spec.problem import Problem
from portmm.target.model import CPU
from portmm.target.target import load_target, names_of

pytestmark = pytest.mark.calls

QUICKLY = "fast"

SHAPES = (
    (1024, 1024, 1024, "row", "row"),
    (1, 4096, 4096, "row", "row"),
    (5, 1, 3000, "row", "col"),
    (200, 300, 17, "col", "any"),
)


def problems(dtype):
    yield from (Problem(m, n, k, dtype, a=a, b=b) for m, n, k, a, b in SHAPES)
    yield Problem(8, 8, 8, dtype, batch=1000, static=True)
    yield Problem(96, 80, 64, dtype, c="col", deterministic=True)


# --- any machine -------------------------------------------------------------


@pytest.mark.thin(7)
@pytest.mark.parametrize("chip", names_of("cpu"))
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_every_chip_explains_and_emits(chip, dtype):
    target = load_target(chip)
    for problem in problems(dtype):
        found = pm.explain(problem, target=chip, threads=3)
        assert found.problem == problem
        assert found.target.name == chip
        assert found.kernel.isa in target.isas
        assert found.workers in (1, 3)
        assert found.origin in (("analytical",) if target.searches else ("analytical", "textbook"))
        assert found.seconds > 0
        others = [cost.seconds for s, cost in found.runners_up if not (target.searches and follows(s, problem, target))]
        # The choice is that of a class of row counts, of which this is one.
        least = found.seconds * (CPU.within if found.origin == "textbook" else 1)
        assert all(CPU.class_loss * x >= least for x in others)
        assert found.source.count(f"void {found.kernel.name}(") == 1
        assert f"--schedule {spell(found.schedule)} " in found.source
        assert parse(spell(found.schedule)) == found.schedule


def test_what_is_printed_holds_everything():
    found = pm.explain(Problem(300, 400, 500), target="haswell", threads=1)
    text = str(found)
    for part in (
        str(found.problem),
        found.target.title,
        found.origin,
        str(found.schedule),
        found.cost.bound,
        *found.cost.overlapped,
        *found.cost.added,
        *(str(s) for s, _ in found.runners_up[:SHOWN]),
        found.kernel.name,
        " ".join(found.flags),
        found.source,
    ):
        assert part in text
    assert found.source not in found.summary()


@pytest.mark.parametrize(
    ("m", "n", "k", "chip", "reason"),
    [(64, 3072, 768, "zen5", "are textbook blockings"), (89, 4096, 16, "zen4", "every M from 89 to 92")],
)
def test_what_is_printed_says_why_a_faster_prediction_was_not_selected(m, n, k, chip, reason):
    found = pm.explain((m, k), (k, n), target=chip, threads=1)
    assert (found.runners_up[0][1].seconds < found.seconds) == (reason in found.summary())


def test_the_record_is_json():
    found = pm.explain((3, 4), (4, 5), target="neoverse-v1")
    data = json.loads(json.dumps(found.as_dict()))
    assert data["target"] == "neoverse_v1"
    assert data["schedule"] == spell(found.schedule)
    assert data["problem"]["m"] == 3
    assert len(data["runners_up"]) == len(found.runners_up)
    assert data["runs_here"] is found.runs_here


@pytest.mark.parametrize("chip", ["neoverse_n1", "haswell"])
def test_a_kernel_for_another_machine_is_cross_compiled(chip):
    arch = load_target(chip).arch
    if arch != detect.host().arch:
        require(f"{arch}-linux-gnu-gcc")
    found = pm.explain((100, 100), (100, 100), target=chip)
    assert found.artifact.path.read_bytes()[:4] == b"\x7fELF"
    assert found.artifact.source == found.source
    assert found.artifact.cached


def test_explaining_compiles_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path / "none"))
    str(pm.explain((64, 64), (64, 64), target="zen4"))
    assert not (tmp_path / "none").exists() or not list((tmp_path / "none").glob("*.so"))


def test_a_shape_takes_no_memory():
    n = 10**7
    assert pm.explain((50, n), (n, n)).problem == Problem(50, n, n)


# --- the choice that would be made -------------------------------------------


F32 = np.ones((60, 70), np.float32)
CASES = {
    "rows": lambda: (F32, np.ones((70, 80), np.float32), None),
    "transposed": lambda: (F32.T, F32, None),
    "both transposed": lambda: (F32.T, np.ones((80, 60), np.float32).T, None),
    "sliced": lambda: (F32[::2, :50], np.ones((70, 80), np.float32)[:50, ::2], None),
    "vector": lambda: (F32, np.ones(70, np.float32), None),
    "two vectors": lambda: (F32[0], np.ones(70, np.float32), None),
    "one row": lambda: (F32[:1], np.ones((70, 80), np.float32), None),
    "one column": lambda: (F32, np.ones((70, 1), np.float32), None),
    "wider": lambda: (F32, np.ones((70, 80)), None),
    "double": lambda: (F32.astype(float), np.ones((70, 80)), None),
    "batch": lambda: (np.ones((5, 6, 7), np.float32), np.ones((5, 7, 8), np.float32), None),
    "long batch": lambda: (np.ones((50, 6, 7), np.float32), np.ones((50, 7, 8), np.float32), None),
    "batch of one B": lambda: (np.ones((5, 6, 7), np.float32), np.ones((7, 8), np.float32), None),
    "broadcast": lambda: (np.ones((5, 1, 6, 7), np.float32), np.ones((3, 7, 8), np.float32), None),
    "out": lambda: (F32, F32.T, np.empty((60, 60), np.float32)),
    "out by columns": lambda: (F32, F32.T, np.empty((60, 60), np.float32).T),
    "out wider": lambda: (F32, F32.T, np.empty((60, 60)).T),
    "out scattered": lambda: (F32, F32.T, np.empty((60, 120), np.float32)[:, ::2]),
    "packed": lambda: (F32, pm.pack(np.ones((70, 80), np.float32)), None),
    "packed, wider": lambda: (F32.astype(float), pm.pack(np.ones((70, 80), np.float32)), None),
    "packed, out by columns": lambda: (
        F32,
        pm.pack(np.ones((70, 60), np.float32)),
        np.empty((60, 60), np.float32).T,
    ),
}


@pytest.fixture
def posed(monkeypatch):
    """The problems that matmul asks routes for."""
    asked = []
    real = routes.routed_for_call

    def watch(p, **options):
        asked.append(p)
        return real(p, **options)

    monkeypatch.setattr(routes, "routed_for_call", watch)
    return asked


@pytest.mark.parametrize("case", CASES)
def test_the_problem_is_the_one_that_matmul_poses(case, posed):
    a, b, out = CASES[case]()
    # Inside a block of settings every call takes the general way, and what has no plan yet is posed.
    with pm.config(threads=1):
        found = pm.explain(a, b, out=out)
        pm.matmul(a, b, out)
    assert [found.problem] == posed
    assert found.workers == 1


@pytest.mark.parametrize("case", ["rows", "transposed", "both transposed", "one row", "out", "packed"])
def test_the_problem_is_the_one_that_the_fast_path_poses(case, posed):
    a, b, out = CASES[case]()
    pm.matmul(a, b, out)
    runtime().clear_memo()
    posed.clear()
    pm.matmul(a, b, out)
    assert [pm.explain(a, b, out=out).problem] == posed


def test_a_plan_is_explained_as_static(posed):
    a, b = np.ones((6, 7), np.float32), np.ones((7, 8), np.float32)
    pm.plan(a, b)
    assert [pm.explain(a, b, static=True).problem] == posed
    assert posed[0].static


def test_shapes_stand_for_dense_arrays():
    a, b = np.ones((5, 6, 7)), np.ones((7, 8))
    assert pm.explain((5, 6, 7), (7, 8), dtype="f64").problem == pm.explain(a, b).problem
    assert pm.explain((5, 6, 7), b).problem == pm.explain(a, (7, 8)).problem == pm.explain(a, b).problem
    assert pm.explain((5, 6, 7), (7, 8), dtype="float64").problem == pm.explain(a, b).problem


def test_a_weight_that_does_not_suit_is_explained_as_it_is_used():
    b = pm.pack(np.ones((70, 80), np.float32))
    with pm.config(target="scalar"):
        found = pm.explain(F32, b)
    if found.problem.b != "packed":
        assert found.problem == Problem(60, 80, 70)
        assert "unpacks" in str(found)


def test_settings_are_those_in_force():
    with pm.config(deterministic=True, threads=1, target="scalar"):
        found = pm.explain((500, 500), (500, 500))
        assert found.problem.deterministic
        assert found.kernel.isa.name == "scalar"
        assert found.workers == 1
        assert not pm.explain((5, 5), (5, 5), deterministic=False).problem.deterministic
    assert pm.explain((5, 5), (5, 5), deterministic=True).problem.deterministic
    assert pm.explain((4000, 4000), (4000, 4000), threads=7).workers in (1, 7)
    assert pm.explain(Problem(5, 5, 5, deterministic=True)).problem.deterministic


def test_a_name_means_what_it_means_to_config():
    assert target_called(None) == config.target()
    best = detect.host().isas[-1].name
    assert target_called(best) == calibrate.measured(detect.resolve(best))
    assert target_called(load_target("zen2")).name == "zen2"


def test_rates_say_where_they_come_from(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path))
    monkeypatch.setattr(config, "_targets", {})
    here = detect.host()
    atom = next(isa for isa in here.isas if isa.base is None).atom("f32").name
    assert "measured" not in {origin for _, origin in pm.explain((9, 9), (9, 9)).rates.values()}
    calibrate.remember(here, {atom: 77.0, "memory": 5.5})
    monkeypatch.setattr(config, "_targets", {})
    found = pm.explain((9, 9), (9, 9))
    assert found.rates[atom] == (77.0, "measured")
    assert found.rates["memory"] == (5.5, "measured")
    assert f"{atom}: 77 GFLOP/s, measured" in str(found)


# --- what cannot be explained ------------------------------------------------


@pytest.mark.parametrize(
    ("args", "options", "error", "words"),
    [
        (((3, 4),), {}, ValueError, "b is missing"),
        ((Problem(3, 4, 5), (3, 4)), {}, ValueError, "no b"),
        (((3, 4), (5, 6)), {}, ValueError, "cannot multiply"),
        (((3, 0), (0, 6)), {}, ValueError, "nothing to multiply"),
        (((3, 4), (4, -6)), {}, ValueError, "negative"),
        (((), (4,)), {}, ValueError, "at least one dimension"),
        (((3, 4), (4, 6)), {"dtype": "f8"}, TypeError, "'f8' is not supported; use one of|dtype 'f8' is not supported"),
        (((3, 4), (4, 6)), {"dtype": "int16"}, TypeError, "not supported"),
        ((np.ones((3, 4), int), (4, 6)), {}, TypeError, "int64"),
        (((3, 4), (4, 6)), {"target": "nosuch"}, pm.TargetError, "no target called 'nosuch'"),
        (((3, 4), (4, 6)), {"out": np.ones((3, 5), np.float32)}, ValueError, "out has shape"),
    ],
)
def test_what_cannot_be_explained(args, options, error, words):
    with pytest.raises(error, match=words):
        pm.explain(*args, **options)


def test_an_import_does_not_load_what_explaining_needs():
    code = (
        "import sys, portmm; assert 'portmm.explanation.product' not in sys.modules; "
        "import portmm.explanation.product; assert callable(portmm.explain); portmm.Explanation; "
        "assert not hasattr(portmm, 'nosuch')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_unit_is_told_with_its_rate():
    """The choice between units rests on rates and the shape: the best of each unit is there to see."""
    text = pm.explain(Problem(64, 768, 3072, "s8-s8-s32"), target="sapphire_rapids", threads=1).summary()
    assert "amx_s8s8: 0.0625 macs of 16x16x64 a cycle, described" in text
    assert "by avx512vnni (avx512vnni_u8s8: 2 macs of 1x16x4 a cycle, described)" in text
    assert "by avx512 (avx512_s16:" in text


def test_weights_of_four_bits_are_explained():
    q = pm.quantize(np.ones((64, 40), np.float32), group=32)
    assert pm.explain(np.zeros((4, 64), np.int8), pm.pack(q)).problem.dtype == "s8-u4-f32"
    with pytest.raises(TypeError, match=r"pack\(b\)"):
        pm.explain(np.zeros((4, 64), np.float32), q)
    with pytest.raises(ValueError, match="groups with scales"):
        Problem(4, 4, 4, "s8-u4-s32", b="codes", family="u4x32k8g32")
