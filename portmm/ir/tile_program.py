"""Arguments of kernels of general block programs: which fields of the argument block have extents and strides.

Owns `extent_fields` and `stride_field`, which lowering, calls and verification share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.nodes import FIELDS, STRIDES

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
    if at >= len(STRIDES):
        raise ScheduleError(f"an operand along {axes} has more than {len(STRIDES) + 1} dimensions")
    return STRIDES[at]
