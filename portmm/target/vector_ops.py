"""Operations on lanes: what an instruction set says of them.

Owns `Lanes`. Imports `spec.expr`, `target.toml_schema`. Most instruction sets say next to
nothing: C spells operations on GNU vectors (`emit.lanes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from portmm.spec.expr import OPS
from portmm.target.toml_schema import placeholders, record, require

MAKES_LANES = {"splat", "lanes", "whole", "literal", "infinity", "nan"}
"""Words that make lanes, beside operations; the last two are numbers in one lane."""
_IN_LANES = {"d", "a", "b", "c", "R", "W", "U", "T", "count", "lanes"}


@dataclass(frozen=True, slots=True)
class Lanes:
    """Words for operations on lanes, where GNU vectors have none, or no good one: see `emit.lanes`.

    Attributes:
        n: lanes of f32 of a register.
        whole_type: C type of a register of s32, where vectors of C are not GNU's; then every operation is a word here.
        mask_type: C type of a comparison's result, likewise.
        words: an operation, maybe with the type of its operands, as in "max f32" -> statement.
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
        op, _, given = name.partition(" ")
        require(op in OPS or op in MAKES_LANES, where, f"operation {op!r} is unknown; expr.OPS has them all")
        require(given in {"", "f32", "s32", "mask"}, where, f"{name!r} is for operands of {given!r}")
        strange = sorted(placeholders(str(text), f"{where}: {name}") - _IN_LANES)
        require(not strange, where, f"row {name!r} mentions {strange}; it may mention {sorted(_IN_LANES)}")
    fixed = {name: value for name, value in row.items() if name in known}
    made: Lanes = record(Lanes, {**fixed, "words": words}, where)
    require(bool(made.whole_type) == bool(made.mask_type), where, "whole_type and mask_type come together")
    return made
