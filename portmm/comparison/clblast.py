"""CLBlast, by ctypes on its C interface.

Owns `Blast`, its products, and one contender. Products of half-precision floats are left out:
it sums them in half precision.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from portmm.comparison.case import Case
from portmm.comparison.data import Arrays
from portmm.comparison.device import Operands, refuse, runs
from portmm.comparison.device_arrays import OpenClArrays
from portmm.comparison.peers import Fetched, Library, MissingError, Setup, UnsupportedError

FILE = "libclblast.so.1"
BY_ROWS, PLAIN, TRANSPOSED = 101, 111, 112
"""Constants of CBLAS."""
KINDS = {"f32": ("S", ctypes.c_float), "f64": ("D", ctypes.c_double)}

_size, _pointer = ctypes.c_size_t, ctypes.c_void_p


class BlastError(RuntimeError):
    """A call of the library failed, or it cannot be loaded."""


class Blast:
    """CLBlast's shared library.

    Raises:
        BlastError: it is not installed.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(FILE)
        except OSError as error:
            raise BlastError(str(error)) from error

    def gemm(self, case: Case, buffers: tuple[int, int, int], queue: int) -> Callable[[], None]:
        """Function that enqueues a product of buffers, which are named by their handles.

        Raises:
            BlastError: when it is called and fails.
        """
        letter, number = KINDS[case.dtype]
        m, n, k = case.m, case.n, case.k
        a, b, c = map(_pointer, buffers)
        queue_handle, nothing = _pointer(queue), _size(0)
        lda, ldb = (k if case.a == "row" else m), (n if case.b == "row" else k)
        step = [(_size(x),) if case.batch > 1 else () for x in (m * k, k * n, m * n)]
        function = getattr(self._library, f"CLBlast{letter}gemm{'StridedBatched' if case.batch > 1 else ''}")
        arguments = (
            BY_ROWS, *(PLAIN if x == "row" else TRANSPOSED for x in (case.a, case.b)),
            _size(m), _size(n), _size(k), number(1), a, nothing, _size(lda), *step[0],
            b, nothing, _size(ldb), *step[1], number(0), c, nothing, _size(n), *step[2],
            *((_size(case.batch),) if case.batch > 1 else ()), ctypes.byref(queue_handle), None,
        )  # fmt: skip

        def call() -> None:
            status = function(*arguments)
            if status:
                raise BlastError(f"CLBlast{letter}gemm returned status {status}")

        return call


def open_clblast(setup: Setup) -> Library:
    """Open CLBlast."""
    try:
        blast = Blast()
    except BlastError as error:
        raise MissingError(str(error)) from error
    on = OpenClArrays()

    def prepare(case: Case, data: Arrays) -> dict[str, Fetched]:
        refuse(case)
        if case.dtype not in KINDS:
            raise UnsupportedError(f"no product of {case.dtype} that is summed in a wider type")
        if case.c != "row":
            raise UnsupportedError("C by rows only")

        def ways(x: Operands) -> dict[str, Callable[[], Any]]:
            product = blast.gemm(case, (on.address(x.a), on.address(x.b), on.address(x.c)), on.stream())

            def call() -> Any:
                product()
                return x.c

            return {"gemm": call}

        return runs(on, case, data, ways, cold=setup.cold)

    return Library("clblast", prepare)
