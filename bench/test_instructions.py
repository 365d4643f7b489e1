"""No kernel takes more instructions than it did, nor fewer without saying so: see `instructions.py`.

`--store` writes bench/baselines/instructions.json for the compiler that is here. It takes
seconds and knows no noise, so that `--smoke` checks it like any other run.
"""

import platform
from concurrent.futures import ThreadPoolExecutor

import driver
import instructions
import machines
import pytest

HERE = [name for name in instructions.SUBJECTS if machines.runs_here(name.rpartition("-")[2])]
VIEW = 1.08
"""Bound on the instructions of a product whose A is the windows of a convolution, over those of a matrix of these."""
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="what is stored is of x86-64")


@pytest.fixture(scope="module")
def counted(tmp_path_factory, storing):
    """Rows by kernel."""
    valgrind, folder = machines.require("valgrind"), tmp_path_factory.mktemp("callgrind")
    program = driver.compile_driver(folder, list(instructions.find_compiler("x86_64").argv))

    def one(name):
        place = folder / name
        place.mkdir()
        return instructions.count(instructions.SUBJECTS[name](), place, valgrind, program)

    with ThreadPoolExecutor(2) as workers:
        rows = dict(zip(HERE, workers.map(one, HERE), strict=True))
    if storing:
        instructions.store(instructions.compiler(), rows)
    return rows


@pytest.mark.parametrize("name", HERE)
def test_instructions(counted, name):
    maker, stored = instructions.compiler(), instructions.load()
    if maker not in stored:
        pytest.skip(f"nothing is stored for {maker}, only for {', '.join(stored)}: `--store` does it")
    if name not in stored[maker]:
        pytest.skip(f"nothing is stored of {name}: `--store` does it")
    assert not instructions.difference(stored[maker][name], counted[name])


@pytest.mark.parametrize("size", [56, 14])
def test_windows_of_a_convolution_take_little_more_than_a_matrix_of_them(counted, size):
    ours, gathered = (counted[f"conv-{size}{x}-avx2"].instructions for x in ("", "-gathered"))
    assert ours <= VIEW * gathered
