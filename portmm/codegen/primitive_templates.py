"""Templates of primitives: families of functions with one text.

Owns the parameters in angle brackets in the names and texts of primitives: see `targets/isa/wgmma.toml`, the file that
has most of them. A warpgroup's multiply takes from 8 to 256 columns, and its text names each
register of the sums: hundreds of functions that differ in numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portmm.target.isa import Primitive

_NAMES = {"<n>": r"(?P<n>\d+)", "<majors>": r"(?P<majors>[km][kn])"}
"""Parameter of a name -> pattern of its values: columns, and the layouts of A and B."""
ROWS, LANES = 64, 128
"""Rows of sums, and the lanes that have them in registers."""
_PER_LINE = 8
"""Registers in a line of a text."""


def called(x: Primitive, code: str) -> Iterator[Primitive]:
    """The primitive if a text calls it; of a family, the members that it calls."""
    if x.name.partition("<")[0] not in code:
        return
    pattern = re.escape(x.name)
    for word, values in _NAMES.items():
        pattern = pattern.replace(re.escape(word), values)
    calls = {m[0]: m.groupdict() for m in re.finditer(rf"\b{pattern}(?=\()", code)}
    for name, words in sorted(calls.items()):
        yield replace(x, name=name, cuda=_text(x.cuda, words)) if words else x


def _text(text: str, words: dict[str, str]) -> str:
    """A family's text with the parameters of a member."""
    n, majors = int(words["n"]), words.get("majors", "kk")
    sums = ROWS * n // LANES
    text = text.replace("<n>", str(n)).replace("<majors>", majors)
    text = text.replace("<k or m>", str(int(majors[0] == "m"))).replace("<k or n>", str(int(majors[1] == "n")))
    text = re.sub(r"<(\d)>", lambda m: f"%{sums + int(m[1])}", text)
    text = re.sub(r"^( *)<sums>", lambda m: _listed(m[1], sums), text, flags=re.MULTILINE)
    return re.sub(r"( *): <in and out (\w)>", lambda m: _constraints(m[1], m[2], sums), text)


def _listed(indent: str, sums: int) -> str:
    """The operands of sums, as lines of a string."""
    lines = [", ".join(f"%{i}" for i in x) for x in _lines(sums)]
    joined = ', "\n'.join(f'{indent}"{x}' for x in lines)
    return f'{joined}}}, "'.replace(f'{indent}"', f'{indent}"{{', 1)


def _constraints(indent: str, letter: str, sums: int) -> str:
    lines = [", ".join(f'"+{letter}"(d[{i}])' for i in x) for x in _lines(sums)]
    return f"{indent}: " + f",\n{indent}  ".join(lines)


def _lines(sums: int) -> list[range]:
    return [range(i, min(i + _PER_LINE, sums)) for i in range(0, sums, _PER_LINE)]
