"""Calls on a device like earlier ones but for addresses: they launch without describing their arrays again."""

from __future__ import annotations

import cuda_fakes
import numpy as np
import pytest
from emulated_cuda import install

import portmm as pm
from portmm.arrays import device_kinds, interop
from portmm.ops import repeated_call
from portmm.util import memo

QUICKLY = True
M, N, K = 9, 16, 20


@pytest.fixture
def on(monkeypatch):
    memo.forget_all()
    yield install(monkeypatch)
    memo.forget_all()


def values(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def near(found, wanted):
    np.testing.assert_allclose(found.get(), wanted, rtol=1e-4, atol=1e-4)


def only_repeated(monkeypatch):
    """From now on no array may be described."""

    def refuse(*_):
        raise AssertionError("an array is described again")

    for name in interop._READERS:
        monkeypatch.setitem(interop._READERS, name, refuse)


def test_other_arrays_of_the_same_kinds(on, monkeypatch):
    """With and without an output, of products and plans."""
    pairs = [(values(M, K, seed=i), values(K, N, seed=i)) for i in range(3)]
    arrays = [tuple(map(on.array, x)) for x in pairs]
    outs = [on.array(np.zeros((M, N), np.float32)) for _ in range(2)]
    plan = pm.plan(*arrays[0], outs[0])
    for call in (pm.matmul, plan):
        near(call(*arrays[0]), pairs[0][0] @ pairs[0][1])
        assert call(*arrays[0], outs[0]) is outs[0]
    only_repeated(monkeypatch)
    on.streams[0] = 77
    for call in (pm.matmul, plan):
        on.launches.clear()
        for (a, b), there in zip(pairs, arrays, strict=True):
            near(call(*there), a @ b)
            assert call(*there, outs[1]) is outs[1]
            near(outs[1], a @ b)
        assert {stream for *_, stream in on.launches} == {77}


def test_an_output_that_overlaps_takes_the_long_way(on):
    square, b = values(K, K), values(K, K, seed=1)
    left, right = on.array(square), on.array(b)
    out = on.array(np.zeros_like(square))
    plan = pm.plan(left, right, out)
    for call in (pm.matmul, plan):
        near(call(left, right, out), square @ b)
    with pytest.raises(ValueError, match="out overlaps a in memory"):
        plan(left, right, left)
    with pytest.raises(ValueError, match="out overlaps b in memory"):
        plan(left, right, right)
    assert pm.matmul(left, right, left) is left
    near(left, square @ b)


def test_other_kinds_are_checked(on):
    a, b = values(M, K), values(K, N, seed=1)
    left, right, out = on.array(a), on.array(b), on.array(np.zeros((M, N), np.float32))
    plan = pm.plan(left, right, out)
    for _ in range(2):
        near(plan(left, right, out), a @ b)
        near(pm.matmul(left, right, out), a @ b)
    with pytest.raises(ValueError, match="the plan takes f32 of shape"):
        plan(on.array(values(M + 1, K)), right, out)
    with pytest.raises(ValueError, match="out has shape"):
        pm.matmul(left, right, on.array(np.zeros((N, M), np.float32)))
    with pytest.raises(TypeError, match="out is a ndarray in the host's memory"):
        pm.matmul(left, right, out.get())
    with pytest.raises(TypeError, match="in the host's memory"):
        plan(a, b, out)
    other = values(N, K, seed=2)
    near(pm.matmul(left, on.array(other).T, out), a @ other.T)


def test_settings_are_part_of_a_kind(on):
    a, b = values(M, K), values(K, N, seed=1)
    left, right = on.array(a), on.array(b)
    pm.matmul(left, right)
    near(repeated_call.product(left, right), a @ b)
    with pm.config(deterministic=True):
        assert repeated_call.product(left, right) is NotImplemented
        pm.matmul(left, right)
        near(repeated_call.product(left, right), a @ b)
    assert repeated_call.product(left, right) is NotImplemented


def test_epilogues(on, monkeypatch):
    """Captured arrays and numbers may change; other layouts, and functions, are others."""
    a, b = values(M, K), values(K, N, seed=1)
    left, right, out = on.array(a), on.array(b), on.array(np.zeros((M, N), np.float32))
    biases = [values(N, seed=i) for i in range(2)]

    def call(bias, scale, **more):
        return pm.matmul(left, right, epilogue=lambda acc, i: acc * scale + bias[i.n], **more)

    call(on.array(biases[0]), 2.0)
    call(on.array(biases[0]), 2.0, out=out)
    there = [on.array(x) for x in biases]
    column = on.array(values(N, 2, seed=5))[:, 0]
    with monkeypatch.context() as within:
        only_repeated(within)
        for x, y in zip(biases, there, strict=True):
            near(call(y, 0.5), 0.5 * (a @ b) + x)
            assert call(y, 3.0, out=out) is out
            near(out, 3.0 * (a @ b) + x)
    near(call(column, 1.0), a @ b + column.get())
    near(pm.matmul(left, right, epilogue=lambda acc, i: acc - there[0][i.n]), a @ b - biases[0])


def test_arrays_of_other_libraries_that_epilogues_capture(on):
    """They are described at each call."""

    class Foreign:
        def __init__(self, x):
            self.x, self.shape, self.dtype = x, x.shape, x.dtype

        @property
        def __cuda_array_interface__(self):
            where = (self.x.data.ptr, False)
            return {"shape": self.shape, "typestr": self.dtype.str, "data": where, "strides": None, "version": 3}

    a, b, bias = values(M, K), values(K, N, seed=1), values(N, seed=2)
    left, right, there = on.array(a), on.array(b), Foreign(on.array(bias))
    for _ in range(3):
        near(pm.matmul(left, right, epilogue=lambda acc, i: acc + there[i.n]), a @ b + bias)


def test_an_epilogue_that_reads_its_output(on):
    a, b, c = values(M, K), values(K, N, seed=1), values(M, N, seed=2)
    left, right, read, out = map(on.array, (a, b, c, c))
    for other in (read, read, out):
        pm.matmul(left, right, out, epilogue=lambda acc, i, other=other: acc + other[i.m, i.n])
    near(out, 2 * (a @ b) + c)


def test_several_results(on):
    a, b = values(M, K), values(K, N, seed=1)
    left, right = on.array(a), on.array(b)
    for _ in range(3):
        twice, less = pm.matmul(left, right, epilogue=lambda acc, i: (acc * 2.0, acc - 1.0))  # noqa: ARG005
        near(twice, 2 * (a @ b))
        near(less, a @ b - 1)


def test_few_columns_and_batches(on):
    """Kernels of the transposed product, and those that are repeated with offsets."""
    for a, b in (
        (values(300, K), values(K, 1, seed=1)), (values(3, M, K), values(3, K, N, seed=1)),
        (values(2, 3, M, K)[:, ::2], values(2, 1, K, N, seed=1)), (values(K), values(K, N)),
    ):  # fmt: skip
        left = on.array(a)
        for i in range(3):
            right = values(*b.shape, seed=i)
            near(pm.matmul(left, on.array(right)), a @ right)


def scores(bias):
    return lambda s, at: s + bias[at.h]


OPTIONS = {
    "numbers": ({"scale": 0.5, "causal": True, "return_lse": True}, {"scale": 1.5, "lengths": 4, "offset": -1}),
    "arrays": tuple(
        {"causal": True, "lengths": np.array(x, np.int32), "offset": np.array(y, np.int32)}
        for x, y in (([3, 5], [0, -2]), ([5, 1], [-1, 0]))
    ),
    "score": tuple({"score": values(2, seed=i)} for i in range(2)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention(on, monkeypatch, options):
    """Integers may change, and what a function captures; so may arrays of them for items: as the long way has it."""
    drawn = [[on.array(values(2, 2, 5, 16, seed=i + j)) for j in range(3)] for i in range(2)]
    out = on.array(np.zeros((2, 2, 5, 16), np.float32))

    def call(i, **more):
        there = {name: on.array(x) if isinstance(x, np.ndarray) else x for name, x in (options[0] | options[i]).items()}
        if "score" in there:
            there["score"] = scores(there["score"])
        results = pm.attention(*drawn[i], **there, **more)
        return [x.get() for x in (results if isinstance(results, tuple) else (results,))]

    wanted = call(1)
    for more in ({}, {"out": out}):
        call(0, **more)
        with monkeypatch.context() as within:
            only_repeated(within)
            for x, y in zip(call(1, **more), wanted, strict=True):
                np.testing.assert_array_equal(x, y)


def test_attention_that_is_refused(on):
    drawn = [values(2, 2, 5, 16, seed=j) for j in range(3)]
    q, k, v = map(on.array, drawn)
    pm.attention(q, k, v, lengths=5)
    pm.attention(q, k, v, out=on.array(np.zeros_like(drawn[0])))
    with pytest.raises(ValueError, match="lengths is 6"):
        pm.attention(q, k, v, lengths=6)
    with pytest.raises(ValueError, match="pass"):
        pm.attention(*(x[0, 0] for x in (q, k, v)))
    wanted = pm.attention(q, k, v).get()
    assert pm.attention(q, k, v, out=q) is q
    near(q, wanted)


def test_kinds_of_tensors(monkeypatch):
    torch = cuda_fakes.install(monkeypatch, cuda_fakes.FakeTorch())
    memo.forget_all()
    x = cuda_fakes.Tensor((3, 5), torch.float32, at=8200, device=1)
    assert device_kinds.kind(x) == ((torch.float32, (3, 5), (5, 1), ("cuda", 1), 8), 8200)
    for more in ({"neg": True}, {"layout": "sparse"}):
        assert device_kinds.kind(cuda_fakes.Tensor((3, 5), torch.float32, **more)) is None
    for recorded in (True, False):
        x.requires_grad, torch.is_grad_enabled = True, lambda on=recorded: on
        assert (device_kinds.kind(x) is None) == recorded
    assert device_kinds.kind(np.zeros(3)) is None
    assert device_kinds.stream_of(torch, 1) == 101
    torch._C = type("C", (), {"_cuda_getCurrentRawStream": staticmethod(lambda device: 200 + device)})
    assert device_kinds.stream_of(torch, 1) == 201
    memo.forget_all()
