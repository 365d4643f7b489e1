"""Vector operations of an instruction set.

Owns `Lanes`. Most instruction sets define few of them: C spells operations on GNU vectors
(`codegen.vector_spelling`).
"""

from __future__ import annotations

from typing import Any

from portmm.spec.expr_ops import OPS
from portmm.target.toml_schema import placeholders, record, require
from portmm.util.records import dataclass

MAKES_LANES = {"splat", "lanes", "whole", "literal", "infinity", "nan"}
"""Words that create vectors, besides operations; the last two are numbers in one lane."""
_IN_LANES = {"d", "a", "b", "c", "R", "W", "U", "T", "count", "lanes"}


@dataclass(frozen=True, slots=True)
class Lanes:
    """Spellings of vector operations that GNU vectors do not have, or have as slower code.

    Attributes:
        n: lanes of f32 of a register.
        whole_type: C type of a register of s32, where vectors of C are not GNU's; then every operation is spelled here.
        mask_type: C type of a comparison's result, likewise.
        words: an operation, optionally with the type of its operands, as in "max f32" -> statement.
    """

    n: int
    words: dict[str, str]
    whole_type: str = ""
    mask_type: str = ""


def lanes_of(row: dict[str, Any], where: str) -> Lanes:
    """The record of a `[[lanes]]` table.

    Raises:
        TargetError: it is malformed.
    """
    known = {"n", "whole_type", "mask_type"}
    words = {name: text for name, text in row.items() if name not in known}
    for name, text in words.items():
        op, _, operand = name.partition(" ")
        require(op in OPS or op in MAKES_LANES, where, f"operation {op!r} is unknown; expr_ops.OPS has them all")
        require(operand in {"", "f32", "s32", "mask"}, where, f"{name!r} is for operands of {operand!r}")
        unknown = sorted(placeholders(str(text), f"{where}: {name}") - _IN_LANES)
        require(not unknown, where, f"row {name!r} mentions {unknown}; it may mention {sorted(_IN_LANES)}")
    fixed = {name: value for name, value in row.items() if name in known}
    lanes: Lanes = record(Lanes, {**fixed, "words": words}, where)
    require(bool(lanes.whole_type) == bool(lanes.mask_type), where, "whole_type and mask_type come together")
    return lanes
