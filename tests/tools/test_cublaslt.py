"""cublasLt by ctypes, and as a contender: with a false library, which computes where a test wants it to."""

from __future__ import annotations

import ctypes

import bench_arrays
import ml_dtypes
import numpy as np
import pytest
from comparisons import prepare
from cuda_fakes import FakeLt

from portmm.comparison import cublaslt
from portmm.comparison.case import Case
from portmm.comparison.device import lt_library
from portmm.comparison.device_arrays import TorchArrays

NUMPY = {0: np.dtype("f4"), 3: np.dtype("i1"), 10: np.dtype("i4"), 14: np.dtype(ml_dtypes.bfloat16)}
"""cublasLt's numbers of types."""


def test_structures_are_as_large_as_the_librarys():
    assert (ctypes.sizeof(cublaslt.Algorithm), ctypes.sizeof(cublaslt.Heuristic)) == (64, 96)
    assert (cublaslt.Heuristic.workspace.offset, cublaslt.Heuristic.state.offset, cublaslt.Heuristic.waves.offset) == (
        64,
        72,
        76,
    )
    with pytest.raises(cublaslt.LtError, match="status 7"):
        cublaslt._check("x", 7)


def test_cublaslt_is_asked_as_its_manual_says():
    fake = FakeLt()
    lt = cublaslt.open_library(fake)
    assert lt.version == 130100
    product = lt.product(("bf16", "bf16", "bf16"), (3, 5, 7), by_columns=True)
    made = [given[1:] for name, given in fake.log if name == "cublasLtMatrixLayoutCreate"]
    assert made == [(14, 7, 5, 7), (14, 7, 3, 7), (14, 5, 3, 5)]
    assert next(given[1:] for name, given in fake.log if name == "cublasLtMatmulDescCreate") == (68, 0)
    set_to = {g[1]: g[2]._obj.value for name, g in fake.log if name == "cublasLtMatmulDescSetAttribute"}
    assert set_to == {3: 1, 4: 0}
    times = {1: 2.0, 2: 1.0}

    def seconds(calls):
        for call in calls:
            call()
        return times[fake.log[-1][1][12]._obj.data[0]]

    found = product.search([(11, 12, 13), (21, 22, 23)], seconds, (900, 64), 5)
    assert [(x.algorithm.data[0], x.seconds, x.workspace) for x in found] == [(2, 1.0, 128)]
    name, given = fake.log[-1]
    assert name == "cublasLtMatmul"
    assert given[3] in (12, 22)  # its first operand is B
    assert given[5] in (11, 21)
    assert given[8] == given[10] in (13, 23)
    assert given[13:] == (900, 64, 5)
    assert given[2]._obj.value == 1.0
    product.close()
    assert fake.alive == 0
    by_rows = lt.product(("s8", "s8", "s32"), (3, 5, 7), by_columns=False)
    assert by_rows.one.value == 1
    assert [g[1:] for n, g in fake.log if n == "cublasLtMatrixLayoutCreate"][3:] == [
        (3, 5, 7, 5), (3, 7, 3, 7), (10, 5, 3, 5)
    ]  # fmt: skip


def test_epilogues_are_asked_for_by_the_numbers_of_the_header():
    """cublasLtMatmulDescAttributes_t, cublasLtEpilogue_t of cublasLt.h 13.1."""
    assert cublaslt.EPILOGUES == {"bias": 4, "relu bias": 6, "gelu bias": 36}
    fake = FakeLt()
    product = cublaslt.open_library(fake).product(("bf16", "bf16", "bf16"), (3, 5, 7), by_columns=True)
    product.follow("gelu bias", 1 << 40)
    found = {g[1]: (g[2]._obj.value, g[3]) for name, g in fake.log if name == "cublasLtMatmulDescSetAttribute"}
    assert found == {3: (1, 4), 4: (0, 4), 7: (36, 4), 8: (1 << 40, 8)}
    product.close()
    assert fake.alive == 0


def test_a_missing_library_is_said(monkeypatch):
    monkeypatch.setattr(cublaslt, "find", lambda: ["/nowhere/libcublasLt.so"])
    with pytest.raises(cublaslt.LtError, match="no libcublasLt"):
        cublaslt.open_library()


class Computing(FakeLt):
    """It multiplies matrices by columns, in the host's memory."""

    def __init__(self):
        super().__init__()
        self.layouts, self.set_to = {}, {}

    def called(self, name, given):
        status = super().called(name, given)
        if name == "cublasLtMatrixLayoutCreate":
            self.layouts[given[0]._obj.value] = given[1:]
        if name == "cublasLtMatmulDescSetAttribute":
            self.set_to[given[0].value, given[1]] = given[2]._obj.value
        if name == "cublasLtMatmul" and not status:
            operation = given[1].value
            first, second = (self.matrix(given[i], given[i + 1]) for i in (3, 5))
            first = first.T if self.set_to[operation, cublaslt.TRANSPOSE_A] else first
            second = second.T if self.set_to[operation, cublaslt.TRANSPOSE_B] else second
            out = self.matrix(given[10], given[11])
            wide = np.int64 if out.dtype.kind == "i" else np.float64
            out[...] = (first.astype(wide) @ second.astype(wide)).astype(out.dtype)
        return status

    def matrix(self, address, layout):
        kind, rows, columns, line = self.layouts[layout.value]
        dtype = NUMPY[kind]
        held = (ctypes.c_char * (line * columns * dtype.itemsize)).from_address(address)
        return np.frombuffer(held, dtype).reshape(columns, line)[:, :rows].T


@pytest.fixture
def library(monkeypatch):
    """The contender, on tensors in the host's memory."""
    pytest.importorskip("torch")
    bench_arrays.tensors_there(monkeypatch)
    monkeypatch.setattr(cublaslt, "WORKSPACE", 64)
    return lt_library(TorchArrays(None, "cpu"), Computing())


@pytest.mark.parametrize("b", ["row", "col"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "s8-s8-s32"])
def test_the_contender_is_right(library, dtype, b):
    _, reply = prepare(library, Case("x", "x", 70, 17, 24, b=b, dtype=dtype), 0)
    assert (reply["state"], reply["method"]) == ("ok", "search"), reply
    assert library.version == "cublasLt 130100"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"batch": 2}, "not of batches"), ({"a": "col"}, "by rows only"), ({"dtype": "f64"}, "no product of f64"),
        ({"dtype": "u8-s8-f32"}, "codes with scales"),
    ],
)  # fmt: skip
def test_what_it_does_not_compute_is_said(library, more, why):
    _, reply = prepare(library, Case("x", "x", 8, 8, 8, **more), 0)
    assert reply["state"] == "unsupported"
    assert why in reply["reason"]
