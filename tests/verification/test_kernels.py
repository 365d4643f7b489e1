"""Emitted kernels compute their records, element by element, and mutants of their loops do not."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from machines import TINY

from portmm.codegen.lower import lower_program
from portmm.ir import block_meaning, interpreter
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ir.block_program import program_of
from portmm.ir.index import Index, const
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import For, If, Kernel, Verb
from portmm.ir.product_program import of_product
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_attention import attention_schedule
from portmm.schedule.rows import rows_schedule
from portmm.spec.elementwise import exp
from portmm.spec.epilogue import C, Fused, Operand, acc, load, reduction
from portmm.spec.problem import Problem
from portmm.target.target import load_isa, load_target
from portmm.verification.calls import Layout, call_of
from portmm.verification.kernels import check_kernel
from portmm.verification.lowered import lowered, small

SEED = 5
FUSED = Fused((Operand("f32", "n"), Operand("f32", "mn")), ((C, acc() * load(0, "f32")), (1, acc() - 1.0)))
PRODUCT = of_product(Problem(7, 12, 9, fused=str(FUSED)))
CHIPS = ("zen5", "haswell", "neoverse-n1")


def softmax(level="L1"):
    x = load(0, "f32")
    w = exp(x - reduction("max", x))
    return program_of(Fused((Operand("f32", "bmn"),) * 2, ((1, w / reduction("add", w)),)), level)


def scaled_attention(loop, *, causal=False, lse=False):
    return of_attention(Form(Fused((), ((C, acc() * 0.5),)), "f32", "f32", Bounds(causal=causal), lse=lse), loop)


def tiny(program, loop="n"):
    isa = TINY.isas[0]
    atom = isa.atom("f32")
    return lower_program(program, attention_schedule(isa, atom, packs=loop == "m"), isa, atom)[0]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("program", [PRODUCT, softmax(), scaled_attention("n")], ids=["product", "rows", "decoding"])
def test_kernels_of_chips(program, chip):
    x = lowered(program, load_target(chip))
    verdict = x.check(program, seed=SEED)
    assert verdict, verdict
    assert verdict.bits >= 40


def test_schedules_of_a_product():
    p = Problem(7, 13, 9, fused=str(FUSED))
    every = [s for s in candidates(p, TINY) if not s.on_device]
    for s in every[:: max(1, len(every) // 4)]:
        (kernel,) = lower_program(PRODUCT, replace(s, epilogue=""), TINY.isas[0])
        verdict = check_kernel(PRODUCT, kernel, {"m": 7, "n": 13, "k": 9}, seed=SEED)
        assert verdict, verdict


@pytest.mark.parametrize("kind", ["direct", "stream", "simt"])
def test_products_of_threads(kind):
    """Kernels of devices, by the interpreter of threads: shared memory, barriers and copies are as ever."""
    listed = candidates(Problem(7, 12, 9, fused=str(FUSED)), load_target("h100"), (1, 1, 1))
    s = next(x for x in listed if x.program == kind and x.parallel.split == 1)
    (kernel,) = lower_program(PRODUCT, replace(s, epilogue=""), load_isa(s.isa))
    verdict = check_kernel(PRODUCT, kernel, {"m": 5, "n": 9, "k": 9}, seed=SEED)
    assert verdict, verdict


def test_rows_of_threads():
    (kernel,) = lower_program(softmax(""), rows_schedule(64, 32, exchange=True), load_isa("simt"))
    verdict = check_kernel(softmax(""), kernel, {"b": 1, "m": 3, "n": 37}, seed=SEED)
    assert verdict, verdict
    x = load(0, "f32")
    other = program_of(Fused((Operand("f32", "bmn"),) * 2, ((1, x - reduction("max", x)),)))
    assert not check_kernel(other, kernel, {"b": 1, "m": 3, "n": 37}, seed=SEED)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("loop", ["n", "m"])
def test_attention(loop, causal):
    program, queries = scaled_attention(loop, causal=causal, lse=True), "nm"["nm".index(loop) - 1]
    extents = {"b": 2, "h": 4, "H": 2, queries: 5, loop: 11, "d": 3, "e": 2}
    verdict = check_kernel(program, tiny(program, loop), extents, seed=SEED)
    assert verdict, verdict


def test_another_record_is_told():
    extents = {"b": 1, "h": 2, "H": 1, "m": 5, "n": 11, "d": 3, "e": 2}
    other = of_attention(Form(Fused((), ((C, acc() * 0.25),)), "f32", "f32", Bounds()), "n")
    assert not check_kernel(scaled_attention("n"), tiny(other), extents, seed=SEED)
    assert not check_kernel(scaled_attention("n", causal=True), tiny(scaled_attention("n")), extents, seed=SEED)


class Mutator:
    """Changes the n-th place of a kernel that can be changed: a trip, an offset, a literal, a reset, a condition."""

    def __init__(self, site, only=lambda _: True):
        self.left, self.what, self.only = site, "", only

    def of(self, x):
        if isinstance(x, tuple):
            parts = [self.of(y) for y in x]
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        if isinstance(x, Index) or not is_dataclass(x) or isinstance(x, type):
            return x
        if isinstance(x, Kernel):
            return replace(x, entry=self.of(x.entry))
        if not type(x).__module__.startswith("portmm.ir"):
            return x
        changed = self.changed(x) if self.only(x) else None
        if changed is not None:
            self.left -= 1
            if self.left == -1:
                self.what = f"{type(x).__name__} {getattr(x, 'name', getattr(x, 'op', getattr(x, 'var', '')))}"
                return changed
        new = {f.name: self.of(getattr(x, f.name)) for f in fields(x)}
        return replace(x, **new) if any(new[f.name] is not getattr(x, f.name) for f in fields(x)) else x

    @staticmethod
    def changed(x):  # noqa: PLR0911 - one for each kind
        if isinstance(x, For):
            return replace(x, end=x.end - const(1))
        if isinstance(x, Verb) and x.name in ("load_a", "load_b", "store") and x.p is not None:
            return replace(x, p=x.p + 1)
        if isinstance(x, Verb) and x.name == "zero":
            return Verb("add", x.d, x.d)
        if isinstance(x, Map) and x.op in ("mul", "add", "sub", "lt"):
            return replace(x, op={"mul": "add", "add": "sub", "sub": "add", "lt": "le"}[x.op])
        if isinstance(x, Map) and x.op == "greater":
            return replace(x, args=x.args[::-1][:1] * 2)
        if isinstance(x, If) and x.orelse:
            return replace(x, then=x.orelse)
        return None


def same_in_floats(program, kernel, extents):
    """Whether a kernel agrees with its record on floats; it may also leave its arrays."""
    rng, layout = np.random.default_rng(0), Layout.of(program, extents, kernel)
    call = call_of(layout, kernel.name)
    arrays = [rng.normal(size=[extents[x] for x in y.axes]).astype("f4") for y in program.operands]
    places, written = [layout.places(i) for i in range(len(arrays))], dict(program.fused.results)
    got = [np.full(max(x) + 1, np.nan, "f4") for x in places]
    for i, x in enumerate(arrays):
        got[i][places[i]] = np.nan if i in written else x.ravel()
    block_meaning.run(program, arrays)
    try:
        with np.errstate(all="ignore"):
            interpreter.run(kernel, call.ints, {n: (x, 0) for n, x in zip(call.names, got, strict=True)})
    except (IndexError, KeyError, ValueError):
        return False
    return all(np.allclose(got[i][places[i]], arrays[i].ravel(), rtol=1e-3, atol=1e-5) for i in written)


def sites_of(kernel):
    """Number of places that can be changed."""
    every = Mutator(1 << 20)
    every.of(kernel)
    return (1 << 20) - every.left


def shortest_product():
    """The kernel that packs B with the fewest places: others have loops for many sizes, of which few run."""
    every = [s for s in candidates(Problem(5, 6, 9, fused=str(FUSED)), TINY) if s.b.packed and not s.on_device]
    kernels = [lower_program(PRODUCT, small(replace(s, epilogue="")), TINY.isas[0])[0] for s in every]
    return min(kernels, key=sites_of)


MUTATED = {
    "product": (PRODUCT, shortest_product, {"m": 5, "n": 6, "k": 9}),
    "rows": (softmax(), lambda: lowered(softmax(), TINY).kernel, {"b": 1, "m": 2, "n": 11}),
    "decoding": (scaled_attention("n"), lambda: tiny(scaled_attention("n")),
                 {"b": 1, "h": 2, "H": 1, "m": 3, "n": 11, "d": 3, "e": 2}),
}  # fmt: skip


RESETS = {
    "product": ("product", lambda x: isinstance(x, Verb) and x.name == "zero"),
    "decoding": ("decoding", lambda x: isinstance(x, Verb) and x.name == "zero"),
}


@pytest.mark.parametrize("name", RESETS)
def test_a_missing_reset_is_told(name):
    """An accumulator that is not set to zero before the first step."""
    case, only = RESETS[name]
    program, make, extents = MUTATED[case]
    kernel, told = make(), 0
    for site in range(64):
        mutator = Mutator(site, only)
        mutant = mutator.of(kernel)
        if not mutator.what:
            break
        verdict = check_kernel(program, mutant, extents, seed=SEED)
        assert not verdict or same_in_floats(program, mutant, extents)
        told += not verdict
    assert told


@pytest.mark.parametrize("name", MUTATED)
def test_mutants_are_told(name):
    program, make, extents = MUTATED[name]
    kernel, seen = make(), Counter()
    every = sites_of(kernel)
    assert every > 20
    for site in range(0, every, max(1, every // 24)):
        mutator = Mutator(site)
        mutant = mutator.of(kernel)
        verdict = check_kernel(program, mutant, extents, seed=SEED)
        assert not verdict or same_in_floats(program, mutant, extents), mutator.what
        seen[bool(verdict)] += 1
    assert seen[False] >= 10, seen  # prefetches, and loops for other sizes than this one, change nothing
