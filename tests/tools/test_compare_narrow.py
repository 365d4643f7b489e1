"""Comparisons of narrow types: their cases, inputs, judgement, adapters, and bench/cliff.py."""

import importlib.util
import json
from dataclasses import replace

import compare_fakes
import numpy as np
import pytest
from comparisons import prepare
from places import BENCH, HELPERS

from portmm.comparison import Case, Contender, cases, compare, peers
from portmm.comparison import case as compared
from portmm.comparison import data as inputs
from portmm.comparison.data import APPROXIMATE, EXACT, INPUTS, judge
from portmm.comparison.limit import Limits
from portmm.comparison.peers import FORCED, Setup
from portmm.comparison.report import from_json
from portmm.comparison.text import markdown, notes
from portmm.host.detect import host
from portmm.target.cache_levels import MemoryLevel

pytest.importorskip("ml_dtypes")

BLOCK = 32
WORDS = (
    "bf16", "f16", "bf16-bf16-f32", "s8-s8-s32", "u8-s8-s32", "u8-s8-f32", "s8-s8-f32", "f32-s8-f32", "f32-u4-f32",
    "bf16-u4-bf16",
)  # fmt: skip


def case(dtype, m=9, n=32, k=256, **others):
    four = "u4" in dtype
    packed = four or others.pop("packed", False)
    return Case(f"{dtype}-{m}", "x", m, n, k, dtype=dtype, block=BLOCK if four else 0, packed=packed, **others)


def computed(which, seed=0):
    """A case's arrays with the exact product in them, rounded once."""
    made = inputs.arrays(which, seed)
    np.copyto(made.c, compare_fakes._exact(which, made), casting="unsafe")
    return made


def right(which, made, precision=EXACT):
    error, bound = judge(which, made, precision)
    return error <= bound


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(HELPERS))


def fake(name, *, peer=True):
    return Contender(name, f"compare_fakes:{name}", peer=peer)


QUICK = {"rounds": 2, "turn_s": 0.001, "limits": False}


# --- the suites ---------------------------------------------------------------


def test_narrow_suites_are_apart_from_those_of_f32():
    narrow, full = cases("narrow"), cases("full")
    names = [c.name for c in (*narrow, *full)]
    assert len(set(names)) == len(names)
    assert {c.dtype for c in full} == {"f32"}
    assert all(c.narrow for c in narrow)
    assert not {c.group for c in narrow} & {c.group for c in full}
    assert {c.name for c in cases("narrow-quick")} < {c.name for c in narrow}
    assert {c.group for c in cases("narrow-quick")} == {c.group for c in narrow}
    assert {c.name for c in cases("bf16,f16,int8,int4")} == {c.name for c in narrow}
    assert {c.group for c in cases("int8")} == {"int8", "int8-packed", "int8-linear", "int8-weight", "int8-dynamic"}
    assert {c.group for c in cases("int8-linear")} == {"int8-linear"}


@pytest.mark.parametrize(
    ("word", "dtypes", "rows"),
    [
        ("bf16", {"bf16", "bf16-bf16-f32"}, {1, 4, 16, 64, 128, 512}),
        ("int8", {"s8-s8-s32", "u8-s8-s32", "u8-s8-f32", "f32-s8-f32"}, {1, 4, 16, 64, 128, 512}),
        ("int4", {"f32-u4-f32", "bf16-u4-bf16"}, {1, 16, 64, 512}),
    ],
)
def test_narrow_suites_hold_what_is_promised(word, dtypes, rows):
    found = cases(word)
    assert {c.dtype for c in found} == dtypes
    layers = [c for c in found if "cube" not in c.name]
    assert {c.m for c in layers} == rows
    assert {c.packed for c in layers} == ({True} if word == "int4" else {True, False})
    assert {c.block for c in found} == ({128} if word == "int4" else {0})
    for c in found:
        assert c.problem.types == (("s8", *c.types[1:]) if c.dynamic else c.types)
        assert c.dtype in c.shape


def test_narrow_cases_know_their_bytes():
    assert case("f32-u4-f32", 1, 64, 64).bytes == 64 * 4 + 64 * 64 // 2 + 64 * 4 + 64 * 2 * 4
    assert case("u8-s8-s32", 1, 64, 64).bytes == 64 + 64 * 64 + 64 * 4
    plain = Case("x", "x", 3, 5, 7, batch=2)
    assert plain.bytes == plain.problem.bytes


def test_the_limit_knows_narrow_types():
    limits = Limits({"vnni": 400.0, "memory": 2.0}, (MemoryLevel("L1", 64),), {"u8-s8-s32": "vnni"})
    thin = case("u8-s8-s32", 1, 1024, 1024)
    assert limits.of(thin, 1) == pytest.approx(2.0 * thin.flops / thin.bytes)
    assert limits.of(case("bf16"), 1) is None


# --- inputs and judgement -----------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 65), (9, 32, 256), (300, 310, 96), (1, 1, 1)])
def test_a_right_product_is_accepted(word, m, n, k):
    which = case(word, m, n, k)
    made = computed(which)
    assert right(which, made)
    assert right(which, made, INPUTS)
    assert [x.dtype.name for x in (made.a, made.b, made.c)] == [inputs.BY_NAME[x].numpy for x in which.types]


@pytest.mark.parametrize("word", WORDS)
def test_one_unwritten_element_is_noticed(word):
    which = case(word)
    made = computed(which)
    fresh = inputs.arrays(which)
    assert judge(which, fresh)[0] == np.inf
    made.c[3, 4] = fresh.c[0, 0]
    for precision in (EXACT, INPUTS, APPROXIMATE):
        assert judge(which, made, precision)[0] == np.inf


@pytest.mark.parametrize("word", WORDS)
def test_a_lost_term_is_noticed(word):
    which = case(word, 64, 64, 256)
    made = computed(which)
    short = replace(which, k=which.k - 1)
    less = inputs.Arrays(made.a[:, :-1], made.b[:-1], made.c, made.rows, made.columns)
    np.copyto(made.c, compare_fakes._exact(short, less), casting="unsafe")
    assert not right(which, made)


@pytest.mark.parametrize("word", ["s8-s8-s32", "u8-s8-s32"])
def test_integers_are_exact(word):
    which = case(word)
    made = computed(which)
    made.c[-1, -1] += 1
    for precision in (EXACT, INPUTS, APPROXIMATE):
        assert judge(which, made, precision) == (1.0, 0.0)


def test_a_narrow_result_must_be_rounded_to_nearest():
    which = case("bf16", 64, 64)
    made = inputs.arrays(which)
    exact = compare_fakes._exact(which, made).astype(np.float32)
    made.c[...] = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert not right(which, made)
    assert right(which, made, INPUTS)


@pytest.mark.parametrize("word", ["f32-u4-f32", "bf16-u4-bf16"])
def test_rounding_weights_again_is_allowed_to_peers_and_beside_bfloat16(word):
    import ml_dtypes

    which = case(word, 64, 64, 1024)
    made = inputs.arrays(which)
    weights = (made.b.astype(float) - 8) * np.repeat(made.columns.astype(float), BLOCK, axis=0)
    np.copyto(made.c, made.a.astype(float) @ weights.astype(ml_dtypes.bfloat16).astype(float), casting="unsafe")
    assert right(which, made, INPUTS)
    assert right(which, made) == word.startswith("bf16")


@pytest.mark.parametrize("word", ["f32-u4-f32", "f32-s8-f32"])
@pytest.mark.parametrize("k", [256, 4096])
def test_activations_in_eight_bits_are_approximate(k, word):
    which = case(word, 16, 64, k)
    made = inputs.arrays(which)
    rounded = inputs.Arrays(np.rint(made.a.astype(float) * 127) / 127, made.b, made.c, made.rows, made.columns)
    np.copyto(made.c, compare_fakes._exact(which, rounded), casting="unsafe")
    assert not right(which, made)
    assert right(which, made, APPROXIMATE)
    made.c[...] *= 1.5
    assert not right(which, made, APPROXIMATE)


def test_scales_fit_eight_bits():
    import ml_dtypes

    for which in (case("u8-s8-f32"), case("f32-s8-f32"), case("f32-u4-f32")):
        made = inputs.arrays(which)
        for x in filter(lambda x: x is not None, (made.rows, made.columns)):
            assert (x.astype(ml_dtypes.bfloat16).astype(np.float32) == x).all()


# --- the contest --------------------------------------------------------------


def test_approximate_results_are_shown_and_in_no_ratio():
    report = compare(
        [case("f32-u4-f32")], contenders=[fake("rough"), fake("elsewhere"), fake("narrow", peer=False)], **QUICK
    )
    (result,) = report.results
    assert {e.state for e in result.entries.values()} == {"ok"}
    assert result.best == "elsewhere"
    assert report.approximate == {"rough"}
    text = markdown(report)
    assert "narrow types, GOP/s" in text
    assert "| ~" in text
    assert any(line.startswith("rough: rounds activations") for line in notes(report))
    assert from_json(report.to_json()) == report
    alone = compare([case("f32-u4-f32")], contenders=[fake("rough"), fake("narrow", peer=False)], **QUICK)
    assert (alone.results[0].best, alone.results[0].ratio) == ("", None)


def test_reports_of_f32_are_as_they_were():
    report = compare([Case("small", "cube", 8, 12, 16)], contenders=[fake("right")], **QUICK)
    table = json.loads(report.to_json())
    assert set(table["entrants"][0]) == {"name", "peer", "state", "version", "reason", "hint"}
    assert set(table["results"][0]["case"]) == {
        "name", "group", "m", "n", "k", "batch", "a", "b", "c", "packed", "dtype",
    }  # fmt: skip
    assert from_json(report.to_json()) == report
    assert "f32, GFLOP/s" in markdown(report)


def test_some_take_part_only_where_there_are_narrow_types(monkeypatch):
    field = (fake("right"), replace(fake("narrow"), only=frozenset({"narrow"})))
    monkeypatch.setattr(peers, "CONTENDERS", field)
    plain, small = Case("small", "cube", 8, 12, 16), case("s8-s8-s32")
    assert [e.name for e in compare([plain], **QUICK).entrants] == ["right"]
    report = compare([plain, small], **QUICK)
    assert [e.name for e in report.entrants] == ["right", "narrow"]
    assert report.results[1].entries["right"].reason == "does not multiply s8-s8-s32"
    assert report.results[1].best == "narrow"


def test_a_result_elsewhere_is_fetched_to_be_judged_and_not_to_be_timed():
    fetched = []
    which, library = case("f32-u4-f32"), compare_fakes.narrow(None)

    def late(which, made):
        whole = compare_fakes._exact(which, made)
        return {"late": peers.returning(lambda: whole, lambda result: fetched.append(np.copyto(made.c, result)))}

    bench, reply = prepare(replace(library, prepare=late), which, 0)
    assert reply["state"] == "ok"
    assert len(fetched) == 1
    bench.time(0.001)
    assert len(fetched) == 1


def test_without_ml_dtypes_bfloat16_is_unsupported(monkeypatch):
    def without(_name):
        raise TypeError("pip install ml_dtypes")

    monkeypatch.setattr(inputs, "numpy_of", without)
    _, reply = prepare(compare_fakes.narrow(None), case("bf16"), 0)
    assert reply == {"state": "unsupported", "reason": "pip install ml_dtypes"}


def test_every_forced_isa_bends_the_same_libraries():
    assert len({frozenset(x) for x in FORCED.values()}) == 1


# --- adapters -----------------------------------------------------------------

SHAPES = [
    *(case(word, m, packed=packed) for word in WORDS for m in (1, 5) for packed in (True, False) if "u4" not in word),
    *(case(word, m) for word in WORDS for m in (1, 5) if "u4" in word),
    *(case(word, b="col") for word in ("bf16", "f16", "s8-s8-s32", "u8-s8-s32")),
]
SHAPES = [replace(x, name=f"{i}") for i, x in enumerate(SHAPES)]
NARROW = ("mkl", "onednn", "torch", "onnxruntime", "onnxruntime-8bit", "openvino")


@pytest.mark.parametrize("name", NARROW)
def test_every_adapter_is_right_in_all_its_methods(name):
    report = compare(SHAPES, contenders=[name], rounds=1, turn_s=0.0005, limits=False)
    if report.entrants[0].state == "missing":
        pytest.skip(report.entrants[0].reason)
    assert report.entrants[0].state == "ok", report.entrants[0].reason
    # Without these instructions libraries multiply u8 by s8 in 16 bits, which saturate: wrong, and known to be.
    saturates = not (host().isa("avx512vnni") or host().isa("avxvnni"))
    for result in report.results:
        entry = result.entries[name]
        if saturates and "8-s8" in result.case.dtype and "wrong" in (entry.state, entry.reason[:5]):
            continue
        assert entry.state in ("ok", "unsupported"), (result.case, entry.reason)
        assert entry.state != "ok" or not entry.reason, (result.case, entry.reason)
    assert any(r.entries[name].state == "ok" for r in report.results)
    assert report.approximate == ({name} if name.endswith("8bit") else set())


def test_libraries_without_narrow_types_refuse_them():
    others = [c.name for c in peers.CONTENDERS if c.peer and not c.only and c.name not in NARROW]
    report = compare(SHAPES[:1], contenders=others, rounds=1, turn_s=0.0005, limits=False)
    assert {e.state for e in report.results[0].entries.values()} == {"unsupported"}


@pytest.mark.rest("takes long for what it finds")
def test_portmm_does_everything():
    report = compare(SHAPES, contenders=["portmm"], rounds=1, turn_s=0.0005, limits=False)
    for result in report.results:
        assert result.entries["portmm"].state == "ok", (result.case, result.entries["portmm"].reason)
        assert not result.entries["portmm"].reason


def test_onnxruntime_cannot_be_held_to_less():
    with pytest.raises(peers.MissingError, match="held to avx2"):
        peers.open_adapter("portmm.comparison.model_runtimes:open_onnxruntime", Setup(isa="avx2"))


# --- bench/cliff.py -----------------------------------------------------------


@pytest.fixture(scope="module")
def cliff():
    spec = importlib.util.spec_from_file_location("cliff", BENCH / "cliff.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_due_is_the_lower_of_half_of_f32_and_of_memory(cliff):
    thin, fat = (cliff.case_of("u8-s8-s32", "row", m) for m in (1, 512))
    assert cliff.due(fat, 100.0, 1000.0) == 50.0
    assert cliff.due(thin, 1e6, 2.0) == pytest.approx(0.8 * 2.0 * thin.flops / thin.bytes)
    assert cliff.case_of("f32-u4-f32", "packed", 8).block == compared.BLOCK


def test_a_cliff_is_measured_again_and_comes_first(cliff):
    asked = []

    def rate(which):
        asked.append(which)
        return (100.0 if which.dtype == "f32" else 10.0 if which.dtype == "bf16" else 60.0), ""

    cells = list(cliff.survey(rate, "avx2", 1e9, types=("bf16", "s8-s8-s32", "u8-s8-f32"), rows=(8,)))
    assert [(c.layout, c.dtype) for c in cells] == [
        ("row", "bf16"), ("row", "s8-s8-s32"), ("col", "bf16"), ("col", "s8-s8-s32"),
        ("packed", "bf16"), ("packed", "s8-s8-s32"), ("packed", "u8-s8-f32"),
    ]  # fmt: skip
    assert sum(x.dtype == "bf16" for x in asked) == 3 * cliff.AGAIN
    assert sum(x.dtype == "s8-s8-s32" for x in asked) == 3
    assert cells[0].share == pytest.approx(0.2)
    lines = cliff.table(cells).splitlines()
    assert "bf16" in lines[1]
    assert "0.20" in lines[1]


def test_what_fails_is_a_cliff_with_its_reason(cliff):
    def rate(which):
        return (100.0, "") if which.dtype == "f32" else (0.0, "wrong: error 1 exceeds 0")

    cells = list(cliff.survey(rate, "avx2", 1e9, types=("s8-s8-s32",), rows=(1,)))
    assert all(c.share == 0 and c.fault for c in cells)
    assert "wrong: error 1" in cliff.table(cells)


def test_cells_are_timed_in_a_process_held_to_the_isa(cliff):
    bench = cliff.Bench(fake("narrow"), Setup(target="scalar"), 0.0005)
    try:
        assert bench.rate(cliff.case_of("s8-s8-s32", "row", 1))[0] > 0
        bench.contender = fake("picky")
        bench.close()
        assert bench.rate(cliff.case_of("f32", "row", 1)) == (0.0, "unsupported: only on Sundays")
    finally:
        bench.close()


def test_the_command_says_whether_there_are_cliffs(cliff, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cliff, "probe", lambda _target: {"memory": 10.0})
    monkeypatch.setattr(cliff, "RESULTS", tmp_path)
    rates = {"f32": 100.0, "bf16": 200.0}
    monkeypatch.setattr(cliff.Bench, "rate", lambda _self, which: (rates[which.dtype], ""))
    words = ["--isa", "scalar", "--types", "bf16", "--rows", "8", "--json"]
    assert cliff.main(words) == 0
    assert "3 cells, 0 cliffs; memory 10 GB/s" in capsys.readouterr().out
    rates["bf16"] = 1.0
    assert cliff.main(words) == 1
    kept = json.loads((tmp_path / f"{host().name}-cliff.json").read_text())
    assert {row["layout"] for row in kept["cliff"]} == {"row", "col", "packed"}
    assert kept["cliff"][0]["share"] < 1
