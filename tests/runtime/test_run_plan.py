"""Plans, and that nothing leaks; extension and twin alike."""

import ctypes
import gc
import sys
import tracemalloc

import numpy as np
import pytest
import run_kernels as rk

from portmm.errors import BuildError

pytestmark = pytest.mark.calls

rt = rk.rt


def test_a_plan_runs(rt):
    a, b = rk.random((4, 6)), rk.random((6, 5), seed=1)
    c = np.zeros((4, 5), np.float32)
    plan = rk.plan_for(rt, a, b, c)
    rk.close(plan(a, b), a, b)
    assert plan(a, b, c) is c
    rk.close(c, a, b)
    rk.close(plan(b=b, a=a, out=None), a, b)
    assert plan.packed is None
    assert plan.detail is None
    assert plan.route.dtype == "f32"
    with pytest.raises(TypeError):
        plan(a)
    with pytest.raises(TypeError):
        plan(a, b, c, c)


def test_a_plan_runs_without_python(rt):
    a, b = rk.random((4, 6)), rk.random((6, 5), seed=1)
    c = np.full((4, 5), np.nan, np.float32)
    weight = rk.pack(rt, b)
    numbers = (4, 5, 6, 1, 6, 1, 0, weight.b_k, weight.b_n, 0, 5, 1, 0)
    bound = rt.make_plan(rk.gemm_route(rt), (a.shape, a.strides), weight, (c.shape, c.strides), numbers)
    for plan, data in ((rk.plan_for(rt, a, b, c), b.ctypes.data), (bound, None)):
        function, first = plan.pointer
        assert plan.pointer == (function, first)
        c[:] = np.nan
        run = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(function)
        assert run(first, a.ctypes.data, data, c.ctypes.data) == 0
        rk.close(c, a, b)


def test_a_plan_names_what_differs(rt):
    a, b = rk.random((4, 6)), rk.random((6, 5), seed=1)
    c = np.zeros((4, 5), np.float32)
    plan = rk.plan_for(rt, a, b, c)
    frozen = c.copy()
    frozen.flags.writeable = False
    misaligned = np.frombuffer(bytearray(4 * 6 * 4 + 1), np.uint8)[1:].view(np.float32).reshape(4, 6)
    for args, error, words in [
        ((a[:3], b), ValueError, r"a has shape \(3, 6\).*\(4, 6\)"),
        ((a[0], b), ValueError, r"a has shape \(6,\)"),
        ((a, b[:, :4]), ValueError, "b has shape"),
        ((a, np.asfortranarray(b)), ValueError, r"b has strides \(4, 24\).*\(20, 4\)"),
        ((a.astype(np.float64), b), TypeError, "a has dtype float64.*float32"),
        ((a.astype(">f4"), b), TypeError, "a has dtype >f4"),
        ((a.tolist(), b), TypeError, "a is list"),
        ((a, b, c.tolist()), TypeError, "out is list"),
        ((a, b, c[:3]), ValueError, "out has shape"),
        ((a, b, frozen), ValueError, "read-only"),
        ((misaligned, b), ValueError, "aligned"),
    ]:
        with pytest.raises(error, match=words):
            plan(*args)
    big = np.zeros(100, np.float32)
    with pytest.raises(ValueError, match="out overlaps a"):
        plan(big[:24].reshape(4, 6), b, big[20:40].reshape(4, 5))
    with pytest.raises(ValueError, match="out overlaps b"):
        plan(a, big[:30].reshape(6, 5), big[29:49].reshape(4, 5))
    plan(big[:24].reshape(4, 6), big[24:54].reshape(6, 5), big[54:74].reshape(4, 5))


def test_a_plan_with_batches_and_offsets(rt):
    a, b = rk.random((3, 4, 6)), rk.random((3, 6, 5), seed=1)
    rk.close(rk.plan_for(rt, a, b, np.empty((3, 4, 5), np.float32))(a, b), a, b)
    # (2, 1, 4, 6) . (3, 6, 5): broadcasting that no single stride expresses
    a, b = rk.random((2, 1, 4, 6)), rk.random((3, 6, 5), seed=1)
    outer = np.array([(24 * i, 30 * j, 20 * (3 * i + j)) for i in range(2) for j in range(3)], np.int64)
    c = np.empty((2, 3, 4, 5), np.float32)
    numbers = rk.plan_numbers(a[0, 0], b[0], c[0, 0])
    plan = rt.make_plan(
        rk.gemm_route(rt), (a.shape, a.strides), (b.shape, b.strides), (c.shape, c.strides), numbers,
        outer=outer, detail={"why": "broadcast"},
    )  # fmt: skip
    del outer
    rk.close(plan(a, b), a, b)
    assert plan.detail == {"why": "broadcast"}


def test_a_plan_with_strange_strides(rt):
    a, b = rk.random((8, 12))[::-2, ::2], rk.random((5, 6), seed=1).T
    c = np.zeros((5, 4), np.float32).T
    plan = rk.plan_for(rt, a, b, c)
    plan(a, b, c)
    rk.close(c, a, b)
    with pytest.raises(ValueError, match="C-contiguous"):
        plan(a, b)
    row = rk.random((1, 6))
    plan = rk.plan_for(rt, row, b, np.zeros((1, 5), np.float32))
    other = rk.random((3, 12))[1:2, :6]  # another stride of a dimension of extent 1
    rk.close(plan(other, b), other, b)


def test_an_empty_plan(rt):
    a, b = np.ones((3, 0), np.float32), np.ones((0, 4), np.float32)
    assert (rk.plan_for(rt, a, b, np.ones((3, 4), np.float32))(a, b) == 0).all()
    a, b = np.ones((0, 3), np.float32), np.ones((3, 4), np.float32)
    assert rk.plan_for(rt, a, b, np.ones((0, 4), np.float32))(a, b).shape == (0, 4)


def test_a_plan_with_a_bound_weight(rt):
    a, b = rk.random((4, 6)), rk.random((6, 5), seed=1)
    c = np.zeros((4, 5), np.float32)
    weight = rk.pack(rt, b)
    numbers = (4, 5, 6, 1, 6, 1, 0, weight.b_k, weight.b_n, 0, 5, 1, 0)
    plan = rt.make_plan(rk.gemm_route(rt), (a.shape, a.strides), weight, (c.shape, c.strides), numbers)
    assert plan.packed is weight
    data = weight.owner
    del weight
    rk.close(plan(a), a, b)
    assert plan(a, c) is c
    assert plan(a, out=c) is c
    rk.close(c, a, b)
    with pytest.raises(TypeError):
        plan(a, b, c)
    with pytest.raises(ValueError, match="out overlaps b"):
        plan(a, data[:20].reshape(4, 5))


def test_make_plan_refuses_nonsense(rt):
    x = ((2, 2), (8, 4))
    numbers = (2, 2, 2, 1, 2, 1, 0, 2, 1, 0, 2, 1, 0)
    route = rk.gemm_route(rt)
    rt.make_plan(route, x, x, x, numbers)
    for args, words in [
        ((((2, 2), (8,)), x, x, numbers), "stride for each"),
        ((((2, -2), (8, 4)), x, x, numbers), "negative"),
        ((((1,) * 9, (4,) * 9), x, x, numbers), "at most 8"),
        ((x, x, x, numbers[:-1]), "13 integers"),
        ((x, x, x, numbers, b"123"), "triples"),
    ]:
        with pytest.raises(ValueError, match=words):
            rt.make_plan(route, *args)
    for args in [(3, x, x, numbers), (x, x, x, ("x",) * 13)]:
        with pytest.raises(TypeError):
            rt.make_plan(route, *args)


def test_plans_take_subclasses(rt, tmp_path):
    a = rk.random((4, 4))
    mapped = np.memmap(tmp_path / "a", np.float32, "w+", shape=(4, 4))
    mapped[:] = a
    rk.close(rk.plan_for(rt, a, a, a)(mapped, a), a, a)


# --- references


def grown_by(work, rounds):
    """Bytes that `rounds` more calls of `work` leave behind.

    The better of two tries: the interpreter's table of interned strings may grow at any time.
    """
    for _ in range(rounds):
        work()
    return min(grown_once(work, rounds) for _ in range(2))


def grown_once(work, rounds):
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(rounds):
            work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()


@pytest.mark.rest("takes long for what it finds")
def test_nothing_leaks(rt):
    a, b = rk.random((4, 6)), rk.random((6, 5), seed=1)
    c = np.zeros((4, 5), np.float32)
    shared, weight, plan = rk.gemm_route(rt), rk.pack(rt, b), rk.plan_for(rt, a, b, c)
    numbers = (4, 5, 6, 1, 6, 1, 0, 1, 6, 0, 5, 1, 0)
    rt.set_resolver(lambda *_: shared)
    wrong = [
        lambda: plan(a, a),
        lambda: plan(a, b, a),
        lambda: plan(a, [1]),
        lambda: plan(a, oot=b),
        lambda: rt.matmul(a),
        lambda: rt.matmul(a, b, oot=1),
        lambda: rt.make_plan(shared, 1, 2, 3, 4),
        lambda: rt.make_plan(shared, rk.form(a), weight, rk.form(c), (1,), detail=c),
        lambda: rt.make_plan(shared, rk.form(a), weight, rk.form(c), numbers, b"1", detail=c),
        lambda: rt.Packed(a, 1, 1, "f32", "x", 1, 1, 1),
        lambda: rt.load("/nowhere", "f"),
        lambda: rt.make_route(a, 1, 1, "f32"),
        lambda: rt.execute(shared, 1),
    ]

    def right():
        for out in (None, c):
            rt.matmul(a, b, out)
            rt.matmul(a, weight, out=out)
            plan(a, b, out)
        rt.matmul(a, a)
        rk.execute(rt, shared, (a, b, c), bytes(24))
        rt.make_plan(shared, rk.form(a), weight, rk.form(c), numbers, bytes(48), detail=c)(a)
        rk.pack(rt, b, f"family {len(numbers)}")
        rk.gemm_route(rt)
        rt.clear_memo()

    def wrongs():
        for call in wrong:
            with pytest.raises((TypeError, ValueError, BuildError)):
                call()

    objects = [a, b, c, plan, weight, weight.owner, shared, shared.kernel, numbers]
    right()
    wrongs()
    before = [sys.getrefcount(x) for x in objects]
    # The smallest object takes 16 bytes. The interpreter's own caches of
    # attribute names hold a few kilobytes of what the error paths make.
    assert grown_by(right, 300) < 300 * 16
    assert grown_by(wrongs, 600) < 600 * 32
    assert [sys.getrefcount(x) for x in objects] == before
