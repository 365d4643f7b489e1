"""Targets by the names of cloud instances, and what is said of names that are none."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

import portmm as pm
from portmm.cli import main
from portmm.dispatch import config
from portmm.target import target
from portmm.target.clouds import CloudFamily
from portmm.target.target import clouds, described, instance, names

INSTANCES = {
    "c5.4xlarge": ("AWS", "c5"), "c7i-flex.large": ("AWS", "c7i-flex"), "m6g.metal": ("AWS", "m6g"),
    "c4.large": ("AWS", "c4"), "p6-b200.48xlarge": ("AWS", "p6-b200"), "r7iz.metal-16xl": ("AWS", "r7iz"),
    "n2-standard-8": ("Google", "n2"), "c4-highmem-16-lssd": ("Google", "c4"), "e2-medium": ("Google", "e2"),
    "n2-custom-4-8192": ("Google", "n2"), "Standard_D4s_v5": ("Azure", "Dsv5"), "D4s_v5": ("Azure", "Dsv5"),
    "Standard_E8-2as_v5": ("Azure", "Easv5"), "Standard_HB120rs_v3": ("Azure", "HBv3"),
    "Standard_F8s_v2": ("Azure", "Fsv2"),
    "a2-highgpu-1g": ("Google", "a2"), "a3-megagpu-8g": ("Google", "a3"), "a3-ultragpu-8g": ("Google", "a3-ultra"),
    "Standard_NC4as_T4_v3": ("Azure", "NCasT4_v3"), "Standard_NC24ads_A100_v4": ("Azure", "NC_A100_v4"),
    "Standard_ND96amsr_A100_v4": ("Azure", "NDm_A100_v4"), "Standard_ND96isr_H100_v5": ("Azure", "ND_H100_v5"),
    "Standard_HC44rs": ("Azure", "HC"), "m7a": ("AWS", "m7a"), "Dpsv6": ("Azure", "Dpsv6"),
}  # fmt: skip


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_has_a_family_and_is_a_target(name):
    found = instance(name)
    assert (found.cloud, found.name) == INSTANCES[name]
    assert described(name).name.replace("-", "_") == found.chips[-1]


def test_every_family_is_a_target_by_an_instance_of_it():
    spelled = {"AWS": "{}.large", "Google": "{}-standard-4"}
    for family in clouds():
        if family.cloud in spelled and " " not in family.name:
            name = f"{family.name}gpu-8g" if "-ultra" in family.name else spelled[family.cloud].format(family.name)
            assert instance(name) == family
            assert described(name).name == family.likeliest
    assert not any(instance(x) for x in (*names("chip"), *names("isa"), "sapphire-rapids", "tests/targets/tiny.toml"))


@pytest.mark.parametrize(
    "name", ["c99.large", "z3-standard-8", "Standard_Z4s_v5", "c5.", "c5.huge", "c5.4xlarge.x", "Standard_"]
)
def test_what_is_no_instance(name):
    assert instance(name) is None
    with pytest.raises(pm.TargetError, match="no target called"):
        described(name)


def test_a_name_of_two_clouds_is_refused():
    with pytest.raises(pm.TargetError, match=r"AWS and Google have families called 'c4': name an instance"):
        described("c4")


def test_explain_says_which_chips_an_instance_may_be():
    found = pm.explain((64, 64), (64, 64), target="c5.4xlarge")
    assert found.target.name == "cascade_lake"
    assert re.search("c5.4xlarge.* may be skylake_sp or cascade_lake; taken for cascade_lake", found.notes[0])
    assert "Amazon EC2" in found.summary()
    assert pm.explain((64, 64), (64, 64), target="p5.48xlarge").notes[0].startswith("p5.48xlarge (AWS) is h100")
    assert not pm.explain((64, 64), (64, 64), target="cascade-lake").notes


def test_the_command_line_takes_instances():
    run = CliRunner().invoke
    shown = " ".join(run(main.app, ["explain", "64", "64", "64", "--target", "c5.4xlarge"]).output.split())
    assert "skylake_sp or cascade_lake" in shown
    told = run(main.app, ["emit", "64", "64", "64", "--target", "c5.4xlarge"])
    assert "skylake_sp or cascade_lake" in told.stderr
    assert "skylake_sp or" not in told.stdout
    assert told.stdout == run(main.app, ["emit", "64", "64", "64", "--target", "cascade_lake"]).stdout
    assert "skylake_sp or cascade_lake" in " ".join(run(main.app, ["target", "c5.4xlarge"]).output.split())
    data = json.loads(run(main.app, ["target", "c5.4xlarge", "--json"]).stdout)
    assert (data["name"], data["chips"]) == ("cascade_lake", ["skylake_sp", "cascade_lake"])


def test_config_takes_instances(monkeypatch):
    own = target.load_target("x86_64_v1" if config.target().arch == "x86_64" else "armv8a")
    family = CloudFamily("AWS", "own1", (own.name,), "a test")
    monkeypatch.setattr(target, "clouds", lambda: (family,))
    monkeypatch.setattr(config, "_targets", {})
    with pm.config(target="own1.large"):
        assert config.target().name == own.name
        assert (pm.matmul(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)) == 3).all()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("zen44", "zen4"),
        ("sapphire", "sapphire_rapids"),
        ("AVX-512", "avx512"),
        ("Neoverse N1x", "neoverse_n1"),
        ("m7x", "m7a"),
    ],
)
def test_a_wrong_name_is_told_the_nearest(name, near):
    for ask in (described, lambda x: pm.explain((4, 4), (4, 4), target=x), lambda x: pm.config(target=x).__enter__()):
        with pytest.raises(pm.TargetError, match=rf"no target called '{name}'; did you mean .*{near}") as caught:
            ask(name)
        assert len(str(caught.value)) < 220


def test_a_name_like_no_other_is_told_where_all_are_listed():
    with pytest.raises(pm.TargetError, match=r"'qqqqqq'; `portmm targets` lists"):
        described("qqqqqq")
    with pytest.raises(pm.TargetError, match=r"no chip called 'zen44'; did you mean zen4"):
        target.load_target("zen44")
