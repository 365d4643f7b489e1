"""Files and directories that no other user can have written.

Owns the check whether to trust a directory and all its parents, and how files in it are read, written and created.
A user who can write to a directory can rename any file in it, so that a check of the last directory is not enough:
every directory and symbolic link of a path must belong to root or to this user, and must not be writable by others, or
must have the sticky bit, which keeps other users from renaming files that they do not own.

The check is on the path of every first call of a new process, so nothing imported at the top is slow to import.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

MOST_LINKS = 40
"""Most symbolic links in a path; the Linux kernel's own limit."""

_OVERFLOW_UID = "/proc/sys/kernel/overflowuid"
_UID_MAP = "/proc/self/uid_map"

_known: dict[str, tuple[int, int]] = {}


def private(info: os.stat_result) -> bool:
    """Whether this user owns a file, and no other user may write to it."""
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_unmapped(uid: int) -> bool:
    """Whether an owner has no number in this user namespace, as the machine's root in sandboxes without root."""
    try:
        if uid != int(Path(_OVERFLOW_UID).read_text(encoding="ascii")):
            return False
        ranges = [[int(x) for x in line.split()] for line in Path(_UID_MAP).read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return False
    return not any(first <= uid < first + count for first, _, count in ranges)


def _own_group(gid: int) -> bool:
    """Whether a group is this user's private group: of the same name, and without other members."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _owner_fault(info: os.stat_result, path: str) -> str:
    if info.st_uid in (0, os.geteuid()) or _is_unmapped(info.st_uid):
        return ""
    return f"{path} belongs to another user, with number {info.st_uid}"


def _fault(info: os.stat_result, path: str) -> str:
    """The reason why files in a directory may be another user's, or ""."""
    if not stat.S_ISDIR(info.st_mode):
        return f"{path} is not a directory"
    reason = _owner_fault(info, path)
    if reason or info.st_mode & stat.S_ISVTX:
        return reason
    if info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _own_group(info.st_gid)):
        return f"other users may write to {path}, which has no sticky bit"
    return ""


def chain_fault(path: str | os.PathLike[str]) -> str:
    """The reason why other users may replace a directory, or "": checks it, its parents, and symbolic links on the way.

    Raises:
        OSError: one of them cannot be examined.
    """
    rest = [x for x in os.path.abspath(path).split("/") if x][::-1]  # noqa: PTH100 - once per process, but early
    at, links = "", 0
    reason = _fault(os.lstat("/"), "/")
    while rest and not reason:
        part = rest.pop()
        if part in (".", ".."):
            at = at.rpartition("/")[0] if part == ".." else at
            continue
        here = f"{at}/{part}"
        info = os.lstat(here)
        if not stat.S_ISLNK(info.st_mode):
            at, reason = here, _fault(info, here)
            continue
        # Another user's link, in a directory with the sticky bit, leads to a path of that user's choice.
        links, reason = links + 1, _owner_fault(info, here)
        if links > MOST_LINKS:
            return f"{here} leads through more than {MOST_LINKS} symbolic links"
        to = os.readlink(here)  # noqa: PTH115 - as above
        at = "" if to.startswith("/") else at
        rest += [x for x in to.split("/") if x][::-1]
    return reason


def file_fault(path: str, info: os.stat_result, *, directory: bool = True) -> str:
    """The reason why another user may have written a file, or "": it may be root's, in a directory to trust.

    Args:
        path: the file.
        info: its status.
        directory: whether its directory is to be checked, too.

    Raises:
        OSError: a directory cannot be examined.
    """
    if not stat.S_ISREG(info.st_mode):
        return "it is no regular file"
    reason = _owner_fault(info, path)
    if not reason and info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = "other users may write to it"
    return reason or (chain_fault(os.path.dirname(path)) if directory else "")  # noqa: PTH120 - on the path of first calls


def _make(path: Path) -> None:
    """Create a directory and its missing parents, for this user alone."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for x in reversed(missing):
        x.mkdir(mode=0o700, exist_ok=True)


def directory_fault(path: Path) -> str:
    """The reason why a directory cannot hold machine code, or "" if it can; it is created where it is missing."""
    try:
        try:
            info = os.stat(path)  # noqa: PTH116 - on the path of every first call
        except FileNotFoundError:
            _make(path)
            info = path.stat()
        if not stat.S_ISDIR(info.st_mode):
            return "it is not a directory"
        if not private(info):
            return "another user owns it or may write to it"
        # A directory that was replaced has another inode: one that was checked need not be checked again.
        identity, text = (info.st_dev, info.st_ino), str(path)
        if _known.get(text) != identity:
            reason = chain_fault(path)
            if reason:
                return reason
            _known[text] = identity
        if os.statvfs(path).f_flag & os.ST_NOEXEC:
            return "its file system is mounted noexec"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def read(path: str | os.PathLike[str]) -> bytes | None:
    """The bytes of a regular file that no other user can have written, or None."""
    file = read_with(path)
    return None if file is None else file[0]


def read_with(path: str | os.PathLike[str]) -> tuple[bytes, os.stat_result] | None:
    """The bytes of a file as by `read`, and its status."""
    try:
        # O_NONBLOCK: opening a pipe without a writer would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or not private(info):
            return None
        with open(fd, "rb", closefd=False) as file:
            return file.read(), info
    except OSError:
        return None
    finally:
        os.close(fd)


def write(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old content or the new."""
    import tempfile

    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(temporary).rename(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        raise
