"""Search of an equivalent program that is faster: by rewrites of terms, verified and measured.

Owns `optimize`. Terms are expanded best first, each form once, and none of which even the
optimistic prediction is above the best; the most promising forms are verified over finite fields and judged for
stability, compiled and measured beside the program as it is. What is kept is faster and has a certificate.
"""

from __future__ import annotations

import hashlib
import heapq
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from portmm.dispatch import config, program_database
from portmm.errors import ChangedError, PortmmError, ScheduleError
from portmm.fusion import turns
from portmm.fusion.budget import Budget
from portmm.fusion.emitted import all_emitted, unlisted, with_threads
from portmm.fusion.finding import Finding, Form, Path, Placed, Task
from portmm.fusion.placing import MOST_SCHEDULES, ONE_KERNEL, Placing
from portmm.fusion.split_search import in_parts, parts_of
from portmm.fusion.term_cost import Rates
from portmm.fusion.term_reader import Labelled, term_of
from portmm.fusion.term_rewrites import alternatives, subterms
from portmm.fusion.terms import UnlabelledError
from portmm.trace.placeholders import ByValueError
from portmm.verification.certificate import LATE, Emitted, certify, late, of_sizes
from portmm.verification.equivalence import check
from portmm.verification.stability import judge

if TYPE_CHECKING:
    from portmm.fusion.program import Kernel as Described
    from portmm.fusion.term_kernels import Kernel
    from portmm.ir.mugraph import MuGraph

SECONDS = 60.0
"""Budget of a search by default."""
MOST_FORMS = 4000
MEASURED = 10
"""Forms that are compiled and measured."""
SLACK = 1.5
"""Largest ratio of a form's optimistic predicted time to the best predicted time at which the form is expanded."""
LEAST_TRUST = 0.5
"""Least measured gain over the predicted one by which predictions for other sizes are multiplied."""
FORMS_OF_KERNELS = 60
"""Forms that are tried as one kernel, with the fewest rewrites first."""
KERNELS_MEASURED = 3
"""Kernels of the whole function that are compiled and measured."""
REJECT_RATIO = 1.5
"""Time of three runs of a form over that of the best one, from which it is not measured further."""
ENDED = "its start took the time of the search; search longer"
FINALISTS = 3
"""Programs that are measured again at the end, beside the program as it is."""


def optimize(
    task: Task, seconds: float, progress: Callable[[int, int, str], None] | None = None, start: float | None = None
) -> Finding:
    """Search a faster program; an interrupt from the keyboard ends the search, and what it found is kept.

    A function with operations that have no terms is split at them, and what is between is searched: see `split_search`.

    Args:
        task: the function.
        seconds: budget; 0: only what an earlier search has found for the same structure is taken.
        progress: takes numbers of forms measured and to measure, and the best so far.
        start: of the budget, by the monotonic clock; by default now.
    """
    start = time.monotonic() if start is None else start
    shown = progress or (lambda *_: None)
    try:
        labelled = term_of(task.graph, task.outputs)
    except (UnlabelledError, RecursionError) as error:
        unsearched = Finding(note=f"not searched: {error}")
        try:
            parts = parts_of(task)
            return unsearched if parts is None else in_parts(parts, optimize, Budget(seconds, start=start), shown)
        except (PortmmError, ByValueError, ChangedError, RecursionError):
            return unsearched
    return _Search(task, labelled, Budget(seconds, len(task.kernels) + 1, start), shown).run()


class _Search:
    """A search that runs."""

    def __init__(
        self, task: Task, labelled: Labelled, budget: Budget, progress: Callable[[int, int, str], None]
    ) -> None:
        self.task, self.labelled, self.budget, self.progress = task, labelled, budget, progress
        self.place = Placing(task, labelled, Rates.of(config.target()))
        self.reference = self.place.graph(labelled.results)
        self.key = hashlib.sha256(labelled.structure().encode()).hexdigest()
        self.seed = secrets.randbits(63)  # of the tests of all candidates; a certificate has tests of its own
        self.forms: list[Form] = []
        self.bounded = self.verified = self.steps = 0
        self.best = Finding()
        self.selected: tuple[Placed, Path] | None = None
        self.faster: list[tuple[float, float, Placed, Path]] = []

    def run(self) -> Finding:
        """The best program."""
        known = self.known()
        if known is not None or self.budget.seconds <= 0:
            return known or Finding(graph=self.reference)
        if self.budget.left <= 0:
            return Finding(graph=self.reference, note=f"not searched: {ENDED}")
        try:
            self.enumerate()
            self.measure()
            self.as_one()
            self.draw()
        except KeyboardInterrupt:
            self.best = self.best._replace(interrupted=True)
        forms, bounded, verified = len(self.forms), self.bounded, self.verified
        best = self.best._replace(forms=forms, bounded=bounded, verified=verified)
        if best.run is not None or not best.interrupted:
            self.show(self.steps, "its kernels are verified")
        best = self.as_it_is(best) if best.run is None else self.kept(best)
        return best._replace(elapsed=self.budget.elapsed)

    def show(self, step: int, what: str) -> None:
        """Show the best so far, and what is done."""
        best = self.best
        gain = "nothing is faster yet" if best.run is None else f"{best.before / best.seconds:.2f} times as fast"
        self.progress(step, self.steps + 1, f"{gain}; {what}")

    def enumerate(self) -> None:
        """Expand forms, best first, until there are no more, or enough."""
        first = Form(self.labelled.results, (), self.place.seconds(self.labelled.results))
        heap = [(first.seconds, 0, first)]
        seen = {first.roots}
        best = first.seconds
        while heap and len(seen) < MOST_FORMS and self.budget.left > self.budget.seconds / 2:
            _, _, form = heapq.heappop(heap)
            self.forms.append(form)
            if self.place.seconds(form.roots, optimistic=True) > SLACK * best:
                self.bounded += 1
                continue
            for i, (name, roots) in enumerate(alternatives(form.roots)):
                if roots in seen:
                    continue
                seen.add(roots)
                new = Form(roots, (*form.path, (name, i)), self.place.seconds(roots))
                best = min(best, new.seconds)
                heapq.heappush(heap, (new.seconds, len(seen), new))
        self.forms += [x for *_, x in heap]

    def measure(self) -> None:
        """Verify and measure the most promising forms."""
        with self.budget.busy():
            before = turns.timed(self.task.before, self.task.arrays, self.budget.turn)
        self.best = Finding(before=before, seconds=before)
        ranked = sorted(self.forms, key=lambda x: x.seconds)[:MEASURED]
        self.steps = len(ranked) + KERNELS_MEASURED
        for i, form in enumerate(ranked):
            if not self.budget.lasts:
                break
            self.show(i, f"a form of {len(self.forms)}")
            if not check(self.reference, self.place.graph(form.roots), seed=self.seed):
                continue
            self.verified += 1
            with self.budget.candidate():
                self.tried(form)

    def tried(self, form: Form) -> None:
        """Compile a form, and measure it unless its kernels do the same work as those of the program as it is."""
        try:
            run, explained = self.place.form(form.roots)
        except (PortmmError, ByValueError):
            return
        if list(map(_work, explained.kernels)) != list(map(_work, self.task.kernels)):
            self.compared(Placed(self.place.graph(form.roots), run, explained, form.seconds), form.path)

    def compared(self, candidate: Placed, path: Path) -> None:
        """Measure a candidate beside the program as it is, and keep it if it is the fastest so far.

        One that is far slower in three runs is not measured further.
        """
        if turns.timed(candidate.run, self.task.arrays, 0.0) > REJECT_RATIO * self.best.seconds:
            return
        times = turns.in_turns(self.task.before, candidate.run, self.task.arrays, self.budget.turn)
        least = times.seconds
        if times.faster:
            self.faster.append((times.ratio, least, candidate, path))
            if least < turns.FASTER * self.best.before and least < self.best.seconds:
                self.select(candidate, path, self.best.before, least)

    def select(self, candidate: Placed, path: Path, before: float, seconds: float) -> None:
        """Make a candidate the best, by its seconds and those of the program as it is."""
        names = tuple(x for x, _ in path)
        best = self.best._replace(run=candidate.run, explained=candidate.explained, path=names)
        self.best, self.selected = best._replace(seconds=seconds, before=before), (candidate, path)

    def draw(self) -> None:
        """Measure the fastest few again, beside the program as it is, which remains unless one is faster."""
        few = sorted(self.faster, key=lambda x: x[:2])[: FINALISTS if self.budget.left > 0 else 1]
        if not few:
            return
        self.show(self.steps, "the fastest are measured again")
        short = self.budget.short(turns.SHORT)
        times = turns.drawn(self.task.before, [x.run for *_, x, _ in few], self.task.arrays, short)
        won = [(t.both, i) for i, t in enumerate(times) if t.faster]
        if not won:
            before = times[0].before
            self.best = self.best._replace(run=None, explained=None, path=(), seconds=before, before=before)
            self.selected = None
            return
        _, i = min(won)
        *_, candidate, path = few[i]
        self.select(candidate, path, times[i].before, times[i].seconds)

    def as_one(self) -> None:
        """Find the function as one kernel, of any form, with the fewest passes and bytes; measure what has loops."""
        every: list[tuple[Kernel, Form, int]] = []
        for form in sorted(self.forms, key=lambda x: len(x.path))[:FORMS_OF_KERNELS]:
            every += [(x, form, i) for i, x in enumerate(self.place.kernels(form.roots))]
        ran = 0
        for kernel, form, i in sorted(every, key=lambda x: (x[0].passes, x[0].moved)):
            known, lasts = self.best.kernel is not None, self.budget.lasts_for_kernel
            if (known and (ran >= KERNELS_MEASURED or not lasts)) or self.budget.left < 0:
                break
            self.show(self.steps - KERNELS_MEASURED + ran, f"one kernel along {kernel.loop}")
            placed = self.placed(kernel) if KERNELS_MEASURED and lasts else []
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
                if not self.budget.lasts:
                    break
                with self.budget.candidate():
                    self.compared(x, (*form.path, (f"{ONE_KERNEL}{kernel.loop}", i * MOST_SCHEDULES + j)))

    def placed(self, kernel: Kernel) -> list[Placed]:
        """A kernel as programs, one for each schedule while the budget lasts; none if there are no loops for it."""
        every: list[Placed] = []
        try:
            graph, few = self.place.schedules(kernel)
            for s in few:
                with self.budget.candidate():
                    every.append(self.place.kernel(kernel, graph, s))
                if not self.budget.lasts:
                    break
        except PortmmError:
            return every
        return every

    def kept(self, best: Finding) -> Finding:
        """A finding with its certificate, stored for later searches; none if a check fails."""
        assert self.selected is not None  # noqa: S101 - of a program
        candidate, path = self.selected
        graph, kernels = candidate.graph, candidate.explained.kernels
        try:
            target, threads = config.target(), config.get_num_threads()
            less = unlisted(kernels, graph)
            every = self.kernels(candidate)
            certificate = certify(self.reference, graph, target.name, every, less, until=self.budget.end)
            if candidate.schedule is not None and late(certificate):  # a kernel that this search alone has made
                raise ScheduleError(f"{LATE}; search longer")
        except PortmmError as error:
            note = f"a faster program is not kept: {error}"
            return Finding(note=note, forms=best.forms, kernel=best.kernel, graph=self.reference)
        promise, gain = self.place.promise(candidate.predicted), best.before / best.seconds
        trust = max(LEAST_TRUST, min(gain, max(1.0, promise)) / promise)  # no loss is predicted to be a gain
        program_database.store(self.key, target.name, threads, program_database.Entry(path, certificate, trust))
        return best._replace(certificate=certificate, graph=with_threads(graph, certificate, target))

    @staticmethod
    def kernels(of: Placed) -> list[Emitted]:
        """The records of the kernels that a program runs."""
        one = [] if of.schedule is None else [Emitted("one kernel", of.graph.steps[0].program, of.schedule)]
        return [*one, *all_emitted(of.graph, of.explained.kernels, config.target(), config.get_num_threads())]

    def as_it_is(self, best: Finding) -> Finding:
        """The finding that nothing is faster, with a certificate of the kernels that run; none after an interrupt."""
        best = best._replace(graph=self.reference)
        if best.interrupted:
            return best
        target, kernels = config.target(), self.task.kernels
        try:
            calls = {x.kind for x in kernels if x.types is not None}
            graph = self.attended("attention_by_factors" in calls) if calls else self.reference
            every = all_emitted(graph, kernels, target, config.get_num_threads())
            less = unlisted(kernels, graph)
            certificate = certify(self.reference, graph, target.name, every, less, steps=False, until=self.budget.end)
        except PortmmError as error:
            return best._replace(note=f"the program as it is has no certificate: {error}")
        return best._replace(certificate=certificate)

    def attended(self, by_factors: bool) -> MuGraph:
        """The form that greedy fusion makes of a softmax between products: attention, by the fewest rewrites.

        Factors are further operands of attention, beside queries, keys and values.
        """
        every = sorted(self.forms, key=lambda x: len(x.path))
        calls = ((x, y) for x in every for y in subterms(x.roots) if y.op == "attention")
        form = next((x for x, y in calls if (len(y.args) > 3) == by_factors), None)
        return self.reference if form is None else self.place.graph(form.roots)

    def known(self) -> Finding | None:
        """The program that an earlier search has found for the same structure, verified again, if it may pay."""
        entry = program_database.find(self.key, config.target().name, config.get_num_threads())
        if entry is None:
            return None
        try:
            candidate = self.place.replayed(entry.path, entry.trust)
        except (PortmmError, ByValueError):
            return None
        if candidate is None or not check(self.reference, candidate.graph):
            return None
        graph, run, explained, *_ = candidate
        if list(map(_work, explained.kernels)) == list(map(_work, self.task.kernels)):
            return None
        certificate = of_sizes(entry.certificate, config.target().name, self.kernels(candidate))
        path, elapsed = tuple(name for name, _ in entry.path), self.budget.elapsed
        graph = with_threads(graph, certificate, config.target())
        return Finding(run, explained, path, elapsed=elapsed, certificate=certificate, graph=graph, stored=True)


def _work(x: Described) -> tuple[str, ...]:
    """The work of a kernel; programs whose kernels do the same differ by the error of measurements alone."""
    return x.kind, x.detail, x.text
