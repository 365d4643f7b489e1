"""Measured rates: the loops do what they claim, and what is remembered is this machine's."""

from __future__ import annotations

import math
import platform
from dataclasses import replace

import crossing
import numpy as np
import pytest

from portmm.build import shared_object
from portmm.codegen.c_kernel import source
from portmm.dispatch import config
from portmm.errors import TargetError
from portmm.host import calibrate, detect, gauge, microbenchmarks
from portmm.ir.interpreter import numpy_type
from portmm.spec.dtype import BY_NAME
from portmm.target.target import load_isa, load_target, names_of

HERE = detect.host()
ISAS = [load_isa(name) for name in names_of("cpu", "isa")]
RATES = {HERE.isas[0].atoms[0].name: 123.5, "L1": 400.25, "memory": 12.0}


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path))
    monkeypatch.setattr(config, "_targets", {})
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(calibrate, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(calibrate, "MEMORY_CACHES", 0)


# --- the loops ---------------------------------------------------------------


def atoms_here():
    """Those of vectors; for tiles see test_amx.py."""
    return [(isa, atom) for isa in HERE.isas for atom in isa.atoms if atom.m == 1]


def drawn(count, name, rng):
    """Elements or units of a type: small numbers, exact in every type."""
    return rng.integers(0, 9, count * BY_NAME[name].pack).astype(numpy_type(name))


@pytest.mark.thin(3)
@pytest.mark.parametrize(("isa", "atom"), atoms_here(), ids=lambda x: x.name)
def test_the_peak_loop_multiplies_every_step(isa, atom):
    found = microbenchmarks.peak(isa, atom)
    repeats, steps, kr = 3, 5, atom.k_pack
    rng = np.random.default_rng(0)
    a, b, c = (
        drawn(found.a * steps, atom.left, rng),
        drawn(found.b * steps, atom.right, rng),
        drawn(found.c, atom.acc, rng),
    )
    cols = found.b // atom.n
    panel_a, panel_b = a.reshape(steps, -1, kr).astype(float), b.reshape(steps, cols, atom.n, kr).astype(float)
    expect = c.reshape(-1, cols, atom.n) + repeats * np.einsum("kre,kcne->rcn", panel_a, panel_b)
    gauge.open_loop(found).start(repeats, steps, a, b, c)
    np.testing.assert_allclose(c.reshape(expect.shape), expect, rtol=1e-5)
    assert found.flops == 2 * found.c * atom.k


@pytest.mark.thin(3)
@pytest.mark.parametrize(("isa", "atom"), atoms_here(), ids=lambda x: x.name)
def test_the_stream_loop_reads_every_element(isa, atom):
    found = microbenchmarks.stream(isa, atom)
    steps = 4
    b = drawn(found.b * steps, atom.right, np.random.default_rng(0))
    a, c = np.full(found.a * atom.k_pack, 2, numpy_type(atom.left)), np.zeros(found.c, numpy_type(atom.acc))
    gauge.open_loop(found).start(2, steps, a, b, c)
    np.testing.assert_allclose(c, 2 * 2 * b.reshape(steps, -1, atom.k_pack).astype(float).sum((0, 2)), rtol=1e-5)


@pytest.mark.thin(3)
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_the_loops_of_every_isa_fit_its_registers_and_compile(isa, monkeypatch):
    monkeypatch.setenv(*crossing.build_with(isa))
    for atom in isa.atoms if isa.atoms[0].m == 1 else ():
        found = microbenchmarks.peak(isa, atom)
        sums, cols = found.c // (atom.m * atom.n), found.b // atom.n
        assert min(12, isa.registers - 4) <= sums <= isa.registers - cols - 1
        for made in (found, microbenchmarks.stream(isa, atom)):
            arch = None if isa.arch == "any" else isa.arch
            assert shared_object.build(
                source(made.kernel), flags=isa.flags, arch=arch, name=made.kernel.name
            ).path.is_file()


# --- the measurement ---------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_every_atom_and_level_gets_a_rate():
    told = []
    rates = calibrate.probe(HERE, lambda *x: told.append(x), seconds=0.001)
    expect = [atom.name for isa in HERE.isas for atom in isa.atoms] + [level.name for level in HERE.levels] + ["memory"]
    expect += ["memory@all"] if HERE.cores > 1 else []
    assert list(rates) == expect
    assert all(math.isfinite(value) and value > 0 for value in rates.values())
    # Every gauge is made, and has a turn in each round.
    steps = len(expect) * (1 + calibrate.ROUNDS)
    assert [name for _, _, name in told] == [*expect * (1 + calibrate.ROUNDS), "done"]
    assert [(done, of) for done, of, _ in told] == [(i, steps) for i in range(steps + 1)]


class Machine:
    """A clock that runs only while something is measured, at a speed that the tests set."""

    def __init__(self, monkeypatch):
        self.now, self.turns, self.slowed = 0.0, [], set()
        monkeypatch.setattr(gauge.time, "perf_counter", lambda: self.now)

    def gauge(self, name):
        def run(repeats):
            if self.turns[-1:] != [name]:
                self.turns.append(name)
            self.now += repeats * 1e-3 * (7.0 if len(self.turns) in self.slowed else 1.0)

        return lambda: gauge.Gauge(name, 2.0, run)


def test_rates_are_the_best_of_interleaved_rounds(monkeypatch):
    machine = Machine(monkeypatch)
    makers = {name: machine.gauge(name) for name in ("one", "two", "three")}
    machine.slowed = {1, 4, 5, 8, 10, 12, 15, 16, 17, 18}  # the last turn of each, and others
    rates = calibrate._best_rates(makers, lambda *_: None, 0.05)
    assert machine.turns == ["one", "two", "three"] * (1 + calibrate.ROUNDS)
    assert rates == pytest.approx(dict.fromkeys(makers, 2000.0))


@pytest.mark.usefixtures("small")
def test_memory_is_left_out_where_little_is_free(monkeypatch):
    monkeypatch.setattr(calibrate, "free_memory", lambda: 2 << 20)
    target = replace(HERE, isas=HERE.isas[-1:], levels=())
    assert list(calibrate.probe(target, seconds=0.001)) == [atom.name for atom in target.isas[0].atoms]


def test_the_buffer_for_memory_outgrows_the_caches(monkeypatch):
    monkeypatch.setattr(calibrate, "free_memory", lambda: 1 << 40)
    last = replace(HERE.levels[-1], bytes=1 << 30)
    assert calibrate.memory_buffer(replace(HERE, levels=(last,))) == 4 << 30
    assert calibrate.memory_buffer(replace(HERE, levels=())) == calibrate.MEMORY_BYTES


def test_another_architecture_cannot_be_measured():
    other = load_target("haswell" if platform.machine() == "aarch64" else "neoverse_n1")
    with pytest.raises(TargetError, match=r"cannot measure .* lacks"):
        calibrate.probe(other)


def test_an_interrupted_run_does_not_shorten_the_others(monkeypatch):
    now = 0.0
    runs = []

    def run(repeats):
        nonlocal now
        # One repetition takes a microsecond, a call another five, and the first is interrupted.
        now += repeats * 1e-6 + 5e-6 + (0.02 if not runs else 0)
        runs.append(repeats)

    monkeypatch.setattr(gauge.time, "perf_counter", lambda: now)
    assert gauge.least(run, gauge.repetitions(run), 0.05) == pytest.approx(1e-6, rel=0.02)
    assert runs[-1] * 1e-6 >= 0.9 * gauge.SHORTEST


@pytest.mark.parametrize("window", [0, 1 << 12])
def test_a_bandwidth_is_of_the_whole_buffer(window):
    """In windows, successive repetitions read the whole buffer before any of it comes again."""
    read = []
    loop = gauge.open_loop(microbenchmarks.stream(HERE.isas[-1], HERE.isas[-1].atoms[0]))
    spied = replace(
        loop, start=lambda repeats, steps, _a, b, _c: read.append((repeats, steps, b.ctypes.data, b.nbytes))
    )
    found = gauge.bandwidth(spied, "L2", 1 << 14, window)
    found.run(4)
    assert sum(repeats * steps for repeats, steps, *_ in read) * loop.step_bytes == pytest.approx(4e9 * found.work)
    if window:
        assert 0.9 * window <= found.work * 1e9 <= window
        assert len({place for *_, place, _ in read}) == 4
    else:
        assert 0.9 * (1 << 14) <= found.work * 1e9 <= 1 << 14


# --- what is remembered ------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_rates_come_back_to_the_machine_they_were_measured_on():
    assert calibrate.measured(HERE) is HERE
    assert calibrate.remember(HERE, RATES)
    found = calibrate.measured(HERE)
    assert found.measured == RATES
    assert replace(found, measured={}, frequency_ghz=0) == replace(HERE, frequency_ghz=0)
    assert config.target() == found


@pytest.mark.usefixtures("own_cache")
def test_a_disturbed_measurement_does_not_lower_a_better_one():
    calibrate.remember(HERE, {**RATES, "L2": 7.0})
    calibrate.remember(HERE, {name: 0.54 * value for name, value in RATES.items()})
    assert calibrate.measured(HERE).measured == {**RATES, "L2": 7.0}
    calibrate.remember(HERE, {"memory": 13.0})
    assert calibrate.measured(HERE).measured == {**RATES, "L2": 7.0, "memory": 13.0}


def test_rates_are_forgotten_of_this_machine_only(own_cache, monkeypatch):
    assert not calibrate.forget(HERE)
    calibrate.remember(HERE, RATES)
    monkeypatch.setattr(calibrate, "_processor", lambda: "another model")
    calibrate.remember(HERE, {"L1": 1.0})
    assert calibrate.forget(HERE)
    assert not calibrate.forget(HERE)
    assert calibrate.measured(HERE) is HERE
    monkeypatch.undo()
    monkeypatch.setenv("PORTMM_CACHE", str(own_cache))
    assert calibrate.measured(HERE).measured == RATES
    calibrate.remember(HERE, {"L1": 2.0})
    assert calibrate.measured(HERE).measured == RATES


@pytest.mark.usefixtures("own_cache")
def test_a_clock_follows_from_the_rate_of_the_best_atom():
    atom = next(isa for isa in HERE.isas if isa.base is None).atoms[0]
    known = replace(HERE, rates={atom.name: 2.0}, frequency_ghz=0.0)
    calibrate.remember(HERE, {atom.name: 2 * atom.m * atom.n * atom.k * 2.0 * 3.5})
    assert calibrate.measured(known).frequency_ghz == pytest.approx(3.5)
    assert calibrate.measured(replace(known, frequency_ghz=2.5)).frequency_ghz == 2.5
    assert calibrate.measured(replace(known, rates={})).frequency_ghz == 0.0


@pytest.mark.usefixtures("own_cache")
def test_rates_belong_to_one_machine(monkeypatch):
    calibrate.remember(HERE, RATES)
    for other in (
        replace(HERE, name="nosuch"),
        replace(HERE, cores=HERE.cores + 1),
        replace(HERE, levels=HERE.levels[:-1]),
    ):
        assert calibrate.measured(other) is other
        assert not calibrate.remember(other, RATES)
    less = HERE.limited_to("scalar")
    assert less is HERE or not calibrate.measured(less).measured
    monkeypatch.setattr(calibrate, "_processor", lambda: "another model")
    assert calibrate.measured(HERE) is HERE
    calibrate.remember(HERE, {"L1": 1.0})
    assert calibrate.measured(HERE).measured == {"L1": 1.0}


@pytest.mark.parametrize("value", ["", "nan", "inf", "-1", "0", "fast"])
def test_a_spoilt_note_is_ignored(own_cache, value):
    calibrate.remember(HERE, RATES)
    (note,) = own_cache.glob("rates-*.note")
    machine = note.read_text().partition("\t")[0]
    note.write_text(f"{machine}\tL1\t{value}\n{machine}\tnosuch\t5\n{machine}\n\n\x00\nother\tL1\t5\n")
    assert calibrate.measured(HERE) is HERE
