"""The run time of CPU kernels: threads, launches and memos, built at first use.

Owns the selection between the C extension and the cffi runtime, and the
interface of both.

The C files form one translation unit: pool.c (threads), host.c (workspace, launch),
and, with Python's headers, the files for NumPy arrays. Functions called in a hot
loop are C throughout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from portmm.ir.abi import ARGS
from portmm.util import locks

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.build.shared_object import Artifact
    from portmm.errors import BuildError

_C_ONLY = ("pool.c", "host.c")
_WITH_PYTHON = (
    "extension.c",
    "race.c",
    "memo.c",
    "matmul.c",
    "tape.c",
    "plan.c",
    "general.c",
    "repeat.c",
    "attend.c",
    "module.c",
)

# -Og halves the compile time of -O2 for five nanoseconds a call. -lc brings
# libc back, which kernels do without; libgcc, which has the out-of-line atomics
# of aarch64, stays out. Nothing unwinds through here; the tables are a tenth of the size.
_FLAGS = ("-Og", "-fno-asynchronous-unwind-tables", "-lc", "-pthread", "-fvisibility=hidden")
_ARCH_FLAGS = {"aarch64": ("-mno-outline-atomics",)}

MODULE = "_portmm_run"

_lock = locks.lock()


class Runtime(Protocol):
    """The interface of the extension and of the cffi runtime.

    Types: `Packed(owner, k, n, dtype, family, b_k, b_n, b_batch, shape=(k, n))`
    is a weight in a packed layout, its data in the 1-D array
    `owner` and its three strides as the kernel takes them; a base for a Python class.
    `Kernel`, `Route` and `Plan` are created by the functions below.
    """

    Packed: type[Any]
    Kernel: type[Any]
    Route: type[Any]
    Plan: type[Any]

    def load(self, path: str | Path, symbol: str, file: str | Path = "") -> Any:
        """Load the kernel `symbol` of the shared object at `path`.

        The loader opens `file` instead, if that names a sealed copy of the same bytes: see `sealed_library`.

        Raises:
            BuildError: it cannot be loaded.
        """

    def make_route(self, kernel: Any, work_bytes: int, workers: int, dtype: str, unit: int = 1) -> Any:
        """Make a route: a kernel with its workspace and the most threads it may use.

        `dtype` names the types of A, B and C, "f32" or "u8-s8-s32"; offsets of B
        count `unit` elements.
        """

    def race(self, route: Any, task: Callable[..., None], after: float) -> None:
        """Let a route race, once: task(route) is to bring rivals, and later task(route, winner, ratio) is called.

        Rivals are asked for after calls that took `after` seconds together. The ratio is that of the winner's time to
        the time of the route's own kernel.
        """

    def start_race(self, route: Any, rivals: tuple[Any, ...] | None) -> None:
        """Begin the race of a route that waits, with at most three routes; without any, end it; None: ask again later.

        Calls of a route that is to ask again are counted from the start.
        """

    def racing(self, route: Any) -> str:
        """State of a route: "counting" calls, "waiting" for rivals, "running", or "done"; "" if it does not race."""

    def register_dtype(self, name: str, dtype: Any) -> None:
        """Register the NumPy dtype of "bf16", which NumPy does not define."""

    def execute(self, route: Any, *numbers: Any) -> None:
        """Run a kernel on raw memory.

        `numbers` are m, n, k, batch, a pointer (an array, or an integer), a_m, a_k, a_batch, b pointer,
        b_k, b_n, b_batch, c pointer, c_m, c_n, c_batch, with strides in
        elements, and optionally None or a bytes-like object of int64 triples:
        the kernel runs once for each triple of offsets (a, b, c), in elements.
        Fused expressions take more: the table of their operands, an array of int64 with a row for each, an address
        and strides (see `abi.ARGS`), and their numbers, an array of float32; each a pointer or None. Addresses of
        arrays that follow are added to those of the table, row by row, for this call.

        Raises:
            MemoryError: no memory for the workspace.
        """

    def execute_all(self, routes: tuple[Any, ...], address: int) -> None:
        """Run kernels one after the other.

        `address` points to 20 words of 64 bits for each: the 16 numbers of `execute`, the address
        and the count of its offsets, or 0, and the addresses of operands and numbers, or 0.

        Raises:
            MemoryError: no memory for a workspace.
        """

    def describe(self, values: tuple[Any, ...], rows: int = 0) -> bytes | None:
        """The key by which a call with native arrays, packed weights and integers is cached; None for other arguments.

        Extents equal to `rows` are replaced by their class (see `row_classes`).
        """

    def address(self, array: Any) -> int:
        """The address of the first element of an array."""

    def largest_scale(self, vector: Any) -> float:
        """The largest number of a contiguous vector of float32, at least 0; -1 if any is negative or not finite."""

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """The product of two arrays, or of an array and a `Packed`.

        2-D arrays with a unit stride, of native types that kernels multiply without conversion, run
        the route that the resolver returns; so do stacks of matrices with evenly spaced rows, which
        are one taller matrix, by a 2-D array. Other aligned, native arrays, not
        empty and of at most 8 dimensions, run the plan that the planner returns
        for their types, shapes and strides. Other calls, and those with an `out`
        that overlaps an operand, take the slow path.
        """

    def repeat(self, *call: Any) -> Any:
        """The results of a product with an epilogue, of a kind that was kept; else NotImplemented.

        Args:
            call: the function, A, B, out, the type of the result, or None, and the settings.
        """

    def keep_call(self, call: tuple[Any, ...], *prepared: Any) -> bool:
        """Prepare further calls of a kind: see `ops.call_fastpath`; False if `repeat` cannot run them."""

    def attend(self, *call: Any) -> Any:
        """The results of attention, of a kind that was kept; else NotImplemented.

        Args:
            call: q, k, v, scale, causal, window, return_lse, the settings, and the limit of threads.
        """

    def keep_attention(self, call: tuple[Any, ...], *prepared: Any) -> bool:
        """Prepare further calls of a kind: see `ops.attention_fastpath`; False if `attend` cannot run them."""

    def make_plan(  # noqa: PLR0917
        self,
        route: Any,
        a: tuple[tuple[int, ...], tuple[int, ...]],
        b: Any,
        c: tuple[tuple[int, ...], tuple[int, ...]],
        numbers: tuple[int, ...],
        outer: Any = None,
        *,
        detail: Any = None,
    ) -> Any:
        """Make a plan: a callable for arrays of these shapes and strides only.

        `a`, `b` and `c` are (shape, strides in bytes); `b` may be a `Packed`,
        which then is bound. `numbers` are those of `execute` without the
        pointers; `detail` becomes an attribute. Call the plan as plan(a, b, out=None), or plan(a, out=None).

        Raises:
            ValueError: shapes, strides or numbers are malformed; when called,
                an operand differs, or out overlaps an input.
            TypeError: when called, an operand is no array or of another dtype.
        """

    def set_slow(self, function: Callable[[Any, Any, Any], Any]) -> None:
        """Register the slow path, which `matmul` calls as function(a, b, out) off the fast path."""

    def set_resolver(self, function: Callable[..., Any], density: bool = False) -> None:
        """Register the resolver, which returns the route of a new shape.

        Called as function(dtype, m, n, k, a, b, c, family), with layouts "row",
        "col" and, for b, "packed"; family is "" unless b is packed. It returns
        a Route, which is cached, or None for the slow path; or a Route and True
        if it serves every M of a class (see `row_classes`), for which it is
        cached then, or None if it is for one call, and is not cached. `dtype` names
        all types where they differ, "u8-s8-s32". With `density`
        it also gets a boolean: every operand is dense (leading stride equal to
        the extent), and dense and other operands are cached separately; and the extension asks it
        for stacks of matrices by as many matrices, with their count as a last argument.
        """

    def set_planner(self, function: Callable[[Any, Any, Any], Any]) -> None:
        """Register the planner, which returns the plan for operands not seen before.

        Called as function(a, b, out) with arrays, a `Packed` b, or an out of
        None. It returns a Plan for these shapes and strides only, or None for
        the slow path; both are cached. A `Packed` is not to be bound: its
        `owner` takes the place of b in the plan. An exception goes to the caller.
        """

    def set_override(self, flag: bool) -> None:
        """Make every `matmul` take the slow path while `flag` is true."""

    def clear_memo(self) -> None:
        """Drop all cached routes and plans."""

    def memo_size(self) -> int:
        """The number of cached routes and plans."""

    def set_num_threads(self, threads: int) -> None:
        """Bound the threads of one call; a change drops all routes and plans.

        Raises:
            ValueError: `threads` is less than 1.
        """

    def get_num_threads(self) -> int:
        """The bound on the threads of one call; at first, the processors of this process."""

    def set_scratch(self, size: int) -> None:
        """Bound the bytes of workspaces that all threads together keep between calls.

        Workspaces of a MiB or less stay with their threads, and do not count.

        Raises:
            ValueError: `size` is negative.
        """

    def scratch(self) -> int:
        """Bytes of the workspaces that count towards the bound."""

    def pool_threads(self) -> int:
        """The number of threads that the pool has started in this process."""


def python_headers() -> Path | None:
    """The directory of Python.h for this interpreter, or None."""
    # Nearly always here; importing sysconfig takes a millisecond.
    usual = Path(sys.base_prefix, "include", f"python{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}")
    if (usual / "Python.h").is_file():
        return usual
    import sysconfig

    folder = Path(sysconfig.get_path("include"))
    return folder if (folder / "Python.h").is_file() else None


def source(*, python: bool) -> str:
    """The C source of the run time, with or without its files for Python."""
    first = "#define _GNU_SOURCE 1\n" + ("#define PORTMM_PYTHON 1\n" if python else "")
    return first + ARGS + _files(_C_ONLY) + (features_source() + _files(_WITH_PYTHON) if python else "")


def features_source() -> str:
    """The C source of the function that reads the features of the processor, with its tables."""
    from portmm.host.features import table

    return f"#if defined(__x86_64__)\n{table('x86_64')}#else\n{table('aarch64')}#endif\n{_files(('features.c',))}"


def _files(names: tuple[str, ...]) -> str:
    here = Path(__file__).parent
    return "".join(f'#line 1 "{n}"\n{(here / n).read_text(encoding="utf-8")}' for n in names)


def flags(arch: str = "") -> tuple[str, ...]:
    """Compiler flags for `source` on an architecture, by default this one, beyond those of every kernel."""
    return _FLAGS + _ARCH_FLAGS.get(arch or os.uname().machine, ())


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
    return module  # type: ignore[no-any-return]


def _extension_at(where: str) -> Any:
    from importlib.machinery import ExtensionFileLoader, ModuleSpec
    from importlib.util import module_from_spec

    loader = ExtensionFileLoader(MODULE, where)
    module: Any = module_from_spec(ModuleSpec(MODULE, loader, origin=where))
    loader.exec_module(module)
    return module


def interface(arch: str = "", version: str = "") -> str:
    """The interface of an interpreter that extension modules are compiled for, as in their file names on Linux.

    Args:
        arch: architecture of the interpreter, by default this one.
        version: as "python3.13t", by default this one's.
    """
    import _imp

    if version:
        return f".cpython-{version.removeprefix('python').replace('.', '')}-{arch or os.uname().machine}-linux-gnu.so"
    suffixes, here = _imp.extension_suffixes(), os.uname().machine
    return str(suffixes[0]).replace(here, arch or here) if suffixes else ""


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
    from portmm.runtime.cffi_runtime import SYMBOLS, CffiRuntime

    artifact = build(source(python=False), flags=flags(), name="portmm_run", symbols=SYMBOLS)
    return load(artifact.code, artifact.path, CffiRuntime)


def load_kernel(runtime: Any, code: bytes, path: Path, symbol: str) -> Any:
    """Load a kernel of a shared object whose bytes were verified.

    Raises:
        BuildError: it cannot be loaded.
    """
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

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    if _loaded:
        return _loaded[0]
    with _lock:
        if not _loaded:
            _loaded.append(_load(code, path))
        return _loaded[0]


def _load(code: bytes, path: Path | None) -> Runtime:
    """Load the run time; a failure is cached in memory, since even its lookup on disk takes a millisecond.

    Raises:
        BuildError: it cannot be built, now or at the last attempt.
    """
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


def replayer() -> Callable[..., Any] | None:
    """The extension's function that replays a `cost_tape.Tape`; None if it is not loaded."""
    return getattr(_loaded[0], "tape", None) if _loaded else None


def forget_refusal() -> None:
    """Drop a cached failure: the next call of `runtime` builds again."""
    _refused.clear()
