"""Instruction sets of x86 that took rows only, whose machines are not at hand: AMX-FP16 and AVX10.2.

What AMX-FP16's kernels compute is in test_amx.py. Here, C functions by the manual's words take the place of AVX10.2's
instructions in the emitted text, and the machine code of both has the bytes that the manual gives the instructions.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import crossing
import machines
import pytest
from machines import small
from operands import case
from problems import pose
from runs import check_built

from portmm.build.shared_object import build
from portmm.codegen.c_kernel import source
from portmm.codegen.lower import lower
from portmm.schedule.candidates import candidates
from portmm.target.target import load_isa

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="no cross compiler for x86_64")

WORDS = {"s8": "vpdpbssd", "f16": "vdpphps", "f16-f16-f32": "vdpphps"}
CALL = re.compile(r'__asm__\("(vpdpbssd|vdpphps) %2, %1, %0" : "\+v"\((\w+)\) : "v"\((\w+)\), "v"\((\w+)\)\);')
SHIM = """
static inline float of_f16(unsigned half) {
  const unsigned rest = (half & 0x7fff) << 13;
  union { unsigned u; float f; } x = {.f = (float)(half & 0x3ff) * 0x1p-24f};
  if (half & 0x7c00) x.u = rest + (rest < 0x0f800000 ? 0x38000000 : 0x70000000);
  x.u |= (half & 0x8000) << 16;
  return x.f;
}
static inline int four(int d, int a, int b) {
  for (int i = 0; i < 32; i += 8) d += (signed char)(a >> i) * (signed char)(b >> i);
  return d;
}
static inline float two(float d, int a, int b) {
  return d + (of_f16(a & 0xffff) * of_f16(b & 0xffff) + of_f16((unsigned)a >> 16) * of_f16((unsigned)b >> 16));
}
#define LANES(f, d, a, b) for (int l = 0; l < (int)(sizeof(d) / 4); ++l) d[l] = f(d[l], a[l], b[l])
#define vpdpbssd(d, a, b) do { LANES(four, d, a, b); } while (0)
#define vdpphps(d, a, b) do { LANES(two, d, a, b); } while (0)
"""

LINES_RUN = machines.runs_here("avx512bf16")


def shimmed(kernel):
    """A kernel with functions in the place of AVX10.2's instructions, loaded here."""
    from portmm.runtime.cpu import runtime

    text, calls = CALL.subn(r"\1(\2, \3, \4);", source(kernel))
    assert calls
    return runtime().load(build(SHIM + text, flags=kernel.isa.flags, name=kernel.name).path, kernel.name)


@pytest.mark.thin(4)
@pytest.mark.skipif(not LINES_RUN, reason="the rest of a kernel is AVX-512")
@pytest.mark.parametrize("layouts", [("row", "row", "row"), ("row", "packed", "row"), ("col", "col", "row")])
@pytest.mark.parametrize("word", WORDS)
def test_avx10_2_multiplies(word, layouts):
    """Whole registers and halves of them, whose lanes are of few columns."""
    lanes = set()
    for i, size in enumerate(((9, 40, 30), (5, 7, 21), (1, 33, 64))):
        p = pose(size, layouts, small("avx10_2"), dtype=word)[-1]
        found = candidates(p, small("avx10_2"))
        for s in found[i :: max(1, len(found) // 3)]:
            kernel = lower(s, load_isa("avx10_2"))
            lanes.add(kernel.atom.n)
            check_built(kernel, case(p, seed=i), 2, s, code=shimmed)
            check_built(kernel, case(p, seed=i, floats=True), 1, s, code=shimmed)
    assert 16 in lanes


# -- machine code ----------------------------------------------------------------

BYTES = {
    # EVEX (62), map 2 (P0), 512 bits (P2): prefixes F2 and none (P1), opcodes 50 and 52; then registers only.
    "vpdpbssd": rb"\x62[\x02-\xf2][\x07-\x7f][\x40-\x5f]\x50[\xc0-\xff]",
    "vdpphps": rb"\x62[\x02-\xf2][\x04-\x7c][\x40-\x5f]\x52[\xc0-\xff]",
    # VEX (c4), map 2, F2, opcode 5c.
    "tdpfp16ps": rb"\xc4[\x02-\xe2][\x03-\x7b]\x5c[\xc0-\xff]",
}
"""Encodings of instructions, by Intel's manuals: disassemblers at hand do not know all of them."""


def newest_compiler(isa):
    """A compiler that knows an instruction set: also that of the package ziglang, which comes with a new clang."""
    if isa.name == "avx10_2" and find_spec("ziglang"):
        return f"{sys.executable} -m ziglang cc"
    return crossing.build_with(isa)[1]


@pytest.mark.rest("compilers that are newer than a user's")
@pytest.mark.parametrize(("name", "word"), [*(("avx10_2", x) for x in WORDS), ("amx_fp16", "f16")])
def test_machine_code(name, word, monkeypatch):
    isa, target = load_isa(name), small(name)
    instruction = WORDS[word] if name == "avx10_2" else "tdpfp16ps"
    monkeypatch.setenv("CC", newest_compiler(isa))
    p = pose((64, 64, 64), ("row", "packed", "row"), target, dtype=word)[-1]
    s = next(s for s in candidates(p, target) if not s.atom.lanes)
    kernel = lower(s, isa)
    path = build(source(kernel), flags=isa.flags, name=kernel.name).path
    code = path.read_bytes()
    assert len(re.findall(BYTES[instruction], code)) >= s.mr * s.nr // (kernel.atom.m * kernel.atom.n)
    listed = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout
    assert name == "avx10_2" or instruction in listed


def test_no_code_names_them():
    """Their rows, and those of RISC-V's vectors, are all there is."""
    words = re.compile("amx_fp16|avx10|tdpfp16|vdpphps|vpdpbssd|rvv|vfmacc")
    places = {Path(x) for name in ("portmm", "portmm.kernels") for x in find_spec(name).submodule_search_locations}
    files = [path for place in places for ending in ("py", "c", "h") for path in place.rglob(f"*.{ending}")]
    assert len(files) > 100
    assert not [path for path in files if words.search(path.read_text(encoding="utf-8"))]
