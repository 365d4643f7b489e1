"""The budget of a search: candidates leave time for the last draw and the certificate, which end with it."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_superoptimizer import CASES, arrays_of

import portmm as pm
from portmm.dispatch import config
from portmm.fusion import budget, superoptimizer, tracing, turns
from portmm.fusion.budget import Budget
from portmm.fusion.placing import Placing
from portmm.ir.mugraph import Builder
from portmm.target.target import names_of
from portmm.verification import certificate, emitted_text

QUICKLY = True


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set: seconds in a list of one."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_end_is_kept_back(clock):
    b = Budget(10.0, kernels=2)
    assert (b.left, b.elapsed) == (10, 0)
    assert b.end == 110
    assert 2 * budget.PROOF < b.kept < 10 * budget.KEPT
    assert b.lasts
    kept = b.kept
    clock[0] += 10.01 - kept
    assert not b.lasts
    assert b.left == pytest.approx(kept - 0.01)


def test_a_candidate_is_not_begun_that_would_end_late(clock):
    b = Budget(10.0)
    with b.candidate():
        clock[0] += 5
    assert b.longest == 5
    assert not b.lasts  # another one of five seconds
    assert Budget(20.0).lasts


def test_a_loaded_machine_keeps_more_back(monkeypatch):
    b = Budget(60.0)
    before, clocks = b.kept, iter([0.0, 3.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clocks))
    own = iter([0.0, 1.5])
    monkeypatch.setattr(time, "thread_time", lambda: next(own))
    with b.busy():
        pass
    assert b.load == 2
    assert b.kept == pytest.approx(2 * before)


def test_short_budgets_have_short_turns():
    assert Budget(60.0).turn == turns.LONGEST
    assert Budget(2.0).turn == pytest.approx(2 * budget.TURN)
    assert Budget(2.0).kept <= 2 * budget.KEPT


@pytest.mark.parametrize("name", ["chain", "lora"])
def test_kernels_that_are_not_proved_in_time(tmp_path, monkeypatch, name):
    """Products that `matmul` has too are listed as not checked; one kernel, which is of this search alone, is left."""
    monkeypatch.setenv("PORTMM_TUNED", str(tmp_path / "tuned.sqlite"))
    monkeypatch.setattr(turns, "drawn", lambda *of: [turns.Times(1.0, 0.5, 0.5) for _ in of[1]])
    order = iter(range(10**6))
    monkeypatch.setattr(turns, "timed", lambda run, arrays, *_: run(arrays) is None or 0.5 ** next(order))
    monkeypatch.setattr(superoptimizer, "KERNELS_MEASURED", int(name == "lora"))
    monkeypatch.setattr(superoptimizer, "MEASURED", int(name == "chain"))
    monkeypatch.setattr(Budget, "end", property(lambda self: self.start))
    function, shapes, _ = CASES[name]
    fused, arrays = pm.fuse(function, search=600), arrays_of(shapes)
    np.testing.assert_allclose(fused(*arrays), function(*arrays), rtol=1e-3, atol=1e-3)
    finding, target = fused.explain(*arrays).finding, config.target()
    if target.name not in names_of("cpu"):
        return  # kernels of chips without a file are not checked
    if name == "chain":
        assert finding.path == ("association",)
        assert {x["reason"] for x in finding.certificate["unchecked"]} == {certificate.LATE}
    elif any(x.mask for isa in target.isas if (x := isa.atom("f32"))):
        assert certificate.LATE in finding.note
        assert (finding.run, finding.certificate) == (None, None)
        assert not (tmp_path / "tuned.sqlite").exists()


def test_a_search_ends_in_time(tmp_path, monkeypatch):
    """Of few rows, whose kernels take a compiler some seconds on a busy machine: candidates are left out, not late.

    Here that is a pause; their kernels are those of a search before.
    """
    function, shapes, _ = CASES["grouped"]
    arrays = arrays_of(shapes)
    monkeypatch.setenv("PORTMM_TUNED", str(tmp_path / "first.sqlite"))
    monkeypatch.setattr(superoptimizer, "certify", lambda *_, **__: {"kernels": [], "unchecked": []})
    monkeypatch.setattr(superoptimizer, "KERNELS_MEASURED", 0)
    pm.fuse(function, search=60)(*arrays)
    monkeypatch.setenv("PORTMM_TUNED", str(tmp_path / "tuned.sqlite"))
    compiled, slow = Placing.form, 0.4

    def slowly(self, roots):
        time.sleep(slow)
        return compiled(self, roots)

    monkeypatch.setattr(Placing, "form", slowly)
    fused = pm.fuse(function, search=2)
    fused(*arrays)
    finding = fused.explain(*arrays).finding
    assert finding.verified < finding.forms
    assert finding.elapsed < 3.5


def test_what_runs_before_a_search_is_part_of_its_budget(monkeypatch):
    """The program as it is takes its compiler some seconds: nothing is searched, and the finding says why."""
    traced, slow = tracing.traced, 0.3

    def slowly(*of, **more):
        time.sleep(slow)
        return traced(*of, **more)

    monkeypatch.setattr(tracing, "traced", slowly)
    function, shapes, _ = CASES["chain"]
    fused, arrays = pm.fuse(function, search=slow / 2), arrays_of(shapes)
    np.testing.assert_allclose(fused(*arrays), function(*arrays), rtol=1e-3, atol=1e-3)
    finding = fused.explain(*arrays).finding
    assert (finding.run, finding.forms) == (None, 0)
    assert superoptimizer.ENDED in str(finding)


def test_a_proof_ends_with_the_budget(monkeypatch):
    """A compiler that does not end in time, as on a busy machine, is given up, and the kernel is listed."""
    b = Builder()
    graph = b.graph(b.matmul(b.input("a", "mk"), b.input("b", "kn"), "k"))
    slow = SimpleNamespace(argv=("sh", "-c", "sleep 30; true"))
    monkeypatch.setattr(emitted_text, "find_compiler", lambda: slow)
    began = time.monotonic()
    data = certificate.certify(graph, graph, "zen4", until=began + 1)
    assert certificate.late(data)
    assert time.monotonic() - began < 20
