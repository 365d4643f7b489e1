"""Emitted C under the address and undefined-behaviour sanitizers.

Accesses through inline assembly are out of the sanitizers' sight; guard pages
watch those in the other tests.
"""

from __future__ import annotations

import os

import driver
import numpy as np
import pytest
import support
from kernels_of import folding
from support import HERE, case, require, selection, small

from portmm.lower import lower

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    gcc = require("gcc")
    return driver.compile_driver(tmp_path_factory.mktemp("sanitized"), [gcc], *FLAGS, "-DSANITIZED")


@pytest.mark.parametrize("dtype", support.NUMPY)
@pytest.mark.parametrize("name", HERE)
def test_kernels_are_clean(name, dtype, program, monkeypatch):
    monkeypatch.setenv("CC", require("gcc"))
    target = small(name)
    isa = target.isas[0]
    chosen = [(p, s) for p, found in selection(target, dtype, isa.atom(dtype).n) for s in found]
    chosen = chosen[:: 6 if dtype == "f32" else 20]
    kernels = [lower(s, isa) for _, s in chosen]
    cases = [case(p, seed=i) for i, (p, _) in enumerate(chosen)]
    jobs = [(i, kernel, k, w) for i, (kernel, k) in enumerate(zip(kernels, cases, strict=True)) for w in (1, 3)]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    for (i, _, k, _), got in zip(
        jobs, driver.run([program, *driver.objects(kernels, *FLAGS)], jobs, environment), strict=True
    ):
        k.check(got, chosen[i][1])


@pytest.mark.parametrize("name", HERE)
def test_folding_is_clean(name, program, monkeypatch):
    monkeypatch.setenv("CC", require("gcc"))
    made = [folding(name, *size) for size in ((1, 1, 0), (21, 2, 16), (300, 9, 40), (530, 600, 8))]
    jobs = [(i, kernel, k, w) for i, (kernel, k, _) in enumerate(made) for w in (1, 3)]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    built = driver.objects([kernel for kernel, *_ in made], *FLAGS)
    for (i, *_), got in zip(jobs, driver.run([program, *built], jobs, environment), strict=True):
        np.testing.assert_array_equal(got, made[i][2])
