"""One kernel of bfloat16 on this host's units of tiles, beside NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from runs import guarded

import portmm as pm
from portmm.dispatch import config
from portmm.fusion import superoptimizer

QUICKLY = True
ENOUGH = 600
"""Budget of a search, in seconds, which numbers of kernels bound."""
RNG = np.random.default_rng(3)


def lora(x, w, a, b):
    return x @ w + (x @ a) @ b


def mlp(x, a, b):
    return np.tanh(x @ a) @ b


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_one_kernel_of_bfloat16_multiplies_by_units_of_tiles(monkeypatch, rows):
    """LoRA and an MLP, of no whole tiles: the kernel that is measured, whether it is faster or not."""
    bf16 = pytest.importorskip("ml_dtypes").bfloat16
    if not any(y.tiled and y.a == "bf16" for x in config.target().isas for y in x.atoms):
        pytest.skip("no units of tiles of bfloat16")
    seen = []
    monkeypatch.setattr(superoptimizer, "MEASURED", 0)
    monkeypatch.setattr(superoptimizer._Search, "compared", lambda _, x, __: seen.append((x.schedule, x.run)))
    for function, sizes in ((lora, "mk kn kr rn"), (mlp, "mk kr rn")):
        extents = {"m": rows, "k": 135, "n": 101, "r": 9}
        shapes = [tuple(extents[y] for y in x) for x in sizes.split()]
        arrays = [(RNG.standard_normal(x) / x[0] ** 0.5).astype(bf16) for x in shapes]
        seen.clear()
        pm.fuse(function, search=ENOUGH)(*arrays)
        runs = [run for schedule, run in seen if schedule is not None and schedule.isa == "amx_bf16"]
        assert len(runs) >= 2
        want = function(*[x.astype(np.float64) for x in arrays])
        for run in runs:
            got = run(arrays)
            assert got.dtype == bf16
            np.testing.assert_allclose(got.astype(np.float64), want, rtol=2e-2, atol=2e-2 * np.abs(want).max())


@pytest.mark.parametrize(("depth", "columns", "wide"), [(64, 8, 70), (96, 2, 513), (70, 16, 1100), (256, 3, 512)])
def test_few_columns_are_read_within_their_array(monkeypatch, depth, columns, wide):
    """Rows of fewer columns than a tile are read past their ends, but for those behind which no more rows follow.

    The result is stored in parts of its columns.
    """
    bf16 = pytest.importorskip("ml_dtypes").bfloat16
    if not any(y.tiled and y.a == "bf16" for x in config.target().isas for y in x.atoms):
        pytest.skip("no units of tiles of bfloat16")
    seen = []
    monkeypatch.setattr(superoptimizer, "MEASURED", 0)
    monkeypatch.setattr(superoptimizer._Search, "compared", lambda _, x, __: seen.append((x.schedule, x.run)))
    shapes = (20, depth), (depth, columns), (columns, wide)
    arrays = [(RNG.standard_normal(x) / x[0] ** 0.5).astype(bf16) for x in shapes]
    want = mlp(*[x.astype(np.float64) for x in arrays])
    pm.fuse(mlp, search=ENOUGH)(*arrays)
    inside = [guarded(x.ravel().view(np.uint16), end=True).view(bf16).reshape(x.shape) for x in arrays]
    runs = [run for schedule, run in seen if schedule is not None and schedule.isa == "amx_bf16"]
    assert len(runs) >= 2
    for run in runs:
        got = run(inside).astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * np.abs(want).max())
