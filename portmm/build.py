"""C source to a shared object, through the cache.

Owns the cache key and the run of the compiler. May import `abi`, `cache`,
`compiler`, `errors`, `version`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from portmm import abi, cache
from portmm.cache import cache_clear, cache_dir, cache_entries, cache_size
from portmm.compiler import Compiler, command, environment, find_compiler
from portmm.errors import BuildError
from portmm.version import VERSION

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

COMPILE_SECONDS = 300.0
"""Patience with one compilation; a kernel takes less than one second."""

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
    """

    path: Path
    source: str
    flags: tuple[str, ...]
    command: tuple[str, ...]
    key: str
    seconds: float
    cached: bool


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


def _run(words: tuple[str, ...], source: str, stem: str) -> tuple[bytes, str]:
    """The shared object, empty if there is none, and the compiler's words.

    Raises:
        OSError: there is no temporary directory, or the compiler cannot be run.
    """
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="portmm-build-", ignore_cleanup_errors=True) as scratch:
        Path(scratch, f"{stem}.c").write_text(source, encoding="utf-8")
        try:
            done = subprocess.run(
                words,
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=COMPILE_SECONDS,
                env=environment(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return b"", f"no answer within {COMPILE_SECONDS:.0f} s"
        said = done.stdout.decode("utf-8", "replace")
        product = Path(scratch, f"{stem}.so")
        if done.returncode:
            return b"", said or f"exit status {done.returncode}"
        return (product.read_bytes() if product.is_file() else b""), said


def _unloadable(code: bytes, arch: str) -> str:
    if code[:4] != b"\x7fELF" or len(code) < 20:
        return "the output is not an ELF file"
    machine = int.from_bytes(code[18:20], "little")
    wanted = _ELF_MACHINE.get(arch, machine)
    return "" if machine == wanted else f"the output is for ELF machine {machine}, not for {arch} ({wanted})"


def _make(source: str, compiler: Compiler, words: tuple[str, ...], key: str, stem: str) -> cache.Entry:
    start = time.perf_counter()
    code, said = _run(words, source, stem)
    seconds = time.perf_counter() - start
    fault = _unloadable(code, compiler.arch)
    if fault:
        raise failure(words, key, source, said or fault)
    return cache.keep(key, code, name=stem, seconds=seconds, compiler=compiler.version, command=_shell(words))


def build(
    source: str,
    *,
    flags: tuple[str, ...],
    arch: str | None = None,
    name: str = "kernel",
    include: tuple[Path, ...] = (),
) -> Artifact:
    """Compile `source` into a shared object, or find it in the cache.

    Processes that want the same object at the same time compile it once.

    Args:
        source: C, self-contained unless `include` or `-lc` is given.
        flags: the ISA's flags, and any others; never `-march=native`.
        arch: as `uname -m` spells it; by default this machine's.
        name: for file names, in messages, debuggers and profilers.
        include: directories with headers.

    Raises:
        NoCompilerError: no compiler makes code for `arch`.
        BuildError: the compiler failed; its own words are in the message.
    """
    compiler = find_compiler(arch)
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in name) or "kernel"
    words = command(compiler, flags, include, stem)
    key = _key(source, compiler, words, include)
    entry = cache.find(key)
    cached = entry is not None
    if entry is None:
        with cache.lock(key):
            entry = cache.find(key)
            cached = entry is not None
            try:
                entry = entry or _make(source, compiler, words, key, stem)
            except OSError as error:
                raise BuildError(
                    f"cannot build {name}: {error}; give a writable directory in TMPDIR and PORTMM_CACHE"
                ) from error
    return Artifact(entry.path, source, flags, words, key, entry.seconds, cached)
