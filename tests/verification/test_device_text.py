"""Texts of devices, compiled with symbols for floats: threads, barriers, shared memory and exchanges are judged."""

from __future__ import annotations

import json
from dataclasses import replace

import graphs_of as g
import pytest
from test_kernels import FUSED, PRODUCT, softmax
from typer.testing import CliRunner

from portmm.cli.main import app
from portmm.codegen import cuda, opencl
from portmm.codegen.lower import lower_program
from portmm.errors import ScheduleError
from portmm.ir.attention_program import Form, of_attention
from portmm.schedule.candidates import candidates
from portmm.schedule.rows import rows_schedule
from portmm.spec.epilogue import C, Fused, acc
from portmm.spec.problem import Problem
from portmm.target.target import load_isa, load_target
from portmm.verification.certificate import certify
from portmm.verification.kernels import check_kernel
from portmm.verification.lowered import attention_on_device, every_on_device, lowered_on_device

SEED = 5
SIZES = {"m": 5, "n": 9, "k": 33}
ROWS = {"b": 1, "m": 3, "n": 37}


def product_of(program):
    """The kernel of a product by threads."""
    listed = candidates(Problem(7, 12, 9, fused=str(FUSED)), load_target("h100"), (1, 1, 1))
    s = next(x for x in listed if x.program == program and x.parallel.split == 1)
    return lower_program(PRODUCT, replace(s, epilogue=""), load_isa(s.isa))[0]


def rows_of(exchange):
    return lower_program(softmax(""), rows_schedule(64, 32, exchange=exchange), load_isa("simt"))[0]


@pytest.mark.parametrize("language", [cuda, opencl], ids=["cuda", "opencl"])
@pytest.mark.parametrize("program", ["direct", "stream"])
def test_texts_of_products_compute_their_record(program, language):
    kernel = product_of(program)
    verdict = check_kernel(PRODUCT, kernel, SIZES, seed=SEED, text=language.source(kernel))
    assert verdict, verdict
    assert verdict.bits >= 40


@pytest.mark.parametrize(("language", "exchange"), [(cuda, True), (cuda, False), (opencl, False)])
def test_texts_of_rows_compute_their_record(language, exchange):
    kernel = rows_of(exchange)
    verdict = check_kernel(softmax(""), kernel, ROWS, seed=SEED, text=language.source(kernel))
    assert verdict, verdict


@pytest.mark.parametrize("chip", ["h100", "opencl_gpu"])
def test_kernels_of_devices(chip):
    """As the certificate of a program names them."""
    for program in (PRODUCT, softmax("")):
        x = lowered_on_device(program, load_target(chip))
        verdict = check_kernel(program, x.kernel, x.extents, seed=SEED, text=x.text)
        assert verdict, verdict
    with pytest.raises(ScheduleError, match="items and heads"):
        lowered_on_device(g.flash().steps[0].program, load_target(chip))


SCALED = Form(Fused((), ((C, acc() * 0.5),)), "f32", "f32")
ATTENTION = {
    "": "",
    "no barrier": (
        "    __syncthreads();\n    #pragma unroll\n    for (int i = 0; i < 2; ++i) {\n      before",
        "before",
    ),
    "sums that are not rescaled": ("x = x * t22;", ""),
    "weights that are not rescaled": ("sum = sum * t22;", ""),
    "a maximum of the last keys alone": ("largest = *(most + i);\n      #pragma", "largest = -3e+38f;\n      #pragma"),
    "keys beyond the last": ("t4 = t3 < t2;", "t4 = t3 <= t2;"),
    "a tail of keys that is dropped": ("key < end; key += 16", "key + 16 <= end; key += 16"),
    "a tail of queries that is dropped": ("row < m)", "row < m - 1)"),
    "the keys of another head": ("other = head / group", "other = head"),
    "another scale": ("0.5f", "0.25f"),
    "an exponential of another base": ("1.442695f", "1.442f"),
}


@pytest.mark.parametrize("what", ATTENTION)
def test_texts_of_attention(what):
    """Ragged tiles of queries and keys, items, and heads in groups: the text as it is, and wrong ones."""
    program = of_attention(SCALED, "nm"[len(what) % 2])
    x = lowered_on_device(program, load_target("h100"))
    old, new = ATTENTION[what] or ("", "")
    assert old in x.text
    verdict = check_kernel(program, x.kernel, x.extents, seed=SEED, text=x.text.replace(old, new) if old else x.text)
    assert bool(verdict) == (what == ""), verdict
    assert verdict.bits >= 40 or what


def test_texts_of_attention_in_opencl():
    program = of_attention(SCALED)
    x = lowered_on_device(program, load_target("opencl_gpu"))
    verdict = check_kernel(program, x.kernel, x.extents, seed=SEED, text=x.text)
    assert verdict, verdict


def judged(x, program, extents, old="", new=""):
    """The verdict on the texts of attention in which one place, or none, is another one."""
    texts = [x.text, *(y for _, y in x.further)]
    assert not old or sum(old in y for y in texts) == 1
    texts = [y.replace(old, new) for y in texts] if old else texts
    further = [(y, z) for (y, _), z in zip(x.further, texts[1:], strict=True)]
    return check_kernel(program, x.kernel, extents, seed=SEED, text=texts[0], further=further, runs=x.runs)


UNITS = {
    "": ("", ""),
    "a copy that has not arrived": ("copy_async_wait_0();\n    __syncthreads();\n    if (key < end)", "if (key < end)"),
    "another swizzle": ("(q_turn ^ ((step * 2) & 7))", "q_turn"),
    "halves of V": ("v_line = (lane & 15)", "v_line = (lane & 7)"),
    "weights of other keys": ("s[((r * 2 + step * 2 + u) * 2 + h) * 2 + 1]", "s[((r * 2 + step * 2 + u) * 2 + h) * 2]"),
    "scores to the base e": ("0.7213475f", "0.5f"),
    "keys beyond the last": ("t4 = t3 < t2;", "t4 = t3 <= t2;"),
    "maxima of products": ("big = big * by;", ""),
    "products for scores": ("x = fma_f32(x, factor, negated);", "x = x + negated;"),
    "lanes of a row": ("theirs = shuffle_xor_f32(big, 2)", "theirs = shuffle_xor_f32(big, 4)"),
}


@pytest.mark.parametrize("what", UNITS)
def test_texts_of_attention_by_matrix_units(what):
    """Fragments, asynchronous copies, swizzled tiles and powers of two."""
    program = of_attention(SCALED._replace(dtype="bf16", to="bf16"))
    x = attention_on_device(program, load_target("a100"), "mma")
    verdict = judged(x, program, x.extents | {"b": 1, "h": 1}, *UNITS[what])
    assert bool(verdict) == (what == ""), verdict
    assert verdict.bits >= 40 or what


RUNS = {
    "": ("", ""),
    "a run that is dropped": ("x = 0.0f;\n    for (int r = 0;", "x = 0.0f;\n    for (int r = 1;"),
    "keys of two runs": ("min_(n, (slice + 1) * run)", "min_(n, (slice + 1) * run + 1)"),
    "a maximum that is not that of all": (
        "largest = before > largest ? before : largest;\n  }",
        "largest = before;\n  }",
    ),
    "sums of another row": ("sums_at + r * all_rows + block", "sums_at + r * all_rows + block % m"),
}


@pytest.mark.parametrize("what", RUNS)
def test_texts_of_attention_whose_keys_are_split(what):
    """Partial maxima and sums of runs, and the kernel that puts them together."""
    program = of_attention(SCALED)
    x = attention_on_device(program, load_target("h100"), "runs")
    verdict = judged(x, program, x.extents | {"b": 1}, *RUNS[what])
    assert bool(verdict) == (what == ""), verdict


def test_every_kernel_of_attention_on_a_device():
    narrow = of_attention(SCALED._replace(dtype="f16", to="f16"))
    assert [x.what for x in every_on_device(narrow, load_target("h100"))] == ["mma", "mma, runs"]
    assert [x.what for x in every_on_device(of_attention(SCALED), load_target("h100"))] == ["", "runs"]
    x = attention_on_device(narrow, load_target("t4"), "mma, runs")
    verdict = judged(x, narrow, x.extents | {"b": 1, "h": 1})
    assert verdict, verdict
    with pytest.raises(ScheduleError, match="no fragments of f32"):
        attention_on_device(of_attention(SCALED), load_target("h100"), "mma")


WRONG = {
    "no barrier": ("__syncthreads();", ""),
    "no local barrier": ("barrier(CLK_LOCAL_MEM_FENCE);", ""),
    "a wait for fewer copies": ("copy_async_wait_1();", "copy_async_wait_2();"),
    "another stage": ("step % 3;", "step % 2;"),
    "columns that are dropped": ("column < n", "column < n - 1"),
    "columns beyond the last": ("column < n", "column <= n"),
    "a tail that is read": ("(a_at < k_end) ? 4 : 0", "4"),
    "an accumulator that is not reset": ("run_acc[i] = 0;", ";"),
    "another lane": ("shuffle_xor_f32(all_r1, 8)", "shuffle_xor_f32(all_r1, 4)"),
    "no exponential": ("<< 23", "<< 22"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_texts_are_told(what):
    old, new = WRONG[what]
    of_rows = "all" in old or "<<" in old
    kernel, program, extents = (
        (rows_of(exchange=True), softmax(""), ROWS) if of_rows else (product_of("simt"), PRODUCT, SIZES)
    )
    text = (opencl if "LOCAL" in old else cuda).source(kernel)
    assert old in text
    assert not check_kernel(program, kernel, extents, seed=SEED, text=text.replace(old, new))


NEXT_KEYS = "if (key + 16 < end) {\n        #pragma unroll\n        for (int turn = 0; turn < 4; ++turn) {\n"
ONCE_ACCEPTED = {
    "a group of tiles": (PRODUCT, "opencl_gpu", "/ high * 16", "/ high * 15"),
    "a second run of sums": (PRODUCT, "opencl_gpu", "run_begin += run", "run_begin += k"),
    "whole tiles": (PRODUCT, "h100", "(n + 31) >> 5", "(n + 32) >> 5"),
    "the stride of another operand": (PRODUCT, "h100", "row * x1_m", "row * c_m"),
    "registers that are not there": (PRODUCT, "opencl_gpu", "i < 1; ++i) run_acc", "i <= 1; ++i) run_acc"),
    "a row beyond the last": (PRODUCT, "h100", "b_at < k_end", "b_at <= k_end"),
    "keys of the next block": (of_attention(SCALED), "opencl_gpu", NEXT_KEYS, NEXT_KEYS.replace("4", "2")),
    "elements beyond the last": (PRODUCT, "h100", "m - 1) * a_m", "m + 1) * a_m"),
    "shared memory that is not there": (softmax(""), "opencl_gpu", "of_r1[128]", "of_r1[64]"),
    "a row of the greatest length": (softmax(""), "h100", "c < 4", "c < 3"),
    "exponents that may overflow": (softmax(""), "opencl_gpu", "other > all_r0", "other < all_r0"),
}


@pytest.mark.parametrize("what", ONCE_ACCEPTED)
def test_texts_are_told_that_are_wrong_at_some_sizes(what):
    """Wrong at other sizes than the first that are tested, with other strides, or in what a result does not show."""
    program, chip, old, new = ONCE_ACCEPTED[what]
    x = lowered_on_device(program, load_target(chip))
    assert old in x.text
    assert not x._replace(text=x.text.replace(old, new)).check(program, seed=SEED)


def test_further_sizes_of_a_text():
    for program in (PRODUCT, softmax("")):
        assert lowered_on_device(program, load_target("opencl_gpu")).check(program, seed=SEED)


def test_texts_of_a_certificate(tmp_path):
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(certify(g.product(), g.one_product(), "haswell")))
    done = CliRunner().invoke(app, ["verify", str(path), "--device", "h100"])
    assert done.exit_code == 0, done.output
    assert "compiled text of step 0, h100" in done.output
    assert CliRunner().invoke(app, ["verify", str(path), "--device", "h99"]).exit_code != 0
