"""Records of a search of programs: what is searched, and what is found.

Owns `Task`, `Finding`, and what is searched among: `Form` and `Placed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.program import Kernel as Described
    from portmm.fusion.term_kernels import Kernel
    from portmm.fusion.terms import Term
    from portmm.ir.mugraph import MuGraph
    from portmm.schedule.schedule import Schedule

Run = Any
Path = tuple[tuple[str, int], ...]


class Finding(NamedTuple):
    """A program that was found.

    Attributes:
        run: the program, of the arguments of a call, or None where the program as it is remains.
        explained: what it explains, or None.
        path: names of the rewrites that lead to it.
        seconds, before: time of a call, and that of the program as it is.
        forms, bounded, verified: numbers of forms that were seen, not expanded by the bound, and that passed.
        elapsed: seconds of the search.
        certificate: of its equivalence, or of the kernels of the program as it is where that remains; None where
            nothing was searched, or where an interrupt left the program as it is.
        note: a remark.
        graph: its µGraph, or that of the function as it is.
        kernel: the function as one kernel, verified, or None: a record with a meaning, which need not have loops.
        stored: it was known from an earlier search.
        interrupted: an interrupt from the keyboard ended the search.
        parts: of a function that was split, the findings of its parts.
    """

    run: Run = None
    explained: Any = None
    path: tuple[str, ...] = ()
    seconds: float = 0.0
    before: float = 0.0
    forms: int = 0
    bounded: int = 0
    verified: int = 0
    elapsed: float = 0.0
    certificate: dict[str, Any] | None = None
    note: str = ""
    graph: MuGraph | None = None
    kernel: Kernel | None = None
    stored: bool = False
    interrupted: bool = False
    parts: tuple[Finding, ...] = ()

    @property
    def counted(self) -> str:
        """Numbers of forms."""
        return f"{self.forms} forms ({self.bounded} not expanded by the bound)"

    @property
    def graphs(self) -> tuple[tuple[str, MuGraph], ...]:
        """The µGraphs that a picture shows, each below what it is: of each part that has one."""
        if self.parts:
            return tuple(y for x in self.parts for y in x.graphs)
        if self.run is None and self.kernel is not None:
            return (("verified as one kernel, which is not faster and does not run", self.kernel.graph),)
        what = "the function, an operation at a time" if self.run is None else "found, verified and run"
        return () if self.graph is None else ((what, self.graph),)

    def __str__(self) -> str:
        if self.run is None and not self.forms:
            return self.note or "interrupted before a form was measured"
        more = [f"one kernel has a loop along {self.kernel.loop}, {self.kernel.passes} passes"] if self.kernel else []
        more += [self.note] * bool(self.note)
        kept = "what ran before remains" if self.run is None else "the best so far is kept"
        more += [f"interrupted: {kept}"] * self.interrupted
        if self.run is None:
            first = f"no faster form among {self.counted}, in {self.elapsed:.1f} s"
            return "; ".join([first, *more])
        known = "known from an earlier search" if self.stored else f"found among {self.counted}"
        gain = f", {self.before / self.seconds:.2f} times as fast" if self.seconds else ""
        rewrites = ", ".join(dict.fromkeys(self.path)) or "labels of one operand are one dimension"
        return "; ".join([f"{known} in {self.elapsed:.1f} s: {rewrites}{gain}", *more])


class Task(NamedTuple):
    """A function to be searched.

    Attributes:
        graph, outputs: as traced.
        result: nested placeholders of the outputs.
        arrays: arrays and numbers that it reads, in the order of the graph's leaves.
        before: the program as it is.
        compiled: makes a program of arrays and a function of them, and what it explains.
        described: what a program of some kernels, with its text, explains.
        kernels: those of the program as it is.
    """

    graph: Graph
    outputs: list[Node]
    result: Any
    arrays: list[Any]
    before: Run
    compiled: Callable[[list[Any], Any], tuple[Run, Any]]
    described: Callable[[tuple[Any, ...], str], Any]
    kernels: tuple[Described, ...] = ()


class Form(NamedTuple):
    """Terms that compute the results.

    Attributes:
        roots: a term for each result.
        path: rewrites that lead to it: their names, each with its number among the alternatives.
        seconds: as predicted.
    """

    roots: tuple[Term, ...]
    path: Path
    seconds: float


class Placed(NamedTuple):
    """A candidate that runs.

    Attributes:
        graph: its µGraph.
        run, explained: as of `Finding`.
        predicted: seconds.
        schedule: of one kernel.
    """

    graph: MuGraph
    run: Run
    explained: Any
    predicted: float
    schedule: Schedule | None = None
