"""Memory that remembered calls take: no arrays, one copy for all kinds that share it, and a bound on everything."""

import gc
import weakref

import numpy as np
import pytest

import portmm as pm
from portmm.arrays import pages
from portmm.dispatch import config, cpu_kernels, schedule_choice
from portmm.fusion import fuse
from portmm.fusion import joins as joined_products
from portmm.ir.nodes import Kernel
from portmm.ops import linear_vectors
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime

QUICKLY = "fast"


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize("rows", [0, 5])  # NumPy computes an empty product, a kernel the other
def test_a_program_keeps_no_operands(rows):
    f = pm.fuse(lambda x, w, v: np.maximum(x @ w, 0) @ v)
    args = [ones(rows, 7), ones(7, 9), ones(9, 3)]
    refs = [weakref.ref(x) for x in args]
    f(*args)
    f(*args)
    args.clear()
    gc.collect()
    assert [x() for x in refs] == [None] * 3
    assert f(ones(rows, 7), ones(7, 9), ones(9, 3)).shape == (rows, 3)


def test_vectors_of_ones_share_memory():
    first, second = pages.ones(100), pages.ones(700)
    assert np.shares_memory(second, pages.ones(1024))
    assert (first == 1).all()
    assert (pages.ones(5000) == 1).all()
    assert not second.flags.writeable
    assert pages.ones(0).size == 0
    a, b = ones(50, 32, dtype=np.int8), ones(32, 40, dtype=np.int8)
    np.testing.assert_array_equal(pm.matmul(a, b, epilogue=lambda x, _: x * 2.0), np.full((50, 40), 64))
    assert linear_vectors._scales("x_scale", 1.0, 70)[0].base is pages.ones(7).base


def test_joined_weights_are_one_copy_for_all_shapes(monkeypatch):
    joins = []

    def join(weights):
        joins.append(weakref.ref(made := joined(weights)))
        return made

    joined = joined_products.join
    monkeypatch.setattr(joined_products, "join", join)

    def pair():
        a, b = pm.pack(ones(16, 32)), pm.pack(ones(16, 64))
        return pm.fuse(lambda x: (x @ a, x @ b))

    functions = [pair() for _ in range(20)]
    for rows in (3, 4):
        for f in functions:
            assert all((y == 16).all() for y in f(ones(rows, 16)))
    assert len(joins) == len(functions)
    del f
    functions.clear()
    gc.collect()
    assert not any(x() for x in joins)  # nothing but programs keeps them
    pair()(ones(3, 16))
    assert sum(refs[0]() is not None for refs in joined_products._joined.values()) <= 1


def test_programs_are_bounded_by_their_kernels(monkeypatch):
    monkeypatch.setattr(fuse, "MOST_KERNELS", 40)
    monkeypatch.setattr(fuse, "_kernels", 0)
    functions = [pm.fuse(lambda x, w, v: np.maximum(x @ w, 0) @ v) for _ in range(2)]
    for rows in range(1, 20):
        for f in functions:
            assert (f(ones(rows, 7), ones(7, 9), ones(9, 3)) == 63).all()
            assert sum(len(x.memo) for x in functions) * (2 + fuse.KIND) <= 40


@pytest.fixture
def few_kernels(monkeypatch):
    """Only three kernels are loaded at once, as far as anything remembers them."""
    cpu_kernels.forget()
    runtime().clear_memo()
    monkeypatch.setattr(cpu_kernels, "MOST_LOADED", 3)
    monkeypatch.setattr(route_cache, "MOST_KERNELS", 3)
    monkeypatch.setattr(route_cache, "_kernels", {})
    yield
    cpu_kernels.forget()
    runtime().clear_memo()


@pytest.mark.usefixtures("few_kernels")
def test_kernels_that_are_loaded_are_bounded():
    f = pm.fuse(lambda x, w: np.maximum(x @ w, 0))
    for n in (3, 5, 7, 9, 11):  # sizes are compiled into the kernels of such batches
        a, b = ones(20, 4, 6), ones(20, 6, n)
        assert (pm.matmul(a, b) == 6).all()
        assert (f(ones(n, 6), ones(6, 4)) == 6).all()
        assert len(cpu_kernels._loaded) <= 3
        assert len(route_cache._kernels) <= 3


def test_what_is_loaded_keeps_no_loops():
    assert (pm.matmul(ones(33, 6), ones(6, 4)) == 6).all()
    assert cpu_kernels.kernel_of.cache_info().maxsize <= 64
    target = config.target()
    schedule = schedule_choice.choose(pm.explain(ones(33, 6), ones(6, 4)).problem, target).schedule
    found, kernel = (
        cpu_kernels.code_of(schedule, target),
        cpu_kernels.kernel_of(schedule, cpu_kernels.isa_of(schedule, target)),
    )
    assert found.code.symbol == kernel.name
    assert kernel.entry.body
    assert not any(isinstance(x, Kernel) for x in gc.get_referents(found))
