"""A digest of every text that a compiler is given: of kernels of all kinds, and of the run time.

`python tests/support/manifest.py` says which cases differ from `manifest.txt`, `--write` rewrites it. A line is a
family, a case and a digest of what is emitted for it. A change that only moves code changes no line. Comments at the
head of a kernel, which name its schedule, have one line for each family, so that another spelling of schedules is told
from other code; the number of a version is left out. Nothing depends on the machine that this runs on.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import manifest_chosen
import manifest_convolutions
import manifest_devices
import manifest_host
from manifest_case import Case
from places import TESTS

from portmm.ir import abi
from portmm.runtime import cpu as cpu_runtime
from portmm.schedule.programs import PROGRAMS
from portmm.target.target import names_of
from portmm.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FILE = TESTS / "manifest.txt"
DIGITS = 16
"""Hexadecimal, of a digest."""
SHOWN = 20
"""Cases that a comparison names."""
AGAIN = "if that is as it should be, `python tests/support/manifest.py --write`"
KINDS = (*PROGRAMS, "attention", "rows", "columns", "lines", "pack", "fold", "peak")


def _runtime() -> Iterator[Case]:
    """The C of the run time, in files and as it is put together: without comments and spaces, as wheels have none."""
    yield Case("abi", abi.ARGS)
    yield Case("extension", _bare(cpu_runtime.source(python=True)))
    yield Case("twin", _bare(cpu_runtime.source(python=False)))
    for path in sorted(Path(cpu_runtime.__file__).parent.glob("*.[ch]")):
        yield Case(path.name, _bare(path.read_text(encoding="utf-8")))


def _bare(text: str) -> str:
    """C without comments, and with single spaces."""
    return " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).split())


FAMILIES: dict[str, Callable[[], Iterable[Case]]] = {
    **{name: partial(manifest_host.cases, name) for name in names_of("cpu", "isa")},
    **{name: partial(manifest_devices.cases, name) for name in manifest_devices.FAMILIES},
    **{f"chip {name}": partial(manifest_chosen.cases, name) for name in (*names_of("cpu"), *names_of("device"))},
    "convolutions": manifest_convolutions.cases,
    "run time": _runtime,
}


def digests(family: str) -> dict[str, str]:
    """Case -> digest, of a family."""
    found: dict[str, str] = {}
    heads = []
    for case in FAMILIES[family]():
        assert case.name not in found, f"two cases of {family} are called {case.name}"
        found[case.name] = _digest(case.body)
        heads.append(f"{case.name}\n{case.head.replace(VERSION, 'VERSION')}")
    return found | {"comments": _digest("\n".join(sorted(heads)))}


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:DIGITS]


# -- the file -------------------------------------------------------------------------------


@cache
def read(path: Path = FILE) -> dict[str, dict[str, str]]:
    """Family -> case -> digest, as last written."""
    found: dict[str, dict[str, str]] = {}
    for line in path.read_text().splitlines():
        name, _, digest = line.rpartition(" ")
        family, _, case = name.partition(": ")
        found.setdefault(family, {})[case] = digest
    return found


def write(found: dict[str, dict[str, str]], path: Path = FILE) -> None:
    """Put all digests into the file, in order."""
    path.write_text("".join(sorted(f"{name} {digest}\n" for name, digest in _flat(found).items())))


def _flat(found: dict[str, dict[str, str]]) -> dict[str, str]:
    """Digests by the names of families and cases."""
    return {f"{family}: {case}": digest for family, cases in found.items() for case, digest in cases.items()}


# -- comparison -----------------------------------------------------------------------------


@dataclass
class Difference:
    """Cases by what has become of them."""

    changed: list[str] = field(default_factory=list)
    appeared: list[str] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.changed or self.appeared or self.vanished)

    def __str__(self) -> str:
        lines = []
        for verb, names in (("changed", self.changed), ("appeared", self.appeared), ("vanished", self.vanished)):
            counts = Counter(map(_kind, names)).most_common()
            lines += [f"{len(names)} {verb}: {', '.join(f'{n} {kind}' for kind, n in counts)}"] if names else []
            lines += [f"  {name}" for name in names[:SHOWN]]
            lines += [f"  and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
        return "\n".join([*lines, AGAIN])


def _kind(name: str) -> str:
    """The program that a case is of."""
    family, _, case = name.partition(": ")
    return next((word for word in case.split() if word in KINDS), family)


def compared(stored: dict[str, dict[str, str]], found: dict[str, dict[str, str]]) -> Difference:
    """What differs, of the families in either."""
    was, now = _flat(stored), _flat(found)
    changed = [name for name in sorted(was.keys() & now.keys()) if was[name] != now[name]]
    return Difference(changed, sorted(now.keys() - was.keys()), sorted(was.keys() - now.keys()))


def main() -> int:
    """Compare with the file, or write it."""
    parser = argparse.ArgumentParser(description="Digests of all emitted text, compared with those in manifest.txt.")
    parser.add_argument("families", nargs="*", help="as lines of the file begin; all by default")
    parser.add_argument("--write", action="store_true", help="rewrite the file")
    parser.add_argument("--jobs", type=int, help="processes; as many as there are processors by default")
    given = parser.parse_args()
    strange = [name for name in given.families if name not in FAMILIES]
    if strange:
        parser.error(f"no family is called {', '.join(strange)}; there are {', '.join(FAMILIES)}")
    names = given.families or list(FAMILIES)
    with ProcessPoolExecutor(given.jobs) as processes:
        found = dict(zip(names, processes.map(digests, names), strict=True))
    stored = read() if FILE.exists() else {}
    kept = {x: cases for x, cases in stored.items() if given.families and x not in names}
    difference = compared({x: cases for x, cases in stored.items() if x not in kept}, found)
    print(difference or "nothing has changed")
    if given.write:
        write(kept | found)
    return bool(difference) and not given.write


if __name__ == "__main__":
    sys.exit(main())
