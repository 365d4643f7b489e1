"""The shared library for programs without Python: by ctypes, by the examples in C and Rust, and for AArch64."""

import ctypes
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from portmm.build.compiler import find_compiler
from portmm.errors import NoCompilerError
from portmm.host.detect import host
from portmm.ops import bundle_build, bundle_shapes, c_library

SHAPES = """
1-12,40 64 96 f32 row
1,40 64 96 f32 col
1,40 64 96 f32 packed
1,9,40 64 96 s8-s8-s32 packed
"""
EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = ((40, 64, 96), (1, 64, 96), (37, 101, 55), (130, 3, 7), (1, 1, 1))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        find_compiler()
    except NoCompilerError:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("library")
    maker = bundle_build.Maker()
    bundle_build.add_shapes(maker, bundle_shapes.shapes_of(SHAPES), [host()], (1, 2))
    return c_library.write(maker, folder, os.uname().machine)


def test_products_of_any_size(library):
    lib = ctypes.CDLL(str(library))
    lib.portmm_machine.restype = ctypes.c_char_p
    lib.portmm_packed_bytes.restype = ctypes.c_long
    assert lib.portmm_machine().decode() == host().name
    long, rng = ctypes.c_long, np.random.default_rng(0)

    def call(function, words, m, n, k, a, a_steps, b, b_steps, c):  # noqa: PLR0917 - as the library's
        operands = (a.ctypes.data_as(ctypes.c_void_p), *map(long, a_steps), b.ctypes.data_as(ctypes.c_void_p))
        into = (c.ctypes.data_as(ctypes.c_void_p), long(n))
        return function(words, long(m), long(n), long(k), *operands, *map(long, b_steps), *into)

    for threads in (1, 2):
        lib.portmm_set_num_threads(long(threads))
        for m, n, k in SIZES:
            for words, dtype, to in ((b"f32", np.float32, np.float32), (b"s8-s8-s32", np.int8, np.int32)):
                a, b = (rng.integers(-8, 8, x).astype(dtype) for x in ((m, k), (k, n)))
                expected = a.astype(to) @ b.astype(to)
                if dtype == np.float32:
                    c = np.empty((m, n), to)
                    assert call(lib.portmm_matmul, words, m, n, k, a, (k, 1), b, (n, 1), c) == 0
                    np.testing.assert_array_equal(c, expected)
                    across, c = np.ascontiguousarray(b.T), np.empty((m, n), to)
                    assert call(lib.portmm_matmul, words, m, n, k, a, (k, 1), across, (1, k), c) == 0
                    np.testing.assert_array_equal(c, expected)
                size = lib.portmm_packed_bytes(words, long(k), long(n))
                memory = np.full(size + 64, 99, np.int8)
                packed = memory[-memory.ctypes.data % 64 :]
                for array, steps in ((b, (n, 1)), (np.ascontiguousarray(b.T), (1, k))):
                    at, c = array.ctypes.data_as(ctypes.c_void_p), np.empty((m, n), to)
                    place = packed.ctypes.data_as(ctypes.c_void_p)
                    assert lib.portmm_pack(words, long(k), long(n), at, *map(long, steps), place) == 0
                    assert call(lib.portmm_matmul_packed, words, m, n, k, a, (k, 1), packed, (), c) == 0
                    np.testing.assert_array_equal(c, expected)


def test_the_machine_most_like_this_one_serves(tmp_path):
    """A chip of which a guest hides an instruction set that no kernel uses, beside a lesser one that is here."""
    here, maker = host(), bundle_build.Maker()
    hidden = replace(here.isas[0], name="hidden", features=("hidden",), atoms=())
    machines = [here.limited_to(here.isas[-2].name), replace(here, name="more", isas=(*here.isas, hidden))]
    machines[0] = replace(machines[0], name="less")
    bundle_build.add_shapes(maker, bundle_shapes.shapes_of("9 64 96 f32 row\n"), machines, (1,))
    lib = ctypes.CDLL(str(c_library.write(maker, tmp_path, os.uname().machine)))
    lib.portmm_machine.restype = ctypes.c_char_p
    assert lib.portmm_machine() == b"more"


def test_what_the_library_lacks(library):
    lib, long = ctypes.CDLL(str(library)), ctypes.c_long
    lib.portmm_packed_bytes.restype = ctypes.c_long
    x = np.ones((4, 4), np.float64)
    at = x.ctypes.data_as(ctypes.c_void_p)
    four, one = long(4), long(1)
    assert lib.portmm_matmul(b"f64", four, four, four, at, four, one, at, four, one, at, four) == 1
    assert lib.portmm_matmul(b"f32", four, four, four, at, long(2), long(3), at, four, one, at, four) == 1
    assert lib.portmm_matmul(b"f32", long(-1), four, four, at, four, one, at, four, one, at, four) == 2
    assert lib.portmm_matmul(b"f32", long(0), four, four, at, four, one, at, four, one, at, four) == 0
    assert lib.portmm_packed_bytes(b"f64", four, four) == -1
    assert lib.portmm_pack(b"f64", four, four, at, four, one, at) == 1


def test_the_library_needs_no_other(library):
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump")
    said = subprocess.run([objdump, "-p", str(library)], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[1].partition(".")[0] for line in said.splitlines() if line.strip().startswith("NEEDED")}
    assert needed <= {"libc", "libm", "libpthread", "libdl", "ld-linux-x86-64", "ld-linux-aarch64"}


def test_the_example_in_c(library, tmp_path):
    compiler = find_compiler()
    program, folder = tmp_path / "matmul", library.parent
    words = [str(EXAMPLES / "matmul.c"), f"-I{folder}", f"-L{folder}", "-lportmm", f"-Wl,-rpath,{folder}", "-lm"]
    subprocess.run([*compiler.argv, "-Wall", "-Werror", *words, "-o", str(program)], check=True)
    for m, n, k in SIZES:
        said = subprocess.run([program, str(m), str(n), str(k)], capture_output=True, text=True, check=True).stdout
        assert "0 errors" in said


def test_the_example_in_rust(library, tmp_path):
    rustc = shutil.which("rustc")
    if rustc is None or subprocess.run([rustc, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("no rustc, or one without a toolchain")
    program = tmp_path / "matmul"
    words = ["--edition", "2021", "-O", str(EXAMPLES / "matmul.rs"), "-L", str(library.parent), "-o", str(program)]
    done = subprocess.run([rustc, *words], capture_output=True, text=True, check=False)
    if "linker" in done.stderr and done.returncode:
        pytest.skip("no linker for Rust")
    assert done.returncode == 0, done.stderr
    said = subprocess.run(
        [program, "37", "64", "96"], capture_output=True, text=True, check=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(library.parent)},
    ).stdout  # fmt: skip
    assert "0 errors" in said


@pytest.mark.emulated
def test_the_library_for_aarch64(tmp_path):
    from crossing import program_compiler
    from machines import require

    compiler = program_compiler("aarch64")
    maker = bundle_build.Maker()
    shapes = bundle_shapes.shapes_of("1,40 64 96 f32 row\n40 64 96 f32 packed\n")
    bundle_build.add_shapes(maker, shapes, bundle_shapes.targets_of(["c6g", "c7g", "armv8a"])[0], (1,))
    folder = c_library.write(maker, tmp_path / "arm", "aarch64").parent
    program = tmp_path / "matmul"
    words = [str(EXAMPLES / "matmul.c"), f"-I{folder}", f"-L{folder}", "-lportmm", f"-Wl,-rpath,{folder}", "-lm"]
    subprocess.run([*compiler, *words, "-o", str(program)], check=True)
    machines = {}
    for cpu in ("neoverse-n1", "max,sve-default-vector-length=32", "cortex-a57"):
        emulator = [require("qemu-aarch64"), "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu]
        said = subprocess.run([*emulator, program, "37", "60", "33"], capture_output=True, text=True, check=True).stdout
        assert "0 errors" in said
        machines[cpu.partition(",")[0]] = said.partition("kernels of ")[2].partition(",")[0]
    assert machines == {"neoverse-n1": "neoverse_n1", "max": "neoverse_v1", "cortex-a57": "armv8a"}
