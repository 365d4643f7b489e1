"""Dispatch of expressions over rows, and of column reductions, on a device.

Owns the selection of how threads share rows, and the memo of compiled kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import lower_grid_block
from portmm.dispatch.launches import MOST, bind
from portmm.errors import ScheduleError
from portmm.ir.block_program import of_rows, program_of
from portmm.schedule.gpu_rows import columns_schedule, kept_in, rows_schedule
from portmm.schedule.gpu_variants import on_gpu
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.dispatch.launches import Launch
    from portmm.dispatch.machine import Machine
    from portmm.ir.block_program import BlockProgram
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.target.device import Device

Size = tuple[int, int, int]
"""Rows, columns, items of a batch."""
NEIGHBOURS = 4
"""Columns of a vector access where all operands are aligned: 16 bytes of f32."""
USUAL = 256
"""Threads of a block: enough to hide latencies, few enough for several blocks on a multiprocessor."""
LEAST = 128
LANES = 16
"""Threads of a row under OpenCL on a CPU: a vector of 512 bits."""
MOST_REGISTERS = 32
"""Registers of a thread for values of its columns; loops over them are unrolled."""
LEAST_ROWS = 32
"""The least number of rows that is worth a slice of a column."""
WAVES = 4
"""Blocks per multiprocessor up to which columns are cut into slices."""
MOST_SLICES = 65535
"""CUDA C++ Programming Guide: blocks along the second axis of a grid."""


def launches(  # noqa: PLR0917 - as kernels have them
    text: str,
    size: Size,
    strides: Sequence[tuple[int, ...]],
    aligned: list[int],
    on: Machine,
    program: BlockProgram | None = None,
) -> tuple[tuple[Launch, ...], int]:
    """The kernels for expressions over rows, or down columns, and the f32 elements of their workspace.

    Args:
        text: the expressions.
        size: rows, columns, items.
        strides: of each operand, along a batch, rows and columns, in elements.
        aligned: bytes that each operand's address is a multiple of.
        on: the device.
        program: the block program; by default that of the expressions.

    Raises:
        ScheduleError: there are too many elements.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    fused = parse(text)
    if not fused.column_reductions:
        size, strides = merged(fused, size, strides)
    m, n, batch = size
    if m * batch > MOST or n > MOST:
        raise ScheduleError(f"{batch} x {m} rows of {n}: kernels count rows, and columns, in 32 bits; split the array")
    values: dict[str, Any] = {"m": m, "n": n, "batch": batch}
    for i, steps in enumerate(strides):
        values |= {f"x{i}_{axis}": s for axis, s in zip("bmn", steps, strict=False)}
    if fused.column_reductions:
        return _columns(program or text, fused, size, values, on)
    if 0 in (m, batch):
        return (), 0
    schedule = schedule_of(fused, size, vector(fused, size, strides, aligned), on)
    kernel, function = _code(program or text, schedule, on)[0]
    return (bind(kernel, function, values),), 0


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


def schedule_of(fused: Fused, size: Size, neighbours: int, on: Machine) -> Schedule:
    """The distribution of rows over threads."""
    device = on.target.device
    assert device is not None  # noqa: S101 - machines have one
    n = max(size[1], 1)
    if not on_gpu(on.target):
        # OpenCL compilers for CPUs vectorize over neighbouring columns.
        return (
            rows_schedule(LANES, LANES) if fused.reductions else rows_schedule(4 * LANES, min(4 * LANES, _power(n)), 4)
        )
    threads, exchange = min(USUAL, device.block_threads), on.language == "cuda"
    if not fused.reductions:
        return rows_schedule(threads, min(threads, _power(-(-n // neighbours))), max(neighbours, 4), neighbours)
    return _reducing(fused, n, neighbours, device, exchange=exchange)


def _reducing(fused: Fused, n: int, neighbours: int, device: Device, *, exchange: bool) -> Schedule:
    """The distribution over threads of rows that are reduced."""
    most = _floor(min(device.block_threads, 1024))
    vectors = -(-n // neighbours)
    room = max(1, MOST_REGISTERS // max(1, len(of_rows(fused, "registers").tiles)) // neighbours)
    subgroup = min(_power(-(-vectors // max(1, 4 // neighbours))), USUAL, most)
    while subgroup < most and _power(-(-vectors // subgroup)) > room:
        subgroup *= 2
    columns = _power(-(-vectors // subgroup))
    threads = max(subgroup, min(LEAST, most))
    words = len(fused.reductions) * (4 if not exchange else 4 // device.warp or 1)
    while not exchange and threads > 1 and threads * words > device.shared_bytes:
        threads, subgroup = threads // 2, min(subgroup, threads // 2)
        columns = _power(-(-vectors // subgroup))
    return rows_schedule(
        threads, subgroup, columns * neighbours if columns <= room else 0, neighbours,
        exchange and threads >= device.warp, device.warp,
    )  # fmt: skip


def _power(x: int) -> int:
    """The least power of two not below x."""
    return 1 << max(x - 1, 0).bit_length()


def _floor(x: int) -> int:
    """The greatest power of two not above x."""
    return 1 << x.bit_length() - 1


def _columns(
    program: BlockProgram | str, fused: Fused, size: Size, values: dict[str, Any], on: Machine
) -> tuple[tuple[Launch, ...], int]:
    """The kernels that reduce columns."""
    m, n, batch = size
    device = on.target.device
    assert device is not None  # noqa: S101 - machines have one
    if 0 in (n, batch):
        return (), 0
    threads = 64 if on_gpu(on.target) else LANES
    blocks = -(-n // threads) * batch
    slices = min(m // LEAST_ROWS, -(-WAVES * device.processors // blocks), MOST_SLICES)
    sliced = slices > 1
    kernels = _code(program, columns_schedule(threads, sliced=sliced), on)
    launches_ = tuple(bind(k, f, values | ({"slices": slices} if sliced else {})) for k, f in kernels)
    return launches_, slices * batch * len(fused.column_reductions) * n if sliced else 0


def _code(program: BlockProgram | str, s: Schedule, on: Machine) -> tuple[tuple[Any, Any], ...]:
    """Kernels of a block program, or of expressions, and their compiled functions."""
    isa = next(x for x in on.target.isas if x.vector("f32", 1))

    def lower() -> tuple[Any, ...]:
        return lower_grid_block(isa, program_of(parse(program), kept_in(s)) if isinstance(program, str) else program, s)

    return on.loaded((program, s), lower)
