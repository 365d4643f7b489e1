"""Cloud instances.

Owns `CloudFamily`, the chips that an instance may run on, and the mapping from an instance's name to its family. The
facts are in `targets/clouds.toml`; numbers of cores are not among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from portmm.errors import TargetError
from portmm.target.toml_schema import parse, record, require
from portmm.util.records import dataclass

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


@dataclass(frozen=True, slots=True)
class InstanceSize:
    """The size of an instance, as far as its name says.

    Attributes:
        vcpus: virtual processors; 0 where the name does not say.
        gib: memory in GiB; 0.0 where the family has no one ratio of memory to processors.
        cores: physical cores that these are; 0 where it is unknown.
    """

    vcpus: int
    gib: float
    cores: int

    def __str__(self) -> str:
        parts = [f"{self.vcpus} vCPUs" if self.vcpus else ""]
        parts += [f"{self.cores} core{'s' if self.cores > 1 else ''}" if self.cores else ""]
        parts += [f"{self.gib:g} GiB" if self.gib else ""]
        return ", ".join(x for x in parts if x)


# Amazon EC2 Instance Types guide: "large" is two vCPUs, "Nxlarge" N times four, "medium" of Graviton one; compute
# optimized instances have 2 GiB for each, general purpose 4, memory optimized 8, X 16, storage optimized (I) 8.
_AWS_GIB = {"c": 2.0, "m": 4.0, "r": 8.0, "x": 16.0, "i": 8.0, "t": 4.0}
_AWS_OTHER_GIB = ("c4", "c5n", "r4", "t2")  # of no such ratio
# Google Compute Engine documentation, machine families: GiB for each vCPU of standard, highmem and highcpu.
_GOOGLE_GIB = {
    **dict.fromkeys(("n2", "n2d", "e2"), (4.0, 8.0, 1.0)),
    **dict.fromkeys(("c3", "n4", "c4a"), (4.0, 8.0, 2.0)),
    **dict.fromkeys(("c2", "t2d", "t2a"), (4.0, 0.0, 0.0)),
    "n1": (3.75, 6.5, 0.9),
}
# Azure Virtual Machines documentation, sizes: D has 4 GiB for each vCPU, E 8, Fs v2 2.
_AZURE_GIB = {"D": 4.0, "E": 8.0}
# Families without simultaneous multithreading, besides Arm's: the clouds' pages of 7th and 8th generation AMD instances
# (AWS), T2D and H3 (Google), and HB, HC and HX (Azure).
_WHOLE_CORES = frozenset((
    "c7a", "m7a", "r7a", "c8a", "m8a", "r8a", "t2d", "h3", "HC", "HB", "HBv2", "HBv3", "HBv4", "HX",
))  # fmt: skip


def size_of(name: str, family: CloudFamily, *, arm: bool) -> InstanceSize:
    """The size of an instance of a family, as far as its name says.

    Args:
        name: the instance's name, or the family's.
        family: as `family_of` gives it.
        arm: whether its processors are Arm's, whose vCPUs are cores.
    """
    vcpus, gib = 0, 0.0
    if family.cloud == "AWS" and not family.name.startswith("hpc"):
        vcpus = _aws_vcpus(name.partition(".")[2], arm=arm)
        gib = 0.0 if family.name in _AWS_OTHER_GIB else _AWS_GIB.get(family.name[0], 0.0)
    elif family.cloud == "Google" and (match := _GOOGLE.fullmatch(name)):
        last = name.rpartition("-")[2]
        vcpus = int(last) if last.isdigit() else 0
        ratios = dict(zip(("standard", "highmem", "highcpu"), _GOOGLE_GIB.get(match[1], ()), strict=False))
        gib = ratios.get(match[2], 0.0)
    elif family.cloud == "Azure" and (number := re.match(r"(?:Standard_)?([A-Z]+)(\d+)", name)):
        vcpus = int(number[2])
        gib = 2.0 if family.name == "Fsv2" else _AZURE_GIB.get(number[1], 0.0)
    whole = arm or family.name in _WHOLE_CORES
    return InstanceSize(vcpus, vcpus * gib, vcpus if whole else -(-vcpus // 2))


def _aws_vcpus(size: str, *, arm: bool) -> int:
    if size == "large":
        return 2
    if size == "medium":
        return int(arm)
    times, _, rest = size.partition("xlarge")
    return 4 * int(times or 1) if size and not rest and (times.isdigit() or not times) else 0


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
