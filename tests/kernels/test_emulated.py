"""Kernels for machines that are not here, under an emulator, through the real pipeline."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys

import cover
import crossing
import driver
import machines
import numpy as np
import problems
import pytest
import test_fused
from fused_cases import by_rows, every_operation, every_type, gemm_case, rows_case
from kernels_of import folding, fp4_products, packing_of_all_bits
from machines import require, small
from operands import case
from problems import selection
from rows_lowered import lower_rows
from runs import interpret

from portmm.codegen.lower import lower
from portmm.schedule.candidates import candidates
from portmm.target.target import load_isa

pytestmark = pytest.mark.emulated

ISAS = [name for name in machines.ISAS if load_isa(name).arch in crossing.EMULATED]
EVERY_ISA = [name for name in machines.EVERY_ISA if load_isa(name).arch in crossing.EMULATED]
NARROW = [(name, word) for name in EVERY_ISA for word in problems.NARROW if load_isa(name).atom(word)]

CODES = ("f32-u4-f32", "s8-u4-f32")


@pytest.fixture(scope="module")
def foreign_driver(tmp_path_factory):
    """The words that run the driver on a CPU of an ISA's; Debian's gcc for RISC-V is too old for its vectors."""
    with pytest.MonkeyPatch.context() as patch:

        @functools.cache
        def program(arch):
            return driver.compile_driver(tmp_path_factory.mktemp(arch), crossing.program_compiler(arch))

        def words(name):
            isa = load_isa(name)
            patch.setenv(*crossing.build_with(isa))
            return [*crossing.emulator(isa), program(isa.arch)]

        yield words


@pytest.mark.parametrize("dtype", problems.NUMPY)
@pytest.mark.parametrize("name", ISAS)
def test_kernels_agree_with_the_interpreter(name, dtype, foreign_driver):
    """Bit for bit on small integers, within the error bound on floats."""
    target = small(name)
    isa = target.isas[0]
    chosen = [(p, s) for p, found in selection(target, dtype, isa.atom(dtype).n) for s in found]
    # Lengths of one file differ in a constant; each gets other schedules.
    most = dtype == "f32" and name in ("neon", "sve256", "rvv256")
    chosen = cover.some(chosen, ISAS.index(name), 3 if most else 7)
    kernels = [lower(s, isa) for _, s in chosen]
    jobs = []
    for i, ((p, s), kernel) in enumerate(zip(chosen, kernels, strict=True)):
        exact = case(p, seed=i)
        exact.check(interpret(kernel, exact), s)
        assert not exact.bound.any(), "what is within no bound is the same to the bit"
        jobs += [(kernel, exact, 1 + i % 3, s), (kernel, case(p, seed=i, floats=True), 1, s)]
    driver.check(foreign_driver(name), jobs)


@pytest.mark.skipif("riscv64" not in crossing.EMULATED, reason="this machine's vectors have the length that they have")
def test_kernels_for_short_vectors_run_on_longer_ones(foreign_driver):
    """Of RISC-V, whose instructions say how many lanes they are for: masks, sums over lanes and conversions, too."""
    target = small("rvv128")
    jobs = []
    for turn, word in enumerate(("f32", "f64", "bf16", "f16", "s8-s8-s32", "f32-u4-f32")):
        n = target.isas[0].atom(word).n
        posed = (
            [(p, s) for p, found in selection(target, word, n) for s in found]
            if "u4" not in word
            else [(p, s) for p in [problems.coded((5, 21, 45), word, 2 * n, 8)] for s in candidates(p, target)]
        )
        dots = [x for x in posed if x[1].program == "dot"]
        some = cover.some(posed, turn, max(1, len(posed) // 8))[:8] + cover.some(dots, turn, max(1, len(dots)))[:1]
        for i, (p, s) in enumerate(some):
            jobs.append((lower(s, target.isas[0]), case(p, seed=i, floats=True), 1 + i % 2, s))
    assert {s.program for *_, s in jobs} == {"gemm", "dot"}
    words = foreign_driver("rvv128")
    longer = [word.replace("vlen=128", "vlen=512") for word in words]
    assert longer != words
    driver.check(longer, jobs)


@pytest.mark.parametrize(("name", "word"), NARROW)
def test_narrow_types(name, word, foreign_driver):
    """Integers exactly, floats within the bound of the types that round."""
    target = small(name)
    isa = target.isas[0]
    chosen = [(p, s) for p, found in selection(target, word, isa.atom(word).n) for s in found]
    chosen = cover.some(chosen, NARROW.index((name, word)), 16)
    kernels = [lower(s, isa) for _, s in chosen]
    jobs = []
    for i, ((p, s), kernel) in enumerate(zip(chosen, kernels, strict=True)):
        jobs += [(kernel, case(p, seed=i), 1 + i % 3, s), (kernel, case(p, seed=i, floats=True), 1, s)]
    driver.check(foreign_driver(name), jobs)


@pytest.mark.parametrize("name", EVERY_ISA)
def test_scaled_sums_and_codes(name, foreign_driver):
    """Quantised products to their end, and weights of four bits beside floats and beside integers."""
    target = small(name)
    isa = target.isas[0]
    posed = []
    if isa.atom("s8-s8-f32"):
        for i, post in enumerate(("scale+azero", "scale+bzero+bias", "scale+azero+bzero+bias")):
            sizes = ((1, 3 * isa.vector_bytes, 37), (9, 21, 30), (17, 5, 8))
            posed += problems.pose(sizes[i], ("row", "packed", "row"), target, dtype="s8-s8-f32", post=post)[-1:]
        p = problems.pose((7, 19, 45), ("row", "packed", "row"), target, dtype="s8-s8-bf16", post="scale", source="f32")
        posed += p[-1:]
    for i, word in enumerate(("f32-u4-f32", "bf16-u4-bf16", "s8-u4-f32", "s8-u4-bf16")):
        if isa.atom(word):
            post = {"post": "scale"} if word.startswith("s8") else {}
            source = {"source": "f32"} if word == "s8-u4-bf16" else {}
            posed.append(problems.coded((3 + 9 * i, 21, 45), word, 2 * isa.atom(word).n, 8 * i, **post, **source))
    turn = EVERY_ISA.index(name)
    chosen = [(p, s) for i, p in enumerate(posed) for s in cover.some(candidates(p, target), i + turn, 6)]
    driver.check(
        foreign_driver(name), [(lower(s, isa), case(p, seed=i, floats=True), 2, s) for i, (p, s) in enumerate(chosen)]
    )


@pytest.mark.parametrize("name", [name for name in EVERY_ISA if any(map(load_isa(name).atom, CODES))])
def test_floats_of_four_bits(name, foreign_driver):
    """MXFP4 and NVFP4, by the table that an instruction set has for them."""
    target = small(name)
    chosen = [(p, s) for p, s in fp4_products(target) if target.isa(s.isa).atom(p.dtype).e2m1]
    if not chosen:
        pytest.skip("its kernels have no floats of four bits")
    jobs = [
        (lower(s, target.isa(s.isa)), case(p, seed=i, floats=True), 1 + i % 2, s) for i, (p, s) in enumerate(chosen)
    ]
    driver.check(foreign_driver(name), jobs)


@pytest.mark.parametrize("name", ISAS)
def test_codes_are_folded(name, foreign_driver):
    made = [folding(name, *size) for size in ((1, 1, 0), (21, 2, 16), (300, 9, 40), (530, 600, 8))]
    jobs = [(i, kernel, k, 1 + i) for i, (kernel, k, _) in enumerate(made)]
    results = driver.run([*foreign_driver(name), *driver.objects([kernel for kernel, *_ in made])], jobs)
    for (*_, want), got in zip(made, results, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", EVERY_ISA)
def test_bits_are_packed_as_they_are(name, foreign_driver):
    """Of every bfloat16 and float16, signalling NaNs too."""
    words = [word for word in ("bf16", "f16") if load_isa(name).atom(word)]
    made = [packing_of_all_bits(name, word, layout) for word in words for layout in ("row", "col", "any")]
    jobs = [(i, kernel, k, 1 + i % 2) for i, (kernel, k, *_) in enumerate(made)]
    results = driver.run([*foreign_driver(name), *driver.objects([kernel for kernel, *_ in made])], jobs)
    for (*_, want, valid), got in zip(made, results, strict=True):
        np.testing.assert_array_equal(got[valid], want[valid])


@pytest.mark.parametrize("name", EVERY_ISA)
def test_expressions(name, foreign_driver):
    """Fused kernels: every operation and type over rows, reductions, and ends of products of narrow types."""
    isa, words = load_isa(name), ("f32", "f32-s8-f32", "f16", "bf16", "s8-s8-f32", "u8-s8-bf16", "bf16-u4-bf16")
    jobs = []
    for make in (every_operation, every_type, by_rows) if isa.base is None else ():
        kernel = lower_rows(isa, isa.atom("f32"), str(make()))
        n = kernel.atom.n
        for i, size in enumerate(((1, 1), (3, 2 * n + 3), (2, n), (4, 0))):
            f = rows_case(make(), size, 1 + i % 2, i, special=i % 2 > 0)
            jobs.append((kernel, f, 1 + i % 3, kernel.header[1]))
    for at, word in enumerate(x for x in words if isa.atom(x)):
        kind = list(test_fused.EPILOGUES)[at % 3]
        found = list(test_fused.products(name, word, kind))
        for p, s in found[at % len(found) :: len(found)] if word != "f32" else found[:: len(found) // 2]:
            kernel = lower(s, small(name).isa(s.isa))
            f = gemm_case(p, test_fused.EPILOGUES[kind], at, special=at % 2 > 0)
            jobs.append((kernel, f, 1 + at % 3, kernel.header[1]))
    driver.check(foreign_driver(name), jobs)


# Runs in a whole Python under the emulator; prints what it found as JSON.
PRODUCTS = """
import json, sys
import numpy as np
import portmm
from portmm.dispatch import config as settings
rng = np.random.default_rng(0)
worst, said = 0.0, {}
for m, n, k in [(1, 40, 33), (5, 17, 64), (64, 48, 32), (33, 1, 20)]:
    for dtype in (np.float32, np.float64):
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        want = a.astype(float) @ b.astype(float)
        scale = (k + 1) * np.finfo(dtype).eps * (abs(a).astype(float) @ abs(b).astype(float))
        for x, y in ((a, b), (np.asfortranarray(a), b.T.copy().T), (a, portmm.pack(b))):
            got = portmm.matmul(x, y)
            worst = max(worst, float((abs(got - want) / scale).max()))
for name in sys.argv[1:]:
    try:
        with portmm.config(target=name):
            portmm.matmul(a, b)
        said[name] = "ran"
    except portmm.TargetError as error:
        said[name] = str(error)
print(json.dumps({"isa": settings.target().isas[0].name, "worst": worst, "said": said}))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="runs this machine's own Python")
@pytest.mark.parametrize(("model", "isa", "beyond"), [("Haswell", "avx2", "avx512"), ("Nehalem", "sse2", "avx2")])
def test_a_lesser_x86_gets_its_own_kernels(model, isa, beyond):
    """The host's own Python on an older CPU; what that lacks is refused in words, never SIGILL."""
    emulator = require("qemu-x86_64")
    environment = {**os.environ, "OPENBLAS_CORETYPE": model, "OPENBLAS_NUM_THREADS": "1", "PORTMM_NUM_THREADS": "2"}
    environment.pop("PORTMM_TARGET", None)
    done = subprocess.run(
        [emulator, "-cpu", model, sys.executable, "-W", "error", "-c", PRODUCTS, "scalar", "sse2", beyond],
        capture_output=True, text=True, check=False, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["isa"] == isa
    assert found["worst"] < 2
    assert found["said"]["scalar"] == found["said"]["sse2"] == "ran"
    assert beyond in found["said"][beyond]
    assert found["said"][beyond] != "ran"
