"""Candidates that race give the same bits: on every instruction set by the interpreter, and in calls on this host.

`cpu_background.same_results` says which schedules do. Sums are of floats that round, and longer than a run of k and
than the blocks of most candidates.
"""

from __future__ import annotations

from functools import partial

import cover
import numpy as np
import pytest
from machines import EVERY_ISA, runs_here, small
from operands import case
from problems import NARROW, coded, pose
from runs import interpret

import portmm as pm
from portmm.codegen.lower import lower
from portmm.dispatch import config, overrides, schedule_choice
from portmm.dispatch.cpu_background import same_results
from portmm.ir.interpreter import numpy_type
from portmm.schedule.candidates import candidates
from portmm.schedule.text import spell
from portmm.target.target import load_isa

K = 330
SIZES = ((5, 11, K), (5, 203, K))
"""A few columns, and such that B is beyond L2."""
LAYOUTS = [("row", "row", "row"), ("col", "col", "row"), ("row", "packed", "row"), ("any", "row", "col")]
WORDS = ("f32", "f64", *NARROW)
CODED = ("f32-u4-f32", "bf16-u4-bf16", "s8-u4-f32")
MOST = 3
"""Schedules of each group that are interpreted, or built."""


def groups(found):
    """Lists of schedules with the same results: a few of each, of the greatest and the least blocks."""
    kinds = []
    for s in found:
        for kind in kinds:
            if same_results(kind[0], s):
                kind.append(s)
                break
        else:
            kinds.append([s])
    for kind in kinds:
        ordered = sorted(kind, key=lambda s: (s.kc or K, s.mr, s.nr))
        yield ordered[:: max(1, (len(ordered) - 1) // (MOST - 1))][: MOST - 1] + ordered[-1:]


def interpreted(p, target):
    """The number of schedules whose bits were compared with those of another."""
    k, compared = case(p, floats=True), 0
    for kind in groups(candidates(p, target)):
        results = {spell(s): interpret(lower(s, target.isas[0]), k).tobytes() for s in kind}
        assert len(set(results.values())) == 1, list(results)
        compared += len(results) - 1
    return compared


def posed(name, word, layouts):
    """An instruction set multiplies a type, whose kernels have layouts."""
    return bool(load_isa(name).atom(word)) and (layouts[2] == "row" or not word.startswith("u8"))


@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "word", "layouts"), cover.pairs(EVERY_ISA, WORDS, LAYOUTS, where=posed))
def test_candidates_mean_the_same_bits(name, word, layouts):
    """In these layouts, or in the next ones that have rivals."""
    target, turn = small(name), LAYOUTS.index(layouts)
    compared = (
        interpreted(p, target)
        for size in SIZES
        for x in LAYOUTS[turn:] + LAYOUTS[:turn]
        if posed(name, word, x)
        for p in pose(size, x, target, dtype=word)
    )
    assert any(compared)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("name", "word", "group"),
    cover.pairs(EVERY_ISA, CODED, [0, 32], where=lambda name, word, _: load_isa(name).atom(word)),
)
def test_candidates_of_codes_mean_the_same_bits(name, word, group):
    target, isa = small(name), load_isa(name)
    more = {"post": "scale"} if word.startswith("s8") else {}
    atom = isa.atom(word)
    whole = atom.k if atom.tiled and group else group  # tiles convert the values of groups of whole steps
    # Tiles have one schedule each of what may be compared.
    assert interpreted(coded(SIZES[0], word, 2 * atom.n, whole, **more), target) or atom.tiled


M, N, DEEP = 37, 150, 768
RNG = np.random.default_rng(0)
BIAS, SCALE, RESIDUAL, W_SCALE = (RNG.random(x, np.float32) for x in (N, (M, 1), (M, N), N))


def floats(*shape, dtype="f32"):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(numpy_type(dtype))


def codes(*shape, dtype=np.int8):
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8).view(dtype)


def gelu(x, i):
    return pm.gelu(x * SCALE[i.m, 0] + BIAS[i.n]) + RESIDUAL[i.m, i.n] * 0.3


def of_floats(t, form, epilogue):
    """A product of floats of a type, in a form."""
    a, b = floats(M, DEEP, dtype=t), floats(DEEP, N, dtype=t)
    if form == "columns":
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    if form == "batch":
        a, b = np.stack([a, a[::-1]]), np.stack([b, b[::-1]])
    if form == "small items":  # whose sizes are compiled in
        a, b = floats(300, 23, 19, dtype=t), floats(300, 19, 21, dtype=t)
    return partial(pm.matmul, a, pm.pack(b) if form == "packed" else b, epilogue=epilogue)


def of_int4(t, group, rows, epilogue, dynamic):
    """A product with a weight of four bits."""
    w, a = pm.pack(pm.quantize(floats(DEEP, N), bits=4, group=group)), floats(rows, DEEP, dtype=t)
    if dynamic:
        return partial(pm.linear, a, w, BIAS, dynamic=True, epilogue=epilogue)
    return partial(pm.matmul, a, w, epilogue=epilogue)


def of_int8(kind):
    """A product of integers, or with a weight of eight bits."""
    a, w, scales = codes(M, DEEP), codes(DEEP, N), {"w_scale": W_SCALE}
    made = {
        "matmul": lambda: partial(pm.matmul, a, w),
        "unsigned": lambda: partial(pm.matmul, a.view(np.uint8), w),
        "packed": lambda: partial(pm.matmul, a, pm.pack(w)),
        "epilogue": lambda: partial(pm.matmul, a, pm.pack(w), epilogue=lambda x, i: pm.gelu(x * 1e-4 + BIAS[i.n])),
        "linear": lambda: partial(pm.linear, a, pm.pack(w), BIAS, x_scale=0.01, **scales),
        "to int8": lambda: partial(pm.linear, a, pm.pack(w), BIAS, x_scale=0.01, x_zero=3, out_scale=0.1, **scales),
        "dynamic": lambda: partial(pm.linear, floats(M, DEEP), pm.pack(w), BIAS, dynamic=True, **scales),
        "of floats": lambda: partial(pm.linear, floats(M, DEEP), pm.pack(w, activations=np.float32), BIAS, **scales),
    }
    return made[kind]()


def shifted(x, i):
    return pm.gelu(x + BIAS[i.n])


FORMS = ("rows", "columns", "batch", "packed", "small items")


TARGETS = ("", "avx2", "sse2", "scalar")
OF_INT8 = ("matmul", "unsigned", "packed", "epilogue", "linear", "to int8", "dynamic", "of floats")
OF_INT4 = (
    ("f32", 32, M, None, False), ("f32", 128, 3, None, False), ("bf16", 128, M, None, False),
    ("bf16", 32, 3, None, False), ("f16", 128, 3, None, False), ("f32", 128, M, shifted, False),
    ("f32", 128, M, None, True), ("f32", 32, 3, shifted, True),
)  # fmt: skip
OF_FLOATS = cover.pairs(
    ("f32", "f64", "f16", "bf16"), FORMS, (None, gelu), TARGETS,
    where=lambda t, form, epilogue, _: not epilogue or (t != "f64" and form in ("rows", "packed")),
)  # fmt: skip
CALLS = [
    *((of_floats, x, target) for *x, target in OF_FLOATS),
    *((of_int8, (kind,), target) for kind in OF_INT8 for target in TARGETS),
    *((of_int4, x, target) for x in OF_INT4 for target in TARGETS),
]


def named(made):
    """A case by its name."""
    if callable(made):
        return made.__name__
    return " ".join(getattr(x, "__name__", str(x)) for x in made) if isinstance(made, tuple | list) else made


@pytest.mark.thin(7)
@pytest.mark.parametrize(("make", "given", "target"), CALLS, ids=named)
def test_calls_by_rivals_give_the_same_bits(make, given, target):
    if target and not runs_here(target):
        pytest.skip(f"no {target} here")
    with pm.config(threads=1, target=target or None):
        call = make(*given)
        with overrides.intercept() as interception:
            call()
        p = interception.problem
        best = schedule_choice.select_for_class(p, config.target(), 1)
        kinds = groups([best.schedule, *best.listed.schedules])
        (kind,) = [x for x in kinds if same_results(x[0], best.schedule)]
        results = {}
        for s in kind:
            overrides.clear_overrides()
            overrides.override(p, s, 1)
            results[spell(s)] = call().tobytes()
        overrides.clear_overrides()
    assert len(set(results.values())) == 1, list(results)
