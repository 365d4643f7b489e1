"""Products of Dask's arrays: values, types, the shape of graphs, a cluster of two processes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from places import ROOT

da = pytest.importorskip("dask.array", reason="Dask is not installed: nothing of portmm.dask is tested")
import dask  # noqa: E402

import portmm as pm  # noqa: E402
import portmm.dask as pd  # noqa: E402

QUICKLY = True
RNG = np.random.default_rng(3)
A, B = RNG.random((20, 26), np.float32), RNG.random((26, 18), np.float32)
CODES = RNG.integers(-99, 99, (20, 26), np.int8)


@pytest.fixture(autouse=True)
def _here():
    with dask.config.set(scheduler="synchronous"):
        yield


def chunked(x, *sizes):
    return da.from_array(x, chunks=sizes or 9)


def close(x, want, **tolerance):
    got = x.compute()
    assert isinstance(x, da.Array)
    assert (x.shape, x.dtype) == (np.shape(got), got.dtype)
    np.testing.assert_allclose(got, want, **({"rtol": 1e-5} | tolerance))


def test_products_of_matrices_and_vectors():
    x, y = chunked(A, 8, 7), chunked(B, 13, 6)
    close(pd.matmul(x, y), A @ B)
    close(pd.matmul(x[0], y), A[0] @ B)
    close(pd.matmul(x, y[:, 0]), A @ B[:, 0])
    close(pd.matmul(x[0], y[:, 0]), A[0] @ B[:, 0])
    close(pd.matmul(x, B), A @ B)  # one operand in memory
    close(pd.matmul(x, y, dtype=np.float64), A.astype(float) @ B, rtol=1e-12)
    close(pd.matmul(x, y[:, :0]), A @ B[:, :0])


def test_products_of_batches():
    a, b = RNG.random((3, 1, 8, 20)), RNG.random((4, 20, 6))
    close(pd.matmul(chunked(a, 2, 1, 3, 7), chunked(b, 3, 9, 4)), a @ b)


def test_integers_are_exact():
    got = pd.matmul(chunked(CODES), chunked(CODES.T, 7, 20)).compute()
    assert got.dtype == np.int32
    assert (got == CODES.astype(int) @ CODES.T.astype(int)).all()


def test_narrow_floats_are_rounded_once():
    a, b = A.astype(np.float16), B.astype(np.float16)
    got = pd.matmul(chunked(a, 20, 5), chunked(b, 5, 18)).compute()
    exact = a.astype(float) @ b.astype(float)
    assert got.dtype == np.float16
    assert (abs(got - exact) <= abs(exact) * 2.0**-11 * 1.001).all()


def test_einsums():
    x, y, z = chunked(A, 8, 7), chunked(B, 13, 6), RNG.random((18, 5), np.float32)
    close(pd.einsum("ij,jk,kl->li", x, y, z), (A @ B @ z).T)
    close(pd.einsum("ij,ij->j", x, x), (A * A).sum(0))
    close(pd.einsum("ij,kl->k", x, y), A.sum(dtype=float) * B.sum(1, dtype=float))
    close(pd.einsum("ij->j", x), A.sum(0))
    close(pd.einsum("...ij,jk", x, y), A @ B)
    heads = RNG.random((2, 12, 3, 8), np.float32)
    q = chunked(heads, 1, 5, 2, 8)
    close(pd.einsum("bqhd,bkhd->bhqk", q, q), np.einsum("bqhd,bkhd->bhqk", heads, heads))


def test_layers():
    w = RNG.integers(-9, 9, (26, 12), np.int8)
    rows, columns = RNG.random(20, np.float32), RNG.random(12, np.float32)
    x, packed = chunked(CODES, 6, 10), pm.pack(w)
    scales = {"x_scale": rows, "w_scale": columns, "x_zero": 2}
    close(pd.linear(x, packed, columns, **scales), pm.linear(CODES, packed, columns, **scales), rtol=0)
    small = pm.quantize(B, group=8)
    close(pd.linear(chunked(A), small, dynamic=True), pm.linear(A, small, dynamic=True), rtol=0)
    eight = pd.linear(x, packed, w_scale=0.1, out_scale=2.0)
    assert eight.compute().dtype == eight.dtype == np.int8
    doubled = pd.linear(x, packed, epilogue=lambda acc: acc * 2.0)
    close(doubled, pm.linear(CODES, packed) * 2, rtol=0)


def test_a_worker_holds_two_chunks_and_two_sums():
    x = da.ones((64, 64), chunks=8, dtype=np.float32)
    tasks = dict(pd.matmul(x, x).dask)
    chained = [t for key, t in tasks.items() if key[0].startswith("sum-")]
    assert len(chained) == 8**3
    assert max(len(t.dependencies if hasattr(t, "dependencies") else t[1:]) for t in chained) == 3


def test_few_chunks_of_a_result_have_several_chains():
    x = da.ones((8, 320), chunks=(8, 10), dtype=np.float32)
    product = pd.matmul(x, x.T)
    tasks = dict(product.dask)
    first = [t for key, t in tasks.items() if key[0].startswith("sum-") and len(getattr(t, "dependencies", t[1:])) == 2]
    assert len(first) == 16
    close(product, np.full((8, 8), 320))


def test_what_does_not_fit_is_refused_before_it_runs():
    x, y = chunked(A), chunked(B)
    with pytest.raises(ValueError, match="differ in k"):
        pd.matmul(x, y.T)
    with pytest.raises(ValueError, match="dimension"):
        pd.matmul(x, 3.0)
    with pytest.raises(TypeError):
        pd.matmul(x, chunked(CODES.astype(np.int64).T))
    with pytest.raises(ValueError, match="elements"):
        pd.einsum("ij,ij", x, y)
    with pytest.raises(TypeError, match="out"):
        pd.linear(x, pm.pack(CODES), out=A)
    with pytest.raises(ValueError, match="differ in k"):
        pd.linear(x, pm.pack(CODES))


def test_a_cluster_of_two_processes():
    distributed = pytest.importorskip("distributed")
    w = RNG.integers(-9, 9, (26, 12), np.int8)
    x, y = chunked(A, 8, 7), chunked(B, 13, 6)
    layer = pd.linear(chunked(CODES, 6, 26), pm.pack(w), epilogue=lambda acc: acc * 0.5)
    plan = pm.plan(A, B)
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        product, scaled = client.compute([pd.matmul(x, y), layer], sync=True)
        threads = client.run(pm.get_num_threads)
        planned = client.submit(lambda plan: plan(np.ones_like(A), np.ones_like(B)), plan).result()
    assert set(threads.values()) == {1}  # the nanny sets OMP_NUM_THREADS
    np.testing.assert_allclose(product, A @ B, rtol=1e-5)
    assert (planned == 26).all()
    assert (scaled == (CODES.astype(int) @ w) * 0.5).all()


def test_the_page_on_clusters_runs():
    page = (ROOT / "docs" / "clusters.md").read_text()
    exec(compile(page.split("```python\n")[1].split("```")[0], "clusters.md", "exec"), {})  # noqa: S102 - our own


def test_the_package_without_dask():
    code = "import sys; sys.modules['dask'] = None; import portmm.dask as pd; pd.matmul"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'portmm[dask]'" in done.stderr
