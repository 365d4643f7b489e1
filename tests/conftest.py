"""Fixtures for all tests: a kernel cache of their own, and the public functions as a new process has them."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import cover
import emulated_cuda
import opencl_cpu
import pytest
import tiers
from build_compilers import fake_compiler

from portmm.arrays import numpy_fallback
from portmm.build import cache, compiler, failed_builds
from portmm.build.compiler import find_compiler
from portmm.dispatch import config as settings
from portmm.dispatch import cpu_background, cpu_kernels, missing
from portmm.ops import host_matmul
from portmm.runtime import cpu as cpu_runtime
from portmm.util import memo


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ instead of comparing")
    parser.addoption("--record", action="store_true", help="write the runs of kernels that passed to passed.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's cache, and all tuned schedules, out of tests, from before the first test module's import.

    Workers have the cache of the process that started them: what one has compiled, the others find.
    """
    os.environ["PORTMM_TUNED"] = "off"
    os.environ["PORTMM_RACE"] = "off"  # tests of races set it
    config.pluginmanager.register(tiers.Tiers(config))
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Reports(config))
    kept = os.environ.get("PORTMM_TEST_CACHE", "")
    folder = kept or tempfile.mkdtemp(prefix="portmm-tests-")
    os.environ["PORTMM_CACHE"] = folder
    icd = opencl_cpu.announce()
    for made in filter(None, (icd, "" if kept else folder)):
        config.add_cleanup(partial(shutil.rmtree, made, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Tests make many short-lived nodes beside all modules and tests, which no collection needs to look at again."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class Reports:
    """Prints each failure as it happens, with its name and the line that failed; tracebacks come at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.plugins.get_plugin("terminalreporter")
        if not report.failed or terminal is None:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (crash.message if crash else str(report.longrepr).strip()).partition("\n")[0]
        terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {why}", red=True)


@pytest.fixture(scope="module", autouse=True)
def _quickly(request):
    """Modules with QUICKLY = True test calls, not optimised kernels: build theirs without optimisation.

    Those with QUICKLY = "fast" do so in the fast tier only. Kernels of both kinds round differently, so that none is
    remembered beside the others.
    """
    quickly = getattr(request.module, "QUICKLY", False)
    if not quickly or cover.ALL or quickly not in (True, cover.TIER):
        yield
        return
    words, place = compiler._BASE, Path(os.environ["PORTMM_CACHE"])
    quick = place / "quickly"
    quick.mkdir(mode=0o700, exist_ok=True)
    compiler._BASE = cover.unoptimised(words)
    os.environ["PORTMM_CACHE"] = str(quick)
    cpu_kernels.forget()
    yield
    compiler._BASE = words
    os.environ["PORTMM_CACHE"] = str(place)
    cpu_kernels.forget()


@pytest.fixture(scope="module", autouse=True)
def _anew():
    """The run time is one per process, and the tests of it register resolvers of their own."""
    host_matmul.fast = host_matmul._start
    host_matmul._state.clear()
    numpy_fallback.forget()
    missing.forget()
    cpu_runtime.forget_refusal()
    settings._listeners.clear()
    settings.set_num_threads(0)
    yield
    settings.set_num_threads(0)


@pytest.fixture(autouse=True)
def _built(monkeypatch):
    """Background builds of a test end under the settings of that test."""
    del monkeypatch  # undone after this
    yield
    cpu_background.wait()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered from another test."""
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    compiler._find.cache_clear()
    failed_builds.forget()
    yield
    compiler._find.cache_clear()


@pytest.fixture
def real(monkeypatch, tmp_path):
    """The command of the compiler that this machine has; the test's cache stays untouched."""
    with monkeypatch.context() as aside:
        aside.setenv("PORTMM_CACHE", str(tmp_path / "aside"))
        found = find_compiler()
    compiler._find.cache_clear()
    # Behind a script zig cannot be told from clang, so it gets its own options here.
    extra = ("-target", f"{found.arch}-linux-gnu", "-g0") if found.kind == "zig" else ()
    return (*found.argv, *extra)


@pytest.fixture
def fake(tmp_path, monkeypatch, real):
    made = fake_compiler(tmp_path / "bin", real)
    monkeypatch.setenv("CC", str(made.path))
    return made


@pytest.fixture
def cupy(monkeypatch):
    """An emulated device of CUDA, of whose kernels nothing is remembered."""
    memo.forget_all()
    yield emulated_cuda.install(monkeypatch)
    memo.forget_all()


@pytest.fixture(params=["opencl", "cuda"])
def on(request, monkeypatch):
    """A device: OpenCL's on a CPU, or an emulated one of CUDA."""
    memo.forget_all()
    yield opencl_cpu.OpenCl() if request.param == "opencl" else emulated_cuda.install(monkeypatch)
    memo.forget_all()


@pytest.fixture
def fresh_torch():
    """PyTorch as at the start of a process: its seed, gradients, which a peer of comparisons turns off, and graphs."""
    import torch

    from portmm.torch import backend

    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch._dynamo.reset()
    backend._graphs.clear()
    yield
    torch._dynamo.reset()
