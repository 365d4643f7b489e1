"""Lock on the build of one kernel, shared by all processes.

Programs that are started do not inherit its descriptor, and a forked child closes it: a lock is free as soon as the
process that holds it ends, whatever its children do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from portmm.build.cache import usable_dir
from portmm.util import locks

if TYPE_CHECKING:
    from pathlib import Path

LOCK_SECONDS = 60.0
"""Seconds to wait for another process that builds the same entry. Above any
compilation of one kernel; a stopped process then costs time, not the result."""
POLL_SECONDS = 0.002
"""Seconds between two attempts: a compilation takes 30 to 600 ms, and an attempt some 10 us."""
_locked: set[int] = set()
"""Descriptors of locks of this process. They change under `locks.starting`, which a fork waits for."""


@contextmanager
def build_lock(key: str) -> Iterator[None]:
    """Lock on the build of `key`, shared by all processes.

    It only saves work: where it cannot be acquired (a read-only or network
    directory, a holder that is stopped) the body runs without it, and
    renaming keeps the files consistent. The kernel frees the lock of a killed process.
    """
    shared = usable_dir()
    path = None if shared is None else shared / f"{key}.lock"
    fd = None if path is None else _acquire(path)
    try:
        yield
    finally:
        with locks.starting:
            if fd is not None and path is not None and fd in _locked:  # not in a child that was forked meanwhile
                with suppress(OSError):
                    path.unlink()
                _locked.remove(fd)
                os.close(fd)


def _in_child() -> None:
    for fd in _locked:
        os.close(fd)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _acquire(path: Path) -> int | None:
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while True:
            with locks.starting:
                if (fd := _try_lock(path)) is not None:
                    _locked.add(fd)
            if fd is not None or time.monotonic() >= deadline:
                return fd
            time.sleep(POLL_SECONDS)
    except OSError:
        return None


def _try_lock(path: Path) -> int | None:
    """Descriptor that holds the lock, or None while another process holds it.

    Raises:
        OSError: this directory does not support locks.
    """
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder removes the file; only its current inode counts.
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
