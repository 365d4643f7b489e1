"""C compilers: search, identity and commands.

Owns the search for a compiler, its identity, and every difference between
gcc, clang and zig.

A compiler is run with --version once per machine: its output is a note in
the cache under the path, time and size of its program, so that a process whose
kernels are cached starts no other process. A compiler that does not answer is not
run again before its program changes; see `build.failed_builds`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from portmm.build import child_process, failed_builds, stored_objects
from portmm.build.cache import digest, read_note, write_note
from portmm.errors import BuildError, NoCompilerError
from portmm.util import system

VERSION_SECONDS = 5.0
"""Time limit of a compiler's --version, which takes milliseconds."""
ZIG_VERSION_SECONDS = 60.0
"""The same for zig, a file of 170 MB that may be read from a slow disk, and unpacks itself in its first run."""
COMPILE_SECONDS = 30.0
"""Time limit of one compilation; a kernel takes less than one second."""
ZIG_COMPILE_SECONDS = 120.0
"""The same for zig, whose first run builds parts of a C library as well: seconds where gcc takes 0.1 s."""

_BASE = (
    "-std=gnu11",  # one language for all; strict c11 would turn contraction off
    "-O2",
    "-ffp-contract=fast",  # acc += a * b becomes one FMA
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-nostdlib",  # kernels call nothing; also saves zig seconds of building a libc
    "-fno-stack-protector",
)

# Kernels are emitted vectorised, with as many named accumulators as there are
# registers. The automatic vectoriser can only add to that: it interleaves remainder
# loops and gathers scalar broadcasts into vectors, at the price of spills.
# Scheduling before registers are allocated, which gcc does for aarch64, moves all
# loads of a step to its start and spills accumulators. And a short copy at an edge
# must not become a call of memcpy, which a kernel does not link.
_CLANG = ("-fno-vectorize", "-fno-slp-vectorize", "-fno-builtin-memcpy", "-fno-builtin-memset")
_OWN = {
    # Version 12 merges functions whose inline assembly differs only in the sign of its output.
    "gcc": ("-fno-tree-vectorize", "-fno-schedule-insns", "-fno-tree-loop-distribute-patterns", "-fno-ipa-icf"),
    "clang": _CLANG,
    "zig": (*_CLANG, "-fno-sanitize=undefined", "-g0"),
}

# zig compiles for the CPU of the host unless a target is passed. glibc 2.28 is the oldest
# in the wheels that NumPy still publishes (manylinux_2_28).
_ZIG_TARGETS = {"": "{arch}-linux-gnu.2.28", system.MACOS: "{arch}-macos.11.0"}
# macOS loads no library that does without its C library.
_SYSTEM_FLAGS = {system.MACOS: ("-lc",)}

# zig spells -march=armv8.2-a+sve as -mcpu=generic+v8_2a+sve, with LLVM's names.
_ARM_MARCH = re.compile(r"-march=armv(\d+)(?:\.(\d+))?-a((?:\+\w+)*)")
_LLVM_NAMES = {"fp16": "fullfp16", "fp16fml": "fp16fml", "simd": "neon", "fp": "fp_armv8"}


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler.

    Attributes:
        argv: the command, its program as an absolute path.
        kind: "gcc", "clang" or "zig".
        version: the first line of its --version.
        arch: platform of the code it emits: see `util.system`.
    """

    argv: tuple[str, ...]
    kind: str
    version: str
    arch: str


def _which(program: str, path: str) -> str | None:
    # shutil.which, without two milliseconds of importing archive formats.
    for folder in [""] if "/" in program else path.split(os.pathsep):
        full = Path(folder, program).absolute()
        if os.access(full, os.X_OK) and full.is_file():
            return str(full)
    return None


def _ziglang() -> str | None:
    """The `__init__` of the ziglang package, without importing it."""
    from importlib.util import find_spec

    try:
        spec = find_spec("ziglang")
    except (ImportError, ValueError):
        return None
    return None if spec is None or not sys.executable else spec.origin


def _candidates(platform: str, path: str, *, native: bool) -> Iterator[tuple[str, ...]]:
    def on_path(program: str, *options: str) -> Iterator[tuple[str, ...]]:
        full = _which(program, path)
        if full is not None:
            yield (full, *options)

    arch, of = system.of(platform)
    if native:
        for program in ("gcc", "cc", "clang"):
            yield from on_path(program)
    elif not of:
        triple = f"{arch}-linux-gnu"
        yield from on_path(f"{triple}-gcc")
        # clang compiles for any machine but needs a linker for it.
        if _which(f"{triple}-ld", path):
            yield from on_path("clang", f"--target={triple}")
        elif _which("ld.lld", path):
            yield from on_path("clang", f"--target={triple}", "-fuse-ld=lld")
    if _ziglang() is not None:
        yield (sys.executable, "-m", "ziglang", "cc")


def _is_zig(argv: tuple[str, ...]) -> bool:
    return any(Path(word).name.startswith("zig") for word in argv if not word.startswith("-"))


def programs(argv: tuple[str, ...], path: str) -> list[str]:
    """State of each program that a command names (ccache gcc), a line each."""
    every = [_which(word, path) for word in argv if not word.startswith("-")]
    package = _ziglang() if "ziglang" in argv else None
    if package is not None:
        every += [package, str(Path(package).with_name("zig"))]
    return [stored_objects.state(x) for x in every if x is not None and os.access(x, os.R_OK)]


def variable_of(arch: str) -> str:
    """The variable of the environment that names the compiler for a platform."""
    return "CC" if arch == system.platform() else f"CC_{arch.replace('-', '_')}"


def is_named(arch: str) -> bool:
    """Whether the user names the compiler for an architecture, by `$CC` or the like."""
    return bool(_named_compiler(arch))


def _named_compiler(arch: str) -> str:
    return os.environ.get(variable_of(arch), "").strip()


BACKGROUND_LIMIT = 10
"""A program of the lowest priority beside busy ones may have a tenth of a processor."""


def limit_seconds(kind: str) -> float:
    """Time limit of one compilation by a compiler of this kind; longer where it leaves processors to others."""
    seconds = ZIG_COMPILE_SECONDS if kind == "zig" else COMPILE_SECONDS
    return seconds * (BACKGROUND_LIMIT if child_process.background.get() else 1)


def _query_version(argv: tuple[str, ...]) -> str:
    """Output of a compiler's --version.

    Raises:
        OSError: it cannot be run now; it may be later.
        TimeoutError: it does not end within its limit.
        BuildError: it is not a compiler.
    """
    query, seconds = (*argv, "--version"), VERSION_SECONDS
    if _is_zig(argv):
        seconds = ZIG_VERSION_SECONDS
        if "cc" in argv:
            # `zig cc --version` names the clang inside, which many zigs share.
            query = (*argv[: argv.index("cc")], "version")
    done = child_process.run(query, seconds, errors=False)
    if done.status is None:
        raise TimeoutError(f"{argv[0]} does not answer --version within {seconds:.0f} s")
    text = done.output.strip()
    if failed_builds.is_transient(done.status, ""):
        raise InterruptedError(f"{argv[0]} --version was ended by signal {-done.status}")
    if done.status or not text:
        raise BuildError(f"{argv[0]} does not answer --version: it ended with status {done.status}")
    return text


def _kind(argv: tuple[str, ...], text: str) -> str:
    if _is_zig(argv):
        return "zig"
    return "clang" if "clang" in text or "InstalledDir" in text else "gcc"


def _describe(argv: tuple[str, ...], arch: str, path: str) -> Compiler:
    """The compiler of a command, with its version.

    Raises:
        BuildError: its --version fails, or failed when it was last run.
    """
    stamp = "\n".join((*argv, *programs(argv, path)))
    note = "compiler-" + digest(stamp.encode("utf-8", "surrogateescape"))
    text = read_note(note)
    if not text:
        failure = failed_builds.known(note)
        if failure is not None:
            raise failure
        try:
            text = _query_version(argv)
        except TimeoutError as error:
            raise failed_builds.hung(note, BuildError(str(error))) from error
        except OSError as error:
            keep = (
                failed_builds.transient
                if error.errno is None or error.errno in failed_builds.TRANSIENT_ERRORS
                else failed_builds.permanent
            )
            raise keep(note, BuildError(f"{argv[0]} cannot be run: {error}")) from error
        except BuildError as error:
            raise failed_builds.permanent(note, error) from error
        failed_builds.succeeded(note)
        write_note(note, text)
    return Compiler(argv, _kind(argv, text), text.splitlines()[0], arch)


def _from_cc(name: str, cc: str, arch: str, path: str) -> Compiler:
    import shlex

    try:
        argv = shlex.split(cc)
    except ValueError as error:
        raise NoCompilerError(f"{name}={cc!r} cannot be split into words: {error}; quote it as for a shell") from error
    program = _which(argv[0], path) if argv else None
    if program is None:
        raise NoCompilerError(f"{name}={cc!r} names no executable program; correct it or unset it")
    try:
        return _describe((program, *argv[1:]), arch, path)
    except BuildError as error:
        text = f"{name}={cc!r} is not a usable compiler: {error}; correct it or unset it"
        raise _no_compiler(text, [error]) from error


def _no_compiler(text: str, failures: list[BuildError]) -> NoCompilerError:
    """The error where no compiler can be used; its time of retry is the earliest of theirs."""
    error = NoCompilerError(text)
    error.retry_at = min((x.retry_at for x in failures), default=error.retry_at)
    return error


@cache
def _find(arch: str, cc: str, path: str, *, native: bool) -> Compiler:
    variable = variable_of(arch)
    if cc:
        return _from_cc(variable, cc, arch, path)
    failures = []
    for argv in _candidates(arch, path, native=native):
        try:
            return _describe(argv, arch, path)
        except BuildError as error:
            failures.append(error)
    machine, of = system.of(arch)
    cross = "" if of else f"{machine}-linux-gnu-gcc, clang with its linker"
    wanted = ", ".join(filter(None, (f"${variable}", "gcc, cc and clang" if native else cross)))
    package = "gcc" if native else f"gcc-{machine.replace('_', '-')}-linux-gnu"
    distributed = "" if of else f" or your distribution's {package}"
    reasons = "".join(f"; {error}" for error in failures)
    text = (
        f"no C compiler for {arch} was found: searched for {wanted}, and the Python package ziglang{reasons}; "
        f"install one: `pip install ziglang` (needs no root){distributed}"
    )
    raise _no_compiler(text, failures)


def find_compiler(arch: str | None = None) -> Compiler:
    """The C compiler for `arch`, by default this machine's.

    For this machine: `$CC`, which may contain options and has no fallback;
    then gcc, cc, clang on PATH; then the ziglang package. For another: `$CC_riscv64` and
    the like, its cross gcc, clang where a linker for it exists, then ziglang.

    Raises:
        NoCompilerError: there is none; the message says what to install.
    """
    here = system.platform()
    wanted = arch or here
    return _find(wanted, _named_compiler(wanted), os.environ.get("PATH", os.defpath), native=wanted == here)


def _zig_spelling(flag: str) -> str:
    match = _ARM_MARCH.fullmatch(flag)
    if match is None:
        return flag
    major, minor, extensions = match.groups()
    words = [f"v{major}_{minor}a" if minor and minor != "0" else f"v{major}a"]
    words += [_LLVM_NAMES.get(x, x) for x in extensions.split("+")[1:]]
    return "-mcpu=generic+" + "+".join(words)


def common_options() -> tuple[str, ...]:
    """The options of every compilation by every kind of compiler."""
    return _BASE


def zig_target(platform: str) -> str:
    """A platform as zig spells it, with the oldest version of its system that is served."""
    arch, of = system.of(platform)
    return _ZIG_TARGETS[of].format(arch=arch)


def system_flags(platform: str) -> tuple[str, ...]:
    """Flags of every library for a platform."""
    return _SYSTEM_FLAGS.get(system.of(platform)[1], ())


def command(compiler: Compiler, flags: tuple[str, ...], include: tuple[Path, ...], stem: str) -> tuple[str, ...]:
    """The command that compiles `<stem>.c` to `<stem>.so` in the current directory.

    `flags` follow the source, so that they may name libraries and override
    the base flags; for source that includes libc headers they must contain `-lc`.
    """
    argv = [*compiler.argv, *_BASE, *_OWN[compiler.kind]]
    if compiler.kind == "zig":
        if not any(w.startswith(("-target", "--target")) for w in compiler.argv):
            argv += ["-target", zig_target(compiler.arch)]
        flags = tuple(_zig_spelling(f) for f in flags)
    argv += [f"-I{folder.absolute()}" for folder in include]
    return (*argv, f"{stem}.c", *flags, *system_flags(compiler.arch), "-o", f"{stem}.so")


def object_command(compiler: Compiler, flags: tuple[str, ...], stem: str) -> tuple[str, ...]:
    """As `command`, but to `<stem>.o`, for a library of several sources."""
    of_linker = ("-shared", "-nostdlib", *system_flags(compiler.arch))
    words = [x for x in command(compiler, flags, (), stem) if x not in of_linker]
    return (*words[:-1], f"{stem}.o", "-c")
