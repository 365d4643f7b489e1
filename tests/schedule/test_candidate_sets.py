"""Enumerations that are shared have what a fresh one has; a candidate costs what it costs alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from machines import SEVEN, TINY

from portmm.codegen.lower import atom_of
from portmm.dispatch import cpu_kernels
from portmm.dispatch.schedule_choice import candidate_costs
from portmm.errors import ScheduleError
from portmm.schedule import candidates as enumeration
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_candidate_sets import candidate_set
from portmm.schedule.cpu_cost import cost
from portmm.spec.dequantization import Dequantization
from portmm.spec.problem import Problem
from portmm.target.target import load_target

MACHINES = {
    "avx512": load_target("zen4"),
    "avx2": load_target("zen4").limited_to("avx2"),
    "scalar": load_target("zen4").limited_to("scalar"),
    "amx": load_target("sapphire_rapids"),
    "neon": load_target("neoverse_n1"),
    "i8mm": load_target("neoverse_v2"),
    "tiny": TINY,
    "seven": SEVEN,
}
KINDS = (
    Problem(1, 1, 1),
    Problem(1, 1, 1, b="col"),
    Problem(1, 1, 1, a="col", b="any"),
    Problem(1, 1, 1, a="any", c="col"),
    Problem(1, 1, 1, deterministic=True),
    Problem(1, 1, 1, batch=3),
    Problem(1, 1, 1, batch=100, b="col"),
    Problem(1, 1, 1, static=True),
    Problem(1, 1, 1, "f64"),
    Problem(1, 1, 1, "bf16"),
    Problem(1, 1, 1, "f32-bf16-f32", b="col"),
    Problem(1, 1, 1, "u8-s8-s32"),
    Problem(1, 1, 1, "s8-s8-s32", a="col"),
    Problem(1, 1, 1, b="packed"),
    Problem(1, 1, 1, "bf16", b="packed"),
    Problem(1, 1, 1, "s8-s8-s32", b="packed"),
    Problem(1, 1, 1, "s8-s8-f32", b="packed", fused=Dequantization().text),
    Problem(1, 1, 1, "f32-u4-f32", b="codes"),
)
SIZES = (1, 2, 5, 14, 15, 16, 17, 28, 29, 32, 33, 48, 64, 65, 96, 129, 192, 256, 257, 500, 768, 960, 3000, 4096, 20000)
THREADS = (1, 2, 7, 64)


def drawn(target, kind, rng):
    """A problem of a kind, of sizes on both sides of all thresholds; None if the target does not multiply such."""
    sizes = [rng.choice(SIZES) if rng.random() < 0.7 else int(2 ** rng.uniform(0, 13)) for _ in range(3)]
    m, n, k = (min(x, 64) for x in sizes) if kind.static else sizes
    try:
        family = cpu_kernels.family(kind.dtype, target) if kind.b in ("packed", "codes") else ""
        p = replace(kind, m=m, n=n, k=k, family=family)
        candidates(p, target)
    except ScheduleError:
        return None
    return p


def test_a_new_set_is_enumerated_once(monkeypatch):
    asked, gemm = [], enumeration.PROGRAMS["gemm"]

    def counted(p, isa, *rest):
        asked.append(isa.name)
        return gemm.candidates(p, isa, *rest)

    monkeypatch.setattr(enumeration, "PROGRAMS", {"gemm": replace(gemm, candidates=counted)})
    target = load_target("zen4")
    candidate_set(Problem(7, 4096, 8192), target)
    assert asked
    assert len(asked) == len(set(asked))


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", MACHINES)
def test_shared_enumerations_are_fresh_ones(name):
    target, rng = MACHINES[name], random.Random(name)  # noqa: S311 - no secret
    sets, problems = set(), 0
    for kind in KINDS:
        for _ in range(16):
            p = drawn(target, kind, rng)
            if p is None:
                break
            found = candidate_set(p, target)
            assert list(found.schedules) == candidates(p, target), p
            sets.add(id(found))
            problems += 1
    assert problems > 16
    if target not in (TINY, SEVEN):
        assert len(sets) < problems


@pytest.mark.parametrize("name", MACHINES)
def test_candidates_cost_together_what_they_cost_alone(name):
    target, rng = MACHINES[name], random.Random(name)  # noqa: S311 - no secret
    for kind in KINDS:
        p = drawn(target, kind, rng)
        if p is None:
            continue
        found, threads = candidate_set(p, target), rng.choice(THREADS)
        q = p.transposed() if p.c == "col" else p
        (many,) = candidate_costs(p, found, (q.m, 3 * q.m + 1), (threads,))
        for i, s in rng.sample(list(enumerate(found.schedules)), min(6, len(found.schedules))):
            atom = atom_of(cpu_kernels.isa_of(s, target), s.dtype, s.atom.lanes)
            assert near(many.at(0)[i], cost(p, s, atom, target, threads)), s
            larger = replace(p, n=3 * p.n + 1) if p.c == "col" else replace(p, m=3 * p.m + 1)
            assert near(many.at(1)[i], cost(larger, s, atom, target, threads)), s


def near(one, other):
    """Costs that have the same terms, but for rounding."""
    return one.seconds == pytest.approx(other.seconds, rel=1e-12) and all(
        a == pytest.approx(b, rel=1e-12) for a, b in ((one.overlapped, other.overlapped), (one.added, other.added))
    )
