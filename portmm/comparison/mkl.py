"""Intel MKL, through its C interface.

Owns two contenders: MKL's calls, and its just-in-time small kernels, which
run in a process of their own.

MKL has no fused epilogues: NumPy's ufuncs compute them, and MKL's own vector
function where NumPy has none.

`libmkl_rt` selects its other libraries on the first call, and they find
each other only if it was loaded with global symbols. On processors that are
not Intel's, MKL selects an AVX2 path, which no variable changes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_int, c_long, c_void_p
from typing import Any

import numpy as np

from portmm.comparison import native
from portmm.comparison.case import PLAIN, Case
from portmm.comparison.data import INPUTS, Arrays
from portmm.comparison.peers import Fetched, Library, MissingError, Run, Setup, finishing, repeat

PACKED = 151
IDENTIFIER_B = 162
NO_JIT = 1
# Above this size MKL's just-in-time call falls back to its ordinary one.
JIT_LARGEST = 128
# Types of A and B -> MKL's name of the call, the driver's loop, and the type of its results.
# In row-major products A is u8, although the call's name begins with s8; an offset turns s8 into u8.
SIGNED, UNSIGNED = ("s8", "s8"), ("u8", "s8")
FLIPPED = 128
NARROW = {
    ("bf16", "bf16"): ("bf16bf16f32", "loop_gemm_16", "f32"),
    ("f16", "f16"): ("f16f16f32", "loop_gemm_16", "f32"),
    UNSIGNED: ("s8u8s32", "loop_gemm_8", "s32"),
    SIGNED: ("s8u8s32", "loop_gemm_8", "s32"),
}


def _load(setup: Setup) -> tuple[Any, str]:
    os.environ["MKL_THREADING_LAYER"] = _threading(setup.threads)
    library = native.loaded(["libmkl_rt.so*"], packages=["mkl"], system=["mkl_rt"])
    text = ctypes.create_string_buffer(200)
    library.MKL_Get_Version_String(text, 200)
    version = text.value.decode().partition("Version ")[2].partition("-")[0]
    return library, f"mkl {version}"


def _threading(threads: int) -> str:
    if threads == 1:
        return "SEQUENTIAL"
    try:
        native.shared_library(["libiomp5.so"], packages=["intel-openmp"], system=["iomp5"])
    except MissingError:
        return "GNU"
    return "INTEL"


def open_mkl(setup: Setup) -> Library:
    """Open MKL: its gemm, gemv, packed and strided-batch calls."""
    library, version = _load(setup)
    native.driver()

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        methods = bare(case, data)
        if not case.fused:
            return methods
        native.only(case.dtype in PLAIN, "has only results that would still be rounded")
        normal = _normal(library, case)
        return {f"{name}, ufuncs": finishing(run, case, data, normal) for name, run in methods.items()}

    def bare(case: Case, data: Arrays) -> dict[str, Run]:
        if case.narrow:
            return _narrow(library, case, data)
        methods = {"gemm": native.gemm(library, case, data)}
        if native.is_vector(case):
            methods["gemv"] = native.gemv(library, case, data)
        if case.batch > 1:
            after = [*native.matrices(case, data, c_int), case.batch]
            methods["batch_strided"] = native.of_cblas(library, case, "gemm_batch_strided", after, data)
        if case.packed:
            methods["pack/compute"] = _packed(library, case, data)
        return methods

    return Library(version, prepare, dtypes=None, precision=INPUTS, fused=True)


def _normal(library: Any, case: Case) -> Callable[..., None]:
    """Cumulative normal distribution, of which gelu is a multiple: x times it."""
    function = getattr(library, f"v{native.LETTER[case.dtype]}CdfNorm")

    def normal(x: Any, out: Any) -> None:
        function(x.size, native.pointer(x), native.pointer(out))

    return normal


def _narrow(library: Any, case: Case, data: Arrays) -> dict[str, Run]:
    known = NARROW.get(case.types[:2])
    native.only(known is not None and not case.scaled and case.batch == 1, f"MKL does not multiply {case.dtype}")
    name, loop, result = known or ("", "", "")
    native.only(case.c == "row", "u8 only by rows")
    order, ta, tb, lda, ldb, ldc = native.flags(case)
    # MKL writes no narrow floats: its results are converted for the check, which is not timed.
    c = data.c if case.types[2] == result else np.empty(data.c.shape, np.float32)
    flip = case.types[:2] == SIGNED
    a = np.empty_like(data.a).view(np.uint8) if flip else data.a
    zero = [-FLIPPED if flip else 0] if result == "s32" else []

    def run(function: str, marks: tuple[int, int], b: c_void_p, keep: object) -> Run:
        after = [order, *marks, case.m, case.n, case.k, native.pointer(a), lda, b, ldb, native.pointer(c), ldc, *zero]
        call = native.address(getattr(library, function))
        product = native.counted(getattr(native.driver(), loop), [call], after, (a, c, keep))
        if flip:
            return repeat(lambda: (np.bitwise_xor(data.a.view(np.uint8), FLIPPED, out=a), product(1)))
        return product if c is data.c else Fetched(product, lambda: np.copyto(data.c, c, casting="unsafe"))

    note = "" if c is data.c else ", f32 result"
    methods = {f"gemm{note}": run(f"cblas_gemm_{name}", (ta, tb), native.pointer(data.b), data)}
    if case.packed:
        start, store = _pack(library, f"cblas_gemm_{name}", case, data)
        methods[f"pack/compute{note}"] = run(f"cblas_gemm_{name}_compute", (ta, PACKED), start, (store, data))
    return methods


def _pack(library: Any, name: str, case: Case, data: Arrays, *scale: Any) -> tuple[c_void_p, Any]:
    """Address of a B that NAME_pack packed, with a scale for floats, and the object that owns its memory."""
    order, _, tb, _, ldb, _ = native.flags(case)
    size = getattr(library, f"{name}_pack_get_size")
    size.restype = ctypes.c_size_t
    store = (ctypes.c_char * (size(IDENTIFIER_B, case.m, case.n, case.k) + 64))()
    start = c_void_p(-(-ctypes.addressof(store) // 64) * 64)
    sizes = order, IDENTIFIER_B, tb, case.m, case.n, case.k
    getattr(library, f"{name}_pack")(*sizes, *scale, native.pointer(data.b), ldb, start)
    return start, store


def _packed(library: Any, case: Case, data: Arrays) -> Run:
    order, ta, _, lda, ldb, ldc = native.flags(case)
    name, one = f"cblas_{native.LETTER[case.dtype]}gemm", native.SCALAR[case.dtype](1)
    start, store = _pack(library, name, case, data, one)
    sizes = order, ta, PACKED, case.m, case.n, case.k
    after = [*sizes, native.pointer(data.a), lda, start, ldb, native.pointer(data.c), ldc]
    return native.of_cblas(library, case, "gemm_compute", after, (store, data))


def open_jit(setup: Setup) -> Library:
    """Open MKL's just-in-time kernels, called for each matrix of a batch from C."""
    library, version = _load(setup)
    native.driver(setup.threads)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        native.only(max(case.m, case.n, case.k) <= JIT_LARGEST, f"only up to {JIT_LARGEST}")
        return {"jit": _jit(library, setup, case, data)}

    return Library(f"{version} (JIT)", prepare)


def _jit(library: Any, setup: Setup, case: Case, data: Arrays) -> Run:
    order, ta, tb, lda, ldb, ldc = native.flags(case)
    letter = native.LETTER[case.dtype]
    scalar = native.SCALAR[case.dtype]
    jit = c_void_p()
    create = getattr(library, f"mkl_cblas_jit_create_{letter}gemm")
    status = create(ctypes.byref(jit), order, ta, tb, case.m, case.n, case.k, scalar(1), lda, ldb, scalar(0), ldc)
    native.only(status != NO_JIT, "MKL has no JIT kernel for this shape on this processor")
    native.only(status == 0, f"mkl_jit_create_{letter}gemm returned {status}")
    get = getattr(library, f"mkl_jit_get_{letter}gemm_ptr")
    get.restype = c_void_p
    loop = getattr(native.driver(setup.threads), f"loop_jit_{letter}")
    after = [c_long(case.batch), *native.strided(case, data)]
    return native.counted(loop, [c_void_p(get(jit)), jit], after, data)
