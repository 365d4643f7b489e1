"""Machines that tests of kernels are for: instruction sets, those that this host has, small ones, and tools."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from portmm.host.detect import host_features
from portmm.target.target import load_isa, load_target, names_of

TINY = load_target(str(Path(__file__).with_name("targets") / "tiny.toml"))

SEVEN = replace(TINY, isas=tuple(replace(isa, registers=7) for isa in TINY.isas))
"""Six registers hold no tile beside three columns of B, which batched products would try."""

ISAS = tuple(name for name in names_of("cpu", "isa") if load_isa(name).base is None)
"""Instruction sets of CPUs that multiply f32 and f64; those that extend one of them add units of narrow types."""

EVERY_ISA = names_of("cpu", "isa")


def require(tool: str) -> str:
    """The path of a tool; without it the test is skipped, or failed where CI promises it."""
    found = shutil.which(tool)
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{tool} is not installed")
    return found


def runs_here(isa_name: str) -> bool:
    """The host has the instructions of an ISA."""
    return set(load_isa(isa_name).features) <= host_features()


HERE = [name for name in ISAS if runs_here(name)]


@functools.cache
def small(isa_name: str):
    """A machine with an ISA and caches so small that little products need many blocks."""
    isa = load_isa(isa_name)
    scale = 4 * isa.vector_bytes
    levels = tuple(replace(x, bytes=x.bytes * scale // 8) for x in TINY.levels)
    return replace(TINY, name=f"small_{isa_name}", arch=isa.arch, isas=(isa,), levels=levels, rates={})
