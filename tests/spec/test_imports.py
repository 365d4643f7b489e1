"""Imports go down the layers of pyproject.toml, and `import portmm` does no work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from places import ROOT

import portmm

TOP = {"__init__", "__main__", "errors", "version"}
SLOW_PACKAGES = (
    "torch cupy pyopencl cffi rich typer cpuinfo platformdirs matplotlib subprocess tempfile multiprocessing"
)
MOST_MODULES = 42
"""Modules that `import portmm` loads, of 0.1 to 1 ms each; what a product from the cache does not need comes later."""
MORE_MODULES = 25
"""Modules that a wheel with kernels loads in addition, for its first products, layers, attention and fused rows."""


def test_imports_keep_the_contracts():
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    words = [sys.executable, "-c", linter, "--config", ROOT / "pyproject.toml", "--no-logo", "--no-cache"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT / "tests")
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_live_in_packages():
    assert {path.stem for path in Path(portmm.__file__).parent.glob("*.py")} == TOP


def test_a_checkout_can_be_imported():
    code = "import portmm; from portmm.kernels.cpu import gemm; print(portmm.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == str(ROOT / "portmm" / "__init__.py"), done.stderr


IMPORT = f"""
import sys
import numpy
import os
before = set(sys.modules)
tasks = len(os.listdir("/proc/self/task"))  # NumPy's BLAS has threads of its own
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
events = []
def audit(event, args):
    if event == "open" and (args[2] or 0) & writing:
        events.append((event, args[0]))
    if event.startswith(("subprocess.", "os.fork", "os.posix_spawn", "os.exec", "ctypes.dlopen", "_thread.start")):
        events.append((event, args))
sys.addaudithook(audit)
import portmm
import threading
assert not events, events
assert threading.active_count() == 1
assert len(os.listdir("/proc/self/task")) == tasks
slow = sorted(set({SLOW_PACKAGES!r}.split()) & (set(sys.modules) - before))
assert not slow, slow
loaded = sorted(x for x in sys.modules if x.partition(".")[0] == "portmm")
assert len(loaded) <= {MOST_MODULES}, loaded
"""


def test_import_does_no_work():
    """It starts nothing, writes nothing, and loads nothing slow that NumPy has not loaded."""
    done = subprocess.run([sys.executable, "-B", "-c", IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_wheel_with_kernels_loads_what_their_first_calls_take(tmp_path):
    package = tmp_path / "portmm"
    (package / "base").mkdir(parents=True)
    for path in Path(portmm.__file__).parent.iterdir():
        if path.name not in ("base", "__pycache__"):
            (package / path.name).symlink_to(path)
    code = IMPORT.replace(f"<= {MOST_MODULES}", f"<= {MOST_MODULES + MORE_MODULES}")
    code += "before = set(sys.modules)\nportmm.attention, portmm.linear, portmm.fuse, portmm.softmax\n"
    code += "assert set(sys.modules) == before\n"
    words = [sys.executable, "-P", "-B", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
