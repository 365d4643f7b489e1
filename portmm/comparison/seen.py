"""Cases for the shapes of a file or a model.

Owns the conversion of shapes to cases: checks, names, and the merge of equal ones into
one with a count.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from portmm.comparison.case import LAYOUTS, Case
from portmm.spec.dtype import spell, types

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIELDS = {field.name: field for field in fields(Case)}
"""Fields of a case by name."""
NUMBERS = ("m", "n", "k", "batch", "count")
"""Fields that are at least one."""


def case(**values: Any) -> Case:
    """A case of checked values, named after its shape where it has no name.

    Args:
        values: fields of `Case`.

    Raises:
        ValueError: a value is not allowed for its field.
    """
    for name in NUMBERS:
        value = values.get(name, 1)
        if value < 1:
            raise ValueError(f"{name} is {value}, not a positive whole number")
    for name in ("a", "b", "c"):
        if values.get(name, "row") not in LAYOUTS:
            raise ValueError(f"layout of {name} is {values[name]!r}; use {' or '.join(LAYOUTS)}")
    own = Case(**{"name": "", "group": "own", **values})
    _check_types(own)
    return own if own.name else replace(own, name=own.shape.replace(" x ", "x").replace(" ", "-").replace(",", ""))


def _check_types(own: Case) -> None:
    """Check that the types are multiplied, and the fields that weights of four bits need.

    Raises:
        ValueError: they are not, or a field is missing.
    """
    int4 = own.types[1] == "u4"
    if int4 and not (own.packed and own.block):
        raise ValueError(f"{own.dtype} needs weights that are packed, and block, the rows of k that share a scale")
    if own.block and not int4:
        raise ValueError(f"block is {own.block}, and only weights of four bits (u4) have blocks")
    if own.dynamic and (own.types[1] not in ("s8", "u4") or own.whole):
        raise ValueError(f"dynamic is for activations of floats with weights of 8 or 4 bits, not {own.dtype}")
    _ = own.problem


def word(a: str, b: str, c: str) -> str:
    """Word for three types, empty if they are not multiplied."""
    spelled = spell(a, b, c)
    try:
        types(spelled)
    except ValueError:
        return ""
    return spelled


def merged(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Cases without duplicates: each product once, with the sum of its counts, and each name once."""
    same: dict[Case, Case] = {}
    for x in cases:
        key = replace(x, name="", group="", count=1)
        first = same.get(key)
        same[key] = replace(first, count=first.count + x.count) if first else x
    named: dict[str, Case] = {}
    for x in same.values():
        name, number = x.name, 1
        while name in named:
            number += 1
            name = f"{x.name}-{number}"
        named[name] = replace(x, name=name)
    return tuple(named.values())


def shaped(x: Case | Sequence[int]) -> Case:
    """Case of a shape, (m, n, k) or (batch, m, n, k); a case is returned as it is.

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
