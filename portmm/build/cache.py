"""Persistent cache of compiled kernels and notes.

Owns the cache directory, and the reading and writing of single entries; `build.cache_contents` has the directory as a
whole.

An entry is `<key>.so`, `<key>.cubin` or `<key>.clbin`, for the host, CUDA or
OpenCL, with a manifest `<key>.txt`, which holds the SHA-256 of
the former; an entry that does not match is treated as absent. Files are never written
in place: a new one is renamed over the old, so a process that has mapped the
old one keeps it. A user who can write to the directory can run code as its
reader, so a directory or file that others can write or replace is not used
(see `build.trusted_files`), and code is loaded from the bytes that were checked
(see `build.sealed_library`). Where the directory cannot be used at all, a private
directory, removed when the process ends, replaces it.

A cache hit is on the path of every first call of a new process, so nothing
imported at the top of this file is slow to import.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import Any, cast

from portmm.build.cache_eviction import EVERY, tidy, used
from portmm.build.elf import fault
from portmm.build.trusted_files import directory_fault, private, read, read_with
from portmm.build.trusted_files import write as _write
from portmm.util.records import dataclass
from portmm.util.user_warnings import warn
from portmm.version import VERSION

_ABOUT = ("sha256", "key", "version")
"""Fields of a manifest that identify the file it belongs to."""

_warned: set[str] = set()
_private: dict[int, Path] = {}


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel on disk.

    Attributes:
        key: the build's SHA-256, the file's stem.
        path: the file with the code.
        name: the builder's name for it.
        bytes: size of the code.
        seconds: time of the compilation.
        compiler: version line of the compiler.
        command: the command that compiled it.
        more: further facts that the builder needs on a cache hit.
    """

    key: str
    path: Path
    name: str
    bytes: int
    seconds: float
    compiler: str
    command: str
    more: Mapping[str, str] = field(default_factory=dict, hash=False)


@lru_cache(maxsize=1)  # an import of an absent module searches every path
def sha256() -> Callable[[bytes], Any]:
    """CPython's own SHA-256, which loads in 0.1 ms; hashlib's is OpenSSL's, which takes two.

    Raises:
        ImportError: this Python has neither.
    """
    own = "_sha2" if sys.version_info >= (3, 12) else "_sha256"  # a search for an absent module takes as long
    for module in (own, "hashlib"):
        with suppress(ImportError):
            return cast("Callable[[bytes], Any]", importlib.import_module(module).sha256)
    raise ImportError("no SHA-256 in this Python; install one built with hashlib")


def digest(data: bytes) -> str:
    """SHA-256 of `data` in hexadecimal."""
    return str(sha256()(data).hexdigest())


def _absolute(path: str) -> Path:
    """Absolute path of a directory or file that the user names."""
    return _path(path) if path[0] == "/" else Path(path).absolute()


_path = lru_cache(maxsize=16)(Path)  # on the path of every first call


def cache_dir() -> Path:
    """Directory of the cache: `$PORTMM_CACHE`, else `portmm` in the user's cache directory.

    The latter is the result of platformdirs on Linux, without its import time.
    The directory need not exist.
    """
    override = os.environ.get("PORTMM_CACHE", "").strip()
    if override:
        return _absolute(override)
    return _xdg_path("XDG_CACHE_HOME", ".cache", "portmm")


def _xdg_path(variable: str, default: str, name: str) -> Path:
    """Path of a user's file by the XDG specification, which requires that a relative directory is ignored."""
    root = os.environ.get(variable, "").strip()
    if root[:1] == "/":
        return _path(f"{root}/{name}")
    try:
        return _path(f"{os.environ.get('HOME') or Path.home()}/{default}/{name}")
    except RuntimeError:  # a user id without a home, as in some containers
        return _path(f"/{default}/{name}")


def tuned_database() -> Path | None:
    """Path of the tuning database: `$PORTMM_TUNED`, else `portmm/tuned.sqlite` in the user's data; None if "off".

    Unlike kernels, tuned schedules cannot be reproduced in a second, so they are no part of the cache.
    """
    override = os.environ.get("PORTMM_TUNED", "").strip()
    if override:
        return None if override == "off" else _absolute(override)
    return _xdg_path("XDG_DATA_HOME", ".local/share", "portmm/tuned.sqlite")


def _warn(path: Path, reason: str) -> None:
    if str(path) in _warned:
        return
    _warned.add(str(path))
    warn(
        f"portmm cannot keep kernels in {path} ({reason}), so every process compiles them again; "
        "set PORTMM_CACHE to a directory that only you can write to"
    )


def usable_dir() -> Path | None:
    """The cache directory, created if it is missing; None, with one warning per process, where it cannot be used."""
    path = cache_dir()
    reason = directory_fault(path)
    if reason:
        _warn(path, reason)
        return None
    return path


def _remove(owner: int, path: Path) -> None:
    # A forked child inherits the exit handler but not the directory.
    if os.getpid() == owner:
        import shutil

        shutil.rmtree(path, ignore_errors=True)


def private_dir() -> Path:
    """A directory of this process alone, removed at exit.

    Raises:
        OSError: there is no writable temporary directory.
    """
    owner = os.getpid()
    if owner not in _private:
        import atexit

        from portmm.build.temp_directories import PRIVATE_PREFIX, create

        # The lock on the directory ends with the process.
        path, _ = create(PRIVATE_PREFIX)
        _private[owner] = path
        atexit.register(_remove, owner, path)
    return _private[owner]


def _directories() -> list[Path]:
    """Directories that entries are read from."""
    directories = (usable_dir(), _private.get(os.getpid()))
    return [p for p in directories if p is not None]


def _keep_files(files: dict[str, bytes]) -> Path:
    """Write the files, in order, to the cache or else to the private directory, and return that directory."""
    shared = usable_dir()
    if shared is not None:
        try:
            for name, data in files.items():
                _write(shared / name, data)
        except OSError as error:
            _warn(shared, error.strerror or str(error))
        else:
            return shared
    own = private_dir()
    for name, data in files.items():
        _write(own / name, data)
    return own


def _escaped(text: str) -> str:
    """Text as one line of ASCII, with the escapes of Python's literals."""
    return text.encode("unicode_escape").decode("ascii")


def _unescaped(line: str) -> str:
    """Inverse of `_escaped`."""
    return line.encode("ascii", "replace").decode("unicode_escape")


def _fields(path: Path) -> dict[str, str]:
    text = read(path)
    lines = (text or b"").decode("utf-8", "surrogateescape").splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line)


def entry_of(path: Path) -> Entry | None:
    """The entry of a file with code, whose bytes are not checked; None if its manifest is missing or malformed.

    Raises:
        OSError: there is no such file.
    """
    return _entry(path, path.stat().st_size, _fields(path.with_suffix(".txt")))


def _entry(path: Path, size: int, fields: dict[str, str]) -> Entry | None:
    try:
        own = {name: fields.pop(name) for name in ("name", "compiler", "command")}
        seconds = float(fields.pop("seconds"))
        more = {name: _unescaped(text) for name, text in fields.items() if name not in _ABOUT}
        return Entry(key=path.stem, path=path, bytes=size, seconds=seconds, **own, more=more)
    except (KeyError, ValueError):
        return None


def load(key: str, suffix: str = ".so") -> tuple[Entry, bytes] | None:
    """The entry of `key` and its code, checked against its SHA-256, or None.

    A shared object is also checked for completeness: no segment ends beyond the end of the file.
    """
    for directory in _directories():
        path = directory / f"{key}{suffix}"
        file = read_with(path)
        if file is None:
            continue
        code, info = file
        fields = _fields(path.with_suffix(".txt"))
        if fields.get("sha256") != digest(code) or fields.get("key") != key or (suffix == ".so" and fault(code)):
            continue
        entry = _entry(path, len(code), fields)
        if entry is not None:
            used(path, info)
            return entry, code
    return None


def find(key: str, suffix: str = ".so") -> Entry | None:
    """The entry of `key`, its bytes checked against their SHA-256, or None."""
    loaded = load(key, suffix)
    return None if loaded is None else loaded[0]


def keep(
    key: str,
    code: bytes,
    *,
    name: str,
    seconds: float,
    compiler: str,
    command: str,
    suffix: str = ".so",
    more: Mapping[str, str] | None = None,
) -> Entry:
    """Store code and return its entry.

    Args:
        key: the build's SHA-256.
        code: a shared object, or a binary for a device's driver.
        name: the builder's name for it.
        seconds: time of the compilation.
        compiler: version line of the compiler.
        command: the command that compiled it.
        suffix: suffix of the file, one of those in the module's docstring.
        more: further facts, of any text; their names differ from the fields of an entry.

    Raises:
        OSError: neither the cache nor a temporary directory can be written to.
    """
    fields = {"sha256": digest(code), "key": key, "version": VERSION, "name": name, "seconds": f"{seconds:.4f}"}
    fields |= {"compiler": " ".join(compiler.split()), "command": " ".join(command.split())}
    more = more or {}
    lines = {**fields, **{k: _escaped(v) for k, v in more.items()}}
    text = "".join(f"{k} {v}\n" for k, v in lines.items()).encode("utf-8", "surrogateescape")
    directory = _keep_files({f"{key}{suffix}": code, f"{key}.txt": text})
    _tidy(directory)
    path = directory / f"{key}{suffix}"
    return Entry(key, path, name, len(code), seconds, fields["compiler"], fields["command"], more)


def keep_failed(key: str, source: str, suffix: str = ".c") -> Path:
    """Store a source that did not compile, for inspection, and return its path."""
    name = f"{key}.failed{suffix}"
    return _keep_files({name: source.encode()}) / name


_kept: dict[Path, int] = {}


def _tidy(directory: Path) -> None:
    """Bring a directory under its limit, on every `EVERY`-th new entry."""
    count = _kept.get(directory, 0)
    _kept[directory] = count + 1
    if count % EVERY == 0:
        from portmm.build.temp_directories import sweep

        sweep(directory)
        tidy(directory, VERSION)


def read_note(name: str) -> str | None:
    """Text of the note `name`, or None.

    Notes hold facts about a machine that are slow to obtain: a compiler's version,
    measured rates. `name` may contain letters, digits, dots and hyphens.
    """
    shared = usable_dir()
    file = None if shared is None else read_with(path := shared / f"{name}.note")
    if file is None:
        return None
    used(path, file[1])
    return file[0].decode("utf-8", "replace")


def write_note(name: str, text: str) -> None:
    """Write the note `name`; where the cache cannot be written, do nothing."""
    shared = usable_dir()
    if shared is not None:
        with suppress(OSError):
            _write(shared / f"{name}.note", text.encode("utf-8", "replace"))


def append_note(name: str, lines: str) -> None:
    """Append complete lines to the note `name` in one write; where the cache cannot be written, do nothing.

    Lines of several processes do not mix. Each write begins with a newline, so that a line which a full disk cut
    short does not spoil the next.
    """
    path, data = f"{cache_dir()}/{name}.note", f"\n{lines}".encode("utf-8", "replace")
    with suppress(OSError):
        if path in _appended:
            fd, identity = _appended[path]
            info = os.fstat(fd)
            if (info.st_dev, info.st_ino) == identity and info.st_nlink and private(info):
                os.write(fd, data)
                return
    _append_first(path, data)


_MOST_APPENDED = 8
_appended: dict[str, tuple[int, tuple[int, int]]] = {}
"""Notes that are open, by path: file descriptor, device and inode. Opening one takes longer than writing a line."""


def _append_first(path: str, data: bytes) -> None:
    """Open a note, append to it, and leave it open for the next line."""
    if usable_dir() is None:
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        fd = os.open(path, flags, 0o600)
        info = os.fstat(fd)
        _close_note(path)
        for other in list(_appended)[: 1 - _MOST_APPENDED]:
            _close_note(other)
        _appended[path] = fd, (info.st_dev, info.st_ino)
        if S_ISREG(info.st_mode) and private(info):
            os.write(fd, data)
        else:
            _close_note(path)


def _close_note(path: str) -> None:
    """Close a note, unless the process has closed it, and the descriptor is another file's."""
    fd, identity = _appended.pop(path, (-1, (0, 0)))
    with suppress(OSError):
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino) == identity:
            os.close(fd)
