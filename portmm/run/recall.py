"""What earlier processes found out: which kernel suits which product on this machine.

Owns the *book*, a note in the cache that holds the answers of `dispatch` and
where the run time lies, so that a new process with a warm cache needs no
detection, no choice and no source before its first product. May import `abi`,
`cache`, `calibrate`, `compiler`, `host`, `snapshot`, `version`.

A book counts only where everything that its answers were made from is as it
was: what the host says about itself, word for word, the target asked for, the
interpreter, the compiler, the measured rates, the tuned schedules, and the files
of the generator itself. All else is a different book, so that a cache directory may move to, or
be shared with, another machine. A book that is damaged, or whose kernel is gone
or damaged, is as good as none.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm import abi
from portmm.cache import cache_dir, digest, find, read_note, tuned_database, write_note
from portmm.run import host
from portmm.snapshot import snapshot
from portmm.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.problem import Problem
    from portmm.target import Target

MOST_LINES = 1024
"""Answers in a book, 200 bytes each: reading it stays under a millisecond."""

DEPENDS = 3
"""Files that a book rests on: the compiler, the measured rates, the tuned schedules."""

# The clock moves; what else /proc/cpuinfo says does not.
_MOVING = ("cpu MHz", "bogomips", "BogoMIPS")
# In a checkout, kernels and targets lie elsewhere than the rest.
_FOLDERS = [
    f"{import_module(package).__path__[0]}{below}"
    for package, below in (
        ("portmm", ""),
        ("portmm", "/emit"),
        ("portmm", "/run"),
        ("portmm.kernels", ""),
        ("portmm.targets", "/isa"),
        ("portmm.targets", "/chip"),
        ("portmm.targets", "/tuned"),
    )
]


@dataclass(slots=True)
class Book:
    """The answers kept for one machine, target and interpreter.

    Attributes:
        name: of the note.
        cores: how many cores the target has here; 0 in a new book.
        runtime: key of the extension module, or empty.
        depends: files that the answers rest on, with their state.
        lines: question -> "key, symbol, workspace bytes, workers", with tabs between.
    """

    name: str
    cores: int = 0
    runtime: str = ""
    depends: tuple[str, ...] = ()
    lines: dict[str, str] = field(default_factory=dict)


_lock = threading.Lock()
_closed = False
_books: dict[tuple[Path, str], Book] = {}
_kernels: dict[tuple[int, str], Any] = {}


def _host() -> str:
    """What the host says about itself: all that detection looks at, less what changes by itself."""
    shot = snapshot()
    steady = (line for line in shot.cpuinfo.splitlines() if not line.startswith(_MOVING))
    # EBX of leaf 1 holds the number of the processor that happens to answer.
    cpuid = [(leaf, a, b if leaf != "1.0" else 0, c, d) for leaf, (a, b, c, d) in shot.cpuid.items()]
    files = sorted(shot.files.items())
    rest = (shot.machine, files, shot.affinity, cpuid, shot.xcr0, shot.hwcap, shot.hwcap2, shot.sve_bytes, shot.tiles)
    return "\n".join((*steady, repr(rest)))


def generator() -> Iterator[str]:
    """Name, time and size of each file that decides what is generated."""
    for folder in _FOLDERS:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda x: x.name):
                if entry.name.endswith((".py", ".toml", ".c")):
                    info = entry.stat()
                    yield f"{entry.name} {info.st_mtime_ns} {info.st_size}"


def _state(path: str) -> str:
    """The path, and a word that changes when the file is written."""
    try:
        info = os.stat(path)  # noqa: PTH116 - on the way to every first call
    except OSError:
        return f"absent {path}"
    return f"{info.st_mtime_ns},{info.st_ino},{info.st_size} {path}"


def _read(name: str) -> Book:
    checksum, _, body = (read_note(name) or "").partition("\n")
    if not body or digest(body.encode()) != checksum:
        return Book(name)
    cores, runtime, *rest = body.split("\n")
    depends, rest = tuple(rest[:DEPENDS]), rest[DEPENDS:]
    if any(_state(x.partition(" ")[2]) != x for x in depends):
        return Book(name)
    return Book(name, int(cores), runtime, depends, dict(line.partition("\t")[::2] for line in rest))


def book(target: str) -> Book | None:
    """The book for a target's name as a user gives it, perhaps empty; None where none is kept."""
    if _closed or target.endswith(".toml"):
        return None
    place = (cache_dir(), target)
    with _lock:
        found = _books.get(place)
        if found is None:
            tools = (sys.version, str(host.python_headers()), os.environ.get("CC", ""), os.environ.get("PATH", ""))
            words = (VERSION, str(abi.VERSION), target, str(tuned_database()), *tools, *generator(), _host())
            found = _books[place] = _read("book-" + digest("\0".join(words).encode("utf-8", "surrogateescape")))
        return found


def forget() -> None:
    """Read books again when they are next asked for."""
    with _lock:
        _books.clear()


def close() -> None:
    """Keep no book in this process from now on: its answers are not those of `dispatch`."""
    global _closed  # noqa: PLW0603 - of the whole process
    _closed = True


def runtime(kept: Book | None) -> host.Runtime:
    """The run time of this process; loaded without looking at its source if the book knows it.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    entry = find(kept.runtime) if kept is not None and kept.runtime else None
    return host.runtime(None if entry is None else entry.path)


def route(kept: Book, question: str, runtime: Any, p: Problem) -> Any:
    """The route that answers a question, or None if nothing sound is remembered."""
    key, _, rest = kept.lines.get(question, "").partition("\t")
    if not key:
        return None
    symbol, work, workers = rest.split("\t")
    kernel = _kernels.get((id(runtime), key))
    if kernel is None:
        entry = find(key)
        if entry is None:
            return None
        kernel = _kernels[id(runtime), key] = runtime.load(str(entry.path), symbol)
    return runtime.make_route(kernel, int(work), int(workers), p.held, p.unit)


def keep(kept: Book, question: str, answer: Any, target: Target) -> None:
    """Write the route that answers a question into the book."""
    from portmm.calibrate import note_name
    from portmm.compiler import find_compiler

    path, folder = Path(answer.kernel.path), cache_dir()
    if path.parent != folder:
        return  # of this process alone
    files = (find_compiler().argv[0], folder / f"{note_name(target)}.note", tuned_database() or "no database")
    depends = tuple(_state(str(x)) for x in files)
    with _lock:
        there = _read(kept.name)
        kept.lines = {**there.lines, **(kept.lines if kept.depends in ((), depends) else {})}
        kept.lines[question] = f"{path.stem}\t{answer.kernel.symbol}\t{answer.work_bytes}\t{answer.workers}"
        kept.lines = dict(list(kept.lines.items())[-MOST_LINES:])
        kept.cores, kept.depends = target.cores, depends
        kept.runtime = Path(getattr(host.runtime(), "__file__", "")).stem
        answers = (f"{q}\t{a}" for q, a in kept.lines.items())
        body = "\n".join((str(kept.cores), kept.runtime, *depends, *answers))
        write_note(kept.name, f"{digest(body.encode())}\n{body}")
