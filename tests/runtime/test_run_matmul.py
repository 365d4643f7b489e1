"""The fast path: which products it takes, the memo, packed weights; extension and twin alike."""

import pickle

import numpy as np
import pytest
import run_kernels as rk

pytestmark = pytest.mark.calls

rt = rk.rt


LAYOUTS = {
    "row": np.ascontiguousarray,
    "col": np.asfortranarray,
    "row-padded": lambda x: np.pad(x, ((0, 1), (0, 3)))[: x.shape[0], : x.shape[1]],
    "col-padded": lambda x: np.pad(x.T, ((0, 1), (0, 3)))[: x.shape[1], : x.shape[0]].T,
}


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("la", LAYOUTS)
@pytest.mark.parametrize("lb", LAYOUTS)
def test_matmul_fast_layouts(rt, dtype, la, lb):
    asked = rk.use_gemm(rt)
    for m, n, k in [(4, 4, 4), (3, 5, 7), (1, 6, 5), (6, 1, 5), (5, 6, 1), (1, 1, 1), (70, 60, 50)]:
        a, b = LAYOUTS[la](rk.random((m, k), dtype)), LAYOUTS[lb](rk.random((k, n), dtype, 1))
        rk.close(rt.matmul(a, b), a, b)
        for place in LAYOUTS.values():
            c = place(np.zeros((m, n), a.dtype))
            assert rt.matmul(a, b, c) is c
            rk.close(c, a, b)
            assert rt.matmul(a, b, out=c) is c
    assert all(q[0] == dtype and set(q[4:7]) <= {"row", "col"} and q[7] == "" for q in asked)


def test_layout_of_vectors_ignores_meaningless_strides(rt):
    asked = rk.use_gemm(rt)
    wide, tall = rk.random((5, 6)), rk.random((6, 5))
    for a, b in [(wide[2:3, :4], tall[:4, 1:2]), (wide[:, :1], tall[3:4, :]), (wide.T[:1, :4], tall.T[:4, :3])]:
        rk.close(rt.matmul(a, b), a, b)
    assert [q[4:6] for q in asked] == [("row", "row"), ("row", "row"), ("col", "col")]


def test_the_memo_asks_once(rt):
    asked = rk.use_gemm(rt)
    a, b = rk.random((4, 6)), rk.random((6, 5))
    for _ in range(3):
        rt.matmul(a, b)
    assert asked == [("f32", 4, 5, 6, "row", "row", "row", "")]
    assert rt.memo_size() == 1
    rt.matmul(a.astype(np.float64), b.astype(np.float64))
    rt.matmul(np.asfortranarray(a), b)
    rt.matmul(a, b, np.zeros((4, 5), np.float32, order="F"))
    assert len(asked) == rt.memo_size() == 4
    rt.clear_memo()
    rt.matmul(a, b)
    assert len(asked) == 5
    rt.set_num_threads(rt.get_num_threads())
    assert rt.memo_size() == 1
    rt.set_num_threads(rt.get_num_threads() + 1)
    assert rt.memo_size() == 0


def test_the_memo_grows(rt):
    asked = rk.use_gemm(rt)
    for _ in range(2):
        for n in range(1, 300):
            assert rt.matmul(np.ones((1, 2), np.float32), np.ones((2, n), np.float32)).shape == (1, n)
    assert len(asked) == rt.memo_size() == 299


def test_a_resolver_that_wants_density(rt):
    asked = []

    def resolver(*question):
        asked.append(question[4:])
        return rk.gemm_route(rt)

    rt.set_resolver(resolver, density=True)
    wide, square = rk.random((4, 9)), rk.random((4, 4))
    for _ in range(2):
        for a in (square, wide[:, :4], np.asfortranarray(square), wide.T[:4]):
            rk.close(rt.matmul(a, square), a, square)
        rt.matmul(square, square, wide[:, 5:])
    assert asked == [
        ("row", "row", "row", "", True),
        ("row", "row", "row", "", False),
        ("col", "row", "row", "", True),
        ("col", "row", "row", "", False),
    ]


def cases_for_the_slow_path():
    a, b = rk.random((6, 6)), rk.random((6, 6), seed=1)
    misaligned = np.frombuffer(bytearray(6 * 6 * 4 + 1), np.uint8)[1:].view(np.float32).reshape(6, 6)
    read_only = np.zeros((6, 6), np.float32)
    read_only.flags.writeable = False
    big = np.zeros((12, 12), np.float32)
    return {
        "not contiguous": (big[::2, ::2], b, None),
        "negative": (a[:, ::-1], b, None),
        "negative rows": (a[::-1], b, None),
        "broadcast": (np.broadcast_to(a[0], (6, 6)), b, None),
        "overlapping rows": (np.lib.stride_tricks.as_strided(a, (4, 6), (4, 4)), b, None),
        "int": (a.astype(np.int32), b.astype(np.int32), None),
        "mixed": (a, b.astype(np.float64), None),
        "big-endian": (a.astype(">f4"), b, None),
        "subclass": (a.view(np.matrix), b, None),
        "list": (a.tolist(), b, None),
        "1-D": (a[0], b, None),
        "3-D": (a[None], b[None], None),
        "3-D by columns": (np.stack([a, a]).transpose(0, 2, 1), b, None),
        "a stack with gaps": (np.stack([a, a, a])[:, :5], b, None),
        "nine dimensions": (a[(None,) * 7], b, None),
        "out of another stack": (np.stack([a, a]), b, np.zeros((12, 6), np.float32)),
        "misaligned": (misaligned, b, None),
        "shapes": (a[:, :5], b, None),
        "empty m": (a[:0], b, None),
        "empty k": (a[:, :0], b[:0], None),
        "out overlaps a": (a, b, a),
        "out overlaps part of b": (a, big[:6, :6], big[5:11, :6]),
        "out read-only": (a, b, read_only),
        "out dtype": (a, b, np.zeros((6, 6))),
        "out shape": (a, b, np.zeros((5, 6), np.float32)),
        "out not contiguous": (a, b, big[::2, ::2]),
        "out is no array": (a, b, (big,)),
    }


@pytest.mark.parametrize("name", list(cases_for_the_slow_path()))
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_all_else_goes_the_slow_way(rt, name):
    rk.use_gemm(rt)
    a, b, out = cases_for_the_slow_path()[name]
    got = rt.matmul(a, b, out)
    assert got[0] == "slow"
    assert got[1] is a
    assert got[2] is b
    assert got[3] is out
    if out is None and name != "shapes":
        assert rt.matmul(b, a)[0] == "slow"


def stacks():
    """Arrays that are taller matrices, and what may take their products with a matrix of six columns."""
    x, wide = rk.random((4, 3, 6)), rk.random((4, 3, 10))
    return {
        "dense": (x, np.zeros((4, 3, 6), np.float32)),
        "wide rows": (wide[..., :6], wide[..., 4:].copy()),
        "of stacks": (x.reshape(2, 2, 3, 6), np.zeros((2, 2, 3, 10), np.float32)[..., 2:8]),
        "of rows": (x.reshape(12, 1, 6), np.zeros((12, 1, 6), np.float32)),
        "extents of one": (x[:1, None, :, :], np.zeros((1, 1, 3, 6), np.float32)),
        "a step of nothing": (np.lib.stride_tricks.as_strided(x, (1, 12, 6), (-8, 24, 4)), x.copy().reshape(1, 12, 6)),
    }


@pytest.mark.parametrize("name", list(stacks()))
@pytest.mark.parametrize("packed", [False, True])
def test_a_stack_by_one_matrix_is_a_taller_matrix(rt, name, packed):
    shapes = rk.use_gemm(rt)
    (a, out), b = stacks()[name], rk.random((6, 6), seed=1)
    right = rt.Packed(np.ascontiguousarray(b.T).ravel(), 6, 6, "f32", "plain", 1, 6, 0) if packed else b
    rk.close(rt.matmul(a, right), a, b)
    assert rt.matmul(a, right).shape == (*a.shape[:-1], 6)
    assert rt.matmul(a, right, out) is out
    rk.close(out, a, b)
    flat = np.ascontiguousarray(a).reshape(-1, 6)
    rk.close(rt.matmul(flat, right), flat, b)
    assert len(shapes) == 1  # the matrix itself has the same route


def test_a_stack_keeps_off_what_it_reads(rt):
    """An `out` that overlaps an operand, or is read-only, or has other extents, is not written by a kernel."""
    rk.use_gemm(rt)
    a, b = rk.random((2, 3, 6)), rk.random((6, 6), seed=1)
    fixed = np.zeros((2, 3, 6), np.float32)
    fixed.flags.writeable = False
    for out in (a, a[::-1], fixed, np.zeros((3, 2, 6), np.float32), np.zeros((1, 2, 3, 6), np.float32)):
        assert rt.matmul(a, b, out)[0] == "slow"


def test_an_override_goes_the_slow_way(rt):
    rk.use_gemm(rt)
    a = rk.random((3, 3))
    rt.set_override(True)
    assert rt.matmul(a, a)[0] == "slow"
    rt.set_override(False)
    rk.close(rt.matmul(a, a), a, a)


def test_the_resolver_may_decline_fail_or_lie(rt):
    a = rk.random((3, 3))
    rt.set_resolver(lambda *_: None)
    assert rt.matmul(a, a)[0] == "slow"
    assert rt.memo_size() == 1  # that there is no plan either
    rt.set_resolver(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rt.matmul(a, a)
    rt.set_resolver(lambda *_: "route")
    with pytest.raises(TypeError, match="Route"):
        rt.matmul(a, a)
    rt.set_resolver(lambda *_: rk.gemm_route(rt, "f64"))
    with pytest.raises(TypeError, match="f32"):
        rt.matmul(a, a)

    def reentrant(*_):
        rt.clear_memo()
        return rk.gemm_route(rt)

    rt.set_resolver(reentrant)
    rk.close(rt.matmul(a, a), a, a)
    assert rt.memo_size() == 0
    for wrong in (rt.set_resolver, rt.set_slow):
        with pytest.raises(TypeError, match="callable"):
            wrong(3)


def test_a_slow_path_that_raises(rt):
    rt.set_slow(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rt.matmul([1], [2])


def test_arguments_of_matmul(rt):
    rk.use_gemm(rt)
    a, b = rk.random((2, 3)), rk.random((3, 2))
    rk.close(rt.matmul(b=b, a=a), a, b)
    rk.close(rt.matmul(a, b=b, out=None), a, b)
    for args, names in [((a,), {}), ((), {}), ((a, b, None, 1), {}), ((a, b), {"outt": 1}), ((a, b), {"a": a})]:
        with pytest.raises(TypeError):
            rt.matmul(*args, **names)


def test_unpickled_arrays_take_the_fast_path(rt):
    rk.use_gemm(rt)
    a = rk.random((3, 4))
    rk.close(rt.matmul(pickle.loads(pickle.dumps(a)), a.T), a, a.T)  # noqa: S301


def test_no_memory_in_matmul(rt):
    rt.set_resolver(lambda *_: rk.gemm_route(rt, work=1 << 62))
    a = rk.random((3, 3))
    with pytest.raises(MemoryError, match="workspace"):
        rt.matmul(a, a)


# --- packed weights


def test_matmul_with_a_packed_weight(rt):
    asked = rk.use_gemm(rt)
    a, b = rk.random((4, 6)), rk.random((6, 5), seed=1)

    class Weight(rt.Packed):
        __slots__ = ()

    for make in (rt.Packed, Weight):
        p = make(np.ascontiguousarray(b.T).ravel(), 6, 5, "f32", "pl" + "ain"[:], 1, 6, 0)
        rk.close(rt.matmul(a, p), a, b)
        c = np.empty((4, 5), np.float32)
        assert rt.matmul(a, p, out=c) is c
        rk.close(c, a, b)
        assert rt.matmul(a[:, :5], p)[0] == "slow"
        assert rt.matmul(a.astype(np.float64), p)[0] == "slow"
        assert rt.matmul(a, p, p.owner[:20].reshape(4, 5))[0] == "slow"
        assert (p.k, p.n, p.element, p.family, p.b_k, p.b_n, p.b_batch) == (6, 5, "f32", "plain", 1, 6, 0)
    assert asked == [("f32", 4, 5, 6, "row", "packed", "row", "plain")]
    rk.close(rt.matmul(a, rk.pack(rt, b, "other")), a, b)
    assert asked[-1][-1] == "other"


def test_packed_refuses_nonsense(rt):
    x = np.ones(12, np.float32)
    for owner, k, dtype in [
        (x.reshape(3, 4), 3, "f32"),
        (x, 3, "f64"),
        (x, 3, "f16"),
        (x[::2], 3, "f32"),
        (x, -1, "f32"),
    ]:
        with pytest.raises(ValueError, match=r"packed data|unknown"):
            rt.Packed(owner, k, 4, dtype, "plain", 1, 3, 0)
    with pytest.raises(TypeError):
        rt.Packed([1.0], 1, 1, "f32", "plain", 1, 1, 0)
