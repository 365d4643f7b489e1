"""Loading of shared objects from verified bytes.

Owns the transfer of verified bytes to the dynamic loader, which accepts only a path: a sealed file in memory, which no
process can change or replace, named by its descriptor in /proc; where such files do not exist, or the loader may not
map them, a copy in a directory of mode 0700 that is removed at once.

A path under /proc has no meaning to debuggers and profilers. With PORTMM_LOAD=file in the environment the loader
opens the file that the bytes were read from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")
FILE = "file"
"""The setting of `$PORTMM_LOAD`."""

# Linux, include/uapi/linux/fcntl.h: no more seals, and no shrinking, growing and writing.
F_ADD_SEALS, SEALS = 1033, 1 | 2 | 4 | 8

_LONGEST_NAME = 200  # of the 249 bytes that memfd_create(2) takes

_numbers = count()


@cache
def _fcntl() -> Any:
    # The module of that name takes 0.2 ms to import, and ctypes is loaded already: the snapshot of the host needs it.
    import ctypes

    return ctypes.CDLL(None, use_errno=True).fcntl


def _sealed(name: str, code: bytes) -> int:
    """Descriptor of a sealed file in memory with these bytes.

    Raises:
        OSError: the system does not support one.
    """
    fd = os.memfd_create(name[:_LONGEST_NAME], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        at = 0
        while at < len(code):
            at += os.write(fd, memoryview(code)[at:])
        if _fcntl()(fd, F_ADD_SEALS, SEALS):
            raise OSError(f"{name} cannot be sealed")  # noqa: TRY301 - as what the system calls raise
    except BaseException:
        os.close(fd)
        raise
    return fd


def _path_of(fd: int) -> str:
    """Path to a descriptor, different from that of every earlier load of this process.

    glibc identifies a library by the path it was loaded from, and numbers of descriptors are reused. So the path
    encodes a counter, with detours for its binary digits.
    """
    detours = "".join("../fd/" if digit == "1" else "./" for digit in f"{next(_numbers):b}")
    return f"/proc/self/fd/{detours}{fd}"


def load(code: bytes, path: Path, opener: Callable[[str], T]) -> T:
    """Result of `opener` for a path to these bytes of a shared object.

    Args:
        code: the verified bytes of the file.
        path: the file that they were read from.
        opener: loads the shared object at a path.

    Raises:
        Exception: the error of `opener` for the last path tried.
    """
    if _from_file(os.environ.get("PORTMM_LOAD", "")) and path.is_file():  # an object of a bundle is no file
        return opener(str(path))
    try:
        fd = _sealed(path.stem, code)
    except (AttributeError, OSError):  # no such call in this libc or kernel, or a policy against it
        return _load_copy(code, path, opener)
    try:
        return opener(_path_of(fd))
    except Exception:  # noqa: BLE001 - no /proc, or a policy against code from memory; the copy decides
        return _load_copy(code, path, opener)
    finally:
        os.close(fd)


@cache
def _from_file(setting: str) -> bool:
    if setting not in ("", FILE):
        warn(f"PORTMM_LOAD is {setting!r}, not {FILE}: code is loaded from memory")
    return setting == FILE


def _load_copy(code: bytes, path: Path, opener: Callable[[str], T]) -> T:
    """Result of `opener` for a copy in the file's directory, where code may be mapped, in a folder of mode 0700."""
    from portmm.build.temp_directories import COPY_PREFIX, directory

    with directory(COPY_PREFIX, path.parent) as folder:
        copy = f"{folder}/{path.name}"
        fd = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(code)
        return opener(copy)
