"""Route cache: routes selected by earlier processes on this machine, on disk.

Owns `RouteCache`, a note in the build cache with the routes of `dispatch` and the key of the run time, so that a new
process with a warm cache needs no detection, no selection and no source before its first product.

A route cache is valid only for the state that its routes were derived from: the host's facts, the target's name, the
interpreter, the compiler, the measured rates, the tuned schedules, and the files of the generator. Any other state has
a cache of its own, so that a cache directory may move to, or be shared with, another machine. A line that is damaged,
or whose kernel is missing or damaged, is ignored.

Routes are appended, a line each, in one write: processes that share a cache neither
read it again nor lose each other's lines. A line has a checksum and the digest of its
*heading*, a line with the state of the files that routes depend on.
A cache that has grown to twice its bound is rewritten.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import lru_cache
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.build.cache import append_note, cache_dir, digest, load, read_note, tuned_database, write_note
from portmm.host.host_probe import snapshot
from portmm.ir import abi
from portmm.runtime import cpu as cpu_runtime
from portmm.util import locks
from portmm.util.memo import forget_all
from portmm.util.records import dataclass
from portmm.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from portmm.spec.problem import Problem
    from portmm.target.target import Target

MOST_LINES = 1024
"""Routes in a cache, 300 bytes each: reading it takes two milliseconds."""
CHECK = 16
"""Hexadecimal digits of a line's checksum, and of a heading's digest."""
ROUTES, HEADING, CODE = "book-", "book", "code "
"""The start of a note's name; kinds of lines: the heading, and the code of a schedule."""
RACERS = " racers"
"""The end of the question of kernels that race."""
MOST_KERNELS = 1024
"""Kernels loaded before all are dropped, as in `dispatch`."""
FRESH = 0.02
"""Seconds between looks at the state of those files. Lines that follow a change unseen have the old state in their
heading, and are ignored by all readers."""
NO_COMPILER = "no compiler"
"""In place of the compiler's program: routes may be of other kernels than those selected."""
DEPENDS = 3
"""Number of files that a cache depends on: the compiler, the measured rates, the tuned schedules."""

# In a checkout, kernels and targets are in other folders than the rest.
_ROOTS = ("portmm", "portmm.kernels", "portmm.targets")


@dataclass(slots=True)
class RouteCache:
    """The routes cached for one machine, target and interpreter.

    Attributes:
        name: of the note.
        cores: of the target here; 0 in a new cache.
        runtime: key of the extension module, or empty.
        depends: files that the routes depend on, with their state.
        lines: question -> "key, symbol, workspace bytes, workers", and maybe a remark, separated by tabs.
        codes: a schedule's spelling -> "key, symbol, workspace", likewise; a workspace is a spelled `index`.
        size: lines in the file as last known to this process, stale and damaged ones too.
        files: names of the files of `depends`, set with the first stored route; the cache's name determines them.
        own: key of the extension module of this process, likewise.
        fresh_until: time until which the state of `files` is taken as it was.
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
    fresh_until: float = 0.0

    @property
    def heading(self) -> str:
        """The line with the state that routes depend on."""
        return _heading(self.cores, self.runtime, self.depends)

    def checked(self) -> list[str]:
        """All entries as lines of the file, with checksums."""
        every = (*self.lines.items(), *((f"{CODE}{schedule}", entry) for schedule, entry in self.codes.items()))
        return [self.line(question, answer) for question, answer in every]

    def line(self, question: str, answer: str) -> str:
        """An entry as a line of the file, with its checksum."""
        return _checked(f"{_under(self.cores, self.runtime, self.depends)}\t{question}\t{answer}")


class Racer(NamedTuple):
    """A kernel that was built to race.

    Attributes:
        key: of the shared object in the cache.
        symbol: name of the function.
        work: bytes of its workspace.
        workers: threads that share the work.
        schedule: its spelling.
    """

    key: str
    symbol: str
    work: int
    workers: int
    schedule: str


_lock = locks.lock()
_closed = False
_caches: dict[tuple[Path, str], RouteCache] = {}
_kernels: dict[tuple[int, str], Any] = {}


def generator() -> Iterator[str]:
    """Name, time and size of each file of the code generator."""
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
    """A path with the state of the file, which changes when it is written."""
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


def _heading(cores: int, runtime: str, depends: tuple[str, ...]) -> str:
    return "\t".join((HEADING, str(cores), runtime, *depends))


@lru_cache(maxsize=4)  # on the path of every new class of shapes
def _under(cores: int, runtime: str, depends: tuple[str, ...]) -> str:
    """The digest of a heading, by which its entries begin."""
    return _short(_heading(cores, runtime, depends))


def _read(name: str) -> RouteCache:
    """Read the valid part of a cache: a heading with the current state of its files, and the valid lines under it."""
    sound, size = [], 0
    for line in (read_note(name) or "").split("\n"):
        size += bool(line)
        body = line[CHECK + 1 :]
        if body and _checked(body) == line:
            sound.append(body)
    kept = RouteCache(name)
    for body in sound:
        kind, *rest = body.split("\t")
        if kind == HEADING and len(rest) == DEPENDS + 2 and _holds(rest[2:]):
            kept = RouteCache(name, int(rest[0]), rest[1], tuple(rest[2:]))
    kept.size = size
    under = _short(kept.heading)
    for body in sound:
        kind, _, entry = body.partition("\t")
        if kind == under:
            question, _, answer = entry.partition("\t")
            is_code = question.startswith(CODE)
            entries, name = (kept.codes, question[len(CODE) :]) if is_code else (kept.lines, question)
            entries.pop(name, None)  # the newest lines last
            entries[name] = answer
    _bound(kept)
    return kept


def _bound(kept: RouteCache) -> None:
    """Drop all but the newest entries."""
    for entries in (kept.lines, kept.codes):
        if len(entries) > MOST_LINES:
            for question in list(entries)[:-MOST_LINES]:
                del entries[question]


def of_target(target: str) -> RouteCache | None:
    """The route cache for a target's name in the settings, which may be empty; None if caching is off."""
    if _closed or target.endswith(".toml"):
        return None
    key = (cache_dir(), target)
    with _lock:
        kept = _caches.get(key)
        if kept is None:
            tools = sys.version, str(cpu_runtime.python_headers()), os.environ.get("CC", ""), os.environ.get("PATH", "")
            words = (VERSION, str(abi.VERSION), target, str(tuned_database()), *tools, *generator(), snapshot().lasting)
            kept = _caches[key] = _read(ROUTES + digest("\0".join(words).encode("utf-8", "surrogateescape")))
        return kept


def is_open(target: str) -> bool:
    """Whether the route cache of a target was read or begun in this process."""
    return (cache_dir(), target) in _caches


def forget(*, kernels: bool = False) -> None:
    """Drop caches in memory: they are read from disk at the next use; with `kernels`, their loaded code, too."""
    with _lock:
        _caches.clear()
        if kernels:
            _kernels.clear()


def close() -> None:
    """Disable route caches in this process, whose routes may be overridden."""
    global _closed  # noqa: PLW0603 - of the whole process
    _closed = True


@contextmanager
def closed() -> Iterator[None]:
    """Disable route caches in a block."""
    global _closed  # noqa: PLW0603 - as above
    before, _closed = _closed, True
    try:
        yield
    finally:
        _closed = before


def runtime(kept: RouteCache | None) -> cpu_runtime.Runtime:
    """The run time of this process; loaded without reading its source if the cache has its key."""
    loaded = load(kept.runtime) if kept is not None and kept.runtime else None
    return cpu_runtime.runtime() if loaded is None else cpu_runtime.runtime(loaded[1], loaded[0].path)


def question(p: Problem, served: tuple[int, int], limit: int) -> str:
    """The key of a route: problems like `p` with M in the range `served`, and a limit of threads."""
    least, most = served
    return f"{least if least == most else f'{least}-{most}'} {limit} {p.but_rows}"


def route(kept: RouteCache, question: str, runtime: Any, p: Problem) -> Any:
    """The cached route of a question; None if there is no valid one."""
    return routed(kept.lines.get(question, ""), runtime, p)


def routed(line: str, runtime: Any, p: Problem) -> Any:
    """The route of a line "key, symbol, workspace bytes, workers", separated by tabs; None if it is no valid one."""
    fields = _loaded(line, runtime)
    if fields is None:
        return None
    kernel, work, workers, *_ = fields
    return runtime.make_route(kernel, int(work), int(workers), p.storage, p.unit)


def code(kept: RouteCache, schedule: str, runtime: Any) -> tuple[Any, str] | None:
    """The cached code of a spelled schedule, and its workspace; None if there is no valid one."""
    fields = _loaded(kept.codes.get(schedule, ""), runtime)
    return None if fields is None else (fields[0], fields[1])


def _loaded(line: str, runtime: Any) -> tuple[Any, ...] | None:
    """Load the kernel of a line; return it with the other fields of the line."""
    key, _, rest = line.partition("\t")
    if not key:
        return None
    symbol, *about = rest.split("\t")
    kernel = _kernels.get((id(runtime), key))
    if kernel is None:
        loaded = load(key)
        if loaded is None:
            return None
        if len(_kernels) >= MOST_KERNELS:  # memos keep them loaded
            _kernels.clear()
            forget_all()
            runtime.clear_memo()
        entry, bytes_ = loaded
        kernel = _kernels[id(runtime), key] = cpu_runtime.load_kernel(runtime, bytes_, entry.path, symbol)
    return kernel, *about


def remark(kept: RouteCache, question: str) -> str:
    """Remark that was stored beside the route of a question; empty if there is none, or no route."""
    fields = kept.lines.get(question, "").split("\t")
    return fields[4] if len(fields) > 4 else ""


def racers(kept: RouteCache, question: str) -> list[Racer]:
    """The kernels that were built to race for a question by an earlier process, that of the selected schedule first."""
    line = kept.lines.get(f"{question}{RACERS}", "")
    fields = line.split("\t") if line else []
    rows = [fields[i : i + len(Racer._fields)] for i in range(0, len(fields), len(Racer._fields))]
    return [Racer(key, symbol, int(work), int(workers), text) for key, symbol, work, workers, text in rows]


def keep_racers(kept: RouteCache, question: str, racers: Sequence[Racer], target: Target) -> None:
    """Store kernels that were built to race for a question, that of the selected schedule first."""
    _add(kept, kept.lines, f"{question}{RACERS}", "\t".join(map(spelled, racers)), target)


def spelled(x: Racer) -> str:
    """A racer as fields of a line."""
    return "\t".join(map(str, x))


def keep(kept: RouteCache, question: str, answer: Any, target: Target, remark: str = "") -> None:
    """Store the route of a question, and a remark about it."""
    about = f"{answer.kernel.symbol}\t{answer.work_bytes}\t{answer.workers}" + (f"\t{remark}" if remark else "")
    _keep(kept, kept.lines, question, answer.kernel, about, target)


def keep_code(kept: RouteCache, schedule: str, kernel: Any, workspace: str, target: Target) -> None:
    """Store the code of a schedule, so that other processes need no source for other sizes."""
    _keep(kept, kept.codes, schedule, kernel, f"{kernel.symbol}\t{workspace}", target)


def _keep(  # noqa: PLR0917 - two functions call it
    kept: RouteCache, entries: dict[str, str], name: str, kernel: Any, about: str, target: Target
) -> None:
    folder, _, file = str(kernel.path).rpartition("/")
    if folder == str(cache_dir()):  # else it was built into a private directory of this process
        _add(kept, entries, name, f"{file.removesuffix('.so')}\t{about}", target)


def _compiler() -> str:
    """The program of the compiler; without one, kernels are of machines that have it."""
    from portmm.build.compiler import find_compiler
    from portmm.errors import NoCompilerError

    try:
        return find_compiler().argv[0]
    except NoCompilerError:
        return NO_COMPILER


def _holds(depends: list[str]) -> bool:
    """Whether the files that a cache depends on are in the same state, and a compiler that was missing still is."""
    same = all(_state(x.partition(" ")[2]) == x for x in depends)
    return same and (not depends[0].endswith(f" {NO_COMPILER}") or _compiler() == NO_COMPILER)


def _add(kept: RouteCache, entries: dict[str, str], name: str, line: str, target: Target) -> None:
    """Store an entry of a cache."""
    if not kept.files:
        from portmm.host.calibrate import note_name

        note = f"{cache_dir()}/{note_name(target)}.note"
        kept.own = os.path.basename(getattr(cpu_runtime.runtime(), "__file__", "")).removesuffix(".so")  # noqa: PTH119
        kept.files = (_compiler(), note, str(tuned_database() or "no database"))
    with _lock:
        now, depends = monotonic(), kept.depends
        if now >= kept.fresh_until:
            depends, kept.fresh_until = tuple(map(_state, kept.files)), now + FRESH
        fresh = (kept.cores, kept.runtime, kept.depends) != (target.cores, kept.own, depends)
        if kept.depends not in ((), depends):
            kept.lines.clear()  # of other measured rates, or another compiler
            kept.codes.clear()
        kept.cores, kept.runtime, kept.depends = target.cores, kept.own, depends
        entries[name] = line
        _bound(kept)
        if kept.size > 2 * MOST_LINES:
            current = _read(kept.name)
            kept.lines, kept.codes = {**current.lines, **kept.lines}, {**current.codes, **kept.codes}
            _bound(kept)
            lines = [_checked(kept.heading), *kept.checked()]
            write_note(kept.name, "\n".join(lines))
            kept.size = len(lines)
            return
        added = [_checked(kept.heading)] if fresh else []
        added.append(kept.line(name if entries is kept.lines else f"{CODE}{name}", line))
        append_note(kept.name, "\n".join(added))
        kept.size += len(added)
