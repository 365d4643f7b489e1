"""Shared objects that are cut short, or lack what is wanted of them, are told before they are mapped."""

from __future__ import annotations

import subprocess
import sys

import pytest
from build_compilers import SOURCE

from portmm.build import cache, cache_contents, elf
from portmm.build.shared_object import build
from portmm.errors import BuildError
from portmm.runtime import cpu as cpu_runtime

pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture
def code(real):  # noqa: ARG001 - there is a compiler
    return build(SOURCE, flags=()).code


def test_a_sound_object(code):
    assert elf.fault(code) == elf.fault(code, symbols=("answer",)) == ""
    assert "does not define question" in elf.fault(code, symbols=("answer", "question"))
    assert "ELF machine" in elf.fault(code, machine=1)


def test_every_truncation_is_told(code):
    told = [elf.fault(code[:n]) for n in range(0, len(code), 7)]
    assert all(told)


def test_random_bytes_raise_nothing(code):
    import random

    rng = random.Random(3)  # noqa: S311
    for _ in range(3000):
        spoilt = bytearray(code)
        for _ in range(rng.randint(1, 8)):
            spoilt[rng.randrange(512 if rng.random() < 0.5 else len(code))] = rng.randrange(256)
        elf.fault(bytes(spoilt), symbols=("answer",))


TRUNCATING = """#!/bin/sh
{real} "$@" || exit
case "$*" in *-shared*)
  for last; do :; done
  size=$(stat -c %s "$last")
  head -c $((size {less})) "$last" > "$last.part" && mv "$last.part" "$last"
esac
"""


@pytest.mark.parametrize("less", ["- 8", "/ 2", "/ 4"])
def test_a_compiler_that_leaves_half_an_object(tmp_path, monkeypatch, real, less):
    """It ended well, and what it left would end the process that maps it."""
    import shlex

    program = tmp_path / "cc"
    program.write_text(TRUNCATING.format(real=shlex.join(real), less=less))
    program.chmod(0o700)
    monkeypatch.setenv("CC", str(program))
    with pytest.raises(BuildError, match="cut short"):
        build(SOURCE, flags=())
    assert cache_contents.cache_entries() == []


@pytest.mark.parametrize("less", ["- 8", "/ 2"])
def test_a_product_with_such_a_compiler(tmp_path, monkeypatch, real, less):
    """The process lives, warns, and computes."""
    import shlex

    program = tmp_path / "cc"
    program.write_text(TRUNCATING.format(real=shlex.join(real), less=less))
    program.chmod(0o700)
    monkeypatch.setenv("CC", str(program))
    script = (
        "import warnings, numpy as np, portmm as pm\n"
        "warnings.simplefilter('error')\n"
        "warnings.filterwarnings('always', message='portmm computes with NumPy')\n"
        "a = np.ones((5, 7), np.float32)\n"
        "assert (pm.matmul(a, a.T) == 7).all()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stderr.count("portmm computes with NumPy") == 1


def test_an_object_without_the_wanted_function(fake):
    with pytest.raises(BuildError, match="does not define question"):
        build(SOURCE, flags=(), symbols=("question",))
    assert cache_contents.cache_entries() == []
    assert len(fake.runs()) == 1


@pytest.mark.usefixtures("fake")
def test_an_extension_without_its_entry_point(monkeypatch):
    monkeypatch.setattr(cpu_runtime, "source", lambda **_: SOURCE)
    with pytest.raises(BuildError, match="does not define PyInit"):
        cpu_runtime.load_extension()


@pytest.mark.usefixtures("fake")
def test_an_extension_in_the_cache_without_its_entry_point():
    """Kept by an earlier version that did not look."""
    artifact = build(SOURCE, flags=())
    with pytest.raises(BuildError, match="cannot be loaded"):
        cpu_runtime.load_extension(artifact.code, artifact.path)


def test_a_truncated_entry_with_a_matching_sum_is_built_again(fake):
    """As an earlier version kept it: sound by its SHA-256."""
    path = build(SOURCE, flags=()).path
    code, manifest = path.read_bytes(), path.with_suffix(".txt").read_text()
    cut = code[: len(code) // 2]
    path.write_bytes(cut)
    path.with_suffix(".txt").write_text(manifest.replace(cache.digest(code), cache.digest(cut)))
    again = build(SOURCE, flags=())
    assert not again.cached
    assert again.path.read_bytes() == code
    assert len(fake.runs()) == 2


def test_an_entry_under_another_key_is_none(fake):
    """Whoever can rename files must not choose which code runs."""
    first, other = build(SOURCE, flags=()), build(SOURCE.replace("42", "43"), flags=())
    for suffix in (".so", ".txt"):
        first.path.with_suffix(suffix).rename(other.path.with_suffix(suffix))
    again = build(SOURCE.replace("42", "43"), flags=())
    assert not again.cached
    assert again.path.read_bytes() == other.code != first.code
    assert len(fake.runs()) == 3
