"""The fast path beyond two matrices: plans remembered by signature; extension and twin alike."""

import sys
import threading

import numpy as np
import pytest
import run_kernels as rk

rt = rk.rt


def laid(shape, way, dtype="f32", seed=0):
    """Random values, laid out in memory in some way."""
    x = rk.random(shape, dtype, seed)
    if way == "dense" or not shape:
        return x
    if way == "backwards":
        return np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    if way == "turned":
        return np.ascontiguousarray(x.T).T
    return np.repeat(x, 3, axis=-1)[..., ::3]


WAYS = ("dense", "backwards", "turned", "gaps")
SHAPES = [
    ((2, 3, 4), (2, 4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (5, 4, 2)),
    ((1, 3, 4), (3, 1, 4, 2)),
    ((1, 1, 1, 1, 1, 2, 3, 4), (4, 1)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((4,), (3, 4, 5)),
    ((2, 3, 4), (4,)),
    ((1,), (1,)),
]


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_all_that_numpy_multiplies(rt, dtype, left, right):
    rk.use_gemm(rt)
    asked = rk.use_plans(rt)
    for way in WAYS:
        a, b = laid(left, way, dtype), laid(right, WAYS[-WAYS.index(way)], dtype, 1)
        before = len(asked)
        for _ in range(2):
            got = rt.matmul(a, b)
            assert type(got) is type(np.matmul(a, b))
            rk.close(got, a, b)
        assert len(asked) - before <= 1
        for other in WAYS:
            c = laid(got.shape, other, dtype)
            for _ in range(2):
                c[...] = 7
                assert rt.matmul(a, b, c) is c
                rk.close(c, a, b)


def test_a_signature_is_asked_for_once(rt):
    asked = rk.use_plans(rt)
    a, b = rk.random((2, 3, 4)), rk.random((2, 4, 5))
    for _ in range(3):
        rt.matmul(a, b)
    assert asked == [((2, 3, 4), (2, 4, 5), None)]
    others = [
        (a.astype(np.float64), b.astype(np.float64)),
        (a[:, ::-1], b),
        (a, b[..., :4]),
        (a, b, np.empty((2, 3, 5), np.float32)),
        (a[:1], b[0]),
        (a[0, 0], b[0]),
    ]
    for n, args in enumerate(others, 2):
        for _ in range(2):
            rt.matmul(*args)
        assert len(asked) == rt.memo_size() == n
    # the stride of a dimension of extent 1 means nothing
    rt.matmul(rk.random((5, 3, 4))[2:3], b[0])
    rt.matmul(np.lib.stride_tricks.as_strided(a, (1, 3, 4), (-400, 16, 4)), b[0])
    assert len(asked) == len(others) + 1
    rt.clear_memo()
    assert rt.memo_size() == 0
    rt.matmul(a, b)
    rt.set_num_threads(rt.get_num_threads() + 1)
    assert rt.memo_size() == 0
    rt.set_resolver(lambda *_: None)
    rt.matmul(a, b)
    assert (len(asked), rt.memo_size()) == (len(others) + 3, 1)


def test_the_memo_of_plans_is_bounded(rt):
    plan = rk.plan_any(rt, *(np.ones((1, 1, 1), np.float32),) * 2)
    asked = []
    rt.set_planner(lambda a, *_: asked.append(a) or (plan if a.size == 1 else None))
    many = np.lib.stride_tricks.as_strided
    one, base = np.ones((1, 1, 1), np.float32), np.ones(4, np.float32)
    for step in range(1 << 12):
        rt.matmul(many(base, (1, 1, 2), (4, 4, 4 * step)), one)
    assert rt.memo_size() == 1 << 12
    rt.matmul(one, one)
    assert rt.memo_size() == 1


def strange():
    a, b = rk.random((2, 3, 4)), rk.random((2, 4, 5), seed=1)
    misaligned = np.frombuffer(bytearray(4 * 24 + 1), np.uint8)[1:].view(np.float32).reshape(2, 3, 4)
    read_only = np.zeros((2, 3, 5), np.float32)
    read_only.flags.writeable = False
    return {
        "list": (a.tolist(), b, None),
        "list b": (a, b.tolist(), None),
        "int": (a.astype(int), b, None),
        "big-endian": (a.astype(">f4"), b, None),
        "subclass": (a.view(np.ma.MaskedArray), b, None),
        "misaligned": (misaligned, b, None),
        "empty": (a[:0], b, None),
        "no k": (a[:, :, :0], b[:, :0], None),
        "scalar": (a[0, 0, 0], b, None),
        "nine dimensions": (a.reshape(1, 1, 1, 1, 1, 1, 2, 3, 4), b, None),
        "out read-only": (a, b, read_only),
        "out is a list": (a, b, [1]),
        "out empty": (a, b, np.zeros((0, 5), np.float32)),
    }


@pytest.mark.parametrize("name", list(strange()))
def test_the_planner_is_not_asked_for_strange_operands(rt, name):
    asked = rk.use_plans(rt)
    a, b, out = strange()[name]
    got = rt.matmul(a, b, out)
    assert got[0] == "slow"
    assert got[1] is a
    assert got[2] is b
    assert got[3] is out
    assert asked == []


def test_operands_of_different_types_have_plans_of_their_own(rt):
    """The planner decides how they run, once for each combination."""
    asked = []
    rt.set_planner(lambda *args: asked.append(args))
    a, b = rk.random((2, 3, 4)), rk.random((2, 4, 5))
    for args in [(a, b.astype(np.float64), None), (a, b, np.zeros((2, 3, 5))), (a.astype(np.int8), b, None)]:
        for _ in range(2):
            assert rt.matmul(*args)[0] == "slow"
    assert len(asked) == 3


def test_an_out_that_overlaps_goes_the_slow_way(rt):
    asked = rk.use_plans(rt)
    pool = rk.random((400,))
    a, b = pool[:24].reshape(2, 3, 4), pool[24:64].reshape(2, 4, 5)
    for _ in range(2):
        for start, planned in ((0, False), (23, False), (40, False), (63, False), (64, True), (300, True)):
            c = pool[start : start + 30].reshape(2, 3, 5)
            got = rt.matmul(a, b, c)
            assert (got is c) == planned
            if planned:
                rk.close(c, a, b)
    assert len(asked) == 1
    # backwards, an array lies below its pointer
    back = pool[64:94][::-1].reshape(2, 3, 5)[:, :, ::-1]
    assert rt.matmul(pool[90:94], pool[100:104]) != "slow"
    assert rt.matmul(pool[66:90].reshape(2, 3, 4), b, back)[0] == "slow"
    assert rt.matmul(pool[94:118].reshape(2, 3, 4), b, back) is back


def test_none_is_remembered(rt):
    asked = []
    rt.set_planner(lambda *args: asked.append(args))
    a = rk.random((2, 3, 3))
    for _ in range(3):
        assert rt.matmul(a, a)[0] == "slow"
    assert (len(asked), rt.memo_size()) == (1, 1)


def test_an_override_passes_the_planner_by(rt):
    asked = rk.use_plans(rt)
    a = rk.random((2, 3, 3))
    rt.matmul(a, a)
    rt.set_override(True)
    assert rt.matmul(a, a)[0] == "slow"
    assert len(asked) == 1


def test_a_planner_may_fail_or_lie(rt):
    a = rk.random((2, 3, 3))
    rt.set_planner(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            rt.matmul(a, a)
    good = rk.plan_any(rt, a, a)
    weight = rk.pack(rt, a[0])
    bound = rt.make_plan(rk.gemm_route(rt), rk.form(a[0]), weight, rk.form(a[0]), rk.plan_numbers(a[0], a[0], a[0]))
    for lie in ("plan", bound, rk.plan_any(rt, a.astype(np.float64), a.astype(np.float64))):
        rt.set_planner(lambda *_, lie=lie: lie)
        with pytest.raises(TypeError, match=r"the planner returned|this plan is for"):
            rt.matmul(a, a)
    rt.set_planner(lambda *_: good)
    for args in [(a[:1], a), (a, a[0]), (a, a, np.empty((2, 3, 3, 1), np.float32)[..., 0].swapaxes(1, 2))]:
        with pytest.raises(ValueError, match="this plan is for"):
            rt.matmul(*args)
    turned = rk.plan_any(rt, a, a, np.empty((2, 3, 3), np.float32).swapaxes(1, 2))
    rt.set_planner(lambda *_: turned)
    with pytest.raises((TypeError, ValueError), match=r"the planner|C-contiguous"):
        rt.matmul(a, a)
    assert rt.memo_size() == 0
    with pytest.raises(TypeError, match="callable"):
        rt.set_planner(3)

    def forgets(*args):
        rt.clear_memo()
        return rk.plan_any(rt, *args)

    rt.set_planner(forgets)
    rk.close(rt.matmul(a, a), a, a)
    assert rt.memo_size() == 0


def test_no_memory_in_a_plan(rt):
    a = rk.random((2, 3, 3))
    numbers = rk.plan_numbers(a, a, a)
    greedy = rt.make_plan(rk.gemm_route(rt, work=1 << 62), rk.form(a), rk.form(a), rk.form(a), numbers)
    rt.set_planner(lambda *_: greedy)
    for out in (None, np.empty_like(a)):
        with pytest.raises(MemoryError, match="workspace"):
            rt.matmul(a, a, out)


def test_packed_weights_share_a_plan_but_not_their_data(rt):
    asked = []

    def planner(a, b, out):
        asked.append(b)
        return rk.plan_any(rt, a, b, out)

    rt.set_planner(planner)
    a = rk.random((2, 3, 4))
    weights = [rk.random((4, 5), seed=i) for i in range(3)]
    for w in weights:
        rk.close(rt.matmul(a, rk.pack(rt, w)), a, w)
        rk.close(rt.matmul(a[0, 0], rk.pack(rt, w)), a[0, 0], w)
    assert len(asked) == 2
    p = rk.pack(rt, weights[0])
    assert rt.matmul(a[:1], p, p.owner[5:].reshape(1, 3, 5))[0] == "slow"
    rk.close(rt.matmul(a, rk.pack(rt, weights[0], "other")), a, weights[0])
    assert len(asked) == 4
    rt.set_planner(lambda *_: None)
    assert rt.matmul(a.astype(np.float64), p)[0] == "slow"


def test_a_batch_of_packed_weights_is_no_matrix(rt):
    rk.use_gemm(rt)
    asked = []
    rt.set_planner(lambda *args: asked.append(args))
    owner, a = rk.random((2 * 20,)), rk.random((3, 4))
    for shape in ((2, 4, 5), (1, 4, 5)):
        weight = rt.Packed(owner, 4, 5, "f32", "plain", 1, 4, 20, shape)
        assert weight.shape == shape
        assert rt.matmul(a, weight)[0] == "slow"
    assert len(asked) == 2
    assert rt.Packed(owner, 4, 5, "f32", "plain", 1, 4, 20).shape == (4, 5)
    assert rt.matmul(a, rt.Packed(owner, 4, 5, "f32", "plain", 1, 4, 20, (0, 4, 5)))[0] == "slow"
    for shape, error in ((("x", 4, 5), TypeError), ([4, 5], TypeError), ((5, 4), ValueError), ((), ValueError)):
        with pytest.raises(error):
            rt.Packed(owner, 4, 5, "f32", "plain", 1, 4, 20, shape)


def test_many_threads_share_plans(rt):
    rk.use_plans(rt)
    a, b = rk.random((2, 40, 50)), rk.random((2, 50, 60))
    want = np.matmul(a, b)
    wrong = []

    def work(seed):
        c = np.empty((2, 40, 60), np.float32)
        for i in range(40):
            got = rt.matmul(a, b), rt.matmul(a, b, c), rt.matmul(a, b[0]), rt.matmul(a[:, 0], b[0])
            if i % 5 == seed % 5:
                rt.clear_memo()
            if not all(np.allclose(x, w, atol=1e-4) for x, w in zip(got[:2], (want, want), strict=True)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


def test_nothing_is_kept_or_lost(rt):
    asked = rk.use_plans(rt)
    a, b = rk.random((2, 3, 4)), rk.random((2, 4, 5))
    c = np.empty((2, 3, 5), np.float32)
    weight = rk.pack(rt, b[0], "a family of its own")
    plan = rk.plan_any(rt, a, b)
    objects = [a, b, c, weight, weight.owner, weight.family, plan.route, plan.route.kernel]

    def calls():
        for _ in range(50):
            for out in (None, c):
                rt.matmul(a, b, out)
                rt.matmul(a, weight, out)
                rt.matmul(a, b[0, :, 0], None if out is None else c[:, :, 0])
            rt.matmul(a[0, 0], b[0, :, 0])
            assert rt.matmul(a, b, c[:, :, :5].view(np.float32))[0] is not None
            assert rt.matmul(a, a[..., :3, :].swapaxes(1, 2), a[..., :3])[0] == "slow"
            rt.clear_memo()
            asked.clear()

    calls()
    before = [sys.getrefcount(x) for x in objects]
    calls()
    assert [sys.getrefcount(x) for x in objects] == before
