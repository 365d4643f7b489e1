"""Weights laid out ahead: strips of rows, pages touched before."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import HERE, panels_of, valid_of

import portmm as pm
from portmm import arrays
from portmm.abi import HUGE_PAGE
from portmm.packed import unpack
from portmm.problem import family

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = [(np.float32, None), (np.float64, None), (BF16, None), (np.float16, None), (np.int8, None)]
TYPES += [(BF16, np.float32), (np.float16, np.float32), (np.int8, np.float32), (np.uint8, np.float32)]


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


def test_bits_are_moved_as_they_are():
    """Of every bfloat16 and float16, signalling NaNs too."""
    for dtype in (BF16, np.dtype(np.float16)):
        b = np.arange(1 << 16, dtype=np.uint16).reshape(512, 128).view(dtype)
        for w in (b, np.asfortranarray(b)):
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
        first, count = arrays.page_ends(part, 4)
        pages = (end // HUGE_PAGE) * HUGE_PAGE - begin
        assert [first + i * HUGE_PAGE // 4 for i in range(count)] == list(
            range((HUGE_PAGE - begin) // 4 - 1, pages // 4, HUGE_PAGE // 4)
        )


def script(name, monkeypatch):
    """A script of bench/ as a module."""
    path = Path(__file__).parent.parent / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def test_rates_are_measured(monkeypatch, tmp_path, capsys):
    packing, tables = script("packing", monkeypatch), script("tables", monkeypatch)
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
    assert {row["bytes"] for row in rows if row["dtype"] == "f32"} == {64 * (48 + 64) * 4}
    text = tables.summary(tables.load(tmp_path))
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
