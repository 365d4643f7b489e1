"""Machine code has the instructions that kernels are made for, as many as schedules say, and no spills."""

from __future__ import annotations

import disassembly
import passed
import pytest
from opencl_cpu import missing

from portmm.build.nvrtc import compile_cuda, find_nvrtc
from portmm.codegen.lower import grid_atom, lower_grid
from portmm.dispatch.machine import source
from portmm.errors import NoCompilerError, ScheduleError
from portmm.schedule.candidates import candidates, units
from portmm.schedule.gpu_cost import cost
from portmm.schedule.program import asynchronous
from portmm.spec.problem import Problem
from portmm.target.target import load_target

pytestmark = pytest.mark.rest("NVIDIA's disassembler")

CHIPS = ("t4", "a100", "a10g", "l4", "h200", "b200", "rtx_pro_6000")
SEVERAL = ("t4", "a100", "h200", "b200")
"""Of which all problems are disassembled."""
PROBLEMS = {
    "bf16": (Problem(4096, 4096, 4096, "bf16", b="col"), (8, 8, 2)),
    "f16": (Problem(2048, 2048, 2048, "f16", a="col"), (8, 8, 2)),
    "s8": (Problem(4096, 4096, 4096, "s8-s8-s32", b="col"), (16, 16, 2)),
    "decode": (Problem(16, 4096, 4096, "f16", b="col"), (8, 8, 2)),
}
UNITS = {"warp": {"f32": "HMMA", "s32": "IMMA"}, "warpgroup": {"f32": "HGMMA", "s32": "IGMMA"}}
"""How the machine code calls instructions of a unit, by the type of their sums."""
MATRIX = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA")
LOCAL = ("LDL", "STL")


def best(p, vectors, target, unit):
    """The schedule with the least predicted time of a unit, or None."""
    try:
        every = candidates(p, target, vectors)
    except ScheduleError:
        return None
    held = [(s, grid_atom(target.isa(s.isa), s)) for s in every]
    return min((x for x in held if x[1].unit == unit), key=lambda x: cost(p, x[0], x[1], target).seconds, default=None)


def disassembled(s, target):
    """The code of a schedule's first kernel; None if the test has passed on the same text, by the same tools."""
    tool = disassembly.required()
    try:
        find_nvrtc()
    except NoCompilerError as error:
        missing(str(error))
    kernel = lower_grid(s, target.isa(s.isa))[0]
    text, architecture = source(kernel, "cuda"), target.device.architecture
    if passed.unchanged(text, kernel.name, architecture, s, passed.nvrtc(), passed.version(tool)):
        return None
    return disassembly.code_of(compile_cuda(text, kernel.name, architecture).code)


@pytest.mark.parametrize(
    ("chip", "name"), [(x, y) for x in CHIPS for y in PROBLEMS if x in SEVERAL or y in ("bf16", "decode")]
)
def test_fragments_are_multiplied_as_scheduled(chip, name):
    target, (p, vectors) = load_target(chip), PROBLEMS[name]
    found = best(p, vectors, target, "warp")
    if found is None:
        assert not any(atom.unit == "warp" for _, atom in units(p.dtype, target))
        pytest.skip(f"{chip} has no unit for {p.dtype}")
    s, atom = found
    code, (_, warp, *_) = disassembled(s, target), s.tiles
    if code is None:
        return
    word = UNITS["warp"][atom.acc]
    print(code.kinds(*MATRIX, "LDSM", "LDGSTS"))
    assert {x.split(".")[1] for x in code.kinds(*MATRIX)} == {f"{atom.m}{atom.n}{atom.k}"}
    assert code.count(word) == code.count(*MATRIX)
    high, wide = (atom.n, atom.m) if s.atom.swap else (atom.m, atom.n)
    due = warp.m // high * (warp.n // wide) * (s.block.k // atom.k)
    assert code.innermost(word) == code.count(word) == due, s
    assert code.innermost("LDSM") > 0
    assert code.count(*LOCAL) == 0
    assert s.a.asynchronous == asynchronous(target)
    copies = code.kinds("LDGSTS")
    assert bool(copies) == s.a.asynchronous
    assert all(x.endswith(".128") for x in copies)  # 16 bytes each
    assert code.innermost("LDGSTS") * (s.stages if s.a.asynchronous else 0) == sum(copies.values()), s


@pytest.mark.parametrize("chip", CHIPS)
def test_threads_of_their_own_use_no_fragments(chip):
    target, p = load_target(chip), Problem(1024, 1024, 1024)
    s, _ = best(p, (4, 4, 4), target, "")
    code = disassembled(s, target)
    if code is None:
        return
    assert code.count(*MATRIX, *LOCAL) == 0
    assert code.innermost("FFMA") >= s.mr * s.nr
    assert bool(code.count("LDGSTS")) == s.a.asynchronous


@pytest.mark.parametrize("unit", ["warp", "warpgroup", ""])
def test_sums_are_seen_by_the_block_that_adds_them(unit):
    """Fences of the whole GPU stand before a block takes its number, and before the last one reads."""
    target, p = load_target("h200"), Problem(64, 64, 8192, "bf16" if unit else "f32", b="col")
    found = [s for s in candidates(p, target, (8, 8, 2)) if s.parallel.fixup]
    s = next(s for s in found if grid_atom(target.isa(s.isa), s).unit == unit)
    code = disassembled(s, target)
    if code is None:
        return
    names = code.names
    print([x for x in names if x.partition(".")[0] in ("MEMBAR", "BAR", "ATOMG", "ATOM")], s)
    (ticket,) = [i for i, x in enumerate(names) if x.startswith("ATOM")]
    fences = [i for i, x in enumerate(names) if x.startswith("MEMBAR") and x.endswith(".GPU")]
    assert any(i < ticket for i in fences), s
    assert any(i > ticket for i in fences), s


@pytest.mark.parametrize("chip", [x for x in CHIPS if load_target(x).device.architecture == "90a"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_warpgroups_multiply_from_shared_memory(chip, name):
    """Tiles arrive, and results leave, by the unit that copies tensors."""
    target, (p, vectors) = load_target(chip), PROBLEMS[name]
    found = best(p, vectors, target, "warpgroup")
    if found is None:
        pytest.skip(f"{chip} has no unit of warpgroups for {p.dtype}")
    s, atom = found
    code, (_, warp, *_) = disassembled(s, target), s.tiles
    if code is None:
        return
    print(code.kinds(*MATRIX, "UTMALDG", "UTMASTG", "WARPGROUP", "USETMAXREG"), s)
    word = UNITS["warpgroup"][atom.acc]
    assert code.count(word) == code.count(*MATRIX)
    # One instruction takes all columns of its warpgroup.
    high, wide = (warp.n, warp.m) if s.atom.swap else (warp.m, warp.n)
    assert {x.split(".")[1] for x in code.kinds(word)} == {f"{atom.m}x{wide}x{atom.k}"}
    assert code.innermost(word) == code.count(word) == high // atom.m * (s.block.k // atom.k), s
    assert code.count("WARPGROUP") > 0
    assert code.innermost("UTMALDG") > 0
    assert any("MULTICAST" in x for x in code.kinds("UTMALDG")) == (s.parallel.cluster > 1), s
    assert code.count("UTMASTG", "STG") > 0
    assert code.count(*LOCAL) == 0


# -- the disassembler ----------------------------------------------------------------------

SPILLS = """extern "C" __global__ void __launch_bounds__(1024, 2) spills(float *x, int n) {
  float y[96];
  for (int i = 0; i < 96; i++) y[i] = x[i * n + threadIdx.x];
  for (int k = 0; k < n; k++)
    for (int i = 0; i < 96; i++) y[i] = y[i] * y[(i + 7) % 96] + x[k];
  for (int i = 0; i < 96; i++) x[i * n + threadIdx.x] = y[i];
}
"""
LOOPS = """extern "C" __global__ void loops(float *x, int n) {
  float y = x[0], z = x[1];
  for (int i = 0; i < n; i++) {
    z = __fmaf_rn(z, z, y);
#pragma unroll 1
    for (int j = 0; j < n; j++) {
#pragma unroll
      for (int k = 0; k < 5; k++) y = __fmaf_rn(y, z, x[k]);
    }
  }
  x[2] = y;
}
"""


@pytest.mark.parametrize("tool", disassembly.TOOLS)
def test_spills_and_loops_are_seen(tool):
    path = disassembly.find(tool)
    if path is None:
        disassembly.required()
        pytest.skip(f"no {tool}")
    assert disassembly.code_of(compile_cuda(SPILLS, "spills", "80").code, path).count(*LOCAL) > 10
    code = disassembly.code_of(compile_cuda(LOOPS, "loops", "80").code, path)
    assert code.innermost("FFMA") == 5
    assert code.count("FFMA") >= 6
    assert code.count(*LOCAL) == 0
