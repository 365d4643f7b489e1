"""Parameters of device kernels: the operands of products, C, and the operands of fused expressions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument
from portmm.spec.dtype import accumulator
from portmm.spec.epilogue import operand_types
from portmm.spec.layouts import operand

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused


def integers(*names: str) -> list[Argument]:
    """Parameters that are extents."""
    return [Argument(x, "int") for x in names]


def longs(*names: str) -> list[Argument]:
    """Parameters that are strides."""
    return [Argument(x, "long") for x in names]


def read(name: str, dtype: str) -> Argument:
    """Parameter of memory that nothing writes."""
    return Argument(name, "pointer", dtype, readonly=True, alone=True)


def of_product(s: Schedule) -> tuple[Argument, ...]:
    """Parameters of the kernel of a product; with slices of k, it stores sums to scratch for another kernel."""
    a, b, _ = s.types
    params = [*integers("m", "n", "k"), read("a", a), *_strides("a", s.a.layout)]
    if s.b.layout == "codes":
        # int4 weights: `words` of each column, and the scales and offsets of its `groups`.
        params += [read("b", "s32"), read("scales", "f32"), read("offsets", "f32"), *longs("words", "groups")]
    else:
        params += [read("b", b), *_strides("b", s.b.layout)]
    params += integers("batch")
    params += [read("ends", "s32")] if s.parallel.grouped else []
    return (*params, *(sums(s) if s.slices else (*of_fixup(s), *of_results(s))))


def _strides(name: str, layout: str) -> list[Argument]:
    return longs(*(str(x) for x in operand(name, layout).stride if x != 1), f"{name}_batch")


def sums(s: Schedule) -> list[Argument]:
    """Parameters of the sums of slices of k."""
    return [Argument("work", "pointer", accumulator(*s.types[:2])), *longs("c_m", "c_batch")]


def of_fixup(s: Schedule) -> list[Argument]:
    """Parameters of a split-K fixup: the sums of slices, and the counters of tiles, which are zeros."""
    acc = accumulator(*s.types[:2])
    return [Argument("work", "pointer", acc), Argument("counters", "pointer", "s32")] if s.parallel.fixup else []


def of_results(s: Schedule) -> list[Argument]:
    """Parameters of C, and of the operands of fused expressions."""
    c = [Argument("c", "pointer", s.types[2]), *_strides("c", s.c.layout)]
    return [*c, *of_fused(s.fused)] if s.fused else c


def of_fused(fused: Fused) -> list[Argument]:
    """Parameters of the operands and the numbers of fused expressions."""
    params = []
    for i, (dtype, written) in enumerate(operand_types(fused)):
        x = fused.operands[i]
        params.append(Argument(f"x{i}_all", "pointer", dtype, readonly=not written))
        params += longs(*(f"x{i}_{axis}" for axis in x.axes if axis != "n"), *(() if x.dense else (f"x{i}_n",)))
    return [*params, *(Argument(f"number_{i}", "float") for i in range(fused.numbers))]
