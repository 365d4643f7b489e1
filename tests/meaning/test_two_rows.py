"""Atoms of two rows, whose sums are registers: Arm's matrix products of integers and of bf16.

The other tests of narrow types have them too, as they are made from the files; here is what two rows
are special for: the last of an odd number, panels of whole lines of sums, units of eight.
"""

from __future__ import annotations

import copy
import platform
import re
import subprocess

import crossing
import driver
import numpy as np
import operands
import passed
import pytest
import test_compiles
from machines import small
from operands import Case, Laid, case
from problems import pose
from runs import interpret
from test_emulated import foreign_driver  # noqa: F401 - a fixture

from portmm.build import compiler as shipped
from portmm.codegen.c_kernel import source
from portmm.codegen.lower import lower, lower_pack
from portmm.dispatch import cpu_kernels, schedule_choice
from portmm.errors import TargetError
from portmm.host import microbenchmarks
from portmm.ir.interpreter import numpy_type, run
from portmm.ir.nodes import FIELDS
from portmm.schedule.candidates import candidates
from portmm.schedule.text import parse, spell
from portmm.spec.problem import Problem, family
from portmm.target.target import load_isa, load_target, parse_isa

ISAS = ("neon_bfmmla", "neon_smmla")
WORDS = [
    ("neon_bfmmla", "bf16"), ("neon_bfmmla", "bf16-bf16-f32"), ("neon_smmla", "s8-s8-s32"), ("neon_smmla", "u8-s8-s32"),
]  # fmt: skip
MACS = {"s8-s8-s32": r"\bsmmla", "u8-s8-s32": r"\busmmla", "bf16": r"\bbfmmla", "bf16-bf16-f32": r"\bbfmmla"}
LAYOUTS = [
    ("row", "row", "row"), ("row", "packed", "row"), ("col", "col", "row"), ("any", "any", "row"),
    ("col", "packed", "row"),
]  # fmt: skip
SIZES = [
    (1, 1, 1), (1, 9, 16), (2, 4, 8), (3, 1, 9), (5, 13, 7), (12, 8, 24), (13, 12, 33), (15, 17, 41), (27, 5, 64),
    (31, 24, 3), (57, 20, 30),
]  # fmt: skip


def posed(name, word, **more):
    """Problems of all sizes in changing layouts, each with what a machine of small caches may do."""
    target = small(name)
    for i, size in enumerate(SIZES):
        for layouts in (LAYOUTS[i % len(LAYOUTS)], LAYOUTS[(i + 2) % len(LAYOUTS)]):
            for p in pose(size, layouts, target, dtype=word, **more):
                yield i, p, candidates(p, target)


@pytest.mark.thin(7)
@pytest.mark.parametrize("more", [{}, {"batch": 3}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize(("name", "word"), WORDS)
def test_two_rows_mean_the_product(name, word, more):
    for i, p, found in posed(name, word, **more):
        k = case(p, seed=i)
        assert found
        for s in found[i % 2 :: 7 if more else 3]:
            k.check(interpret(lower(s, load_isa(name)), k, 1 + i % 3, shuffle=i), s)
            assert parse(spell(s)) == s


@pytest.mark.parametrize(("name", "word"), WORDS)
def test_every_height(name, word):
    """Slices of even and odd heights, with a panel that is full and one that is not."""
    target, heights = small(name), set()
    for m in range(1, 30):
        p = pose((m, 8 + m % 2, 11), ("row", "packed", "row"), target, dtype=word)[m % 2]
        k = case(p, seed=m)
        for s in candidates(p, target)[:2]:
            heights |= set(s.heights)
            k.check(interpret(lower(s, load_isa(name)), k, 2), s)
    assert heights >= set(range(1, 13))


# -- executed ---------------------------------------------------------------------


@pytest.mark.emulated
@pytest.mark.parametrize(("name", "word"), WORDS)
def test_the_instructions_are_executed(name, word, foreign_driver):  # noqa: F811
    """Every size in the emulator; on a CPU that lacks the feature, the same kernels are illegal."""
    chosen = [(i, p, s) for i, p, found in posed(name, word) for s in found[i % 13 :: 13]]
    kernels = [lower(s, load_isa(name)) for *_, s in chosen]
    jobs = []
    for j, ((i, p, _), kernel) in enumerate(zip(chosen, kernels, strict=True)):
        jobs += [(j, kernel, case(p, seed=i), 1 + i % 3), (j, kernel, case(p, seed=i, floats=True), 1)]
    command = [*foreign_driver(name), *driver.objects(kernels)]
    for (j, _, k, _), got in zip(jobs, driver.run(command, jobs), strict=True):
        k.check(got, chosen[j][2])
    lesser = ["neoverse-n1" if word == "max" else word for word in command]
    with pytest.raises(AssertionError, match="ended with -4"):
        driver.run(lesser, jobs[:1])


@pytest.mark.emulated
@pytest.mark.parametrize("word", ["s8-s8-s32", "u8-s8-s32"])
def test_sums_wrap(word, foreign_driver):  # noqa: F811
    """255 by -128 and their like, over a k whose sum passes 2**31: modulo 2**32, as documented."""
    target, isa = small("neon_smmla"), load_isa("neon_smmla")
    p = pose((3, 5, 70_000), ("row", "row", "row"), target, dtype=word)[0]
    info = np.iinfo(numpy_type(p.types[0]))
    kernel, jobs = lower(candidates(p, target)[0], isa), [case(p), case(p)]
    for k, value in zip(jobs, (info.max, info.min), strict=True):
        k.a[:], k.b[:] = value, -128
    command = [*foreign_driver("neon_smmla"), *driver.objects([kernel])]
    found = driver.run(command, [(0, kernel, k, 1) for k in jobs])
    for k, value, got in zip(jobs, (info.max, info.min), found, strict=True):
        want = np.int64(int(value) * -128 * p.k).astype(np.int32)
        assert (got[k.c.places()] == want).all()


@pytest.mark.emulated
@pytest.mark.parametrize("layout", ["row", "col", "any"])
@pytest.mark.parametrize(("name", "word"), [("neon_bfmmla", "bf16"), ("neon_smmla", "s8-s8-s32")])
def test_packing_is_the_layout_that_is_written_down(name, word, layout, foreign_driver):  # noqa: F811
    """Units of eight bytes, and the sums of columns behind them."""
    kernel, jobs, wanted = None, [], []
    kept = family(cpu_kernels.family(word, load_target("neoverse_v1")))
    kernel = lower_pack(load_isa(name), word, kept.nr, layout)
    for k, n in ((1, 1), (5, kept.nr + 3), (19, 2 * kept.nr), (16, 3 * kept.nr - 1), (64, 5)):
        b = np.random.default_rng(k).integers(-128, 128, (1, k, n)).astype(numpy_type(kept.dtype))
        want = operands.panels_of(b, kept).ravel()
        laid = operands.lay(b, layout, 3)
        fields = {"m": 1, "n": n, "k": k, "batch": 1, "b_k": laid.row, "b_n": laid.col, "b_batch": laid.item}
        fields |= dict.fromkeys(("a_m", "a_k", "a_batch", "c_m", "c_n"), 0) | {"c_batch": want.size // kept.kr}
        to = Laid(np.zeros_like(want), 0, 0, 0, 0, (1, 1, 1))
        like = Case(Problem(1, n, k, word), fields, laid.flat, 0, laid.flat, laid.offset, to, want, want)
        jobs.append((0, kernel, like, 1))
        wanted.append((want, operands.valid_of(kept, k, n)))
    for got, (want, valid) in zip(
        driver.run([*foreign_driver(name), *driver.objects([kernel])], jobs), wanted, strict=True
    ):
        np.testing.assert_array_equal(got[valid], want[valid])


# -- choice -----------------------------------------------------------------------


@pytest.mark.parametrize("chip", ["neoverse_v1", "neoverse_v2"])
@pytest.mark.parametrize(("name", "word"), WORDS)
def test_they_are_chosen_where_they_pay(chip, name, word):
    target = load_target(chip)
    kept = cpu_kernels.family(word, target)
    assert kept == {"neon_smmla": "s8x8k8s", "neon_bfmmla": "bf16x8k4"}[name]
    for b in ("row", "packed"):
        many = Problem(1024, 1024, 1024, word, b=b, family=kept if b == "packed" else "")
        assert schedule_choice.choose(many, target).schedule.isa == name
    one = schedule_choice.choose(Problem(1, 4096, 4096, word, b="packed", family=kept), target)
    assert one.schedule.isa == name, "a packed weight has one layout"
    # To weave eight rows of B for one product each does not pay.
    assert schedule_choice.choose(Problem(1, 4096, 4096, word), target).schedule.isa != name


def test_a_machine_that_lacks_them_takes_none():
    assert cpu_kernels.family("s8-s8-s32", load_target("neoverse_n1")) == "s8x8k4s"
    for p in (Problem(64, 64, 64, "s8-s8-s32"), Problem(64, 64, 64, "bf16")):
        assert not {s.isa for s in candidates(p, load_target("neoverse_n1"))} & set(ISAS)


def test_a_weight_for_dot_products_is_still_read():
    p = Problem(9, 40, 50, "s8-s8-s32", b="packed", family="s8x8k4s")
    assert {s.isa for s in candidates(p, load_target("neoverse_v1"))} == {"neon_dot"}


@pytest.mark.parametrize("b", ["row", "packed"])
def test_one_unit_serves_all_shapes_where_results_must_not_depend_on_them(b):
    target = load_target("neoverse_v1")
    kept = cpu_kernels.family("bf16", target) if b == "packed" else ""
    shapes = [(1, 64, 64), (3, 1, 4096), (16, 5000, 64), (100, 33, 7), (1024, 1024, 1024)]
    posed = [Problem(*x, "bf16", b=b, family=kept, deterministic=True) for x in shapes]
    assert {s.isa for p in posed for s in candidates(p, target)} == {"neon_bfmmla"}


# -- facts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"m": 3}, "m is 1 or 2"),
        ({"k": 8}, "k of k_pack"),
        ({"configure": "C({rows});"}, "configure and release"),
        ({"m": 1, "configure": "C({rows});", "release": "R();"}, "m above 1"),
    ],
)
def test_rows_that_cannot_be_placed_are_refused(fields, complaint):
    isa = load_isa("neon_bfmmla")
    row = {name: getattr(isa.atoms[0], name) for name in isa.atoms[0].__slots__}
    table = {"isa": {"name": "odd", "title": "odd", "base": "neon", "source": "none"}, "atom": [row | fields]}
    with pytest.raises(TargetError, match=complaint):
        parse_isa(copy.deepcopy(table), "odd.toml")


@pytest.mark.parametrize("loop", [microbenchmarks.peak, microbenchmarks.stream])
@pytest.mark.parametrize(("name", "row"), [(name, atom.name) for name in ISAS for atom in load_isa(name).atoms])
def test_the_measured_loops_multiply_every_step(name, row, loop):
    isa = load_isa(name)
    atom = isa.word(row)
    found = loop(isa, atom)
    steps, rng = 3, np.random.default_rng(0)
    types = [numpy_type(x) for x in (atom.a, atom.b, atom.acc)]
    sizes = (found.a * steps * atom.k_pack, found.b * steps * atom.k_pack, found.c)
    a, b, c = (rng.integers(0, 4, n).astype(t) for n, t in zip(sizes, types, strict=True))
    before, fields = c.astype(float), dict.fromkeys(FIELDS, 0) | {"m": 2, "k": steps, "workers": 1}
    run(found.kernel, fields, {"a": (a, 0), "b": (b, 0), "c": (c, 0)})
    rows = a.reshape(-1, atom.m, atom.k_pack).astype(float)
    wide = b.reshape(-1, atom.n, atom.k_pack).astype(float)
    if loop is microbenchmarks.peak:
        rows = rows.reshape(steps, -1, atom.m, atom.k_pack)
        sums = np.einsum("srmu,scnu->rcmn", rows, wide.reshape(steps, -1, atom.n, atom.k_pack))
    else:
        sums = np.einsum("mu,scnu->cmn", rows[0], wide.reshape(steps, -1, atom.n, atom.k_pack))
    np.testing.assert_array_equal(c, before + 2 * sums.ravel())
    assert found.flops == 2 * found.c * atom.k


# -- machine code -----------------------------------------------------------------


@pytest.mark.rest("cross compilers")
@pytest.mark.skipif(platform.machine() == "aarch64", reason="CC would be a cross compiler")
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize(("name", "word"), WORDS)
def test_compilers_have_no_complaint_and_multiply_in_the_loop(name, word, compiler, tmp_path):
    """All of a tile's products in the loop, and, by gcc, whose code is shipped, nothing is spilled."""
    isa, target = load_isa(name), small(name)
    words = crossing.kernel_compiler(isa, compiler)
    for p in pose((64, 64, 64), ("row", "packed", "row"), target, dtype=word):
        s = next(s for s in candidates(p, target) if s.program == "gemm" and s.b.panels == 1)
        path = tmp_path / f"{s.nr}.o"
        own = shipped._OWN["gcc"] if compiler == "gcc" else ()  # what a build passes
        flags = ["-std=gnu11", "-O2", "-fPIC", "-ffp-contract=fast", *own, *test_compiles.WARNINGS, *isa.flags]
        text = source(lower(s, isa))
        if passed.unchanged(text, *words, *flags, passed.version(words[0])):
            continue
        (tmp_path / "kernel.c").write_text(text)
        subprocess.run([*words, *flags, "-c", "kernel.c", "-o", path.name], cwd=tmp_path, check=True)
        for function, instructions in test_compiles.listing(str(path), "aarch64").items():
            if not function.startswith("ukr_"):
                continue
            loops = test_compiles.loops_of(instructions, re.compile(MACS[word]))
            rows, columns = (int(x) for x in re.findall(r"\d+", function)[:2])
            said = " ".join(loops[0])
            assert len(loops) == 1
            # Short loops are written out.
            times, odd = divmod(len(re.findall(MACS[word], said)), -(-rows // 2) * columns // 2)
            assert times
            assert not odd
            assert compiler == "clang" or not [x for x in loops[0] if test_compiles.STACK.search(x)], function
