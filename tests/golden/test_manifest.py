"""The emitted text of every kind of kernel is the one that the manifest has digests of."""

from __future__ import annotations

import os
import subprocess
import sys

import manifest
import pytest
from places import HELPERS, LESSER

from portmm.schedule.programs import PROGRAMS

FEW = ("mma_sm89 cuda", "neon_bf16", "chip zen4", "chip h200")
"""Families of all sorts that are quickly made."""
ALIKE = ("rvv256", "rvv512", "sve128", "sve512", "simt opencl-cpu")
"""Families whose texts differ from another's by the lanes of a vector, or by what a chip is chosen for."""


def in_its_tier(family):
    return pytest.param(family, marks=pytest.mark.rest("another family has the same loops") if family in ALIKE else ())


@pytest.mark.parametrize("family", [*map(in_its_tier, manifest.FAMILIES)])
def test_emitted_text_is_that_of_the_manifest(family):
    found = manifest.compared({family: manifest.read().get(family, {})}, {family: manifest.digests(family)})
    assert not found, str(found)


def test_each_line_is_of_a_family():
    assert manifest.read().keys() == manifest.FAMILIES.keys()


def test_lines_are_in_order_and_few_enough():
    lines = manifest.FILE.read_text().splitlines()
    assert lines == sorted(set(lines))
    assert manifest.FILE.stat().st_size < 1_000_000


def test_every_program_has_cases():
    words = {word for cases in manifest.read().values() for case in cases for word in case.split()}
    assert words >= {*PROGRAMS, "attention", "rows", "columns", "lines", "pack", "fold", "peak"}


@pytest.mark.rest("takes long for what it finds")
@pytest.mark.parametrize("seed", ["1", "2"])
def test_no_digest_depends_on_the_process_or_the_machine(seed):
    """Other orders of sets; a machine with SSE only and one core, tuned schedules allowed, and a path of its own."""
    more = {"PYTHONHASHSEED": seed}
    if seed == "2":
        more |= {"PYTHONPATH": str(LESSER), "TESTS_HOST": "x86-64-v2", "TESTS_PROCESSORS": "1"}
        more |= {"PORTMM_TARGET": "x86-64-v2", "PORTMM_NUM_THREADS": "1"}
    environment = {name: x for name, x in os.environ.items() if name != "PORTMM_TUNED"} | more
    words = [sys.executable, HELPERS / "manifest.py", "--jobs", "1", *FEW]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "nothing has changed\n"


def test_a_comparison_names_what_differs():
    was = {"avx2": {"f32 gemm": "1", "rows a": "2", "gone": "3"}}
    now = {"avx2": {"f32 gemm": "1", "rows a": "4"}, "neon": {"f32 dot": "5"}}
    found = manifest.compared(was, now)
    assert (found.changed, found.appeared, found.vanished) == (["avx2: rows a"], ["neon: f32 dot"], ["avx2: gone"])
    text = str(found)
    assert "1 changed: 1 rows" in text
    assert "1 appeared: 1 dot" in text
    assert "1 vanished: 1 avx2" in text
    assert "python tests/support/manifest.py --write" in text


def test_a_comparison_names_no_more_than_can_be_read():
    now = {"avx2": {f"f32 gemm {i}": "1" for i in range(30)}}
    lines = str(manifest.compared({}, now)).splitlines()
    assert lines[0] == "30 appeared: 30 gemm"
    assert "  and 10 more" in lines
    assert len(lines) == 1 + manifest.SHOWN + 2


def test_the_file_reads_back(tmp_path):
    found = {"avx2": {"f32 gemm: x": "1", "b": "2"}, "chip a": {"c": "3"}}
    manifest.write(found, tmp_path / "file")
    assert manifest.read(tmp_path / "file") == found
