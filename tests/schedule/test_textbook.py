"""Textbook blockings: which they are, when they are chosen, and how much of a shared cache is counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from machines import HERE, TINY
from places import BENCH

import portmm as pm
from portmm.dispatch import overrides
from portmm.dispatch.schedule_choice import choose
from portmm.host import detect
from portmm.host.host_probe import CPU
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_textbook import DEPTH, follows, preferred
from portmm.schedule.schedule import sweeps_panels
from portmm.spec.problem import Problem
from portmm.target.model import CPU as MODEL
from portmm.target.target import load_target, names_of
from portmm.tuning.proposals import ranked

QUICKLY = "fast"

RESULTS = BENCH / "results"
ZEN3 = load_target("zen3")
SEARCHED = replace(ZEN3, searches=("a-search",))
CUBES = [Problem(n, n, n) for n in (128, 192, 240, 256, 384, 512, 768, 1024, 2048)]


def textbook(p, target):
    return [s for s in candidates(p, target) if follows(s, p, target)]


def least(p, target, listed=None):
    return min(x.predicted for x in ranked(p, target, 1) if listed is None or x.schedule in listed)


def held(s):
    """Bytes of the block of A and of the panels of B that are packed together, of float32."""
    return (s.mc + s.tiles[2].n) * s.kc * 4


@pytest.mark.parametrize("p", CUBES, ids=str)
def test_schedules_that_experts_force_are_candidates(p):
    """On Zen 3, 6x16, KC 372, MC 240 beat the choices of the model, and 4x24, MC 504 those at 2048 cubed."""
    found = {(s.mr, s.nr): [] for s in textbook(p, ZEN3)}
    for s in textbook(p, ZEN3):
        assert s.b.packed
        assert not s.b.once
        assert s.tiles[2].n == 2 * s.nr
        assert s.a.packed or p.n <= 128
        found[s.mr, s.nr].append(s)
    assert set(found) == {(6, 16), (4, 24)}
    for same in found.values():
        assert {s.kc for s in same} == {DEPTH}
        fill = {round(held(s) / ZEN3.level("L2").bytes, 1) for s in same if s.a.packed}
        assert fill == {0.5, 1.0}
        assert max(map(held, same)) <= ZEN3.level("L2").bytes


def test_an_operand_that_is_used_seldom_is_not_packed():
    """Few columns use a copy of A; with 32 registers, slices that can be addressed are wide."""
    for target, shapes in ((ZEN3, {(6, 16), (4, 24)}), (load_target("skylake_sp"), {(8, 32), (8, 48), (6, 64)})):
        found = textbook(Problem(3000, 100, 500), target)
        assert {(s.mr, s.nr) for s in found if not s.a.packed} == shapes
        assert any(s.a.packed for s in found)
        assert all(s.a.packed for s in textbook(Problem(3000, 400, 500), target))


@pytest.mark.parametrize("chip", names_of("cpu"))
def test_few_candidates_are_added(chip):
    target = load_target(chip)
    for p in (Problem(500, 400, 300), Problem(500, 60, 300), Problem(500, 400, 300, "bf16"), Problem(9, 70, 500)):
        assert len(textbook(p, target)) <= 16


def test_an_unsearched_chip_takes_a_textbook_blocking_or_what_streams_panels():
    for p in CUBES:
        found = choose(p, ZEN3, tuned=False)
        s = found.schedule
        assert follows(s, p, ZEN3) or sweeps_panels(s) or s.b.inside, p
        assert found == choose(p, ZEN3, tuned=False)


@pytest.mark.parametrize(("target", "slower", "index"), [(ZEN3, 1.24, 1), (ZEN3, 1.26, 0), (SEARCHED, 0.5, 1)])
def test_predictions_within_a_fifth_do_not_count(target, slower, index):
    p = Problem(500, 400, 300)
    usual = next(s for s in candidates(p, target) if s.b.once)
    pair = [(1.0, usual), (slower, textbook(p, target)[0])]
    assert preferred(sorted(pair, key=lambda x: x[0]), p, target) == index


@pytest.mark.thin(4)
@pytest.mark.parametrize("chip", names_of("cpu"))
def test_a_textbook_blocking_is_never_predicted_far_from_the_best(chip):
    target = load_target(chip)
    for p in (*CUBES, Problem(9, 70, 500), Problem(8192, 32, 32), Problem(64, 64, 65536), Problem(20, 1024, 1024)):
        found = choose(p, target, tuned=False)
        assert least(p, target) >= MODEL.within * found.cost.seconds or target.searches
        assert (found.origin == "textbook") <= (not target.searches and follows(found.schedule, p, target))


def test_a_searched_chip_stays_with_what_was_searched():
    for p in CUBES:
        found = choose(p, SEARCHED, tuned=False)
        kept = [s for s in candidates(p, SEARCHED) if not follows(s, p, SEARCHED)]
        assert found.origin == "analytical"
        assert found.schedule in kept
        assert found.cost.seconds == least(p, SEARCHED, kept)


@pytest.mark.parametrize(
    ("p", "why"),
    [
        (Problem(8, 4096, 4096), "few rows stay in registers"),
        (Problem(8192, 32, 32), "K is short"),
        (Problem(64, 64, 64, batch=1000, static=True), "no loops over blocks"),
        (Problem(8, 8, 8, b="col"), "sums over lanes"),
    ],
    ids=str,
)
def test_products_without_blocks_are_left_to_the_model(p, why):
    found = choose(p, ZEN3, tuned=False)
    assert (found.origin, found.cost.seconds) == ("analytical", least(p, ZEN3)), why


def test_another_unit_is_not_taken_for_its_blocking():
    target, p = load_target("granite_rapids"), Problem(1024, 1024, 1024, "bf16-bf16-f32")
    assert textbook(p, target)
    assert choose(p, target, tuned=False).schedule.program == "tiles"


def test_depth_counts_units_of_k():
    p = Problem(1024, 1024, 1024, "bf16-bf16-f32")
    assert {s.kc * s.atom.kr for s in textbook(p, load_target("zen5"))} == {DEPTH}


def test_the_tuner_starts_from_the_choice():
    for target in (ZEN3, SEARCHED):
        for p in CUBES[:3]:
            found = ranked(p, target, 1)
            assert found[0].schedule == choose(p, target, tuned=False).schedule
            assert [x.predicted for x in found[1:]] == sorted(x.predicted for x in found[1:])


def test_a_core_counts_its_share_of_a_shared_cache():
    assert ZEN3.level("L3").cores == 8
    assert ZEN3.counted("L3") == ZEN3.level("L3").bytes // 8
    assert ZEN3.counted("L2") == ZEN3.level("L2").bytes
    assert SEARCHED.counted("L3") == ZEN3.level("L3").bytes
    assert TINY.counted("L4") == 0
    far = choose(Problem(1024, 1024, 1024), ZEN3, tuned=False).cost
    assert "memory" in far.overlapped
    assert "memory" not in choose(Problem(1024, 1024, 1024), SEARCHED, tuned=False).cost.overlapped


def test_every_shared_cache_names_the_cores_that_share_it():
    for chip in map(load_target, names_of("cpu")):
        assert [x.name for x in chip.levels if x.shared and not x.cores] == [], chip.name


def test_a_guest_shares_a_cache_with_strangers():
    """It sees its own processors only, the description all of them; on an unknown chip what it sees counts."""
    here = detect.snapshot()
    index = f"{CPU}/cpu0/cache/index3"
    seen = {"size": "32768K", "level": "3", "type": "Unified", "shared_cpu_list": "0-1"}
    seen |= {"coherency_line_size": "64", "ways_of_associativity": "16"}
    files = here.files | {f"{index}/{name}": text for name, text in seen.items()}
    files |= {f"{CPU}/cpu{i}/topology/thread_siblings_list": str(i) for i in (0, 1)}
    shot = replace(here, files=files, affinity=(0, 1))
    assert detect._levels(shot, ZEN3, 0)[2].cores == 8
    assert detect._levels(shot, load_target("x86_64_v3"), 0)[2].cores == 2


def test_searches_that_chips_name_are_stored():
    named = {name for chip in names_of("cpu") for name in load_target(chip).searches}
    assert named == {path.stem for path in RESULTS.glob("*-search.json")}


def test_explanations_say_that_the_rule_decided():
    p = Problem(100, 1000, 1000, "bf16")
    assert choose(p, ZEN3, tuned=False).origin == "textbook"
    found = pm.explain(p, target="zen3", threads=1)
    assert found.origin == "textbook"
    assert "no search stored for this chip: a textbook blocking within 20% of the least predicted" in found.summary()
    assert "4 MiB counted for one core" in found.summary()


@pytest.mark.parametrize("isa", HERE)
def test_textbook_blockings_compute_products(isa):
    rng = np.random.default_rng(1)
    with pm.config(target=isa, threads=1):
        target = detect.resolve(isa)
        a, b = rng.integers(-4, 5, (53, 400)).astype(np.float32), rng.integers(-4, 5, (400, 70)).astype(np.float32)
        p = Problem(53, 70, 400)
        found = textbook(p, target)
        assert found or isa == "scalar"
        try:
            for s in found[:2]:
                overrides.override(p, s, 1)
                assert np.array_equal(pm.matmul(a, b), a @ b), s
        finally:
            overrides.clear_overrides()
