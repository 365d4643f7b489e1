"""Weights laid out ahead: strips of rows, pages touched before, and codes folded into words as NumPy does it."""

from __future__ import annotations

import gc
import importlib.util
import json
import mmap
import sys
from pathlib import Path

import machines
import ml_dtypes
import numpy as np
import pytest
from bench_scripts import script as shared
from kernels_of import folding
from machines import HERE
from operands import panels_of, valid_of
from places import BENCH
from runs import interpret

import portmm as pm
from portmm.arrays import numpy_fallback, pages
from portmm.dispatch import cpu_routes
from portmm.errors import NoCompilerError
from portmm.ir.abi import HUGE_PAGE
from portmm.ops import int4_panels
from portmm.ops.prepack import unpack
from portmm.spec.problem import family

pytestmark = pytest.mark.calls

QUICKLY = True

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = [(np.float32, None), (np.float64, None), (BF16, None), (np.float16, None), (np.int8, None)]
TYPES += [(BF16, np.float32), (np.float16, np.float32), (np.int8, np.float32), (np.uint8, np.float32)]
CODES = [(1, 1, 8), (7, 5, 8), (8, 64, 8), (41, 7, None), (70, 33, 32), (2, 513, 8), (257, 64, 64), (300, 300, 40)]
CODES += [(513, 1, 128), (530, 1100, None), (600, 1030, 264)]


def quantized(k, n, group, seed=0):
    """A random weight of four bits."""
    rng = np.random.default_rng(seed)
    group = group or k
    scales, offsets = (rng.standard_normal((-(-k // group), n)).astype(np.float32) for _ in range(2))
    return pm.Quantized(rng.integers(0, 16, (k, n), np.uint8), scales, offsets, 4, group)


def by_numpy(q, name):
    """The panels of a weight, laid out without a kernel."""
    kept = family(name)
    owner = np.full(-(-q.shape[1] // kept.nr) * kept.panel(q.shape[0]), -1, np.int32)
    int4_panels._pack_by_numpy(q, kept, owner)
    return owner


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("dtype", "activations"), TYPES, ids=str)
@pytest.mark.parametrize("target", HERE)
def test_strips_of_rows_and_groups_of_panels(target, dtype, activations, order):
    """More rows than a strip, and more panels than are packed together, with a rest of both."""
    b = np.random.default_rng(0).integers(-100 if dtype != np.uint8 else 0, 100, (531, 1111)).astype(dtype, order)
    with pm.config(target=target, threads=3):
        packed = pm.pack(b, activations=activations)
    kept = family(packed.family)
    valid = valid_of(kept, *b.shape)
    np.testing.assert_array_equal(np.asarray(packed.owner)[valid], panels_of(b[None], kept).ravel()[valid])


@pytest.mark.parametrize("target", HERE)
def test_bits_are_moved_as_they_are(target):
    """Of every bfloat16 and float16, signalling NaNs too."""
    for dtype in (BF16, np.dtype(np.float16)):
        b = np.arange(1 << 16, dtype=np.uint16).reshape(512, 128).view(dtype)
        for w in (b, np.asfortranarray(b)):
            with pm.config(target=target):
                np.testing.assert_array_equal(unpack(pm.pack(w)).view(np.uint16), b.view(np.uint16))


def test_touching_pages_leaves_panels_alone():
    """Weights of many pages, batches too, whether one walk covers them or not."""
    for shape, turn in [((1500, 1111), (0, 1)), ((2, 3, 700, 900), (0, 1, 2, 3)), ((2, 3, 700, 900), (1, 0, 2, 3))]:
        b = np.arange(np.prod(shape), dtype=np.float32).reshape(shape).transpose(turn) + 1
        np.testing.assert_array_equal(unpack(pm.pack(b)), b)


def test_ends_of_pages_are_found():
    whole = np.empty(3 * HUGE_PAGE, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    for begin, end in ((0, 1), (0, HUGE_PAGE), (64, HUGE_PAGE - 4), (64, HUGE_PAGE + 64), (0, 2 * HUGE_PAGE)):
        part = whole[start + begin : start + end].view(np.int8)
        first, count = pages.page_ends(part, 4)
        reached = (end // HUGE_PAGE) * HUGE_PAGE - begin
        assert [first + i * HUGE_PAGE // 4 for i in range(count)] == list(
            range((HUGE_PAGE - begin) // 4 - 1, reached // 4, HUGE_PAGE // 4)
        )


@pytest.mark.parametrize("size", CODES, ids=str)
@pytest.mark.parametrize("target", HERE)
def test_codes_are_folded_as_by_numpy(target, size):
    q = quantized(*size)
    for threads in (1, 3):
        with pm.config(target=target, threads=threads):
            packed = pm.pack(q)
        np.testing.assert_array_equal(packed.owner, by_numpy(q, packed.family))


def test_codes_lie_in_any_way():
    q = quantized(83, 70, 16)
    want = pm.pack(q).owner
    spread = np.zeros((166, 210), np.uint8)
    spread[::2, ::3] = q.codes
    for codes in (np.asfortranarray(q.codes), spread[::2, ::3], q.codes[::-1].copy()[::-1], q.codes.copy()):
        codes.flags.writeable = False
        turned = pm.Quantized(codes, np.asfortranarray(q.scales), q.offsets.copy(), 4, 16)
        np.testing.assert_array_equal(pm.pack(turned).owner, want)


def test_many_pages_of_codes():
    q = quantized(4096, 2100, 128)
    packed = pm.pack(q)
    assert packed.nbytes > 2 * HUGE_PAGE
    np.testing.assert_array_equal(packed.owner, by_numpy(q, packed.family))


def test_codes_are_folded_without_a_compiler(monkeypatch):
    q = quantized(70, 33, 32)
    want = pm.pack(q).owner

    def none(*_):
        raise NoCompilerError("none here")

    monkeypatch.setattr(cpu_routes, "int4_repack_route", none)
    monkeypatch.setattr(numpy_fallback, "_warned", [])
    with pytest.warns(RuntimeWarning, match="computes with NumPy, which is slower: none here"):
        np.testing.assert_array_equal(pm.pack(q).owner, want)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_codes(shape):
    k, n = shape
    scales = np.zeros((k and 1, n), np.float32)
    packed = pm.pack(pm.Quantized(np.zeros(shape, np.uint8), scales, scales, 4, 8))
    assert not np.asarray(packed.owner).any()
    assert not pm.matmul(np.zeros((2, k), np.float32), packed).any()


@pytest.mark.parametrize("name", machines.ISAS)
def test_folding_means_words(name):
    """In the interpreter, on every instruction set."""
    for k, n, group, more in (
        (1, 1, 0, {}), (21, 2, 16, {}), (300, 9, 40, {"symmetric": True}), (16, 600, 8, {}),
        (40, 601, 16, {"symmetric": True, "half": True}),
    ):  # fmt: skip
        kernel, case, want = folding(name, k, n, group, **more)
        np.testing.assert_array_equal(interpret(kernel, case, 2, shuffle=1), want)


def script(name, monkeypatch):
    """A script of bench/ as a module."""
    path = BENCH / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def test_rates_are_measured(monkeypatch, tmp_path, capsys):
    packing = script("packing", monkeypatch)
    monkeypatch.setattr(packing, "RESULTS", tmp_path)
    monkeypatch.setattr(packing, "fresh_pages", lambda: None)
    words = "--quick --json --types f32 --types u4 --size 64x48 --threads 1 --threads 2"
    try:
        assert packing.main(words.split()) == 0
    finally:
        pm.set_num_threads(0)
    assert "10 cells" in capsys.readouterr().out
    (path,) = tmp_path.glob("*-packing.json")
    rows = json.loads(path.read_text())["packing"]
    assert all(min(row[x] for x in ("rate", "fresh", "kept", "share", "share_kept")) > 0 for row in rows)
    padded = pm.pack(np.ones((64, 48), np.float32)).nbytes  # whole panels of the target's NR
    assert {row["bytes"] for row in rows if row["dtype"] == "f32"} == {64 * 48 * 4 + padded}
    pages = shared("report")
    text = pages.summary(pages.load(tmp_path))
    assert "1 thread | 2 threads" in text
    assert "u4, groups of 32 rows, by rows" in text
    assert "f32, by columns" in text


def test_copies_are_whole(monkeypatch):
    packing = script("packing", monkeypatch)
    for threads in (1, 3):
        copy, src = packing.Copier(threads), np.arange(100, dtype=np.uint8)
        to = np.zeros_like(src)
        copy(to, src)
        copy.close()
        np.testing.assert_array_equal(to, src)


def flags_of(address):
    """Flags of the map that an address lies in, and its first address."""
    found = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(x, 16) for x in head.split("-"))
            found = (begin <= address < end) and hex(begin)
        elif head == "VmFlags:" and found:
            return line.split()[1:], found
    return [], ""


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_a_large_weight_starts_on_a_huge_page_and_returns_it():
    """Its memory is asked for in huge pages, and goes back to the system with the last reference."""
    rows = pages.LEAST // 4 // 64 + 1
    b = np.random.default_rng(0).standard_normal((rows, 64), np.float32)
    w = pm.pack(b)
    address = np.asarray(w.owner).ctypes.data
    flags, begin = flags_of(address)
    assert address % HUGE_PAGE == 0
    assert np.asarray(w.owner).nbytes >= pages.LEAST
    assert "hg" in flags
    assert (unpack(w) == b).all()
    kept = pm.matmul(b[:3, :1] * np.ones((3, rows), np.float32), w)
    assert np.isfinite(kept).all()
    del w
    gc.collect()
    pm.forget()
    assert flags_of(address)[1] != begin or "hg" not in flags_of(address)[0]
    assert np.asarray(pm.pack(b[:1000]).owner).ctypes.data % 64 == 0


def test_a_system_without_huge_pages_is_served(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(pages, "LEAST", 4096)
    monkeypatch.setattr(pages.mmap, "mmap", Plain)
    b = np.random.default_rng(0).standard_normal((70, 90), np.float32)
    assert (unpack(pm.pack(b)) == b).all()
    monkeypatch.setattr(pages.mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(OSError(12, "no memory")))
    with pytest.raises(MemoryError, match="no memory for"):
        pm.pack(b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 7, 16, 17, 33, 48, 49])
def test_few_columns_have_panels_of_their_own_width(n, dtype):
    """Padding of a usual panel, of two vectors, would be half of one, or a quarter of two."""
    rng = np.random.default_rng(n)
    a, w = rng.standard_normal((9, 70)).astype(dtype), rng.standard_normal((70, n)).astype(dtype)
    packed = pm.pack(w)
    usual = family(pm.pack(np.zeros((1, 1000), dtype)).family)
    vector = usual.nr // 2
    vectors = -(-n // vector)
    assert family(packed.family).nr == vector * (vectors if vectors in (1, 3) else 2)
    np.testing.assert_array_equal(unpack(packed), w)
    tolerance = 1e-5 if dtype is np.float32 else 1e-13
    np.testing.assert_allclose(pm.matmul(a, packed), a @ w, rtol=tolerance, atol=20 * tolerance)
    sums = pm.matmul(a, packed, epilogue=lambda acc, _i: acc + 1) if dtype is np.float32 else a @ w + 1
    np.testing.assert_allclose(sums, a @ w + 1, rtol=tolerance, atol=20 * tolerance)
