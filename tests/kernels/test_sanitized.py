"""Emitted C under the address and undefined-behaviour sanitizers.

Accesses through inline assembly are out of the sanitizers' sight; guard pages
watch those in the other tests.
"""

from __future__ import annotations

import os

import driver
import numpy as np
import problems
import pytest
from fused_cases import by_rows, epilogues, every_operation, every_type, gemm_case, rows_case
from kernels_of import folding
from machines import HERE, require, small
from operands import case
from problems import selection
from rows_lowered import lower_rows

from portmm.codegen.lower import lower
from portmm.schedule.candidates import candidates
from portmm.target.target import load_isa

pytestmark = pytest.mark.rest("sanitizers")

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O0")
"""Nothing is optimised away that a sanitizer could look at, and compiling takes a tenth of the time."""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    gcc = require("gcc")
    return driver.compile_driver(tmp_path_factory.mktemp("sanitized"), [gcc], *FLAGS, "-DSANITIZED")


@pytest.mark.parametrize("dtype", problems.NUMPY)
@pytest.mark.parametrize("name", HERE)
def test_kernels_are_clean(name, dtype, program, monkeypatch):
    monkeypatch.setenv("CC", require("gcc"))
    target = small(name)
    isa = target.isas[0]
    chosen = [(p, s) for p, found in selection(target, dtype, isa.atom(dtype).n) for s in found]
    chosen = chosen[:: 6 if dtype == "f32" else 20]
    kernels = [lower(s, isa) for _, s in chosen]
    cases = [case(p, seed=i) for i, (p, _) in enumerate(chosen)]
    jobs = [(x, k, w, s) for x, k, (_, s) in zip(kernels, cases, chosen, strict=True) for w in (1, 3)]
    driver.check([program], jobs, *FLAGS, env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})


@pytest.mark.parametrize("name", HERE)
def test_folding_is_clean(name, program, monkeypatch):
    monkeypatch.setenv("CC", require("gcc"))
    made = [folding(name, *size) for size in ((1, 1, 0), (21, 2, 16), (300, 9, 40), (530, 600, 8))]
    jobs = [(i, kernel, k, w) for i, (kernel, k, _) in enumerate(made) for w in (1, 3)]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    built = driver.objects([kernel for kernel, *_ in made], *FLAGS)
    for (i, *_), got in zip(jobs, driver.run([program, *built], jobs, environment), strict=True):
        np.testing.assert_array_equal(got, made[i][2])


@pytest.mark.parametrize("name", HERE)
def test_expressions_are_clean(name, program, monkeypatch):
    monkeypatch.setenv("CC", require("gcc"))
    target, isa = small(name), load_isa(name)
    n, jobs = isa.atom("f32").n, []
    for make in (every_operation, every_type, by_rows):
        kernel = lower_rows(isa, isa.atom("f32"), str(make()))
        for i, size in enumerate(((1, 1), (3, 2 * n + 3), (2, n))):
            jobs.append((kernel, rows_case(make(), size, 1 + i % 2, i), 1 + i, kernel.header[1]))
    for i, fused in enumerate(epilogues().values()):
        p = problems.pose((9, 2 * n + 3, 40), ("row", "row", "row"), target, fused=str(fused))[-1]
        kernel = lower(candidates(p, target)[i], isa)
        jobs.append((kernel, gemm_case(p, fused, i), 2, kernel.header[1]))
    driver.check([program], jobs, *FLAGS, env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})
