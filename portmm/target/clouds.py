"""Cloud instances.

Owns `CloudFamily`, the chips that an instance may run on, and the mapping from an instance's name to its family. The
facts are in `targets/clouds.toml`; numbers of cores are not among them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.errors import TargetError
from portmm.target.toml_schema import parse, record, require

if TYPE_CHECKING:
    from collections.abc import Iterable

_AWS = re.compile(r"([a-z][a-z0-9-]*)\.(?:\d*xlarge|nano|micro|small|medium|large|metal(?:-\d+xl)?)")
_GOOGLE = re.compile(
    r"([a-z]\d[a-z]?)-(standard|highmem|highcpu|custom|micro|small|medium|(?:high|mega|edge|ultra)gpu)(?:-[a-z0-9-]+)?"
)
_AZURE = re.compile(r"(?:Standard_)?([A-Z]+)\d+(?:-\d+)?([a-z]*)(?:_([A-Z][A-Z0-9]*))?(?:_(v\d+))?")
"""Patterns of instance names, whose groups form the family: c5.4xlarge, n2-standard-8, Standard_D4s_v5."""


@dataclass(frozen=True, slots=True)
class CloudFamily:
    """A family of cloud instances.

    Attributes:
        cloud: "AWS", "Google" or "Azure".
        name: the family, as in an instance's name.
        chips: names of the chips that an instance may run on, from the oldest to the newest.
        source: title of the page with these facts.
    """

    cloud: str
    name: str
    chips: tuple[str, ...]
    source: str

    @property
    def likeliest(self) -> str:
        """The chip that is assumed for an instance: the newest, as clouds replace their machines."""
        return self.chips[-1]

    def sentence(self, instance: str) -> str:
        """A sentence with the chips of an instance, and the one that is assumed."""
        if len(self.chips) == 1:
            return f"{instance} ({self.cloud}) is {self.likeliest}; {self.source}"
        return (
            f"{instance} ({self.cloud}) may be {' or '.join(self.chips)}; taken for {self.likeliest}, the newest: "
            f"give another by its name; {self.source}"
        )


def read(text: str, where: str, chips: Iterable[str]) -> tuple[CloudFamily, ...]:
    """The families of a table, in its order.

    Raises:
        TargetError: the table is malformed, or names a chip that is not in `chips`.
    """
    table, _ = parse(text, where)
    families: list[CloudFamily] = []
    for row in table["family"]:
        shared = {k: v for k, v in row.items() if k != "names"}
        families += [record(CloudFamily, {**shared, "name": name}, where) for name in row["names"]]
    for family in families:
        unknown = sorted(set(family.chips) - set(chips))
        require(not unknown, where, f"{family.cloud} {family.name} names unknown chips {unknown}")
        require(bool(family.chips), where, f"{family.cloud} {family.name} names no chip")
    return tuple(families)


def _azure(letters: str, features: str, accelerator: str, version: str) -> tuple[str, ...]:
    """Possible names of the family of an Azure instance, the most specific first."""
    if accelerator:
        memory = "m" if "m" in features else ""
        ends = f"{accelerator}_{version}"
        return f"{letters}{features}{ends}", f"{letters}{memory}_{ends}", f"{letters}_{ends}"
    # Some families are named without the letters of features: HB120rs_v3 is of HBv3.
    return f"{letters}{features}{version}", f"{letters}{version}"


def family_of(name: str, families: Iterable[CloudFamily]) -> CloudFamily | None:
    """The family of an instance, or the family itself, by name; None if it is neither.

    Raises:
        TargetError: families of several clouds have this name.
    """
    wanted: list[tuple[str, str]] = []
    if match := _AWS.fullmatch(name):
        wanted = [("AWS", match[1])]
    elif match := _GOOGLE.fullmatch(name):
        wanted = [("Google", f"{match[1]}-{match[2].removesuffix('gpu')}"), ("Google", match[1])]
    elif match := _AZURE.fullmatch(name):
        wanted = [("Azure", x) for x in _azure(*match.groups(default=""))]
    every = {(x.cloud, x.name): x for x in families}
    family = next((every[x] for x in wanted if x in every), None)
    if family is not None:
        return family
    alike = [x for x in every.values() if x.name == name]
    if len(alike) > 1:
        clouds = " and ".join(x.cloud for x in alike)
        raise TargetError(
            f"{clouds} have families called {name!r}: name an instance, as {name}.large or {name}-standard-4"
        )
    return alike[0] if alike else None
