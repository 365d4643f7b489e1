"""Compilers for machines that are not here, and what runs their programs: AArch64's and RISC-V's, under qemu."""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from machines import require

if TYPE_CHECKING:
    from portmm.target.isa import Isa

EMULATED = tuple(x for x in ("aarch64", "riscv64") if x != platform.machine())
"""Architectures of programs that qemu runs here."""
NEWEST_IN_CI = 19
CLANGS = ("clang", *(f"clang-{n}" for n in range(17, 23)))
LEAST = {"rvv": {"gcc": 14, "clang": 17}, "amx_fp16": {"gcc": 12, "clang": 16}, "avx10_2": {"gcc": 15, "clang": 20}}
"""The first versions that know an instruction set, or come with an assembler that does, where others are in use."""


@functools.cache
def version(program: str) -> int:
    """The number before the first dot of a compiler's version; 0 without it."""
    path = shutil.which(program)
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout if path else ""
    found = re.search(r"\b(\d+)\.\d+\.\d+", said)
    return int(found[1]) if found else 0


def kernel_compiler(isa: Isa, family: str = "") -> list[str]:
    """The command of a gcc or clang that compiles kernels for an instruction set; of gcc if that knows it."""
    native = isa.arch in ("any", platform.machine())
    if not native and isa.arch not in EMULATED:
        pytest.skip(f"no cross compiler for {isa.arch}")
    gcc = require("gcc" if native else f"{isa.arch}-linux-gnu-gcc")  # has the headers of its machine, too
    known = LEAST.get(re.sub(r"\d{3,}$", "", isa.name), {"gcc": 0, "clang": 0})
    family = family or ("gcc" if version(gcc) >= known["gcc"] else "clang")
    least = known[family]
    if family == "clang":
        found = newest_clang(least) if least else require("clang")
        return [found] if native else [found, f"--target={isa.arch}-linux-gnu"]
    if version(gcc) < least:
        pytest.skip(f"gcc knows {isa.name} from {least} on")
    return [gcc]


def build_with(isa: Isa, family: str = "") -> tuple[str, str]:
    """The variable that makes `build` take a gcc or clang for an instruction set, and its value."""
    native = isa.arch in ("any", platform.machine())
    return "CC" if native else f"CC_{isa.arch}", shlex.join(kernel_compiler(isa, family))


def newest_clang(least: int) -> str:
    """A clang of that version or a later one."""
    found = max(CLANGS, key=version)
    if version(found) < least:
        optional = not os.environ.get("CI") or least > NEWEST_IN_CI
        (pytest.skip if optional else pytest.fail)(f"there is no clang {least} or later")
    return str(shutil.which(found))


def program_compiler(arch: str) -> list[str]:
    """The command that makes programs that run kernels for an architecture."""
    return [require(f"{arch}-linux-gnu-gcc")]


def emulator(isa: Isa, *, libraries: bool = True) -> list[str]:
    """The words before a program of an ISA's machine: vectors have the length that its description says."""
    if isa.arch == "riscv64":
        cpu = f"rv64,v=true,vlen={8 * isa.vector_bytes},elen=64,vext_spec=v1.0"
    elif isa.name.startswith("sve"):
        cpu = f"max,sve-default-vector-length={isa.vector_bytes}"
    else:
        cpu = "max" if isa.base else "cortex-a72"
    where = ["-L", f"/usr/{isa.arch}-linux-gnu"] if libraries else []
    return [require(f"qemu-{isa.arch}"), *where, "-cpu", cpu]
