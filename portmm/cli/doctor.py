"""Diagnosis of this machine: missing requirements, and their remedies.

Owns the checks of `portmm doctor`. A check never raises: an error in it is its
finding.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from portmm.build import cache, cache_contents
from portmm.dispatch import config
from portmm.errors import PortmmError
from portmm.host import detect
from portmm.target.target import load_target, names
from portmm.util import system

STATES = ("ok", "note", "warn", "fail")
"""Correct; worth knowing; works, but not as well as possible; portmm does not work."""

TRIAL_SECONDS = 120.0
"""Time limit of the process that builds and runs a kernel."""
OPENING_SECONDS = 60.0
"""Time limit of opening a library."""

# Programs with which developers run code of other machines: program, purpose, Debian's package.
EMULATORS = (
    ("aarch64-linux-gnu-gcc", "to compile for AArch64", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
    ("qemu-aarch64", "to run AArch64 kernels", "qemu-user"),
    ("qemu-x86_64", "to run as on an older x86-64", "qemu-user"),
)

_TRIAL = """
import warnings
import numpy as np
import portmm
warnings.filterwarnings("error", message="portmm computes with NumPy")
rng = np.random.default_rng(0)
a, b = rng.random((37, 41), np.float32), rng.random((41, 43), np.float32)
assert np.allclose(portmm.matmul(a, b), a @ b, rtol=1e-4), "the kernel's result is wrong"
"""


@dataclass(frozen=True, slots=True)
class Check:
    """Finding of a check.

    Attributes:
        name: subject of the check.
        state: one of `STATES`.
        text: the finding.
        remedy: the action to take, empty if none is needed.
    """

    name: str
    state: str
    text: str
    remedy: str = ""


Step = tuple[str, Callable[[], "Iterable[Check]"]]


def steps(*, libraries: bool = True) -> list[Step]:
    """The checks in order: the subject of each, and its function.

    Args:
        libraries: open every library that `compare` supports, which takes some seconds.
    """
    from portmm.comparison import CONTENDERS

    fixed: list[Step] = [
        ("Python", _python), ("machine", _machine), ("instruction sets", _isas), ("cores", _cores),
        ("py-cpuinfo", _cross_check), ("target", _target), ("compiler", _compiler), ("Python headers", _headers),
        ("cache", _cache), ("kernel", _kernel), ("measured rates", _measured), ("devices", _devices),
        ("emulators", _emulators),
    ]  # fmt: skip
    return fixed + [(x.name, partial(_library, x.name)) for x in CONTENDERS if x.peer and libraries]


def run(step: Step) -> list[Check]:
    """The findings of one step; an error in it is one of them."""
    name, check = step
    checks: list[Check] = []
    try:
        checks.extend(check())
    except (PortmmError, OSError, ValueError) as error:
        checks.append(Check(name, "fail", str(error)))
    return checks


def usable(checks: list[Check]) -> bool:
    """Whether portmm works: no check failed."""
    return all(check.state != "fail" for check in checks)


def _python() -> Iterator[Check]:
    import numpy as np

    from portmm.version import VERSION

    yield Check("Python", "ok", f"Python {platform.python_version()}, NumPy {np.__version__}, portmm {VERSION}")


def _machine() -> Iterator[Check]:
    here = detect.host()
    if here.name not in names("chip"):
        yield Check("machine", "warn", f"{here.title}: only scalar code is known to run", "describe its chip")
    elif any(not (m.vendor or m.implementer) for m in here.match):
        text = f"{here.title}: there is no description of this chip, so a generic one is used"
        yield Check("machine", "note", text, "run `portmm probe`, and describe the chip in targets/chip/")
    else:
        yield Check("machine", "ok", f"{here.name}: {here.title}")


def _isas() -> Iterator[Check]:
    """ISAs of the host, and ISAs of its chip that the (virtual) machine or kernel masks."""
    here = detect.host()
    yield Check("instruction sets", "ok", ", ".join(isa.name for isa in here.isas))
    described = load_target(here.name).isas if here.name in names("chip") else ()
    remedy = "on a virtual machine, select the host's CPU model; else check the options of the kernel"
    for isa in described:
        if isa.name not in {x.name for x in here.isas}:
            text = f"the chip has {isa.title}, but here {', '.join(detect.missing(isa))} is masked"
            yield Check("instruction sets", "warn", text, remedy)


def _cores() -> Iterator[Check]:
    present, allowed, used = os.cpu_count() or 1, len(system.processors()), detect.host().cores
    text = f"{used} used, of {allowed} processors allowed to this process and {present} in the machine"
    yield Check("cores", "ok" if allowed == present else "note", text)


def _cross_check() -> Iterator[Check]:
    try:
        differences = detect.cross_check()
    except Exception as error:  # noqa: BLE001 - an error of py-cpuinfo is not one of portmm
        differences = [f"cannot describe this machine: {error}"]
    for line in differences:
        yield Check("py-cpuinfo", "note", line)
    if not differences:
        yield Check("py-cpuinfo", "ok", "agrees on vendor, name and flags")


def _target() -> Iterator[Check]:
    requested = os.environ.get("PORTMM_TARGET", "")
    try:
        selected = config.target()
    except PortmmError as error:
        yield Check("target", "fail", str(error), "correct or unset PORTMM_TARGET")
        return
    text = f"{selected.title} with {selected.isas[0].title}"
    yield Check("target", "note", f"PORTMM_TARGET={requested}: {text}") if requested else Check("target", "ok", text)


def _compiler() -> Iterator[Check]:
    from portmm.build.compiler import find_compiler

    try:
        compiler = find_compiler()
    except PortmmError as error:
        yield Check("compiler", "fail", str(error), "pip install 'portmm[compiler]', or install gcc")
    else:
        yield Check("compiler", "ok", f"{compiler.kind}: {' '.join(compiler.argv)} ({compiler.version})")


def _headers() -> Iterator[Check]:
    from portmm.runtime.cpu import python_headers

    headers = python_headers()
    text = "none: calls use cffi, and are some microseconds slower"
    remedy = "install the development package of this Python, for example python3-dev"
    yield Check("Python headers", "ok", str(headers)) if headers else Check("Python headers", "warn", text, remedy)


def _cache() -> Iterator[Check]:
    directory = cache.cache_dir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.write_note("doctor", "written")
        works = cache.read_note("doctor") == "written"
    if works:
        count, size = len(cache_contents.cache_entries()), cache_contents.cache_size()
        yield Check("cache", "ok", f"{directory}: {count} kernels, {size / 1e6:.1f} MB")
    else:
        reason = "; ".join(str(w.message) for w in caught) or f"{directory} cannot be written to"
        yield Check("cache", "warn", reason, "set PORTMM_CACHE to a directory that only you can write to")


def _kernel() -> Iterator[Check]:
    """Build and run of a kernel in a process of its own, since an illegal instruction may kill it."""
    command = [sys.executable, "-P", "-c", _TRIAL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield Check("kernel", "fail", f"not built and run within {TRIAL_SECONDS:.0f} s")
        return
    if done.returncode == 0:
        yield Check("kernel", "ok", "one was built, run and compared with NumPy")
        return
    last = (done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"])[-1]
    yield Check("kernel", "fail", last, "fix the failures above; else report this with `portmm target --json`")


def _measured() -> Iterator[Check]:
    with suppress(PortmmError):
        if rates := config.target().measured:
            yield Check("measured rates", "ok", f"{len(rates)} for this machine")
        else:
            yield Check("measured rates", "note", "none: selection uses the chip's description", "portmm probe")


def _devices() -> Iterator[Check]:
    """Requirements of arrays on devices; a missing one is only a note, since there may be no device."""
    from portmm.build import nvrtc
    from portmm.dispatch.machine import described
    from portmm.runtime import cuda, opencl

    for name, query in (("CUDA", cuda.facts), ("OpenCL", opencl.facts)):
        try:
            facts = query()
            if facts.language == "cuda":
                nvrtc.find_nvrtc()
            yield Check(name, "ok", f"{facts.name}: {described(facts).title}")
        except PortmmError as error:
            yield Check(name, "note", str(error))


def _emulators() -> Iterator[Check]:
    from shutil import which

    for program, purpose, package in EMULATORS:
        if which(program):
            yield Check("emulators", "ok", f"{program}, {purpose}")
        else:
            yield Check("emulators", "note", f"no {program}, {purpose} (developers only)", f"apt install {package}")


def _library(name: str) -> Iterator[Check]:
    """Finding on a library of `compare`: opened as there, in a process of its own."""
    from portmm.comparison.peers import Setup, find
    from portmm.comparison.process import Worker, reply

    contender = find([name])[0]
    worker = Worker(contender, Setup())
    greeting = reply(worker, OPENING_SECONDS)
    worker.close()
    if greeting["state"] == "ok":
        yield Check(name, "ok", greeting["version"])
    else:
        missing = "not found, so `portmm compare` leaves it out"
        text = f"cannot be opened: {greeting['reason']}" if "lost" in greeting else missing
        yield Check(name, "note", text, contender.hint)
