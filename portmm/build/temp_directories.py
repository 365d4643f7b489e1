"""Temporary directories of builds and processes, and the removal of stale ones.

Owns directories that exist as long as a build or a process, and their removal when the process was killed. An owner
holds a lock on its directory, which the kernel releases when the owner ends in any way: another process removes a
directory only under that lock, and only if it is old enough for its owner to have taken the lock.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from portmm.build import trusted_files

BUILD_PREFIX, PRIVATE_PREFIX, COPY_PREFIX = "portmm-build-", "portmm-kernels-", "portmm-load-"
"""Prefixes of directories: of a compiler's run, of kernels of one process, and of a copy while it is loaded (see
`build.sealed_library`)."""
LEFT_SECONDS = 600.0
"""Age from which a directory without a lock is stale: its owner takes the lock at once."""

_swept: set[str] = set()


def _lock(path: str) -> int | None:
    """Descriptor with the lock on a directory; None where the file system has no locks, or another process holds it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def create(prefix: str, parent: Path | None = None) -> tuple[Path, int | None]:
    """A new directory of mode 0700, and the descriptor that holds its lock until it is closed.

    Args:
        prefix: one of the prefixes above.
        parent: directory to create it in; by default that of temporary files.

    Raises:
        OSError: it cannot be created, or other users could replace it.
    """
    import tempfile

    folder = Path(tempfile.gettempdir()) if parent is None else parent
    reason = trusted_files.chain_fault(folder)
    if reason:
        raise PermissionError(f"{reason}; set TMPDIR to another directory")
    sweep(folder)
    path = tempfile.mkdtemp(dir=folder, prefix=prefix)
    return Path(path), _lock(path)


@contextmanager
def directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A directory of `create`, removed at the end of the block.

    Raises:
        OSError: as for `create`.
    """
    import shutil

    path, lock = create(prefix, parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def sweep(folder: Path) -> int:
    """Remove directories of killed processes from a folder, once per process.

    Returns:
        The number of directories removed.
    """
    if str(folder) in _swept:
        return 0
    _swept.add(str(folder))
    paths = []
    with suppress(OSError), os.scandir(folder) as entries:
        paths = [x.path for x in entries if x.name.startswith((BUILD_PREFIX, PRIVATE_PREFIX, COPY_PREFIX))]
    return sum(map(_remove_stale, paths))


def _remove_stale(path: str) -> bool:
    """Remove a directory if it is this user's, old, and not locked; returns whether it was removed."""
    import shutil

    lock = None
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or time.time() - info.st_mtime < LEFT_SECONDS:
            return False
        lock = _lock(path)
        # The locked directory is the one that was examined, and not a newer one of the same name.
        if lock is None or not os.path.samestat(info, os.fstat(lock)):
            return False
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    finally:
        if lock is not None:
            os.close(lock)
    return True
