"""The text of a kernel, compiled with symbols for floats: it computes its record, and texts that are wrong do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_block_kernels as blocks
from test_kernels import softmax

from portmm.codegen.c_kernel import source
from portmm.ir.attention_program import Form, of_attention
from portmm.ir.block_program import program_of
from portmm.ir.product_program import of_product
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_attention import attention_schedule
from portmm.spec.elementwise import exp
from portmm.spec.epilogue import C, Fused, Operand, acc, load, reduction
from portmm.spec.problem import Problem
from portmm.target.target import load_target
from portmm.verification import emitted_text
from portmm.verification.kernels import check_kernel
from portmm.verification.lowered import PRODUCTS, VECTORS, lowered
from portmm.verification.values import UnsupportedError

SEED = 5
LORA = {"m": 3, "n": 19, "k": 5, "r": 3}
ATTENTION = {"h": 1, "m": 3, "d": 3, "n": 3, "e": 9}


def verdict_of(name, extents, old="", new=""):
    """The verdict on a text in which one place, or none, is another one."""
    program = blocks.program_of(name)
    kernel = blocks.small(program)
    text = source(kernel)
    assert not old or old in text
    return check_kernel(program, kernel, extents, seed=SEED, text=text.replace(old, new) if old else text)


@pytest.mark.parametrize(("name", "extents"), [("lora", LORA), ("online", ATTENTION)])
def test_texts_compute_their_record(name, extents):
    verdict = verdict_of(name, extents)
    assert verdict, verdict
    assert verdict.bits >= 40


@pytest.mark.parametrize("chip", ["zen5", "neoverse-n1"])
def test_maxima_masks_and_shuffles(chip):
    """A softmax over rows: selections by bits, helpers of sums and maxima, masked vectors of two instruction sets."""
    program = softmax()
    x = lowered(program, load_target(chip))
    verdict = x.check(program, seed=SEED, text=source(x.kernel))
    assert verdict, verdict


WRONG = {
    "mask off by one": ("min_(columns, 8)))", "min_(columns + 1, 8)))"),
    "accumulator that is not reset": ("0 < loop_start);", "1);"),
    "accumulator that is reset in each trip": ("x4_b, 0 < loop_start);", "x4_b, 0);"),
    "ragged columns that are dropped": ("j = width; j < columns; j", "j = width; j < width; j"),
    "ragged rows that are dropped": ("r < rows; ++r", "r < rows - 1; ++r"),
    "a last trip that is not shorter": ("min_(min_(2, n), n - loop_start)", "min_(2, n)"),
    "another row": ("c1_0 += a1 * b0", "c1_0 += a0 * b0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_texts_are_told(what):
    assert not verdict_of("lora", LORA, *WRONG[what])


def test_a_text_that_does_not_end_is_told(monkeypatch):
    """And a compiler that does not leaves a text uncompiled, whose loops are interpreted then."""
    monkeypatch.setattr(emitted_text, "LIMIT", 5.0)
    verdict = verdict_of("lora", LORA, "r < rows; ++r", "r < rows; r += 0")
    assert "does not end" in verdict.reason or "takes longer" in verdict.reason, verdict
    monkeypatch.setattr(emitted_text, "LIMIT", 0.001)
    verdict = verdict_of("lora", LORA, "0 < loop_start);", "2);")
    assert verdict.reason.startswith("UncompiledError: the compiler takes longer"), verdict


@pytest.mark.parametrize(("old", "new"), [("0 < loop_start) {", "0) {"), ("<< 23", "<< 22")])
def test_a_softmax_without_its_rescale_and_no_exponential_are_told(old, new):
    assert not verdict_of("online", ATTENTION, old, new)


def narrow(what, dtype="bf16"):
    """A record of bfloat16."""
    if what == "product":
        operands = (Operand("f32", "n"), Operand(dtype, "mn"))
        fused = Fused(operands, ((C, acc() * load(0, "f32")), (1, acc() - 1.0)))
        return of_product(Problem(64, 250, 256, dtype, fused=str(fused)))
    if what == "rows":
        x = load(0, dtype)
        w = exp(x - reduction("max", x))
        return program_of(Fused((Operand(dtype, "bmn"),) * 2, ((1, w / reduction("add", w)),)), "L1")
    return of_attention(Form(Fused((), ((C, acc() * 0.5),)), dtype, dtype), what[-1])


@pytest.mark.parametrize("chip", ["zen5", "haswell"])
@pytest.mark.parametrize("what", ["product", "rows", "attention along n", "attention along m"])
def test_texts_of_bfloat16(what, chip):
    """Pairs of elements, their products, widening, rounding, and the stores of a ragged tail."""
    program = narrow(what)
    x = lowered(program, load_target(chip))
    verdict = x.check(program, seed=SEED, text=source(x.kernel))
    assert verdict, verdict
    assert verdict.bits >= 40


def test_a_row_of_bfloat16():
    """Its sums are converted to bfloat16 one at a time, not as vectors."""
    target, p = load_target("zen4"), Problem(1, 4096, 64, "bf16", b="col")
    s = next(s for s in candidates(p, target, 1) if s.program == "dot" and s.isa == "avx512")
    a, b, c = of_product(p).operands
    program = replace(of_product(p), operands=(a, replace(b, axes="nk"), c))
    x = lowered(program, target, s, 1)
    text = source(x.kernel)
    assert x.check(program, seed=SEED, text=text)
    for old, new in (("0x7fff + (v.u", "0x3fff + (v.u"), ("v.u >> 16 | 0x40", "v.u >> 16")):
        assert old in text
        assert not x.check(program, seed=SEED, text=text.replace(old, new))


def test_attention_of_bfloat16_by_its_unit():
    isa = next(x for x in load_target("zen5").isas if x.name == "avx512bf16")
    atom = isa.atom("bf16-bf16-f32")
    for what, unit, lanes in (("n", VECTORS, isa.vector("f32", atom.n)), ("m", PRODUCTS, atom)):
        program = narrow(what)
        x = lowered(program, load_target("zen5"), attention_schedule(isa, lanes, packs=what == "m"), 0, unit)
        text = source(x.kernel)
        assert ("vdpbf16ps" in text) == (what == "m")
        verdict = x.check(program, seed=SEED, text=text)
        assert verdict, verdict


NARROW = {
    "rounding to another place": ("zen5", "rows", "0x7fff", "0x3fff"),
    "rounding down": ("zen5", "rows", "& ~nan) | ((u | 0x400000) & nan)", "& ~nan) | (u & nan)"),
    "a rounded vector that is another": ("zen5", "product", '(halves) : "v"(t1)', '(halves) : "v"(t2)'),
    "a NaN that is none": ("zen5", "rows", "(u | 0x400000) & nan", "(u | 0x200000) & nan"),
    "halves of pairs exchanged": ("zen5", "product", "= x | y << 16;", "= y | x << 16;"),
    "a tail of k that is no zero": ("zen5", "product", "* 2 + e) = 0;", "* 2 + e) = *a;"),
    "the upper half alone": ("haswell", "attention along m", "<< 16}; a1", "<< 15}; a1"),
    "a column that is not stored": ("haswell", "product", "lane < kept; ++lane", "lane < kept - 1; ++lane"),
    "a column beyond the last": ("haswell", "rows", "lane < kept; ++lane", "lane <= kept; ++lane"),
}


@pytest.mark.parametrize("what", NARROW)
def test_wrong_texts_of_bfloat16_are_told(what):
    chip, name, old, new = NARROW[what]
    program = narrow(name)
    x = lowered(program, load_target(chip))
    text = source(x.kernel)
    assert old in text
    assert not x.check(program, seed=SEED, text=text.replace(old, new))


def test_what_has_no_meaning():
    with pytest.raises(UnsupportedError, match="headers"):
        emitted_text.cpp("#include <arm_sve.h>\n")
    with pytest.raises(UnsupportedError, match="vrsqrt14ps"):
        emitted_text.cpp('__asm__("vrsqrt14ps %1, %0" : "=v"(d) : "v"(a));')
