"""The text of a kernel, compiled with symbols for floats: it computes its record, and texts that are wrong do not."""

from __future__ import annotations

import pytest
import test_block_kernels as blocks
from test_kernels import softmax

from portmm.codegen.c_kernel import source
from portmm.target.target import load_target
from portmm.verification import emitted_text
from portmm.verification.kernels import check_kernel
from portmm.verification.lowered import lowered
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
    verdict = check_kernel(program, x.kernel, x.extents, seed=SEED, text=source(x.kernel))
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


@pytest.mark.parametrize(("old", "new"), [("0 < loop_start) {", "0) {"), ("<< 23", "<< 22")])
def test_a_softmax_without_its_rescale_and_no_exponential_are_told(old, new):
    assert not verdict_of("online", ATTENTION, old, new)


def test_what_has_no_meaning():
    with pytest.raises(UnsupportedError, match="headers"):
        emitted_text.cpp("#include <arm_sve.h>\n")
    with pytest.raises(UnsupportedError, match="vrsqrt14ps"):
        emitted_text.cpp('__asm__("vrsqrt14ps %1, %0" : "=v"(d) : "v"(a));')
