"""BLIS and libxsmm.

Owns both contenders. A BLIS older than the processor falls back to portable code; an expert user sets the nearest
configuration by hand, and so does its adapter. Debian ships libxsmm, just-in-time kernels for small products, as an
archive only, so it is linked into a driver of its own.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_long, c_void_p
from pathlib import Path
from typing import Any

from portmm.comparison import native
from portmm.comparison.case import Case
from portmm.comparison.data import Arrays
from portmm.comparison.peers import Library, MissingError, Run, Setup

# More than the some thirty configurations of a BLIS; numbers beyond the last have no name.
ARCHITECTURES = 64
# Best first: the cpuinfo flag that a configuration needs.
NEAREST = (("skx", "avx512f"), ("haswell", "avx2"), ("sandybridge", "avx"))


def open_blis(setup: Setup) -> Library:
    """Open BLIS: its gemm and gemv."""
    path = native.shared_library(["libblis.so*"], system=["blis"])
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise MissingError(str(error)) from error
    native.driver()
    note = _configure(library, setup.isa)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        methods = {"gemm": native.gemm(library, case, data)}
        if native.is_vector(case):
            methods["gemv"] = native.gemv(library, case, data)
        return methods

    library.bli_info_get_version_str.restype = ctypes.c_char_p
    return Library(f"blis {library.bli_info_get_version_str().decode()} ({note})", prepare)


def _configure(library: Any, isa: str) -> str:
    """Set a configuration before BLIS initialises itself; return a description of it."""
    library.bli_arch_string.restype = ctypes.c_char_p
    own = _own_choice(library)
    wanted = {"avxvnni": "haswell", "avx2": "haswell", "sse2": "penryn"}.get(isa, "")
    if not wanted and own == "generic":
        flags = _cpu_flags()
        wanted = next((name for name, flag in NEAREST if flag in flags), "")
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


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((x for x in lines if x.startswith("flags")), "").split())


# libxsmm dispatches kernels up to (64 x 64 x 64); beyond, it calls a BLAS.
LARGEST = 64**3
LINK = ("-Wl,--whole-archive", "-lxsmm", "-Wl,--no-whole-archive", "-lxsmmnoblas", "-lpthread", "-lm", "-ldl")


def _load() -> Any:
    try:
        path = native.shared_library(["libxsmm.so*"], system=["xsmm"])
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (MissingError, OSError):
        return native.compile_driver(LINK)


def open_libxsmm(setup: Setup) -> Library:
    """Open libxsmm: its dispatched kernels, called for each matrix of a batch from C."""
    library = _load()
    native.driver(setup.threads)
    library.libxsmm_init()
    library.libxsmm_get_target_arch.restype = ctypes.c_char_p

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        native.only(case.m * case.n * case.k <= LARGEST, "only small products")
        native.only({case.a, case.b, case.c} == {"row"}, "only untransposed operands")
        return {"dispatch": _dispatch(library, setup, case, data)}

    return Library(f"libxsmm ({library.libxsmm_get_target_arch().decode()})", prepare)


def _dispatch(library: Any, setup: Setup, case: Case, data: Arrays) -> Run:
    letter = native.LETTER[case.dtype]
    scalar = native.SCALAR[case.dtype]
    dispatch = getattr(library, f"libxsmm_{letter}mmdispatch")
    dispatch.restype = c_void_p
    # Column-major only: C^T = B^T . A^T.
    leads = [ctypes.byref(c_int(x)) for x in (case.n, case.k, case.n)]
    one, zero = scalar(1), scalar(0)
    sizes = map(c_int, (case.n, case.m, case.k))
    kernel = dispatch(*sizes, *leads, ctypes.byref(one), ctypes.byref(zero), None, None)
    native.only(bool(kernel), "libxsmm generated no kernel")
    a, sa, b, sb, c, sc = native.strided(case, data)
    loop = getattr(native.driver(setup.threads), f"loop_kernel_{letter}")
    return native.counted(loop, [c_void_p(kernel)], [c_long(case.batch), b, sb, a, sa, c, sc], data)
