"""Values of integer expressions in prefix notation, as `index.spelled` writes them, without the expression itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "<": lambda x, y: int(x < y),
    "==": lambda x, y: int(x == y),
    "^": operator.xor,
    "min": min,
    "max": max,
}
"""Operator -> function. Operands of / and % are never negative, so C agrees."""


def value(text: str, ints: Mapping[str, int]) -> int:
    """The value of an expression, from those of its variables.

    Raises:
        LookupError: an operand, or the value of a variable, is missing.
        ValueError: a word is no operator, variable or integer.
    """
    stack: list[int] = []
    for word in reversed(text.split()):
        if word in OPERATORS:
            stack.append(OPERATORS[word](stack.pop(), stack.pop()))
        else:
            stack.append(ints[word] if word.isidentifier() else int(word))
    return stack[-1]
