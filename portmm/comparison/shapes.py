"""Shapes: suites, which `suites.toml` describes, and those of a user's file.

Owns the expansion of suites' families and their names, the reading of files of shapes, and the conversion of shapes to
cases: checks, names, and the merge of equal ones into one with a count. Random suites are drawn by `random_shapes`.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from portmm.comparison import random_shapes
from portmm.comparison.case import LAYOUTS, Case
from portmm.spec.dtype import spell, types

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
    """Check that the types are multiplied, and the fields that weights of four bits need."""
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


SUITES = ("smoke", "quick", "full", "narrow-quick", "narrow", "fused-quick", "fused", *random_shapes.SUITES)
ON_DEVICES = {"quick": "device-quick", "smoke": "device-smoke"}
"""Suites that replace those of the processor on a device."""


def suite_of(suite: str, kind: str) -> str:
    """Name of the suite for a device of a kind, "gpu", "cpu" or "accelerator": processors keep their "quick"."""
    return suite if suite == "quick" and kind == "cpu" else ON_DEVICES.get(suite, suite)


@cache
def _described() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("suites.toml").read_text(encoding="utf-8"))


def _family(family: Mapping[str, Any], lists: Mapping[str, list[Any]]) -> Iterator[Case]:
    """Cases of a family: see the head of the file."""
    names = [key.split() for key in family]
    values = [lists[x[1:]] if str(x).startswith("@") else x for x in family.values()]
    for picked in product(*(x if isinstance(x, list) else [x] for x in values)):
        own: dict[str, Any] = {}
        for keys, value in zip(names, picked, strict=True):
            own |= dict(zip(keys, value if len(keys) > 1 else [value], strict=True))
        own |= {name: x.format(**own) for name, x in own.items() if isinstance(x, str)}
        own |= {name: int(own[name]) for name in ("n", "k")}
        yield Case(**{name: x for name, x in own.items() if name in FIELDS})


@cache
def _by_suite() -> dict[str, tuple[Case, ...]]:
    """Cases of the suites that have families."""
    described = _described()
    families = {name: x for name, x in described.items() if isinstance(x, list)}
    return {name: tuple(y for x in some for y in _family(x, described["lists"])) for name, some in families.items()}


def cases(suite: str = "quick", seed: int = 0) -> tuple[Case, ...]:
    """Cases of a suite, one of `SUITES`, or of a group, or the case of that name.

    "device-quick" and "device-smoke" are for devices.
    "full" has one type, float32; "narrow" has all the others. "bf16", "int8" and
    "int4" are all groups of that type. "fused" has layers with epilogues. "random" and "random-narrow" are drawn.
    Several names may be joined with commas.

    Args:
        suite: the names.
        seed: of random suites.

    Raises:
        ValueError: a name is unknown.
    """
    described = _described()
    known = {case.name: case for some in _by_suite().values() for case in some}
    suites = {name: [case.name for case in some] for name, some in _by_suite().items()} | described["short"]
    picked: dict[str, Case] = {}
    for word in suite.split(","):
        if word in random_shapes.SUITES:
            picked.update((case.name, case) for case in random_shapes.drawn(word, seed))
            continue
        groups = described["groups"].get(word, [word])
        names = suites.get(word) or [x.name for x in known.values() if x.group in groups or x.name == word]
        if not names:
            named = ", ".join((*SUITES, *ON_DEVICES.values()))
            all_groups = ", ".join(dict.fromkeys(case.group for case in known.values()))
            raise ValueError(f"no suite, group or case called {word!r}; suites are {named}; groups: {all_groups}")
        picked.update((name, known[name]) for name in names)
    return tuple(picked.values())


REQUIRED = ("m", "n", "k")
PLAIN_ORDER = (*REQUIRED, "batch")
"""Columns of a line in a file without column names."""
SHAPE = re.compile(r"(?:(\d+)[x\u00d7])?(\d+)[x\u00d7](\d+)[x\u00d7](\d+)", re.IGNORECASE)
SEPARATORS = ";\t,"
WORDS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def from_csv(path: str | Path) -> tuple[Case, ...]:
    """Cases of a file of shapes.

    Its first line names the columns, in any order and in upper or lower case: those of
    `Case`, of which m, n and k are required. Without such a line each one is m,n,k or
    m,n,k,batch; or MxNxK, or BATCHxMxNxK, which may be the only cell of a line of any file. Columns are
    separated by commas, semicolons or tabs. A # begins a comment. Equal lines are one
    case with a count.

    Raises:
        ValueError: a line is invalid; the message has its number.
        OSError: the file cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    own = []
    columns: Sequence[str] = ()
    for number, cells in _lines(text):
        try:
            shape = SHAPE.fullmatch(cells[0]) if len(cells) == 1 else None
            if shape:
                own.append(_shape(shape, path.stem))
            elif columns:
                own.append(_row(columns, cells, path.stem))
            elif any(cell[:1].isalpha() for cell in cells):
                columns = _header(cells)
            else:
                columns = PLAIN_ORDER
                own.append(_row(columns, cells, path.stem))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not own:
        raise ValueError(f"{path} has no shapes; a line is m,n,k or MxNxK")
    return merged(own)


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each line that is not empty."""
    bare = [line.partition("#")[0] for line in text.splitlines()]
    first = next((line for line in bare if any(x in line for x in SEPARATORS)), ",")
    separator = next(x for x in SEPARATORS if x in first)
    for number, line in enumerate(bare, 1):
        # One line at a time, so that a quote that is not closed does not extend over the rest of the file.
        cells = [cell.strip() for row in csv.reader([line], delimiter=separator, skipinitialspace=True) for cell in row]
        while cells and not cells[-1]:
            cells.pop()
        if cells:
            yield number, cells


def _shape(match: re.Match[str], group: str) -> Case:
    batch, m, n, k = (int(x or 1) for x in match.groups())
    return case(group=group, m=m, n=n, k=k, batch=batch)


def _header(cells: Sequence[str]) -> tuple[str, ...]:
    names = tuple(cell.lower() for cell in cells)
    strange = [cell for cell, name in zip(cells, names, strict=True) if name not in FIELDS]
    if strange:
        raise ValueError(f"no column is called {strange[0]!r}; known are {', '.join(FIELDS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(cells)}")
    absent = [name for name in REQUIRED if name not in names]
    if absent:
        raise ValueError(f"no column is called {absent[0]}; m, n and k are needed")
    return names


def _row(columns: Sequence[str], cells: Sequence[str], group: str) -> Case:
    if len(cells) > len(columns):
        raise ValueError(f"{len(cells)} values for {len(columns)} columns ({', '.join(columns)})")
    values = {name: _value(name, cell) for name, cell in zip(columns, cells, strict=False) if cell}
    absent = [name for name in REQUIRED if name not in values]
    if absent:
        raise ValueError(f"{absent[0]} is missing")
    return case(**{"group": group, **values})


def _value(name: str, cell: str) -> Any:
    """Value of a cell in its column's type."""
    kind: Any = type(FIELDS[name].default)
    if kind is bool:
        if cell.lower() not in WORDS:
            raise ValueError(f"{name} is {cell!r}; say yes or no")
        return WORDS[cell.lower()]
    if name in NUMBERS or kind is int:
        if not cell.isdecimal():
            raise ValueError(f"{name} is {cell!r}, not a positive whole number")
        return int(cell)
    return cell if name in ("name", "group") else cell.lower()
