"""Emitted C: no compiler has a complaint, and the machine code is what was meant.

The gate on machine code looks at the loops over k of the micro-kernels that
large products use: they hold the ISA's multiply-add on its full width, and
never touch the stack.
"""

from __future__ import annotations

import platform
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import cover
import crossing
import machines
import passed
import pytest
from fused_cases import by_rows, epilogues, every_operation, every_type
from kernels_of import folding
from machines import require, small
from problems import pose, selection
from rows_lowered import NORMAL, lower_rows

from portmm.build.shared_object import build
from portmm.codegen.c_kernel import source
from portmm.codegen.lower import lower, lower_group_norm, lower_pack
from portmm.schedule.candidates import candidates
from portmm.spec.problem import Problem
from portmm.target.target import described, load_isa

WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Werror",
    # Micro-kernels and packers of one kind take the same arguments, whether they need them all or not.
    "-Wno-unused-parameter",
)


@pytest.mark.rest("all compilers")
@pytest.mark.parametrize("family", ["gcc", "clang"])
@pytest.mark.parametrize("name", machines.ISAS)
def test_compilers_have_no_complaint(name, family, tmp_path):
    target = small(name)
    isa = target.isas[0]
    words = crossing.kernel_compiler(isa, family)
    chosen = [s for _, found in selection(target, "f32", isa.atom("f32").n) for s in found][::9]
    chosen += [s for _, found in selection(target, "f64", isa.atom("f64").n) for s in found][::40]
    kernels = [lower(s, isa) for s in chosen]
    kernels += [lower_pack(isa, "f32", 2 * isa.atom("f32").n, layout) for layout in ("row", "col", "any")]
    kernels += [folding(name, 8, 8, group)[0] for group in (0, 32)]
    kernels += [lower_rows(isa, isa.atom("f32"), str(make())) for make in (every_operation, every_type, by_rows)]
    kernels += [lower_group_norm(isa, isa.atom("f32"), NORMAL, 10, "1e-05", 160)]
    for fused in epilogues().values():
        posed = pose((9, 2 * isa.atom("f32").n + 3, 40), ("row", "packed", "row"), target, fused=str(fused))
        kernels += [lower(s, isa) for p in posed[-1:] for s in candidates(p, target)[::5]]
    # What clang warns of here it finds by reading, gcc also by optimising.
    flags = [
        "-std=gnu11",
        "-O1" if family == "gcc" else "-fsyntax-only",
        "-fPIC",
        "-ffp-contract=fast",
        *WARNINGS,
        *isa.flags,
        "-c",
    ]
    files = []
    for i, text in enumerate(map(source, kernels)):
        if not passed.unchanged(text, *words, *flags, passed.version(words[0])):
            files.append(tmp_path / f"{i}.c")
            files[-1].write_text(text)
    if not files:
        return
    done = subprocess.run([*words, *flags, *map(str, files)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]


# -- machine code -----------------------------------------------------------------

MACS = {
    "avx512": r"vfmadd\w+p[sd] .*%zmm",
    "avx2": r"vfmadd\w+p[sd] .*%ymm",
    "sse2": r"mulp[sd] .*%xmm",
    "scalar": {"x86_64": r"mulss .*%xmm", "aarch64": r"fmadd\s+s\d"},
    "neon": r"fmla\s+v\d+\.4s",
    "sve": r"fm(la|ad)\s+z\d+\.s",
    "rvv": r"vfma(cc|dd)\.vf",
}
"""Patterns of a multiply-add in the output of objdump. An ISA that is not here fails the gate."""

# A loop's bound may be compared where it lies.
STACK = re.compile(r"^(?!cmp).*\(%[re][sb]p|\[(sp|x29)\b|\(sp\)|^v[ls]\d+r")
SPILL = re.compile(
    r"%[xyz]mm.*\(%[re][sb]p|^(ldr|str|ldp|stp|ldur|stur)\s+[qdsvz]\d.*\[(sp|x29)\b|^f[ls][wd]\s.*\(sp\)|^v[ls]\d+r"
)
"""The stack in a vector instruction: a register that was spilled. RISC-V moves whole registers for nothing else."""
FRAME = re.compile(r"^mov\s+%rsp,%rbp")
"""%rbp becomes the frame pointer."""
JUMP = re.compile(r"\b(j\w*|b(\.\w+|(eq|ne|lt|le|gt|ge)[zu]?)?|cbn?z|tbn?z)\s+(?:\S+,\s*)*([0-9a-f]+) <")

ENDS = re.compile(r"(jmp|ret|retq|b|j)(\s|$)")


def mac_of(name, arch):
    found = MACS.get(name) or MACS[re.sub(r"\d+$", "", name)]
    return re.compile(found if isinstance(found, str) else found[arch])


def listing(path, arch):
    """Function -> its instructions as (address, text)."""
    tool = require("objdump" if arch == platform.machine() else f"{arch}-linux-gnu-objdump")
    # -j: what is called through the PLT is no kernel's
    text = subprocess.run(
        [tool, "-d", "--no-show-raw-insn", "-j", ".text", path], capture_output=True, text=True, check=True
    ).stdout
    functions, now = {}, []
    for line in text.splitlines():
        head = re.fullmatch(r"[0-9a-f]+ <(\S+)>:", line)
        body = re.match(r"\s+([0-9a-f]+):\t(.*)", line)
        if head:
            now = functions[head[1]] = []
        elif body:
            now.append((int(body[1], 16), body[2].strip()))
    return functions


def reach(start, edges):
    """Nodes that `edges` lead to from `start`, in one step or more."""
    found, todo = set(), [start]
    while todo:
        new = edges[todo.pop()] - found
        found |= new
        todo += new
    return found


def loops_of(instructions, pattern):
    """The loops around the instructions that match: what can be reached from them, and reaches them."""
    at = {address: i for i, (address, _) in enumerate(instructions)}
    after, before = [set() for _ in instructions], [set() for _ in instructions]
    for i, (_, text) in enumerate(instructions):
        jump = JUMP.search(text)
        steps = {at.get(int(jump[4], 16))} if jump else set()
        steps |= set() if ENDS.match(text) else {i + 1}
        for to in steps & set(range(len(instructions))):
            after[i].add(to)
            before[to].add(i)
    loops = []
    for i, (_, text) in enumerate(instructions):
        if pattern.search(text) and not any(i in x for x in loops):
            loops.append(reach(i, after) & reach(i, before))
    return [[instructions[i][1] for i in sorted(x)] for x in loops if x]


def gate(kernel, name):
    """Faults of the micro-kernels of a kernel, as sentences.

    Where A and B are packed nothing may touch the stack. Reading A in place
    takes an address for each row, and those may come from the stack.
    """
    arch = platform.machine() if kernel.isa.arch == "any" else kernel.isa.arch
    artifact = build(source(kernel), flags=kernel.isa.flags, arch=arch, name=kernel.name)
    mac, faults = mac_of(name, arch), []
    stack = STACK if "A packed" in kernel.header[1] else SPILL
    for function, instructions in listing(str(artifact.path), arch).items():
        if not function.startswith(("ukr_", "dot_")):
            continue
        loops = loops_of(instructions, mac)
        # Without a frame, %rbp is a register like any other and may hold an address of B.
        framed = any(FRAME.search(text) for _, text in instructions)
        touched = [t for loop in loops for t in loop if stack.search(t)]
        spilled = touched if framed else [t for t in touched if "%rbp" not in t or "%rsp" in t]
        if not loops:
            faults.append(f"{kernel.header[1]}: {function} has no loop of {mac.pattern}")
        if spilled:
            faults.append(f"{kernel.header[1]}: {function} touches the stack: {'; '.join(spilled)}")
    return faults


@pytest.mark.parametrize("name", machines.ISAS)
def test_loops_over_k_multiply_and_never_spill(name, monkeypatch):
    """All register tiles that are offered for large products, packed and not; by gcc, whose code is shipped."""
    target = described(name)
    isa = load_isa(name)
    monkeypatch.setenv(*crossing.build_with(isa))
    posed = [Problem(1024, 1024, 1024), *pose((1024, 1024, 1024), ("row", "packed", "row"), target)]
    seen = {}
    for p in posed:
        for s in candidates(p, target):
            if s.b.packed or s.b.layout == "packed":
                seen.setdefault((s.program, s.mr, s.nr, s.b.panels, s.c.prefetch, s.a.packed, s.heights), s)
    arch = None if isa.arch == "any" else isa.arch
    kernels = [lower(s, isa) for s in seen.values()]
    new = [x for x in kernels if not passed.unchanged(source(x), x.name, passed.compiled_by(isa.flags, arch))]
    with ThreadPoolExecutor(2) as compilers:
        faults = list(compilers.map(lambda x: gate(x, name), new))
    assert not any(faults), "\n".join(line for found in faults for line in found)


@pytest.mark.rest("all compilers")
@pytest.mark.parametrize("family", ["gcc", "clang"])
@pytest.mark.parametrize("name", machines.ISAS)
def test_kernels_call_nothing(name, family, monkeypatch):
    """No memcpy of the compiler's making, no helper of libgcc: a kernel is all there is."""
    target = small(name)
    isa = target.isas[0]
    monkeypatch.setenv(*crossing.build_with(isa, family))
    arch = None if isa.arch == "any" else isa.arch
    turn = 2 * machines.ISAS.index(name) + (family == "clang")
    chosen = cover.some([s for _, found in selection(target, "f32", isa.atom("f32").n) for s in found], turn, 20)
    for kernel in [lower(s, isa) for s in chosen] + [lower_pack(isa, "f32", 2 * isa.atom("f32").n, "any")]:
        if passed.unchanged(source(kernel), kernel.name, passed.compiled_by(isa.flags, arch)):
            continue
        artifact = build(source(kernel), flags=isa.flags, arch=arch, name=kernel.name)
        named = subprocess.run(
            [require("nm"), "-D", "--undefined-only", str(artifact.path)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert set(named) <= {
            "w",
            "__cxa_finalize",
            "__gmon_start__",
            "_ITM_deregisterTMCloneTable",
            "_ITM_registerTMCloneTable",
        }, kernel.header
