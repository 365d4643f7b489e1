"""Files that outlive the process: compiled kernels and small notes.

Owns the cache directory, and how entries get in and out. May import `build.elf`,
`build.cache_eviction`, `build.temp_directories`, `build.trusted_files`, `version`.

An entry is `<key>.so`, `<key>.cubin` or `<key>.clbin`, for the host, CUDA or
OpenCL, with `<key>.txt` beside it, which holds the SHA-256 of
the former; what does not match is treated as absent. Files are never written
in place: a new one is renamed over the old, so a process that has mapped the
old one keeps it. Whoever can write to the directory can run code as its
reader, so a directory or file that others can write or replace is not used
(see `trusted`), and code is loaded from the bytes that were checked (see
`sealed`). Where the directory cannot be used at all, a private
one that lives as long as the process stands in.

A warm hit is on the way to every first call of a new process, so nothing
imported at the top of this file is slow to import.
"""

from __future__ import annotations

import importlib
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, cast

from portmm.build.cache_eviction import EVERY, limit, tidy, used
from portmm.build.elf import fault
from portmm.build.trusted_files import private, read, read_with, why_not
from portmm.build.trusted_files import write as _write
from portmm.util.user_warnings import warn
from portmm.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOCK_PATIENCE = 60.0
"""Seconds to wait for another process that builds the same entry. Above any
compilation of one kernel; a stopped process then costs time, not an answer."""

_CODE = (".so", ".cubin", ".clbin")
_SUFFIXES = (*_CODE, ".txt", ".note", ".lock", ".tmp", ".failed.c", ".failed.cu", ".failed.cl")

# Of a manifest, what says which file it belongs to.
_ABOUT = ("sha256", "key", "version")

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


@lru_cache(maxsize=1)  # a module that is not there is looked for on all paths
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


def _place(chosen: str) -> Path:
    """The directory or file that a user names."""
    return _path(chosen) if chosen[0] == "/" else Path(chosen).absolute()


_path = lru_cache(maxsize=16)(Path)  # asked for on the way to every first call


def cache_dir() -> Path:
    """Where kernels are kept: `$PORTMM_CACHE`, else `portmm` in the user's cache.

    The latter is what platformdirs answers on Linux, without its import time.
    The directory need not exist.
    """
    chosen = os.environ.get("PORTMM_CACHE", "").strip()
    if chosen:
        return _place(chosen)
    return _usual("XDG_CACHE_HOME", ".cache", "portmm")


def _usual(variable: str, below: str, name: str) -> Path:
    """Where a user's files of a kind are, by the XDG specification, which tells readers to ignore a relative path."""
    root = os.environ.get(variable, "").strip()
    if root[:1] == "/":
        return _path(f"{root}/{name}")
    try:
        return _path(f"{_home()}/{below}/{name}")
    except RuntimeError:  # a user id without a home, as in some containers
        return _path(f"/{below}/{name}")


def _home() -> str:
    return os.environ.get("HOME") or str(Path.home())


def tuned_database() -> Path | None:
    """The user's tuned schedules: `$PORTMM_TUNED`, else `portmm/tuned.sqlite` in the user's data; None if "off".

    Unlike what is compiled, they cannot be made again in a second, so they are no part of the cache.
    """
    chosen = os.environ.get("PORTMM_TUNED", "").strip()
    if chosen:
        return None if chosen == "off" else _place(chosen)
    return _usual("XDG_DATA_HOME", ".local/share", "portmm/tuned.sqlite")


def _warn(path: Path, reason: str) -> None:
    if str(path) in _warned:
        return
    _warned.add(str(path))
    warn(
        f"portmm cannot keep kernels in {path} ({reason}), so every process compiles them again; "
        "set PORTMM_CACHE to a directory that only you can write to"
    )


def _shared() -> Path | None:
    path = cache_dir()
    reason = why_not(path)
    if reason:
        _warn(path, reason)
        return None
    return path


def usable_dir() -> Path | None:
    """The cache directory, made if it is missing; None where it cannot be used, which is said once."""
    return _shared()


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

        from portmm.build.temp_directories import PRIVATE_PREFIX, make

        # What holds the directory ends with the process.
        path, _ = make(PRIVATE_PREFIX)
        _private[owner] = path
        atexit.register(_remove, owner, path)
    return _private[owner]


def _places() -> list[Path]:
    found = (_shared(), _private.get(os.getpid()))
    return [p for p in found if p is not None]


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
    text = read(path)
    lines = (text or b"").decode("utf-8", "surrogateescape").splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line)


def _entry(path: Path, size: int, fields: dict[str, str]) -> Entry | None:
    try:
        own = {name: fields.pop(name) for name in ("name", "compiler", "command")}
        seconds = float(fields.pop("seconds"))
        more = {name: _plain(text) for name, text in fields.items() if name not in _ABOUT}
        return Entry(key=path.stem, path=path, bytes=size, seconds=seconds, **own, more=more)
    except (KeyError, ValueError):
        return None


def load(key: str, suffix: str = ".so") -> tuple[Entry, bytes] | None:
    """The entry of `key` and its code, checked against its SHA-256, or None.

    A shared object is whole, too: what is loaded never ends before one of its segments does.
    """
    for place in _places():
        path = place / f"{key}{suffix}"
        found = read_with(path)
        if found is None:
            continue
        code, info = found
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
    fields = {"sha256": digest(code), "key": key, "version": VERSION, "name": name, "seconds": f"{seconds:.4f}"}
    fields |= {"compiler": " ".join(compiler.split()), "command": " ".join(command.split())}
    more = more or {}
    lines = {**fields, **{k: _escaped(v) for k, v in more.items()}}
    text = "".join(f"{k} {v}\n" for k, v in lines.items()).encode("utf-8", "surrogateescape")
    place = _keep_files({f"{key}{suffix}": code, f"{key}.txt": text})
    _tidy(place)
    return Entry(key, place / f"{key}{suffix}", name, len(code), seconds, fields["compiler"], fields["command"], more)


def keep_failed(key: str, source: str, suffix: str = ".c") -> Path:
    """Store a source that did not compile, for inspection, and return its path."""
    name = f"{key}.failed{suffix}"
    return _keep_files({name: source.encode()}) / name


_kept: dict[Path, int] = {}


def _tidy(place: Path) -> None:
    """Now and then, when an entry was written: bring the directory under its limit."""
    count = _kept.get(place, 0)
    _kept[place] = count + 1
    if count % EVERY == 0:
        from portmm.build.temp_directories import sweep

        sweep(place)
        tidy(place, VERSION)


def read_note(name: str) -> str | None:
    """The text kept under `name` by `write_note`, or None.

    Notes are what is slow to find out about a machine: a compiler's version,
    measured rates. `name` may hold letters, digits, dots and hyphens.
    """
    shared = _shared()
    found = None if shared is None else read_with(path := shared / f"{name}.note")
    if found is None:
        return None
    used(path, found[1])
    return found[0].decode("utf-8", "replace")


def write_note(name: str, text: str) -> None:
    """Keep `text` under `name`; where the cache cannot be written, do nothing."""
    shared = _shared()
    if shared is not None:
        with suppress(OSError):
            _write(shared / f"{name}.note", text.encode("utf-8", "replace"))


def append_note(name: str, lines: str) -> None:
    """Add whole lines to what is kept under `name`, in one write; where the cache cannot be written, do nothing.

    Lines of several processes do not mix. A line that a full disk cut short stands alone: each begins a new one.
    """
    shared = _shared()
    if shared is None:
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        fd = os.open(f"{shared}/{name}.note", flags, 0o600)
        try:
            info = os.fstat(fd)
            if S_ISREG(info.st_mode) and private(info):
                os.write(fd, f"\n{lines}".encode("utf-8", "replace"))
        finally:
            os.close(fd)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None while another does.

    Raises:
        OSError: this directory cannot hold a lock.
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


def cache_limit() -> int | None:
    """The most bytes that the cache may take, None for no limit: see `$PORTMM_CACHE_LIMIT`."""
    return limit()


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
