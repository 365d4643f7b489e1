"""C source to a shared object, through the cache.

Owns the cache key and the run of the compiler. May import `ir.abi`, `build.cache`, `build.child_process`,
`build.compiler`, `build.elf`, `errors`, `build.failed_builds`, `build.temp_directories`, `version`. A build that failed is
not tried again at once: see `failures`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portmm.build import cache, child_process, failed_builds
from portmm.build.cache import cache_clear, cache_dir, cache_entries, cache_size
from portmm.build.compiler import Compiler, command, find_compiler, limit_seconds
from portmm.build.elf import fault
from portmm.errors import BuildError
from portmm.ir import abi
from portmm.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Artifact",
    "Compiler",
    "build",
    "cache_clear",
    "cache_dir",
    "cache_entries",
    "cache_size",
    "find_compiler",
]

_SHOWN_LINES = 12

# e_machine of an ELF header: System V ABI, "Machine Information".
_ELF_MACHINE = {"x86_64": 62, "aarch64": 183}


@dataclass(frozen=True, slots=True)
class Artifact:
    """Machine code in a file, and where it came from.

    Attributes:
        path: the shared object.
        source: the C source.
        flags: the flags that `build` was given.
        command: the command that makes it, relative to the source's directory.
        key: SHA-256 of everything that it depends on.
        seconds: how long the compiler took, now or when the entry was made.
        cached: no compiler was run.
        code: the shared object's bytes, which were checked: load these, and not the file.
    """

    path: Path
    source: str
    flags: tuple[str, ...]
    command: tuple[str, ...]
    key: str
    seconds: float
    cached: bool
    code: bytes = field(default=b"", repr=False, compare=False)


def _key(source: str, compiler: Compiler, words: tuple[str, ...], include: tuple[Path, ...]) -> str:
    identity = (VERSION, str(abi.VERSION), compiler.kind, compiler.version, compiler.arch)
    # Installing other headers at the same path changes their directory's time.
    headers = tuple(str(f.stat().st_mtime_ns) for f in include if f.is_dir())
    text = "\0".join((*identity, *words, *headers, source))
    return cache.digest(text.encode("utf-8", "surrogateescape"))


def _shell(words: tuple[str, ...]) -> str:
    import shlex

    return shlex.join(words)


_NEWER = "try a newer compiler through CC"


def failure(
    words: tuple[str, ...], key: str, source: str, said: str, *, suffix: str = ".c", advice: str = _NEWER
) -> BuildError:
    """The error for a source that did not compile; it is kept for inspection.

    Args:
        words: the command, or the name of the compiler and its options.
        key: the build's SHA-256.
        source: what did not compile.
        said: the compiler's words, of which the first lines are shown.
        suffix: of the file that the source is kept in.
        advice: what to do about it.
    """
    lines = said.strip().splitlines() or ["(it said nothing)"]
    left = len(lines) - _SHOWN_LINES
    shown = "\n".join("  " + line for line in lines[:_SHOWN_LINES])
    more = f"\n  ... and {left} more lines" if left > 0 else ""
    try:
        kept = str(cache.keep_failed(key, source, suffix))
    except OSError:
        kept = "not kept, there is nowhere to write"
    return BuildError(
        f"{words[0]} did not build a kernel; it said:\n{shown}{more}\n"
        f"source: {kept}\ncommand: {_shell(words)}\n"
        f"{advice}, or report this with the source"
    )


def _run(words: tuple[str, ...], source: str, stem: str, seconds: float) -> tuple[bytes, child_process.Finished]:
    """The shared object, empty if there is none, and how the compiler ended.

    Raises:
        OSError: there is no temporary directory, or the compiler cannot be run.
    """
    import tempfile

    from portmm.build.temp_directories import BUILD_PREFIX, directory
    from portmm.build.trusted_files import chain_fault

    # Where others can replace what lies among temporary files, they could replace what is compiled.
    instead = cache.usable_dir() if chain_fault(tempfile.gettempdir()) else None
    with directory(BUILD_PREFIX, instead) as folder:
        (folder / f"{stem}.c").write_text(source, encoding="utf-8")
        done = child_process.run(words, seconds, folder=folder)
        product = folder / f"{stem}.so"
        made = done.status == 0 and product.is_file()
        return product.read_bytes() if made else b"", done


_worked: set[str] = set()
"""Compilers that have built something in this process."""


def _hanging(compiler: Compiler) -> str:
    """The name under which it is remembered that a compiler does not end."""
    return "\0".join(("compiler", *compiler.argv, compiler.version, compiler.arch))


def _check_known(compiler: Compiler, key: str) -> None:
    """Raise the failure of an earlier build, if it is too early to try again."""
    names = (key,) if _hanging(compiler) in _worked else (key, _hanging(compiler))
    for name in names:
        refused = failed_builds.known(name)
        if refused is not None:
            raise refused


def _make(  # noqa: PLR0917 - what `build` was given, and what it found out
    source: str, compiler: Compiler, words: tuple[str, ...], key: str, stem: str, symbols: tuple[str, ...]
) -> tuple[cache.Entry, bytes]:
    """A new entry and its code.

    Raises:
        BuildError: the compiler failed, now or before.
        OSError: there is nowhere to build, or to keep what was built.
    """
    _check_known(compiler, key)
    start, limit = time.perf_counter(), limit_seconds(compiler.kind)
    code, done = _run(words, source, stem, limit)
    seconds = time.perf_counter() - start
    if done.status is None:
        error = failure(words, key, source, f"no answer within {limit:.0f} s; it was stopped")
        # One source may be too much for a compiler that builds others; one that built nothing yet is left alone.
        raise failed_builds.hung(key if _hanging(compiler) in _worked else _hanging(compiler), error)
    wrong = f"exit status {done.status}" if done.status else fault(code, _ELF_MACHINE.get(compiler.arch, 0), symbols)
    if wrong:
        passes = failed_builds.passes(done.status, done.output)
        error = failure(words, key, source, done.output if done.status and done.output else f"{wrong}\n{done.output}")
        raise (failed_builds.passing if passes else failed_builds.lasting)(key, error)
    _worked.add(_hanging(compiler))
    command = _shell(words)
    entry = cache.keep(key, code, name=stem, seconds=seconds, compiler=compiler.version, command=command)
    failed_builds.succeeded(key)
    return entry, code


def build(
    source: str,
    *,
    flags: tuple[str, ...],
    arch: str | None = None,
    name: str = "kernel",
    include: tuple[Path, ...] = (),
    symbols: tuple[str, ...] = (),
) -> Artifact:
    """Compile `source` into a shared object, or find it in the cache.

    Processes that want the same object at the same time compile it once.

    Args:
        source: C, self-contained unless `include` or `-lc` is given.
        flags: the ISA's flags, and any others; never `-march=native`.
        arch: as `uname -m` spells it; by default this machine's.
        name: for file names, in messages, debuggers and profilers.
        include: directories with headers.
        symbols: functions that the object must define.

    Raises:
        NoCompilerError: no compiler makes code for `arch`.
        BuildError: the compiler failed, now or not long ago; its own words are in the message.
    """
    compiler = find_compiler(arch)
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in name) or "kernel"
    words = command(compiler, flags, include, stem)
    key = _key(source, compiler, words, include)
    found = cache.load(key)
    cached = found is not None
    if found is None:
        _check_known(compiler, key)
        with cache.lock(key):
            found = cache.load(key)
            cached = found is not None
            try:
                found = found or _make(source, compiler, words, key, stem, symbols)
            except OSError as error:
                text = f"cannot build {name}: {error}; give a writable directory in TMPDIR and PORTMM_CACHE"
                raise failed_builds.passing(key, BuildError(text)) from error
    entry, code = found
    return Artifact(entry.path, source, flags, words, key, entry.seconds, cached, code)
