"""Shapes of the user's files, models and programs.

Owns the reading of files of shapes, and re-exports `from_onnx` and `from_torch`.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.comparison.onnx_shapes import from_onnx
from portmm.comparison.seen import FIELDS, NUMBERS, case, merged
from portmm.comparison.torch_shapes import from_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portmm.comparison.case import Case

__all__ = ["from_csv", "from_onnx", "from_torch", "merged"]

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
