"""Running kernels on this machine: the run time, built at first use.

Owns the choice between the C extension and its twin through cffi, and the
interface both offer. May import `abi`, `build`, `errors`.

The C makes one translation unit: pool.c (threads), host.c (workspace, launch),
and, with Python's headers, the files for NumPy arrays. What is called in a hot
loop is C from end to end.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from portmm.abi import ARGS

if TYPE_CHECKING:
    from collections.abc import Callable

_C_ONLY = ("pool.c", "host.c")
_WITH_PYTHON = ("extension.c", "memo.c", "matmul.c", "plan.c", "general.c", "module.c")

# -Og halves the compile time of -O2 for five nanoseconds a call. -lc brings
# libc back, which kernels do without; libgcc, home of the out-of-line atomics
# of aarch64, stays out. Nobody unwinds through here; the tables take a tenth.
_FLAGS = ("-Og", "-fno-asynchronous-unwind-tables", "-lc", "-pthread", "-fvisibility=hidden")
_ARCH_FLAGS = {"aarch64": ("-mno-outline-atomics",)}

_MODULE = "_portmm_run"

_lock = threading.Lock()


class Runtime(Protocol):
    """What the extension and its twin both offer.

    Types: `Packed(owner, k, n, dtype, family, b_k, b_n, b_batch, shape=(k, n))`
    is a weight laid out for a family of micro-kernels, its data in the 1-D array
    `owner` and its three strides as the kernel wants them; a base for a Python class.
    `Kernel`, `Route` and `Plan` are made by the functions below.
    """

    Packed: type[Any]
    Kernel: type[Any]
    Route: type[Any]
    Plan: type[Any]

    def load(self, path: str | Path, symbol: str) -> Any:
        """The kernel `symbol` in the shared object at `path`.

        Raises:
            BuildError: it cannot be loaded.
        """

    def make_route(self, kernel: Any, work_bytes: int, workers: int, dtype: str, unit: int = 1) -> Any:
        """A kernel with the workspace it needs and the most threads it may use.

        `dtype` names the types of A, B and C, "f32" or "u8-s8-s32"; offsets of B
        count `unit` elements.
        """

    def register_dtype(self, name: str, dtype: Any) -> None:
        """Tell what arrays of "bf16" look like, which is not NumPy's own."""

    def execute(self, route: Any, *numbers: Any) -> None:
        """Run a kernel on raw memory.

        `numbers` are m, n, k, batch, a pointer (an array, or an integer), a_m, a_k, a_batch, b pointer,
        b_k, b_n, b_batch, c pointer, c_m, c_n, c_batch, with strides in
        elements, and optionally None or a bytes-like object of int64 triples:
        the kernel runs once for each triple of offsets (a, b, c), in elements.
        After that, a quantised product takes a_scale, b_scale, bias, a_zero,
        a_sum and b_zero, pointers or None: see kernels/finish.py. Fused
        expressions take two more, their operands and numbers: see `abi.ARGS`.

        Raises:
            MemoryError: no memory for the workspace.
        """

    def execute_all(self, routes: tuple[Any, ...], address: int) -> None:
        """Run kernels one after the other.

        At `address` lie 26 words of 64 bits for each: the 16 numbers of `execute`, the address
        and the count of its offsets, or 0, and the 8 pointers that follow, or 0.

        Raises:
            MemoryError: no memory for a workspace.
        """

    def describe(self, values: tuple[Any, ...]) -> bytes | None:
        """What decides how a function of native arrays, packed weights and integers runs; None for others."""

    def address(self, array: Any) -> int:
        """Where the first element of an array lies."""

    def are_scales(self, vector: Any) -> bool:
        """Whether all numbers of a contiguous vector of float32 are finite and not negative."""

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """The product of two arrays, or of an array and a `Packed`.

        2-D arrays of one native float type with a unit stride go straight to
        the kernel that the resolver names. Other aligned, native arrays, not
        empty and of at most 8 dimensions, run the plan that the planner made
        for their types, shapes and strides. All else, and an `out`
        that overlaps an operand, goes to the slow path.
        """

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
        """A callable for arrays of these shapes and strides only.

        `a`, `b` and `c` are (shape, strides in bytes); `b` may be a `Packed`,
        which then is bound. `numbers` are those of `execute` without the
        pointers; `detail` becomes an attribute. Call the plan as plan(a, b, out=None), or plan(a, out=None).

        Raises:
            ValueError: shapes, strides or numbers are malformed; when called,
                an operand differs, or out overlaps an input.
            TypeError: when called, an operand is no array or of another dtype.
        """

    def set_slow(self, function: Callable[[Any, Any, Any], Any]) -> None:
        """Register what `matmul` calls as function(a, b, out) off the fast path."""

    def set_resolver(self, function: Callable[..., Any], density: bool = False) -> None:
        """Register what names the route of a new shape.

        Called as function(dtype, m, n, k, a, b, c, family), with layouts "row",
        "col" and, for b, "packed"; family is "" unless b is packed. It returns
        a Route, which is remembered, or None for the slow path. With `density`
        it also gets a boolean: every operand is dense (leading stride equal to
        the extent), and dense and other operands are remembered apart.
        """

    def set_planner(self, function: Callable[[Any, Any, Any], Any]) -> None:
        """Register what makes the plan for operands not seen before.

        Called as function(a, b, out) with arrays, a `Packed` b, or an out of
        None. It returns a Plan for just these shapes and strides, or None for
        the slow path; both are remembered. A `Packed` is not to be bound: its
        `owner` takes the place of b in the plan. An exception goes to the caller.
        """

    def set_override(self, flag: bool) -> None:
        """While true, every `matmul` takes the slow path."""

    def clear_memo(self) -> None:
        """Forget all routes and plans."""

    def memo_size(self) -> int:
        """How many routes and plans are remembered."""

    def set_num_threads(self, threads: int) -> None:
        """Bound the threads of one call; a change forgets all routes and plans.

        Raises:
            ValueError: `threads` is less than 1.
        """

    def get_num_threads(self) -> int:
        """The bound on the threads of one call; at first, the processors of this process."""

    def pool_threads(self) -> int:
        """How many threads the pool has started in this process."""


def python_headers() -> Path | None:
    """The directory of Python.h for this interpreter, or None."""
    # Nearly always here; sysconfig takes a millisecond to say so.
    usual = Path(sys.base_prefix, "include", f"python{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}")
    if (usual / "Python.h").is_file():
        return usual
    import sysconfig

    folder = Path(sysconfig.get_path("include"))
    return folder if (folder / "Python.h").is_file() else None


def source(*, python: bool) -> str:
    """The C source of the run time, with or without its Python half."""
    here = Path(__file__).parent
    names = _C_ONLY + (_WITH_PYTHON if python else ())
    first = "#define _GNU_SOURCE 1\n" + ("#define PORTMM_PYTHON 1\n" if python else "")
    return first + ARGS + "".join(f'#line 1 "{n}"\n{(here / n).read_text(encoding="utf-8")}' for n in names)


def flags() -> tuple[str, ...]:
    """Compiler flags for `source` on this machine, beyond those of every kernel."""
    return _FLAGS + _ARCH_FLAGS.get(os.uname().machine, ())


def load_extension(path: Path | None = None) -> Runtime:
    """Load the extension module, built before if `path` is not given.

    Raises:
        BuildError: the compiler failed, or there are no Python headers.
    """
    from importlib.machinery import ExtensionFileLoader, ModuleSpec
    from importlib.util import module_from_spec

    where = str(path or _build_extension())
    loader = ExtensionFileLoader(_MODULE, where)
    module: Any = module_from_spec(ModuleSpec(_MODULE, loader, origin=where))
    loader.exec_module(module)
    return module  # type: ignore[no-any-return]


def _build_extension() -> Path:
    from portmm.build import build
    from portmm.errors import BuildError

    headers = python_headers()
    if headers is None:
        raise BuildError("Python.h is not installed; install your Python's development package, or use the cffi twin")
    return build(source(python=True), flags=flags(), name=_MODULE, include=(headers,)).path


def load_twin() -> Runtime:
    """Build the Python-free half and drive it through cffi.

    Raises:
        BuildError: the compiler failed.
    """
    from portmm.build import build
    from portmm.run.twin import Twin

    return Twin(str(build(source(python=False), flags=flags(), name="portmm_run").path))


_loaded: list[Runtime] = []


def runtime(path: Path | None = None) -> Runtime:
    """The run time of this process, built and loaded by the first caller.

    The extension where Python's headers are, else the twin: the same meaning,
    some microseconds more per call.

    Args:
        path: the extension's file, where it is known to be that of this source and interpreter.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    if _loaded:
        return _loaded[0]
    with _lock:
        if not _loaded:
            _loaded.append(load_extension(path) if path or python_headers() else load_twin())
        return _loaded[0]
