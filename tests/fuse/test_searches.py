"""Searches of equivalent programs: what is found is kept, verified, and used for other sizes."""

import json
import time
import xml.etree.ElementTree as ET
from itertools import count

import numpy as np
import pytest
from test_superoptimizer import CASES, SCALE, arrays_of, normed
from typer.testing import CliRunner

import portmm as pm
from portmm.cli.main import app
from portmm.dispatch import config
from portmm.errors import ChangedError
from portmm.fusion import placing, superoptimizer, turns
from portmm.fusion.split_search import Layout, Parts, _laid_out
from portmm.ir.graph_reader import from_json
from portmm.ir.mugraph import to_json
from portmm.target.target import names_of
from portmm.verification.certificate import repeat

QUICKLY = True
ENOUGH = 600
"""Budget of a search, in seconds: numbers of forms and kernels bound it, on a busy machine too."""


TIMES = count()


def last(run, arrays, *_):
    """Seconds by which each program is the fastest so far."""
    run(arrays)
    return 0.5 ** next(TIMES)


def first(*of):
    """Times of the last draw by which all are faster, the first one most."""
    runs = of[1]
    return [turns.Times(1.0, 0.5 + i / 10, 0.5 + i / 10) for i in range(len(runs))]


def measured_last_is_fastest(monkeypatch):
    monkeypatch.setattr(turns, "timed", last)
    monkeypatch.setattr(turns, "drawn", first)


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTMM_TUNED", str(tmp_path / "tuned.sqlite"))
    return tmp_path / "tuned.sqlite"


def measure_one_form(monkeypatch):
    """One form is measured, and taken to be faster; no kernel is."""
    measured_last_is_fastest(monkeypatch)
    monkeypatch.setattr(superoptimizer, "MEASURED", 1)
    monkeypatch.setattr(superoptimizer, "KERNELS_MEASURED", 0)


def test_a_chain_is_found_kept_and_used_for_other_sizes(database, monkeypatch):
    monkeypatch.setattr(superoptimizer, "KERNELS_MEASURED", 0)
    function = CASES["chain"][0]
    fused, arrays = pm.fuse(function, search=ENOUGH), arrays_of([(8, 512), (512, 4), (4, 512)])
    np.testing.assert_allclose(fused(*arrays), function(*arrays), rtol=1e-3, atol=1e-3)
    finding = fused.explain(*arrays).finding
    assert finding.path == ("association",)
    assert finding.seconds < finding.before
    assert not finding.stored
    assert all(x.holds for x in repeat(json.loads(json.dumps(finding.certificate))))
    kernels = [x["name"] for x in finding.certificate["kernels"]]
    known = config.target().name in names_of("cpu")
    assert kernels == ["kernel 1, @", "kernel 2, @"] * known  # those that run, by the schedules that were selected
    assert database.exists()
    other = arrays_of([(5, 300), (300, 7), (7, 260)])
    np.testing.assert_allclose(fused(*other), function(*other), rtol=1e-3, atol=1e-3)
    known = fused.explain(*other).finding
    assert known.stored
    assert known.path == ("association",)
    plain = pm.fuse(function)  # without a search it takes what is stored, where that promises to pay
    np.testing.assert_allclose(plain(*other), function(*other), rtol=1e-3, atol=1e-3)
    assert plain.explain(*other).finding.stored
    wide = arrays_of([(64, 8), (8, 300), (300, 8)])
    np.testing.assert_allclose(plain(*wide), function(*wide), rtol=1e-3, atol=1e-3)
    assert plain.explain(*wide).finding is None


def test_bfloat16_is_searched_and_stored_apart(database, monkeypatch):
    """Literals do not widen it, and what is found for it is not what is found for float32."""
    del database
    measure_one_form(monkeypatch)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    function = CASES["chain"][0]
    wide = arrays_of([(8, 512), (512, 4), (4, 512)])
    arrays = [(x * np.float32(0.125)).astype(ml_dtypes.bfloat16) for x in wide]
    fused = pm.fuse(function, search=ENOUGH)
    result = fused(*arrays)
    assert result.dtype == arrays[0].dtype
    want = function(*[x.astype(np.float32) for x in arrays])
    np.testing.assert_allclose(result.astype(np.float32), want, rtol=2e-2, atol=2e-2 * np.abs(want).max())
    finding = fused.explain(*arrays).finding
    assert finding.path == ("association",)
    assert {x["record"]["arrays"][0][0] for x in finding.certificate["kernels"]} <= {"bf16"}
    assert all(x["emitted"]["by"] == "compiled" for x in finding.certificate["kernels"])
    assert pm.fuse(function).explain(*wide).finding is None


def sorted_between(x, a, b):
    """Chains before and after what NumPy computes, of two results."""
    y = np.sort(x @ (a @ b), axis=-1)
    return {"first": y, "last": (y @ b.T @ (a.T @ a)) * 2.0}


def test_a_function_is_split_at_what_has_no_term(database, monkeypatch):
    """Each part is searched; all parts together are measured, stored, and used by later calls of other sizes."""
    del database
    measure_one_form(monkeypatch)
    fused, arrays = pm.fuse(sorted_between, search=ENOUGH), arrays_of([(8, 512), (512, 4), (4, 512)])
    want = sorted_between(*[x.astype(np.float64) for x in arrays])
    for _ in range(2):
        got = fused(*arrays)
        assert got.keys() == want.keys()
        for x in want:
            np.testing.assert_allclose(got[x], want[x], rtol=1e-3, atol=1e-5 * np.abs(want[x]).max())
    explained = fused.explain(*arrays)
    assert len(explained.finding.parts) == 2
    assert "association" in explained.finding.path
    assert "np.sort" in str(explained.finding)
    assert any(x.kind == "numpy" for x in explained.kernels)
    assert ET.fromstring(explained.graph()).tag.endswith("svg")  # noqa: S314 - our own
    outcomes = repeat(json.loads(json.dumps(explained.finding.certificate)))
    assert all(x.holds for x in outcomes)
    assert {x.what[:6] for x in outcomes} == {"part 1", "part 2"}
    plain, other = pm.fuse(sorted_between), arrays_of([(6, 300), (300, 5), (5, 300)])
    for x, y in zip(plain(*other).values(), sorted_between(*other).values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * np.abs(y).max())
    assert plain.explain(*other).finding.stored


@pytest.mark.parametrize("step", ["build", "program"])
def test_an_interrupt_between_parts_leaves_the_function_as_it_is(database, monkeypatch, step):
    del database

    def interrupted(*_):
        raise KeyboardInterrupt

    measure_one_form(monkeypatch)
    monkeypatch.setattr(Parts, step, interrupted)
    fused, arrays = pm.fuse(lambda x, a, b: np.sort(x @ (a @ b), -1), search=ENOUGH), arrays_of(CASES["chain"][1])
    np.testing.assert_allclose(fused(*arrays), fused.__wrapped__(*arrays), rtol=1e-3, atol=1e-3)
    finding = fused.explain(*arrays).finding
    assert finding.run is None
    assert finding.interrupted
    assert "interrupted" in str(finding)
    assert [bool(x.run) for x in finding.parts] == [True] * (step == "program")


def test_parts_have_the_layout_that_others_were_compiled_for():
    sample = np.zeros((2, 3, 4), np.float32).transpose(2, 0, 1)
    layout = Layout(sample.shape, sample.dtype, sample.strides)
    x = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    y = _laid_out(x, layout)
    assert y.strides == sample.strides
    np.testing.assert_array_equal(y, x)
    assert _laid_out(y, layout) is y
    for bad in (x[:2], x.astype(np.float64)):
        with pytest.raises(ChangedError):
            _laid_out(bad, layout)
    with pytest.raises(ChangedError):
        _laid_out(x, layout._replace(strides=(0, 12, 4)))


def test_types_are_mixed(database, monkeypatch):
    """A norm of bfloat16 is of float32, as NumPy has it, and its product of both types: results are of that type."""
    del database
    measure_one_form(monkeypatch)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fused = pm.fuse(normed, search=ENOUGH)
    arrays = [(x * np.float32(0.25)).astype(ml_dtypes.bfloat16) for x in arrays_of([(3, 32), (32, 24)])]
    want = normed(*[x.astype(np.float32) for x in arrays])
    got, finding = fused(*arrays), fused.explain(*arrays).finding
    assert got.dtype == normed(*arrays).dtype
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=3e-2, atol=3e-2 * np.abs(want).max())
    assert not finding.parts
    assert finding.certificate is not None


@pytest.mark.parametrize("name", ["gated", "attention", "QKNorm"])
def test_what_no_form_is_faster_than_is_run_as_it_is(database, monkeypatch, name):
    """The program of greedy fusion itself, with a certificate of the kernels that it runs."""
    del database
    monkeypatch.setattr(turns, "timed", lambda run, arrays, *_: run(arrays) is None or 1.0)
    monkeypatch.setattr(superoptimizer, "KERNELS_MEASURED", 0)
    tasks = []
    optimize = superoptimizer.optimize
    monkeypatch.setattr(superoptimizer, "optimize", lambda task, *of: tasks.append(task) or optimize(task, *of))
    function, shapes, _ = CASES[name]
    if name != "gated":
        shapes = [(4, 64, 16), (4, 1024, 16), (4, 1024, 8)]  # as many scores as greedy fusion makes attention of
    fused, arrays = pm.fuse(function, search=ENOUGH), arrays_of(shapes)
    np.testing.assert_allclose(fused(*arrays), function(*arrays), rtol=1e-3, atol=1e-4)
    (program,) = [x for y in fused.memo.values() for x in (y if isinstance(y, list) else [y]) if hasattr(x, "run")]
    finding = fused.explain(*arrays).finding
    assert finding.run is None
    assert program.run is tasks[0].before
    known = config.target().name in names_of("cpu")
    if name != "gated":
        kernels = [x["name"] for x in finding.certificate["kernels"]]
        assert kernels[:2] == ["attention, few queries", "attention, many queries"] * known
        assert not finding.certificate["unchecked"]
        scores = {len(x["record"]["arrays"]) for x in finding.certificate["kernels"][:2]}
        assert scores <= {4}  # norms are kernels of their own, and no factors of the scores
    assert all(x.holds for x in repeat(json.loads(json.dumps(finding.certificate))))


def test_captured_arrays_and_numbers_vary_from_call_to_call(database, monkeypatch):
    """Of the form that is predicted to be the fastest, whatever it takes on a busy machine."""
    del database
    measure_one_form(monkeypatch)
    weights = {"a": arrays_of([(512, 4)])[0], "scale": 0.5}

    def function(x, b):
        return x @ (weights["a"] @ b) * weights["scale"]

    fused, (x, b) = pm.fuse(function, search=ENOUGH), arrays_of([(8, 512), (4, 512)])
    for scale in (0.5, 2.0):
        weights["scale"] = scale
        weights["a"] = weights["a"] * np.float32(1.5)
        np.testing.assert_allclose(fused(x, b), function(x, b), rtol=1e-3, atol=1e-2)
    assert "association" in fused.explain(x, b).finding.path


def test_what_is_not_faster_in_the_last_draw_is_not_kept(database, monkeypatch):
    """Faster in its own turns by chance, and then beside the program as it is in other orders: that one remains."""
    del database
    measure_one_form(monkeypatch)
    chance = [0.9, 0.96, 0.95, 1.01, 0.98]
    monkeypatch.setattr(turns, "drawn", lambda *_: [turns.Times(1.0, min(chance), sorted(chance)[-2])])
    function, shapes, _ = CASES["chain"]
    fused, arrays = pm.fuse(function, search=ENOUGH), arrays_of(shapes)
    np.testing.assert_allclose(fused(*arrays), function(*arrays), rtol=1e-3, atol=1e-3)
    finding = fused.explain(*arrays).finding
    assert finding.run is None
    assert not finding.path
    assert finding.certificate is not None


def test_the_last_draw_takes_turns(monkeypatch):
    """Each program once a turn, in orders that rotate; all turns but one are below the ratio."""
    order = []
    seconds = {"a": 1.0, "b": 0.5, "c": 2.0}
    monkeypatch.setattr(turns, "timed", lambda run, *_: order.append(run) or seconds[run])
    b, c = turns.drawn("a", ["b", "c"], [])
    order = order[1:]  # the first one tells whether calls are too long for caches
    assert [sorted(order[i : i + 3]) for i in range(0, len(order), 3)] == [["a", "b", "c"]] * turns.FINAL
    assert {"".join(order[i : i + 2]) for i in range(0, len(order), 3)} >= {"cb", "bc", "ba"}
    assert (b.faster, c.faster) == (True, False)
    assert (b.ratio, c.ratio) == (0.5, 2.0)


@pytest.mark.parametrize(("apart", "faster"), [(0.9, True), (0.99, True), (1.05, False)])
def test_what_is_slower_apart_is_not_faster(monkeypatch, apart, faster):
    """Of short calls, those are counted too between which something else happens: the worse of a pause and memory."""
    kinds = []

    def alone(every, _, order, between, calls):
        between()
        assert (len(every), sorted(order), calls) == (2, [0, 1], turns.ALONE)
        kinds.append(between)
        return [1e-3, 1e-3 * (apart if len(kinds) % 2 else 0.8)]

    monkeypatch.setattr(turns, "timed", lambda run, *_: {"a": 1e-3, "b": 0.5e-3}[run])
    monkeypatch.setattr(turns, "apart", alone)
    (b,) = turns.drawn("a", ["b"], [])
    assert len({*kinds}) == 2
    assert len(kinds) == 2 * turns.FINAL
    assert (b.ratio, b.apart, b.faster) == (0.5, pytest.approx(apart), faster)


@pytest.mark.parametrize(("seconds", "short", "calls"), [(1e-5, turns.SHORT, turns.MANY), (1e-5, 0.04, turns.ALONE)])
def test_brief_programs_are_called_more_often_apart(monkeypatch, seconds, short, calls):
    monkeypatch.setattr(turns, "timed", lambda *_: seconds)
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    counts = []
    monkeypatch.setattr(turns, "apart", lambda *given: counts.append(given[-1]) or [1.0])
    turns.drawn("a", [], [], short)
    assert {*counts} == {calls}


def test_calls_apart_are_in_order_with_something_between():
    seen = []
    times = turns.apart([lambda _: seen.append("a"), lambda _: seen.append("b")], [], [1, 0], lambda: seen.append(" "))
    assert "".join(seen).split() == [*"abbaabbaab"]
    assert len(times) == 2
    assert min(times) > 0


def test_a_program_that_takes_long_is_run_once_more():
    calls = []
    assert turns.timed(lambda _: calls.append(1) or time.sleep(0.02), [], 0.01) >= 0.02
    assert len(calls) == 2
    turns.timed(lambda _: calls.append(1), [], 0.0)
    assert len(calls) == 6


def test_an_interrupt_keeps_the_best(database, monkeypatch):
    del database
    calls = []

    def timed(run, arrays, *_):
        run(arrays)
        calls.append(run)
        if len(calls) > 2 + 2 * turns.TURNS:
            raise KeyboardInterrupt
        return 1.0 / len(calls)

    monkeypatch.setattr(turns, "timed", timed)
    function, shapes, _ = CASES["grouped"]
    arrays = arrays_of(shapes)
    fused = pm.fuse(function, search=ENOUGH)
    np.testing.assert_allclose(fused(*arrays), function(*arrays), rtol=1e-4, atol=1e-5)
    finding = fused.explain(*arrays).finding
    assert finding.path
    assert finding.certificate


@pytest.mark.parametrize("name", ["lora", "grouped"])
def test_one_kernel_is_run_kept_and_used_for_other_sizes(database, monkeypatch, name):
    """Loops of a whole function, on this machine: results, the certificate with its kernel, and ragged sizes.

    That of attention has a maximum along the keys, which sums of earlier keys are rescaled by.
    """
    del database
    measured_last_is_fastest(monkeypatch)
    function, shapes, _ = CASES[name]
    fused, arrays = pm.fuse(function, search=ENOUGH), arrays_of(shapes)
    np.testing.assert_allclose(fused(*arrays), function(*arrays), rtol=1e-3, atol=1e-3)
    finding = fused.explain(*arrays).finding
    if not any(x.mask for isa in config.target().isas if (x := isa.atom("f32"))):
        assert not any(x.startswith(placing.ONE_KERNEL) for x in finding.path)
        return
    assert finding.path[-1].startswith(placing.ONE_KERNEL), finding
    assert [x.kind for x in fused.explain(*arrays).kernels] == ["block"]
    if config.target().name in names_of("cpu"):
        assert [x["name"] for x in finding.certificate["kernels"]] == ["one kernel"]
        assert finding.graph.steps[0].threads.lanes > 1
        assert "thread: fragment" in str(finding.graph)
        assert "thread: fragment" in fused.explain(*arrays).graph()
        assert from_json(json.loads(json.dumps(to_json(finding.graph)))) == finding.graph
    if name == "lora":
        assert all(x.holds for x in repeat(json.loads(json.dumps(finding.certificate))))
        other = arrays_of([(19, 40), (40, 530), (40, 9), (9, 530)])
        np.testing.assert_allclose(fused(*other), function(*other), rtol=1e-3, atol=1e-3)
        assert fused.explain(*other).finding.path == finding.path
        predicted = placing.predicted_kernel  # both programs are predicted for other sizes
        monkeypatch.setattr(placing, "predicted_kernel", lambda *of: 1e30 * predicted(*of))
        plain, slower = pm.fuse(function), arrays_of([(21, 40), (40, 301), (40, 9), (9, 301)])
        np.testing.assert_allclose(plain(*slower), function(*slower), rtol=1e-3, atol=1e-3)
        assert plain.explain(*slower).finding is None


def test_keys_are_split_among_threads(database, monkeypatch):
    """Attention of a group of heads that share keys, as one kernel: partial sums of runs of keys, combined.

    Scores of the first keys of a query are -inf, and those of all keys of a run.
    """

    def masked(q, k, v, mask):
        s = q @ k.swapaxes(-1, -2) * SCALE + mask
        e = np.exp(s - s.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)) @ v

    del database
    measured_last_is_fastest(monkeypatch)
    monkeypatch.setattr(superoptimizer, "MEASURED", 0)
    monkeypatch.setattr(superoptimizer, "KERNELS_MEASURED", 1)
    monkeypatch.setattr(placing, "MOST_SCHEDULES", 1)
    arrays = [*arrays_of([(1, 3, 16), (1, 700, 16), (1, 700, 16)]), np.zeros((3, 700), np.float32)]
    arrays[3][0, :300] = arrays[3][1, 10:] = -np.inf
    before = config.get_num_threads()
    pm.set_num_threads(2)
    try:
        fused = pm.fuse(masked, search=ENOUGH)
        np.testing.assert_allclose(fused(*arrays), masked(*arrays), rtol=1e-3, atol=1e-3)
        finding = fused.explain(*arrays).finding
    finally:
        pm.set_num_threads(before)
    if not finding.path[-1:] or not finding.path[-1].startswith(placing.ONE_KERNEL):
        assert not any(x.mask for isa in config.target().isas if (x := isa.atom("f32")))
        return
    assert [x.kind for x in fused.explain(*arrays).kernels] == ["block"]
    for x in finding.certificate["kernels"]:
        assert "split=2" in x["schedule"]


def test_the_command(database, tmp_path):
    path, certificate = tmp_path / "functions.py", tmp_path / "found.json"
    path.write_text("def chain(x, a, b):\n    return x @ (a @ b)\n")
    words = ["superoptimize", f"{path}:chain", "8x512", "512x4", "4x512"]
    words += ["--save", str(certificate), "--budget", str(ENOUGH)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "association" in done.output
    assert database.exists()
    done = CliRunner().invoke(app, ["verify", str(certificate)])
    assert done.exit_code == 0, done.output
    picture = tmp_path / "graph.svg"
    done = CliRunner().invoke(app, [*words[:-4], "--save", str(picture)])
    assert done.exit_code == 0, done.output
    assert ET.parse(picture).getroot().tag.endswith("svg")  # noqa: S314 - written by the command
    assert "transfer to" in picture.read_text()
