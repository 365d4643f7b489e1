"""Arguments of kernels of general block programs: which fields of the argument block have extents and strides.

Owns `extent_fields`, `stride_field` and `row_label`, which lowering, calls, costs and verification share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.nodes import FIELDS
from portmm.spec.epilogue import summed, varies
from portmm.spec.problem import AXES

if TYPE_CHECKING:
    from portmm.ir.block_program import BlockProgram

PREFIX = "portmm_block_"
"""Start of the names of such kernels."""


def extent_fields(program: BlockProgram) -> dict[str, str]:
    """Label -> the integer field of the argument block that has its extent, in the order of operands.

    Raises:
        ScheduleError: there are more labels than fields, or dimensions in equal blocks.
    """
    labels = dict.fromkeys("".join(x.axes for x in program.operands))
    fields = [x for x in FIELDS if x != "workers"]
    if len(labels) > len(fields) or any(x.isupper() for x in labels):
        raise ScheduleError(f"labels {''.join(labels)}: a general block program has up to {len(fields)}, in no blocks")
    return dict(zip(labels, fields, strict=False))


def stride_field(axes: str, label: str) -> str:
    """The stride of an operand that has a dimension's: the i-th of those of an operand; none for the last, dense one.

    Raises:
        ScheduleError: the operand has more dimensions than strides.
    """
    at = axes.index(label)
    if at == len(axes) - 1:
        return ""
    if at >= len(AXES):
        raise ScheduleError(f"an operand along {axes} has more than {len(AXES) + 1} dimensions")
    return AXES[at]


def row_label(program: BlockProgram) -> str:
    """The label of rows of tiles: one of the result along which no product has both operands; or none.

    Raises:
        ScheduleError: a product has both operands along the columns of tiles.
    """
    result = program.operands[program.fused.results[0][0]].axes
    along = varies(program.fused.steps, program.operands)
    products = [x for x in program.fused.steps if x.op == "contract"]
    both = {y for x in products for y in along[x.inner[0]] & along[x.inner[1]] if y != summed(x)}
    if result[-1] in both:
        raise ScheduleError(f"products have both operands along {result[-1]!r}, of which tiles have columns")
    return next((x for x in reversed(result[:-1]) if x not in both), "")
