"""Operators for JAX's arrays: values, compilation, batches, gradients, and the ways to a kernel."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from places import ROOT

jax = pytest.importorskip("jax", reason="JAX is not installed: nothing of portmm.jax is tested")
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import portmm as pm  # noqa: E402
import portmm.jax as pj  # noqa: E402
from portmm.jax import handler  # noqa: E402
from portmm.jax.operators import _by_matrices  # noqa: E402

QUICKLY = True
RNG = np.random.default_rng(8)
SHAPES = [((6, 20), (20, 9)), ((3, 6, 20), (20, 9)), ((2, 1, 4, 5), (3, 5, 2)), ((5,), (5, 3)), ((2, 4, 5), (5,)),
          ((7,), (7,))]  # fmt: skip


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def close(got, want, **tolerance):
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, **({"rtol": 1e-4, "atol": 1e-4} | tolerance))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_products_and_their_gradients(shapes):
    a, b = (normal(*s) for s in shapes)
    want = jnp.matmul(a, b)
    close(pj.matmul(a, b), want)
    close(jax.jit(pj.matmul)(a, b), want)
    for x, y in zip(*(jax.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1))(a, b) for f in (pj.matmul, jnp.matmul))):  # noqa: B023, B905
        close(x, y, atol=1e-3)


def test_second_derivatives():
    check_grads(pj.matmul, (normal(4, 5), normal(5, 3)), order=2, modes=["rev"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 0)], ids=str)
def test_products_are_mapped_over_batches(axes):
    a, b = normal(3, 3, 4, 5), normal(3, 5, 2)
    if axes[0] is None:
        a = a[0]
    if axes[1] is None:
        b = b[0]
    mapped = [jax.jit(jax.vmap(f, axes)) for f in (pj.matmul, jnp.matmul)]
    close(mapped[0](a, b), mapped[1](a, b))
    gradients = [jax.grad(lambda a, b, f=f: (f(a, b) ** 3).sum(), (0, 1))(a, b) for f in mapped]
    close(gradients[0][0], gradients[1][0], rtol=1e-3, atol=1e-3)
    close(gradients[0][1], gradients[1][1], rtol=1e-3, atol=1e-3)


def test_types_are_those_of_products():
    a, b = normal(6, 20), normal(20, 9)
    half, codes = jnp.bfloat16, jnp.asarray(RNG.integers(-9, 9, (6, 20)), jnp.int8)
    assert pj.matmul(a.astype(half), b.astype(half)).dtype == half
    assert pj.matmul(a.astype(half), b).dtype == jnp.float32
    exact = pj.matmul(codes, codes.T)
    assert exact.dtype == jnp.int32
    assert (exact == codes.astype(int) @ codes.T.astype(int)).all()
    of_half = jax.grad(lambda a: pj.matmul(a, b).sum())(a.astype(half))
    assert of_half.dtype == half
    with pytest.raises(TypeError):
        pj.matmul(a, b.astype(jnp.int32))
    with pytest.raises(ValueError, match="differ in k"):
        pj.matmul(a, a)


def test_empty_products():
    a, b = normal(6, 20), normal(20, 9)
    assert pj.matmul(a[:0], b).shape == (0, 9)
    assert (pj.matmul(a[:, :0], b[:0]) == 0).all()


def test_products_that_no_plan_serves_are_multiplied_by_python(monkeypatch):
    monkeypatch.setattr(handler, "_planned", lambda *_: None)
    a, b = normal(5, 23), normal(23, 7)
    close(jax.jit(pj.matmul)(a, b), a @ b)
    close(jax.grad(lambda a: pj.matmul(a, b).sum())(a), jax.grad(lambda a: (a @ b).sum())(a))


def test_products_without_a_compiler_are_callbacks(monkeypatch):
    monkeypatch.setattr(handler, "registered", lambda: False)
    a, b = normal(3, 5, 21), normal(21, 7)
    close(jax.jit(pj.matmul)(a, b), a @ b)
    close(jax.vmap(pj.matmul, (0, None))(a, b), a @ b)
    close(jax.grad(lambda a: pj.matmul(a, b).sum())(a), jax.grad(lambda a: (a @ b).sum())(a))


@pytest.mark.parametrize("kind", ["array", "packed", "int4", "quantized"])
def test_layers(kind):
    x, w, bias = normal(3, 4, 32), normal(32, 16), normal(16)
    q = pm.quantize(np.asarray(w), group=16)
    weight = {"array": w, "packed": pm.pack(np.asarray(w)), "int4": pm.pack(q), "quantized": q}[kind]
    dense = w if kind in ("array", "packed") else jnp.asarray(pm.dequantize(q))
    layer = jax.jit(lambda x: pj.linear(x, weight, bias))
    close(layer(x), x @ dense + bias)
    close(jax.vmap(layer)(x), x @ dense + bias)
    gradients = [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (layer, lambda x: x @ dense + bias)]
    close(*gradients, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    q, k, v = normal(2, 4, 10, 8), normal(2, 2, 12, 8), normal(2, 2, 12, 6)
    attend = jax.jit(lambda *x: pj.attention(*x, causal=causal))
    want = _by_matrices(q, k, v, causal=causal, scale=None)
    close(attend(q, k, v), want)
    close(jax.vmap(attend)(q, k, v), want)
    close(jax.vmap(lambda q: attend(q, k[0], v[0]))(q), jnp.concatenate([want[:1], attend(q[1:], k[:1], v[:1])]))
    check_grads(attend, (q, k, v), order=1, modes=["rev"], rtol=2e-2, atol=2e-2)


MISFITS = [((4, 10, 8), (3, 12, 8), (3, 12, 6)), ((4, 10, 8), (2, 12, 7), (2, 12, 6)), ((10, 8), (12, 8), (12, 6)),
           ((2, 2, 10, 8), (1, 2, 12, 8), (1, 2, 12, 6))]  # fmt: skip


@pytest.mark.parametrize("shapes", MISFITS, ids=str)
def test_attention_of_shapes_that_do_not_fit_is_refused_before_it_runs(shapes):
    with pytest.raises(ValueError, match=r"q (has|\()"):
        jax.eval_shape(pj.attention, *(normal(*x) for x in shapes))


def test_layers_of_shapes_or_types_that_do_not_fit_are_refused_before_they_run():
    w = pm.pack(np.ones((32, 16), np.float32))
    for x in (normal(4, 31), jnp.float32(2)):
        with pytest.raises(ValueError, match=r"multiply|scalar"):
            jax.eval_shape(lambda x: pj.linear(x, w), x)
    with pytest.raises(TypeError, match="must be equal"):
        jax.eval_shape(pj.attention, normal(2, 4, 8), normal(2, 4, 8, dtype=jnp.bfloat16), normal(2, 4, 8))


def test_the_page_on_jax_runs():
    page = (ROOT / "docs" / "jax.md").read_text()
    exec(compile(page.split("```python\n")[1].split("```")[0], "jax.md", "exec"), {})  # noqa: S102 - our own


def test_the_package_without_jax():
    code = "import sys; sys.modules['jax'] = None; import portmm.jax as pj; pj.matmul"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'portmm[jax]'" in done.stderr
