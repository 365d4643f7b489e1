"""Dispatch of expressions over rows, and of column reductions, on a device.

Owns the selection of how threads share rows, and the memo of compiled kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import lower_program
from portmm.dispatch.machine import MOST, bind
from portmm.errors import ScheduleError
from portmm.ir.block_program import program_of
from portmm.schedule.rows import candidates, kept_in, slices
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.dispatch.machine import Launch, Machine
    from portmm.ir.block_program import BlockProgram
    from portmm.schedule.rows import Size
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused

NEIGHBOURS = 4
"""Columns of a vector access where all operands are aligned: 16 bytes of f32."""


def launches(
    what: str | BlockProgram, size: Size, strides: Sequence[tuple[int, ...]], aligned: list[int], on: Machine
) -> tuple[tuple[Launch, ...], int]:
    """The kernels for expressions over rows, or down columns, and the f32 elements of their workspace.

    Args:
        what: the expressions, or a block program.
        size: rows, columns, items.
        strides: of each operand, along a batch, rows and columns, in elements.
        aligned: bytes that each operand's address is a multiple of.
        on: the device.

    Raises:
        ScheduleError: there are too many elements.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    program = program_of(parse(what)) if isinstance(what, str) else what
    fused = program.fused
    if not fused.column_reductions:
        size, strides = merged(fused, size, strides)
    m, n, batch = size
    if m * batch > MOST or n > MOST:
        raise ScheduleError(f"{batch} x {m} rows of {n}: kernels count rows, and columns, in 32 bits; split the array")
    values: dict[str, Any] = {"m": m, "n": n, "batch": batch}
    for i, steps in enumerate(strides):
        values |= {f"x{i}_{axis}": s for axis, s in zip("bmn", steps, strict=False)}
    neighbours = 1 if fused.column_reductions else vector(fused, size, strides, aligned)
    schedules = candidates(program, size, on.target, neighbours, exchange=on.language == "cuda")
    if not schedules:
        return (), 0
    s, parts = schedules[0], 0
    if s.parallel.split != 1:
        parts = values["slices"] = slices(size, s.threads, on.target)
    kernels = _code(what, s, on)
    return tuple(bind(*x, values) for x in kernels), parts * batch * len(fused.column_reductions) * n


def merged(fused: Fused, size: Size, strides: Sequence[tuple[int, ...]]) -> tuple[Size, Sequence[tuple[int, ...]]]:
    """The size and strides as one long row, if expressions are element-wise and operands contiguous."""
    m, n, batch = size
    alone = fused.reductions or any(x.op in ("index", "extent") for x in fused.steps)
    if alone or m * batch == 1 or m * n * batch > MOST:
        return size, strides
    for x, (b, row, *_) in zip(fused.operands, strides, strict=True):
        even = x.axes == "bmn" and x.dense and (m == 1 or row == n) and (batch == 1 or b == m * n)
        if x.axes and not even:
            return size, strides
    return (1, m * n * batch, 1), strides


def vector(fused: Fused, size: Size, strides: Sequence[tuple[int, ...]], aligned: list[int]) -> int:
    """The number of neighbouring columns that a vector access may cover."""
    m, n, batch = size
    if n % NEIGHBOURS:
        return 1
    for x, (b, row, *_), at in zip(fused.operands, strides, aligned, strict=True):
        if "n" not in x.axes or not x.dense:
            continue
        moved = [b] * ("b" in x.axes and batch > 1) + [row] * ("m" in x.axes and m > 1)
        if any(s % NEIGHBOURS for s in moved) or at % (NEIGHBOURS * BY_NAME[x.dtype].bytes):
            return 1
    return NEIGHBOURS


def _code(program: BlockProgram | str, s: Schedule, on: Machine) -> tuple[tuple[Any, Any], ...]:
    """Kernels of a block program, or of expressions, and their compiled functions."""
    isa = next(x for x in on.target.isas if x.vector("f32", 1))

    def lower() -> tuple[Any, ...]:
        return lower_program(program_of(parse(program), kept_in(s)) if isinstance(program, str) else program, s, isa)

    return on.loaded((program, s), lower)
