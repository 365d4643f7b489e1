"""Matrix units of other vendors, as rows: what kernels compute, and that a compiler makes the vendor's instruction.

No such device is at hand. On the shim, a unit is a C++ function of the whole wave, by the formulas of its manual, and
not by the rows that kernels are made from. The same kernels in OpenCL are compiled for AMD's devices.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import grid_cases
import pytest
from grid_cases import check_run, kernels_of, rounded

from portmm.codegen.lower import grid_atom, lower_grid
from portmm.dispatch.machine import source
from portmm.schedule.candidates import candidates, units
from portmm.schedule.gpu_cost import cost
from portmm.schedule.gpu_mma_attention import unit
from portmm.schedule.gpu_w4a16 import serves
from portmm.schedule.text import varied
from portmm.spec.problem import Problem
from portmm.target.target import load_isa, load_target

ROWS, BY_K, BY_ROW, TURNED = ("row", "row", "row"), ("row", "col", "row"), ("col", "row", "row"), ("col", "col", "row")
C_BY_COLUMNS = ("row", "col", "col")
SIZES = ((65, 33, 131, 1, ""), (17, 70, 64, 2, "b"), (1, 1, 1, 1, ""), (130, 9, 0, 2, ""))
"""m, n, k, the items of a batch, and what is the same for all of them."""

# -- meaning -------------------------------------------------------------------

VALUE = {
    "bf16": "f32_of_bf16({x}[{i}])", "f16": "f32_of_f16({x}[{i}])", "f32": "{x}[{i}]",
    "s8": "((const signed char *){x})[{i}]", "u8": "((const unsigned char *){x})[{i}]",
}  # fmt: skip
UNIT = """
void {name}({sum} *d, const {a} *a, const {b} *b) {{
  static {sum} left[16][{m} * {k}], right[16][{k} * {n}];
  const int wave = (int)threadIdx.x / {lanes}, lane = (int)threadIdx.x % {lanes};
  for (int e = 0; e < {held}; ++e) {{
    left[wave][{row_of_a} * {k} + {k_of_a}] = {value_a};
    right[wave][({k_of_a}) * {n} + {row_of_a}] = {value_b};
  }}
  __syncthreads();
  for (int e = 0; e < {sums}; ++e)
    for (int k = 0; k < {k}; ++k) d[e] += left[wave][({row}) * {k} + k] * right[wave][k * {n} + {column}];
  __syncthreads();
}}"""
MFMA_16 = {"row_of_a": "lane % 16", "k_of_a": "{held} * (lane / 16) + e", "row": "4 * (lane / 16) + e",
           "column": "lane % 16", "lanes": 64}  # fmt: skip
MFMA_32 = {"row_of_a": "lane % 32", "k_of_a": "{held} * (lane / 32) + e", "column": "lane % 32",
           "row": "8 * (e / 4) + 4 * (lane / 32) + e % 4", "lanes": 64}  # fmt: skip
WMMA = {"row_of_a": "lane % 16", "k_of_a": "e", "row": "2 * e + lane / 16", "column": "lane % 16", "lanes": 32}
"""AMD Matrix Instruction Calculator: of B, the column is where the row of A is."""


def formulas(isa, atom):
    """A unit's instruction as a function of C++, in the place of the vendor's."""
    words = dict(WMMA if isa.name == "wmma_rdna3" else MFMA_16 if atom.m == 16 else MFMA_32)
    held = atom.k if isa.name == "wmma_rdna3" else atom.m * atom.k // 64
    words["k_of_a"] = words["k_of_a"].format(held=held)
    name = atom.mac.partition("(")[0]
    a, b = ("void" if x in ("s8", "u8") else {"f32": "float"}.get(x, "unsigned short") for x in (atom.a, atom.b))
    value_a, value_b = VALUE[atom.a].format(x="a", i="e"), VALUE[atom.b].format(x="b", i="e")
    return name, UNIT.format(
        name=name, sum=atom.acc_type, a=a, b=b, m=atom.m, n=atom.n, k=atom.k, held=held,
        sums=atom.m * atom.n // words["lanes"], value_a=value_a, value_b=value_b, **words,
    )  # fmt: skip


def on_shim(name, *, large=False):
    """A device for the shim with a vendor's units; with `large`, those of 32 x 32."""
    isa = load_isa(name)
    texts = dict(formulas(isa, atom) for atom in isa.atoms)
    primitives = tuple(replace(x, cuda=texts[x.name], hardware=False) for x in isa.primitives)
    atoms = tuple(x for x in isa.atoms if (x.m == 32) == large)
    return machine(replace(isa, primitives=primitives, atoms=atoms), "cuda")


def machine(isa, language):
    """An MI300X with an instruction set before its own."""
    chip = load_target("mi300x")
    architecture = "75" if language == "cuda" else ""
    device = replace(chip.device, warp=isa.warp, language=language, architecture=architecture)
    rates = chip.rates | {atom.name: 1024.0 for atom in isa.atoms}
    return replace(chip, isas=(isa, *chip.isas), device=device, rates=rates)


def posed(dtype, layouts, vectors, size=(65, 33, 131), batch=1, **more):
    a, b, c = layouts
    return Problem(*rounded(size, layouts, vectors), dtype, batch, a, b, c, **more)


def schedules(dtype, layouts, vectors, target, **more):
    found = candidates(posed(dtype, layouts, vectors, **more), target, vectors)
    return [s for s in found if s.program == "mma" and s.mr * s.nr <= 32 and s.threads <= 512]


PRODUCTS = (
    ("mfma_cdna3", "bf16", BY_K, (8, 8, 8)), ("mfma_cdna3", "f16", ROWS, (8, 8, 2)),
    ("mfma_cdna3", "bf16", TURNED, (8, 8, 8)), ("mfma_cdna3", "bf16-bf16-f32", BY_ROW, (8, 8, 4)),
    ("mfma_cdna3", "s8-s8-s32", BY_K, (16, 16, 4)), ("mfma_cdna3", "f32", ROWS, (4, 4, 4)),
    ("mfma_cdna3", "f32", BY_K, (4, 4, 1)), ("mfma_cdna2", "s8-s8-s32", BY_K, (16, 4, 1)),
    ("mfma_cdna2", "f16", C_BY_COLUMNS, (8, 4, 1)), ("wmma_rdna3", "bf16", BY_K, (8, 8, 8)),
    ("wmma_rdna3", "f16", ROWS, (8, 8, 4)), ("wmma_rdna3", "u8-s8-s32", BY_K, (16, 16, 4)),
    ("mfma_cdna3 large", "bf16", BY_K, (8, 8, 8)), ("mfma_cdna3 large", "f32", BY_ROW, (4, 4, 4)),
    ("mfma_cdna3 large", "s8-s8-s32", C_BY_COLUMNS, (16, 16, 1)),
)  # fmt: skip


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda x: f"{x[0]}-{x[1]}-{''.join(y[0] for y in x[2])}")
def test_products(product):
    words, dtype, layouts, vectors = product
    name, _, large = words.partition(" ")
    target = on_shim(name, large=bool(large))
    found = schedules(dtype, layouts, vectors, target)
    assert {s.isa for s in found} == {name}
    for swap in (False, True):
        own = [s for s in found if s.atom.swap == swap and s.parallel.split == 1]
        s = own[PRODUCTS.index(product) % len(own)] if own else None
        if s is None:
            assert (swap, dtype[0]) == (True, "u"), "operands of one type change sides"
            continue
        s = varied(s, split=1 + 2 * swap)
        kernels = kernels_of(s, target)
        for i, (*size, batch, shared) in enumerate(SIZES):
            k = grid_cases.case(posed(dtype, layouts, s.vectors, size, batch), s.vectors, i, shared)
            check_run(s, kernels, "cuda", k, (k.problem, s), (0,))


# -- selection -----------------------------------------------------------------


def test_units_are_those_of_a_device_and_its_language():
    cdna = machine(load_isa("mfma_cdna3"), "opencl")
    assert next(atom.name for _, atom in units("bf16", cdna)) == "mfma_cdna3_bf16"
    # Products of f32 are exact: no need for permission to round.
    assert next(atom.name for _, atom in units("f32", cdna)) == "mfma_cdna3_f32"
    for device in (replace(cdna.device, warp=32), replace(cdna.device, language="cuda")):
        assert all(not atom.unit for _, atom in units("bf16", replace(cdna, device=device)))
    # Attention, and words of four bits, count on matrices that a warp loads at once, and sums of 16 x 8.
    assert unit("bf16", cdna) is None
    weights = Problem(512, 512, 512, "bf16-u4-bf16", b="codes", family="u4x32k8g128")
    assert not any(serves(weights, atom) for atom in load_isa("mfma_cdna3").atoms)
    assert any(serves(weights, atom) for atom in load_isa("mma_sm80").atoms)


# -- machine code ----------------------------------------------------------------

LIBRARY = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define get_local_id(d) __builtin_amdgcn_workitem_id_x()
#define get_group_id(d) ((d) ? __builtin_amdgcn_workgroup_id_y() : __builtin_amdgcn_workgroup_id_x())
#define barrier(flags) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"), __builtin_amdgcn_s_barrier(), \\
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup")
#define vload_half(i, p) ((float)(p)[i])
#define vstore_half_rte(x, i, p) ((p)[i] = (half)(x))
"""
"""In the place of AMD's device library, which drivers link."""
FLAGS = (
    "-x",
    "cl",
    "-cl-std=CL1.2",
    "-target",
    "amdgcn-amd-amdhsa",
    "-nogpulib",
    "-O2",
    "-Werror",
    "-S",
    "-o",
    "-",
    "-",
)
COMPILED = (
    ("mfma_cdna3", "gfx942", "bf16", BY_K, (8, 8, 8), "v_mfma_f32_16x16x16_bf16"),
    ("mfma_cdna3", "gfx942", "bf16-bf16-f32", ROWS, (8, 8, 4), "v_mfma_f32_16x16x16_bf16"),
    ("mfma_cdna3", "gfx942", "f16", BY_ROW, (8, 8, 8), "v_mfma_f32_16x16x16_f16"),
    ("mfma_cdna3", "gfx942", "s8-s8-s32", BY_K, (16, 16, 4), "v_mfma_i32_16x16x32_i8"),
    ("mfma_cdna3", "gfx942", "f32", BY_K, (4, 4, 4), "v_mfma_f32_16x16x4_f32"),
    ("mfma_cdna2", "gfx90a", "bf16", BY_K, (8, 8, 8), "v_mfma_f32_16x16x16bf16_1k"),
    ("mfma_cdna2", "gfx90a", "s8-s8-s32", BY_K, (16, 16, 4), "v_mfma_i32_16x16x16i8"),
    ("wmma_rdna3", "gfx1100", "bf16", BY_K, (8, 8, 8), "v_wmma_f32_16x16x16_bf16"),
)


SIZE = {"mfma_cdna2": 4096, "mfma_cdna3": 4096, "wmma_rdna3": 16}
"""Rows of A. RDNA 3's duplicated operands need twice the registers that the model counts: large tiles spill."""


@pytest.fixture(scope="module")
def clang():
    """A clang with AMD's back end; optional, as no code that ships needs one."""
    found = next(filter(None, (shutil.which(f"clang-{n}") for n in (21, 20, 19, 18))), None)
    if found is None:
        pytest.skip("there is no clang-18 or later: apt-get install clang-19")
    return found


@pytest.mark.rest("clang for AMD's devices")
@pytest.mark.parametrize("case", COMPILED, ids=lambda x: f"{x[0]}-{x[2]}-{''.join(y[0] for y in x[3])}")
def test_machine_code(clang, case):
    name, chip, dtype, (a, b, c), vectors, instruction = case
    target = machine(load_isa(name), "opencl")
    p = Problem(SIZE[name], 4096, 4096, dtype, 1, a, b, c)
    found = [s for s in candidates(p, target, vectors) if s.program == "mma" and not s.slices]
    s = min(found, key=lambda s: cost(p, s, grid_atom(target.isa(s.isa), s), target).seconds)
    kernel = lower_grid(s, target.isa(s.isa))[0]
    text = source(kernel, "opencl")
    done = subprocess.run(
        [clang, f"-mcpu={chip}", *FLAGS], input=LIBRARY + text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = {x: int(re.search(rf"\.{x}:\s+(\d+)", done.stdout)[1]) for x in ("vgpr_count", "vgpr_spill_count",
             "sgpr_spill_count", "private_segment_fixed_size", "group_segment_fixed_size")}  # fmt: skip
    print(f"{s}: {facts}")
    atom, (_, warp, *_) = grid_atom(target.isa(s.isa), s), s.tiles
    high, wide = (atom.n, atom.m) if s.atom.swap else (atom.m, atom.n)
    due = warp.m // high * (warp.n // wide) * (s.block.k // atom.k)
    assert len(re.findall(rf"^\s+{instruction}\w*\s", done.stdout, re.MULTILINE)) == due, s
    assert facts["vgpr_spill_count"] == facts["sgpr_spill_count"] == facts["private_segment_fixed_size"] == 0, facts
    assert facts["group_segment_fixed_size"] == kernel.shared_bytes
    assert "s_swappc" not in done.stdout  # everything is inlined
