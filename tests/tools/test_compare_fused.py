"""Fused cases of comparisons: their words, inputs, judgement, adapters and contenders that misbehave."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from comparisons import prepare
from places import HELPERS

from portmm.comparison import CONTENDERS, Case, Contender, cases, compare, fused
from portmm.comparison import data as inputs
from portmm.comparison.data import EXACT, INPUTS, judge
from portmm.comparison.peers import FORCED, Setup, environment, find, open_adapter, removed
from portmm.comparison.report import from_json

WORDS = ("bias", "bias+gelu", "bias+gelu_tanh", "bias+relu", "silu", "residual", "bias+residual", "bias+residual+relu")
NARROW = ("bf16", "f16", "u8-s8-f32", "s8-s8-f32", "f32-s8-f32", "f32-u4-f32")
QUICK = {"rounds": 1, "turn_s": 0.001, "limits": False}
UNASKED = [c.name for c in CONTENDERS if c.peer and c.name != "torch.compile"]


def case(words, dtype="f32", m=9, n=32, k=256, **others):
    four = "u4" in dtype
    options = {"packed": True, **others}
    return Case(f"{words} {dtype}", "x", m, n, k, dtype=dtype, fused=words, block=128 if four else 0, **options)


def naive(which, made):
    """A case's result, an element at a time."""
    result = np.empty(made.c.shape, float)
    functions = {
        "relu": lambda x: max(x, 0.0),
        "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
        "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x / (1 + math.exp(-x)),
    }
    for i in range(which.m):
        for j in range(which.n):
            left, right = made.a[i].astype(float), made.b[:, j].astype(float)
            if which.block:
                right = (right - 8) * np.repeat(made.columns[:, j].astype(float), which.block)[: which.k]
            x = sum(float(p) * float(q) for p, q in zip(left, right, strict=True))
            if which.scaled:
                x *= float(made.columns[j]) * (float(made.rows[i]) if which.whole else 1.0)
            for word in which.fused.split("+"):
                if word in functions:
                    x = functions[word](x)
                else:
                    x += float(made.bias[j] if word == "bias" else made.residual[i, j])
            result[i, j] = x
    return result


def computed(which):
    """A case's arrays with the right result in them, rounded once."""
    made = inputs.arrays(which)
    np.copyto(made.c, naive(which, made), casting="unsafe")
    return made


def right(which, made, precision=EXACT):
    error, bound = judge(which, made, precision)
    return error <= bound


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(HELPERS))


# --- words, cases and suites ----------------------------------------------------


@pytest.mark.parametrize("words", ["swish", "relu+bias", "residual+bias", "bias+bias", "relu+silu", "bias+", "+"])
def test_words_that_mean_nothing(words):
    with pytest.raises(ValueError, match=r"known are|in this order"):
        case(words)


@pytest.mark.parametrize("others", [{"dtype": "s8-s8-s32"}, {"batch": 2}, {"c": "col"}])
def test_what_nothing_follows(others):
    with pytest.raises(ValueError, match="follows one product"):
        case("bias", **others)


def test_a_case_counts_what_is_added():
    bare = Case("x", "x", 3, 5, 7)
    both = replace(bare, fused="bias+residual")
    assert both.flops == bare.flops
    assert both.bytes == bare.bytes + 4 * (3 * 5 + 5)
    assert replace(both, dtype="bf16").bytes == replace(bare, dtype="bf16").bytes + 2 * (3 * 5 + 5)
    assert both.shape == "3x5x7 bias+residual"
    assert both.kinds == {"fused"}


def test_fused_suites():
    names = [c.name for word in ("full", "narrow", "fused") for c in cases(word)]
    assert len(set(names)) == len(names)
    found = cases("fused")
    assert all(c.fused for c in found)
    assert {c.group for c in found} == {"fused", "fused-bf16", "fused-int8"}
    assert {c.group for c in cases("fused-bf16")} == {"fused-bf16"}
    assert {c.name for c in cases("fused-quick")} < {c.name for c in found}
    assert {c.group for c in cases("fused-quick")} == {c.group for c in found}
    assert {(c.m, c.n, c.fused) for c in found} >= {
        (128, 3072, "bias+gelu"),
        (384, 768, "bias+residual"),
        (2048, 1024, "bias+relu"),
        (16, 14336, "silu"),
    }
    assert not any(c.fused for word in ("full", "narrow") for c in cases(word))


def test_json_says_it_where_it_is_something():
    report = compare(
        [case("bias+relu"), case("", packed=False)],
        contenders=[Contender("finishing", "compare_fakes:finishing")],
        **QUICK,
    )
    rows = json.loads(report.to_json())["results"]
    assert rows[0]["case"]["fused"] == "bias+relu"
    assert "fused" not in rows[1]["case"]
    assert from_json(report.to_json()) == report


# --- inputs and judgement -------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", ["f32", "f64", *NARROW])
@pytest.mark.parametrize("words", WORDS)
def test_a_right_result_is_accepted(words, dtype):
    if dtype in ("bf16", "f32-u4-f32"):
        pytest.importorskip("ml_dtypes")
    which = case(words, dtype)
    made = computed(which)
    assert right(which, made)
    assert right(which, made, INPUTS)


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", ["f32", "u8-s8-f32", "f32-s8-f32", "f16"])
@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("bias+gelu", "gelu"),
        ("bias+residual", "bias"),
        ("bias+residual", "residual"),
        ("bias+relu", "bias"),
        ("silu", "gelu"),
        ("bias+gelu", "bias+relu"),
    ],
)
def test_a_lost_step_is_noticed(words, instead, dtype):
    which = case(words, dtype, 16, 64, 768)
    made = inputs.arrays(which)
    np.copyto(made.c, naive(replace(which, fused=instead), made), casting="unsafe")
    assert not right(which, made)
    assert not right(which, made, INPUTS)


@pytest.mark.parametrize("k", [256, 3072])
def test_the_other_gelu_is_noticed(k):
    which = case("bias+gelu", m=32, n=64, k=k)
    made = inputs.arrays(which)
    with_bias = made.a.astype(float) @ made.b + made.bias
    np.copyto(made.c, fused.value("gelu", with_bias), casting="unsafe")
    assert right(which, made)
    np.copyto(made.c, fused.value("gelu_tanh", with_bias), casting="unsafe")
    assert not right(which, made)


def test_rounding_after_each_step_is_for_those_who_may():
    which = case("bias+residual", "f16", 64, 64, 512)
    made = inputs.arrays(which)
    half = (made.a.astype(np.float32) @ made.b.astype(np.float32)).astype(np.float16) + made.bias + made.residual
    np.copyto(made.c, half)
    assert right(which, made, INPUTS)
    assert not right(which, made)


def test_sums_are_near_one():
    for dtype in ("f32", "u8-s8-f32", "f32-s8-f32"):
        for k in (64, 1024):
            which = case("bias", dtype, 8, 32, k)
            made = computed(which)
            assert 0.3 < np.std(made.c.astype(float) - made.bias.astype(float)) < 4


def test_slopes_bound_the_functions():
    x = np.linspace(-12, 12, 200_001)
    for word, steepest in fused.STEEPEST.items():
        slope = np.abs(np.diff(fused.value(word, x)) / np.diff(x)).max()
        assert 0.97 * steepest < slope <= steepest


@pytest.mark.parametrize("words", WORDS)
def test_in_place_does_it(words):
    which = case(words, m=300, n=257, k=8)
    made = inputs.arrays(which)
    np.matmul(made.a, made.b, out=made.c)

    def normal(x, out):
        out[...] = (1 + fused._erf(x.astype(float) / math.sqrt(2)).astype(float)) / 2

    fused.in_place(words, made.c, made.added, normal)()
    assert right(which, made)


# --- who takes part -------------------------------------------------------------


def test_contenders_take_part_where_they_add_something():
    plain, packed = Case("x", "x", 4, 4, 4), Case("x", "x", 4, 4, 4, packed=True)
    known = {c.name: c for c in CONTENDERS}
    for name in ("onnxruntime", "openvino"):
        assert [known[name].adds_to(x) for x in (plain, packed, case("bias"))] == [False, False, True]
    assert not known["torch.compile"].adds_to(case("bias"))
    assert known["torch"].adds_to(plain)
    assert find(["portmm", "all"]) == CONTENDERS


def test_contenders_with_kinds_are_left_out_case_by_case():
    def unasked(monkeypatch):
        field = (
            Contender("finishing", "compare_fakes:finishing"),
            Contender("right", "compare_fakes:right", only=frozenset({"narrow"})),
        )
        monkeypatch.setattr("portmm.comparison.peers.CONTENDERS", field)
        return compare([case("bias"), case("", packed=False)], **QUICK)

    with pytest.MonkeyPatch.context() as monkeypatch:
        report = unasked(monkeypatch)
    assert [set(r.entries) for r in report.results] == [{"finishing"}, {"finishing"}]


def test_new_contenders_are_held_to_an_isa():
    base = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "OPENVINO_X": "1", "TORCHINDUCTOR_CACHE_DIR": "/x"}
    assert removed(base) == ("OPENVINO_X", "TORCHINDUCTOR_MAX_AUTOTUNE")
    env = environment(base, Setup(isa="avx2"), uses_openblas=False)
    assert env["TORCHINDUCTOR_CPP_MARCH"] == "haswell"
    assert env["TORCHINDUCTOR_CACHE_DIR"] == "/x"
    assert all("TORCHINDUCTOR_CPP_MARCH" in held for held in FORCED.values())


def test_fakes_on_a_fused_case():
    names = ("finishing", "right", "merely", "slow_finishing", "crashing_fused")
    field = [Contender(name, f"compare_fakes:{name}") for name in names]
    report = compare([case("bias+relu")], contenders=field, **QUICK)
    entries = report.results[0].entries
    states = {name: entry.state for name, entry in entries.items()}
    assert states == {
        "finishing": "ok",
        "right": "unsupported",
        "merely": "wrong",
        "slow_finishing": "ok",
        "crashing_fused": "crashed",
    }
    assert entries["right"].reason == "fuses nothing"
    assert report.results[0].best == "finishing"


# --- adapters -------------------------------------------------------------------


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", ["portmm", *UNASKED])
def test_every_adapter_is_right_in_all_its_methods(name):
    suite = [case(words, packed=i % 2 == 0, m=5) for i, words in enumerate(WORDS)]
    suite += [case("bias+residual", packed=False)]
    suite += [case(("bias+gelu", "bias+residual")[i % 2], dtype, n=64) for i, dtype in enumerate(NARROW)]
    report = compare(suite, contenders=[name], **QUICK)
    if report.entrants[0].state == "missing":
        pytest.skip(report.entrants[0].reason)
    assert report.entrants[0].state == "ok", report.entrants[0].reason
    for result in report.results:
        entry = result.entries[name]
        assert entry.state in ("ok", "unsupported"), (result.case, entry.reason)
        assert entry.state != "ok" or not entry.reason, (result.case, entry.reason)


def test_portmm_fuses_everything():
    pytest.importorskip("ml_dtypes")
    library = open_adapter("portmm.comparison.ours:open_portmm", Setup())
    for which in (case("bias+gelu"), case("silu", "bf16"), case("bias+residual+relu", "u8-s8-f32")):
        _, reply = prepare(library, which, 0)
        assert reply["state"] == "ok", reply
        assert list(reply["methods"]) == ["linear, epilogue" if which.scaled else "matmul, epilogue"]


def test_the_compiler_of_pytorch():
    pytest.importorskip("torch")
    report = compare([case("bias+gelu", m=4, n=16, k=32)], contenders=["torch.compile"], patience_s=300, **QUICK)
    assert report.entrants[0].state == "ok", report.entrants[0].reason
    entry = report.results[0].entries["torch.compile"]
    if entry.state == "unsupported":
        pytest.skip(entry.reason)
    assert (entry.state, entry.reason) == ("ok", "")
