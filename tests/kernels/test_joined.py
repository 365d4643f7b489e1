"""Slices of k that the last block of a tile adds, in the launch that made them."""

from __future__ import annotations

from itertools import pairwise

import grid_cases
import numpy as np
import pytest
from emulated_cuda import install
from fused_cases import epilogues
from grid_cases import MACHINE, check_run, fused_case, kernels_of, run

import portmm as pm
from portmm.dispatch.schedule_choice import choose
from portmm.errors import DeviceError
from portmm.runtime import cuda
from portmm.schedule.candidates import candidates
from portmm.schedule.text import parse, spell, varied
from portmm.spec.problem import Problem
from portmm.target.target import load_target
from portmm.util import memo

pytestmark = pytest.mark.calls

QUICKLY = True

A100, T4 = load_target("a100"), load_target("t4")
CASES = (
    (MACHINE, "simt", "f32", "row", (4, 4, 4)), (MACHINE, "simt", "s8-s8-s32", "col", (8, 16, 1)),
    (A100, "mma", "bf16", "row", (8, 8, 8)), (A100, "mma", "bf16-bf16-f32", "col", (8, 8, 2)),
    (A100, "mma", "s8-s8-s32", "col", (16, 16, 4)), (T4, "mma", "f16-f16-f32", "row", (8, 8, 2)),
)  # fmt: skip
SIZES = ((65, 40, 144, 1), (16, 24, 80, 2), (3, 8, 16, 1), (9, 16, 0, 1))
"""m, n, k, and the items of a batch; of some, slices are empty."""


def posed(case, size, **more):
    _, _, dtype, b, _ = case
    *size, batch = size
    return Problem(*size, dtype, batch, "row", b, **more)


def chosen(case, **more):
    """Two schedules that are joined, and the same whose slices another kernel adds."""
    target, program, *_, vectors = case
    found = candidates(posed(case, (16, 64, 8192, 1), **more), target, vectors)
    ways = [s for s in found if s.parallel.fixup and s.program == program and s.mr * s.nr <= 32]
    for i, s in enumerate(ways[:: max(1, len(ways) // 2)][:2]):
        yield varied(s, split=3 + i)


@pytest.mark.parametrize("case", CASES, ids=lambda x: f"{x[1]}-{x[2]}-{x[3]}")
def test_the_sums_are_those_of_two_launches(case):
    """To the bit, in whatever order blocks come; counters are left as they were."""
    for s in chosen(case):
        kernels, apart = kernels_of(s, case[0]), kernels_of(varied(s, joined=False), case[0])
        assert (len(kernels), len(apart)) == (1, 2)
        for i, size in enumerate(SIZES):
            k = grid_cases.case(posed(case, size), s.vectors, i)
            check_run(s, kernels, "cuda", k, (k.problem, s))
            two = varied(s, joined=False)
            calls = [grid_cases.call(x, how, k) for x, how in ((kernels, s), (apart, two))]
            same = [grid_cases.same_as_before(x, "cuda") for x in calls] if i == 0 else [True]
            if not all(same):
                found, wanted = (run(how, x, "cuda", k)[0] for x, how in ((kernels, s), (apart, two)))
                assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda x: x[1])
def test_they_end_in_expressions(case):
    fused = epilogues()["many"]
    s = next(chosen(case, fused=str(fused)))
    kernels = kernels_of(s, case[0])
    for i, size in enumerate(SIZES[:2]):
        f = fused_case(posed(case, size, fused=str(fused)), fused, s.vectors, i)
        check_run(s, kernels, "cuda", f, (f.case.problem, s))


def test_one_launch_costs_less():
    choice = choose(Problem(16, 4096, 4096, "bf16", b="col"), A100, vectors=(8, 8, 8))
    s = choice.schedule
    assert s.parallel.fixup
    assert parse(spell(s)) == s
    assert choice.cost.seconds < dict(choice.runners_up)[varied(s, joined=False)].seconds
    # OpenCL 1.2 has no order of memory between blocks.
    assert not any(x.parallel.fixup for x in candidates(Problem(64, 64, 65536), load_target("mi300x"), (4, 4, 4)))


@pytest.fixture
def on(monkeypatch):
    memo.forget_all()
    yield install(monkeypatch)
    memo.forget_all()


def test_each_launch_counts_for_itself(on, monkeypatch):
    """A stream's handle may be another's before its kernels have run."""
    a = np.random.default_rng(0).integers(-3, 4, (32, 4096)).astype(np.float32)
    b = np.random.default_rng(1).integers(-3, 4, (4096, 48)).astype(np.float32)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    left, right = on.array(a), on.array(b)
    counters, ask = [], cuda.counters
    monkeypatch.setattr(cuda, "counters", lambda *given: counters.append(ask(*given)) or counters[-1])
    for stream in (5, 5, 6, 9, 9):
        on.streams[0] = stream
        on.captured = {9}
        found = pm.matmul(left, right)
        np.testing.assert_array_equal(found.get(), wanted)
    assert len(on.launches) == 5
    assert len(set(counters)) == 5
    assert on.log.count(("wait", 0)) == 1  # when the zeros were made


def test_counters_of_streams_that_are_captured(on):
    """A model's graphs have thousands of launches; nothing can be allocated, or waited for, meanwhile."""
    on.captured = {9}
    with pytest.raises(DeviceError, match="call the same product once outside of the capture"):
        cuda.counters(0, 132, 9)
    cuda.counters(0, 132, 5)
    asked = {cuda.counters(0, 132, 9) for _ in range(4096)}
    assert len(asked) == 4096
    turns = [cuda.counters(0, 132, 5) for _ in range(20000)]
    assert not asked & set(turns)
    assert 10000 < len(set(turns)) < 20000  # the first ones are done by then
    assert min(b - a for a, b in pairwise(sorted(asked | set(turns)))) >= 132 * 4
    assert on.log.count(("wait", 0)) == 1
