"""Main loops keep the share of what the ports of each processor allow: see `port_bounds.py`.

`--store` writes bench/baselines/port_bounds.json for gcc. There is no noise, so that `--smoke` checks it, too.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import instructions
import machines
import port_bounds
import pytest

TOLERANCE = 0.02
WANTED = 0.9
"""Share of what the ports allow; kernels below are findings, which docs/notes/port-bounds.md explains."""


@pytest.fixture(scope="module")
def modelled(storing):
    """Loops of all chips."""
    machines.require("llvm-mca-19")
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        every = workers.map(lambda chip: port_bounds.of_chip(chip, port_bounds.find_tool()), port_bounds.CHIPS)
        found = dict(zip(port_bounds.CHIPS, every, strict=True))
    if storing:
        port_bounds.store(found)
    return found


@pytest.mark.parametrize("chip", port_bounds.CHIPS)
def test_port_bounds(modelled, chip):
    if instructions.compiler() != "gcc 12":
        pytest.skip(f"what is stored is of gcc 12; this is {instructions.compiler()}")
    stored = {x.dtype: x for x in port_bounds.load()[chip]}
    assert stored.keys() == {x.dtype for x in modelled[chip]}
    for x in modelled[chip]:
        least = min(WANTED, stored[x.dtype].of_ports - TOLERANCE)
        assert x.of_ports >= least, f"{x} reaches {x.of_ports:.2f}, and {stored[x.dtype]} is stored"
