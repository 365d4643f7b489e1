"""C libraries, called without the overhead of Python: BLIS, libxsmm, and what others need, too.

Owns the search for shared libraries, the small C driver that repeats a call, the calls of CBLAS, and two contenders.
Whole numbers are passed as C's int, which is ctypes' own rule; other types are spelled out where a call needs them. A
call from Python by ctypes costs about a microsecond, a tenth of a 64 x 64 product, which a user who calls the library
from C does not pay; so the loop over repetitions and over a batch is in C.

A BLIS older than the processor falls back to portable code; an expert user sets the nearest configuration by hand, and
so does its adapter. Debian ships libxsmm, just-in-time kernels for small products, as an archive only, so it is linked
into a driver of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from ctypes import c_int, c_long, c_void_p
from ctypes.util import find_library
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from portmm.comparison.case import Case
from portmm.comparison.data import Arrays
from portmm.comparison.peers import Library, MissingError, Run, Setup, UnsupportedError
from portmm.host.detect import host_features

ROW, COLUMN = 101, 102
NORMAL, TRANSPOSED = 111, 112
LETTER = {"f32": "s", "f64": "d"}
SCALAR: dict[str, Any] = {"f32": ctypes.c_float, "f64": ctypes.c_double}

SOURCE = Path(__file__).with_name("native.c")


def shared_library(patterns: Sequence[str], *, packages: Sequence[str] = (), system: Sequence[str] = ()) -> Path | str:
    """Find a shared library.

    Args:
        patterns: globs of file names.
        packages: installed distributions whose files are searched first.
        system: names for the dynamic linker, without "lib" and ".so".

    Raises:
        MissingError: it is not installed.
    """
    for package in packages:
        for path in _files(package):
            if any(path.match(pattern) for pattern in patterns) and path.exists():
                return path.resolve()
    for pattern in patterns:
        paths = sorted((Path(sys.prefix) / "lib").glob(pattern))
        if paths:
            return paths[0]
    for name in system:
        library = find_library(name)
        if library:
            return library
    raise MissingError(f"no {patterns[0]}")


def _files(package: str) -> list[Path]:
    try:
        listed = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(entry.locate())) for entry in listed]


def loaded(patterns: Sequence[str], *, packages: Sequence[str] = (), system: Sequence[str] = ()) -> Any:
    """Load the library that `shared_library` finds, with global symbols.

    Raises:
        MissingError: it is not installed, or cannot be loaded.
    """
    try:
        return ctypes.CDLL(str(shared_library(patterns, packages=packages, system=system)), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise MissingError(str(error)) from error


def compile_driver(extra: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile and load the C driver, with `extra` linker arguments.

    Raises:
        MissingError: there is no C compiler, or it failed; its output follows the message's first line.
    """
    from portmm.build.compiler import find_compiler
    from portmm.errors import NoCompilerError

    try:
        compiler = find_compiler()
    except NoCompilerError as error:
        raise MissingError(f"no C compiler for the driver that repeats calls: {error}") from error
    with tempfile.TemporaryDirectory(prefix="portmm-compare-") as folder:
        library = Path(folder) / "driver.so"
        command = [*compiler.argv, "-O3", "-shared", "-fPIC", str(SOURCE), "-o", str(library), *extra]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            linked = next((f" with {x}" for x in extra if x.startswith("-l")), "")
            name = Path(compiler.argv[0]).name
            raise MissingError(f"{name} could not build the driver that repeats calls{linked}\n{done.stderr}")
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@cache
def driver(threads: int = 1) -> ctypes.CDLL:
    """The C driver without further libraries.

    With more than one thread, its loops over single-threaded kernels divide a batch
    among threads, as a user of such kernels does.
    """
    return compile_driver(["-fopenmp"] if threads > 1 else [])


def pointer(array: Any) -> c_void_p:
    """Address of an array's first element."""
    return c_void_p(array.ctypes.data)


def address(function: Any) -> c_void_p:
    """Address of a function of a loaded library."""
    return ctypes.cast(function, c_void_p)


def flags(case: Case) -> tuple[int, ...]:
    """CBLAS's order, transa, transb, lda, ldb, ldc for the layouts of a case."""
    return (
        ROW if case.c == "row" else COLUMN,
        NORMAL if case.a == case.c else TRANSPOSED,
        NORMAL if case.b == case.c else TRANSPOSED,
        case.k if case.a == "row" else case.m,
        case.n if case.b == "row" else case.k,
        case.n if case.c == "row" else case.m,
    )


def counted(function: Any, before: Sequence[Any], after: Sequence[Any], keep: object = None) -> Run:
    """A `Run` that passes the count between two lists of C arguments and holds a reference to `keep`."""

    def run(count: int, _keep: object = keep) -> None:
        function(*before, c_long(count), *after)

    return run


def of_cblas(library: Any, case: Case, name: str, after: Sequence[Any], keep: object) -> Run:
    """Loop of the driver over cblas_?NAME of `library`, both for the type of a case; see `counted`."""
    letter = LETTER[case.dtype]
    function = address(getattr(library, f"cblas_{letter}{name}"))
    return counted(getattr(driver(), f"loop_{name}_{letter}"), [function], after, keep)


def gemm(library: Any, case: Case, data: Arrays) -> Run:
    """Loop over cblas_?gemm of `library`."""
    return of_cblas(library, case, "gemm", [c_long(case.batch), *matrices(case, data, c_long)], data)


def gemv(library: Any, case: Case, data: Arrays) -> Run:
    """Loop over cblas_?gemv of `library`, for M = 1 or N = 1."""
    matrix, layout, x = (data.b, case.b, data.a) if case.m == 1 else (data.a, case.a, data.b)
    rows, columns = matrix.shape
    order, lead = (ROW, columns) if layout == "row" else (COLUMN, rows)
    transposed = TRANSPOSED if case.m == 1 else NORMAL
    after = [order, transposed, rows, columns, pointer(matrix), lead, pointer(x), pointer(data.c)]
    return of_cblas(library, case, "gemv", after, data)


def is_vector(case: Case) -> bool:
    """Whether ?gemv computes this case."""
    return case.batch == 1 and 1 in (case.m, case.n)


def strided(case: Case, data: Arrays) -> list[Any]:
    """Pointer and batch stride of A, B and C, in C's argument order."""
    every = matrices(case, data, c_long)[6:]
    return [x for i, x in enumerate(every) if i % 3 != 1]


def matrices(case: Case, data: Arrays, number: Callable[[int], Any]) -> list[Any]:
    """Order, transpositions and sizes, then pointer, leading dimension and batch stride of A, B and C.

    Args:
        case: the case.
        data: its arrays.
        number: the type of strides.
    """
    order, ta, tb, *leads = flags(case)
    m, n, k = case.m, case.n, case.k
    after: list[Any] = [order, ta, tb, m, n, k]
    for array, lead, stride in zip((data.a, data.b, data.c), leads, (m * k, k * n, m * n), strict=True):
        after += [pointer(array), lead, number(stride)]
    return after


def only(condition: bool, reason: str) -> None:
    """Refuse a case unless `condition` holds.

    Raises:
        UnsupportedError: it does not.
    """
    if not condition:
        raise UnsupportedError(reason)


# More than the some thirty configurations of a BLIS; numbers beyond the last have no name.
ARCHITECTURES = 64
# Best first: the cpuinfo flag that a configuration needs.
NEAREST = (("skx", "avx512f"), ("haswell", "avx2"), ("sandybridge", "avx"))


def open_blis(setup: Setup) -> Library:
    """Open BLIS: its gemm and gemv."""
    library = loaded(["libblis.so*"], system=["blis"])
    driver()
    note = _configure(library, setup.isa)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        methods = {"gemm": gemm(library, case, data)}
        if is_vector(case):
            methods["gemv"] = gemv(library, case, data)
        return methods

    library.bli_info_get_version_str.restype = ctypes.c_char_p
    return Library(f"blis {library.bli_info_get_version_str().decode()} ({note})", prepare)


def _configure(library: Any, isa: str) -> str:
    """Set a configuration before BLIS initialises itself; return a description of it."""
    library.bli_arch_string.restype = ctypes.c_char_p
    own = _own_choice(library)
    wanted = {"avxvnni": "haswell", "avx2": "haswell", "sse2": "penryn"}.get(isa, "")
    if not wanted and own == "generic":
        wanted = next((name for name, flag in NEAREST if flag in host_features()), "")
    if not wanted or wanted == own:
        return own
    ids = {_name(library, i): i for i in range(ARCHITECTURES)}
    if wanted not in ids:
        return own
    os.environ["BLIS_ARCH_TYPE"] = str(ids[wanted])
    return f"{wanted}, set by hand; its own choice is {own}"


def _name(library: Any, number: int) -> str:
    name = library.bli_arch_string(number)
    return name.decode() if name else ""


def _own_choice(library: Any) -> str:
    # BLIS keeps its first selection for the life of a process, so a child queries it.
    child = os.fork()
    if child == 0:
        os._exit(library.bli_arch_query_id() & 0xFF)
    status = os.waitpid(child, 0)[1]
    return _name(library, os.waitstatus_to_exitcode(status)) or "unknown"


# libxsmm dispatches kernels up to (64 x 64 x 64); beyond, it calls a BLAS.
LARGEST = 64**3
LINK = ("-Wl,--whole-archive", "-lxsmm", "-Wl,--no-whole-archive", "-lxsmmnoblas", "-lpthread", "-lm", "-ldl")


def open_libxsmm(setup: Setup) -> Library:
    """Open libxsmm: its dispatched kernels, called for each matrix of a batch from C."""
    try:
        library = loaded(["libxsmm.so*"], system=["xsmm"])
    except MissingError:
        library = compile_driver(LINK)
    driver(setup.threads)
    library.libxsmm_init()
    library.libxsmm_get_target_arch.restype = ctypes.c_char_p

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        only(case.m * case.n * case.k <= LARGEST, "only small products")
        only({case.a, case.b, case.c} == {"row"}, "only untransposed operands")
        return {"dispatch": _dispatch(library, setup, case, data)}

    return Library(f"libxsmm ({library.libxsmm_get_target_arch().decode()})", prepare)


def _dispatch(library: Any, setup: Setup, case: Case, data: Arrays) -> Run:
    letter = LETTER[case.dtype]
    scalar = SCALAR[case.dtype]
    dispatch = getattr(library, f"libxsmm_{letter}mmdispatch")
    dispatch.restype = c_void_p
    # Column-major only: C^T = B^T . A^T.
    leads = [ctypes.byref(c_int(x)) for x in (case.n, case.k, case.n)]
    one, zero = scalar(1), scalar(0)
    kernel = dispatch(case.n, case.m, case.k, *leads, ctypes.byref(one), ctypes.byref(zero), None, None)
    only(bool(kernel), "libxsmm generated no kernel")
    a, sa, b, sb, c, sc = strided(case, data)
    loop = getattr(driver(setup.threads), f"loop_kernel_{letter}")
    return counted(loop, [c_void_p(kernel)], [c_long(case.batch), b, sb, a, sa, c, sc], data)
