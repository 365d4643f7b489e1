"""Imports go down: each module stands on a floor and imports nothing above it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

# By module, or by package for all in it; "." is portmm/__init__.py.
FLOORS = {
    # what is computed
    0: "abi array_class coords dtype errors expr forks formats frames fused memory naming problem quantized "
    "row_classes targets tensorfile vecmath version vocabulary",
    1: "capable clouds grid_target isa lanes levels schema summation target",  # what it runs on
    # legal tiles and predicted time
    2: "attention_tiling candidate_sets candidates cost cost_columns cost_table cost_tape cost_terms grid_candidates "
    "grid_codes grid_cost grid_matrix grid_stream grid_warpgroup "
    "matrix_attention_tiling schedule space textbook",
    3: "grid index interp ir kernels lower probe threads",  # loops and their meaning
    4: "emit",  # loops to text
    5: "build busy cache calibrate child compiler detect elf eviction failures gauge nvrtc permission sealed snapshot "
    "tempdirs trusted",  # the host: compile, look, measure
    6: "run",  # load, launch, threads
    7: "choice dispatch grid_dispatch grid_rows_dispatch orders selection tuned",  # a problem to a ready plan
    # for users
    8: ". abreast api around around_device arrays attend attend_on_device axes builder builder_on_device call "
    "captures chosen cli comparison console device_arrays device_codes doctor explanation expressions fallback "
    "flash folded cli_report "
    "folds foreign fusing graph grid_explanation grouped grouped_on_device heads launching launching_on_device names "
    "on_device packed packed_device places pose probe_command program program_on_device quick relaid rows "
    "rows_on_device scaled scaled_on_device scaled_vectors tuned_command "
    "scratch settings show splitter steady stored surroundings trace tune_command tuning typed value warm whole "
    "wording",
}
FLOOR_OF = {name.strip("."): floor for floor, names in FLOORS.items() for name in names.split()}

SLOW_PACKAGES = (
    "torch cupy pyopencl cffi rich typer cpuinfo platformdirs matplotlib subprocess tempfile multiprocessing"
)


def floor(module):
    """The floor of a module named relative to portmm, or None."""
    parts = module.split(".")
    return next((FLOOR_OF[n] for n in (module, parts[0]) if n in FLOOR_OF), None)


def imported(tree, module, *, package):
    """The imports that a module makes of portmm, each name as long as the syntax allows."""
    here = ["portmm", *module.split(".")] if module else ["portmm"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - (1 if package else 0)
            base = here[: len(here) - up] if node.level else []
            prefix = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*prefix, alias.name]) for alias in node.names)


def resolve(name, known):
    """The known module that an imported name lies in, or None outside portmm."""
    if name != "portmm" and not name.startswith("portmm."):
        return None
    module = name.removeprefix("portmm").removeprefix(".")
    while module not in known:
        module = module.rpartition(".")[0]
    return module


def edges(sources):
    """(importer, imported) pairs; `sources` maps a module to its text and whether it is a package."""
    for module, (text, package) in sources.items():
        for name in imported(ast.parse(text), module, package=package):
            target = resolve(name, sources)
            if target is not None and target != module:
                yield module, target


def cycle(graph):
    """A cycle as a list of modules, or None; `graph` maps a module to what it imports."""
    done = set()

    def visit(module, trail):
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return None
        found = next(filter(None, (visit(m, [*trail, module]) for m in sorted(graph.get(module, ())))), None)
        done.add(module)
        return found

    return next(filter(None, (visit(m, []) for m in sorted(graph))), None)


def faults(sources):
    """Faults of the imports, as sentences."""
    homeless = sorted(m for m in sources if floor(m) is None)
    if homeless:
        return [f"portmm.{m} has no floor: give it one in FLOORS and in its docstring" for m in homeless]
    pairs = set(edges(sources))
    found = [
        f"portmm.{a} (floor {floor(a)}) imports portmm.{b} (floor {floor(b)}): imports only go down"
        for a, b in sorted(pairs)
        if floor(a) < floor(b)
    ]
    level = {}
    for a, b in pairs:
        if floor(a) == floor(b):
            level.setdefault(a, set()).add(b)
    around = cycle(level)
    return found + ([f"import cycle: {' -> '.join(around)}"] if around else [])


def installed():
    """All modules of portmm; kernels and targets may lie elsewhere than the package."""
    sources = {}
    for package in ("", "kernels", "targets"):
        dotted = f"portmm.{package}".rstrip(".")
        root = Path(importlib.import_module(dotted).__file__).parent
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join(filter(None, (package, *parts[: len(parts) - is_package])))
            sources[module] = path.read_text(), is_package
    return sources


def test_imports_only_go_down():
    sources = installed()
    assert {"", "target", "kernels", "emit", "build"} <= set(sources)
    found = faults(sources)
    assert not found, "\n".join(found)


def toy(**texts):
    return {"": ("", True), **{m.replace("_", "."): (t, m in {"run", "emit"}) for m, t in texts.items()}}


TOYS = {
    "down": (toy(ir="import portmm.target", target="from portmm import dtype", dtype=""), ""),
    "level": (toy(ir="from portmm.lower import f", lower="", dtype="import os, numpy.linalg"), ""),
    "up": (toy(dtype="from portmm.target import Atom", target=""), "portmm.dtype (floor 0) imports portmm.target"),
    "up by the root": (toy(dtype="from portmm import api", api=""), "portmm.dtype (floor 0) imports portmm.api"),
    "an attribute of the root": (toy(ir="from portmm import matmul"), "imports portmm. (floor 8)"),
    "up, inside a function": (toy(ir="def f():\n  import portmm.build", build=""), "portmm.ir (floor 3)"),
    "up, relative": (toy(emit="", emit_c="from ..run import host", run="", run_host=""), "portmm.emit.c (floor 4)"),
    "up, relative to a package": (toy(emit="from .. import run", run=""), "portmm.emit (floor 4)"),
    "a cycle": (toy(ir="import portmm.lower", lower="from portmm.ir import x"), "import cycle: ir -> lower -> ir"),
    "unknown": (toy(attic=""), "portmm.attic has no floor"),
}


@pytest.mark.parametrize(("sources", "words"), TOYS.values(), ids=TOYS.keys())
def test_the_rule_itself(sources, words):
    found = faults(sources)
    assert len(found) == bool(words), found
    assert words in "".join(found)


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
"""


def test_import_does_no_work():
    """It starts nothing, writes nothing, and loads nothing slow that NumPy has not loaded."""
    done = subprocess.run([sys.executable, "-B", "-c", IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
