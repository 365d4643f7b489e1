"""TOML schema: tables parsed to records, with checks.

Owns the checks that do not depend on the meaning of a record: names and types of
fields, and the placeholders of a row of text.
"""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from portmm.errors import TargetError


def parse(text: str, where: str) -> tuple[dict[str, Any], str]:
    """The table of a TOML text, and `where` for the errors of callers.

    Raises:
        TargetError: the text is not TOML.
    """
    try:
        return tomllib.loads(text), where
    except tomllib.TOMLDecodeError as error:
        raise TargetError(f"{where}: {error}") from error


def of_length(value: Any, bits: int) -> Any:
    """A value of a table for several vector lengths, for one of them.

    {VL} in a text is the number of bits; a text like "{VL}/32" is a number.
    """
    if isinstance(value, dict):
        return {name: of_length(x, bits) for name, x in value.items() if name != "vl"}
    if isinstance(value, list):
        return [of_length(x, bits) for x in value]
    if not isinstance(value, str):
        return value
    fraction = re.fullmatch(r"\{VL\}/(\d+)", value)
    return bits // int(fraction[1]) if fraction else value.replace("{VL}", str(bits))


def _fits(value: Any, annotation: str) -> bool:
    if annotation == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation.startswith("tuple[") and annotation.endswith(", ...]"):
        item = annotation.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, tuple) and all(_fits(x, item) for x in value)
    if annotation == "tuple[int, int]":
        return isinstance(value, tuple) and len(value) == 2 and all(type(x) is int for x in value)
    if annotation == "dict[str, float]":
        return isinstance(value, dict) and all(_fits(x, "float") for x in value.values())
    if annotation == "dict[str, str]":
        return isinstance(value, dict) and all(isinstance(x, str) for x in value.values())
    # All others are records, which were made and checked before, and plain types.
    return type(value).__name__ == annotation.removesuffix(" | None")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(x) for x in value) if isinstance(value, list) else value


def record(cls: type, table: Any, where: str) -> Any:
    """An instance of the dataclass `cls` from a parsed TOML table.

    Raises:
        TargetError: a field is missing, unknown, or of the wrong type; `where`
            names the file.
    """
    if not isinstance(table, dict):
        raise TargetError(f"{where}: expected a table, got {table!r}")
    known = {f.name: str(f.type) for f in fields(cls)}
    values = {k: _frozen(v) for k, v in table.items()}
    for name, value in values.items():
        if name not in known:
            raise TargetError(f"{where}: unknown field {name!r}; known are {', '.join(sorted(known))}")
        if not _fits(value, known[name]):
            raise TargetError(f"{where}: field {name!r} must be {known[name]}, got {value!r}")
    try:
        return cls(**values)
    except TypeError as error:
        raise TargetError(f"{where}: {error}") from error


def require(holds: bool, where: str, what: str) -> None:
    """A check: raises `TargetError` with `where` and `what` unless `holds`."""
    if not holds:
        raise TargetError(f"{where}: {what}")


def placeholders(text: str, where: str) -> set[str]:
    """Names of the placeholders in a row of text.

    Raises:
        TargetError: braces are not balanced.
    """
    try:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        raise TargetError(f"{where}: {error}; write {{{{ and }}}} for braces of C") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown target: similar names, and the commands that list all."""
    from difflib import get_close_matches

    spelled = {x.lower().replace("-", "_"): x for x in known}
    near = get_close_matches(str(name).lower().replace("-", "_"), spelled, n=3)
    guess = f"; did you mean {' or '.join(spelled[x] for x in near)}?" if near else ";"
    return f"{guess} `portmm targets` lists chips and cloud instances, `portmm target` the ISAs of this machine"
