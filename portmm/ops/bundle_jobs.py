"""Sources that a bundle is made of, and the calls that kernels were selected for.

Owns the records of these, and the compilation of a source, here or across.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from portmm.build import stored_objects
from portmm.build.compiler import common_options, find_compiler
from portmm.util import system

if TYPE_CHECKING:
    from pathlib import Path

    from portmm.ir.index import Index
    from portmm.ops.bundle_shapes import AttentionShape, Shape
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

SMALL = ("-s", "-Wl,-z,noseparate-code", "-Wl,--build-id=none")
"""Options of the linker for objects of a third of the size; zig knows the first."""


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel that a bundle has for a shape on a machine.

    Attributes:
        machine: name of the chip.
        shape: the shape.
        m: the M of the prediction, the largest of the shape.
        kernel: name of the kernel for it.
        kernels: number of kernels for all M and numbers of threads.
        seconds: predicted time on one thread; 0 where the chip's clock is unknown.
    """

    machine: str
    shape: Shape
    m: int
    kernel: str
    kernels: int
    seconds: float


class Call(NamedTuple):
    """The kernel that was selected for a class of calls.

    Attributes:
        target: the machine.
        threads: the most threads.
        problem: the problem.
        rows: the least and the largest M.
        schedule: spelling of the schedule.
        one: whether one thread does the work.
    """

    target: Target
    threads: int
    problem: Problem
    rows: tuple[int, int]
    schedule: str
    one: bool


class AttentionCall(NamedTuple):
    """The kernel of attention for calls of a kind.

    Attributes:
        machine: name of the machine.
        threads: the most threads.
        shape: the shape, of `queries`.
        queries: number of queries.
        question: for its code.
        workspace: bytes of its scratch, in fields of the argument block.
        step, run: keys of a block, and of a KV split.
        least: the least number of queries.
        units: what d and dv are multiples of.
        align: bytes that the address of keys is a multiple of.
    """

    machine: str
    threads: int
    shape: AttentionShape
    queries: int
    question: str
    workspace: Index
    step: int
    run: int
    least: int
    units: tuple[int, int]
    align: int


@dataclass(frozen=True, slots=True)
class Job:
    """A source to compile."""

    arch: str
    text: str
    flags: tuple[str, ...]
    name: str
    symbols: tuple[str, ...]
    interface: str = ""
    headers: Path | None = None

    @property
    def question(self) -> str:
        """The question for its object."""
        return stored_objects.SOURCE + stored_objects.identity(
            self.text, (*common_options(), *self.flags), self.arch, self.interface
        )

    def compiled(self) -> bytes:
        """The object."""
        from portmm.build import child_process
        from portmm.build.shared_object import build

        child_process.background.set(True)  # in a thread of its own: there are hundreds, and others want processors
        include = (self.headers,) if self.headers else ()
        zig = find_compiler(None if self.arch == system.platform() else self.arch).kind == "zig"
        flags = (*self.flags, *(SMALL[:1] if zig else SMALL))
        artifact = build(
            self.text, flags=flags, arch=self.arch, name=self.name, symbols=self.symbols, include=include,
            interface=self.interface,
        )  # fmt: skip
        return artifact.code
