"""Kernels of devices compile for every GPU with the registers that their schedules count on, and spill none."""

from __future__ import annotations

from functools import cache

import opencl_cpu
import passed
import pytest

from portmm.build.nvrtc import compile_cuda, find_nvrtc
from portmm.codegen.lower import lower_grid
from portmm.dispatch.machine import source
from portmm.dispatch.schedule_choice import choose
from portmm.errors import NoCompilerError
from portmm.schedule.legality import device_registers, shared_bytes
from portmm.schedule.program import asynchronous
from portmm.spec.epilogue import C, Fused, Operand, acc, load, number
from portmm.spec.expr import apply
from portmm.spec.problem import Problem
from portmm.target.device import PARTS
from portmm.target.target import load_target

pytestmark = pytest.mark.rest("NVRTC")

CHIPS = ("t4", "a100", "a10g", "l4", "h200", "b200", "rtx_pro_6000")
ENDING = str(
    Fused(
        (Operand("bf16", "n"), Operand("bf16", "bmn"), Operand("f32", "bmn")),
        ((C, apply("max", acc() + load(0, "bf16"), 0.0) * number(0) + load(1, "bf16")), (2, acc())),
    )
)
PROBLEMS = (
    (Problem(4096, 4096, 4096), (4, 4, 4)), (Problem(4096, 4096, 4096, b="col"), (4, 4, 4)),
    (Problem(1000, 1001, 1003), (1, 1, 1)), (Problem(64, 64, 8192, a="col"), (4, 4, 4)),
    (Problem(2048, 2048, 2048, "f64"), (2, 2, 2)), (Problem(4096, 4096, 4096, "f16", b="col"), (8, 8, 4)),
    (Problem(512, 512, 512, "bf16", fused=ENDING), (8, 8, 4)), (Problem(333, 500, 200, "f32-s8-f32"), (1, 4, 4)),
    (Problem(2048, 2048, 2048, "s8-s8-s32", b="col"), (16, 16, 4)),
    (Problem(512, 1024, 512, "u8-s8-s32"), (16, 4, 4)), (Problem(30, 20, 10, a="any", b="any", c="col"), (1, 1, 1)),
    (Problem(100, 100, 100, "s8-s8-s32", b="any"), (1, 1, 1)), (Problem(64, 1024, 16384, "f16", b="col"), (8, 8, 8)),
    (Problem(64, 1024, 4096, "bf16", 64, grouped=True), (8, 8, 8)),
    (Problem(256, 768, 768, "f32", 8, b="col", fused=ENDING, grouped=True), (4, 4, 4)),
)  # fmt: skip
COLD = 6.0
"""Seconds in which a kernel is compiled, at most, where other tests take their share of the machine."""


@cache
def nvrtc():
    try:
        return find_nvrtc()
    except NoCompilerError as error:
        opencl_cpu.missing(str(error))


def most_registers(s, target):
    """The registers that each thread can have with as many resident blocks as a schedule assumes."""
    device = target.device
    warps = -(-s.parallel.occupancy * s.threads // (PARTS * device.warp))
    return min(device.registers // PARTS // (warps * device.warp) // 8 * 8, device.thread_registers)


@pytest.mark.parametrize(("chip", "at"), [(x, i) for j, x in enumerate(CHIPS) for i in range(j % 3, len(PROBLEMS), 3)])
def test_what_is_chosen_compiles(chip, at):
    nvrtc()
    target, (p, vectors) = load_target(chip), PROBLEMS[at]
    s = choose(p, target, vectors=vectors).schedule
    assert s.a.asynchronous <= asynchronous(target)
    assert s.parallel.occupancy > 0
    for kernel in lower_grid(s, target.isa(s.isa)):
        text, architecture = source(kernel, "cuda"), target.device.architecture
        if passed.unchanged(text, kernel.name, architecture, s, passed.nvrtc()):
            continue
        made = compile_cuda(text, kernel.name, architecture)
        said = f"{kernel.name}: {made.registers} registers, {made.spills} bytes spilled, {made.seconds:.2f} s"
        print(f"{chip} {p}: {said}; {s}")
        assert made.spills == 0, (said, s)
        assert made.seconds < COLD, (said, s)
        if kernel.occupancy:
            assert made.registers <= most_registers(s, target), (said, device_registers(s), s)
            assert kernel.shared_bytes == shared_bytes(s), (said, s)
            assert made.shared <= (0 if kernel.dynamic else shared_bytes(s)), (said, s)
    assert f"__launch_bounds__({s.threads}, {s.parallel.occupancy})" in source(
        lower_grid(s, target.isa(s.isa))[0], "cuda"
    )
