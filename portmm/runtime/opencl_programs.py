"""Programs of OpenCL, built by drivers and cached.

Owns the build of a program, and PyOpenCL, which is imported at the first use. A driver's binary is cached as other
machine code is. PyOpenCL's own cache is not used: it does not verify its entries, and it is redundant where the driver
has one too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from portmm.build import cache, failed_builds
from portmm.build.build_lock import build_lock
from portmm.build.shared_object import failure
from portmm.errors import NoDeviceError
from portmm.version import VERSION

_SUFFIX = ".clbin"


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program.

    Attributes:
        program: PyOpenCL's, built.
        name: for messages and the cache.
        log: of the driver's compiler.
        seconds: time of the compilation, now or when the entry was stored.
        cached: it was loaded from a binary.
        key: SHA-256 of everything that the binary depends on.
    """

    program: Any
    name: str
    log: str
    seconds: float
    cached: bool
    key: str


def pyopencl() -> Any:
    """The module `pyopencl`.

    Raises:
        NoDeviceError: it cannot be imported.
    """
    try:
        return import_module("pyopencl")
    except ImportError as error:
        raise NoDeviceError(
            f"OpenCL devices are reached through PyOpenCL, which cannot be imported: {error}; `pip install pyopencl`, "
            "and a driver that registers itself (an ICD): the GPU vendor's, or pocl-opencl-icd for processors"
        ) from error


def _identity(cl: Any, device: Any) -> tuple[str, ...]:
    """The names and versions that a binary depends on, besides its source and options."""
    platform = device.platform
    words = (platform.name, platform.version, device.name, device.version, device.driver_version)
    if not device.type & cl.device_type.CPU:
        return words
    # Virtual machines report the same processor name for different instruction sets.
    from portmm.host.detect import host_features

    return (*words, *sorted(host_features()))


def _raw(cl: Any, *arguments: Any) -> Any:
    # The public class looks in PyOpenCL's cache first, and warns of any
    # compiler output, which some drivers produce for every kernel.
    return cl._cl._Program(*arguments)  # noqa: SLF001


def _built(cl: Any, raw: Any, device: Any, options: str) -> Any:
    """PyOpenCL's program, built by its driver."""
    raw._build(options.encode(), [device])  # noqa: SLF001
    return cl.Program(raw)


def _log(cl: Any, program: Any, device: Any) -> str:
    return str(program.get_build_info(device, cl.program_build_info.LOG) or "").strip("\0\n ")


def _warm(cl: Any, context: Any, device: Any, options: str, key: str) -> Program | None:
    """The program from the cache; None if there is none, or the driver rejects it."""
    cached = cache.load(key, _SUFFIX)
    if cached is None:
        return None
    entry, binary = cached
    try:
        program = _built(cl, _raw(cl, context, [device], [binary]), device, options)
    except cl.Error:
        return None
    return Program(program, entry.name, entry.more.get("log", ""), entry.seconds, cached=True, key=key)


def _cold(  # noqa: PLR0917 - one place calls it
    cl: Any, context: Any, device: Any, source: str, stem: str, options: str, key: str
) -> Program:
    start = time.perf_counter()
    raw = None
    words = (f"OpenCL's driver for {device.name}", *options.split())
    try:
        raw = _raw(cl, context, source)
        program = _built(cl, raw, device, options)
    except cl.Error as error:
        message = (_log(cl, raw, device) if raw is not None else "") or str(error)
        refused = failure(words, key, source, message, suffix=".cl", advice="try a newer driver")
        raise (failed_builds.transient if failed_builds.is_transient(None, message) else failed_builds.permanent)(
            key, refused
        ) from error
    seconds = time.perf_counter() - start
    return Program(program, stem, _log(cl, raw, device), seconds, cached=False, key=key)


def compile_opencl(source: str, name: str, context: Any, device: Any = None, options: str = "") -> Program:
    """Build `source` for a device, or load it from the cache if the driver accepts the binary.

    Concurrent processes compile the same program once.

    Args:
        source: OpenCL C.
        name: for messages and the cache.
        context: PyOpenCL's.
        device: one of the context's, by default its first.
        options: for the driver's compiler, with spaces between.

    Raises:
        BuildError: the compiler failed; its output is in the message.
        NoDeviceError: there is no PyOpenCL.
    """
    cl = pyopencl()
    device = context.devices[0] if device is None else device
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in name) or "kernel"
    text = "\0".join((VERSION, "opencl", *_identity(cl, device), options, source))
    key = cache.digest(text.encode("utf-8", "replace"))
    program = _warm(cl, context, device, options, key)
    if program is not None:
        return program
    with build_lock(key):
        program = _warm(cl, context, device, options, key)
        if program is None:
            refused = failed_builds.known(key)
            if refused is not None:
                raise refused
            program = _cold(cl, context, device, source, stem, options, key)
            _keep(cl, program, device, options)
    return program


def _keep(cl: Any, program: Program, device: Any, options: str) -> None:
    """Store a binary in the cache; drivers without binaries compile again."""
    try:
        devices = program.program.get_info(cl.program_info.DEVICES)
        binary = program.program.get_info(cl.program_info.BINARIES)[devices.index(device)]
    except (cl.Error, ValueError):
        return
    if binary:
        compiler = f"{device.platform.name} {device.driver_version}"
        command, more = f"{device.name}: {options or 'no options'}", {"log": program.log}
        try:
            cache.keep(
                program.key, bytes(binary), name=program.name, seconds=program.seconds, compiler=compiler,
                command=command, suffix=_SUFFIX, more=more,
            )  # fmt: skip
        except OSError:
            return
