"""Sizes of cloud instances by their names, and the matrix of predictions."""

import csv
import io
import json
import xml.etree.ElementTree as ET

import pytest

import portmm as pm
from portmm.cli.clouds import TYPES, csv_of, rows_of, svg_of
from portmm.cli.main import app
from portmm.target.clouds import size_of
from portmm.target.target import instance, load_target


@pytest.mark.parametrize(
    ("name", "vcpus", "gib", "cores"),
    [
        ("c7g.4xlarge", 16, 32, 16),
        ("m7a.large", 2, 8, 2),
        ("c5.xlarge", 4, 8, 2),
        ("r6g.medium", 1, 8, 1),
        ("c5n.large", 2, 0, 1),
        ("c5.metal", 0, 0, 0),
        ("hpc7a.96xlarge", 0, 0, 0),
        ("n2-standard-8", 8, 32, 4),
        ("n1-highmem-4", 4, 26, 2),
        ("t2a-standard-1", 1, 4, 1),
        ("c2d-highcpu-8", 8, 0, 4),
        ("Standard_D4s_v5", 4, 16, 2),
        ("Standard_E8as_v5", 8, 64, 4),
        ("Standard_F16s_v2", 16, 32, 8),
        ("c7g", 0, 0, 0),
    ],
)
def test_what_a_name_says(name, vcpus, gib, cores):
    family = instance(name)
    size = size_of(name, family, arm=load_target(family.likeliest).arch == "aarch64")
    assert (size.vcpus, size.gib, size.cores) == (vcpus, gib, cores)
    assert (str(size) == "") == (not vcpus)


def test_explanations_are_for_the_cores_of_an_instance():
    one, many = (pm.explain((2048, 2048), (2048, 2048), target=x) for x in ("c7g.medium", "c7g.4xlarge"))
    assert (one.workers, many.workers) == (1, 16)
    assert "16 vCPUs, 16 cores, 32 GiB" in many.summary()
    assert many.seconds < one.seconds


def test_the_matrix_has_every_type_and_family(tmp_path, capsys):
    rows = rows_of(["c5", "m7a.large", "c7a", "c7g.xlarge"], lambda *_: None)
    assert [x.chip for x in rows] == ["cascade_lake", "zen4", "neoverse_v1"]
    assert rows[1].families == ("m7a.large", "c7a")
    assert all(x.rates[t] > 0 for x in rows for t in TYPES)
    lines = list(csv.DictReader(io.StringIO(csv_of(rows, rows[0].rates))))
    assert [x["family"] for x in lines] == ["c5", "m7a.large", "c7a", "c7g.xlarge"]
    assert {lines[0][f"{t} ratio"] for t in TYPES} == {"1.000"}
    assert ET.fromstring(svg_of(rows, rows[0].rates, "c5")).tag.endswith("svg")  # noqa: S314 - our own text
    words = [
        "clouds",
        "c5",
        "c7g",
        "--csv",
        str(tmp_path / "x.csv"),
        "--picture",
        str(tmp_path / "x.svg"),
        "--json",
        "--reference",
        "c5",
    ]
    app(words, standalone_mode=False)
    assert [x["chip"] for x in json.loads(capsys.readouterr().out)] == ["cascade_lake", "neoverse_v1"]
    assert (tmp_path / "x.csv").read_text().startswith("cloud,family,chips")
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    with pytest.raises(pm.PortmmError, match="no cloud instance"):
        app(["clouds", "nothing"], standalone_mode=False)
