"""Kernels of devices with one thing wrong, made from right ones: what checks them must see it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import cuda_shim
import grid_cases
import opencl_cpu
import pytest
from cuda_shim import ShimError
from grid_cases import MACHINE, call, in_shim, kernels_of
from test_grid_kernels import BY_K, ROWS, posed

from portmm.dispatch.machine import source
from portmm.ir.index import Index
from portmm.ir.nodes import For, If
from portmm.ir.thread_nodes import Barrier, CopyCommit, CopyWait, Vector
from portmm.schedule.candidates import candidates
from portmm.schedule.text import flat, varied

pytestmark = pytest.mark.rest("of the shim itself")

SIZE = (20, 18, 100)


def changed(body, change):
    """Statements, each replaced by what `change` gives for it: several, or none."""
    found = []
    for x in body:
        for y in change(x):
            if isinstance(y, For):
                y = replace(y, body=changed(y.body, change))  # noqa: PLW2901
            elif isinstance(y, If):
                y = replace(y, then=changed(y.then, change), orelse=changed(y.orelse, change))  # noqa: PLW2901
            found.append(y)
    return tuple(found)


def without(kind, which=0):
    """A kernel that lacks the statement of a kind that comes `which`-th."""
    seen = []

    def change(x):
        seen.extend([x] if isinstance(x, kind) else [])
        return () if isinstance(x, kind) and len(seen) == which + 1 else (x,)

    return change


def impatient(x):
    """Wait for one group of copies too few."""
    return (replace(x, pending=x.pending + 1),) if isinstance(x, CopyWait) else (x,)


def straight(x):
    """Tiles are read where rows would be without a swizzle."""
    if not (isinstance(x, Vector) and x.to.name == "a_part"):
        return (x,)
    return (replace(x, src=replace(x.src, offset=_plain(x.src.offset))),)


def _plain(x):
    if x.op in ("const", "var"):
        return x
    return _plain(x.args[0]) if x.op == "^" else Index(x.op, tuple(map(_plain, x.args)))


def of_two_warps(layouts=ROWS, size=SIZE, dtype="f32", machine=MACHINE, mr=0, **wanted):
    """A schedule with 64 threads: those of one warp may meet without a barrier, as the shim runs them."""
    found = candidates(posed(dtype, layouts, (4, 4, 4), size), machine, (4, 4, 4))
    return next(
        s for s in reversed(found)
        if (s.program, s.threads, s.parallel.split) == ("simt", 64, 1)
        and s.mr == (mr or s.mr) and wanted.items() <= flat(s).items()
    )  # fmt: skip


def outcome(s, change):
    """The shim's complaint about a changed kernel, or that its result is wrong, or an empty string."""
    (kernel,) = kernels_of(s)
    kernel = replace(kernel, body=changed(kernel.body, change))
    k = grid_cases.case(posed("f32", (s.a.layout, s.b.layout, "row"), s.vectors, SIZE, 2), s.vectors)
    code = cuda_shim.compile(source(kernel, "cuda"), kernel.name)
    try:
        found = in_shim(call([kernel], s, k), [code])
    except ShimError as error:
        return str(error)
    try:
        k.check(found[0])
    except AssertionError:
        return "wrong"
    return ""


TWO = of_two_warps(mr=2, stages=2)
ONE = varied(TWO, stages=1)
ROOMY = replace(MACHINE, device=replace(MACHINE.device, shared_bytes=16384, processor_shared_bytes=32768))
"""Three stages of 64 threads and the totals of their runs of k are more than the tiny device's shared memory."""
COPIES = of_two_warps(machine=ROOMY, copies=True)
CASES = {
    "no barrier before tiles are used": (TWO, partial(without, Barrier, 0), "race in shared memory"),
    "no barrier between steps": (TWO, partial(without, Barrier, 1), "race in shared memory"),
    "one stage, no barrier before it is filled": (ONE, partial(without, Barrier, 0), "race in shared memory"),
    "one stage, no barrier before it is used": (ONE, partial(without, Barrier, 1), "race in shared memory"),
    "copies without a barrier": (COPIES, partial(without, Barrier), "race in shared memory"),
    "one group of copies too few": (COPIES, lambda: impatient, "a copy_async still fills"),
    "no wait for copies": (COPIES, partial(without, CopyWait), "a copy_async still fills"),
    "groups are not closed": (COPIES, partial(without, CopyCommit), "a copy_async still fills"),
    "a swizzle on one side": (of_two_warps(BY_K, (64, 64, 64), copies=False, mr=4), lambda: straight, "wrong"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_shim_catches(name):
    s, change, said = CASES[name]
    assert said in outcome(s, change())


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_is_whole_passes(stages):
    s = {1: ONE, 2: TWO, 3: COPIES}[stages]
    assert outcome(s, lambda x: (x,)) == ""


# -- races under OpenCL ------------------------------------------------------------


def oclgrind(kernel, s, folder):
    """The output of oclgrind for a kernel, run on a small product."""
    tool = shutil.which("oclgrind-kernel")
    if not tool:
        opencl_cpu.missing("oclgrind is not installed")
    k = grid_cases.case(posed(s.dtype, (s.a.layout, s.b.layout, "row"), s.vectors, (9, 11, 40)), s.vectors)
    (Path(folder) / "kernel.cl").write_text(source(kernel, "opencl"))
    (Path(folder) / "kernel.sim").write_text(simulation(kernel, s, k))
    done = subprocess.run(
        [tool, "--data-races", "--build-options", "-cl-std=CL1.2", "kernel.sim"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def simulation(kernel, s, k):
    """A file that says what oclgrind launches."""
    c = call([kernel], s, k)
    (launch,) = c.launches
    lines = ["kernel.cl", kernel.name, f"{launch.grid[0] * kernel.threads} {launch.grid[1]} 1", f"{kernel.threads} 1 1"]
    for kind, value in launch.arguments:
        if kind == "pointer":
            x, at = c.memory[value]
            lines += [f"<size={-(-x.nbytes // 4) * 4} fill=1 float>", "<size=8 long>", str(at)]
        else:
            lines += ["<size=4 int>" if kind == "int" else "<size=8 long>", str(value)]
    return "\n".join(lines) + "\n"


WHOLE = {
    "two stages": TWO,
    "one stage": ONE,
    "slices of k": varied(TWO, split=2),
    "halves along k": of_two_warps(BY_K, dtype="f16", mr=2),
    "woven bytes": of_two_warps(dtype="s8-s8-s32", mr=1),
}


@pytest.mark.parametrize("name", WHOLE)
def test_oclgrind_sees_no_race(name, tmp_path):
    for kernel in kernels_of(WHOLE[name])[:1]:
        assert oclgrind(kernel, WHOLE[name], tmp_path) == ""


@pytest.mark.parametrize("name", ["no barrier before tiles are used", "one stage, no barrier before it is filled"])
def test_oclgrind_sees_a_race(name, tmp_path):
    s, change, _ = CASES[name]
    (kernel,) = kernels_of(s)
    said = oclgrind(replace(kernel, body=changed(kernel.body, change())), s, tmp_path)
    assert "data race at local memory" in said
