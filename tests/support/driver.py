"""Kernels outside of this process: built by the real pipeline, run by driver.c, natively or emulated."""

from __future__ import annotations

import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from passed import compiled_by, folder_text, processor, unchanged, version

from portmm.build.shared_object import build
from portmm.codegen.c_kernel import source
from portmm.dispatch.cpu_kernels import workspace_bytes
from portmm.ir.abi import ARGS

if TYPE_CHECKING:
    from operands import Case

    from portmm.ir.nodes import Kernel

JOB = struct.Struct("1l5l6l6l6l1l2l")
OPERAND = struct.Struct("6l")


def compile_driver(folder: Path, command: list[str], *flags: str) -> str:
    """The driver's program, made by `command`."""
    text, program = folder / "driver.c", folder / "driver"
    text.write_text(ARGS + '#line 1 "driver.c"\n' + Path(__file__).with_name("driver.c").read_text())
    subprocess.run([*command, "-O1", "-Wall", "-Werror", *flags, str(text), "-o", str(program), "-ldl"], check=True)
    return str(program)


def objects(kernels: list[Kernel], *flags: str) -> list[str]:
    """Path and symbol of each kernel's shared object, in turn."""

    def one(kernel: Kernel) -> str:
        arch = None if kernel.isa.arch == "any" else kernel.isa.arch
        return str(build(source(kernel), flags=(*kernel.isa.flags, *flags), arch=arch, name=kernel.name).path)

    with ThreadPoolExecutor(2) as compilers:
        paths = list(compilers.map(one, kernels))
    return [word for path, kernel in zip(paths, kernels, strict=True) for word in (path, kernel.name)]


def job(number: int, kernel: Kernel, k: Case, workers: int) -> bytes:
    """The driver's input for one run."""
    f = k.fields
    c = k.fresh()
    longs = [number, *(f[x] for x in ("m", "n", "k", "batch")), workers]
    for flat, offset, name, steps in (
        (k.a, k.a_offset, "a", "mk"),
        (k.b, k.b_offset, "b", "kn"),
        (c, k.c.offset, "c", "mn"),
    ):
        strides = (*(f[f"{name}_{s}"] for s in steps), f[f"{name}_batch"])
        longs += [flat.nbytes, offset * flat.itemsize, *strides, flat.itemsize]
    longs.append(workspace_bytes(kernel, k.problem, workers))
    longs += [len(k.operands), k.numbers.nbytes]
    parts = [JOB.pack(*longs), k.a.tobytes(), k.b.tobytes(), c.tobytes(), k.numbers.tobytes()]
    for x in k.operands:
        head = OPERAND.pack(x.flat.nbytes, x.offset * x.flat.itemsize, *x.steps, x.flat.itemsize)
        parts += [head, x.flat.tobytes()]
    return b"".join(parts)


def check(
    command: list[str], jobs: list[tuple[Kernel, Any, int, object]], *flags: str, env: dict[str, str] | None = None
) -> None:
    """Each job (kernel, case, workers, what is said of it) gives what it should, or did so before.

    Kernels are built with `flags` beside their own; a case may end in fused expressions.
    """
    emulator = command[:-1]
    tools = (*emulator, version(emulator[0]) if emulator else processor(), folder_text("driver.c"))
    todo = []
    for kernel, case, workers, what in jobs:
        base = getattr(case, "case", case)
        more = () if base is case else case.parts()
        compiler = compiled_by((*kernel.isa.flags, *flags), None if kernel.isa.arch == "any" else kernel.isa.arch)
        text = (source(kernel), kernel.name, compiler, workspace_bytes(kernel, base.problem, workers), workers)
        if not unchanged(*text, *tools, *base.parts(), *more):
            todo.append((kernel, case, base, workers, what))
    kernels = list({id(kernel): kernel for kernel, *_ in todo}.values())
    numbers = {id(kernel): i for i, kernel in enumerate(kernels)}
    jobs = [(numbers[id(kernel)], kernel, base, workers) for kernel, _, base, workers, _ in todo]
    results = run_all([*command, *objects(kernels, *flags)], jobs, env) if jobs else []
    for (_, case, base, _, what), got in zip(todo, results, strict=True):
        case.check(got[0] if base is case else got, what)


def run(
    command: list[str], jobs: list[tuple[int, Kernel, Case, int]], env: dict[str, str] | None = None
) -> list[np.ndarray]:
    """C of each job (number of the kernel, kernel, operands, workers), all in one process."""
    return [c for c, *_ in run_all(command, jobs, env)]


def run_all(
    command: list[str], jobs: list[tuple[int, Kernel, Case, int]], env: dict[str, str] | None = None
) -> list[list[np.ndarray]]:
    """C of each job, and then the operands of fused expressions."""
    done = subprocess.run(
        command, input=b"".join(job(*j) for j in jobs), capture_output=True, check=False, env=env, timeout=300
    )
    assert done.returncode == 0, f"{command[:4]} ended with {done.returncode}: {done.stderr.decode()[-2000:]}"
    results, at = [], 0
    for _, _, k, _ in jobs:
        found = []
        for x in (k.c.flat, *(y.flat for y in k.operands)):
            found.append(np.frombuffer(done.stdout, x.dtype, x.size, at))
            at += x.nbytes
        results.append(found)
    assert at == len(done.stdout)
    return results
