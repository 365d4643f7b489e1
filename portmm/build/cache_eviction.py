"""The size of the cache, and what leaves it.

Owns the limit, and the choice of what is removed. Imports `build.trusted_files`. What was used least recently goes first, entries
of other versions of portmm before those of this one; those of other versions that were not used for two weeks go in
any case, and so do notes about failures that are over. Notes of measured rates stay: it takes a quiet machine to
make them again.

An entry that is removed while another process reads it counts as absent there, and is built again: readers take a
file's bytes as a whole, check them, and load those bytes.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from portmm.build.trusted_files import read
from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_LIMIT = 1 << 30
"""Bytes: ten thousand kernels for a processor, of 20 to 60 KB with their manifests, and as many again for devices."""
KEPT_SHARE = 0.9
"""Of the limit, what is left after an eviction, so that the next entry does not cause another."""
GONE_SECONDS = 14 * 86400.0
"""After which what another version has made, and nobody used, counts as that of a version that is gone."""
PASSED_SECONDS = 86400.0
"""After which a note about a failure, or a file of a writer that was killed, is of no use."""
USED_SECONDS = 86400.0
"""How old a time of use may be before it is written again: not on every call, since a file server may hold it."""
EVERY = 32
"""New entries from one look at the whole directory to the next."""

_CODE = (".so", ".cubin", ".clbin")
_FAILED = (".failed.c", ".failed.cu", ".failed.cl")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class _Group:
    """Files that belong together.

    Attributes:
        names: of the files.
        bytes: of all.
        used: when the latest of them was written or used, in seconds of `time.time`.
        current: they belong to this version of portmm, or to none.
    """

    names: tuple[str, ...]
    bytes: int
    used: float
    current: bool


def limit() -> int | None:
    """The most bytes that the cache may take: `$PORTMM_CACHE_LIMIT`, as 500M or 2G; None if that is "off"."""
    return _limit(os.environ.get("PORTMM_CACHE_LIMIT", "").strip())


@cache
def _limit(text: str) -> int | None:
    if not text or text == "off":
        return None if text else DEFAULT_LIMIT
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:I?B)?", text.upper())
    count = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if 0 < count < 1 << 62:
        return count
    said = f"PORTMM_CACHE_LIMIT is {text!r}, not a size as 500M or 2G, or off: the limit is 1G"
    warn(said)
    return DEFAULT_LIMIT


def used(path: Path, info: os.stat_result) -> None:
    """Take down that an entry was used."""
    if time.time() - info.st_mtime > USED_SECONDS:
        with suppress(OSError):
            os.utime(path)


def _stem(name: str) -> str:
    """The part of a name that files of one entry share; empty for files that stay."""
    for suffix in (*_CODE, ".txt", *_FAILED):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + (".failed" if suffix in _FAILED else "")
    return name if name.startswith(("book-", "hung-")) and name.endswith(".note") else ""


def _groups(directory: Path, version: str) -> list[_Group]:
    files: dict[str, list[tuple[str, int, float]]] = defaultdict(list)
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            stem = _stem(entry.name)
            with suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if stem:
                    files[stem].append((entry.name, info.st_size, info.st_mtime))
                elif entry.name.endswith((".tmp", ".lock")) and time.time() - info.st_mtime > PASSED_SECONDS:
                    os.unlink(entry.path)  # noqa: PTH108 - what writers that were killed have left
    found = []
    for stem, every in files.items():
        names = tuple(name for name, _, _ in every)
        manifest = read(directory / f"{stem}.txt") if f"{stem}.txt" in names else None
        current = manifest is None or f"\nversion {version}\n".encode() in manifest
        found.append(_Group(names, sum(x for _, x, _ in every), max(x for _, _, x in every), current))
    return found


def tidy(directory: Path, version: str) -> int:
    """Bring a cache directory under its limit, and drop what is of no use.

    Args:
        directory: a directory that only this user can write to.
        version: of portmm, as manifests of entries have it.

    Returns:
        The number of files removed.
    """
    now, most, groups = time.time(), limit(), _groups(directory, version)
    gone = [g for g in groups if _over(g, now)]
    left = [g for g in groups if not _over(g, now)]
    total = sum(g.bytes for g in left)
    if most is not None and total > most:
        for g in sorted(left, key=lambda g: (g.current, g.used)):
            gone.append(g)
            total -= g.bytes
            if total <= KEPT_SHARE * most:
                break
    removed = 0
    for g in gone:
        for name in g.names:
            with suppress(OSError):
                os.unlink(directory / name)  # noqa: PTH108 - as above
                removed += 1
    return removed


def _over(g: _Group, now: float) -> bool:
    """Whether files are of no use: about a failure that is over, or of another version and not used any more."""
    if g.names[0].startswith("hung-") or ".failed." in g.names[0]:
        return now - g.used > PASSED_SECONDS
    return not g.current and now - g.used > GONE_SECONDS
