"""Compilation of CUDA source to a cubin, through the cache.

Owns the search for NVRTC, NVIDIA's compiler as a library, and every call of
it.

No driver and no GPU are needed. What a bundle has needs no NVRTC either. A cache hit does not load the library, which
takes 0.1 s and 140 MB: the key holds the identity of its file instead of its
version. NVIDIA's C interface is called through ctypes, because CuPy's `getCUBIN`
leaves out the last byte of the code.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache as memo
from pathlib import Path
from typing import Any

from portmm.build import cache, failed_builds, stored_objects
from portmm.build.build_lock import build_lock
from portmm.build.shared_object import failure
from portmm.errors import BuildError, NoCompilerError, TargetError
from portmm.version import VERSION

_SUFFIX = ".cubin"
_LIBRARY = "libnvrtc.so"
_BUILTINS = "libnvrtc-builtins.so"
_SYSTEM = (sys.prefix, "/usr/local/cuda")  # the former with conda
_LOADER_CONFIGURATION = "/etc/ld.so.conf.d"
_LOADER_FOLDERS = ("/usr/lib64", "/usr/lib")

# Output of ptxas for a kernel, after "ptxas info" and a colon.
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one GPU architecture.

    Attributes:
        code: the ELF file.
        log: messages of NVRTC and ptxas.
        registers: registers of a thread; the most that any kernel of the source uses.
        spills: bytes of spill stores and loads.
        shared: bytes of static shared memory of a block; the most of any kernel.
        seconds: time of NVRTC, in this call or when the entry was built.
        cached: whether the code came from the cache.
        version: NVRTC's, as (13, 0); empty for code of a bundle.
        architecture: the architecture it was compiled for, as "90a".
        key: SHA-256 of everything that it depends on.
    """

    code: bytes
    log: str
    registers: int
    spills: int
    shared: int
    seconds: float
    cached: bool
    version: tuple[int, ...]
    architecture: str = ""
    key: str = ""


# -- search for the library ----------------------------------------------------------


def _packages() -> Iterator[Path]:
    """Folders of PyPI's packages: nvidia/cuda_nvrtc/lib for CUDA 12, nvidia/cu13/lib for CUDA 13."""
    from importlib.util import find_spec

    try:
        spec = find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    roots = (spec.submodule_search_locations or ()) if spec is not None else ()
    folders = {p.parent for root in roots for p in Path(root).glob(f"*/lib/{_LIBRARY}*")}
    yield from sorted(folders, key=lambda folder: _numbers(_newest(folder) or folder), reverse=True)


def _toolkits(home: str, path: str) -> Iterator[Path]:
    for root in (home, path, *_SYSTEM):
        if root:
            yield from (Path(root, "lib64"), Path(root, "lib"))


def _loader(library_path: str) -> Iterator[Path]:
    """Folders that the dynamic loader searches. To query the loader itself would load the library."""
    yield from (Path(folder) for folder in library_path.split(os.pathsep) if folder)
    for file in sorted(Path(_LOADER_CONFIGURATION).glob("*.conf")):
        try:
            lines = file.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        yield from (Path(line.strip()) for line in lines if line.strip().startswith("/"))
    yield from map(Path, _LOADER_FOLDERS)


def _numbers(path: Path) -> tuple[int, ...]:
    """The version in a file's name: (13, 0, 88) of libnvrtc.so.13.0.88, () of libnvrtc.so."""
    return tuple(int(x) for x in path.name.removeprefix(_LIBRARY).split(".") if x.isdecimal())


def _newest(folder: Path) -> Path | None:
    try:
        libraries = [p for p in folder.glob(f"{_LIBRARY}*") if p.is_file()]
    except OSError:
        return None
    return max(libraries, key=_numbers, default=None)


@memo
def _find(home: str, path: str, library_path: str) -> Path:
    # A package of pip belongs to this environment; a toolkit belongs to the machine.
    for folders in (_packages(), _toolkits(home, path), _loader(library_path)):
        for folder in folders:
            library = _newest(folder)
            if library is not None:
                return library.resolve()
    raise NoCompilerError(
        "NVRTC, the compiler for CUDA, was not found: searched the Python packages, $CUDA_HOME, $CUDA_PATH, "
        f"/usr/local/cuda and the dynamic loader's folders for {_LIBRARY}; install it: `pip install nvidia-cuda-nvrtc`"
    )


def find_nvrtc() -> Path:
    """Path of NVRTC's library, which is not loaded.

    PyPI's packages come first, then `$CUDA_HOME`, `$CUDA_PATH`, the Python
    environment, /usr/local/cuda, and the folders of the dynamic loader.

    Raises:
        NoCompilerError: there is none; the message says what to install.
    """
    names = ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")
    return _find(*(os.environ.get(name, "").strip() for name in names))


# -- compilation --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Library:
    handle: Any
    version: tuple[int, ...]


@memo
def _open(path: Path) -> _Library:
    import ctypes

    try:
        # NVRTC opens the builtins by name while it compiles; a library that is already loaded is found.
        for builtins in sorted(path.parent.glob(f"{_BUILTINS}*"))[-1:]:
            ctypes.CDLL(str(builtins))
        handle = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        handle.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        handle.nvrtcGetErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise NoCompilerError(
            f"{path} is not a usable NVRTC: {error}; install another: `pip install nvidia-cuda-nvrtc`"
        ) from error
    return _Library(handle, (major.value, minor.value))


def _text(handle: Any, name: str, program: Any) -> bytes:
    """Result of the functions nvrtcGet<name>Size and nvrtcGet<name>; empty if either fails."""
    import ctypes

    size = ctypes.c_size_t()
    if getattr(handle, f"nvrtcGet{name}Size")(program, ctypes.byref(size)) or not size.value:
        return b""
    buffer = ctypes.create_string_buffer(size.value)
    return b"" if getattr(handle, f"nvrtcGet{name}")(program, buffer) else buffer.raw


def _run(handle: Any, source: str, stem: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """The cubin, empty if compilation failed, and the messages of the compiler."""
    import ctypes

    program = ctypes.c_void_p()
    status = handle.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{stem}.cu".encode(), 0, None, None)
    if status:
        return b"", handle.nvrtcGetErrorString(status).decode("utf-8", "replace")
    try:
        words = (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
        status = handle.nvrtcCompileProgram(program, len(options), words)
        log = _text(handle, "ProgramLog", program).rstrip(b"\0").decode("utf-8", "replace").strip()
        if status:
            return b"", log or handle.nvrtcGetErrorString(status).decode("utf-8", "replace")
        return _text(handle, "CUBIN", program), log
    finally:
        handle.nvrtcDestroyProgram(ctypes.byref(program))


def _largest(pattern: re.Pattern[str], log: str) -> int:
    return max(map(int, pattern.findall(log)), default=0)


def _identity(library: Path) -> str:
    info = library.stat()
    return f"{library.name} {info.st_size} {info.st_mtime_ns}"


def _cubin(entry: cache.Entry, code: bytes, architecture: str, *, cached: bool) -> Cubin:
    log = entry.more.get("log", "")
    version = tuple(int(x) for x in entry.compiler.rpartition(" ")[2].split(".") if x.isdecimal())  # none of a bundle
    return Cubin(
        code,
        log,
        registers=_largest(_REGISTERS, log),
        spills=sum(map(int, _SPILLS.findall(log))),
        shared=_largest(_SHARED, log),
        seconds=entry.seconds,
        cached=cached,
        version=version,
        architecture=architecture,
        key=entry.key,
    )


def _make(library: Path, source: str, stem: str, options: tuple[str, ...], key: str) -> tuple[cache.Entry, bytes]:
    nvrtc = _open(library)
    argv = ("nvrtc", *options)
    earlier = failed_builds.known(key)
    if earlier is not None:
        raise earlier
    start = time.perf_counter()
    code, log = _run(nvrtc.handle, source, stem, options)
    seconds = time.perf_counter() - start
    if code[:4] != b"\x7fELF":
        error = failure(
            argv,
            key,
            source,
            log or "the output is not an ELF file",
            suffix=".cu",
            advice=f"try a newer NVRTC than {library}: `pip install -U nvidia-cuda-nvrtc`",
        )
        keep = failed_builds.transient if failed_builds.is_transient(None, log) else failed_builds.permanent
        raise keep(key, error)
    version = ".".join(map(str, nvrtc.version))
    compiler, command = f"nvrtc {version}", " ".join((*argv, f"{stem}.cu"))
    more = {"log": log}
    entry = cache.keep(
        key, code, name=stem, seconds=seconds, compiler=compiler, command=command, suffix=_SUFFIX, more=more
    )
    return entry, code


def compile_cuda(source: str, name: str, architecture: str) -> Cubin:
    """Compile `source` for one GPU architecture, or load it from a bundle or the cache.

    Processes that want the same code at the same time compile it once.

    Args:
        source: CUDA C++ without headers; its kernels are `extern "C"`.
        name: for messages, debuggers and profilers.
        architecture: a compute capability without its point: "75", "80", "86", "89",
            "90a", "100a", "120"; "a" enables features that only that chip has.

    Raises:
        TargetError: `architecture` is not the spelling of a compute capability.
        NoCompilerError: there is no NVRTC; the message says what to install.
        BuildError: NVRTC failed; its messages are in that of the error.
    """
    if not re.fullmatch(r"[1-9]\d{1,2}[af]?", architecture):
        raise TargetError(f"architecture {architecture!r} is no compute capability; spell it as 80, 90a or 120")
    stored = stored_objects.cubin(source, architecture)
    if stored is not None:
        return _cubin(stored.entry, stored.code, architecture, cached=True)
    library = find_nvrtc()
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in name) or "kernel"
    # ptxas reports registers and spills in the log; C++17 is the default of NVRTC 12 and 13.
    options = (f"--gpu-architecture=sm_{architecture}", "--std=c++17", "--ptxas-options=-v")
    try:
        key = cache.digest("\0".join((VERSION, _identity(library), *options, stem, source)).encode())
        entry = cache.load(key, _SUFFIX)
        cached = entry is not None
        if entry is None:
            with build_lock(key):
                entry = cache.load(key, _SUFFIX)
                cached = entry is not None
                entry = entry or _make(library, source, stem, options, key)
    except OSError as error:
        raise BuildError(
            f"cannot build {name}: {error}; set TMPDIR and PORTMM_CACHE to writable directories"
        ) from error
    return _cubin(*entry, architecture, cached=cached)
