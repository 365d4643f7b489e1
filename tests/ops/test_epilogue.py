"""`matmul` with an epilogue and prologues, as a user writes them, against NumPy."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from arrays_of import INPUTS, LAYOUTS
from machines import HERE

import portmm as pm
from portmm.dispatch import cpu_kernels
from portmm.errors import TraceError
from portmm.ops.rowwise import over_rows
from portmm.spec import elementwise

pytestmark = pytest.mark.calls

QUICKLY = True

ml_dtypes = pytest.importorskip("ml_dtypes")
BF16 = np.dtype(ml_dtypes.bfloat16)
M, N, K = 13, 37, 29
rng = np.random.default_rng(7)


def floats(*shape):
    return rng.standard_normal(shape).astype(np.float32)


A, B, BIAS, RESIDUAL = floats(M, K), floats(K, N), floats(N), floats(M, N)
PRODUCT = A.astype(float) @ B
SLOPE = 0.5


def close(got, want, size=1.0):
    got = got.astype(np.float64)
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5 * size)


@pytest.fixture
def compiled(monkeypatch):
    """How many kernels were asked for."""
    names = []
    build = cpu_kernels.build_kernel
    monkeypatch.setattr(cpu_kernels, "build_kernel", lambda kernel: (names.append(kernel.name), build(kernel))[1])
    return names


# -- what a function sees ---------------------------------------------------------


def helper(x):
    return x + BIAS


def once_more(x):
    return helper(x) * 2.0


def test_arrays_are_found_wherever_they_are():
    bias = BIAS * 2

    def by_default(acc, i, w=bias, *, k=2.0):
        return acc * k + w[i.n]

    class Layer:
        scale = 3.0

        def __init__(self):
            self.bias, self.parts = bias, [bias, {"w": BIAS}, 0.5]

        def end(self, acc, i):
            return acc * self.scale + self.bias[i.n]

        def short(self, acc):
            return acc * self.parts[2] + self.parts[1]["w"]

        def __call__(self, acc):
            return acc - self.bias

    layer = Layer()
    for epilogue, want in (
        (lambda acc, i: acc + bias[i.n], PRODUCT + bias),
        (lambda acc: helper(acc) + once_more(acc), 3 * (PRODUCT + BIAS)),
        (by_default, PRODUCT * 2 + bias),
        (lambda acc: acc * layer.scale + layer.parts[0], PRODUCT * 3 + bias),
        (lambda acc: layer(acc) * 2.0, 2 * (PRODUCT - bias)),
        (layer.end, PRODUCT * 3 + bias),
        (layer.short, PRODUCT * 0.5 + BIAS),
        (layer, PRODUCT - bias),
        (functools.partial(lambda w, acc, i: acc + w[i.n], bias), PRODUCT + bias),
        (functools.partial(lambda acc, _, w: acc + w, w=bias), PRODUCT + bias),
        (functools.partial(lambda acc, s: acc * s, s=2.0), PRODUCT * 2),
        (functools.partial(lambda acc, s, *, w: acc * s + w, s=2.0, w=bias), PRODUCT * 2 + bias),
        (functools.partial(lambda s, acc=1.0: acc * s, 2.0), PRODUCT * 2),
        (lambda acc, i: acc + RESIDUAL[i.m, i.n] - RESIDUAL[-1, i.n], PRODUCT + RESIDUAL - RESIDUAL[-1]),
        (lambda acc: bias + acc - np.float32(2) * acc, bias - PRODUCT),
        (lambda acc: np.maximum(acc, bias) / np.exp(np.abs(acc)), np.maximum(PRODUCT, bias) / np.exp(abs(PRODUCT))),
        (lambda acc, i: acc + i.n - i.m * 2, PRODUCT + np.arange(N) - 2 * np.arange(M)[:, None]),
        (lambda *_: 2.5, np.full((M, N), 2.5)),
        (lambda *_: bias, np.broadcast_to(bias, (M, N))),
        (lambda acc: elementwise.where(acc > 0, acc, acc * SLOPE), np.where(PRODUCT > 0, PRODUCT, PRODUCT / 2)),
        (lambda acc: acc * float(bias.shape[0]), PRODUCT * N),
    ):  # fmt: skip
        for _ in range(2):
            close(pm.matmul(A, B, epilogue=epilogue), want)


def test_what_changes_is_seen_and_compiles_nothing(compiled):
    k, w, parts = 2.0, BIAS, [1.5, BIAS]

    class Layer:
        k, w = 0.5, BIAS

        def __call__(self, acc):
            return acc * self.k - self.w

    layer = Layer()
    functions = [
        lambda acc: acc * k + w, lambda acc: acc * parts[0] + parts[1], lambda acc: layer(acc) + 0.0,
        lambda acc: acc * layer.k - layer.w,
    ]  # fmt: skip
    for f in functions:
        pm.matmul(A, B, epilogue=f)
    before = len(compiled)
    for step in range(3):
        k, w, parts[0], parts[1] = k + 1.25, BIAS * step, step * 0.75, BIAS - step
        layer.k, layer.w = step + 0.125, BIAS * (step + 2)
        wanted = [PRODUCT * k + w, PRODUCT * parts[0] + parts[1], *[PRODUCT * layer.k - layer.w] * 2]
        for f, want in zip(functions, wanted, strict=True):
            close(pm.matmul(A, B, epilogue=f), want)
    assert len(compiled) == before


def test_numbers_that_python_looks_at_are_constants(compiled):
    k = 2.0

    def epilogue(acc):
        return acc * math.sqrt(k) if k > 1 else acc - k

    for k in (2.0, 0.5, 2.0, 3.0):
        close(pm.matmul(A, B, epilogue=epilogue), PRODUCT * math.sqrt(k) if k > 1 else PRODUCT - k)
    count = len(compiled)
    close(pm.matmul(A, B, epilogue=epilogue), PRODUCT * math.sqrt(k))
    assert len(compiled) == count


def test_values_that_are_looked_at_are_not_remembered():
    w = BIAS.copy()
    zero = np.array(2.0, np.float32)
    functions = [lambda acc: acc * w.sum(), lambda acc: acc * w[3] + w[:1] + w[2:3], lambda acc: acc * zero]
    for _ in range(2):
        wanted = PRODUCT * float(w.sum()), PRODUCT * w[3] + w[0] + w[2], PRODUCT * float(zero)
        for f, want in zip(functions, wanted, strict=True):
            close(pm.matmul(A, B, epilogue=f), want, 30)
        w[...] = w + 1
        zero[()] = 5


# -- how operands lie -------------------------------------------------------------

DTYPES = (
    np.float32,
    np.float64,
    np.float16,
    BF16,
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.int64,
    np.bool_,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
def test_operands_of_every_dtype_and_layout(dtype):
    """Those that kernels cannot read are copied, whichever way they lie."""

    def ends(x, y):
        def broadcast(acc):
            return elementwise.where(x, acc, 1.0) if x.dtype.kind == "b" else acc + x

        def turned(acc, i):
            return elementwise.where(y[i.n, i.m], acc, 1.0) if y.dtype.kind == "b" else acc + y[i.n, i.m] * 2.0

        return broadcast, turned

    for name, lay in INPUTS.items():
        if np.dtype(dtype).kind in "biu" and name in ("C padded", "F padded", "every third"):
            continue
        if np.dtype(dtype) in (BF16, np.dtype(np.bool_)) and name == "other byte order":
            continue
        x, y = (lay(rng.integers(0, 5, shape).astype(dtype)) for shape in ((M, N), (N, M)))
        broadcast, turned = ends(x, y)
        wide, back = x.astype(float), y.astype(float).T
        flags = x.dtype.kind == "b"
        close(pm.matmul(A, B, epilogue=broadcast), np.where(x, PRODUCT, 1) if flags else PRODUCT + wide)
        close(pm.matmul(A, B, epilogue=turned), np.where(y.T, PRODUCT, 1) if flags else PRODUCT + back * 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_product_itself_lies_in_any_way(name):
    a, b = LAYOUTS[name](A), LAYOUTS[name](B)
    residual = LAYOUTS[name](RESIDUAL)
    epilogue = lambda acc: acc * 2.0 + residual  # noqa: E731 - once for all
    for x, y in ((a, B), (A, b), (a, b)):
        close(pm.matmul(x, y, epilogue=epilogue), PRODUCT * 2 + RESIDUAL)


def test_the_same_strides_unaligned():
    """A kernel that reads operands where they lie is not for those that must be copied."""
    epilogue = lambda acc: acc + BIAS  # noqa: E731 - once for all
    a, b = np.asfortranarray(A), np.asfortranarray(B)
    loose = [np.empty(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape[::-1]).T for x in (a, b)]
    for to, x in zip(loose, (a, b), strict=True):
        to[...] = x
        assert to.strides == x.strides
        assert not to.flags.aligned
    for x, y in ((a, b), (loose[0], b), (a, loose[1]), loose):
        close(pm.matmul(x, y, epilogue=epilogue), PRODUCT + BIAS)


def test_no_operand_is_read_beyond_its_end():
    from runs import guarded

    for m, n, k in ((1, 1, 1), (3, 17, 5), (1, 65, 70), (16, 33, 300)):
        a, b = floats(m, k), floats(k, n)
        x, y, z = guarded(floats(n)), guarded(floats(m * n)).reshape(m, n), guarded(floats(m))
        for end in (True, False):
            q = guarded(np.arange(n, dtype=np.int8), end=end)
            r = guarded(np.arange(n).astype(np.float16), end=end)
            got = pm.matmul(a, b, epilogue=lambda acc, i: (acc + x + y + q, acc * z[i.m] - r))  # noqa: B023 - used at once
            product = a.astype(float) @ b
            close(got[0], product + x + y + q, 20)
            close(got[1], product * z[:, None] - r, 20)


@pytest.mark.parametrize(
    "bad",
    [
        lambda acc: acc + BIAS[:-1],
        lambda acc, i: acc + BIAS[:-1][i.n],
        lambda acc, i: acc + RESIDUAL[i.n, i.m],
        lambda acc: acc + RESIDUAL[:, :5],
        lambda acc, i: acc + RESIDUAL[M, i.n],
        lambda acc: acc + RESIDUAL.T,
        lambda acc: elementwise.softmax(acc + BIAS[1:]),
        lambda acc: acc + np.full(N, 2**40)[:],
        lambda acc: acc + LARGE,
    ],
)
def test_operands_that_do_not_fit(bad):
    with pytest.raises((ValueError, TraceError)):
        pm.matmul(A, B, epilogue=bad)


LARGE = np.full(N, 2**40)


def test_an_operand_that_shrinks():
    w = [floats(N)]
    holder = type("Holder", (), {"w": floats(N)})()
    for epilogue in (lambda acc, i: acc + w[0][i.n], lambda acc, i: acc + holder.w[i.n]):
        pm.matmul(A, B, epilogue=epilogue)
    w[0], holder.w = floats(N - 5), floats(N - 5)
    for epilogue in (lambda acc, i: acc + w[0][i.n], lambda acc, i: acc + holder.w[i.n]):
        with pytest.raises(ValueError, match="does not fit"):
            pm.matmul(A, B, epilogue=epilogue)


# -- results ----------------------------------------------------------------------


def test_several_results():
    def epilogue(acc, i):
        y = acc + BIAS
        return (
            y, pm.cast(y * 10.0, np.int8), pm.cast(acc, np.float16), RESIDUAL[i.m, 0] * 2.0,
            y > 0, pm.cast(acc * 1e3, np.int32), i.n * 2 + i.m,
        )  # fmt: skip

    y, codes, half, rows, mask, whole, places = pm.matmul(A, B, epilogue=epilogue)
    close(y, PRODUCT + BIAS)
    assert (abs(codes - np.clip(np.rint(10 * (PRODUCT + BIAS)), -128, 127)) <= 1).all()
    np.testing.assert_allclose(half.astype(float), PRODUCT, rtol=1e-3, atol=1e-4)
    close(rows, 2 * RESIDUAL[:, :1])
    assert mask.dtype == np.uint8
    assert ((mask == 1) == (PRODUCT + BIAS > 0))[abs(PRODUCT + BIAS) > 1e-4].all()
    assert (abs(whole - PRODUCT * 1e3) <= 1.01).all()
    np.testing.assert_array_equal(places, 2 * np.arange(N) + np.arange(M)[:, None])
    for epilogue in (lambda acc: (acc,), lambda acc: (elementwise.softmax(acc),)):
        assert isinstance(pm.matmul(A, B, epilogue=epilogue), tuple)


def test_casts_round_and_saturate():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 127.5, 128, 255.5, -128.5, 3e9, -3e9, np.inf, -np.inf, 2.0**31, -(2.0**31),
                  2.0**31 - 128, 4194303.5, -4194303.5, 1e7 + 1, 1e-42, 0.49999997], np.float32)[None]  # fmt: skip
    for name in HERE:
        for dtype in (np.int8, np.uint8, np.int32, np.float16, BF16):
            with pm.config(target=name), np.errstate(over="ignore"):
                (got,), _ = over_rows(lambda v: elementwise.cast(v, dtype), (x,), {"m": "m", "n": "n"})  # noqa: B023 - used at once
                np.testing.assert_array_equal(got, elementwise.cast(x, dtype), err_msg=f"{name} {dtype}")


@pytest.mark.parametrize("how", ["dense", "by columns", "float16", "float64", "int32", "unaligned", "strided"])
@pytest.mark.parametrize("epilogue", [lambda acc: acc * 8.0 + BIAS, lambda acc: (acc + BIAS) - elementwise.max(acc)])
def test_out(how, epilogue):
    raw = np.empty(M * N * 4 + 1, np.uint8)[1:]
    out = {
        "dense": lambda: np.empty((M, N), np.float32),
        "by columns": lambda: np.empty((N, M), np.float32).T,
        "float16": lambda: np.empty((M, N), np.float16),
        "float64": lambda: np.empty((M, N)),
        "int32": lambda: np.empty((M, N), np.int32),
        "unaligned": lambda: raw.view(np.float32).reshape(M, N),
        "strided": lambda: np.empty((M, 2 * N), np.float32)[:, ::2],
    }[how]()
    want = pm.matmul(A, B, epilogue=epilogue).astype(float)
    assert pm.matmul(A, B, out, epilogue=epilogue) is out
    off = {"int32": 0.51, "float16": 2.0**-11 * abs(want)}.get(how, 1e-5)
    assert (abs(out - want) <= off + 1e-5).all()


def test_out_over_operands():
    """Operands may overlap the output."""
    n = 24
    for ends, read in (
        (lambda o: lambda acc, i: acc + o[i.m, i.n], lambda o: o),
        (lambda o: lambda acc, i: acc + o[i.n, i.m], lambda o: o.T),
        (lambda o: lambda acc: acc + o, lambda o: o),
        (lambda o: lambda acc: acc + o.T, lambda o: o.T),
        (lambda o: lambda acc, i: acc + o[0, i.n], lambda o: o[0]),
        (lambda o: lambda acc: elementwise.relu(acc) + o[1:2], lambda o: o[1]),
        (lambda o: lambda acc: (acc + o, acc - o)[0], lambda o: o),
        (lambda o: lambda acc: acc + o[::-1], lambda o: o[::-1]),
    ):
        x, y, big = floats(n, n), floats(n, n), floats(n + 1, n)
        for o in (big[:n], big[1:]):
            want = x.astype(float) @ y
            want = (np.maximum(want, 0) if "relu" in ends(o).__code__.co_names else want) + read(o).astype(float)
            close(pm.matmul(x, y, o, epilogue=ends(o)), want, 5)
        want = x.astype(float) @ y + 1
        close(pm.matmul(x, y.copy(), x.copy(), epilogue=lambda acc: acc + 1.0), want, 5)
        z = y.copy()
        close(pm.matmul(x, z, z, epilogue=lambda acc: acc + 1.0), want, 5)
        close(pm.matmul(x, y, x, epilogue=lambda acc: acc + 1.0), want, 5)


# -- errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda acc: acc if acc > 0 else 0.0, "pm.where"),
        (lambda acc: sum(x for x in acc) + 1, "iterated"),
        (lambda acc: max(acc, 0.0) + 1, "pm.maximum"),
        (lambda acc: math.exp(acc) + 1, "math"),
        (lambda acc: np.floor(acc) + 1, "np.floor"),
        (lambda acc: np.add.reduce(acc) + 1, "np.add.reduce"),
        (lambda acc: acc + CUBE, "dimensions"),
        (lambda acc: acc**2.5, "\\*\\*"),
        (lambda acc, i: acc + i.k, "i.m"),
        (lambda acc, i: acc + BIAS[i.n + 1], "index"),
        (lambda acc, i: acc + BIAS[i.n, i.m], "1 dimensions"),
        (lambda acc: acc + "x", "str"),
        (lambda *_: None, "NoneType"),
        (lambda acc: elementwise.sum(acc, axis=0), "axis"),
        (lambda acc: acc + COMPLEX, "complex"),
        (lambda acc: acc << 1, "integers"),
        (lambda acc: elementwise.cast(acc, np.float64), "float64"),
    ],
)
def test_errors_name_the_line(bad, said):
    with pytest.raises(TraceError, match=said) as caught:
        pm.matmul(A, B, epilogue=bad)
    if said not in ("", "float64"):
        assert f"test_epilogue.py, line {bad.__code__.co_firstlineno}" in str(caught.value)


CUBE, COMPLEX = floats(2, 1, M, N), np.zeros(N, complex)


def test_float64_is_refused():
    with pytest.raises(TypeError, match="float32"):
        pm.matmul(A.astype(float), B.astype(float), epilogue=lambda acc: acc)


def test_a_function_of_the_vocabulary_is_an_epilogue():
    for name in ("relu", "softmax", "gelu", "sum", "max", "layer_norm", "leaky_relu", "tanh"):
        function = getattr(elementwise, name)
        close(pm.matmul(A, B, epilogue=lambda acc: function(acc) * 1.0), function(PRODUCT), 30)  # noqa: B023 - used at once
        close(pm.matmul(A, B, epilogue=function), function(PRODUCT), 30)
    close(pm.matmul(A, B, epilogue=lambda acc, bias=BIAS: acc + bias), PRODUCT + BIAS)


EXTENTS = {
    "shape": lambda r: lambda s, i: (s + r[i.m, i.n]) / r.shape[0],
    "len": lambda r: lambda s, i: (s + r[i.m, i.n]) / len(r),
    "size": lambda r: lambda s, i: (s + r[i.m, i.n]) / r.size * 8,
    "np.shape": lambda r: lambda s: (s + r) / np.shape(r)[0],
}


@pytest.mark.parametrize("name", EXTENTS)
def test_extents_of_captured_arrays_are_those_of_the_call(name):
    """Also within a class of M, whose calls share a kernel."""
    w = np.ones((16, 8), np.float32)
    for m in (100, 100, 98, 100, 102, 104):
        epilogue = EXTENTS[name](np.ones((m, 8), np.float32))
        for weight in (w, pm.pack(w)):
            found = pm.matmul(np.ones((m, 16), np.float32), weight, epilogue=epilogue)
            np.testing.assert_allclose(found, 17 / m, rtol=1e-6)


def test_numbers_that_a_partial_binds():
    a, b = np.ones((4, 16), np.float32), np.ones((16, 8), np.float32)
    for factor in (0.5, 0.25):
        bound = functools.partial(lambda s, acc, i: acc * s, factor)  # noqa: ARG005 - as epilogues are called
        named = functools.partial(lambda acc, i, s=1.0: acc * s, s=factor)  # noqa: ARG005
        for epilogue in (bound, named):
            assert (pm.matmul(a, b, epilogue=epilogue) == 16 * factor).all()
        assert (pm.matmul(a, b, prologue_a=bound) == 16 * factor).all()
