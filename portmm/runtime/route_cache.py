"""What earlier processes found out: which kernel suits which product on this machine.

Owns the *book*, a note in the cache that holds the answers of `dispatch` and
where the run time lies, so that a new process with a warm cache needs no
detection, no choice and no source before its first product. May import `ir.abi`,
`build.cache`, `host.calibrate`, `build.compiler`, `host`, `host.host_probe`, `version`.

A book counts only where everything that its answers were made from is as it
was: what the host says about itself, word for word, the target asked for, the
interpreter, the compiler, the measured rates, the tuned schedules, and the files
of the generator itself. All else is a different book, so that a cache directory may move to, or
be shared with, another machine. A line that is damaged, or whose kernel is gone
or damaged, is as good as none.

Answers are appended, a line each, in one write: processes that share a book do not
read it again or lose each other's lines. A line has a checksum and the digest of the
*heading* under which it holds, a line with the state of the files that answers rest on.
A book that has grown to twice its bound is written anew.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from portmm.build.cache import append_note, cache_dir, digest, load, read_note, tuned_database, write_note
from portmm.host.host_probe import snapshot
from portmm.ir import abi
from portmm.runtime import cpu as cpu_runtime
from portmm.util import locks
from portmm.util.memo import forget_all
from portmm.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from portmm.spec.problem import Problem
    from portmm.target.target import Target

MOST_LINES = 1024
"""Answers in a book, 300 bytes each: reading it takes two milliseconds."""
CHECK = 16
"""Hexadecimal digits of a line's checksum, and of a heading's digest."""
HEADING, CODE = "book", "code "
"""Of lines: what answers rest on, and the code of a schedule."""

MOST_KERNELS = 1024
"""Kernels that are loaded before starting afresh, as in `dispatch`."""

DEPENDS = 3
"""Files that a book rests on: the compiler, the measured rates, the tuned schedules."""

# The clock moves; what else /proc/cpuinfo says does not.
_MOVING = ("cpu MHz", "bogomips", "BogoMIPS")
# In a checkout, kernels and targets lie elsewhere than the rest.
_ROOTS = ("portmm", "portmm.kernels", "portmm.targets")


@dataclass(slots=True)
class Book:
    """The answers kept for one machine, target and interpreter.

    Attributes:
        name: of the note.
        cores: how many cores the target has here; 0 in a new book.
        runtime: key of the extension module, or empty.
        depends: files that the answers rest on, with their state.
        lines: question -> "key, symbol, workspace bytes, workers", with tabs between.
        codes: a schedule's spelling -> "key, symbol, workspace", likewise, where a workspace is an `index` as words.
        size: lines in the file, stale and damaged ones too, so far as this process knows.
        files: names of the files of `depends`, once an answer has been kept: what they follow from names the book.
        own: key of the extension module of this process, likewise.
    """

    name: str
    cores: int = 0
    runtime: str = ""
    depends: tuple[str, ...] = ()
    lines: dict[str, str] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)
    size: int = 0
    files: tuple[str, ...] = ()
    own: str = ""

    @property
    def heading(self) -> str:
        """The line that says what answers rest on."""
        return "\t".join((HEADING, str(self.cores), self.runtime, *self.depends))

    def checked(self, lines: dict[str, str], codes: dict[str, str]) -> list[str]:
        """Answers as lines of the file."""
        under = _short(self.heading)
        every = (*lines.items(), *((f"{CODE}{schedule}", said) for schedule, said in codes.items()))
        return [_checked(f"{under}\t{question}\t{answer}") for question, answer in every]


_lock = locks.lock()
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
    folders = [import_module(package).__path__[0] for package in _ROOTS]
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda x: x.name):
                if entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                    folders.append(entry.path)
                elif entry.name.endswith((".py", ".toml", ".c")):
                    info = entry.stat()
                    yield f"{entry.name} {info.st_mtime_ns} {info.st_size}"


def _state(path: str) -> str:
    """The path, and a word that changes when the file is written."""
    try:
        info = os.stat(path)  # noqa: PTH116 - on the way to every first call
    except OSError:
        return f"absent {path}"
    return f"{info.st_mtime_ns},{info.st_ino},{info.st_size} {path}"


def _checked(line: str) -> str:
    """A line with its checksum."""
    return f"{_short(line)}\t{line}"


def _short(text: str) -> str:
    return digest(text.encode("utf-8", "surrogateescape"))[:CHECK]


def _read(name: str) -> Book:
    """The sound part of a book: a heading whose files are as they were, and the sound lines under it."""
    sound, size = [], 0
    for line in (read_note(name) or "").split("\n"):
        size += bool(line)
        body = line[CHECK + 1 :]
        if body and _checked(body) == line:
            sound.append(body)
    found = Book(name)
    for body in sound:
        kind, *rest = body.split("\t")
        if kind == HEADING and len(rest) == DEPENDS + 2 and all(_state(x.partition(" ")[2]) == x for x in rest[2:]):
            found = Book(name, int(rest[0]), rest[1], tuple(rest[2:]))
    found.size = size
    under = _short(found.heading)
    for body in sound:
        kind, _, told = body.partition("\t")
        if kind == under:
            question, _, answer = told.partition("\t")
            is_code = question.startswith(CODE)
            held, name = (found.codes, question[len(CODE) :]) if is_code else (found.lines, question)
            held.pop(name, None)  # the newest lines last
            held[name] = answer
    _bound(found)
    return found


def _bound(kept: Book) -> None:
    """Keep the newest answers only."""
    for held in (kept.lines, kept.codes):
        for question in list(held)[:-MOST_LINES]:
            del held[question]


def book(target: str) -> Book | None:
    """The book for a target's name as a user gives it, perhaps empty; None where none is kept."""
    if _closed or target.endswith(".toml"):
        return None
    place = (cache_dir(), target)
    with _lock:
        found = _books.get(place)
        if found is None:
            tools = (
                sys.version,
                str(cpu_runtime.python_headers()),
                os.environ.get("CC", ""),
                os.environ.get("PATH", ""),
            )
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


def runtime(kept: Book | None) -> cpu_runtime.Runtime:
    """The run time of this process; loaded without looking at its source if the book knows it.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    found = load(kept.runtime) if kept is not None and kept.runtime else None
    return cpu_runtime.runtime() if found is None else cpu_runtime.runtime(found[1], found[0].path)


def question(p: Problem, served: tuple[int, int], limit: int) -> str:
    """What is asked for problems like `p` with M from the least to the largest of those served, on so many threads."""
    least, most = served
    return f"{least if least == most else f'{least}-{most}'} {limit} {p.but_rows}"


def route(kept: Book, question: str, runtime: Any, p: Problem) -> Any:
    """The route that answers a question, or None if nothing sound is remembered."""
    found = _loaded(kept.lines.get(question, ""), runtime)
    if found is None:
        return None
    kernel, work, workers = found
    return runtime.make_route(kernel, int(work), int(workers), p.storage, p.unit)


def code(kept: Book, schedule: str, runtime: Any) -> tuple[Any, str] | None:
    """The code of a schedule as it is spelled, and its workspace; None if nothing sound is remembered."""
    found = _loaded(kept.codes.get(schedule, ""), runtime)
    return None if found is None else (found[0], found[1])


def _loaded(line: str, runtime: Any) -> tuple[Any, ...] | None:
    """The kernel that a line names, and the rest of the line."""
    key, _, rest = line.partition("\t")
    if not key:
        return None
    symbol, *about = rest.split("\t")
    kernel = _kernels.get((id(runtime), key))
    if kernel is None:
        found = load(key)
        if found is None:
            return None
        if len(_kernels) >= MOST_KERNELS:  # what is remembered keeps them loaded
            _kernels.clear()
            forget_all()
            runtime.clear_memo()
        entry, held = found
        kernel = _kernels[id(runtime), key] = cpu_runtime.load_kernel(runtime, held, entry.path, symbol)
    return kernel, *about


def keep(kept: Book, question: str, answer: Any, target: Target) -> None:
    """Add the route that answers a question to the book."""
    about = f"{answer.kernel.symbol}\t{answer.work_bytes}\t{answer.workers}"
    _keep(kept, kept.lines, question, answer.kernel, about, target)


def keep_code(kept: Book, schedule: str, kernel: Any, workspace: str, target: Target) -> None:
    """Add the code of a schedule to the book, so that other sizes need no source in another process."""
    _keep(kept, kept.codes, schedule, kernel, f"{kernel.symbol}\t{workspace}", target)


def _keep(  # noqa: PLR0917 - two functions call it
    kept: Book, held: dict[str, str], name: str, kernel: Any, about: str, target: Target
) -> None:
    folder, file = os.path.split(str(kernel.path))
    if folder != str(cache_dir()):
        return  # of this process alone
    if not kept.files:
        from portmm.build.compiler import find_compiler
        from portmm.host.calibrate import note_name

        note = os.path.join(folder, f"{note_name(target)}.note")  # noqa: PTH118 - on the way to every first call
        kept.own = os.path.basename(getattr(cpu_runtime.runtime(), "__file__", "")).removesuffix(".so")  # noqa: PTH119
        kept.files = (find_compiler().argv[0], note, str(tuned_database() or "no database"))
    depends = tuple(map(_state, kept.files))
    line = f"{file.removesuffix('.so')}\t{about}"
    with _lock:
        fresh = (kept.cores, kept.runtime, kept.depends) != (target.cores, kept.own, depends)
        if kept.depends not in ((), depends):
            kept.lines.clear()  # of other rates, or another compiler
            kept.codes.clear()
        kept.cores, kept.runtime, kept.depends = target.cores, kept.own, depends
        held[name] = line
        _bound(kept)
        if kept.size > 2 * MOST_LINES:
            there = _read(kept.name)
            kept.lines, kept.codes = {**there.lines, **kept.lines}, {**there.codes, **kept.codes}
            _bound(kept)
            lines = [_checked(kept.heading), *kept.checked(kept.lines, kept.codes)]
            write_note(kept.name, "\n".join(lines))
            kept.size = len(lines)
            return
        added = [_checked(kept.heading)] if fresh else []
        added += kept.checked({name: line}, {}) if held is kept.lines else kept.checked({}, {name: line})
        append_note(kept.name, "\n".join(added))
        kept.size += len(added)
