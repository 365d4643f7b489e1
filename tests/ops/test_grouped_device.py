"""Products of rows in groups on devices: OpenCL's on a CPU, and CUDA's, emulated."""

from __future__ import annotations

import cuda_shim
import ml_dtypes
import numpy as np
import passed
import pytest
from grid_cases import MACHINE

import portmm as pm
from portmm.codegen.lower import lower_grid
from portmm.dispatch.machine import bind, source
from portmm.errors import ScheduleError
from portmm.schedule.candidates import candidates
from portmm.schedule.text import parse, spell
from portmm.spec.dtype import BY_NAME, types
from portmm.spec.problem import Problem
from portmm.target.target import load_target

BF16 = np.dtype(ml_dtypes.bfloat16)


def values(shape, dtype, seed=0):
    """Small whole numbers, whose sums are exact in every type."""
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(-4, 5, shape).astype(dtype)


def looped(a, b, ends):
    """Group after group; what no group has is zeros. Ends are taken as kernels take them."""
    c = np.zeros((a.shape[0], b.shape[2]))
    begin = 0
    for g, given in enumerate(ends):
        end = min(max(int(given), begin), a.shape[0])
        c[begin:end] = a[begin:end].astype(float) @ b[g].astype(float)
        begin = end
    return c


def groups_of(ends, groups):
    """The group of each row; the last one of rows that have none."""
    return lambda m: np.minimum(np.searchsorted(np.maximum.accumulate(ends), np.arange(m), side="right"), groups - 1)


CASES = (
    (70, 24, 40, (10, 10, 47, 70)), (70, 24, 40, (0, 33, 33, 60)), (5, 9, 7, (2, 3, 5)), (200, 33, 65, (1, 200)),
    (64, 48, 32, (64,)), (3, 8, 0, (1, 2)), (40, 16, 16, (0, 0, 0)), (130, 8, 24, tuple(range(5, 131, 5))),
)  # fmt: skip


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.int8], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_are_those_of_a_loop(on, case, dtype):
    m, n, k, ends = case
    a, b, ends = values((m, k), dtype), values((len(ends), k, n), dtype, 1), np.array(ends, np.int32)
    found = pm.grouped_matmul(on.array(a), on.array(b), on.array(ends), dtype=None if dtype == np.int8 else np.float32)
    np.testing.assert_array_equal(found.get(), looped(a, b, ends))


LAYOUTS = (
    lambda a, b: (a, b), lambda a, b: (a.T.copy().T, b), lambda a, b: (a, b.swapaxes(1, 2).copy().swapaxes(1, 2)),
    lambda a, b: (np.repeat(a, 3, 1)[:, ::3], b[:, :, ::-1].copy()[:, :, ::-1]),
)  # fmt: skip


def there(on, x):
    """An array on a device that lies as one here does."""
    base = x
    if x.strides != np.ascontiguousarray(x).strides:
        order = np.argsort([-abs(s) for s in x.strides], kind="stable")
        whole = np.ascontiguousarray(x.transpose(order))
        if x.strides[order[-1]] != x.itemsize:
            wide = np.repeat(whole, 2, -1)
            return on.array(wide)[(slice(None),) * (x.ndim - 1) + (slice(None, None, 2),)]
        base = on.array(whole)
        return base.transpose(tuple(int(i) for i in np.argsort(order)))
    return on.array(base)


@pytest.mark.thin(5)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_operands_are_read_where_they_lie(on, layout, dtype):
    ends = np.array([3, 3, 41, 66], np.int32)
    a, b = LAYOUTS[layout](values((70, 40), dtype), values((4, 40, 24), dtype, 1))
    found = pm.grouped_matmul(there(on, a), there(on, b), on.array(ends), dtype=np.float32)
    np.testing.assert_array_equal(found.get(), looped(a, b, ends))


def test_an_epilogue_knows_rows_columns_and_groups(on):
    m, n, k, ends = 70, 24, 40, np.array([10, 10, 47, 64], np.int32)
    a, b = values((m, k), np.float32), values((4, k, n), np.float32, 1)
    bias, scale, rest = values((4, n), np.float32, 2), values((m,), np.float32, 3), values((m, n), np.float32, 4)
    by_group, by_row, by_both = map(on.array, (bias, scale, rest))
    left, right, last = map(on.array, (a, b, ends))
    for factor in (2.0, 3.0):
        found, half = pm.grouped_matmul(
            left, right, last,
            epilogue=lambda acc, i, f=factor: (
                acc * f + by_group[i.b, i.n] * by_row[i.m], pm.cast(acc + by_both[i.m, i.n], np.float16),
            ),
        )  # fmt: skip
        sums, group = looped(a, b, ends), groups_of(ends, 4)(m)
        np.testing.assert_array_equal(found.get(), sums * factor + bias[group] * scale[:, None])
        np.testing.assert_array_equal(half.get(), (sums + rest).astype(np.float16))
    found = pm.grouped_matmul(left, right, last, epilogue=lambda acc, i: acc * 0 + i.m * 100 + i.b)
    np.testing.assert_array_equal(found.get(), np.broadcast_to((np.arange(m) * 100 + group)[:, None], (m, n)))


def test_integers_are_scaled_by_group(on):
    ends = np.array([9, 30], np.int32)
    a, b, scale = values((40, 32), np.int8), values((2, 32, 16), np.int8, 1), np.array([[0.5], [2]], np.float32)
    by_group = on.array(np.repeat(scale, 16, 1))
    found = pm.grouped_matmul(
        *map(on.array, (a, b, ends)), epilogue=lambda acc, i: pm.cast(acc * by_group[i.b, i.n], np.float16)
    )
    np.testing.assert_array_equal(found.get(), looped(a, b, ends) * scale[groups_of(ends, 2)(40)])


def test_a_result_goes_where_it_should(on):
    ends = np.array([5, 12], np.int32)
    a, b = values((14, 16), np.float32), values((2, 16, 16), np.float32, 1)
    left, right, last = map(on.array, (a, b, ends))
    whole = on.array(np.full((14, 20), 7, np.float32))
    out = whole[:, 2:18]
    assert pm.grouped_matmul(left, right, last, out) is out
    found = whole.get()
    np.testing.assert_array_equal(found[:, 2:18], looped(a, b, ends))
    assert (found[:, [0, 1, 18, 19]] == 7).all()
    halves = on.array(np.zeros((14, 16), np.float16))
    pm.grouped_matmul(left, right, last, halves, epilogue=lambda acc: pm.cast(acc, np.float32))
    np.testing.assert_array_equal(halves.get(), looped(a, b, ends))
    assert pm.grouped_matmul(left, right, last, left) is left  # over an operand
    np.testing.assert_array_equal(left.get(), looped(a, b, ends))


def test_a_result_lies_over_what_it_is_made_from(on):
    """Whatever its strides: it is computed beside, where it lies in another way."""
    ends = on.array(np.array([5, 12], np.int32))
    around, b = values((20, 30), np.float32), values((2, 16, 16), np.float32, 1)
    sums = looped(around[3:17, :16], b, (5, 12))
    for over, epilogue, wanted in (
        (False, None, sums), (False, lambda acc: acc * 2, sums * 2), (True, None, sums + around[3:17, 8:24]),
    ):  # fmt: skip
        whole = on.array(around)
        out = whole[3:17, 8:24]
        a = on.array(around[3:17, :16]) if over else whole[3:17, :16]
        then = (lambda acc, i, x=out: acc + x[i.m, i.n]) if over else epilogue
        assert pm.grouped_matmul(a, on.array(b), ends, out, epilogue=then) is out
        found = whole.get()
        np.testing.assert_array_equal(found[3:17, 8:24], wanted)
        found[3:17, 8:24] = around[3:17, 8:24]
        np.testing.assert_array_equal(found, around)


@pytest.mark.parametrize(
    "ends", [(40, 20, 50), (-5, 10, 2**31 - 1), (100, 5, 7), (-(2**31), -1, 0), (2**31 - 1, -(2**31), 30)], ids=str
)
def test_ends_that_are_none(on, ends):
    """They are taken for the nearest that ascend and are no more than there are rows."""
    a, b, ends = values((70, 40), np.float32), values((3, 40, 24), np.float32, 1), np.array(ends, np.int32)
    found = pm.grouped_matmul(on.array(a), on.array(b), on.array(ends))
    np.testing.assert_array_equal(found.get(), looped(a, b, ends))


def test_what_does_not_fit_is_said(on):
    a, b, ends = values((7, 8), np.float32), values((2, 8, 9), np.float32), np.array([3, 7], np.int32)
    left, right, last = map(on.array, (a, b, ends))
    for given, error, said in (
        ((left, right, ends), TypeError, "ends is a ndarray in the host's memory"),
        ((left, b, last), TypeError, "b is a ndarray"),
        ((left, right, on.array(ends.astype(np.float32))), TypeError, "ends has elements of f32"),
        ((left, right, on.array(ends.astype(np.int64))), TypeError, "int64"),
        ((left, right, on.array(np.array([1, 2, 3], np.int32))), ValueError, "ends has 3 elements"),
        ((left, right, on.array(np.array([[3, 7]], np.int32))), ValueError, "one dense row"),
        ((left, right, on.array(np.array([3, 0, 7, 0], np.int32))[::2]), ValueError, "one dense row"),
        ((right, left, last), ValueError, "groups take"),
        ((left, on.array(values((2, 9, 9), np.float32)), last), ValueError, "a has 8 columns, b has 9 rows"),
        ((left, right, last, on.array(np.zeros((7, 8), np.float32))), ValueError, "out has shape"),
    ):
        with pytest.raises(error, match=said):
            pm.grouped_matmul(*given)
    with pytest.raises(ScheduleError, match="whole rows"):
        pm.grouped_matmul(left, right, last, epilogue=pm.softmax)
    host = np.zeros(9, np.float32)
    with pytest.raises(TypeError, match="captures an array in the host's memory"):
        pm.grouped_matmul(left, right, last, epilogue=lambda acc, i: acc + host[i.n])


def test_nothing_to_multiply(on):
    ends = on.array(np.array([0, 0], np.int32))
    for m, n in ((0, 5), (5, 0)):
        a, b = np.zeros((m, 8), np.float32), np.zeros((2, 8, n), np.float32)
        found = pm.grouped_matmul(on.array(a), on.array(b), ends)
        assert found.shape == (m, n)


def test_it_is_explained(on):
    a, b = on.array(values((70, 40), np.float32)), on.array(values((4, 40, 24), np.float32))
    told = pm.explain(a, b, grouped=True)
    assert told.problem.grouped
    assert (told.problem.batch, told.problem.n, told.problem.k) == (4, 24, 40)
    assert "find_group(" in told.source
    assert "rows in groups" in told.summary()
    by_group = on.array(np.ones((4, 24), np.float32))
    assert pm.explain(a, b, grouped=True, epilogue=lambda acc, i: acc + by_group[i.b, i.n]).problem.fused


def test_it_is_explained_without_a_device():
    told = pm.explain((4096, 4096), (64, 4096, 14336), dtype="bf16", target="h100", grouped=True)
    assert told.schedule.program == "wgmma"
    assert told.problem.m == 64
    assert parse(spell(told.schedule)) == told.schedule
    assert pm.explain((64, 32), (4, 32, 48), grouped=True, target="haswell").problem.m == 16


def _map(x, array):
    """A tensor map of an array that may be moved."""
    size = BY_NAME[x.dtype].bytes
    return "map", cuda_shim.shim_map(size, array.ctypes.data, x.sizes, x.strides, x.box, x.swizzle, x.rounds), array


def sample(target, dtype, vectors):
    """A few schedules of every program."""
    p = Problem(16, 24, 40, dtype, 3, grouped=True)
    for program in ("simt", "direct", "mma", "wgmma"):
        found = [s for s in candidates(p, target, vectors) if s.program == program and s.mr * s.nr <= 32]
        yield from found[:: max(1, len(found) // 3)][:4]


@pytest.mark.thin(4)
@pytest.mark.parametrize(("name", "dtype"), [("h100", "bf16"), ("t4", "f16-f16-f32"), ("", "f32"), ("", "s8-s8-s32")])
def test_no_byte_but_those_of_a_call_is_touched(name, dtype):
    """In every order of threads, whatever `ends` holds: guard pages lie around all arrays."""
    target = load_target(name) if name else MACHINE
    kinds = [np.dtype(BF16 if x == "bf16" else BY_NAME[x].numpy) for x in types(dtype)]
    vectors = (*(min(8, 16 // x.itemsize) for x in kinds[:2]), 8 if dtype == "bf16" else 4)
    m, n, k = 37, 24, 40
    a, b = values((m, k), kinds[0]), values((3, k, n), kinds[1], 1)
    found = list(sample(target, dtype, vectors))
    assert name != "h100" or any(s.program == "wgmma" for s in found)
    for s in found:
        (kernel,) = lower_grid(s, target.isa(s.isa))
        text = source(kernel, "cuda")
        numbers = {
            "m": m, "n": n, "k": k, "batch": 3, "a_m": k, "a_batch": 0, "b_k": n, "b_batch": k * n, "c_m": n, "c_n": 1,
            "c_batch": 0,
        }  # fmt: skip
        for ends in ((20, 20, 31), (2**31 - 1, 0, 5), (-7, 30, 12)):
            c = np.full((m, n), 99, kinds[2])
            memory = {"a": a, "b": b, "ends": np.array(ends, np.int32), "c": c}
            launch = bind(kernel, None, numbers | {x: x for x in memory})
            what = (x for name in memory for x in (name, memory[name]))
            if passed.unchanged(text, cuda_shim.version(), passed.processor(), launch, *what):
                continue
            code = cuda_shim.compile(text, kernel.name)
            names = dict(launch.open)
            given = [
                memory[v] if kind == "pointer" else _map(v, memory[names[i]]) if kind == "map" else (kind, v)
                for i, (kind, v) in enumerate(launch.arguments)
            ]
            code.launch_in_orders((*launch.grid, 1), launch.threads, given, shared=launch.shared)
            np.testing.assert_array_equal(c, looped(a, b, ends).astype(c.dtype), err_msg=str(s))
