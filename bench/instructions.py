"""Instructions that kernels take, counted by valgrind: a second signal beside time, without its noise.

A kernel runs in the driver of the tests, without Python; callgrind counts from its entry to
its return. Schedules are those that the cost model prefers for a described chip, so that the
machine does not matter; the compiler does. A baseline holds, for each compiler, a kernel's
instructions, its operations and its schedule. More than a percent more or fewer is a
difference: more is to be explained or mended, fewer to be kept, both by storing again.
"""

import json
import re
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import driver
import numpy as np
import operands

from portmm.build.compiler import find_compiler
from portmm.codegen.lower import atom_of, lower, lower_pack
from portmm.dispatch.cpu_kernels import family, family_of_codes, isa_of
from portmm.dispatch.schedule_choice import choose
from portmm.ir.interpreter import numpy_type
from portmm.kernels.cpu import gemm
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_cost import cost
from portmm.schedule.text import spell
from portmm.spec.layouts import row_major
from portmm.spec.problem import Problem
from portmm.spec.problem import family as family_of
from portmm.target.target import load_isa, load_target

BASELINE = Path(__file__).parent / "baselines" / "instructions.json"
CHIP = "haswell"
"""Its caches decide on schedules, for each of its instruction sets; valgrind has no AVX-512."""
TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """Stored of a kernel: instructions of a call, operations (multiplications and additions, or elements that are
    packed), instructions for each operation, and the schedule as text."""

    instructions: int
    operations: int
    each: float
    schedule: str


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel with operands: what is counted."""

    kernel: object
    case: operands.Case
    operations: int
    schedule: str


def product(isa, size, dtype="f32", b="row"):
    """A product by the schedule that the cost model prefers."""
    target = load_target(CHIP).limited_to(isa)
    kept = ""
    if b == "packed":
        kept = family(dtype, target)
    elif b == "codes":
        kept = str(family_of_codes(target, 32))
    p = Problem(*size, dtype, b=b, family=kept)
    s = choose(p, target, tuned=False).schedule
    return Subject(lower(s, isa_of(s, target)), operands.case(p, floats=b == "codes"), p.flops, spell(s))


def packing(isa, size, dtype="f32", layout="row"):
    """Packing a weight of k rows and n columns, whole panels."""
    k, n = size
    kept = family_of(family(dtype, load_target(CHIP).limited_to(isa)))
    rng = np.random.default_rng(0)
    values = rng.integers(-4, 5, (1, k, n)).astype(numpy_type(kept.dtype))
    b, want = operands.lay(values, layout, 3), operands.panels_of(values, kept).ravel()
    fields = dict.fromkeys(("a_m", "a_k", "a_batch", "c_m", "c_n"), 0)
    fields |= {"m": 1, "n": n, "k": k, "batch": 1, "b_k": b.row, "b_n": b.col, "b_batch": b.item}
    fields["c_batch"] = want.size // kept.kr
    c = operands.Laid(np.zeros_like(want), 0, 0, 0, 1, (1, 1, want.size))
    case = operands.Case(Problem(1, n, k), fields, b.flat, 0, b.flat, 0, c, want[None, None], np.zeros(1))
    return Subject(lower_pack(load_isa(isa), dtype, kept.nr, layout), case, k * n, f"{layout} into {kept}")


def convolution(isa, image, n, *, gathered=False):
    """A 3x3 convolution, padded by one, of an image (h, w, c): packing reads its windows, or a matrix of them."""
    view = row_major(1, *image).pad(1, 1, 1).pad(2, 1, 1)
    for axis, size in ((2, image[1]), (1, image[0])):
        view = view.embed(axis, (size, 3), (1, 1))
    view = view.permute(0, 1, 3, 2, 4, 5).merge(0, 3).merge(1, 3)
    p, target = Problem(*(int(x) for x in (view.extents[0], n, view.extents[1]))), load_target(CHIP).limited_to(isa)
    packed = [x for x in candidates(p, target) if x.program == "gemm" and x.a.packed and not x.atom.swap]
    s = min(packed, key=lambda x: cost(p, x, atom_of(target.isa(isa), x.dtype, x.atom.lanes), target).seconds)
    one = operands.case(p)
    values = np.random.default_rng(0).integers(-4, 5, int(np.prod(image))).astype(np.float32)
    a = view.gather(values)
    b = one.b[np.add.outer(np.arange(p.k) * one.fields["b_k"], np.arange(n))]
    want = (a @ b)[None].astype(np.float64)
    rows = {"a_m": p.k, "a_k": 1} if gathered else {"a_m": 0, "a_k": 0}
    one = replace(one, a=np.ravel(a) if gathered else values, a_offset=0, fields=one.fields | rows, want=want)
    atom = atom_of(target.isa(isa), s.dtype, s.atom.lanes)
    kernel = gemm.build(s, target.isa(isa), atom, view=None if gathered else view)
    return Subject(kernel, one, p.flops, spell(s))


SUBJECTS = {
    "f32-64-avx2": lambda: product("avx2", (64, 64, 64)),
    "f32-odd-avx2": lambda: product("avx2", (65, 67, 63)),
    "f64-48-avx2": lambda: product("avx2", (48, 48, 48), "f64"),
    "f32-m1-packed-avx2": lambda: product("avx2", (1, 256, 256), b="packed"),
    "f32-m4-packed-avx2": lambda: product("avx2", (4, 256, 256), b="packed"),
    "f32-dot-avx2": lambda: product("avx2", (8, 8, 512), b="col"),
    "bf16-m16-packed-avx2": lambda: product("avx2", (16, 128, 128), "bf16", "packed"),
    "f16-48-avx2": lambda: product("avx2", (48, 48, 48), "f16"),
    "s8-64-avx2": lambda: product("avx2", (64, 64, 64), "s8-s8-s32"),
    "u8-m4-packed-avx2": lambda: product("avx2", (4, 256, 256), "u8-s8-s32", "packed"),
    "u4-m1-avx2": lambda: product("avx2", (1, 256, 256), "f32-u4-f32", "codes"),
    "pack-f32-avx2": lambda: packing("avx2", (64, 128)),
    "pack-f32-columns-avx2": lambda: packing("avx2", (64, 128), layout="col"),
    "pack-s8-avx2": lambda: packing("avx2", (64, 128), "s8-s8-s32"),
    "conv-56-avx2": lambda: convolution("avx2", (56, 56, 64), 64),
    "conv-56-gathered-avx2": lambda: convolution("avx2", (56, 56, 64), 64, gathered=True),
    "conv-14-avx2": lambda: convolution("avx2", (14, 14, 256), 256),
    "conv-14-gathered-avx2": lambda: convolution("avx2", (14, 14, 256), 256, gathered=True),
    "f32-64-sse2": lambda: product("sse2", (64, 64, 64)),
    "f32-m4-packed-sse2": lambda: product("sse2", (4, 128, 128), b="packed"),
    "f32-dot-sse2": lambda: product("sse2", (8, 8, 512), b="col"),
    "bf16-m16-packed-sse2": lambda: product("sse2", (16, 64, 128), "bf16", "packed"),
    "s8-48-sse2": lambda: product("sse2", (48, 48, 48), "s8-s8-s32"),
    "pack-f32-sse2": lambda: packing("sse2", (64, 128)),
    "f32-24-scalar": lambda: product("scalar", (24, 24, 24)),
}
"""Name, which ends in the instruction set -> what to count."""


def count(subject, folder, valgrind, program):
    """The row of a kernel, whose result is checked too.

    Args:
        subject: what to count.
        folder: an empty one, for what callgrind writes.
        valgrind: path of valgrind.
        program: path of the driver.
    """
    name, out = subject.kernel.name, folder / "callgrind"
    command = [valgrind, "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}", f"--toggle-collect={name}"]
    (got,) = driver.run([*command, program, *driver.objects([subject.kernel])], [(0, subject.kernel, subject.case, 1)])
    subject.case.check(got, name)
    total = int(re.search(r"^totals: (\d+)$", out.read_text(), re.MULTILINE)[1])
    return Row(total, subject.operations, round(total / subject.operations, 5), subject.schedule)


def compiler():
    """The compiler's kind and major version, which instructions depend on."""
    found = find_compiler("x86_64")
    number = re.findall(r"\d+(?:\.\d+)+", found.version)[-1].split(".")
    return f"{found.kind} {'.'.join(number[: 2 if found.kind == 'zig' else 1])}"


def valgrind_version(valgrind):
    """As it says itself."""
    return subprocess.run([valgrind, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def load(path=BASELINE):
    """Compiler -> kernel -> row."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text())
    return {maker: {name: Row(**row) for name, row in rows.items()} for maker, rows in data.items()}


def store(maker, rows, path=BASELINE):
    """Write a compiler's rows; those of others, and of kernels that were not counted now, stay as they are."""
    kept = load(path)
    kept[maker] = {**kept.get(maker, {}), **rows}
    data = {x: {name: asdict(kept[x][name]) for name in sorted(kept[x])} for x in sorted(kept)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def difference(stored, counted):
    """The differences, as sentences; empty within the tolerance."""
    extra = counted.instructions - stored.instructions
    if abs(extra) <= TOLERANCE * stored.instructions and counted.operations == stored.operations:
        return ""
    change = f"{abs(extra) / stored.instructions:.1%} {'more' if extra > 0 else 'fewer'}"
    said = f"{counted.instructions} instructions, {change} than the {stored.instructions} stored"
    if counted.schedule != stored.schedule:
        said += f"; the schedule was {stored.schedule} and is {counted.schedule}"
    return f"{said}; if that is as it should be, `pytest bench/test_instructions.py --store`"
