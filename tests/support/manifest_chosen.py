"""The manifest's cases of a chip: what the cost model chooses, as described, of problems of all kinds.

Nothing is measured and no database of tuned schedules is read, so that every machine chooses alike.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from fused_cases import epilogues
from manifest_case import Case, few, on_device, on_host

from portmm.codegen.lower import lower, lower_grid
from portmm.dispatch import cpu_kernels, schedule_choice
from portmm.spec.dtype import BY_NAME, CODES_KR, types
from portmm.spec.problem import Family, Problem
from portmm.target.target import load_target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.nodes import Kernel
    from portmm.target.target import Target

SIZES = ((1, 4096, 4096), (4, 1024, 4096), (16, 4096, 1024), (64, 64, 64), (200, 768, 768), (1024, 1024, 1024))
WORDS = {
    "cpu": ("f32", "f64", "bf16", "f16-f16-f32", "u8-s8-s32", "s8-s8-s32", "f32-s8-f32", "f32-u4-f32", "bf16-u4-bf16"),
    "device": ("f32", "f16", "bf16", "f16-f16-f32", "s8-s8-s32", "e4m3-e4m3-bf16", "bf16-u4-bf16", "f64"),
}
LAYOUTS = (("row", "row", "row"), ("row", "col", "row"), ("col", "row", "row"), ("row", "row", "col"))
PACKED = ("row", "packed", "row")
MORE: dict[str, dict[str, Any]] = {
    "": {}, " batch": {"batch": 12}, " deterministic": {"deterministic": True},
    " fused": {"fused": str(epilogues()["plain"])},
}  # fmt: skip
THREADS = 4
GROUP = 32
MOST = 10
"""Problems of a chip."""


def cases(name: str) -> Iterator[Case]:
    """All cases of a chip."""
    target = load_target(name)
    layouts = LAYOUTS if target.device else (*LAYOUTS, PACKED)
    every = {
        f"{name} {word} {'x'.join(map(str, size))} {'.'.join(lie)}{label}": (word, size, lie, more)
        for word in WORDS["device" if target.device else "cpu"]
        for size, lie, (label, more) in product(SIZES, layouts, MORE.items())
        if (lie[2] == "row" or not more.get("fused")) and (types(word)[1] != "u4" or lie == layouts[0])
    }
    for named, (word, size, lie, more) in few(every, MOST).items():
        short = named.removeprefix(f"{name} ")
        a, b, c = lie
        p = Problem(*size, word, a=a, b=b, c=c, **more)
        if target.device:
            yield from on_device(short, target.device.language, _on_device, p, target)
        else:
            yield from on_host(short, _on_host, p, target)


def _on_host(p: Problem, target: Target) -> Kernel:
    """What is chosen of a CPU.

    Raises:
        ScheduleError: nothing is.
    """
    if p.types[1] == "u4":
        p = replace(p, b="codes", family=str(cpu_kernels.family_of_codes(target, GROUP)))
    elif p.b == "packed":
        p = replace(p, family=cpu_kernels.family(p.dtype, target))
    s = schedule_choice.choose(p, target, THREADS, tuned=False).schedule
    return lower(s, cpu_kernels.isa_of(s, target))


def _on_device(p: Problem, target: Target) -> tuple[GridKernel, ...]:
    """The same of a device, all operands being aligned to 16 bytes.

    Raises:
        ScheduleError: nothing is.
    """
    first, second, last = (16 // BY_NAME[x].bytes for x in p.types)
    if p.types[1] == "u4":
        p, second = replace(p, b="codes", family=str(Family("u4", 1, CODES_KR, group=GROUP))), GROUP
    s = schedule_choice.choose(p, target, vectors=(first, second, last), tuned=False).schedule
    return lower_grid(s, target.isa(s.isa))
