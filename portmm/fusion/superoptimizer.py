"""Search of an equivalent program that is faster: by rewrites of terms, verified and measured.

Owns `optimize` and its result, `Finding`. Terms are expanded best first, each form once, and none of which even the
optimistic prediction is above the best; the most promising forms are verified over finite fields and judged for
stability, compiled and measured beside the program as it is. What is kept is faster and has a certificate.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.dispatch import config, program_database
from portmm.errors import PortmmError
from portmm.fusion.emitted import emitted, unlisted
from portmm.fusion.one_kernel import compiled_kernel, laid_out, schedules
from portmm.fusion.term_arrays import compute
from portmm.fusion.term_cost import Rates, predicted, predicted_kernel
from portmm.fusion.term_kernels import Kernel, one_kernels
from portmm.fusion.term_rewrites import alternatives
from portmm.fusion.terms import Labelled, UnlabelledError, graph_of, term_of
from portmm.ir.mugraph import to_json
from portmm.trace.placeholders import ByValueError, Placeholder, rebuilt
from portmm.verification.certificate import Emitted, certify
from portmm.verification.equivalence import check
from portmm.verification.stability import judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.terms import Term
    from portmm.ir.mugraph import MuGraph
    from portmm.schedule.schedule import Schedule

SECONDS = 60.0
"""Budget of a search by default."""
MOST_FORMS = 4000
MEASURED = 10
"""Forms that are compiled and measured."""
SLACK = 1.5
"""Largest ratio of a form's optimistic predicted time to the best predicted time at which the form is expanded."""
FASTER = 0.97
"""Time of a form over that of the program as it is, from which it takes its place."""
LEAST_TRUST = 0.5
"""Least measured gain over the predicted one by which predictions for other sizes are multiplied."""
FORMS_OF_KERNELS = 60
"""Forms that are tried as one kernel, with the fewest rewrites first."""
KERNELS_MEASURED = 3
"""Kernels of the whole function that are compiled and measured."""
ONE_KERNEL = "one kernel along "
"""Start of the last entry of a path that ends in one kernel: with the label of its loop, and its number."""
MOST_SCHEDULES = 3
"""Schedules of such a kernel that are measured."""
REJECT_RATIO = 1.5
"""Time of three runs of a form over that of the best one, from which it is not measured further."""
LONGEST = 0.4
"""Seconds of all runs of one form."""
Run = Any
Path = tuple[tuple[str, int], ...]


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


class Finding(NamedTuple):
    """A program that was found.

    Attributes:
        run: the program, of the arguments of a call, or None where the program as it is remains.
        explained: what it explains, or None.
        path: names of the rewrites that lead to it.
        seconds, before: time of a call, and that of the program as it is.
        forms, bounded, verified: numbers of forms that were seen, not expanded by the bound, and that passed.
        elapsed: seconds of the search.
        certificate: of its equivalence, or None.
        note: a remark.
        graph: its µGraph, or that of the function as it is.
        kernel: the function as one kernel, verified, or None: a record with a meaning, which need not have loops.
        stored: it was known from an earlier search.
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

    @property
    def counted(self) -> str:
        """Numbers of forms."""
        return f"{self.forms} forms ({self.bounded} not expanded by the bound)"

    def __str__(self) -> str:
        one = ""
        if self.kernel is not None:
            one = f"; one kernel has a loop along {self.kernel.loop}, {self.kernel.passes} passes"
        if self.run is None:
            return self.note or f"no faster form among {self.counted}, in {self.elapsed:.1f} s{one}"
        known = "known from an earlier search" if self.stored else f"found among {self.counted}"
        gain = f", {self.before / self.seconds:.2f} times as fast" if self.seconds else ""
        return f"{known} in {self.elapsed:.1f} s: {', '.join(self.path)}{gain}{one}"


class Task(NamedTuple):
    """A function to be searched.

    Attributes:
        graph, outputs: as traced.
        result: nested placeholders of the outputs.
        arrays: arrays and numbers that it reads, in the order of the graph's leaves.
        before: the program as it is.
        compiled: makes a program of a function of arrays, and what it explains.
        described: what a program of some kernels, with its text, explains.
    """

    graph: Graph
    outputs: list[Node]
    result: Any
    arrays: list[Any]
    before: Run
    compiled: Callable[[Any], tuple[Run, Any]]
    described: Callable[[tuple[Any, ...], str], Any]


def optimize(task: Task, seconds: float, progress: Callable[[int, int, str], None] | None = None) -> Finding:
    """Search a faster program; an interrupt from the keyboard ends the search, and what it found is kept.

    Args:
        task: the function.
        seconds: budget; 0: only what an earlier search has found for the same structure is taken.
        progress: takes numbers of forms measured and to measure, and the best so far.
    """
    try:
        labelled = term_of(task.graph, task.outputs)
    except (UnlabelledError, RecursionError) as error:
        return Finding(note=f"not searched: {error}")
    return _Search(task, labelled, seconds, progress or (lambda *_: None)).run()


class _Search:
    """A search that runs."""

    def __init__(
        self, task: Task, labelled: Labelled, seconds: float, progress: Callable[[int, int, str], None]
    ) -> None:
        self.task, self.labelled, self.progress = task, labelled, progress
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.rates = Rates.of(config.target())
        self.inputs = _axes_of_inputs(labelled)
        self.reference = self.graph(labelled.results)
        text = json.dumps(to_json(self.reference), sort_keys=True) + labelled.dtype.replace("float32", "")
        self.key = hashlib.sha256(text.encode()).hexdigest()
        self.seed = secrets.randbits(63)  # of the tests of all candidates; a certificate has tests of its own
        self.forms: list[Form] = []
        self.bounded = self.verified = 0
        self.best = Finding()
        self.selected: tuple[Placed, Path] | None = None

    def graph(self, roots: tuple[Term, ...]) -> MuGraph:
        """The µGraph of a form."""
        return graph_of(roots, self.labelled.axes, self.inputs)

    def run(self) -> Finding:
        """The best program."""
        known = self.known()
        if known is not None or self.end <= self.start:
            return known or Finding(graph=self.reference)
        try:
            self.enumerate()
            self.measure()
            self.as_one()
        except KeyboardInterrupt:
            self.best = self.best._replace(note="interrupted: the best so far is kept")
        elapsed = time.monotonic() - self.start
        forms, bounded, verified = len(self.forms), self.bounded, self.verified
        best = self.best._replace(forms=forms, bounded=bounded, verified=verified, elapsed=elapsed)
        return best._replace(graph=self.reference) if best.run is None else self.kept(best)

    def enumerate(self) -> None:
        """Expand forms, best first, until there are no more, or enough."""
        first = Form(self.labelled.results, (), self.seconds(self.labelled.results))
        heap = [(first.seconds, 0, first)]
        seen = {first.roots}
        best = first.seconds
        while heap and len(seen) < MOST_FORMS and time.monotonic() < self.start + (self.end - self.start) / 2:
            _, _, form = heapq.heappop(heap)
            self.forms.append(form)
            if self.seconds(form.roots, optimistic=True) > SLACK * best:
                self.bounded += 1
                continue
            for i, (name, roots) in enumerate(alternatives(form.roots)):
                if roots in seen:
                    continue
                seen.add(roots)
                new = Form(roots, (*form.path, (name, i)), self.seconds(roots))
                best = min(best, new.seconds)
                heapq.heappush(heap, (new.seconds, len(seen), new))
        self.forms += [x for *_, x in heap]

    def seconds(self, roots: tuple[Term, ...], *, optimistic: bool = False) -> float:
        """Predicted seconds of a form."""
        return predicted(roots, self.labelled.extents, self.rates, optimistic=optimistic)

    def measure(self) -> None:
        """Verify and measure the most promising forms."""
        before = timed(self.task.before, self.task.arrays)
        self.best = Finding(before=before, seconds=before)
        ranked = sorted(self.forms, key=lambda x: x.seconds)[:MEASURED]
        for i, form in enumerate(ranked):
            if time.monotonic() > self.end:
                break
            self.progress(i, len(ranked), f"{before / self.best.seconds:.2f} times as fast")
            if not check(self.reference, self.graph(form.roots), seed=self.seed):
                continue
            self.verified += 1
            try:
                self.compared(Placed(self.graph(form.roots), *self.compiled(form.roots), form.seconds), form.path)
            except (PortmmError, ByValueError):
                continue

    def compared(self, candidate: Placed, path: Path) -> None:
        """Measure a candidate beside the program as it is, and keep it if it is the fastest so far.

        One that is far slower in three runs is not measured further.
        """
        if timed(candidate.run, self.task.arrays, 0.0) > REJECT_RATIO * self.best.seconds:
            return
        before, seconds = timed(self.task.before, self.task.arrays), timed(candidate.run, self.task.arrays)
        if seconds < FASTER * min(before, self.best.before) and seconds < self.best.seconds:
            names = tuple(x for x, _ in path)
            self.best = self.best._replace(
                run=candidate.run, explained=candidate.explained, seconds=seconds, path=names
            )
            self.selected = candidate, path

    def as_one(self) -> None:
        """Find the function as one kernel, of any form, with the fewest passes and bytes; measure what has loops."""
        extents, axes = self.labelled.extents, self.labelled.axes
        every: list[tuple[Kernel, Form, int]] = []
        for form in sorted(self.forms, key=lambda x: len(x.path))[:FORMS_OF_KERNELS]:
            kernels = one_kernels(form.roots, axes, self.inputs, extents, self.rates.near)
            every += [(x, form, i) for i, x in enumerate(kernels)]
        ran = 0
        for kernel, form, i in sorted(every, key=lambda x: (x[0].passes, x[0].moved)):
            known = self.best.kernel is not None
            if known and (ran >= KERNELS_MEASURED or time.monotonic() > self.end):
                break
            try:
                placed = self.placed(kernel) if KERNELS_MEASURED else []
            except PortmmError:
                placed = []
            if known and not placed:
                continue
            if (
                not check(self.reference, kernel.graph, seed=self.seed)
                or not judge(self.reference, kernel.graph).stable
            ):
                continue
            self.best = self.best if known else self.best._replace(kernel=kernel)
            ran, self.verified = ran + bool(placed), self.verified + bool(placed)
            for j, x in enumerate(placed):
                self.compared(x, (*form.path, (f"{ONE_KERNEL}{kernel.loop}", i * MOST_SCHEDULES + j)))

    def placed(self, kernel: Kernel) -> list[Placed]:
        """A kernel as programs, one for each schedule.

        Raises:
            PortmmError: there are no loops for it, or they are not built.
        """
        task = self.task
        graph = laid_out(kernel.graph, self.labelled, task.arrays)
        every: list[Placed] = []
        for s in schedules(graph, kernel.sizes)[:MOST_SCHEDULES]:
            run, kernels, source = compiled_kernel(graph, self.labelled, task.arrays, task.result, kernel.sizes, s)
            seconds = predicted_kernel(graph.steps[0].program, kernel.sizes, s, self.rates)
            every.append(Placed(graph, run, task.described(kernels, source), seconds, s))
        return every

    def compiled(self, roots: tuple[Term, ...]) -> tuple[Run, Any]:
        """The program of a form."""
        labelled, result = self.labelled, self.task.result

        def function(*arrays: Any) -> Any:
            inputs = []
            for leaf, views in labelled.leaves:
                x = arrays[leaf]
                for view in views:
                    x = view(x)
                inputs.append(x)
            ends = iter(compute(roots, labelled.axes, inputs, labelled.extents, labelled.dtype))
            return rebuilt(result, lambda x: next(ends) if isinstance(x, Placeholder) else x)

        return self.task.compiled(function)

    def kept(self, best: Finding) -> Finding:
        """A finding with its certificate, stored for later searches; none if a check fails."""
        assert self.selected is not None  # noqa: S101 - of a program
        (graph, _, explained, seconds, schedule), path = self.selected
        try:
            target, threads = config.target(), config.get_num_threads()
            one = [] if schedule is None else [Emitted("one kernel", graph.steps[0].program, schedule)]
            kernels = [*one, *emitted(explained.kernels, target, threads)]
            certificate = certify(self.reference, graph, target.name, kernels, unlisted(explained.kernels, graph))
        except PortmmError as error:
            note = f"a faster program is not kept: {error}"
            return Finding(note=note, forms=best.forms, elapsed=best.elapsed, kernel=best.kernel)
        trust = max(LEAST_TRUST, best.before / best.seconds / self.promise(seconds))
        program_database.store(self.key, target.name, threads, program_database.Entry(path, certificate, trust))
        return best._replace(certificate=certificate, graph=graph)

    def promise(self, seconds: float) -> float:
        """The predicted speed-up of a program that is predicted to take some seconds."""
        return self.seconds(self.labelled.results) / seconds

    def known(self) -> Finding | None:
        """The program that an earlier search has found for the same structure, verified again, if it may pay."""
        entry = program_database.find(self.key, config.target().name, config.get_num_threads())
        if entry is None:
            return None
        try:
            candidate = self.replayed(entry.path, entry.trust)
        except (PortmmError, ByValueError):
            return None
        if candidate is None or not check(self.reference, candidate.graph):
            return None
        path, elapsed = tuple(name for name, _ in entry.path), time.monotonic() - self.start
        graph, run, explained, *_ = candidate
        return Finding(run, explained, path, elapsed=elapsed, certificate=entry.certificate, graph=graph, stored=True)

    def replayed(self, path: Path, trust: float) -> Placed | None:
        """The program of a path, if it may pay for these sizes: as predicted, times `trust`.

        Raises:
            PortmmError: it is not built.
        """
        roots = self.labelled.results
        one = [x for x in path if x[0].startswith(ONE_KERNEL)]
        for name, i in path[: len(path) - len(one)]:
            every = list(alternatives(roots))
            if i >= len(every) or every[i][0] != name:
                return None
            roots = every[i][1]
        if not one:
            seconds = self.seconds(roots)
            pays = trust * self.promise(seconds) >= 1
            return Placed(self.graph(roots), *self.compiled(roots), seconds) if pays else None
        axes, extents = self.labelled.axes, self.labelled.extents
        kernels = list(one_kernels(roots, axes, self.inputs, extents, self.rates.near))
        ((name, number),) = one
        i, j = divmod(number, MOST_SCHEDULES)
        if i >= len(kernels) or name != ONE_KERNEL + kernels[i].loop:
            return None
        programs = self.placed(kernels[i])
        return programs[j] if j < len(programs) and trust * self.promise(programs[j].predicted) >= 1 else None


def _axes_of_inputs(labelled: Labelled) -> tuple[str, ...]:
    """Labels of the inputs' dimensions."""
    axes: dict[int, str] = {}
    stack = list(labelled.results)
    while stack:
        x = stack.pop()
        if x.op == "input":
            axes[x.data] = x.labels
        stack += x.args
    return tuple(axes.get(i, "") for i in range(len(labelled.leaves)))


def timed(run: Run, arrays: Sequence[Any], longest: float = LONGEST) -> float:
    """Least seconds of some runs of a program: of three, and of more until they took `longest` seconds."""
    run(arrays)
    least, began, runs = float("inf"), time.perf_counter(), 0
    while runs < 3 or (time.perf_counter() - began < longest and runs < 200):
        start = time.perf_counter()
        run(arrays)
        least, runs = min(least, time.perf_counter() - start), runs + 1
    return least
