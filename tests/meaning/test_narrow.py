"""Products of narrow types: candidates in the interpreter, built code against it, and integers at their extremes."""

from __future__ import annotations

import cover
import numpy as np
import operands
import problems
import pytest
import runs
from machines import EVERY_ISA, runs_here, small
from operands import case
from problems import LAYOUTS, pose
from runs import check_built, execute, interpret

from portmm.codegen.lower import lower, lower_pack
from portmm.ir.interpreter import numpy_type
from portmm.schedule.candidates import candidates
from portmm.spec.dtype import types
from portmm.spec.problem import family
from portmm.target.target import load_isa

PLAIN = [(name, word) for name in EVERY_ISA for word in problems.NARROW if load_isa(name).atom(word)]
GROUPS = (0, 8, 32)
POSTS = ("scale", "scale+azero", "scale+bzero+bias", "scale+azero+bzero+bias")


def multiplies(name, word, _):
    return load_isa(name).atom(word)


SCALED = cover.pairs(EVERY_ISA, ("u8-s8-f32", "s8-s8-bf16", "s8-s8-s8", "u8-s8-u8"), POSTS, where=multiplies)
CODES = cover.pairs(
    EVERY_ISA, ("f32-u4-f32", "bf16-u4-bf16"), GROUPS,
    where=lambda name, word, _: multiplies(name, word, _) and (name, word) != ("amx_bf16", "f32-u4-f32"),
)  # fmt: skip
"""Floats by tiles are in test_int4_tiles.py."""


def sizes(lanes):
    """Ragged edges, one row, one column, a k of one, more than one block of each dimension."""
    return [
        (5, lanes + 1, 7), (1, 3 * lanes, lanes + 2), (2 * lanes + 1, 3, 2), (9, 2 * lanes + 3, 4 * lanes + 3),
        (3, 1, 9), (4, lanes, 1), (17, 2 * lanes, 31),
    ]  # fmt: skip


def posed(target, word, layouts, size, **more):
    """Problems of a size and layouts; none where the types cannot lie so."""
    if layouts[2] == "col" and word.startswith("u8"):
        return []
    return pose(size, layouts, target, dtype=word, **more)


def chosen(target, word, **more):
    """Problems of all layouts, each with some of its candidates, so that all kinds come up."""
    lanes = target.isas[0].atom(word).n
    seen = set()
    for i, layouts in enumerate(LAYOUTS):
        post = more.get("post", "")
        if ("azero" in post and layouts[1] != "packed") or (post and layouts[2] == "col"):
            continue
        for p in posed(target, word, layouts, sizes(lanes)[i % 7], **more)[-1:]:
            found = []
            for s in candidates(p, target):
                kind = (problems.shape_of(s), p.m > s.mr)
                if kind not in seen:
                    seen.add(kind)
                    found.append(s)
            yield p, found


@pytest.mark.thin(4)
@pytest.mark.parametrize(("name", "word"), PLAIN)
def test_every_isa_means_the_product(name, word):
    target = small(name)
    for i, (p, found) in enumerate(chosen(target, word)):
        k = case(p, seed=i)
        for s in found[i % 2 :: 2]:
            k.check(interpret(lower(s, target.isa(s.isa)), k, 1 + i % 3, shuffle=i), s)


@pytest.mark.thin(5)
@pytest.mark.parametrize(("name", "word"), [x for x in PLAIN if runs_here(x[0])])
def test_built_kernels_are_the_product(name, word):
    """On small integers, exactly; on floats, within the bound of the types that round."""
    target = small(name)
    every = [(p, s) for p, found in chosen(target, word) for s in found]
    # The interpreter sees all kinds on each set of instructions; compilers see other kinds of each.
    built = cover.some(every, PLAIN.index((name, word)), min(9, len(every) // 3))
    for i, (p, s) in enumerate(built):
        kernel = lower(s, target.isa(s.isa))
        for floats in (False, True):
            k = case(p, seed=i, floats=floats)
            check_built(kernel, k, 1 + i % 2, s, end=bool(i % 2))
    assert len(built) >= 3


@pytest.mark.thin(4)
@pytest.mark.parametrize(("name", "word", "post"), SCALED)
def test_sums_are_scaled(name, word, post):
    target, turn = small(name), SCALED.index((name, word, post))
    for i, (p, found) in enumerate(chosen(target, word, post=post)):
        k = case(p, seed=i, floats=True)
        for j, s in enumerate(found[i % 3 :: 3]):
            kernel = lower(s, target.isa(s.isa))
            k.check(interpret(kernel, k, 2, shuffle=i), s)
            if runs_here(name) and j == 0 and (cover.ALL or i % 3 == turn % 3):
                check_built(kernel, k, 2, s)


@pytest.mark.thin(5)
@pytest.mark.parametrize("source", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", [x for x in EVERY_ISA if load_isa(x).atom("s8-s8-f32")])
def test_rows_are_quantised_on_the_way(name, source):
    target = small(name)
    isa = target.isas[0]
    lanes = isa.atom("s8-s8-f32").n
    for i, size in enumerate(sizes(lanes)):
        layout = ("row", "packed", "col")[i % 3]
        p = posed(target, "s8-s8-f32", ("row", layout, "row"), size, post="scale", source=source)[-1]
        k = case(p, seed=i, floats=True)
        found = candidates(p, target)
        for s in found[i % 3 :: 3]:
            kernel = lower(s, isa)
            k.check(interpret(kernel, k, 1 + i % 3, shuffle=i), s)


@pytest.mark.thin(4)
@pytest.mark.parametrize(("name", "word", "group"), CODES)
def test_codes_are_multiplied(name, word, group):
    target = small(name)
    lanes = target.isas[0].atom(word).n
    for i, size in enumerate([(1, lanes + 1, 37), (3, 2 * lanes, 64), (9, 1, 8), (2, 5, 3), (20, 3 * lanes, 45)]):
        p = problems.coded(size, word, 2 * lanes, group, a=("row", "col")[i % 2], symmetric=i in {1, 4})
        k = case(p, seed=i, floats=True)
        atom = target.isas[0].atom(word)
        found = [s for s in candidates(p, target) if s.b.packed or not atom.tiled]
        ways = {True} if atom.tiled else {False} if atom.takes_int4 else {True, False}
        assert {s.b.packed for s in found} == ways or p.m > 16
        for s in found[i % 2 :: 2]:
            kernel = lower(s, target.isa(s.isa))
            k.check(interpret(kernel, k, 1 + i % 2), s)
            if runs_here(name) and s is found[i % 2]:
                check_built(kernel, k, 2, s)


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", [x for x in EVERY_ISA if (atom := load_isa(x).atom("s8-u4-f32")) and not atom.tiled])
@pytest.mark.parametrize("group", GROUPS)
def test_codes_by_codes(name, group):
    """Eight bits by four: sums of a group in integers, for any number of rows, given as codes or as floats."""
    target = small(name)
    lanes = target.isas[0].atom("s8-u4-f32").n
    kinds = [{"post": "scale"}, {"post": "scale+bias"}, {"post": "scale", "source": "f32"}]
    for i, size in enumerate([(1, lanes + 1, 37), (3, 2 * lanes, 64), (9, 1, 8), (2, 5, 3), (40, 3 * lanes, 45)]):
        layout, to = ("row" if i % 3 == 2 else ("row", "col")[i % 2]), ("f32", "bf16")[i % 2]
        p = problems.coded(size, f"s8-u4-{to}", 2 * lanes, group, a=layout, symmetric=i in {1, 4}, **kinds[i % 3])
        k = case(p, seed=i, floats=True)
        found = candidates(p, target)
        built = cover.some(found, i + GROUPS.index(group), 3)  # other groups build the others
        for s in found:
            kernel = lower(s, target.isa(s.isa))
            k.check(interpret(kernel, k, 1 + i % 2), s)
            if runs_here(name) and s in built:
                check_built(kernel, k, 2, s)


@pytest.mark.thin(5)
@pytest.mark.parametrize("layout", ["row", "col", "any"])
@pytest.mark.parametrize("name", [x for x in EVERY_ISA if runs_here(x)])
def test_packing_is_the_layout_that_is_written_down(name, layout):
    """Panels with their column sums, from every layout, ragged on both sides."""
    isa = load_isa(name)
    for word in ("s8-s8-s32", "bf16", "f16", "f32-s8-f32"):
        atom = isa.atom(word)
        if atom is None:
            continue
        kept = family(problems.packed_families(small(name), word)[-1])
        for k, n in ((1, 1), (5, kept.nr + 3), (4 * atom.n + 3, 2 * kept.nr), (2 * atom.n, 3 * kept.nr - 1)):
            rng = np.random.default_rng(k)
            dtype = numpy_type(types(word)[1])
            b = rng.integers(-128, 128, (1, k, n)).astype(dtype)
            want = operands.panels_of(b, kept).ravel()
            got = runs.packed_by(lower_pack(isa, word, kept.nr, layout), operands.lay(b, layout, 3), want, kept, k, n)
            valid = operands.valid_of(kept, k, n)
            np.testing.assert_array_equal(got[valid], want[valid])


@pytest.mark.parametrize(("name", "word"), [x for x in PLAIN if runs_here(x[0]) and x[1].endswith("s32")])
def test_extremes_are_exact(name, word):
    """255 by -128 and their like, over a k whose sum passes 2**31: modulo 2**32, as documented."""
    target = small(name)
    lanes = target.isas[0].atom(word).n
    p = posed(target, word, ("row", "row", "row"), (3, lanes + 1, 70_000))[0]
    k = case(p)
    low, high = np.iinfo(numpy_type(p.types[0])).min, np.iinfo(numpy_type(p.types[0])).max
    k.b[:] = -128
    for value in (high, low):
        k.a[:] = value
        want = np.int64(value) * -128 * p.k
        for s in candidates(p, target)[:3]:
            kernel = lower(s, target.isa(s.isa))
            if not runs.called_as_before(kernel, k, 1):
                got = execute(kernel, k)[k.c.places()]
                assert (got == np.int64(want).astype(np.int32)).all(), s
