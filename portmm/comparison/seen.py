"""Cases from shapes that were seen somewhere.

Owns how shapes of a file or a model become cases: their names, and each once with
its count. Imports `comparison.suite` and `spec.dtype`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from portmm.comparison.case import LAYOUTS, Case
from portmm.spec.dtype import spell, types

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIELDS = {field.name: field for field in fields(Case)}
"""What may be said of a case, by name."""
NUMBERS = ("m", "n", "k", "batch", "count")
"""Those that are at least one."""


def case(**values: Any) -> Case:
    """A case of checked values, named after its shape where it has no name.

    Args:
        values: fields of `Case`.

    Raises:
        ValueError: a value is none that its field can have.
    """
    for name in NUMBERS:
        value = values.get(name, 1)
        if value < 1:
            raise ValueError(f"{name} is {value}, not a positive whole number")
    for name in ("a", "b", "c"):
        if values.get(name, "row") not in LAYOUTS:
            raise ValueError(f"layout of {name} is {values[name]!r}; use {' or '.join(LAYOUTS)}")
    made = Case(**{"name": "", "group": "own", **values})
    _check_codes(made)
    return made if made.name else replace(made, name=made.shape.replace(" x ", "x").replace(" ", "-").replace(",", ""))


def _check_codes(made: Case) -> None:
    """Types that are multiplied, with what weights of four bits need.

    Raises:
        ValueError: they are not.
    """
    codes = made.types[1] == "u4"
    if codes and not (made.packed and made.block):
        raise ValueError(f"{made.dtype} needs weights that are packed, and block, the rows of k that share a scale")
    if made.block and not codes:
        raise ValueError(f"block is {made.block}, and only weights of four bits (u4) have blocks")
    if made.dynamic and (made.types[1] not in ("s8", "u4") or made.whole):
        raise ValueError(f"dynamic is for activations of floats beside weights of 8 or 4 bits, not {made.dtype}")
    _ = made.problem


def word(a: str, b: str, c: str) -> str:
    """The word for three types, empty if they are not multiplied."""
    found = spell(a, b, c)
    try:
        types(found)
    except ValueError:
        return ""
    return found


def merged(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Each product once, with the sum of its counts, and each name once."""
    same: dict[Case, Case] = {}
    for found in cases:
        key = replace(found, name="", group="", count=1)
        first = same.get(key)
        same[key] = replace(first, count=first.count + found.count) if first else found
    named: dict[str, Case] = {}
    for found in same.values():
        name, number = found.name, 1
        while name in named:
            number += 1
            name = f"{found.name}-{number}"
        named[name] = replace(found, name=name)
    return tuple(named.values())


def shaped(x: Case | Sequence[int]) -> Case:
    """A case, or one for a shape: (m, n, k) or (batch, m, n, k).

    Raises:
        ValueError: it is neither.
    """
    if isinstance(x, Case):
        return x
    sizes = tuple(x)
    if len(sizes) not in (3, 4) or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f"{x!r} is no shape; give (m, n, k) or (batch, m, n, k), or a Case")
    *batch, m, n, k = sizes
    return Case("x".join(map(str, sizes)), "shapes", m, n, k, batch=batch[0] if batch else 1)
