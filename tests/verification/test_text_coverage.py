"""Checks of emitted texts run all of them: a line that no call of a check runs could say anything."""

from __future__ import annotations

import math
import re
import subprocess

import pytest
import test_block_kernels as blocks
import test_kernels as kernels
import test_tile_text as tiles
from machines import require

from portmm.build.compiler import find_compiler
from portmm.codegen.c_kernel import source
from portmm.schedule.block_tiles import candidates
from portmm.target.target import load_target
from portmm.verification import emitted_text
from portmm.verification.calls import Shape
from portmm.verification.kernels import _called, _Texts
from portmm.verification.lowered import lowered

TARGET = load_target("sapphire_rapids")


def of_block(name):
    program = blocks.program_of(name)
    sizes = {x: 64 for y in program.operands for x in y.axes}
    return program, lowered(program, TARGET, candidates(program, TARGET, sizes, 1)[0])


def of_record(program):
    return program, lowered(program, TARGET)


KERNELS = {
    "lora": (lambda: of_block("lora"), 0),
    "gated": (lambda: of_block("gated"), 0),
    "norm": (lambda: of_block("norm"), 0.01),
    "online": (lambda: of_block("online"), 0.1),
    "product": (lambda: of_record(kernels.PRODUCT), 0.42),
    "few queries": (lambda: of_record(kernels.scaled_attention("n")), 0.1),
    "many queries": (lambda: of_record(kernels.scaled_attention("m")), 0.14),
    "tiles": (lambda: tiles.of("attention"), 0.04),
    "tiles by factors": (lambda: tiles.of("factors"), 0.04),
}
"""Kernels, with the largest share of lines that remain: of schedules that call them otherwise, and of other widths."""


@pytest.mark.rest("compilers")
@pytest.mark.parametrize("name", KERNELS)
def test_lines_of_texts_are_run(name, tmp_path):
    make, most = KERNELS[name]
    program, x = make()
    text = source(x.kernel)
    texts = _Texts(x.kernel, text, (), 1, math.inf)
    calls = [_called(program, texts, y) for y in (Shape(x.extents), *x.more)]
    path = tmp_path / "text.cpp"
    path.write_text(emitted_text.program(text, x.kernel, [(y.call.ints, y.arrays) for y in calls]))
    words = [*find_compiler().argv, *emitted_text._FLAGS, "--coverage", str(path), "-o", str(tmp_path / "text")]
    subprocess.run(words, check=True, cwd=tmp_path)
    for i in range(len(calls)):
        subprocess.run([str(tmp_path / "text"), *["-"] * i], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    (counts,) = tmp_path.glob("*.gcda")
    listed = subprocess.run(
        [require("gcov"), "-t", str(counts)], check=True, cwd=tmp_path, capture_output=True, text=True
    )
    lines = listed.stdout.splitlines()
    begin = next(i for i, y in enumerate(lines) if "portmm_args" in y)
    lines = lines[begin : next(i for i, y in enumerate(lines) if "namespace call_0" in y)]
    ran = sum(bool(re.match(r"\s*\d+\*?:", y)) for y in lines)
    missed = [y for y in lines if y.strip().startswith("#####") and "__builtin_trap" not in y]
    assert ran > 100
    assert len(missed) <= most * ran, "\n".join(missed)
