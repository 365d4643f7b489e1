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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from portmm.build import cache, cache_contents
from portmm.dispatch import config
from portmm.errors import PortmmError
from portmm.host import detect
from portmm.target.target import load_target, names

if TYPE_CHECKING:
    from collections.abc import Iterator

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


Step = tuple[str, Callable[[], "list[Check]"]]


def steps(*, libraries: bool = True) -> list[Step]:
    """The checks in order: the subject of each, and its function.

    Args:
        libraries: open every library that `compare` supports, which takes some seconds.
    """
    fixed: list[Step] = [
        ("Python", _python),
        ("machine", _machine),
        ("instruction sets", _isas),
        ("cores", _cores),
        ("py-cpuinfo", _cross_check),
        ("target", _target),
        ("compiler", _compiler),
        ("Python headers", _headers),
        ("cache", _cache),
        ("kernel", _kernel),
        ("measured rates", _measured),
        ("devices", _devices),
        ("emulators", _emulators),
    ]
    return fixed + [(name, partial(_library, name)) for name in (_peers() if libraries else ())]


def run(step: Step) -> list[Check]:
    """The findings of one step; an error in it is one of them."""
    name, check = step
    try:
        return check()
    except (PortmmError, OSError, ValueError) as error:
        return [Check(name, "fail", str(error))]


def usable(checks: list[Check]) -> bool:
    """Whether portmm works: no check failed."""
    return all(check.state != "fail" for check in checks)


def _python() -> list[Check]:
    import numpy as np

    from portmm.version import VERSION

    return [Check("Python", "ok", f"Python {platform.python_version()}, NumPy {np.__version__}, portmm {VERSION}")]


def _machine() -> list[Check]:
    here = detect.host()
    if here.name not in names("chip"):
        return [Check("machine", "warn", f"{here.title}: only scalar code is known to run", "describe its chip")]
    if any(not (m.vendor or m.implementer) for m in here.match):
        return [
            Check(
                "machine",
                "note",
                f"{here.title}: there is no description of this chip, so a generic one is used",
                "run `portmm probe`, and describe the chip in targets/chip/",
            )
        ]
    return [Check("machine", "ok", f"{here.name}: {here.title}")]


def _isas() -> list[Check]:
    """ISAs of the host, and ISAs of its chip that the (virtual) machine or kernel masks."""
    here = detect.host()
    checks = [Check("instruction sets", "ok", ", ".join(isa.name for isa in here.isas))]
    described = load_target(here.name).isas if here.name in names("chip") else ()
    have = {isa.name for isa in here.isas}
    for isa in described:
        if isa.name not in have:
            lacking = ", ".join(detect.missing(isa))
            checks.append(
                Check(
                    "instruction sets",
                    "warn",
                    f"the chip has {isa.title}, but here {lacking} is masked",
                    "on a virtual machine, select the host's CPU model; else check the options of the kernel",
                )
            )
    return checks


def _cores() -> list[Check]:
    present, allowed, used = os.cpu_count() or 1, len(os.sched_getaffinity(0)), detect.host().cores
    text = f"{used} used, of {allowed} processors allowed to this process and {present} in the machine"
    return [Check("cores", "ok" if allowed == present else "note", text)]


def _cross_check() -> list[Check]:
    try:
        differences = detect.cross_check()
    except Exception as error:  # noqa: BLE001 - an error of py-cpuinfo is not one of portmm
        return [Check("py-cpuinfo", "note", f"cannot describe this machine: {error}")]
    agreement = Check("py-cpuinfo", "ok", "agrees on vendor, name and flags")
    return [Check("py-cpuinfo", "note", line) for line in differences] or [agreement]


def _target() -> list[Check]:
    requested = os.environ.get("PORTMM_TARGET", "")
    try:
        selected = config.target()
    except PortmmError as error:
        return [Check("target", "fail", str(error), "correct or unset PORTMM_TARGET")]
    text = f"{selected.title} with {selected.isas[0].title}"
    if requested:
        return [Check("target", "note", f"PORTMM_TARGET={requested}: {text}")]
    return [Check("target", "ok", text)]


def _compiler() -> list[Check]:
    from portmm.build.compiler import find_compiler

    try:
        compiler = find_compiler()
    except PortmmError as error:
        return [Check("compiler", "fail", str(error), "pip install 'portmm[compiler]', or install gcc")]
    return [Check("compiler", "ok", f"{compiler.kind}: {' '.join(compiler.argv)} ({compiler.version})")]


def _headers() -> list[Check]:
    from portmm.runtime.cpu import python_headers

    headers = python_headers()
    if headers is None:
        return [
            Check(
                "Python headers",
                "warn",
                "none: calls use cffi, and are some microseconds slower",
                "install the development package of this Python, for example python3-dev",
            )
        ]
    return [Check("Python headers", "ok", str(headers))]


def _cache() -> list[Check]:
    directory = cache.cache_dir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.write_note("doctor", "written")
        works = cache.read_note("doctor") == "written"
    if not works:
        reason = "; ".join(str(w.message) for w in caught) or f"{directory} cannot be written to"
        return [Check("cache", "warn", reason, "set PORTMM_CACHE to a directory that only you can write to")]
    count, size = len(cache_contents.cache_entries()), cache_contents.cache_size()
    return [Check("cache", "ok", f"{directory}: {count} kernels, {size / 1e6:.1f} MB")]


def _kernel() -> list[Check]:
    """Build and run of a kernel in a process of its own, since an illegal instruction may kill it."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL], capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [Check("kernel", "fail", f"not built and run within {TRIAL_SECONDS:.0f} s")]
    if done.returncode == 0:
        return [Check("kernel", "ok", "one was built, run and compared with NumPy")]
    last = (done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"])[-1]
    return [Check("kernel", "fail", last, "fix the failures above; else report this with `portmm target --json`")]


def _measured() -> list[Check]:
    try:
        rates = config.target().measured
    except PortmmError:
        return []
    if not rates:
        return [Check("measured rates", "note", "none: selection uses the chip's description", "portmm probe")]
    return [Check("measured rates", "ok", f"{len(rates)} for this machine")]


def _devices() -> list[Check]:
    """Requirements of arrays on devices; a missing one is only a note, since there may be no device."""
    from portmm.build import nvrtc
    from portmm.dispatch.machine import described
    from portmm.runtime import cuda, opencl

    checks = []
    for name, query in (("CUDA", cuda.facts), ("OpenCL", opencl.facts)):
        try:
            facts = query()
            if facts.language == "cuda":
                nvrtc.find_nvrtc()
            checks.append(Check(name, "ok", f"{facts.name}: {described(facts).title}"))
        except PortmmError as error:
            checks.append(Check(name, "note", str(error)))
    return checks


def _emulators() -> list[Check]:
    from shutil import which

    return [
        Check("emulators", "ok", f"{program}, {purpose}")
        if which(program)
        else Check("emulators", "note", f"no {program}, {purpose} (developers only)", f"apt install {package}")
        for program, purpose, package in EMULATORS
    ]


def _peers() -> Iterator[str]:
    from portmm.comparison import CONTENDERS

    return (contender.name for contender in CONTENDERS if contender.peer)


def _library(name: str) -> list[Check]:
    """Finding on a library of `compare`: opened as there, in a process of its own."""
    from portmm.comparison.environment import Setup
    from portmm.comparison.peers import find
    from portmm.comparison.process import Worker, WorkerError

    contender = find([name])[0]
    worker = Worker(contender, Setup())
    try:
        greeting = worker.hear(OPENING_SECONDS)
    except WorkerError as error:
        return [Check(name, "note", f"cannot be opened: {error}", contender.hint)]
    finally:
        worker.close()
    if greeting["state"] != "ok":
        return [Check(name, "note", "not found, so `portmm compare` leaves it out", contender.hint)]
    return [Check(name, "ok", greeting["version"])]
