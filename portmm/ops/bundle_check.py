"""Checks of bundles: contents against their digests, and kernels by running them, here or under an emulator.

Owns the runs and the comparison; operands are those of `bundle_operands` and `bundle_runs`. An emulated processor has
no more than an instruction set needs: kernels for a Neoverse N1 run as on one, those with SVE on vectors as long as
theirs.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from portmm.build import bundle as bundles
from portmm.dispatch.stored_kernels import CODE, MACHINES, read
from portmm.errors import BundleError, ScheduleError
from portmm.host import detect
from portmm.ir.abi import ARGS
from portmm.ir.index import meaning, parsed
from portmm.ops import bundle_runs, bundle_weights
from portmm.ops.bundle_build import RUN, RUNS, SCHEDULES
from portmm.ops.bundle_devices import check_cubins
from portmm.ops.bundle_operands import Job, job_of
from portmm.runtime.cffi_launches import SYMBOLS
from portmm.runtime.cpu import MODULE
from portmm.schedule.text import parse
from portmm.target.target import load_isa, load_target
from portmm.util import system

if TYPE_CHECKING:
    from portmm.build.bundle import Bundle
    from portmm.target.isa import Isa

CUDA = (190).to_bytes(2, "little")
"""EM_CUDA, the machine of an ELF file that is a cubin."""
MOST = 64
"""Kernels of one run of the driver."""
CUBINS = "for CUDA not run: no device runs them here; each has its entry"
OTHERS = "of fused functions not run: their digests were compared"
LAYERS = "layers packed: their files have the digests that the bundle says"
RAN, OPERANDS, MACHINE = "correct", "not run: operands of unusual types", "not run: no machine here"
RAN_TOO, MACHINE_TOO = "of packing and attention correct", "of packing and attention not run: no machine here"
LEAST = "neoverse_n1"
"""The processor for AArch64 that qemu knows by name; it has a hyphen for the underscore."""


def check(bundle: Bundle, report: Callable[[int, int, str], None] = lambda *_: None) -> dict[str, int]:
    """Check all of a bundle.

    Returns:
        Numbers of kernels by what was done with them.

    Raises:
        BundleError: contents are damaged, or a kernel computes another result.
    """
    bundles.check(bundle)
    counts: Counter[str] = Counter()
    groups = (_products(bundle), RAN, MACHINE), (_others(bundle), RAN_TOO, MACHINE_TOO)
    every, done = [x for runs, *_ in groups for x in runs], 0
    with tempfile.TemporaryDirectory(prefix="portmm-check-") as folder:
        for runs, correct, missing in groups:
            for name in dict.fromkeys(x.isa for x in runs):
                command, some, ran = _command(load_isa(name), Path(folder)), [x for x in runs if x.isa == name], set()
                for at in range(0, len(some), MOST):
                    report(done, len(every), f"{name} kernels" if command else f"{name} has no machine here")
                    part = some[at : at + MOST]
                    ran |= _run(bundle, part, command, Path(folder)) if command else set()
                    done += len(part)
                counts[correct] += len(ran)
                counts[OPERANDS if command else missing] += len({x.kernel for x in some} - ran)
    report(len(every), len(every), "done")
    known = {int(x.number) for x in every if x.number}
    counts[OTHERS] = sum(map(_kernels, (bundle.load(x)[1] for x in range(bundle.objects) if x not in known)))
    if cubins := check_cubins(bundle):
        counts[CUBINS] = cubins
    with read(bundle):
        machines = [x.partition("=")[0] for x in bundle.answer(MACHINES) or ()]
    counts[LAYERS] = bundle_weights.check(bundle, machines)
    return {text: number for text, number in counts.items() if number}


class _Run(NamedTuple):
    """A run of a kernel.

    Attributes:
        text: what is run.
        kernel: what it is counted by.
        isa: instruction set.
        number: of its object; empty for one of the bundle's library.
        symbol: of its function.
        job: makes operands and results, or raises `ScheduleError`.
    """

    text: str
    kernel: str
    isa: str
    number: str
    symbol: str
    job: Callable[[], Job]


def _products(bundle: Bundle) -> list[_Run]:
    """Runs of the kernels of all schedules."""
    runs = []
    for text in filter(None, bundle.answer(SCHEDULES) or []):
        with read(bundle):
            number, symbol, swap, size, scratch, *_ = bundle.answer(CODE + text) or [""]
            s, workspace = parse(text), meaning(parsed(scratch))
            job = partial(job_of, s, workspace, int(size), swap=swap == "1")
            runs.append(_Run(text, text, s.isa, number, symbol, job))
    return runs


def _others(bundle: Bundle) -> list[_Run]:
    """Runs of the kernels that pack weights, and of those of attention."""
    runs = []
    with read(bundle):
        for i in range(int((bundle.answer(RUNS) or ["0"])[0])):
            number, symbol, text = bundle.answer(f"{RUN}{i}") or []
            runs.append(_Run(text, number, bundle_runs.isa_of(text), number, symbol, partial(bundle_runs.job_of, text)))
    return runs


def _kernels(code: bytes) -> bool:
    """Whether an object is of kernels for processors, as neither the run time nor a cubin is."""
    return code[18:20] != CUDA and not any(x.encode() in code for x in (SYMBOLS[0], f"PyInit_{MODULE}"))


def _command(isa: Isa, folder: Path) -> list[str]:
    """The command of the driver for an instruction set; empty where it cannot run."""
    from portmm.build.compiler import find_compiler, zig_target
    from portmm.errors import NoCompilerError

    here = system.machine()
    arch = here if isa.arch == "any" else isa.arch
    before: list[str] = []
    if arch == here:
        if detect.missing(isa):
            return []
    else:
        emulator = shutil.which(f"qemu-{arch}") or shutil.which(f"qemu-{arch}-static")
        root = Path(f"/usr/{arch}-linux-gnu")
        if not emulator or not root.is_dir():
            return []
        before = [emulator, "-L", str(root), "-cpu", _processor(isa)]
    program = folder / f"driver-{arch}"
    if not program.exists():
        try:
            compiler = find_compiler(None if arch == here else arch)
        except NoCompilerError:
            return []
        text = (Path(__file__).parent.parent / "runtime" / "check.c").read_text(encoding="utf-8")
        program.with_suffix(".c").write_text(f"#define _GNU_SOURCE 1\n{ARGS}{text}", encoding="utf-8")
        words = [*compiler.argv, "-O1", "-std=gnu11", f"{program}.c", "-o", str(program), "-ldl"]
        words += ["-target", zig_target(arch)] if compiler.kind == "zig" else []
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BundleError(f"the driver of kernels for {arch} was not built: {done.stderr[:500]}")
    return [*before, str(program)]


def _processor(isa: Isa) -> str:
    """The processor that is emulated for an instruction set."""
    if isa.arch == "aarch64" and isa.name in {x.name for x in load_target(LEAST).isas}:
        return LEAST.replace("_", "-")
    return f"max,sve-default-vector-length={isa.vector_bytes}" if isa.name.startswith("sve") else "max"


def _run(bundle: Bundle, runs: Sequence[_Run], command: Sequence[str], folder: Path) -> set[str]:
    """Run kernels and compare their results; returns those that have operands here."""
    words: list[str] = []
    jobs: list[tuple[_Run, Job]] = []
    for x in runs:
        path = bundle.library
        with read(bundle):
            if x.number:
                entry, code = bundle.load(int(x.number))
                path = folder / f"{entry.key}.so"
                path.write_bytes(code)
            try:
                jobs.append((x, x.job()))
            except ScheduleError:
                continue
        words += [str(path), x.symbol]
    data = b"".join(job.data for _, job in jobs)
    done = subprocess.run([*command, *words], input=data, capture_output=True, check=False)
    at = 0
    for x, job in jobs:
        for result in job.results:
            memory = done.stdout[at : at + result.nbytes]
            at += result.nbytes
            if len(memory) < result.nbytes:
                raise BundleError(
                    f"{x.text} of {bundle.path} did not run: {command[0]} ended with status {done.returncode}: "
                    f"{done.stderr[:500].decode(errors='replace')}; build the bundle again with another compiler (CC)"
                )
            if wrong := result.differing(memory):
                raise BundleError(
                    f"{x.text} of {bundle.path} computes another result: {wrong} elements differ; do not use the "
                    "bundle, build it again with another compiler (CC), and report it if that does not help"
                )
    return {x.kernel for x, _ in jobs}
