"""Schedules of devices: every candidate is legal, reads back, and gives each element of C to one thread."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grid_cases import MACHINE, OLDER
from grid_cover import counted

from portmm.codegen.lower import grid_atom, lower_grid
from portmm.dispatch.machine import described
from portmm.explanation.product import explained
from portmm.ir.index import const
from portmm.ir.interpreter import evaluate
from portmm.kernels.gpu.simt import Work
from portmm.runtime.backends import Facts
from portmm.schedule.candidates import candidates
from portmm.schedule.gpu_cost import cost
from portmm.schedule.legality import device_registers, illegal, occupancy, shared_bytes
from portmm.schedule.program import asynchronous, on_gpu
from portmm.schedule.text import parse, spell, varied
from portmm.spec import kernel_name
from portmm.spec.dtype import BY_NAME, accumulator
from portmm.spec.problem import Problem
from portmm.target.target import load_target, names_of

DEVICES = [MACHINE, OLDER, *map(load_target, names_of("device"))]
PROBLEMS = (
    (Problem(1000, 900, 700), (4, 4, 4)), (Problem(65, 33, 131, a="any", b="any", c="col"), (1, 1, 1)),
    (Problem(64, 64, 9000, a="col", b="col"), (4, 2, 2)), (Problem(3, 100, 2000, "f16", 5), (8, 8, 4)),
    (Problem(100, 100, 100, "f64"), (1, 1, 2)), (Problem(500, 80, 999, "s8-s8-s32", b="col"), (1, 16, 4)),
    (Problem(300, 300, 512, "s8-s8-s32", a="col"), (16, 4, 4)), (Problem(70, 70, 70, "f32-s8-f32"), (2, 4, 1)),
)  # fmt: skip


def every(target):
    for p, vectors in PROBLEMS:
        for s in candidates(p, target, vectors):
            yield p, vectors, s


@pytest.mark.thin(7)
@pytest.mark.parametrize("target", DEVICES, ids=lambda t: f"{t.name}-{t.device.architecture}")
def test_candidates_are_legal_and_read_back(target):
    seen = []
    for p, vectors, s in every(target):
        isa, device = target.isa(s.isa), target.device
        atom = grid_atom(isa, s)
        assert not illegal(s, p, isa, atom, target), s
        assert s.threads <= device.block_threads
        assert shared_bytes(s) <= device.shared_bytes
        held = occupancy(s, target) * s.threads
        assert not device.registers or device_registers(s) * held <= device.registers
        assert not device.threads or held <= device.threads
        assert s.parallel.occupancy in (0, occupancy(s, target))
        assert not s.a.asynchronous or asynchronous(target)
        assert on_gpu(target) or s.program != "simt"
        assert all(x <= y for x, y in zip(s.vectors, vectors, strict=True))
        assert parse(spell(s)) == s
        assert kernel_name.parse(str(s.name(atom))) == s.name(atom)
        assert cost(p, s, atom, target).seconds > 0
        seen.append((p, s))
    assert len(set(seen)) == len(seen)
    assert [(p, s) for p, _, s in every(target)] == seen


def shapes():
    """One schedule of every device for each way in which threads share out C, and what shared memory holds."""
    found = {}
    for target in DEVICES:
        for p, _, s in every(target):
            if s.program in ("simt", "direct"):
                kind = varied(s, split=min(s.parallel.split, 2), resident=0, copies=False, stages=1)
                found.setdefault((p.c, kind), (p, s, target.isa(s.isa)))
    return found.values()


def test_each_element_of_c_is_stored_once():
    done = set()
    for p, s, isa in shapes():
        key = (
            s.program,
            s.tiles[0],
            s.tiles[1].n,
            s.block.m,
            s.block.n,
            s.parallel.cell,
            s.parallel.split > 1,
            s.vectors[2],
        )
        if key in done:
            continue
        done.add(key)
        m, n, batch = s.block.m + 3, s.block.n + 2 * s.vectors[2] - (s.vectors[2] == 1), 2
        kernel = lower_grid(s, isa)[0]
        values = {"m": m, "n": n, "k": 5, "batch": batch, "c_m": n, "c_n": 1, "c_batch": m * n}
        root, dtype = ("work", accumulator(*s.types[:2])) if s.parallel.split > 1 else ("c", s.types[2])
        blocks, slices = (evaluate(x, values) for x in kernel.grid)
        grid = (slices, blocks, kernel.threads)
        times = counted(kernel.body, values, grid, root, slices * batch * m * n, BY_NAME[dtype].bytes)
        assert (times == 1).all(), (p, s)
    assert len(done) > 30


def test_each_word_of_a_tile_is_filled_once():
    done = set()
    for _, s, isa in shapes():
        key = (s.a.layout, s.b.layout, s.block, s.threads, s.atom.kr, s.vectors[:2])
        if s.program != "simt" or key in done:
            continue
        done.add(key)
        for name in "ab":
            transfer = Work(s, isa, grid_atom(isa, s)).transfer(name)
            times = counted(transfer.put(const(0)), {}, (1, 1, s.threads), f"{name}_tile", transfer.size, 4)
            assert (times == 1).all(), (name, s)
    assert len(done) > 30


def test_slices_are_added_by_one_thread_for_each_element():
    s = next(s for p, _, s in every(MACHINE) if s.parallel.split > 1 and p.batch == 1)
    kernel = lower_grid(s, MACHINE.isa(s.isa))[1]
    for m, n, batch in ((3, 5, 2), (2, 300, 1), (1, 128, 3)):
        values = {"m": m, "n": n, "batch": batch, "work_batch": m * n, "c_m": n, "c_n": 1, "c_batch": m * n}
        blocks, slices = (evaluate(x, values) for x in kernel.grid)
        times = counted(kernel.body, values, (slices, blocks, kernel.threads), "c", batch * m * n, 4)
        assert (times == 1).all()


def test_a_gpu_for_cuda_that_opencl_reaches_copies_at_once():
    facts = Facts(
        language="opencl", name="NVIDIA A100-SXM4-40GB", vendor="NVIDIA Corporation", kind="gpu", processors=108,
        warp=32, block_threads=1024, shared_bytes=49152, registers=65536, l2_bytes=0, memory_bytes=1 << 35,
        clock_ghz=1.4, bandwidth_gbs=0.0, architecture="", extensions=(), driver="", shared_most=49152,
    )  # fmt: skip
    target = described(facts)
    found = candidates(Problem(4096, 4096, 4096), target, (4, 4, 4))
    assert target.name == "a100"
    assert not any(s.a.asynchronous or s.parallel.occupancy for s in found)


def test_opencl_has_no_units_for_fragments():
    """A GPU for CUDA may be reached through OpenCL."""
    target = load_target("h200")
    spoken = replace(target, device=replace(target.device, language="opencl"))
    p = Problem(4096, 4096, 4096, "bf16", b="col")
    assert {s.program for s in candidates(p, target, (8, 8, 8))} >= {"mma", "wgmma"}
    assert {s.program for s in candidates(p, spoken, (8, 8, 8))} == {"simt", "direct"}
    assert "portmm_simt" in explained(p, target, "opencl").source
