"""The run time of CPU kernels: threads, launches and memos, built at first use.

Owns the selection between the C extension and the cffi runtime, which have one
interface: see `cffi_runtime.CffiRuntime`.

The C files form one translation unit: what a system has of its own, pool.c (threads), host.c (workspace, launch),
and, with Python's headers, the files for NumPy arrays. Functions called in a hot
loop are C throughout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.ir.abi import ARGS
from portmm.util import locks, system

if TYPE_CHECKING:
    from portmm.build.shared_object import Artifact
    from portmm.errors import BuildError
    from portmm.runtime.cffi_runtime import CffiRuntime

    Runtime = CffiRuntime

_SYSTEM = {
    "": ("#define _GNU_SOURCE 1\n", "system_linux.c", "features.c"),
    system.MACOS: ("#define _DARWIN_C_SOURCE 1\n", "system_posix.c", "features_macos.c"),
}
"""By the system of a platform, empty for Linux: the first line, and the files that differ."""
_C_ONLY = ("pool.c", "host.c")
_WITH_PYTHON = (
    "extension.c", "race.c", "memo.c", "matmul.c", "tape.c", "codes.c", "plan.c", "general.c", "repeat.c",
    "attend.c", "module.c",
)  # fmt: skip

# -Og halves the compile time of -O2 for five nanoseconds a call. -lc brings
# libc back, which kernels do without; libgcc, which has the out-of-line atomics
# of aarch64, stays out. Nothing unwinds through here; the tables are a tenth of the size.
_FLAGS = ("-Og", "-fno-asynchronous-unwind-tables", "-lc", "-pthread", "-fvisibility=hidden")
_PLATFORM_FLAGS = {
    "aarch64": ("-mno-outline-atomics",),
    f"aarch64-{system.MACOS}": ("-Wl,-undefined,dynamic_lookup",),  # Python's own functions
}

MODULE = "_portmm_run"

_lock = locks.lock()


def python_headers() -> Path | None:
    """The directory of Python.h for this interpreter, or None."""
    # Nearly always here; importing sysconfig takes a millisecond.
    usual = Path(sys.base_prefix, "include", f"python{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}")
    if (usual / "Python.h").is_file():
        return usual
    import sysconfig

    folder = Path(sysconfig.get_path("include"))
    return folder if (folder / "Python.h").is_file() else None


def source(*, python: bool, platform: str = "") -> str:
    """The C source of the run time, with or without its files for Python, for a platform, by default this one."""
    first, own, _ = _SYSTEM[system.of(platform or system.platform())[1]]
    text = first + ("#define PORTMM_PYTHON 1\n" if python else "") + ARGS + _files(("headers.h", own, *_C_ONLY))
    return text + (features_source(platform) + _files(_WITH_PYTHON) if python else "")


def features_source(platform: str = "") -> str:
    """The C source of the function that reads the features of the processor, with its tables."""
    from portmm.host.features import macos_table, table

    of = system.of(platform or system.platform())[1]
    tables = f"#if defined(__x86_64__)\n{table('x86_64')}#else\n{table('aarch64')}#endif\n"
    return (macos_table() if of == system.MACOS else tables) + _files(_SYSTEM[of][2:])


def _files(names: tuple[str, ...]) -> str:
    here = Path(__file__).parent
    return "".join(f'#line 1 "{n}"\n{(here / n).read_text(encoding="utf-8")}' for n in names)


def flags(platform: str = "") -> tuple[str, ...]:
    """Compiler flags for `source` on a platform, by default this one, beyond those of every kernel."""
    return _FLAGS + _PLATFORM_FLAGS.get(platform or system.platform(), ())


def load_extension(code: bytes = b"", path: Path | None = None) -> Runtime:
    """Load the extension module, built now if its path is not passed.

    Args:
        code: the bytes of the shared object, which were verified; empty if the loader may open the file.
        path: the file that they were read from.

    Raises:
        BuildError: the compiler failed, there are no Python headers, or the module cannot be loaded.
    """
    from portmm.errors import BuildError

    if path is None:
        artifact = _build_extension()
        code, path = artifact.code, artifact.path
    try:
        if code:
            from portmm.build.sealed_library import load
        module = load(code, path, _extension_at) if code else _extension_at(str(path))
    except ImportError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    module.__file__ = str(path)  # its path in the cache; it was loaded from a sealed copy
    return module


def _extension_at(where: str) -> Any:
    # As `importlib.util.module_from_spec`, whose module takes a millisecond to import.
    from importlib.machinery import ExtensionFileLoader, ModuleSpec

    loader = ExtensionFileLoader(MODULE, where)
    spec = ModuleSpec(MODULE, loader, origin=where)
    module: Any = loader.create_module(spec)
    module.__spec__, module.__loader__ = spec, loader
    loader.exec_module(module)
    return module


def interface(platform: str = "", version: str = "") -> str:
    """The interface of an interpreter that extension modules are compiled for, as in their file names.

    Args:
        platform: of the interpreter, by default this one.
        version: as "python3.13t", by default this one's.
    """
    import _imp

    arch, of = system.of(platform or system.platform())
    ending = "darwin" if of == system.MACOS else f"{arch}-linux-gnu"
    suffixes, here = _imp.extension_suffixes(), system.machine()
    if not version and of == system.of(system.platform())[1]:
        return str(suffixes[0]).replace(here, arch) if suffixes else ""
    version = version.removeprefix("python").replace(".", "") or "{}{}{}".format(*sys.version_info[:2], sys.abiflags)
    return f".cpython-{version}-{ending}.so"


def stored_extension() -> Artifact | None:
    """The extension module for this interpreter, if it was built before, on whichever machine."""
    from portmm.build.shared_object import stored

    return stored(source(python=True), flags=flags(), interface=interface())


def base_extension() -> Path | None:
    """The extension module for this interpreter in the base set of the wheel.

    Raises:
        BundleError: another user can have written it.
    """
    from portmm.build import kernel_store

    base = kernel_store.base()
    path = base.path.with_name(MODULE + interface()) if base else None
    return Path(kernel_store.library(path)) if path and os.access(path, os.R_OK) else None


def _build_extension() -> Artifact:
    from portmm.build.shared_object import build
    from portmm.errors import BuildError

    headers = python_headers()
    if headers is None:
        raise BuildError(
            "Python.h is not installed; install your Python's development package, or use the run time through cffi"
        )
    symbols = (f"PyInit_{MODULE}",)
    return build(
        source(python=True), flags=flags(), name=MODULE, include=(headers,), symbols=symbols, interface=interface()
    )


def load_cffi_runtime() -> Runtime:
    """Build the Python-free files of the run time, and load them through cffi.

    Raises:
        BuildError: the compiler failed, or the library cannot be loaded.
    """
    from portmm.build.sealed_library import load
    from portmm.build.shared_object import build
    from portmm.runtime.cffi_launches import SYMBOLS
    from portmm.runtime.cffi_runtime import CffiRuntime

    artifact = build(source(python=False), flags=flags(), name="portmm_run", symbols=SYMBOLS)
    return load(artifact.code, artifact.path, CffiRuntime)


def load_kernel(runtime: Any, code: bytes, path: Path, symbol: str) -> Any:
    """Load a kernel of a shared object whose bytes were verified."""
    from portmm.build.sealed_library import load

    return load(code, path, lambda file: runtime.load(str(path), symbol, file))


_loaded: list[Runtime] = []
_refused: list[BuildError] = []


def runtime(code: bytes = b"", path: Path | None = None) -> Runtime:
    """The run time of this process, built and loaded by the first caller.

    The extension where the wheel has it, it was built before, or Python's headers are installed, else the cffi
    runtime: the same interface, some microseconds more per call.

    Args:
        code: the extension's bytes, if known to be those of this source and interpreter; empty with the path of a
            file that the loader may open.
        path: the file that they were read from.
    """
    if _loaded:
        return _loaded[0]
    with _lock:
        if not _loaded:
            _loaded.append(_load(code, path))
        return _loaded[0]


def _load(code: bytes, path: Path | None) -> Runtime:
    """Load the run time; a failure is cached in memory, since even its lookup on disk takes a millisecond."""
    import time

    from portmm.errors import BuildError

    if _refused and time.monotonic() < _refused[0].retry_at:
        raise _refused[0].again()
    try:
        path = path or base_extension()
        if path is None and not python_headers():
            extension = stored_extension()
            if extension is None:
                return load_cffi_runtime()
            code, path = extension.code, extension.path
        return load_extension(code, path)
    except BuildError as error:
        _refused[:] = [error.again()]
        raise


@contextmanager
def replaced(other: Any) -> Iterator[None]:
    """Take another run time of the same interface in a block."""
    before = runtime()
    _loaded[0] = other
    try:
        yield
    finally:
        _loaded[0] = before


def types() -> Any:
    """The run time, or where it cannot be built the part that needs no compiler: see `cffi_records.Plain`."""
    if _loaded:
        return _loaded[0]
    from portmm.errors import BuildError

    try:
        return runtime()
    except BuildError:
        from portmm.runtime.cffi_records import PLAIN

        return PLAIN


def has_kernels(types_: Any) -> bool:
    """Test whether a result of `types` is the run time itself."""
    return bool(_loaded) and types_ is _loaded[0]


def clear_memo() -> None:
    """Drop all routes and plans of the run time, if it is loaded."""
    if _loaded:
        _loaded[0].clear_memo()


def feature_reader() -> Callable[[], str] | None:
    """The extension's function that reads the features of the processor; None if it is not loaded."""
    return getattr(_loaded[0], "features", None) if _loaded else None


def processor_words() -> frozenset[str]:
    """The features of this processor, and on x86-64 who made it, by the run time of the wheel, which is loaded.

    As `features.c` writes them, without tiles that may not be used; empty if the wheel has no run time.
    """
    from portmm.errors import BuildError

    with suppress(BuildError):
        path = base_extension()
        if path:
            runtime(path=path)
    read = feature_reader()
    words = frozenset(read().split()) if read else frozenset()
    if "amx_tile" in words:
        from portmm.host.amx_permission import tiles

        return words if tiles() else frozenset([x for x in words if not x.startswith("amx_")])
    return words


def replayer() -> Callable[..., Any] | None:
    """The extension's function that replays a `cost_tape.Tape`; None if it is not loaded."""
    return getattr(_loaded[0], "tape", None) if _loaded else None


def joiner() -> Callable[..., None] | None:
    """The extension's function that writes values of four bits two in a byte; None if it is not loaded."""
    return getattr(_loaded[0], "join_codes", None) if _loaded else None


def forget_refusal() -> None:
    """Drop a cached failure: the next call of `runtime` builds again."""
    _refused.clear()
