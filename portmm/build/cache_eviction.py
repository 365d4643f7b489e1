"""Size limit of the cache, and eviction.

Owns the limit, and the selection of files to remove. The least recently used are removed first, entries of other
versions of portmm before those of this one; entries of other versions that were not used for two weeks are removed in
any case, and so are notes about failures that are over. Notes of measured rates stay: they can be reproduced only on
an idle machine.

An entry that is removed while another process reads it counts as absent there, and is built again: readers read all
bytes of a file, check them, and load those bytes.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from portmm.build.trusted_files import read
from portmm.util.records import dataclass
from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_LIMIT = 1 << 30
"""Bytes: ten thousand kernels for a processor, of 20 to 60 KB with their manifests, and as many again for devices."""
KEPT_SHARE = 0.9
"""Share of the limit that an eviction leaves in use, so that the next entry does not cause another."""
GONE_SECONDS = 14 * 86400.0
"""Age of the last use from which entries of another version are removed."""
PASSED_SECONDS = 86400.0
"""Age from which a note about a failure, or a file of a writer that was killed, is removed."""
USED_SECONDS = 86400.0
"""Age from which a time of use is written again: not on every call, since the file may be on a file server."""
EVERY = 32
"""New entries between two scans of the whole directory."""

CODE = (".so", ".cubin", ".clbin")
"""Suffixes of files with code."""
FAILED = (".failed.c", ".failed.cu", ".failed.cl")
"""Suffixes of sources that did not compile."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class _Group:
    """Files that belong together.

    Attributes:
        names: names of the files.
        bytes: their total size.
        used: time of the last write or use of any of them, in seconds of `time.time`.
        current: whether they belong to this version of portmm, or to none.
    """

    names: tuple[str, ...]
    bytes: int
    used: float
    current: bool


def limit() -> int | None:
    """Limit in bytes of the cache's size: `$PORTMM_CACHE_LIMIT`, as 500M or 2G; None if that is "off"."""
    return _limit(os.environ.get("PORTMM_CACHE_LIMIT", "").strip())


@cache
def _limit(text: str) -> int | None:
    if not text or text == "off":
        return None if text else DEFAULT_LIMIT
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:I?B)?", text.upper())
    count = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if 0 < count < 1 << 62:
        return count
    warn(f"PORTMM_CACHE_LIMIT is {text!r}, not a size as 500M or 2G, or off: the limit is 1G")
    return DEFAULT_LIMIT


def used(path: Path, info: os.stat_result) -> None:
    """Record the use of an entry in its file's time of modification."""
    if time.time() - info.st_mtime > USED_SECONDS:
        with suppress(OSError):
            os.utime(path)


def _stem(name: str) -> str:
    """Part of a name that files of one entry share; empty for files that are never evicted."""
    for suffix in (*CODE, ".txt", *FAILED):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + (".failed" if suffix in FAILED else "")
    return name if name.startswith(("book-", "hung-", "made-")) and name.endswith(".note") else ""


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
                    os.unlink(entry.path)  # noqa: PTH108 - left by a writer that was killed
    groups = []
    for stem, every in files.items():
        names = tuple(name for name, _, _ in every)
        manifest = read(directory / f"{stem}.txt") if f"{stem}.txt" in names else None
        current = manifest is None or f"\nversion {version}\n".encode() in manifest
        groups.append(_Group(names, sum(x for _, x, _ in every), max(x for _, _, x in every), current))
    return groups


def tidy(directory: Path, version: str) -> int:
    """Bring a cache directory under its limit, and remove expired files.

    Args:
        directory: a directory that only this user can write to.
        version: portmm's, as in manifests of entries.

    Returns:
        The number of files removed.
    """
    now, most, groups = time.time(), limit(), _groups(directory, version)
    gone = [g for g in groups if _expired(g, now)]
    left = [g for g in groups if not _expired(g, now)]
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


def _expired(g: _Group, now: float) -> bool:
    """Whether files are about a failure that is over, or of another version and no longer used."""
    if g.names[0].startswith("hung-") or ".failed." in g.names[0]:
        return now - g.used > PASSED_SECONDS
    return not g.current and now - g.used > GONE_SECONDS
