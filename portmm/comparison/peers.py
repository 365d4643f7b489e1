"""Registry of contenders, the interface of their adapters, and the settings of their processes.

Owns the registry, which `contenders.toml` describes, with the environment variables that are removed and set; the
records that adapters return; and the adapter of NumPy. A library is imported only when its adapter is opened, which
happens in its own process.

An adapter is one function: it takes a `Setup`, opens its library, and returns a `Library`; it raises `MissingError` if
the library is not installed. `Library.prepare` takes a case and its arrays and returns every method by which an expert
user may compute it; the worker keeps the fastest.

Every BLAS reads variables that select a kernel, a block size or a number of threads; one that a build system or a
container image left behind can halve a library's speed and invalidate any comparison with it. So all of them are
removed, and those that the comparison needs are set, the same for all contenders.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from portmm.comparison import fused
from portmm.comparison.case import PLAIN, Case
from portmm.comparison.data import EXACT, Arrays

_TABLE = tomllib.loads(Path(__file__).with_name("contenders.toml").read_text(encoding="utf-8"))
_PREFIXES, _KEPT, _THREADS = (tuple(_TABLE["environment"][x]) for x in ("removed", "kept", "threads"))
FORCED: Mapping[str, Mapping[str, str]] = {
    isa: dict(zip(_TABLE["forced"]["variables"], values, strict=True))
    for isa, values in _TABLE["forced"]["isas"].items()
}
"""ISA -> the variables that restrict each library to it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of all contenders.

    Attributes:
        threads: threads of each contender.
        isa: the instruction set that all are restricted to, empty for none.
        target: value of PORTMM_TARGET for portmm's own process, empty for none.
        cold: bytes whose use evicts all earlier data from the caches, 0 if caches may be warm.
        device: device of the arrays, "cuda", "cuda:1" or "opencl"; empty for the processor.
    """

    threads: int = 1
    isa: str = ""
    target: str = ""
    cold: int = 0
    device: str = ""


def removed(base: Mapping[str, str]) -> tuple[str, ...]:
    """Names in `base` that are not passed to contenders."""
    return tuple(sorted(name for name in base if name.startswith(_PREFIXES) and name not in _KEPT))


def environment(base: Mapping[str, str], setup: Setup, *, uses_openblas: bool) -> dict[str, str]:
    """`base` without variables that change a library, plus threads and the forced ISA.

    Args:
        base: the parent's environment.
        setup: threads and ISA.
        uses_openblas: the contender computes with NumPy's OpenBLAS; for all others
            its pool has one thread, since it would only compete with theirs.
    """
    dropped = set(removed(base))
    env = {name: value for name, value in base.items() if name not in dropped}
    env |= dict.fromkeys(_THREADS, str(setup.threads))
    env["OPENBLAS_NUM_THREADS"] = str(setup.threads if uses_openblas else 1)
    env |= FORCED.get(setup.isa, {})
    if setup.target:
        env["PORTMM_TARGET"] = setup.target
    return env


Run: TypeAlias = Callable[[int], object]
"""Function that computes C = A . B into the arrays it was prepared with, a number of times."""


class MissingError(Exception):
    """The library is not installed; the message's first line says so, further ones are details."""


class UnsupportedError(Exception):
    """The library cannot compute this case; the message says why."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A `Run` whose result is in an array of its own; copying it to the case's arrays is not timed.

    Attributes:
        run: the timed part.
        fetch: copies the last result into the case's arrays.
        spoil: fills the result of the next run with a value that marks elements as unwritten.
    """

    run: Run
    fetch: Callable[[], object]
    spoil: Callable[[], object] = lambda: None

    def __call__(self, count: int) -> object:
        """Run."""
        return self.run(count)


@dataclass(frozen=True, slots=True)
class Library:
    """An opened library.

    Attributes:
        version: its name and version, with the kernels that it selected if it reports them.
        prepare: returns the runs of one case by method; may raise
            `UnsupportedError`.
        dtypes: words of types that it multiplies; None where `prepare` decides.
        precision: its rounding, one of `data.PRECISIONS`.
        fused: `prepare` supports epilogues; otherwise fused cases are refused without it.
        await_races: runs a method until it is as fast as it will be; None if the first calls are as fast as others.
    """

    version: str
    prepare: Callable[[Case, Arrays], Mapping[str, Run]]
    dtypes: Collection[str] | None = PLAIN
    precision: str = EXACT
    fused: bool = False
    await_races: Callable[[Run], None] | None = None


@dataclass(frozen=True, slots=True)
class Contender:
    """A library that takes part in a comparison.

    Attributes:
        name: short name, a column of the table.
        adapter: "module:function" that opens it.
        hint: what to do when it is not found.
        peer: False for portmm itself.
        uses_openblas: it computes with NumPy's OpenBLAS.
        device: language of its devices, "cuda" or "opencl"; empty for the processor.
        only: kinds of cases, of `Case.kinds`, to which it is restricted because it
            opens or compiles slowly; empty for all. Selected by name it computes all cases.
    """

    name: str
    adapter: str
    hint: str = ""
    peer: bool = True
    uses_openblas: bool = False
    device: str = ""
    only: frozenset[str] = frozenset()

    def adds_to(self, case: Case) -> bool:
        """Whether it takes part in a case without being selected by name."""
        return not self.only or not self.only.isdisjoint(case.kinds)


ALL = "all"
"""Name that stands for all contenders."""


def _described(row: Mapping[str, Any]) -> Contender:
    adapter, only = f"portmm.comparison.{row['adapter']}", frozenset(row.get("only", ()))
    return Contender(**{**row, "adapter": adapter, "only": only})


_EVERYONE = tuple(map(_described, _TABLE["contenders"]))
CONTENDERS = tuple(x for x in _EVERYONE if not x.device)
ON_DEVICES = tuple(x for x in _EVERYONE if x.device)


def find(names: Iterable[str | Contender] | None, language: str = "") -> tuple[Contender, ...]:
    """Contenders by name, on devices of a language or the processor; all of them for None, or where "all" is a name.

    Raises:
        ValueError: a name is unknown there.
    """
    available = tuple(c for c in (*CONTENDERS, *ON_DEVICES) if c.device == language)
    known = {c.name: c for c in available}
    names = [ALL] if names is None else list(names)
    if ALL in names:
        return available
    picked = []
    for name in names:
        if isinstance(name, str) and name not in known:
            where = f" on devices of {language}" if language else ""
            raise ValueError(f"no contender called {name!r}{where}; known are {', '.join(known)}")
        picked.append(known[name] if isinstance(name, str) else name)
    return tuple(picked)


def open_adapter(adapter: str, setup: Setup) -> Library:
    """Open the library behind "module:function"."""
    module, _, function = adapter.partition(":")
    library = getattr(import_module(module), function)(setup)
    if not isinstance(library, Library):
        raise TypeError(f"adapter {adapter} returned {library!r}, not a Library")
    return library


def repeat(call: Callable[[], object]) -> Run:
    """A `Run` that repeats a call."""

    def run(count: int) -> None:
        for _ in range(count):
            call()

    return run


def returning(call: Callable[[], object], take: Callable[[Any], object]) -> Fetched:
    """A `Run` of a call that returns its result; `take` copies the last one for the check."""
    last: list[object] = []

    def run(count: int) -> None:
        result = None
        for _ in range(count):
            result = call()
        last[:] = [result]

    return Fetched(run, lambda: take(last[0]))


def finishing(run: Run, case: Case, data: Arrays, normal: Callable[..., Any] | None) -> Run:
    """A `Run` of a bare product, each followed by an epilogue of ufuncs; see `fused.in_place`."""
    finish = fused.in_place(case.fused, data.c, data.added, normal)

    def call() -> None:
        run(1)
        finish()

    return repeat(call)


def open_numpy(_setup: Setup) -> Library:
    """Open NumPy, with the BLAS it was built on, and SciPy for its error function."""
    try:
        normal: Any = import_module("scipy.special").ndtr
    except ImportError:
        normal = None

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        if normal is None and "gelu" in fused.steps(case.fused):
            raise UnsupportedError("NumPy has no error function; pip install scipy")
        a, b, c = data.a, data.b, data.c
        if case.c == "col":
            # A column-major result would go through a temporary; its transpose does not.
            a, b, c = b.swapaxes(-1, -2), a.swapaxes(-1, -2), c.swapaxes(-1, -2)
        multiply = repeat(lambda: np.matmul(a, b, out=c))
        return {"matmul, ufuncs": finishing(multiply, case, data, normal)} if case.fused else {"matmul": multiply}

    blas: Any = np.show_config(mode="dicts")
    built = blas["Build Dependencies"]["blas"] if blas else {}
    name = f"numpy {np.__version__} ({built.get('name', 'no BLAS')} {built.get('version', '')})"
    return Library(name, prepare, fused=True)
