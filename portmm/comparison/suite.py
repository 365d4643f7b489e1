"""Suites of shapes, which `suites.toml` describes.

Owns the expansion of its families, and the names of suites, groups and cases.
"""

from __future__ import annotations

import tomllib
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.comparison.case import Case
from portmm.comparison.seen import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SUITES = ("smoke", "quick", "full", "narrow-quick", "narrow", "fused-quick", "fused")
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


def cases(suite: str = "quick") -> tuple[Case, ...]:
    """Cases of a suite, one of `SUITES`, or of a group, or the case of that name.

    "device-quick" and "device-smoke" are for devices.
    "full" has one type, float32; "narrow" has all the others. "bf16", "int8" and
    "int4" are all groups of that type. "fused" has layers with epilogues.
    Several names may be joined with commas.

    Raises:
        ValueError: a name is unknown.
    """
    described = _described()
    known = {case.name: case for some in _by_suite().values() for case in some}
    suites = {name: [case.name for case in some] for name, some in _by_suite().items()} | described["short"]
    picked: dict[str, Case] = {}
    for word in suite.split(","):
        groups = described["groups"].get(word, [word])
        names = suites.get(word) or [x.name for x in known.values() if x.group in groups or x.name == word]
        if not names:
            named = ", ".join((*SUITES, *ON_DEVICES.values()))
            all_groups = ", ".join(dict.fromkeys(case.group for case in known.values()))
            raise ValueError(f"no suite, group or case called {word!r}; suites are {named}; groups: {all_groups}")
        picked.update((name, known[name]) for name in names)
    return tuple(picked.values())
