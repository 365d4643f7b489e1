"""Sums over the lanes of several vectors, in the order in which one vector's are added."""

from __future__ import annotations

import numpy as np
import pytest

from portmm.ir.lane_nodes import Shuffle
from portmm.ir.nodes import Verb
from portmm.kernels.cpu.dot import summed
from portmm.target.target import load_isa


def run(statements, registers):
    """Values of registers after shuffles and additions."""
    for s in statements:
        if isinstance(s, Shuffle):
            registers[s.d] = np.concatenate([registers[s.a], registers[s.b]])[list(s.pick)]
        else:
            assert isinstance(s, Verb)
            assert s.name == "add"
            registers[s.d] = registers[s.d] + registers[s.a or s.b]
    return registers


def tree(lanes):
    """The sum of neighbours, then of neighbouring pairs, and so on."""
    while len(lanes) > 1:
        lanes = lanes[::2] + lanes[1::2]
    return lanes[0]


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("isa", ["sse2", "avx2", "avx512"])
def test_lane_i_is_the_sum_of_register_i(isa, dtype):
    atom = load_isa(isa).atom(dtype)
    rng = np.random.default_rng(0)
    kind = np.float32 if dtype == "f32" else np.float64
    for count in range(1, atom.n + 1):
        names = [f"c{i}" for i in range(count)]
        registers = {x: rng.standard_normal(atom.n).astype(kind) for x in names}
        want = [tree(registers[x]) for x in names]
        found = run(summed(atom, names, "t"), registers)[names[0]]
        np.testing.assert_array_equal(found[:count], np.array(want))
