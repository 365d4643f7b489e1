"""Fused and searched functions of integers and floats: types and elements as of NumPy, in arrays of their own."""

import linecache
import random
from itertools import count

import numpy as np
import pytest

import portmm as pm
from portmm.fusion import superoptimizer, turns

TIMES = count()
FUNCTIONS = {
    "an argument that is not read": ("a, b, c", "a @ b", ("f4 mk", "f4 kn", "f4 mn")),
    "a chain beside integers": ("a, b, c, i", "i + (i > 2), a @ (b @ c)", ("f4 mk", "f4 kd", "f4 dn", "i4 mn")),
    "int8 with scales": ("a, b, s", "(mm(a, b).astype(np.float32) * s).max(-1)", ("i1 mk", "i1 kn", "f4 n")),
    "uint8 by int8, quantised": (
        "a, b", "np.clip(np.rint(mm(a, b) * np.float32(0.25)), -128, 127).astype(np.int8)", ("u1 mk", "i1 kn")),
    "bounds that a type lacks": ("i", "np.clip(i, -20, 300), np.clip(i, 3, 1000)", ("u1 mn",)),
    "a wider scalar": ("i, j", "i * np.int32(3), j + np.int64(2), i + np.uint8(200)", ("i1 mn", "i4 mn")),
    "a scalar beside bools": ("i", "(i > 2) * np.int32(3), np.where(i > 2, np.int8(1), np.int8(5))", ("i4 mn",)),
    "a product of other types": ("a, b", "a @ b, a * np.int16(2)", ("i2 mk", "f4 kn")),
    "products of integers": ("a, b, c", "(a @ b) @ c, (a @ b).sum(0)", ("i4 mk", "i4 kn", "i4 nd")),
    "comparisons of a chain": ("a, b, c", "(a @ (b @ c) > 2) & (a @ (b @ c) <= 40)", ("f4 mk", "f4 kd", "f4 dn")),
    "integers and floats": ("a, b, i", "i + (a @ b), (a @ b).astype(np.int32) // 3 - i", ("f4 mk", "f4 kn", "i4 mn")),
}  # fmt: skip


def exact(a, b):
    """`portmm.matmul` of integers."""
    return np.matmul(a.astype(np.int64), b.astype(np.int64)).astype(np.int32)


def function_of(names, result, product):
    """A function of its text, which has lines for messages."""
    text = f"def function({names}):\n    return {result}\n"
    file = f"<{result} {product.__name__}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"np": np, "mm": product}
    exec(compile(text, file, "exec"), space)  # noqa: S102 - the texts above
    return space["function"]


def arrays_of(kinds, seed):
    """Whole numbers, whose sums are exact in float32."""
    rng, source = np.random.default_rng(seed), random.Random(seed)  # noqa: S311 - no secret
    extents = {x: source.choice([2, 3, 5, 16, 17, 33]) for x in "mnkd"}
    return [
        rng.integers(0 if kind == "u1" else -4, 5, [extents[x] for x in axes]).astype(kind)
        for kind, axes in map(str.split, kinds)
    ]


@pytest.fixture
def found(monkeypatch):
    """Searches take the last program that they measure, whatever its time."""
    monkeypatch.setenv("PORTMM_TUNED", "off")
    monkeypatch.setattr(turns, "timed", lambda run, arrays, *_: (run(arrays), 0.5 ** next(TIMES))[1])
    monkeypatch.setattr(turns, "in_turns", lambda _, run, arrays, *__: (run(arrays), turns.Times(1.0, 0.5, 0.5))[1])
    monkeypatch.setattr(turns, "drawn", lambda _, runs, *__: [turns.Times(1.0, 0.5, 0.5)] * len(runs))
    monkeypatch.setattr(superoptimizer, "MEASURED", 2)
    monkeypatch.setattr(superoptimizer, "KERNELS_MEASURED", 1)


def several(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("search", [False, 600])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_and_elements_are_those_of_numpy(name, search, found):
    del found
    names, result, kinds = FUNCTIONS[name]
    arrays = arrays_of(kinds, len(name))
    wanted = several(function_of(names, result, exact)(*arrays))
    fused = pm.fuse(function_of(names, result, pm.matmul), search=search)
    for _ in range(2):
        for x, want in zip(several(fused(*arrays)), wanted, strict=True):
            assert x.dtype == want.dtype
            np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("search", [False, 600])
@pytest.mark.parametrize(
    "result",
    ["a * True", "a * 1.0, a", "(a.T * 1.0).T", "a.copy()", "a.astype(np.float32)", "a + a, (a + a) * 1.0",
     "(a + 1).copy(), a + 1", "a.copy() @ a.T, a * 1.0"],
)  # fmt: skip
def test_results_share_memory_where_those_of_numpy_do(result, search, found):
    del found
    function, a = function_of("a", result, exact), np.ones((20, 33), np.float32)
    fused = pm.fuse(function, search=search)
    for _ in range(2):
        for x, want in zip(several(fused(a)), several(function(a)), strict=True):
            np.testing.assert_array_equal(x, want)
            assert np.shares_memory(x, a) == np.shares_memory(want, a)
        first, *rest = several(fused(a))
        assert not any(np.shares_memory(first, x) for x in rest)
