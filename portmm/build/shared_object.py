"""Compilation of C source to a shared object, through the cache.

Owns the cache key and the run of the compiler. An object that is there is used before any search for a compiler:
see `build.stored_objects`. A build that failed is not retried at once: see `build.failed_builds`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portmm.build import cache, child_process, failed_builds, stored_objects
from portmm.build.build_lock import build_lock
from portmm.build.builds_ahead import compiling
from portmm.build.compiler import (
    Compiler,
    command,
    common_options,
    find_compiler,
    is_named,
    limit_seconds,
    programs,
)
from portmm.build.elf import fault
from portmm.errors import BuildError, NoCompilerError
from portmm.ir import abi
from portmm.util import system
from portmm.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

_SHOWN_LINES = 12

# e_machine of an ELF header: System V ABI, "Machine Information"; cputype of a Mach-O header: <mach/machine.h>.
_MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243, f"aarch64-{system.MACOS}": 0x0100000C}


@dataclass(frozen=True, slots=True)
class Artifact:
    """Machine code in a file, and its provenance.

    Attributes:
        path: the shared object.
        source: the C source.
        flags: the flags passed to `build`.
        command: the command that compiles it, relative to the source's directory.
        key: SHA-256 of everything that it depends on.
        seconds: time of the compiler, in this call or when the entry was built.
        cached: whether it came from the cache.
        code: the verified bytes of the shared object: load these, and not the file.
    """

    path: Path
    source: str
    flags: tuple[str, ...]
    command: tuple[str, ...]
    key: str
    seconds: float
    cached: bool
    code: bytes = field(default=b"", repr=False, compare=False)


def _key(source: str, compiler: Compiler, argv: tuple[str, ...], include: tuple[Path, ...]) -> str:
    identity = (VERSION, str(abi.VERSION), compiler.kind, compiler.version, compiler.arch)
    # Installing other headers at the same path changes their directory's time.
    headers = tuple(str(f.stat().st_mtime_ns) for f in include if f.is_dir())
    text = "\0".join((*identity, *argv, *headers, source))
    return cache.digest(text.encode("utf-8", "surrogateescape"))


def _shell(argv: tuple[str, ...]) -> str:
    import shlex

    return shlex.join(argv)


_NEWER = "try a newer compiler through CC"


def failure(
    argv: tuple[str, ...], key: str, source: str, output: str, *, suffix: str = ".c", advice: str = _NEWER
) -> BuildError:
    """The error for a source that did not compile; the source is kept for inspection.

    Args:
        argv: the command, or the name of the compiler and its options.
        key: the build's SHA-256.
        source: the source that did not compile.
        output: the compiler's messages, of which the first lines are shown.
        suffix: suffix of the file that the source is kept in.
        advice: the remedy that the message suggests.
    """
    lines = output.strip().splitlines() or ["(no output)"]
    left = len(lines) - _SHOWN_LINES
    shown = "\n".join("  " + line for line in lines[:_SHOWN_LINES])
    more = f"\n  ... and {left} more lines" if left > 0 else ""
    try:
        kept = str(cache.keep_failed(key, source, suffix))
    except OSError:
        kept = "not kept, no directory is writable"
    return BuildError(
        f"{argv[0]} did not build a kernel; its output:\n{shown}{more}\n"
        f"source: {kept}\ncommand: {_shell(argv)}\n"
        f"{advice}, or report this with the source"
    )


def _run(argv: tuple[str, ...], source: str, stem: str, seconds: float) -> tuple[bytes, child_process.Finished]:
    """The shared object, empty if there is none, and the result of the compiler.

    Raises:
        OSError: there is no temporary directory, or the compiler cannot be run.
    """
    import tempfile

    from portmm.build.temp_directories import BUILD_PREFIX, directory
    from portmm.build.trusted_files import chain_fault

    # Where other users can replace temporary files, they could replace the source or the object.
    parent = cache.usable_dir() if chain_fault(tempfile.gettempdir()) else None
    with directory(BUILD_PREFIX, parent) as folder:
        (folder / f"{stem}.c").write_text(source, encoding="utf-8")
        done = child_process.run(argv, seconds, folder=folder)
        product = folder / f"{stem}.so"
        exists = done.status == 0 and product.is_file()
        return product.read_bytes() if exists else b"", done


_worked: set[str] = set()
"""Compilers that have built something in this process."""


def _hanging(compiler: Compiler) -> str:
    """Name under which it is recorded that a compiler hangs."""
    return "\0".join(("compiler", *compiler.argv, compiler.version, compiler.arch))


def _check_known(compiler: Compiler, key: str) -> None:
    """Raise the failure of an earlier build, unless it is time to retry."""
    names = (key,) if _hanging(compiler) in _worked else (key, _hanging(compiler))
    for name in names:
        earlier = failed_builds.known(name)
        if earlier is not None:
            raise earlier


def _make(  # noqa: PLR0917 - arguments of `build`, and values derived from them
    source: str, compiler: Compiler, argv: tuple[str, ...], key: str, stem: str, symbols: tuple[str, ...]
) -> tuple[cache.Entry, bytes]:
    """A new entry and its code.

    Raises:
        BuildError: the compiler failed, now or before.
        OSError: there is no directory to build in, or to keep the object in.
    """
    _check_known(compiler, key)
    start, limit = time.perf_counter(), limit_seconds(compiler.kind)
    code, done = _run(argv, source, stem, limit)
    seconds = time.perf_counter() - start
    if done.status is None:
        error = failure(argv, key, source, f"no answer within {limit:.0f} s; it was stopped")
        # One source may be too much for a compiler that builds others; one that has built nothing is not run again.
        raise failed_builds.hung(key if _hanging(compiler) in _worked else _hanging(compiler), error)
    wrong = f"exit status {done.status}" if done.status else fault(code, _MACHINES.get(compiler.arch, 0), symbols)
    if wrong:
        is_transient = failed_builds.is_transient(done.status, done.output)
        error = failure(argv, key, source, done.output if done.status and done.output else f"{wrong}\n{done.output}")
        raise (failed_builds.transient if is_transient else failed_builds.permanent)(key, error)
    _worked.add(_hanging(compiler))
    command = _shell(argv)
    entry = cache.keep(key, code, name=stem, seconds=seconds, compiler=compiler.version, command=command)
    failed_builds.succeeded(key)
    return entry, code


def stored(source: str, *, flags: tuple[str, ...], arch: str | None = None, interface: str = "") -> Artifact | None:
    """The object of a source that was built before, by any compiler; None if there is none."""
    known = stored_objects.find(_identity(source, flags, arch or system.platform(), interface))
    return None if known is None else _artifact(known, source, flags)


def _identity(source: str, flags: tuple[str, ...], arch: str, interface: str) -> str:
    return stored_objects.identity(source, (*common_options(), *flags), arch, interface)


def _artifact(known: stored_objects.Stored, source: str, flags: tuple[str, ...]) -> Artifact:
    entry = known.entry
    return Artifact(entry.path, source, flags, tuple(entry.command.split()), entry.key, entry.seconds, True, known.code)


def build(
    source: str,
    *,
    flags: tuple[str, ...],
    arch: str | None = None,
    name: str = "kernel",
    include: tuple[Path, ...] = (),
    symbols: tuple[str, ...] = (),
    interface: str = "",
) -> Artifact:
    """Compile `source` into a shared object, or load it from where it was built before.

    Processes that need the same object at the same time compile it once.

    Args:
        source: C, self-contained without `include` and `-lc`.
        flags: the ISA's flags, and any others; never `-march=native`.
        arch: platform, by default this one: see `util.system`.
        name: stem of file names, in messages, debuggers and profilers.
        include: directories with headers.
        symbols: functions that the object must define.
        interface: identity of the headers, whatever their directory.

    Raises:
        NoCompilerError: there is no compiler for `arch`.
        BuildError: the compiler failed, now or recently; its messages are in that of the error.
    """
    machine = arch or system.platform()
    identity = _identity(source, flags, machine, interface)
    # A compiler that the user names builds what it has not built.
    known = None if is_named(machine) else stored_objects.find(identity)
    if known is not None and known.current:
        return _artifact(known, source, flags)
    try:
        compiler = find_compiler(arch)
    except NoCompilerError:
        known = known or stored_objects.find(identity)
        if known is None:
            raise
        return _artifact(known, source, flags)
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in name) or "kernel"
    argv = command(compiler, flags, include, stem)
    key = _key(source, compiler, argv, include)
    entry, code, cached = _loaded_or_built(source, compiler, argv, key, stem, symbols)
    stored_objects.record(identity, key, programs(compiler.argv, os.environ.get("PATH", os.defpath)))
    return Artifact(entry.path, source, flags, argv, key, entry.seconds, cached, code)


def _loaded_or_built(  # noqa: PLR0917 - as `_make`
    source: str, compiler: Compiler, argv: tuple[str, ...], key: str, stem: str, symbols: tuple[str, ...]
) -> tuple[cache.Entry, bytes, bool]:
    """The entry of a key, its code, and whether it was there."""
    loaded = cache.load(key)
    if loaded is not None:
        return (*loaded, True)
    _check_known(compiler, key)
    compiling()
    with build_lock(key):
        loaded = cache.load(key)
        if loaded is not None:
            return (*loaded, True)
        try:
            return (*_make(source, compiler, argv, key, stem, symbols), False)
        except OSError as error:
            text = f"cannot build {stem}: {error}; set TMPDIR and PORTMM_CACHE to writable directories"
            raise failed_builds.transient(key, BuildError(text)) from error
