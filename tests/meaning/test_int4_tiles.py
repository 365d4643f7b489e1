"""Int4 weights that are converted in tiles: in the interpreter, with tiles in C, and as machine code for AMX."""

from __future__ import annotations

import machines
import numpy as np
import problems
import pytest
import runs
from kernels_of import packed_parts
from machines import small
from operands import case
from runs import check_built, interpret
from test_amx import LINES_RUN, shimmed

from portmm.codegen.lower import lower
from portmm.ir.interpreter import numpy_type
from portmm.schedule.candidates import candidates
from portmm.schedule.text import parse, spell
from portmm.spec.dtype import parts
from portmm.target.target import load_isa, load_target

WORDS = [
    ("amx_bf16", "bf16-u4-bf16", {}), ("amx_bf16", "bf16-u4-f32", {}), ("amx_bf16", "f32-u4-f32", {}),
    ("amx_bf16", "f16-u4-f16", {}), ("amx_int8", "s8-u4-f32", {"post": "scale"}),
    ("amx_int8", "s8-u4-bf16", {"post": "scale", "source": "f32"}),
]  # fmt: skip
SIZES = [(1, 33, 37), (3, 97, 130), (17, 24, 70), (33, 1, 8), (34, 10, 193)]
NUMBERS = [{}, {"symmetric": True}, {"e2m1": True}, {"symmetric": True, "half": True}]


def in_tiles(p, target):
    """The candidates that convert values in tiles."""
    return [s for s in candidates(p, target) if s.program == "tiles" and not s.b.packed]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("turn", "name", "word", "more"), [(i, *x) for i, x in enumerate(WORDS)])
def test_products(turn, name, word, more):
    target, kinds = small(name), set()
    for i, size in enumerate(SIZES):
        layout = "row" if "source" in more else ("row", "col", "any")[i % 3]
        group, numbers = (0, 64, 128)[(i + turn) % 3], NUMBERS[(i + turn // 2) % 4]
        p = problems.coded(size, word, 32, group, a=layout, **numbers, **more)
        found, k = in_tiles(p, target), case(p, seed=i, floats=True)
        kinds |= {(s.mr, s.b.panels) for s in found}
        for s in found:
            assert parse(spell(s)) == s
            kernel = lower(s, load_isa(name))
            k.check(interpret(kernel, k, 1 + i % 2), s)
            if LINES_RUN:
                check_built(kernel, k, 1 + i % 2, s, code=shimmed)
            if machines.runs_here(name):
                check_built(kernel, k, 1 + i % 2, s, code=runs.load, end=True)
    assert kinds == {(16, 2), (32, 1)}


@pytest.mark.parametrize(("nr", "panels"), [(16, {4, 2}), (64, {1}), (32, {2, 1})])
def test_panels_of_other_widths(nr, panels):
    """Four tiles of sums, of as many panels as that takes."""
    target, p = small("amx_bf16"), problems.coded((40, 150, 200), "f32-u4-f32", nr, 64)
    found, k = in_tiles(p, target), case(p, floats=True)
    assert {s.b.panels for s in found} == panels
    for s in found:
        k.check(interpret(lower(s, load_isa("amx_bf16")), k), s)


def test_groups_are_whole_steps_and_results_that_may_not_depend_on_rows_come_from_vectors():
    target = load_target("sapphire_rapids")
    assert in_tiles(problems.coded((8, 64, 200), "f32-u4-f32", 32, 64), target)
    assert not in_tiles(problems.coded((8, 64, 200), "f32-u4-f32", 32, 24), target)
    assert not in_tiles(problems.coded((8, 64, 200), "f32-u4-f32", 32, 64, deterministic=True), target)


@pytest.mark.parametrize(("storage", "count"), [("f32", 3), ("f16", 2), ("bf16", 1)])
def test_elements_are_sums_of_their_parts(storage, count):
    assert parts(storage, "bf16") == count
    if count == 1:
        return
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((5, 77)) * 2.0 ** rng.integers(-90 if storage == "f32" else -14, 10, (5, 77))
    a = numbers.astype(numpy_type(storage))
    for layout in ("row", "col"):
        got = packed_parts(load_isa("amx_bf16"), a, layout, storage)
        assert got.shape == (5, count, 96)
        np.testing.assert_array_equal(got.sum(axis=1)[:, :77], a.astype(np.float64))
        assert not got[:, :, 77:].any()


def test_infinities_and_nans_are_the_first_part():
    a = np.array(
        [[np.inf, -np.inf, np.nan, np.finfo(np.float32).max, -np.finfo(np.float32).max, 0.0, -0.0]], np.float32
    )
    got = packed_parts(load_isa("amx_bf16"), a, "row", "f32")
    np.testing.assert_array_equal(got[0, 0, :3], a[0, :3])
    assert not got[0, 1:, :3].any()
    np.testing.assert_array_equal(got.sum(axis=1)[0, 3:7], a[0, 3:])
