"""Loops of general block programs: symbol by symbol against their records, and mutants of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs_of import gated_kernel, loads, lora_kernel, one, rms_kernel
from test_kernels import Mutator, same_in_floats, sites_of

from portmm.codegen.c_kernel import source
from portmm.codegen.lower import atom_of, lower_program
from portmm.errors import ScheduleError
from portmm.ir.block_program import TileGemm, TileReduce, TileTransfer
from portmm.schedule.block_tiles import candidates, split_loop, tiled, unit_of
from portmm.schedule.text import parse, spell
from portmm.spec.elementwise import exp
from portmm.spec.epilogue import contraction, reduction
from portmm.spec.expr import const
from portmm.target.target import load_target
from portmm.verification.kernels import check_kernel
from portmm.verification.lowered import lowered

SEED = 5


def mlp_kernel():
    x, a, b = loads(3)
    t = contraction(x, a, "k")
    y = contraction(exp(t), b, "r")
    passes = ((TileGemm(t),), (TileGemm(y), TileTransfer(3, y)))
    return one({"x": "mk", "a": "kr", "b": "rn"}, "mn", "mn", "k", passes)


def normed_attention(keys="hnd"):
    """Rows of q times a factor of each, exp without a maximum, rows of v times a factor: one pass along the keys."""
    q, k, v = loads(3)
    dot, norm, factor = contraction(q, k, "d"), contraction(q * q, const(1.0), "d"), contraction(v * v, const(1.0), "e")
    e = exp(dot * norm)
    total, sums = contraction(e, const(1.0), "n"), contraction(e * factor, v, "n")
    passes = (tuple(map(TileGemm, (dot, norm, factor, total, sums))), (TileTransfer(3, sums / total),))
    return one({"q": "hmd", "k": keys, "v": "hne"}, "hme", "hm", "n", passes)


def online_attention(keys="hnd"):
    """Attention with a maximum: sums of earlier keys are rescaled where it grows."""
    q, k, v = loads(3)
    score = contraction(q, k, "d") * const(0.5)
    most = reduction("max", score)
    e = exp(score - most)
    total, sums = contraction(e, const(1.0), "n"), contraction(e, v, "n")
    first = (TileGemm(score.inner[0]), TileReduce(most), TileGemm(total, most), TileGemm(sums, most))
    passes = (first, (TileTransfer(3, sums / total),))
    return one({"q": "hmd", "k": keys, "v": "hne"}, "hme", "hm", "n", passes)


def row_kernel():
    """A product of one row, which has no label."""
    x, w = loads(2)
    y = contraction(x, w, "k")
    return one({"x": "k", "w": "kn"}, "n", "n", "k", ((TileGemm(y),), (TileTransfer(2, y + const(1.0)),)))


RECORDS = {
    "row": row_kernel,
    "lora": lora_kernel, "gated": gated_kernel, "norm": rms_kernel, "mlp": mlp_kernel, "attention": normed_attention,
    "attention, keys along lanes": lambda: normed_attention("hdn"), "online": online_attention,
    "online, keys along lanes": lambda: online_attention("hdn"),
}  # fmt: skip


def program_of(name):
    return RECORDS[name]().steps[0].program


def small(program, target="haswell", columns=0, runs=1):
    """A kernel of small tiles."""
    isa = unit_of(load_target(target))
    s = split_loop(tiled(isa, (2, isa.atom("f32").n), (2, 2), columns, (16, 2, 2)), runs)
    return lower_program(program, s, isa, atom_of(isa, "f32"))[0]


@pytest.mark.parametrize("name", RECORDS)
def test_loops_compute_their_record(name):
    program = program_of(name)
    labels = {x for y in program.operands for x in y.axes}
    sizes = {"h": 2, "m": 3, "n": 5 if "h" in labels else 27, "k": 5, "d": 3, "r": 3, "e": 11}
    extents = {x: n for x, n in sizes.items() if x in labels}
    verdict = check_kernel(program, small(program), extents, seed=SEED)
    assert verdict, verdict
    assert verdict.bits >= 40


SPLIT = {"h": 1, "m": 3, "d": 2, "n": 9, "e": 9, "k": 9, "r": 2}


@pytest.mark.parametrize("name", ["lora", "attention", "online"])
def test_loops_that_are_split_compute_their_record(name):
    """Runs of the loop with maxima and sums of their own, and what combines them: by loops, and by their text."""
    program = program_of(name)
    extents = {x: SPLIT[x] for y in program.operands for x in y.axes}
    kernel = small(program, runs=2)
    assert kernel.name.startswith("portmm_block_split_")
    for text in ("", source(kernel)):
        verdict = check_kernel(program, kernel, extents, seed=SEED, text=text)
        assert verdict, verdict


COMBINED_WRONGLY = {
    "the maximum of the first run": (", tile3, tile3 + run * each, tile3);", ", tile3, tile3, tile3);"),
    "a run that is added twice": ("run = 1; run < runs", "run = 0; run < runs"),
    "sums of a run that are not rescaled": ("tile4, tile4 + run * each, tile7", "tile4, tile4, tile7"),
    "a run that is dropped": ("run < runs", "run < runs - 1"),
    "a run that begins one block late": ("* run, runs) *", "* (run + 1), runs) *"),
    "a run that is not shorter": ("min_(min_(2, batch), loop_last - loop_start)", "min_(2, batch)"),
}


@pytest.mark.parametrize("what", COMBINED_WRONGLY)
def test_runs_that_are_combined_wrongly_are_told(what):
    program, (old, new) = program_of("online"), COMBINED_WRONGLY[what]
    extents = {x: SPLIT[x] for y in program.operands for x in y.axes}
    kernel = small(program, runs=2)
    assert old in source(kernel)
    assert not check_kernel(program, kernel, extents, seed=SEED, text=source(kernel).replace(old, new))


def test_few_tiles_split_their_loop():
    """A tile for two threads has two runs, 3 tiles have 2 each, and where there are many nothing is split."""
    program, target = program_of("online"), load_target("zen5")
    sizes = {"m": 8, "n": 4096, "d": 64, "e": 64}
    for heads, threads, runs in ((1, 2, 2), (3, 2, 2), (2, 4, 2), (2, 2, 1), (64, 2, 1), (1, 1, 1)):
        first = candidates(program, target, sizes | {"h": heads}, threads)[0]
        assert first.parallel.split == runs
        assert parse(spell(first)) == first


def test_a_kernel_of_a_chip():
    """As a certificate has it; columns are shared out among threads."""
    program, target = program_of("lora"), load_target("haswell")
    s, *_, streams = candidates(program, target, dict.fromkeys("mnkr", 4096), 4)
    assert streams.b.along == 2 * streams.nr  # what is prefetched
    for each in (streams, s):
        x = lowered(program, target, parse(spell(each)))
        verdict = x.check(program, seed=SEED)
        assert verdict, verdict
        assert ("prefetch" in source(x.kernel)) == (each is streams)
    assert x.extents["n"] > x.schedule.tile("L2").n > x.schedule.nr


def test_another_record_is_told():
    kernel, extents = small(program_of("gated")), {"m": 3, "n": 19, "k": 5}
    assert not check_kernel(gated_kernel(swap=True).steps[0].program, kernel, extents, seed=SEED)


@pytest.mark.parametrize("name", ["lora", "norm"])
def test_mutants_are_told(name):
    program = program_of(name)
    kernel, extents = small(program), {"m": 3, "n": 19, "k": 5} | ({"r": 3} if name == "lora" else {})
    every, told = sites_of(kernel), 0
    for site in range(0, every, max(1, every // 6)):
        mutator = Mutator(site)
        mutant = mutator.of(kernel)
        verdict = check_kernel(program, mutant, extents, seed=SEED)
        told += not verdict
        assert not verdict or same_in_floats(program, mutant, extents), mutator.what
    assert told >= 2


def test_what_has_no_loops():
    isa = unit_of(load_target("zen5"))
    s, atom = tiled(isa, (8, 48), (8, 4), 0, (48, 4, 4)), atom_of(isa, "f32")
    x, y = loads(2)
    both = contraction(x, y, "k")
    program = one({"x": "mk", "y": "mk"}, "m", "m", "k", ((TileGemm(both),), (TileTransfer(2, both),))).steps[0].program
    with pytest.raises(ScheduleError, match="columns"):
        lower_program(program, s, isa, atom)
    with pytest.raises(ScheduleError, match="masked"):
        unit_of(load_target("neoverse-n1"))


def in_units(name, which):
    """A record of bfloat16, and its kernel on units of tiles by one of its schedules."""
    program = program_of(name)
    program = replace(program, operands=tuple(replace(x, dtype="bf16") for x in program.operands))
    target = load_target("granite_rapids")
    s = candidates(program, target, dict.fromkeys("mnkr", 4096))[which]
    assert (s.isa, s.kc) == ("amx_bf16", (64, 32)[which])
    assert parse(spell(s)) == s
    return program, lowered(program, target, s)


@pytest.mark.parametrize(("name", "which"), [("row", 0), ("lora", 0), ("gated", 1), ("mlp", 0), ("mlp", 1)])
def test_loops_on_units_of_tiles_compute_their_record(name, which):
    """Whole steps and a rest along k, whole and partial tiles of rows and of columns: the text on symbols."""
    program, x = in_units(name, which)
    assert x.extents["k"] == 65
    verdict = x.check(program, seed=SEED, text=source(x.kernel))
    assert verdict, verdict
    assert verdict.bits >= 40


UNITS_WRONGLY = {
    "a second step is not added": ("max_(accumulate, 0 < p)", "accumulate"),
    "a block that is not added": ("0 < loop_start, left", "0, left"),
    "a rest without zeros": ("cleared(", "if (0) cleared("),
    "rows past the first tile are lost": ("r = 0; r < rows", "r = 0; r < 16"),
    "the tiles of columns are swapped": ("TILE_MAC(tdpbf16ps, 0, 2, 3)", "TILE_MAC(tdpbf16ps, 0, 2, 4)"),
}


@pytest.mark.parametrize("what", UNITS_WRONGLY)
def test_units_of_tiles_that_multiply_wrongly_are_told(what):
    program, x = in_units("mlp", 1)
    text, (old, new) = source(x.kernel), UNITS_WRONGLY[what]
    assert old in text, text
    assert not x.check(program, seed=SEED, text=text.replace(old, new))


def test_units_of_tiles_have_no_maxima_and_no_computed_right_factor():
    target = load_target("granite_rapids")
    for name in ("online", "attention", "norm"):
        program = program_of(name)
        program = replace(program, operands=tuple(replace(x, dtype="bf16") for x in program.operands))
        first, *_ = candidates(program, target, dict.fromkeys("hmndek", 4096))
        with pytest.raises(ScheduleError):
            lowered(program, target, first)
    mixed = program_of("mlp")
    mixed = replace(mixed, operands=(replace(mixed.operands[0], dtype="bf16"), *mixed.operands[1:]))
    with pytest.raises(ScheduleError, match="of other types than f32 is of bf16"):
        candidates(mixed, target, dict.fromkeys("mnkr", 4096))
