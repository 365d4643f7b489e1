"""Files that outlive the process: compiled kernels and small notes.

Owns the cache directory, the decision whether to trust what lies in it, and
how entries get in and out. May import nothing of portmm.

An entry is `<key>.so`, `<key>.cubin` or `<key>.clbin`, for the host, CUDA or
OpenCL, with `<key>.txt` beside it, which holds the SHA-256 of
the former; what does not match is treated as absent. Files are never written
in place: a new one is renamed over the old, so a process that has mapped the
old one keeps it. Whoever can write to the directory can run code as its
reader, so a directory or file that another user owns, or that group or others
may write to, is not used. Where the directory cannot be used at all, a private
one that lives as long as the process stands in.

A warm hit is on the way to every first call of a new process, so nothing
imported at the top of this file is slow to import.
"""

from __future__ import annotations

import importlib
import os
import stat
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOCK_PATIENCE = 60.0
"""Seconds to wait for another process that builds the same entry. Above any
compilation of one kernel; a stopped process then costs time, not an answer."""

_STALE = 3600.0  # seconds; a temporary file lives for milliseconds, this one's owner is dead
_CODE = (".so", ".cubin", ".clbin")
_SUFFIXES = (*_CODE, ".txt", ".note", ".lock", ".tmp", ".failed.c", ".failed.cu", ".failed.cl")

_warned: set[str] = set()
_private: dict[int, Path] = {}


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel on disk.

    Attributes:
        key: the build's SHA-256, the file's stem.
        path: the file with the code.
        name: what the builder called it.
        bytes: size of the code.
        seconds: how long it took to compile.
        compiler: version line of the compiler.
        command: the command that made it.
        more: what else the builder wants to know on a warm hit.
    """

    key: str
    path: Path
    name: str
    bytes: int
    seconds: float
    compiler: str
    command: str
    more: Mapping[str, str] = field(default_factory=dict, hash=False)


def _sha256() -> Callable[[bytes], Any]:
    # hashlib loads OpenSSL, half of the five milliseconds in which a new
    # process with a warm cache should be ready; CPython's own module needs 0.1.
    for module in ("_sha2", "_sha256", "hashlib"):
        with suppress(ImportError):
            return cast("Callable[[bytes], Any]", importlib.import_module(module).sha256)
    raise ImportError("no SHA-256 in this Python; install one built with hashlib")


def digest(data: bytes) -> str:
    """SHA-256 of `data` in hexadecimal."""
    return str(_sha256()(data).hexdigest())


def cache_dir() -> Path:
    """Where kernels are kept: `$PORTMM_CACHE`, else `portmm` in the user's cache.

    The latter is what platformdirs answers on Linux, without its import time.
    The directory need not exist.
    """
    chosen = os.environ.get("PORTMM_CACHE", "").strip()
    if chosen:
        return Path(chosen).absolute()
    root = Path(os.environ.get("XDG_CACHE_HOME", "").strip())
    # The XDG specification tells readers to ignore a relative path.
    if not root.is_absolute():
        try:
            root = Path.home() / ".cache"
        except RuntimeError:  # a user id without a home, as in some containers
            root = Path("/.cache")
    return root / "portmm"


def tuned_database() -> Path | None:
    """The user's tuned schedules: `$PORTMM_TUNED`, else `portmm/tuned.sqlite` in the user's data; None if "off".

    Unlike what is compiled, they cannot be made again in a second, so they are no part of the cache.
    """
    chosen = os.environ.get("PORTMM_TUNED", "").strip()
    if chosen:
        return None if chosen == "off" else Path(chosen).absolute()
    root = Path(os.environ.get("XDG_DATA_HOME", "").strip())
    if not root.is_absolute():
        try:
            root = Path.home() / ".local" / "share"
        except RuntimeError:
            root = Path("/.local/share")
    return root / "portmm" / "tuned.sqlite"


def _private_to_user(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _why_not(path: Path) -> str:
    """Why the directory cannot be used, or "" when it can."""
    try:
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        info = path.stat()
        if not _private_to_user(info):
            return "another user owns it or may write to it"
        if os.statvfs(path).f_flag & os.ST_NOEXEC:
            return "its file system is mounted noexec"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _warn(path: Path, reason: str) -> None:
    if str(path) in _warned:
        return
    _warned.add(str(path))
    warnings.warn(
        f"portmm cannot keep kernels in {path} ({reason}), so every process compiles them again; "
        "set PORTMM_CACHE to a directory that only you can write to",
        RuntimeWarning,
        stacklevel=2,
    )


def _shared() -> Path | None:
    path = cache_dir()
    reason = _why_not(path)
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
        import tempfile

        path = Path(tempfile.mkdtemp(prefix="portmm-"))
        _private[owner] = path
        atexit.register(_remove, owner, path)
    return _private[owner]


def _places() -> list[Path]:
    found = (_shared(), _private.get(os.getpid()))
    return [p for p in found if p is not None]


def _read(path: Path) -> bytes | None:
    """The file's bytes, or None where it is absent or somebody else could have written it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or not _private_to_user(info):
                return None
            return file.read()
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step; readers see the old file or the new one."""
    import tempfile

    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _keep_files(files: dict[str, bytes]) -> Path:
    """Write the files, in order, into the cache or else the private directory, and return it."""
    shared = _shared()
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
    """Any text in one line of ASCII, as Python's literals spell it."""
    return text.encode("unicode_escape").decode("ascii")


def _plain(line: str) -> str:
    """What `_escaped` was given."""
    return line.encode("ascii", "replace").decode("unicode_escape")


def _fields(path: Path) -> dict[str, str]:
    text = _read(path)
    lines = (text or b"").decode("utf-8", "surrogateescape").splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line)


def _entry(path: Path, size: int, fields: dict[str, str]) -> Entry | None:
    try:
        own = {name: fields.pop(name) for name in ("name", "compiler", "command")}
        seconds = float(fields.pop("seconds"))
        more = {name: _plain(text) for name, text in fields.items() if name != "sha256"}
        return Entry(key=path.stem, path=path, bytes=size, seconds=seconds, **own, more=more)
    except (KeyError, ValueError):
        return None


def load(key: str, suffix: str = ".so") -> tuple[Entry, bytes] | None:
    """The entry of `key` and its code, checked against its SHA-256, or None."""
    for place in _places():
        path = place / f"{key}{suffix}"
        code = _read(path)
        if code is None:
            continue
        fields = _fields(path.with_suffix(".txt"))
        if fields.get("sha256") == digest(code):
            entry = _entry(path, len(code), fields)
            return None if entry is None else (entry, code)
    return None


def find(key: str, suffix: str = ".so") -> Entry | None:
    """The entry of `key`, its bytes checked against their SHA-256, or None."""
    found = load(key, suffix)
    return None if found is None else found[0]


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
        code: a shared object, or what a device's driver loads.
        name: what the builder calls it.
        seconds: how long it took to compile.
        compiler: version line of the compiler.
        command: the command that made it.
        suffix: of the file, one of those that the module's docstring names.
        more: further facts, of any text; their names are words that no field of an entry has.

    Raises:
        OSError: neither the cache nor a temporary directory can be written to.
    """
    fields = {"sha256": digest(code), "name": name, "seconds": f"{seconds:.4f}"}
    fields |= {"compiler": " ".join(compiler.split()), "command": " ".join(command.split())}
    more = more or {}
    lines = {**fields, **{k: _escaped(v) for k, v in more.items()}}
    text = "".join(f"{k} {v}\n" for k, v in lines.items()).encode("utf-8", "surrogateescape")
    place = _keep_files({f"{key}{suffix}": code, f"{key}.txt": text})
    _sweep(place)
    return Entry(key, place / f"{key}{suffix}", name, len(code), seconds, fields["compiler"], fields["command"], more)


def keep_failed(key: str, source: str, suffix: str = ".c") -> Path:
    """Store a source that did not compile, for inspection, and return its path."""
    name = f"{key}.failed{suffix}"
    return _keep_files({name: source.encode()}) / name


def _sweep(directory: Path) -> None:
    """Remove what writers that were killed have left."""
    limit = time.time() - _STALE
    for path in directory.glob("*.tmp"):
        with suppress(OSError):
            if path.stat().st_mtime < limit:
                path.unlink()


def read_note(name: str) -> str | None:
    """The text kept under `name` by `write_note`, or None.

    Notes are what is slow to find out about a machine: a compiler's version,
    measured rates. `name` may hold letters, digits, dots and hyphens.
    """
    shared = _shared()
    data = None if shared is None else _read(shared / f"{name}.note")
    return None if data is None else data.decode("utf-8", "replace")


def write_note(name: str, text: str) -> None:
    """Keep `text` under `name`; where the cache cannot be written, do nothing."""
    shared = _shared()
    if shared is not None:
        with suppress(OSError):
            _write(shared / f"{name}.note", text.encode("utf-8", "replace"))


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None while another does.

    Raises:
        OSError: this directory cannot hold a lock.
    """
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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


def _acquire(path: Path) -> int | None:
    deadline = time.monotonic() + LOCK_PATIENCE
    try:
        while (fd := _try_lock(path)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
    except OSError:
        return None
    return fd


@contextmanager
def lock(key: str) -> Iterator[None]:
    """Keep others from building `key` meanwhile.

    A courtesy that saves work: where no lock can be had (a read-only or network
    directory, a holder that does not move) the body runs all the same, and
    renaming keeps the files whole. The kernel frees the lock of a killed process.
    """
    shared = _shared()
    path = None if shared is None else shared / f"{key}.lock"
    fd = None if path is None else _acquire(path)
    try:
        yield
    finally:
        if fd is not None and path is not None:
            with suppress(OSError):
                path.unlink()
            os.close(fd)


def cache_entries() -> list[Entry]:
    """The kernels in the cache directory, by name; their bytes are not checked."""
    found = []
    for path in (p for p in _own_files() if p.suffix in _CODE):
        with suppress(OSError):
            found.append(_entry(path, path.stat().st_size, _fields(path.with_suffix(".txt"))))
    return sorted((e for e in found if e is not None), key=lambda e: (e.name, e.key))


def _own_files() -> list[Path]:
    # PORTMM_CACHE may name a directory that holds other things as well.
    try:
        return [p for p in cache_dir().iterdir() if p.name.endswith(_SUFFIXES)]
    except OSError:
        return []


def cache_size() -> int:
    """Bytes that portmm's files take in the cache directory."""
    total = 0
    for path in _own_files():
        with suppress(OSError):
            total += path.lstat().st_size
    return total


def cache_clear() -> int:
    """Remove portmm's files from the cache directory; running processes keep what they loaded.

    Returns:
        The number of files removed.
    """
    removed = 0
    for path in _own_files():
        with suppress(OSError):
            path.unlink()
            removed += 1
    return removed
