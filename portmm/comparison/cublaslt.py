"""Search for the fastest algorithm of cublasLt for a product.

    lt = cublaslt.open_library()
    product = lt.product(("bf16", "bf16", "bf16"), (m, n, k), by_columns=True)
    fastest = product.search(sets, seconds, workspace)       # each of `sets`: addresses of A, B and C
    product.run(fastest[0].algorithm, *sets[0], workspace, stream)

Owns the calls of the library.

Written from cuBLAS's documentation, by ctypes on the library that PyTorch installs. cublasLt takes matrices by columns:
C^T = B^T A^T of matrices by rows, so that its first operand is B. All functions return a status, 0 for success.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WORKSPACE = 64 << 20
"""Bytes of memory that an algorithm may take; NVIDIA advises 32 MB on Hopper."""
MOST = 64
"""Most algorithms that are requested; the library has fewer for most products."""
LIMIT = 4.0
"""Seconds of a search."""
NEAR = 1.3
"""Multiple of the fastest first time above which an algorithm is not timed again."""

# cudaDataType_t, of library_types.h.
TYPES = {"f32": 0, "f16": 2, "s8": 3, "s32": 10, "bf16": 14, "e4m3": 28, "e5m2": 29}
# cublasComputeType_t.
COMPUTE_F32, COMPUTE_TF32, COMPUTE_S32 = 68, 77, 72
# Attributes of cublasLtMatmulDesc_t and cublasLtMatmulPreference_t.
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER, MAX_WORKSPACE = 3, 4, 7, 8, 1
PLAIN, TRANSPOSED = 0, 1
# cublasLtEpilogue_t; its GELU is the one by tanh.
EPILOGUES = {"bias": 4, "relu bias": 6, "gelu bias": 36}

_pointer, _size, _long, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int


class LtError(RuntimeError):
    """A call of the library failed, or it cannot be loaded."""


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t, which is opaque."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm), ("workspace", _size), ("state", _int), ("waves", ctypes.c_float),
        ("reserved", _int * 4),
    )  # fmt: skip


_SIGNATURES = {
    "cublasLtCreate": (_pointer,),
    "cublasLtMatmulDescCreate": (_pointer, _int, _int),
    "cublasLtMatmulDescSetAttribute": (_pointer, _int, _pointer, _size),
    "cublasLtMatmulDescDestroy": (_pointer,),
    "cublasLtMatrixLayoutCreate": (_pointer, _int, ctypes.c_uint64, ctypes.c_uint64, _long),
    "cublasLtMatrixLayoutDestroy": (_pointer,),
    "cublasLtMatmulPreferenceCreate": (_pointer,),
    "cublasLtMatmulPreferenceSetAttribute": (_pointer, _int, _pointer, _size),
    "cublasLtMatmulPreferenceDestroy": (_pointer,),
    "cublasLtMatmulAlgoGetHeuristic": (*(_pointer,) * 7, _int, _pointer, _pointer),
    "cublasLtMatmul": (*(_pointer,) * 14, _size, _pointer),
}


def find() -> list[str]:
    """Candidate files of the library, the likeliest first."""
    names = ["libcublasLt.so.13", "libcublasLt.so.12"]  # one that PyTorch has loaded is found by its name
    packages = find_spec("nvidia")  # a namespace, not one package: there is nothing to import
    for root in (packages and packages.submodule_search_locations) or ():
        names += sorted(map(str, Path(root).glob("*/lib/libcublasLt.so.*")), reverse=True)
    return [*names, "/usr/local/cuda/lib64/libcublasLt.so"]


def open_library(library: Any = None) -> Lt:
    """The library with a handle; tests pass their own `library`.

    Raises:
        LtError: it is not installed.
    """
    errors = []
    for name in [] if library else find():
        try:
            library = ctypes.CDLL(name)
            break
        except OSError as error:
            errors.append(str(error))
    if library is None:
        raise LtError(f"no libcublasLt: {errors[0]}")
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _int
    handle = _pointer()
    _check("cublasLtCreate", library.cublasLtCreate(ctypes.byref(handle)))
    try:
        library.cublasLtGetVersion.restype = _size
        version = int(library.cublasLtGetVersion())
    except AttributeError:
        version = 0
    return Lt(library, handle, version)


def _check(name: str, status: int) -> None:
    if status:
        raise LtError(f"{name} returned status {status}")


@dataclass(frozen=True)
class Lt:
    """The library and its handle."""

    library: Any
    handle: Any
    version: int

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            LtError: it failed.
        """
        _check(name, getattr(self.library, name)(*arguments))

    def product(
        self, types: tuple[str, str, str], size: tuple[int, int, int], *, by_columns: bool, tf32: bool = False
    ) -> Product:
        """Descriptors of a product.

        Args:
            types: element types of A, B and C.
            size: m, n and k.
            by_columns: B is column-major; A and C are row-major, and so is B otherwise.
            tf32: products of float32 are rounded to tf32.

        Raises:
            LtError: the library does not support it.
        """
        (a, b, c), (m, n, k) = types, size
        integers = c == "s32"
        compute = COMPUTE_S32 if integers else COMPUTE_TF32 if tf32 else COMPUTE_F32
        number: Any = _int if integers else ctypes.c_float
        product = Product(self, (m, n, k), number(1), number(0))
        product.create("operation", "MatmulDesc", compute, TYPES["s32" if integers else "f32"])
        for attribute, value in ((TRANSPOSE_A, TRANSPOSED if by_columns else PLAIN), (TRANSPOSE_B, PLAIN)):
            product.describe(attribute, ctypes.c_int32(value))
        # Rows, columns and the leading dimension of the matrices in memory, in column-major terms.
        product.create("first", "MatrixLayout", TYPES[b], *((k, n, k) if by_columns else (n, k, n)))
        product.create("second", "MatrixLayout", TYPES[a], k, m, k)
        product.create("result", "MatrixLayout", TYPES[c], n, m, n)
        return product


@dataclass(frozen=True)
class Timed:
    """An algorithm, and the seconds of a product that it computes."""

    algorithm: Algorithm
    seconds: float
    workspace: int


class Product:
    """A product, with the library's descriptors for it."""

    def __init__(self, lt: Lt, size: tuple[int, int, int], one: Any, zero: Any) -> None:
        self.lt, self.size, self.one, self.zero = lt, size, one, zero
        self.descriptors: list[tuple[str, Any]] = []
        self.operation: Any = None
        self.first: Any = None
        self.second: Any = None
        self.result: Any = None

    def create(self, name: str, kind: str, *arguments: int) -> None:
        """Create a descriptor or a layout, which `close` frees, and store it as an attribute of that name."""
        descriptor = _pointer()
        self.lt.call(f"cublasLt{kind}Create", ctypes.byref(descriptor), *arguments)
        self.descriptors.append((kind, descriptor))
        setattr(self, name, descriptor)

    def describe(self, attribute: int, value: Any) -> None:
        """Set an attribute of the operation."""
        size = ctypes.sizeof(value)
        self.lt.call("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.byref(value), size)

    def follow(self, epilogue: str, bias: int) -> None:
        """Set the epilogue: a bias of n elements, of the result's type, and an activation.

        Args:
            epilogue: a name of `EPILOGUES`.
            bias: the address of the row; the heuristic looks at its alignment.

        Raises:
            LtError: the library refuses.
        """
        self.describe(EPILOGUE, ctypes.c_uint32(EPILOGUES[epilogue]))
        self.describe(BIAS_POINTER, ctypes.c_uint64(bias))

    def close(self) -> None:
        """Free the library's descriptors."""
        while self.descriptors:
            kind, descriptor = self.descriptors.pop()
            self.lt.call(f"cublasLt{kind}Destroy", descriptor)

    def algorithms(self, most: int = MOST, workspace: int = WORKSPACE) -> list[Heuristic]:
        """Algorithms that the library's heuristic proposes, best first by its own estimate.

        Raises:
            LtError: there is none.
        """
        preference, count = _pointer(), _int()
        self.lt.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            limit = ctypes.c_uint64(workspace)
            self.lt.call(
                "cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE, ctypes.byref(limit),
                ctypes.sizeof(limit),
            )  # fmt: skip
            proposed = (Heuristic * most)()
            self.lt.call(
                "cublasLtMatmulAlgoGetHeuristic", self.lt.handle, self.operation, self.first, self.second, self.result,
                self.result, preference, most, proposed, ctypes.byref(count),
            )  # fmt: skip
        finally:
            self.lt.call("cublasLtMatmulPreferenceDestroy", preference)
        return [x for x in proposed[: count.value] if x.state == 0]

    def run(  # noqa: PLR0917 - addresses
        self, algorithm: Algorithm, a: int, b: int, c: int, workspace: tuple[int, int], stream: int
    ) -> None:
        """Enqueue the product in a stream: `workspace` is an address and a number of bytes.

        Raises:
            LtError: the library refuses.
        """
        buffer, size = workspace
        self.lt.call(
            "cublasLtMatmul", self.lt.handle, self.operation, ctypes.byref(self.one), b, self.first, a, self.second,
            ctypes.byref(self.zero), c, self.result, c, self.result, ctypes.byref(algorithm), buffer, size, stream,
        )  # fmt: skip

    def search(
        self,
        sets: Sequence[tuple[int, int, int]],
        seconds: Callable[[list[Callable[[], object]]], float],
        workspace: tuple[int, int],
        stream: int,
        *,
        most: int = MOST,
        limit: float = LIMIT,
    ) -> list[Timed]:
        """Algorithms that run, the fastest first: all are timed once, those near the fastest again.

        Args:
            sets: addresses of A, B and C of each rotation.
            seconds: times calls: `seconds(calls)` returns the time of one.
            workspace: an address and a number of bytes.
            stream: stream of the calls.
            most: most algorithms.
            limit: seconds after which no further algorithm is tried.

        Raises:
            LtError: none works.
        """
        began = time.monotonic()

        def taken(x: Heuristic | Timed, turns: int) -> float:
            buffers = [sets[turn % len(sets)] for turn in range(turns)]
            return seconds([partial(self.run, x.algorithm, *abc, workspace, stream) for abc in buffers])

        timed: list[Timed] = []
        for x in self.algorithms(most, workspace[1]):
            if timed and time.monotonic() - began > limit:
                break
            try:
                taken(x, 1)
                timed.append(Timed(x.algorithm, taken(x, 2), x.workspace))
            except LtError:
                continue  # proposed, and yet refused
        if not timed:
            raise LtError("no algorithm that it proposes runs")
        least = min(x.seconds for x in timed)
        near = [x for x in timed if x.seconds <= NEAR * least]
        return sorted((Timed(x.algorithm, taken(x, 10), x.workspace) for x in near), key=lambda x: x.seconds)
