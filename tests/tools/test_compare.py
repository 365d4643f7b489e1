import numpy as np
import pytest
from places import HELPERS

from portmm.build.cache import read_note
from portmm.comparison import Case, Contender, Entry, cases, compare
from portmm.comparison import data as inputs
from portmm.comparison.contest import _result
from portmm.comparison.limit import forced_isa
from portmm.comparison.measure import seconds_per_call
from portmm.comparison.peers import Setup, environment, find, removed
from portmm.comparison.process import LOG, SEE, Lane
from portmm.comparison.report import from_json
from portmm.comparison.text import heading, notes
from portmm.errors import TargetError
from portmm.host.detect import host

SMALL = Case("small", "cube", 8, 12, 16)
OTHER = Case("other", "cube", 9, 12, 16)


def fake(name, *, peer=True):
    return Contender(name, f"compare_fakes:{name}", f"pip install {name}", peer=peer)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(HELPERS))


def contest(*names, suite=(SMALL,), ours="", **options):
    field = [fake(name, peer=name != ours) for name in names]
    options = {"rounds": 2, "turn_s": 0.001, "limits": False, **options}
    return compare(list(suite), contenders=field, **options)


# --- the suite ---------------------------------------------------------------


def test_suites_are_named_once_and_nested():
    full = cases("full")
    names = [case.name for case in full]
    assert len(set(names)) == len(names)
    quick, smoke = ([case.name for case in cases(suite)] for suite in ("quick", "smoke"))
    assert {*quick, *smoke} <= set(names)
    assert len(quick) == 32
    assert smoke == ["cube-64", "odd-65x65x65", "trans-tt", "tiny-8", "packed-m4-768"]
    assert {c.name for c in cases("tiny,cube-64")} == {n for n in names if n.startswith("tiny")} | {"cube-64"}


def test_the_full_suite_holds_what_is_promised():
    full = cases("full")
    assert {c.m for c in full if c.group == "cube"} >= {64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096}
    assert {c.m for c in full if c.group == "llama"} == {1, 4, 16, 64, 512}
    assert {c.m for c in full if c.packed} == set(range(1, 17))
    assert {(c.a, c.b) for c in full if c.group == "transpose"} == {
        (a, b) for a in ("row", "col") for b in ("row", "col")
    }
    assert all(c.batch == 1000 for c in full if c.group == "tiny")


def test_an_unknown_suite_is_named_with_what_is_known():
    with pytest.raises(ValueError, match=r"'nosuch'.*smoke"):
        cases("nosuch")


def test_an_unknown_contender_is_named_with_who_is_known():
    with pytest.raises(ValueError, match=r"'nosuch'.*numpy"):
        find(["nosuch"])


# --- inputs and judgement ----------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_layouts_are_as_the_case_says(batch, layout):
    case = Case("x", "x", 5, 6, 7, batch, a=layout, b=layout, c=layout)
    data = inputs.arrays(case)
    for array, shape in ((data.a, (5, 7)), (data.b, (7, 6)), (data.c, (5, 6))):
        assert array.shape == (shape if batch == 1 else (batch, *shape))
        inner = -1 if layout == "row" else -2
        assert array.strides[inner] == 4
        assert array.dtype == np.float32
    assert np.isnan(data.c).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(("m", "n", "k", "batch"), [(4, 5, 1, 1), (8, 8, 8, 50), (300, 310, 320, 1), (1, 1, 1, 1)])
def test_a_right_product_is_accepted(m, n, k, batch, dtype):
    case = Case("x", "x", m, n, k, batch, dtype=dtype)
    data = inputs.arrays(case)
    np.matmul(data.a, data.b, out=data.c)
    error, bound = inputs.judge(case, data)
    assert error <= bound


def test_a_lost_term_is_noticed():
    case = Case("x", "x", 300, 310, 4096)
    data = inputs.arrays(case)
    np.matmul(data.a[:, :-1], data.b[:-1], out=data.c)
    error, bound = inputs.judge(case, data)
    assert error > bound


def test_rounding_to_half_the_bits_is_noticed():
    case = Case("x", "x", 64, 64, 4096)
    data = inputs.arrays(case)
    short = data.a.view(np.uint32) & np.uint32(0xFFFF0000)
    np.matmul(short.view(np.float32), data.b, out=data.c)
    error, bound = inputs.judge(case, data)
    assert error > bound


@pytest.mark.parametrize("place", [(0, 0), (-1, -1), (150, 155)])
def test_one_unwritten_element_is_noticed(place):
    case = Case("x", "x", 300, 310, 320)
    data = inputs.arrays(case)
    np.matmul(data.a, data.b, out=data.c)
    data.c[place] = np.nan
    assert inputs.judge(case, data)[0] == float("inf")


def test_the_timer_takes_the_median_of_counted_calls():
    now = [0.0]

    def run(count):
        now[0] += count * 0.001

    assert seconds_per_call(run, 0.02, clock=lambda: now[0]) == pytest.approx(0.001)


# --- environments ------------------------------------------------------------


def test_what_bends_a_library_is_taken_away():
    base = {"OPENBLAS_CORETYPE": "Haswell", "MKL_CBWR": "AVX", "PATH": "/bin", "PORTMM_CACHE": "/x"}
    assert removed(base) == ("MKL_CBWR", "OPENBLAS_CORETYPE")
    env = environment(base, Setup(threads=3), uses_openblas=False)
    assert "OPENBLAS_CORETYPE" not in env
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["OPENBLAS_NUM_THREADS"] == "1"
    assert env["PATH"] == "/bin"
    assert env["PORTMM_CACHE"] == "/x"


def test_all_are_held_to_a_forced_isa():
    env = environment({}, Setup(threads=2, isa="avx2", target="x86-64-v3"), uses_openblas=True)
    assert env["OPENBLAS_CORETYPE"] == "Haswell"
    assert env["MKL_ENABLE_INSTRUCTIONS"] == env["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert env["PORTMM_TARGET"] == "x86-64-v3"
    assert env["OPENBLAS_NUM_THREADS"] == "2"


def test_workers_see_that_environment(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    report = contest("seen", threads=2)
    assert report.entrants[0].version.startswith(
        "OPENBLAS_CORETYPE=None MKL_ENABLE_INSTRUCTIONS=None OMP_NUM_THREADS=2"
    )
    assert "OPENBLAS_CORETYPE" in report.removed


@pytest.mark.skipif(host().isa("avx2") is None or host().isas[0].name == "avx2", reason="needs more than AVX2")
def test_an_isa_forces_the_peers_too():
    report = contest("seen", target="avx2")
    assert report.isa == "avx2"
    assert "OPENBLAS_CORETYPE=Haswell MKL_ENABLE_INSTRUCTIONS=AVX2" in report.entrants[0].version
    assert "PORTMM_TARGET=avx2" in report.entrants[0].version
    assert report.alone == ""


@pytest.mark.skipif(host().isa("scalar") is None, reason="needs the portable instruction set")
def test_an_isa_that_no_peer_can_be_held_to_is_named():
    report = contest("seen", target="scalar")
    assert (report.isa, report.alone) == ("", "scalar")
    assert "portmm alone held to scalar" in heading(report)
    assert any("no other library can be" in line for line in notes(report))
    assert from_json(report.to_json()) == report


def test_the_machine_as_it_is_forces_nothing():
    assert forced_isa("") == ""
    assert forced_isa(host().name) == ""
    with pytest.raises(TargetError, match="nosuch"):
        compare("smoke", target="nosuch")


# --- the contest -------------------------------------------------------------


def test_a_slow_one_takes_part():
    report = contest("slow", "right", ours="right")
    (result,) = report.results
    assert result.best == "slow"
    assert result.ratio > 0
    assert all(len(entry.samples) == 2 for entry in result.entries.values())


def test_the_ratio_is_taken_within_rounds_and_against_the_fastest_peer():
    lanes = [Lane(fake("mine", peer=False)), Lane(fake("fast")), Lane(fake("slow")), Lane(fake("bad"))]
    entries = {
        "mine": Entry("ok", 2.0, (1.0, 2.0, 3.0)),
        "fast": Entry("ok", 4.0, (3.0, 4.0, 4.5)),
        "slow": Entry("ok", 5.0, (5.0, 5.0, 5.0)),
        "bad": Entry("wrong"),
    }
    result = _result(SMALL, lanes, entries)
    assert result.best == "fast"
    assert result.ratio == 2.0  # of 3, 2 and 1.5
    assert _result(SMALL, lanes[1:], entries).ratio is None
    assert _result(SMALL, lanes[:1], entries).best == ""


@pytest.mark.parametrize(("name", "reason"), [("wrong", "exceeds"), ("unfinished", "inf exceeds")])
def test_wrong_results_are_never_timed(name, reason):
    report = contest(name, "right")
    entry = report.results[0].entries[name]
    assert entry.state == "wrong"
    assert reason in entry.reason
    assert not entry.samples
    assert report.results[0].best == "right"
    assert any(line.startswith(f"{name} on small: wrong") for line in notes(report))


def test_a_wrong_method_beside_a_right_one_is_told():
    report = contest("half_wrong")
    entry = report.results[0].entries["half_wrong"]
    assert (entry.state, entry.method) == ("ok", "good")
    assert "bad: error" in entry.reason
    assert any("a method was wrong" in line for line in notes(report))


def test_a_result_that_goes_wrong_later_is_noticed():
    entry = contest("racy").results[0].entries["racy"]
    assert entry.state == "wrong"
    assert "after timing" in entry.reason


def test_a_crash_is_reported_and_the_next_case_goes_on():
    report = contest("crashing", "right", suite=(SMALL, OTHER))
    first, second = report.results
    assert first.entries["crashing"].state == "crashed"
    assert "SIGSEGV" in first.entries["crashing"].reason
    assert first.entries["right"].state == "ok"
    assert second.entries["crashing"].state == "ok"


def test_a_hang_is_ended():
    report = contest("hanging", "right", patience_s=1.0)
    entry = report.results[0].entries["hanging"]
    assert (entry.state, entry.reason) == ("timeout", "no answer in 1 s")
    assert report.results[0].best == "right"


def test_one_that_cannot_be_opened_is_reported_with_its_last_words():
    report = contest("raising", "absent", "right")
    states = {e.name: (e.state, e.reason) for e in report.entrants}
    assert states["raising"] == ("crashed", "ended with status 1: RuntimeError: no licence file" + SEE)
    assert "Traceback" in read_note(LOG)
    assert "in open_adapter" in read_note(LOG)
    assert states["absent"] == ("missing", "no libabsent.so")
    assert "absent: not found (no libabsent.so): pip install absent" in notes(report)
    assert set(report.results[0].entries) == {"right"}


def test_one_that_cannot_do_a_case_says_why():
    entry = contest("picky", "right").results[0].entries["picky"]
    assert (entry.state, entry.reason) == ("unsupported", "only on Sundays")


def test_printing_libraries_disturb_nobody():
    assert contest("noisy").results[0].entries["noisy"].state == "ok"


def test_cases_without_time_are_named():
    report = contest("right", suite=(SMALL, OTHER), budget_s=0.0)
    assert report.skipped == ("small", "other")
    assert any(x.startswith("no time was left for: small, other; ") and "--budget" in x for x in notes(report))
    assert [(e.state, "--budget" in e.reason) for e in report.entrants] == [("timeout", True)]


def test_progress_is_told():
    seen = []
    contest("right", progress=lambda done, total, text: seen.append((done, total, text)))
    assert seen[-1] == (1, 1, "done")
    assert (0, 1, "small") in seen


@pytest.mark.parametrize("bad", [{"threads": -1}, {"rounds": 0}, {"suite": []}, {"suite": [(4, 4)]}, {"suite": ["x"]}])
def test_arguments_that_make_no_sense(bad):
    with pytest.raises(ValueError, match=r"there must be|is no shape"):
        compare(**{"suite": [(4, 4, 4)], **bad})


def test_shapes_are_cases_and_no_shape_is_too_large_to_be_judged_so():
    report = compare([(4, 4, 4), (1 << 24, 1 << 24, 1 << 24)], contenders=[fake("right")], rounds=1, limits=False)
    small, large = report.results
    assert small.entries["right"].state == "ok"
    assert large.entries["right"].state == "unsupported"
    assert "GiB of memory are free" in large.entries["right"].reason
