"""Explanations of schedules that were selected for a device.

Owns the record that `explain` returns for devices. Nothing is compiled, and no device is needed: operands are then
assumed contiguous and aligned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portmm.arrays import grid_call
from portmm.codegen.lower import lower_grid
from portmm.dispatch.machine import machine_of, source
from portmm.dispatch.schedule_choice import choose
from portmm.explanation.summary import Selected
from portmm.ops.grid_product import adopted, question
from portmm.schedule.legality import device_registers, occupancy, shared_bytes
from portmm.schedule.program import VECTOR_BYTES
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.spec.problem import Problem
    from portmm.target.target import Target


@dataclass(frozen=True, slots=True)
class GridExplanation(Selected):
    """An explanation of a problem's kernels on a device: schedule, prediction, source. `print` it.

    Attributes:
        choice: the problem, the target, the selected schedule and the runners-up.
        kernels: in the order in which they run.
        language: "cuda" or "opencl".
        notes: further remarks.
    """

    kernels: tuple[GridKernel, ...]
    language: str
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The source of the kernels, one after the other."""
        return "\n".join(source(x, self.language) for x in self.kernels)

    @property
    def artifact(self) -> Any:
        """The first kernel, compiled by NVRTC: a `Cubin`.

        Raises:
            ScheduleError: only a device's driver compiles its language.
            NoCompilerError: there is no NVRTC.
            BuildError: NVRTC failed.
        """
        from portmm.build.nvrtc import compile_cuda
        from portmm.errors import ScheduleError

        device = self.target.device
        if self.language != "cuda" or device is None or not device.architecture:
            raise ScheduleError(f"{self.language} for {self.target.name} is compiled by the driver of the device")
        kernel = self.kernels[0]
        return compile_cuda(source(kernel, "cuda"), kernel.name, device.architecture)

    def _data(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"language": self.language}, {"kernels": [x.name for x in self.kernels]}

    def _shown(self) -> tuple[str, dict[str, Any]]:
        s = self.schedule
        return "gpu.txt", {
            "device": self.target.device, "registers": device_registers(s), "blocks": occupancy(s, self.target),
            "shared": shared_bytes(s),
        }  # fmt: skip


def of_arrays(a: Any, b: Any, out: Any, epilogue: Any, *, grouped: bool = False) -> GridExplanation:
    """The explanation for arrays on a device, with their device and layouts.

    Raises:
        TypeError: one of them is in the host's memory.
        ValueError: the product is empty.
    """
    x = adopted(a, b, out)
    call, notes = question(replace(x, ends=x.a) if grouped else x, epilogue)
    p, vectors = call.problem, call.vectors
    if not p.flops:
        raise ValueError(f"{p} has nothing to multiply, so no kernel is needed")
    on = machine_of(x.a)
    if call.outer is None:
        once = "".join(side for side in "ab" if not call.values[f"{side}_batch"])
        sides, seconds = grid_call.faster(p, on.target, vectors, once)
        notes += grid_call.copy_notes(p, sides, seconds)
        p, vectors = grid_call.after_copies(p, sides), grid_call.vectors_after_copies(p, vectors, sides)
    return explained(p, on.target, on.language, notes, vectors)


def explained(
    p: Problem, target: Target, language: str = "", notes: tuple[str, ...] = (),
    moved: tuple[int, int, int] | None = None,
) -> GridExplanation:  # fmt: skip
    """The explanation for a problem on a device.

    Raises:
        ScheduleError: the device has no schedule for the problem.
    """
    assert target.device is not None  # noqa: S101 - checked by `explain`
    language = language or target.device.language
    target = replace(target, device=replace(target.device, language=language))
    choice = choose(p, target, vectors=moved or vectors(p))
    isa = target.isa(choice.schedule.isa)
    assert isa is not None  # noqa: S101 - candidates are the target's
    return GridExplanation(choice, lower_grid(choice.schedule, isa), language, notes)


def vectors(p: Problem) -> tuple[int, int, int]:
    """Elements of a vector access to A, B and C, for contiguous and aligned operands."""
    near = {"a": {"row": p.k, "col": p.m}, "b": {"row": p.n, "col": p.k}, "c": {"row": p.n}}
    sides = zip("abc", (p.a, p.b, p.c), p.types, strict=True)
    return tuple(math.gcd(near[x].get(at, 1), VECTOR_BYTES // BY_NAME[t].bytes) for x, at, t in sides)  # type: ignore[return-value]
