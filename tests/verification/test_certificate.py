"""Certificates are repeated, and do not hold for what they were not made for; unstable candidates get none."""

from __future__ import annotations

import json

import graphs_of as g
import pytest
from typer.testing import CliRunner

from portmm.cli.main import app
from portmm.errors import ScheduleError
from portmm.ir.mugraph import to_json
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
