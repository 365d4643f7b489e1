"""Block programs as records: the page's example on processors and on an emulated CUDA, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from emulated_cuda import install
from places import ROOT

import portmm as pm
from portmm.codegen.lower import lower_program
from portmm.errors import ScheduleError
from portmm.host.detect import host
from portmm.ir import block_meaning
from portmm.ir.block_program import BlockProgram, TileReduce, TileTransfer
from portmm.schedule.program import capacities_of, exceeded
from portmm.schedule.programs import PROGRAMS
from portmm.schedule.rows import core_schedule, footprint
from portmm.schedule.text import parse, spell
from portmm.spec.epilogue import Operand, column_reduction, index, load, reduction
from portmm.target.target import load_isa, load_target
from portmm.util import memo

PAGE = (ROOT / "docs/add-a-program.md").read_text()
EXAMPLES = {
    name: re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)[1]
    for name in ("record", "product", "attention")
}
EXAMPLE = EXAMPLES["record"]
MOST_LINES = 40
X = load(0, "f32")
PEAK = column_reduction("max", X)
COLUMNS = BlockProgram(
    grid="bn", loop="m", operands=(Operand("f32", "bmn"), Operand("f32", "bn")),
    passes=((TileReduce(PEAK),), (TileTransfer(1, PEAK + 1.0),)),
)  # fmt: skip


@pytest.fixture(scope="module")
def page():
    """The names of the page's example, after it ran on this machine."""
    names = {}
    exec(EXAMPLE, names)  # noqa: S102 - the page's own text
    return names


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_short(name):
    assert len(EXAMPLES[name].splitlines()) <= MOST_LINES


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize(("name", "program"), [("product", "dense_relu"), ("attention", "attention")])
def test_products_run_on_vectors_and_threads(name, program, isa, monkeypatch):
    if not any(x.name == isa for x in host().isas):
        pytest.skip(f"this machine has no {isa}")
    with pm.config(target=isa):
        names = {}
        exec(EXAMPLES[name], names)  # noqa: S102 - the page's own text
        want = names["result"]
        again = pm.launch(names[program], *names["arrays"], np.full_like(want, np.nan))
        np.testing.assert_array_equal(again, want)
    meant = np.full_like(want, np.nan)
    block_meaning.run(names[program], (*names["arrays"], meant), {"m": 10, "n": 16, "k": 9})
    np.testing.assert_allclose(want, meant, rtol=1e-5, atol=1e-5)
    memo.forget_all()
    cupy = install(monkeypatch)
    got = pm.launch(names[program], *map(cupy.array, names["arrays"]), cupy.empty(want.shape, np.float32))
    assert cupy.launches
    np.testing.assert_allclose(got.get(), want, rtol=1e-5, atol=1e-5)
    memo.forget_all()


def test_the_example_runs_on_avx2(page, monkeypatch):
    if not any(x.name == "avx2" for x in host().isas):
        pytest.skip("this machine has no AVX2")
    avx2 = load_isa("avx2")
    monkeypatch.setattr("portmm.dispatch.cpu_routes.unit_for", lambda *_: (avx2, avx2.atom("f32")))
    got = pm.launch(page["rms_norm"], page["rows"], page["weight"], np.full_like(page["rows"], np.nan))
    np.testing.assert_allclose(got, page["result"], rtol=1e-6)


def test_the_example_runs_on_threads(page, monkeypatch):
    memo.forget_all()
    cupy = install(monkeypatch)
    out = cupy.empty(page["rows"].shape, np.float32)
    got = pm.launch(page["rms_norm"], cupy.array(page["rows"]), cupy.array(page["weight"]), out)
    assert len(cupy.launches) == 1
    np.testing.assert_allclose(got.get(), page["result"], rtol=1e-6)
    memo.forget_all()


def test_columns_on_cores_and_threads(monkeypatch):
    values = np.random.default_rng(0).random((3, 70, 33), np.float32)
    want = values.max(1, keepdims=True) + 1
    np.testing.assert_array_equal(pm.launch(COLUMNS, values, np.empty((3, 1, 33), np.float32)), want)
    memo.forget_all()
    cupy = install(monkeypatch)
    got = pm.launch(COLUMNS, cupy.array(values), cupy.empty(want.shape, np.float32))
    np.testing.assert_array_equal(got.get(), want)
    memo.forget_all()


def test_what_does_not_fit_is_refused():
    values = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="takes"):
        pm.launch(COLUMNS, values, np.empty((4, 8), np.float32))
    with pytest.raises(TypeError, match="float64"):
        pm.launch(COLUMNS, values.astype(np.float64), np.empty((1, 8), np.float32))
    with pytest.raises(ValueError, match="contiguous"):
        pm.launch(COLUMNS, np.ones((8, 4), np.float32).T, np.empty((1, 8), np.float32))
    fixed = np.empty((1, 8), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pm.launch(COLUMNS, values, fixed)
    with pytest.raises(ValueError, match="no rows"):
        pm.launch(COLUMNS, values[:0], np.empty((1, 8), np.float32))
    with pytest.raises(ValueError, match="1 arrays for 2"):
        pm.launch(COLUMNS, values)
    with pytest.raises(TypeError, match="a list"):
        pm.launch(COLUMNS, values, [0.0] * 8)


def test_records_say_what_is_missing():
    total = reduction("add", X)
    operands = (Operand("f32", "bmn"), Operand("f32", "bmn"))
    store = TileTransfer(1, X / total)
    with pytest.raises(ScheduleError, match="no pass before"):
        BlockProgram("bm", "n", operands, ((store,),))
    with pytest.raises(ScheduleError, match="no pass before"):
        BlockProgram("bm", "n", operands, ((TileReduce(total), store),))
    with pytest.raises(ScheduleError, match="along m"):
        BlockProgram("bn", "m", operands, ((TileReduce(total),), (store,)))
    with pytest.raises(ScheduleError, match="stored before the last"):
        BlockProgram("bm", "n", operands, ((TileTransfer(1, X),), (TileReduce(total),)))
    for labels, lacking, value in [
        ("bm", "n", X), ("bn", "m", X), ("mn", "b", X), ("bm", "n", index("n")), ("b", "m", total),
    ]:  # fmt: skip
        passes = ((TileReduce(total),), (TileTransfer(1, value),))
        with pytest.raises(ScheduleError, match=f"operand 1 has no label '{lacking}'"):
            BlockProgram("bm", "n", (operands[0], Operand("f32", labels)), passes)
    avx2 = load_isa("avx2")
    real = avx2.atom("f32")
    assert lower_program(COLUMNS, core_schedule(COLUMNS, avx2, real), avx2, real)[0].name


def test_schedules_of_rows_are_schedules():
    """Cores have them as threads do: as text they are the same again, and the registry knows their program."""
    isa = load_isa("avx2")
    for program in (BlockProgram("bm", "n", (Operand("f32", "bmn"),) * 2, ((TileTransfer(1, X),),)), COLUMNS):
        for far in (False, True):
            s = core_schedule(program, isa, isa.atom("f32"), far=far)
            assert parse(spell(s)) == s
        (found,) = PROGRAMS[s.program].candidates(program, (64, 4096, 1), load_target("h100"), exchange=True)
        assert found.program == s.program
        assert parse(spell(found)) == found
        assert not exceeded(footprint(found, program), capacities_of(load_target("h100"), dynamic=False))


def test_what_a_launch_refuses_and_what_is_empty():
    x = load(0, "f32")
    more = BlockProgram("bm", "n", (Operand("f32", "bmn"), Operand("f32", "bmn")), ((TileTransfer(1, x + 1.0),),))
    assert pm.launch(more, np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32)).shape == (0, 2)
    memory = np.zeros(40, np.float32)
    np.testing.assert_array_equal(pm.launch(more, memory[:36].reshape(1, 36), memory[:36].reshape(1, 36)), 1)
    with pytest.raises(ValueError, match="shares memory"):
        pm.launch(more, memory[:36].reshape(1, 36), memory[1:37].reshape(1, 36))
    with pytest.raises(ValueError, match="block program takes"):
        pm.launch(more, np.zeros((1, 1, 2, 3), np.float32), np.zeros((1, 1, 2, 3), np.float32))
    with pytest.raises(TypeError, match="mask"):
        pm.launch(more, np.ma.masked_array(np.ones((2, 3), np.float32)), np.zeros((2, 3), np.float32))
    with pytest.raises(ScheduleError, match="operand 5"):
        BlockProgram("bm", "n", (Operand("f32", "bmn"),), ((TileTransfer(5, x),),))
    with pytest.raises(ScheduleError, match="loop"):
        BlockProgram("bm", "q", (Operand("f32", "bmn"),), ((TileTransfer(0, x),),))
