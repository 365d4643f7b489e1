"""Text of the operators of a block program, with the expressions that they compute.

Owns `operator_lines` and `spelled`. Values of operators are named where others read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from portmm.ir.block_program import BlockProgram, Operator, TileMap, TileTransfer
from portmm.spec.epilogue import shortest, summed
from portmm.spec.expr import Expr, const
from portmm.spec.function_patterns import function_of

if TYPE_CHECKING:
    from portmm.spec.epilogue import Operand

MOST = 120
"""Characters of an operator's line; of longer ones the end is left out."""
_INFIX = {
    "eq": (0, "=="), "ne": (0, "!="), "lt": (0, "<"), "le": (0, "<="), "or": (1, "|"), "xor": (2, "^"), "and": (3, "&"),
    "add": (4, "+"), "sub": (4, "-"), "mul": (5, "*"), "div": (5, "/"),
}  # fmt: skip
"""Operators -> how tightly they bind in Python, and their sign."""
_TIGHTEST = 6
_CALLS = {"select": "where", "max": "maximum", "min": "minimum"}


def operator_lines(program: BlockProgram, names: Sequence[str]) -> list[list[str]]:
    """A line for each operator of each pass: its kind, the label along which it reduces, and what it computes.

    Args:
        program: the program.
        names: of its operands.
    """
    known: dict[Expr, str] = {}
    passes = []
    for one in program.passes:
        lines = []
        for x in one:
            line = _line(x, program.operands, names, known)
            if not isinstance(x, TileTransfer):
                name = known.setdefault(x.value, f"t{len(known)}")
                line = f"{name} = {line}"
            lines.append(line if len(line) <= MOST else f"{line[: MOST - 3]}...")
        passes.append(lines)
    return passes


def _line(x: Operator, operands: Sequence[Operand], names: Sequence[str], known: Mapping[Expr, str]) -> str:
    if isinstance(x, TileTransfer):
        return f"transfer to {names[x.operand]}[{operands[x.operand].axes}]: {spelled(x.value, names, known)}"
    if isinstance(x, TileMap):
        return f"map: {spelled(x.value, names, known)}"
    value = x.value
    by = "" if x.rescaled is None else f", rescaled by exp(-{spelled(x.rescaled, names, known, _TIGHTEST)})"
    if value.op == "contract":
        label, *factors = value.args
        one = factors[1] is const(1.0)
        of = ", ".join(spelled(y, names, known) for y in factors[: 1 if one else 2])
        return f"{'sum' if one else 'gemm'} along {label}: {of}{by}"
    kind = "sum" if value.args[0] == "add" else value.args[0]
    return f"{kind} along {summed(value)}: {spelled(value.args[1], names, known)}{by}"


def spelled(  # noqa: PLR0911 - one for each kind
    x: Expr, names: Sequence[str], known: Mapping[Expr, str], binds: int = 0
) -> str:
    """An expression as a formula, in parentheses if it binds less tightly than what is around it."""
    if x in known:
        return known[x]
    if x.op == "load":
        return names[x.args[0]]
    if x.op == "const":
        return shortest(x.args[0]) if isinstance(x.args[0], float) else str(x.args[0])
    if x.op in ("index", "extent"):
        return f"{'i' if x.op == 'index' else 'size'}.{x.args[0]}"
    if (named := function_of(x)) is not None:
        return f"{named[0]}({spelled(named[1], names, known)})"
    if x.op == "fma":
        a, b, c = x.args
        return spelled(a * b + c, names, known, binds)
    if x.op in _INFIX and len(x.args) == len(x.inner):
        own, sign = _INFIX[x.op]
        left, right = (spelled(y, names, known, own + i) for i, y in enumerate(x.args))
        return f"({left} {sign} {right})" if own < binds else f"{left} {sign} {right}"
    if x.op == "neg":
        return f"-{spelled(x.args[0], names, known, _TIGHTEST)}"
    of = ", ".join(spelled(y, names, known) if isinstance(y, Expr) else str(y) for y in x.args)
    return f"{_CALLS.get(x.op, x.op)}({of})"
