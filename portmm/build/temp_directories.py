"""Temporary directories of processes, and what killed ones have left.

Owns directories that live as long as a build or a process, and their removal when the process could not do it. Imports
`build.trusted_files`. An owner holds a lock on its directory, which the kernel drops when the owner ends in whatever way: another
process removes a directory only under that lock, and only if it is old enough for its owner to have taken the lock.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from portmm.build.trusted_files import chain_fault

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD_PREFIX, PRIVATE_PREFIX, COPY_PREFIX = "portmm-build-", "portmm-kernels-", "portmm-load-"
"""Of directories: that a compiler runs in, that holds kernels of one process, and that holds a copy while it is loaded
(see `sealed`)."""
LEFT_SECONDS = 600.0
"""Age from which a directory that nobody holds was left behind: its owner takes the lock at once."""

_swept: set[str] = set()


def _hold(path: str) -> int | None:
    """A descriptor that holds a directory; None where the file system has no locks, or another process holds it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def make(prefix: str, parent: Path | None = None) -> tuple[Path, int | None]:
    """A new directory of mode 0700, and the descriptor that holds it until it is closed.

    Args:
        prefix: one of the above.
        parent: where; by default where temporary files go.

    Raises:
        OSError: it cannot be made, or other users could replace it.
    """
    import tempfile

    place = Path(tempfile.gettempdir()) if parent is None else parent
    said = chain_fault(place)
    if said:
        raise PermissionError(f"{said}; name another directory in TMPDIR")
    sweep(place)
    made = tempfile.mkdtemp(dir=place, prefix=prefix)
    return Path(made), _hold(made)


@contextmanager
def directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A directory as `make` makes it, removed at the end of the block.

    Raises:
        OSError: as for `make`.
    """
    import shutil

    path, held = make(prefix, parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            os.close(held)


def sweep(place: Path) -> int:
    """Remove what killed processes have left in a directory, once per process.

    Returns:
        The number of directories removed.
    """
    if str(place) in _swept:
        return 0
    _swept.add(str(place))
    found = []
    with suppress(OSError), os.scandir(place) as entries:
        found = [x.path for x in entries if x.name.startswith((BUILD_PREFIX, PRIVATE_PREFIX, COPY_PREFIX))]
    return sum(map(_remove_left, found))


def _remove_left(path: str) -> bool:
    """Remove a directory if it is this user's, old, and nobody holds it."""
    import shutil

    held = None
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or time.time() - info.st_mtime < LEFT_SECONDS:
            return False
        held = _hold(path)
        # What lies there now is what is held, and not a newer directory of the same name.
        if held is None or not os.path.samestat(info, os.fstat(held)):
            return False
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    finally:
        if held is not None:
            os.close(held)
    return True
