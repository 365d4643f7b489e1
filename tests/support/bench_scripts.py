"""The scripts of bench/ as modules, which import one another, and a device for them that is emulated."""

from __future__ import annotations

import importlib
import sys

import bench_arrays
import cuda_fakes
import emulated_cuda
from places import BENCH

MODULES = (
    "gpu_arrays", "gpu_cases", "gpu_run", "gpu_peers", "gpu_families", "gpu_measure", "gpu_schedules", "gpu_compile",
    "gpu_tools", "gpu_load", "gpu_fit", "gpu", "lease_plan", "lease", "profile_one",
)  # fmt: skip


def modules(monkeypatch):
    """All of them, fresh, for one test."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield type("Bench", (), {name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def script(name):
    """One of them, the same module for all tests."""
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    return importlib.import_module(name)


def device(bench, monkeypatch):
    """Arrays of an emulated device with a small cache, and turns of one call."""
    monkeypatch.setattr(cuda_fakes, "PROPERTIES", cuda_fakes.PROPERTIES | {"l2CacheSize": 1 << 12})
    quick = {"MOST_CALLS": 1, "WARM": 0, "FIRST_GRAPH": 1, "MOST_GRAPH": 2, "SUSTAINED": 0.01}
    for name, value in quick.items():
        monkeypatch.setattr(bench.gpu_measure, name, value)
    for name in ("ROUNDS", "MANY"):
        monkeypatch.setattr(bench.gpu_schedules, name, 1)
    return bench_arrays.Emulated(emulated_cuda.install(monkeypatch))


def jobs(*names, **more):
    """Jobs of workers that stand in for those of `gpu.py`."""
    return [{"name": name, "do": "measure", "case": {"m": 1}, **more} for name in names]
