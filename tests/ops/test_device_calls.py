"""The public functions on arrays of devices: OpenCL's on a CPU, and CUDA's, emulated."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulated_cuda import install
from opencl_cpu import OpenCl

import portmm as pm
from portmm.arrays import interop, operand
from portmm.dispatch import device_routes
from portmm.dispatch.machine import bind, machine_of
from portmm.errors import ScheduleError, TraceError
from portmm.spec.problem import Problem
from portmm.util import memo

BF16 = np.dtype(ml_dtypes.bfloat16)


def values(shape, dtype, seed=0):
    rng = np.random.default_rng([seed, *shape])
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max + 1, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def product(a, b, acc=np.float64):
    acc = np.int32 if a.dtype.kind in "iu" and b.dtype.kind in "iu" else acc
    return np.matmul(a.astype(acc), b.astype(acc))


def close(found, wanted, k, dtype):
    found = found.get()
    assert found.shape == wanted.shape
    if np.dtype(dtype).kind in "iu":
        np.testing.assert_array_equal(found, wanted)
        return
    eps = {BF16: 2.0**-8, np.dtype(np.float16): 2.0**-11, np.dtype(np.float64): 2.0**-52}.get(found.dtype, 2.0**-24)
    bound = (k + 4) * (2.0**-52 if found.dtype == np.float64 else 2.0**-24) * 8 * np.sqrt(k + 1)
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2 * eps, atol=bound)


@pytest.mark.parametrize("coded", [False, True])
def test_a_type_beside_an_output_is_that_of_the_product(on, coded):
    """As in NumPy the result has the type that was asked for, and is then cast into `out`, or is refused."""
    a, b = values((3, 64), np.float32), values((64, 32), np.float32, 1)
    left = on.array(a)
    right = pm.pack(pm.quantize(b, group=32), like=left) if coded else on.array(b)
    out = on.array(np.zeros((3, 32), np.float32))
    assert pm.matmul(left, right, out, dtype="float16") is out
    rounded = pm.matmul(left, right, dtype="float16").get()
    np.testing.assert_array_equal(out.get(), rounded.astype(np.float32))
    assert not np.array_equal(out.get(), pm.matmul(left, right).get())
    narrow = on.array(np.zeros((3, 32), np.float16))
    np.testing.assert_array_equal(pm.matmul(left, right, narrow, dtype="float32").get(), rounded)
    whole = on.array(np.zeros((3, 32), np.int32))
    with pytest.raises(TypeError, match=r"cannot hold|elements of s32"):
        pm.matmul(left, right, whole, dtype="float16")
    with pytest.raises(ValueError, match="shape"):
        pm.matmul(left, right, on.array(np.zeros((4, 32), np.float32)), dtype="float16")


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BF16, np.int8], ids=str)
@pytest.mark.parametrize("size", [(5, 7, 9), (64, 48, 32), (1, 33, 70), (65, 1, 20)], ids=str)
def test_a_product_is_that_of_numpy(on, size, dtype):
    m, n, k = size
    a, b = values((m, k), dtype), values((k, n), dtype, 1)
    found = pm.matmul(on.array(a), on.array(b))
    assert found.dtype == (np.int32 if np.dtype(dtype) == np.int8 else dtype)
    close(found, product(a, b), k, dtype)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((7,), (7, 3)),
        ((4, 7), (7,)),
        ((7,), (7,)),
        ((2, 4, 7), (7, 3)),
        ((2, 4, 7), (2, 7, 3)),
        ((3, 1, 4, 7), (2, 7, 3)),
    ],
    ids=str,
)
def test_shapes_are_those_of_numpy(on, left, right):
    a, b = values(left, np.float32), values(right, np.float32, 1)
    close(pm.matmul(on.array(a), on.array(b)), product(a, b), 7, np.float32)


@pytest.mark.parametrize(
    ("left", "right"), [((0, 5), (5, 3)), ((3, 0), (0, 4)), ((2, 0, 5), (5, 3)), ((0,), (0,))], ids=str
)
def test_nothing_to_multiply_is_zeros(on, left, right):
    a, b = np.zeros(left, np.float32), np.zeros(right, np.float32)
    found = pm.matmul(on.array(a), on.array(b)).get()
    np.testing.assert_array_equal(found, np.matmul(a, b))


def test_operands_are_read_where_they_lie(on):
    a, b = values((12, 20), np.float32), values((9, 20), np.float32, 1)
    left, right = on.array(a), on.array(b)
    close(pm.matmul(left, right.T), product(a, b.T), 20, np.float32)
    close(pm.matmul(left[1:, 3:], right[:, 3:].T), product(a[1:, 3:], b[:, 3:].T), 17, np.float32)
    close(pm.matmul(left[::2, 1::3], right[:7].T[:7]), product(a[::2, 1::3], b[:7].T[:7]), 7, np.float32)


def test_a_result_goes_where_it_should(on):
    a, b = values((12, 12), np.float32), values((12, 12), np.float32, 1)
    left, right, out = on.array(a), on.array(b), on.array(np.full((12, 12), 7, np.float32))
    assert pm.matmul(left, right, out) is out
    close(out, product(a, b), 12, np.float32)
    pm.matmul(left, right, left)  # an operand too
    close(left, product(a, b), 12, np.float32)
    wide = on.array(np.full((12, 20), 7, np.float32))
    product_of = values((12, 12), np.float32, 2)
    pm.matmul(on.array(product_of), right, wide[:, 3:15])
    found = wide.get()
    np.testing.assert_allclose(found[:, 3:15], product(product_of, b), rtol=1e-4, atol=1e-4)
    assert (found[:, [0, 1, 2, 15, 19]] == 7).all()


def test_a_result_lies_over_what_it_is_made_from(on):
    """Whatever the strides of both: it is computed beside, and copied."""
    for dtype in (np.float32, np.float64, BF16):
        around, a, b = (values(s, dtype, i) for i, s in enumerate([(20, 30), (12, 8), (8, 9)]))
        around[3:15, 2:10] = a
        cases = [(None, product(a, b))]
        if dtype != np.float64:
            cases += [(lambda acc: acc * 2, product(a, b) * 2), (lambda acc: acc - pm.max(acc) * 0, product(a, b))]
        for epilogue, wanted in cases:
            whole = on.array(around)
            out = whole[4:16, 5:14]
            assert pm.matmul(whole[3:15, 2:10], on.array(b), out, epilogue=epilogue) is out
            found = whole.get()
            np.testing.assert_allclose(found[4:16, 5:14].astype(np.float64), wanted, rtol=2e-2, atol=1e-2)
            found[4:16, 5:14] = around[4:16, 5:14]
            np.testing.assert_array_equal(found, around)


def test_a_result_over_an_array_that_is_captured(on):
    a, b, more = values((12, 8), np.float32), values((8, 9), np.float32, 1), values((12, 15), np.float32, 2)
    whole = on.array(more)
    view = whole[:, 3:12]
    pm.matmul(on.array(a), on.array(b), view, epilogue=lambda acc, i: acc + view[i.m, i.n])
    more[:, 3:12] += product(a, b).astype(np.float32)
    np.testing.assert_allclose(whole.get(), more, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.int32, np.int8], ids=str)
@pytest.mark.parametrize("columns", [9, 12])
def test_a_result_is_cast_and_then_converted(on, dtype, columns):
    """To the type of its out, as NumPy converts it, whether a kernel does all or goes over rows of the product."""
    a, b, whole = values((6, 8), np.float32), values((8, 9), np.float32, 1), np.zeros((6, columns), dtype)
    sums = product(a, b)
    for epilogue in (lambda acc: pm.cast(acc * 2, np.int8), lambda acc: pm.cast(acc * 2 + pm.max(acc) * 0, np.int8)):
        there = on.array(whole)
        pm.matmul(on.array(a), on.array(b), there[:, :9], epilogue=epilogue)
        np.testing.assert_array_equal(there.get()[:, :9], np.rint(sums * 2).astype(dtype))
        assert (there.get()[:, 9:] == 0).all()
    if np.dtype(dtype).kind == "i":
        for epilogue in (lambda acc: pm.cast(acc, np.float16), lambda acc: pm.cast(pm.softmax(acc), np.float16)):
            with pytest.raises(TypeError, match="cannot hold results of f16"):
                pm.matmul(on.array(a), on.array(b), on.array(whole)[:, :9], epilogue=epilogue)


def test_reduced_rows_and_columns_go_where_they_should(on):
    a, b = values((12, 8), np.float32), values((8, 9), np.float32, 1)
    sums = product(a, b)
    for axis in (-1, -2):
        whole = on.array(np.full((12, 20), 7, np.float32))
        pm.matmul(
            on.array(a), on.array(b), whole[:, 3:12], epilogue=lambda acc, axis=axis: acc - pm.max(acc, axis=axis)
        )
        found = whole.get()
        np.testing.assert_allclose(found[:, 3:12], sums - sums.max(axis, keepdims=True), rtol=1e-5, atol=1e-5)
        assert (found[:, [0, 1, 2, 12, 19]] == 7).all()
        with pytest.raises(ValueError, match="out has shape"):
            pm.matmul(on.array(a), on.array(b), whole, epilogue=lambda acc, axis=axis: acc - pm.max(acc, axis=axis))


def test_a_type_can_be_asked_for(on):
    a, b = values((6, 8), np.float16), values((8, 5), np.float16, 1)
    found = pm.matmul(on.array(a), on.array(b), dtype=np.float32)
    assert found.dtype == np.float32
    close(found, product(a, b), 8, np.float32)
    with pytest.raises(TypeError, match="become s32"):
        pm.matmul(on.array(values((6, 8), np.int8)), on.array(values((8, 5), np.int8)), dtype=np.float32)


def test_an_epilogue_is_part_of_the_kernel(on):
    a, b, bias, more = (values(s, np.float32, i) for i, s in enumerate([(17, 20), (20, 33), (33,), (17, 33)]))
    left, right, there, rest = map(on.array, (a, b, bias, more))
    for scale in (1.5, -2.0):  # a number of the call: nothing is compiled for another
        found = pm.matmul(left, right, epilogue=lambda acc, i, s=scale: pm.relu(acc * s + there[i.n]) + rest)
        close(found, np.maximum(product(a, b) * scale + bias, 0) + more, 40, np.float32)
    first, row = pm.matmul(left, right, epilogue=lambda acc, i: (acc + there, pm.cast(acc + i.m, np.int32)))
    close(first, product(a, b) + bias, 20, np.float32)
    assert row.dtype == np.int32


def test_words_take_arrays_that_are_captured(on):
    a, b, c = values((5, 8), np.float32), values((8, 6), np.float32, 1), values((6,), np.float32, 2)
    there, sums = on.array(c), product(a, b)
    for epilogue, wanted in (
        (lambda acc: acc + pm.clip(there, -1, 1), sums + np.clip(c, -1, 1)),
        (lambda acc: pm.where(acc > 0, there, acc), np.where(sums > 0, c, sums)),
        (lambda acc: pm.maximum(there, acc), np.maximum(c, sums)),
        (lambda acc: acc * pm.exp(there), sums * np.exp(c)),
        (lambda acc: pm.minimum(np.maximum(acc, there), 1), np.minimum(np.maximum(sums, c), 1)),
    ):
        close(pm.matmul(on.array(a), on.array(b), epilogue=epilogue), wanted, 20, np.float32)


def test_sums_of_integers_are_scaled(on):
    a, b, by_row, by_column = (
        values((9, 64), np.int8),
        values((64, 12), np.int8, 1),
        *(values(s, np.float32, 2) for s in ((9,), (12,))),
    )
    rows, columns = on.array(by_row), on.array(by_column)
    found = pm.matmul(on.array(a), on.array(b), epilogue=lambda acc, i: acc * rows[i.m] * columns[i.n])
    wanted = product(a, b).astype(np.float32) * by_row[:, None] * by_column
    np.testing.assert_allclose(found.get(), wanted, rtol=1e-6)


def test_a_plan_refuses_an_out_over_an_operand(on):
    whole, b = on.array(values((12, 20), np.float32)), on.array(values((8, 8), np.float32, 1))
    a, out = whole[:, :8], whole[:, 4:12]
    for at, args in (("a", (a, b, out)), ("b", (on.array(values((8, 8), np.float32)), b, b))):
        plan = pm.plan(*args)
        with pytest.raises(ValueError, match=f"out overlaps {at}"):
            plan(*args)


def test_a_plan_takes_arrays_of_its_kind(on):
    a, b = values((10, 16), np.float32), values((16, 8), np.float32, 1)
    left, right = on.array(a), on.array(b)
    plan = pm.plan(left, right)
    close(plan(left, right), product(a, b), 16, np.float32)
    out = on.array(np.zeros((10, 8), np.float32))
    assert plan(left, right, out) is out
    close(out, product(a, b), 16, np.float32)
    with pytest.raises(ValueError, match="the plan takes f32 of shape"):
        plan(left, on.array(b[:, :4]))
    with pytest.raises(TypeError, match="host's memory"):
        plan(a, b)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_a_packed_weight_is_a_copy(on, by_columns, dtype):
    a, b = values((6, 20), dtype), values((12, 20) if by_columns else (20, 12), dtype, 1)
    there = on.array(b)
    packed = pm.pack(there.T if by_columns else there)
    assert packed.shape == (20, 12)
    assert packed.nbytes == 20 * 12 * np.dtype(dtype).itemsize
    if hasattr(there, "host"):  # PyOpenCL's assignment compiles, and warns
        there[...] = on.array(np.zeros_like(b))
    close(pm.matmul(on.array(a), packed), product(a, b.T if by_columns else b), 20, dtype)
    if dtype == np.float64:
        return
    found = pm.matmul(on.array(a), packed, epilogue=pm.relu)
    close(found, np.maximum(product(a, b.T if by_columns else b), 0), 20, np.float32)


def test_a_weight_of_four_bits_goes_to_the_device(on):
    a, w = values((5, 64), np.float32), values((64, 24), np.float32, 1)
    there, coded = on.array(a), pm.quantize(w, group=32)
    close(pm.matmul(there, pm.pack(coded, like=there)), product(a, pm.dequantize(coded)), 64, np.float32)
    with pytest.raises(TypeError, match="host's memory"):
        pm.pack(coded, like=a)
    with pytest.raises(TypeError, match="copy an array there"):
        pm.pack(w, like=there)


def test_what_does_not_fit_is_said(on):
    a, b = on.array(values((4, 5), np.float32)), on.array(values((6, 3), np.float32))
    with pytest.raises(ValueError, match="a has 5 columns, b has 6 rows"):
        pm.matmul(a, b)
    with pytest.raises(TypeError, match="copy it there first"):
        pm.matmul(values((4, 6), np.float32), b)
    with pytest.raises(TypeError, match="complex64"):
        pm.matmul(a, on.array(np.zeros((5, 3), np.complex64)))
    with pytest.raises(ValueError, match="out has shape"):
        pm.matmul(a, on.array(values((5, 3), np.float32)), on.array(np.zeros((4, 4), np.float32)))
    bias = np.ones(3, np.float32)
    with pytest.raises(TypeError, match="host's memory"):
        pm.matmul(a, on.array(values((5, 3), np.float32)), epilogue=lambda acc, i: acc + bias[i.n])
    wide = on.array(np.ones(3))
    with pytest.raises(TypeError, match="captures an array of float64, which kernels cannot read"):
        pm.matmul(a, on.array(values((5, 3), np.float32)), epilogue=lambda acc, i: acc + wide[i.n])
    with pytest.raises((TraceError, ScheduleError)):
        pm.matmul(a, on.array(values((5, 3), np.float32)), epilogue=lambda acc: acc if acc > 0 else -acc)


def test_arrays_of_a_host_do_not_take_those_of_devices(on):
    there = on.array(np.ones(3, np.float32))
    with pytest.raises(TypeError, match="captures an array on a device"):
        pm.matmul(np.ones((2, 2), np.float32), np.ones((2, 3), np.float32), epilogue=lambda acc, i: acc + there[i.n])


def test_a_product_of_arrays_is_explained(on):
    a, b, bias = (
        on.array(values((8, 32), np.float32)),
        on.array(values((32, 16), np.float32)),
        on.array(np.ones(16, "f4")),
    )
    found = pm.explain(a, b)
    assert (found.problem.m, found.problem.n, found.problem.k) == (8, 16, 32)
    assert found.target.device.language == found.language
    assert "schedule" in found.summary()
    told = pm.explain(a, b, epilogue=lambda acc, i: acc + bias[i.n])
    assert told.problem.fused
    assert "part of the kernel" in told.summary()
    assert "separate kernel" in pm.explain(a, b, epilogue=pm.softmax).summary()


@pytest.mark.usefixtures("on")
def test_the_doctor_names_devices():
    from portmm.cli import doctor

    found = {check.name: check for check in doctor.run(("devices", doctor._devices))}
    assert set(found) == {"CUDA", "OpenCL"}
    assert any(check.state == "ok" for check in found.values())
    assert all(
        "pip install" in check.text or "install" in check.text for check in found.values() if check.state != "ok"
    )


def test_long_sums_are_cut_in_slices(monkeypatch):
    """Where there are few blocks: the last of each tile adds, in the order of k."""
    memo.forget_all()
    on = install(monkeypatch)
    a, b = values((32, 4096), np.float32), values((4096, 32), np.float32, 1)
    for _ in range(2):
        found = pm.matmul(on.array(a), on.array(b))
        close(found, product(a, b), 4096, np.float32)
    assert len(on.launches) == 2
    assert all(grid[1] > 1 for _, grid, *_ in on.launches)
    memo.forget_all()


def test_kernels_run_on_the_stream_of_the_operands(monkeypatch):
    memo.forget_all()
    on = install(monkeypatch)
    on.streams[0] = 1234
    a, b = values((33, 40), np.float32), values((40, 50), np.float32, 1)
    pm.matmul(on.array(a), on.array(b))
    assert [stream for *_, stream in on.launches] == [1234]
    ((name, grid, block, _),) = on.launches
    assert name.startswith("portmm_")
    assert len(grid) == 2
    assert block[0] % 32 == 0
    memo.forget_all()


def test_a_plan_for_strides_is_for_them_alone(on):
    a, b = values((10, 16), np.float32), values((16, 8), np.float32, 1)
    left, right, wide = on.array(a), on.array(b), on.array(np.zeros((10, 16), np.float32))
    plan = pm.plan(left, right, wide[:, :8])
    with pytest.raises(ValueError, match="other strides than a new array's"):
        plan(left, right)
    plan(left, right, wide[:, :8])
    np.testing.assert_allclose(wide.get()[:, :8], product(a, b), rtol=1e-4, atol=1e-4)
    dense = pm.plan(left, right, on.array(np.zeros((10, 8), np.float32)))
    close(dense(left, right), product(a, b), 16, np.float32)


def test_an_epilogue_reads_a_strided_out(monkeypatch):
    """A result computed beside it has a new array's strides, not its own."""
    memo.forget_all()
    on = install(monkeypatch)
    a, b, c = values((17, 20), np.float32), values((20, 12), np.float32, 1), values((17, 40), np.float32, 2)
    left, right, whole = map(on.array, (a, b, c))
    out = whole[:, :12]
    for i in range(1, 3):
        assert pm.matmul(left, right, out, epilogue=lambda acc, i: acc + out[i.m, i.n]) is out
        close(out, c[:, :12] + i * product(a, b), 20, np.float32)
    np.testing.assert_array_equal(whole.get()[:, 12:], c[:, 12:])
    memo.forget_all()


def test_a_reduction_reads_a_row_of_its_out(monkeypatch):
    memo.forget_all()
    on = install(monkeypatch)
    a, b, c = values((9, 20), np.float32), values((20, 16), np.float32, 1), values((9, 16), np.float32, 2)
    left, right, out = map(on.array, (a, b, c))
    bias = out[0]
    pm.matmul(left, right, out, epilogue=lambda acc, i: (acc + bias[i.n]) - pm.sum(acc))
    sums = product(a, b)
    np.testing.assert_allclose(out.get(), sums + c[0] - sums.sum(1, keepdims=True), rtol=1e-4, atol=1e-4)
    memo.forget_all()


def test_numbers_that_are_looked_at_beside_arrays(on):
    a, b, bias = values((9, 20), np.float32), values((20, 16), np.float32, 1), values((16,), np.float32, 2)
    left, right, there = map(on.array, (a, b, bias))
    for scale in (2.0, 0.5, 3.0):
        found = pm.matmul(left, right, epilogue=lambda acc, i, s=scale: acc * s + there[i.n] if s > 1 else acc)
        close(found, product(a, b) * scale + bias if scale > 1 else product(a, b), 20, np.float32)


def test_more_than_kernels_count_is_said(on):
    one = np.ones((1, 4), np.float32)
    kernel = machine_of(interop.adopt(on.array(one)))
    found = device_routes.route(Problem(64, 64, 64, "f32"), kernel, (1, 1, 1))
    with pytest.raises(ScheduleError, match="m is 2147483647: kernels count in 32 bits"):
        bind(*found.kernels[0], {"m": (1 << 31) - 1, "n": 1, "k": 1, "batch": 1})


def test_parts_of_one_buffer_overlap():
    import pyopencl as cl

    memo.forget_all()
    on = OpenCl()
    a, b = values((64, 64), np.float32), values((64, 64), np.float32, 1)
    left, right = on.array(a), on.array(b)
    part = left.base_data[0 : a.nbytes]
    out = on.module.Array(on.queue, a.shape, a.dtype, data=part)
    assert isinstance(part, cl.MemoryObjectHolder)
    assert operand.overlap(interop.adopt(out), (interop.adopt(left),))
    close(pm.matmul(left, right, out), product(a, b), 64, np.float32)
    memo.forget_all()


def test_a_queue_out_of_order_waits_for_what_comes_first():
    import pyopencl as cl

    memo.forget_all()
    on = OpenCl()
    on.queue = cl.CommandQueue(on.queue.context, properties=cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE)
    a, b = values((256, 256), np.float32), values((256, 256), np.float32, 1) / 16
    left, right = on.array(a), on.array(b)
    wanted = a
    for _ in range(8):
        left, wanted = pm.matmul(left, right), product(wanted, b)
    np.testing.assert_allclose(left.get(), wanted, rtol=1e-3, atol=1e-3)
    memo.forget_all()
