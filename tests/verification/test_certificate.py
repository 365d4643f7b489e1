"""Certificates are repeated, and do not hold for what they were not made for; unstable candidates get none."""

from __future__ import annotations

import json
import re

import graphs_of as g
import pytest
from typer.testing import CliRunner

from portmm.cli.main import app
from portmm.errors import ScheduleError
from portmm.ir.graph_reader import from_json
from portmm.ir.mugraph import Builder, to_json
from portmm.spec.epilogue import argument
from portmm.spec.expr import const, node
from portmm.verification.certificate import CertificateError, certify, digest, repeat
from portmm.verification.stability import judge


@pytest.fixture(scope="module")
def certificate():
    return json.loads(json.dumps(certify(g.product(), g.one_product(), "haswell")))


def test_it_is_repeated(certificate, tmp_path):
    assert all(x.holds for x in repeat(certificate))
    (kernel,) = certificate["kernels"]
    assert kernel["emitted"] == {"by": "compiled", "reason": ""}
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(certificate))
    done = CliRunner().invoke(app, ["verify", str(path)])
    assert done.exit_code == 0, done.output
    assert "2**-" in done.output


def test_another_program_fails(certificate, tmp_path):
    other = to_json(g.misplaced_sum())
    forged = certificate | {"candidate": other, "kernels": []}
    held = {x.what: x.holds for x in repeat(forged)}
    assert not held["text of the candidate"]
    assert not held["new tests"]
    text = json.dumps(other, sort_keys=True)
    forged["digests"] = forged["digests"] | {"candidate": digest(text)}
    assert not {x.what: x.holds for x in repeat(forged)}["new tests"]
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(forged))
    done = CliRunner().invoke(app, ["verify", str(path)])
    assert done.exit_code == 1
    assert "FAILS" in done.output


def test_another_statement_fails(certificate):
    """Errors are computed again, and the extents and bounds of kernels."""
    stated, alone = certificate["errors"], certificate | {"kernels": []}
    for errors in (stated[1:], [[x, y + 1e-3] for x, y in stated], [[float("inf"), y] for _, y in stated]):
        assert [x.what for x in repeat(alone | {"errors": errors}) if not x.holds] == ["numerical errors"]
    near = [[1.5 * x, y / 1.5] for x, y in stated]
    assert all(x.holds for x in repeat(alone | {"errors": near}))
    (kernel,) = certificate["kernels"]
    forged = kernel | {"check": kernel["check"] | {"bits": 400.0}}
    failed = [x.what for x in repeat(certificate | {"kernels": [forged]}) if not x.holds]
    assert failed == [f"compiled kernel of {kernel['name']}, haswell"]


def test_damage_is_an_error(certificate):
    for bad in ({}, certificate | {"format": 99}, certificate | {"candidate": {"steps": []}}):
        with pytest.raises(CertificateError):
            repeat(bad)


def test_stability_is_judged_apart():
    """exp without a maximum is the same over the reals, and overflows."""
    assert judge(g.attention(), g.flash()).stable
    worse = judge(g.attention(), g.attention(stable=False))
    assert not worse.stable
    assert "overflows" in worse.reason
    assert judge(g.attention(stable=False), g.flash()).stable
    assert judge(g.lora(), g.concatenated_lora()).stable  # parts of tensors, of arrays as of residues
    with pytest.raises(ScheduleError, match="less stable"):
        certify(g.attention(), g.attention(stable=False))
    with pytest.raises(ScheduleError, match="no equivalent"):
        certify(g.attention(), g.flash(scale=0.5))


def changed(data, path, to):
    """A copy of serialised data in which what is at a path is another thing, or absent."""
    data = json.loads(json.dumps(data))
    *before, last = path
    at = data
    for x in before:
        at = at[x]
    if to is None:
        del at[last]
    else:
        at[last] = to
    return data


@pytest.mark.parametrize(
    ("path", "to", "what"),
    [
        (("steps", 0, "values", 2, 2, 1), None, "arguments of value 2 of step 0"),
        (("steps", 0, "values", 2, 0), "and", "takes s32 or mask, s32 or mask"),
        (("steps", 0, "values", 2, 0), "fma", "a list of 3 values"),
        (("steps", 0, "values", 0, 1), "s32", "elements of operand 0, of type f32, are f32"),
        (("steps", 0, "values", 0, 2, 0), 9, "numbers from 0 to"),
        (("steps", 0, "passes", 0, 0, 1, "value"), "x", "value of operator 0 in pass 0 of step 0"),
        (("steps", 0, "passes", 0, 0, 0), "Tile", "one of TileMap"),
        (("steps", 0, "operands", 0, 0), 99, "tensor 99"),
        (("steps", 0, "operands", 0, 1), [[0], [0]], "name each once"),
        (("steps", 0, "loop"), "", "a label"),
        (("steps", 0, "arrays", 0, 1), "aa", "different labels"),
        (("tensors", 0), ["x"], "a list of 3"),
        (("results",), [1.5], "results is"),
        (("inputs",), None, "no 'inputs'"),
        (("steps", 0, "values", 0, 2, 0), 1, "before it is written"),
    ],
)
def test_ill_typed_graphs_are_refused_with_their_place(path, to, what):
    """Malformed graphs are refused when they are read, before any of them is computed."""
    b = Builder()
    x = b.input("x", "mn")
    scaled = argument(0, "f32") * const(3.0)
    whole = to_json(b.graph(b.map(scaled, x)))
    from_json(whole)
    with pytest.raises(ScheduleError, match=re.escape(what)):
        from_json(changed(whole, path, to))


def test_ill_typed_expressions_are_refused_by_hand():
    b = Builder()
    b.map(node("and", (argument(0, "f32"), argument(0, "f32")), "f32"), b.input("x", "mn"))
    with pytest.raises(ScheduleError, match="takes s32 or mask"):
        b.graph(1)


def test_functions_without_labels_have_certificates():
    """Sums of rows of one element: tensors with no dimension."""
    b = Builder()
    x, y = b.input("x", "1n"), b.input("y", "11")
    total = b.map(argument(0, "f32") * argument(1, "f32"), b.sum(x, "n"), y)
    graph = b.graph(b.map(argument(0, "f32") + argument(1, "f32"), total, x), total)
    assert all(x.holds for x in repeat(json.loads(json.dumps(certify(graph, graph)))))
