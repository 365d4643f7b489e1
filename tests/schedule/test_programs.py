"""The registry of block programs, and the constants of cost models."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import portmm.kernels
import portmm.targets
from portmm.codegen.lower import grid_atom
from portmm.errors import TargetError
from portmm.schedule import cpu_cost
from portmm.schedule.candidates import candidates
from portmm.schedule.epilogue_work import EpilogueWork
from portmm.schedule.gpu_cost import cost
from portmm.schedule.programs import PROGRAMS
from portmm.spec.epilogue import C as RESULT
from portmm.spec.epilogue import Fused, Operand, acc, load
from portmm.spec.expr import apply, const
from portmm.spec.problem import Problem
from portmm.target import model
from portmm.target.target import load_target

PLAIN = Problem(4096, 4096, 4096, "bf16-bf16-bf16", b="col")
SUM = apply("add", apply("add", acc(), load(0, "bf16")), load(1, "bf16"))
ADDED = replace(PLAIN, fused=str(Fused((Operand("bf16", "mn"), Operand("bf16", "mn")), ((RESULT, SUM),))))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_builders(name):
    from importlib import import_module

    program = PROGRAMS[name]
    assert callable(import_module(f"portmm.kernels.{program.builder}").build)


@pytest.mark.parametrize("chip", ["h100", "a100", "t4", "mi300x"])
def test_a_fused_epilogue_takes_time(chip):
    """Each schedule of a product with two added matrices takes longer than of the plain one, by more than its bytes."""
    target = load_target(chip)
    ending = EpilogueWork.of(ADDED, device=True)
    assert (ending.operations, moved := ending.moved(ADDED)) == (2, 2 * 2 * 4096**2)
    for s in candidates(PLAIN, target, (8, 8, 8))[::7]:
        atom = grid_atom(target.isa(s.isa), s)
        plain, added = (cost(p, s, atom, target) for p in (PLAIN, ADDED))
        assert added.seconds > plain.seconds
        more = added.overlapped["memory"] - plain.overlapped["memory"]
        assert more == pytest.approx(moved / (target.device.memory_gbs * 1e9))
        assert added.overlapped["epilogue"] + added.added["epilogue"] > 0


@pytest.mark.parametrize("chip", ["granite_rapids", "zen4", "haswell", "neoverse_n1"])
def test_a_fused_epilogue_takes_time_on_cpus(chip):
    """Candidates predict operations of an epilogue, and more its arrays, the more the further away they are."""
    target, plain = load_target(chip), Problem(64, 96, 128)
    relu = replace(plain, fused=str(Fused((), ((RESULT, apply("max", acc(), const(0.0))),))))
    added = replace(plain, fused=str(Fused((Operand("f32", "mn"),), ((RESULT, apply("add", acc(), load(0, "f32"))),))))
    far = replace(added, m=8192, n=8192)
    for s in candidates(relu, target):
        atom = target.atom(s.isa, s.dtype, s.atom.lanes)
        one, two, three = (cpu_cost.cost(p, replace(s, epilogue=p.fused), atom, target) for p in (relu, added, far))
        assert 0 < one.added["epilogue"] < two.added["epilogue"]
        assert three.added["epilogue"] > 8192**2 / (64 * 96) * two.added["epilogue"]
    for s in candidates(plain, target):
        assert "epilogue" not in cpu_cost.cost(plain, s, target.atom(s.isa, s.dtype, s.atom.lanes), target).added


@pytest.mark.parametrize("name", ["cpu", "device"])
def test_constants_say_where_they_were_measured(name):
    """Every constant that the cost models name is a row, and every row is named."""
    folder = Path(portmm.targets.__path__[0])
    rows = model._constants(name)
    named = set()
    folders = [Path(package.__path__[0]) for package in (portmm, portmm.kernels)]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        text = path.read_text()
        imported = re.search(rf"from portmm.target.model import .*\b{name.upper()}( as MODEL)?", text)
        if imported:
            named |= set(re.findall(rf"\b{'MODEL' if imported[1] else name.upper()}\.(\w+)", text))
    if name == "cpu":  # the tables of candidates have the model of their chip
        for path in ("cpu_table", "cpu_cost"):
            named |= set(re.findall(r"\bmodel\.(\w+)", Path(portmm.__path__[0], "schedule", f"{path}.py").read_text()))
        named -= {"of", "CPU", "import"}
    assert named == set(rows)
    assert (folder / "model" / f"{name}.toml").read_text().count("measured = ") == len(rows)


def test_constants_of_a_chip_take_the_place_of_general_ones():
    general = set(model._constants("cpu"))
    files = {x.stem for x in Path(portmm.targets.__path__[0], "model").glob("*.toml")}
    for chip in files - {"cpu", "device"}:
        assert load_target(chip).searches
        own, of_chip = model._constants(chip), model.CPU.of(chip)
        assert own.keys() <= general
        assert all(getattr(of_chip, name) == value for name, value in own.items())
        assert of_chip.home == model.CPU.home or "home" in own
    assert model.CPU.of("haswell") is model.CPU


def test_unknown_constants_are_named():
    with pytest.raises(AttributeError, match="no constant 'speed'"):
        model.DEVICE.speed  # noqa: B018


def test_constants_without_a_source_are_refused(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "cpu.toml").write_text('[[constant]]\nname = "exposed"\nvalue = 0.1\n')
    monkeypatch.setattr(portmm.targets, "__path__", [str(tmp_path)])
    with pytest.raises(TargetError, match="measured"):
        model.Model("cpu").exposed  # noqa: B018 - reading it loads the file
