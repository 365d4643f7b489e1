"""Packed weights: a bijection, of use to every M, thread count and process."""

from __future__ import annotations

import pickle

import machines
import numpy as np
import operands
import problems
import pytest
from arrays_of import INPUTS, LAYOUTS, close
from kernels_of import transposed
from machines import HERE
from operands import case, panels_of
from runs import guarded, interpret

import portmm as pm
from portmm.codegen.lower import lower_pack
from portmm.dispatch.schedule_choice import choose
from portmm.ops.prepack import unpack
from portmm.runtime.cpu import runtime
from portmm.spec.problem import Family, Problem, family
from portmm.target.target import load_isa, load_target

pytestmark = pytest.mark.calls

QUICKLY = True


def numbers(shape, dtype=np.float32):
    """Distinct values, so that a permutation shows."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=dtype).reshape(shape)


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("how", INPUTS)
def test_packing_is_a_bijection(target, dtype, how):
    with pm.config(target=target):
        for shape in [(1, 1), (7, 5), (33, 70), (16, 64), (40, 129), (2, 5, 6), (3, 2, 4, 9)]:
            b = INPUTS[how](numbers(shape, dtype))
            packed = pm.pack(b)
            assert packed.shape == shape
            np.testing.assert_array_equal(unpack(packed), b)
            want = panels_of(np.asarray(b, dtype).reshape(-1, *shape[-2:]), family(packed.family)).ravel()
            kept = ~np.isnan(want)
            np.testing.assert_array_equal(packed.owner[kept], want[kept])
            assert np.isfinite(packed.owner).all()
            assert packed.nbytes == packed.owner.nbytes == want.nbytes


@pytest.mark.parametrize("layout", ["row", "col", "any"])
@pytest.mark.parametrize("dtype", problems.NUMPY)
@pytest.mark.parametrize("name", machines.ISAS)
def test_the_packer_means_panels(name, dtype, layout):
    isa = load_isa(name)
    lanes = isa.atom(dtype).n
    for columns in (1, lanes, 2 * lanes - 1, 2 * lanes + 1):
        nr = 2 * lanes
        p = Problem(1, columns, lanes + 2, dtype, 2, b=layout)
        k = case(p, seed=columns)
        values = k.b[operands.lay(np.zeros((2, p.k, p.n), k.b.dtype), layout, 3).places()]
        want = panels_of(values, Family(dtype, nr, 1))
        c = np.full(want.size, np.nan, want.dtype)
        out = operands.Laid(c, 0, want[0].size, 0, 0, (2, 1, 1))
        fields = {**k.fields, "m": 1, "c_m": 0, "c_n": 0, "c_batch": want[0].size}
        kernel = lower_pack(isa, dtype, nr, layout)
        interpret(kernel, operands.Case(p, fields, k.a, 0, k.b, k.b_offset, out, want, k.bound), 2, shuffle=1, c=c)
        kept = ~np.isnan(want.ravel())
        np.testing.assert_array_equal(c[kept], want.ravel()[kept])
        assert not np.isnan(c).any()


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_shuffles_transpose(lanes):
    lines = np.arange(lanes * lanes, dtype=np.float64).reshape(lanes, lanes)
    np.testing.assert_array_equal(transposed(lines), lines.T)


@pytest.mark.thin(3)
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_packed_weights_multiply(target, dtype):
    rng = np.random.default_rng(0)
    with pm.config(target=target):
        for k, n in [(1, 1), (33, 70), (64, 64), (40, 129)]:
            b = rng.standard_normal((k, n)).astype(dtype)
            packed = pm.pack(b)
            for i, m in enumerate((1, 2, 5, 16, 17, 33)):
                a = rng.standard_normal((m, k)).astype(dtype)
                how = list(INPUTS)[(i * 3 + k) % len(INPUTS)]
                close(pm.matmul(INPUTS[how](a), packed), INPUTS[how](a), b, (m, n, k, how))
                place = list(LAYOUTS)[(i + k) % len(LAYOUTS)]
                out = LAYOUTS[place](np.full((m, n), np.nan, dtype))
                assert pm.matmul(a, packed, out) is out
                close(out, a, b, place)
            close(pm.matmul(a[0], packed), a[0], b)


def test_panels_before_a_guard_page():
    """Kernels read no panel past its end."""
    rng = np.random.default_rng(1)
    for shape in [(5, 3), (64, 100), (17, 33)]:
        b = rng.standard_normal(shape).astype(np.float32)
        packed = pm.pack(b)
        nr = family(packed.family).nr
        item = packed.owner.size
        other = type(packed)(guarded(packed.owner), *shape, "f32", packed.family, nr, shape[0] * nr, item, shape)
        for m in (1, 3, 16, 40):
            a = rng.standard_normal((m, shape[0])).astype(np.float32)
            close(pm.matmul(a, other), a, b)


def test_batches_of_weights():
    rng = np.random.default_rng(2)
    b = rng.standard_normal((3, 8, 20)).astype(np.float32)
    packed = pm.pack(b)
    for shape in [(3, 5, 8), (1, 5, 8), (2, 3, 5, 8), (5, 8), (8,)]:
        a = rng.standard_normal(shape).astype(np.float32)
        close(pm.matmul(a, packed), a, b, shape)
    one = pm.pack(b[0])
    a = rng.standard_normal((4, 6, 8)).astype(np.float32)
    close(pm.matmul(a, one), a, b[0])


@pytest.mark.parametrize("batch", [(1,), (1, 3), (2, 1), (1, 1)])
def test_a_batch_of_one_weight_is_of_all_items(batch):
    rng = np.random.default_rng(3)
    b = rng.standard_normal((*batch, 8, 20)).astype(np.float32)
    a = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    close(pm.matmul(a, pm.pack(b)), a, b, batch)


def test_a_weight_survives_pickling():
    b = numbers((9, 40)) / 100
    packed = pickle.loads(pickle.dumps(pm.pack(b)))  # noqa: S301 - our own
    a = numbers((3, 9)) / 10
    close(pm.matmul(a, packed), a, b)
    np.testing.assert_array_equal(np.asarray(packed), b)


def test_a_weight_is_the_same_whatever_the_threads():
    b = numbers((50, 300))
    one = pm.pack(b)
    with pm.config(threads=3):
        np.testing.assert_array_equal(pm.pack(b).owner, one.owner)


def test_a_weight_of_another_machine_is_still_right():
    b = numbers((20, 50), np.float32) / 100
    a = numbers((4, 20), np.float32) / 100
    for made in HERE:
        with pm.config(target=made):
            packed = pm.pack(b)
        for used in HERE:
            with pm.config(target=used):
                close(pm.matmul(a, packed), a, b, (made, used))


def test_a_weight_of_another_type_is_converted():
    b = numbers((6, 7), np.float32)
    a = numbers((2, 6), np.float64)
    got = pm.matmul(a, pm.pack(b))
    assert got.dtype == np.float64
    close(got, a, b)


def test_empty_weights():
    for shape in [(0, 5), (5, 0), (0, 0), (0, 3, 4)]:
        packed = pm.pack(np.zeros(shape, np.float32))
        a = np.zeros((2, shape[-2]), np.float32)
        assert pm.matmul(a, packed).shape == np.matmul(a, np.zeros(shape)).shape


@pytest.mark.parametrize(("b", "error"), [(np.zeros(3), ValueError), (np.zeros((2, 2), int), TypeError)])
def test_what_cannot_be_packed_is_refused(b, error):
    with pytest.raises(error):
        pm.pack(b)


def test_a_weight_is_immutable():
    packed = pm.pack(numbers((3, 4)))
    with pytest.raises(ValueError, match="read-only"):
        packed.owner[0] = 1
    assert isinstance(packed, runtime().Packed)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_few_packed_columns_are_multiplied_along_k(dtype):
    rng = np.random.default_rng(5)
    for m, n, k in ((1, 1, 7), (5, 3, 33), (40, 8, 16), (301, 1, 100)):
        a, b = (rng.integers(-4, 5, x).astype(dtype) for x in ((m, k), (k, n)))
        weight, out = pm.pack(b), np.full((m, n), np.nan, dtype)
        assert (pm.matmul(a, weight, out=out) == a @ b).all()
        assert (pm.matmul(np.asfortranarray(a), weight) == a @ b).all()
    problem = Problem(301, 1, 100, b="packed", family="f32x16")
    assert choose(problem, load_target("zen5"), tuned=False).schedule.program == "dot"
