"""Contents of the cache directory as a whole: its entries, their size, and their removal."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from portmm.build.cache import Entry, cache_dir, entry_of
from portmm.build.cache_eviction import CODE, FAILED

if TYPE_CHECKING:
    from pathlib import Path

_SUFFIXES = (*CODE, *FAILED, ".txt", ".note", ".lock", ".tmp")


def cache_entries() -> list[Entry]:
    """The kernels in the cache directory, by name; their bytes are not checked."""
    entries = []
    for path in (p for p in _own_files() if p.suffix in CODE):
        with suppress(OSError):
            entries.append(entry_of(path))
    return sorted((e for e in entries if e is not None), key=lambda e: (e.name, e.key))


def notes_size(start: str) -> tuple[int, int]:
    """Lines and bytes of the notes in the cache directory whose names start so."""
    lines = total = 0
    for path in _own_files():
        if path.name.startswith(start) and path.suffix == ".note":
            with suppress(OSError):
                text = path.read_bytes()
                lines, total = lines + text.count(b"\n"), total + len(text)
    return lines, total


def cache_size() -> int:
    """Total size in bytes of portmm's files in the cache directory."""
    total = 0
    for path in _own_files():
        with suppress(OSError):
            total += path.lstat().st_size
    return total


def cache_clear() -> int:
    """Remove portmm's files from the cache directory; running processes keep the code they loaded.

    Returns:
        The number of files removed.
    """
    removed = 0
    for path in _own_files():
        with suppress(OSError):
            path.unlink()
            removed += 1
    return removed


def _own_files() -> list[Path]:
    # PORTMM_CACHE may name a directory that contains other files as well.
    try:
        return [p for p in cache_dir().iterdir() if p.name.endswith(_SUFFIXES)]
    except OSError:
        return []
