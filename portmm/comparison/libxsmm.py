"""libxsmm, just-in-time kernels for small products.

Owns one contender. Debian ships libxsmm as an archive only, so it is linked into a driver
of its own.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_long, c_void_p
from typing import TYPE_CHECKING, Any

from portmm.comparison import native
from portmm.comparison.peers import Library, MissingError, Run

if TYPE_CHECKING:
    from portmm.comparison.case import Case
    from portmm.comparison.data import Arrays
    from portmm.comparison.environment import Setup

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
