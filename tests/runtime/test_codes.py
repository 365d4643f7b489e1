"""Values of four bits, two in a byte, by the run time's C."""

import numpy as np
import pytest

import portmm as pm
from portmm.runtime import cpu


@pytest.fixture(scope="module")
def join():
    pm.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    function = cpu.joiner()
    if function is None:
        pytest.skip("the twin of the extension leaves them to NumPy")
    return function


@pytest.mark.parametrize("shape", [(1, 2), (3, 30), (7, 34), (5, 1024)])
def test_the_first_of_two_values_is_in_the_low_half(join, shape):
    values = np.random.default_rng(0).integers(0, 16, shape, np.uint8)
    both = np.full((shape[0], shape[1] // 2), 255, np.uint8)
    join(values, both)
    np.testing.assert_array_equal(both, values[:, ::2] | values[:, 1::2] << 4)


def test_arrays_that_do_not_fit_are_refused(join):
    values, both = np.ones((4, 8), np.uint8), np.ones((4, 4), np.uint8)
    fixed = both.copy()
    fixed.flags.writeable = False
    for x, y in ((values, both[:3]), (values[:, :6], both), (values, both[:, :3]), (values, fixed)):
        with pytest.raises((TypeError, ValueError)):
            join(x, y)
    with pytest.raises(TypeError):
        join(values.astype(np.int8), both)
    with pytest.raises(TypeError):
        join(values)
