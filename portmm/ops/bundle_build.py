"""Making of bundles: which kernels the calls of some shapes need on some machines, selected and compiled for each.

Owns `make`, which selects for each described chip as its own process would, compiles for its instruction sets, and
packs what was built.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from portmm.build import cache, stored_objects
from portmm.build.bundle import packed
from portmm.codegen.c_kernel import source
from portmm.codegen.lower import lower_int4_repack, lower_pack
from portmm.dispatch import cpu_kernels, stored_kernels
from portmm.dispatch.base_kernels import int4_word
from portmm.dispatch.schedule_choice import select_for_class
from portmm.dispatch.stored_kernels import CODE, HALF, MACHINES, THREADS, USED, packing_question
from portmm.errors import BundleError, ScheduleError
from portmm.host import chip_match
from portmm.ir.index import spelled
from portmm.ops.bundle_jobs import AttentionCall, Built, Call, Job
from portmm.ops.bundle_runs import packing_text
from portmm.ops.bundle_shapes import Shape, problem_of
from portmm.runtime import cpu as cpu_runtime
from portmm.schedule.text import spell
from portmm.spec.dtype import BY_NAME, types
from portmm.spec.problem import Family, Problem
from portmm.spec.problem import family as family_of
from portmm.target.target import load_isa, load_target, names
from portmm.util import system

if TYPE_CHECKING:
    from pathlib import Path

    from portmm.ir.nodes import Kernel
    from portmm.target.target import Target

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of threads that kernels are selected for; a count in between has those of the next."""
SCHEDULES = "schedules"
"""The question for the spelling of all schedules of a bundle."""
RUN, RUNS = "run ", "runs"
"""The beginning of questions for kernels with texts of `bundle_runs`, which numbers end, and that for their number."""


class Maker:
    """Collects the kernels of a bundle.

    Attributes:
        jobs: what to compile, by question.
        codes: the job of a schedule's kernel, by its spelling, and facts about the kernel.
        kernels: the same of recorded kernels, by their questions.
        routes: fields of answers to questions for routes, after those of the schedule's code.
        built: what the bundle has, for a table.
        recorded: numbers of kernels that models call, by machine.
        calls: the kernels that were selected.
        packings: of weights, by machine and types: the layout, and the questions for the kernels that pack.
        attentions: kernels of attention, for the library for C.
        objects: compiled objects, by question.
        facts: answers without an object, by question.
        linked: symbols of kernels in the bundle's library, by question.
        runs: how kernels of packing and attention are run, by the question of their source and the text.
        machines: instruction sets by name of a machine.
        isas: those of kernels.
        targets: the machines.
        system: what objects are for, as `util.system` spells it; Linux if empty.
        phrases: those that the texts of answers have in common, to be abbreviated.
    """

    def __init__(self, of: str = "") -> None:
        self.system = of
        self.jobs: dict[str, Job] = {}
        self.codes: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.kernels: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.routes: dict[str, tuple[str, str]] = {}
        self.built: list[Built] = []
        self.recorded: dict[str, int] = {}
        self.calls: list[Call] = []
        self.packings: dict[tuple[str, str], tuple[Family, str, str]] = {}
        self.attentions: list[AttentionCall] = []
        self.objects: dict[str, bytes] = {}
        self.facts: dict[str, tuple[str, ...]] = {}
        self.linked: dict[str, str] = {}
        self.runs: dict[tuple[str, str], None] = {}
        self.machines: dict[str, tuple[str, ...]] = {}
        self.isas: set[str] = set()
        self.targets: list[Target] = []
        self.phrases: Callable[[list[str]], Sequence[str]] = lambda _: ()

    def add_machine(self, target: Target) -> None:
        """Add a machine."""
        if target.name not in self.machines:
            self.targets.append(target)
            self.facts |= _facts(target.arch)
        self.machines[target.name] = tuple(isa.name for isa in target.isas)

    def add_source(self, kernel: Kernel, arch: str) -> str:
        """Add the source of a kernel, and return its question."""
        self.isas.add(kernel.isa.name)
        job = Job(system.named(arch, self.system), source(kernel), kernel.isa.flags, kernel.name, (kernel.name,))
        self.jobs.setdefault(job.question, job)
        return job.question

    def add_kernel(self, kernel: Kernel, arch: str, question: str, *more: str) -> None:
        """Add a kernel: the answer to its source, and to a question, if it has one, with further fields."""
        job = self.add_source(kernel, arch)
        if question:
            self.kernels[question] = job, (*_about(kernel), *more)

    def add_schedule(self, s: Any, target: Target) -> str:
        """Add the code of a schedule, and return its spelling."""
        text = spell(s)
        if text not in self.codes:
            kernel = cpu_kernels.kernel_of(s, cpu_kernels.isa_of(s, target))
            self.codes[text] = (self.add_source(kernel, target.arch), _about(kernel))
        return text

    def add_shape(self, shape: Shape, target: Target, counts: Sequence[int]) -> None:
        """Add the kernels that calls of a shape need on a machine.

        Raises:
            ScheduleError: the machine does not multiply these types.
        """
        schedules: dict[str, None] = {}
        last: tuple[str, float] = ("", 0.0)
        for family, m in product(_families(shape, target), shape.rows):
            p = problem_of((m, shape.n, shape.k), shape.dtype, shape.b, family)
            for threads in counts:
                best = select_for_class(p, target, threads)
                text = self.add_schedule(best.schedule, target)
                schedules[text] = None
                question = stored_kernels.question(target.name, threads, p, best.rows)
                self.routes[question] = (text, str(int(best.workers == 1)))
                self.calls.append(Call(target, threads, p, best.rows, text, best.workers == 1))
                if threads == 1:
                    last = self.codes[text][1][0], _seconds(p, best, target)
        if shape.b == "packed":
            self.add_packing(shape, target)
        self.built.append(Built(target.name, shape, shape.rows[-1], last[0], len(schedules), last[1]))

    def add_packing(self, shape: Shape, target: Target) -> None:
        """Add the kernels that pack weights of a shape, where there are some: the C library packs as usual."""
        layouts = _layouts(shape, target)
        if layouts[0].dtype == "u4":
            with suppress(ScheduleError):
                isa = cpu_kernels.int4_unit(target)[0]
                for form in layouts:
                    word = int4_word(form.group, symmetric=form.symmetric) + (HALF if form.half else "")
                    question = packing_question(target.name, word, "row", shape.n)
                    every = self._add_packing(lower_int4_repack(isa, form), target, question, form)
                    self.runs[every, packing_text(isa.name, shape.dtype, str(form), "row")] = None
                    self.packings.setdefault((target.name, shape.dtype), (form, every, every))
            return
        isa, _ = cpu_kernels.packing_unit(shape.dtype, target)
        for form in layouts:
            by = []
            for x in ("row", "col"):
                question = packing_question(target.name, shape.dtype, x, shape.n) if form == layouts[-1] else ""
                by.append(self._add_packing(lower_pack(isa, shape.dtype, form.nr, x), target, question, form))
                self.runs[by[-1], packing_text(isa.name, shape.dtype, str(form), x)] = None
            self.packings.setdefault((target.name, shape.dtype), (form, by[0], by[1]))

    def _add_packing(self, kernel: Kernel, target: Target, question: str, layout: Family) -> str:
        """Add a kernel that packs weights in a layout, as the answer to a question if that is one."""
        if question:
            self.add_kernel(kernel, target.arch, question, str(layout))
        return self.add_source(kernel, target.arch)

    def add_run_time(self, arch: str, headers: Path | None = None, libc: str = "gnu") -> None:
        """Add the run time: the extension for a version of Python, and that of cffi.

        Args:
            arch: architecture.
            headers: directory of Python's headers, as `.../python3.12`; by default those of this interpreter, if they
                are there.
            libc: "gnu" or "musl".
        """
        from portmm.runtime.cffi_launches import SYMBOLS

        platform = system.named(arch, self.system)
        flags = cpu_runtime.flags(platform)
        every = [Job(platform, cpu_runtime.source(python=False, platform=platform), flags, "portmm_run", SYMBOLS)]
        folder = headers or cpu_runtime.python_headers()
        if folder:
            module, text = cpu_runtime.MODULE, cpu_runtime.source(python=True, platform=platform)
            interface = cpu_runtime.interface(platform, folder.name if headers else "")
            interface = interface.replace("-gnu.", f"-{libc}.")
            every.append(Job(platform, text, flags, module, (f"PyInit_{module}",), interface, folder))
        self.jobs |= {job.question: job for job in every}

    def pack(self, counts: Sequence[int], report: Callable[[int, int, str], None], processes: int = 0) -> bytes:
        """Compile everything and pack it.

        Raises:
            NoCompilerError: there is no compiler for an architecture.
            BuildError: a compiler failed.
        """
        objects = self.objects | dict(self._compiled(report, processes or os.cpu_count() or 1))
        answers: dict[str, tuple[bytes | None, tuple[str, ...]]] = {x: (code, ()) for x, code in objects.items()}
        for question, (job, about) in (self.kernels | {CODE + x: y for x, y in self.codes.items()}).items():
            symbol = self.linked.get(job)
            answers[question] = (None, ("", symbol, *about[1:])) if symbol else (objects[job], about)
        for question, (text, one) in self.routes.items():
            job, about = self.codes[text]
            answers[question] = objects[job], (*about, one)
        answers |= {question: (None, fields) for question, fields in self.facts.items()}
        for i, (question, text) in enumerate(self.runs):
            answers[f"{RUN}{i}"] = objects[question], (self.jobs[question].name, text)
        if self.runs:
            answers[RUNS] = None, (str(len(self.runs)),)
        answers[MACHINES] = None, tuple(f"{name}={','.join(isas)}" for name, isas in sorted(self.machines.items()))
        answers[USED] = None, tuple(sorted(self.isas))
        answers[THREADS] = None, tuple(map(str, counts))
        answers[SCHEDULES] = None, tuple(sorted(self.codes))
        return packed(answers, self.phrases(["\t".join(fields) for _, fields in answers.values()]))

    def _compiled(self, report: Callable[[int, int, str], None], processes: int) -> Iterator[tuple[str, bytes]]:
        done, jobs = 0, list(self.jobs.items())
        with ThreadPoolExecutor(processes) as pool:
            for (question, job), code in zip(jobs, pool.map(lambda x: x[1].compiled(), jobs), strict=True):
                report(done, len(jobs), f"{job.name} for {job.arch}")
                done += 1
                yield question, code
        report(len(jobs), len(jobs), "done")


def make(
    shapes: Sequence[Shape],
    machines: Sequence[Target],
    *,
    counts: Sequence[int] = COUNTS,
    report: Callable[[int, int, str], None] = lambda *_: None,
) -> tuple[bytes, list[Built]]:
    """A bundle with the kernels of shapes for machines, and what it has.

    Args:
        shapes: kinds of products.
        machines: processors, as from `targets_of`.
        counts: numbers of threads.
        report: called with steps done, steps in all, and what is being compiled.

    Raises:
        BundleError: no machine multiplies the types of a shape.
        NoCompilerError: there is no compiler for an architecture.
        BuildError: a compiler failed.
    """
    maker = Maker()
    add_shapes(maker, shapes, machines, counts)
    return maker.pack(counts, report), maker.built


def add_shapes(maker: Maker, shapes: Sequence[Shape], machines: Sequence[Target], counts: Sequence[int]) -> None:
    """Add the kernels of shapes for machines, and the run time.

    Raises:
        BundleError: no machine multiplies the types of a shape.
    """
    for target in machines:
        maker.add_machine(target)
    for shape in shapes:
        errors = []
        for target in machines:
            try:
                maker.add_shape(shape, target, counts)
            except ScheduleError as error:
                errors.append(str(error))
        if len(errors) == len(machines):
            raise BundleError(f"{shape} runs on none of these machines: {'; '.join(errors)}")
    for arch in dict.fromkeys(x.arch for x in machines):
        maker.add_run_time(arch)


def add_calls(maker: Maker, run: Callable[[], None], machines: Sequence[Target], counts: Sequence[int]) -> None:
    """Add the kernels that calls ask for on machines, and the run time; what they compute finds them.

    Args:
        maker: of the bundle.
        run: makes the calls; their results mean nothing, since no kernel runs.
        machines: processors, as from `targets_of`.
        counts: numbers of threads.
    """
    from portmm.ops.recorded_kernels import of_calls

    for target, kernels in zip(machines, of_calls(run, machines, counts).values(), strict=True):
        maker.add_machine(target)
        sources = {maker.add_source(kernel, target.arch) for kernel, _ in kernels}
        maker.recorded[target.name] = maker.recorded.get(target.name, 0) + len(sources)
        for kernel, question in kernels:
            maker.add_kernel(kernel, target.arch, question)
    for arch in dict.fromkeys(x.arch for x in machines):
        maker.add_run_time(arch)


def add_cache(maker: Maker) -> None:
    """Add the objects of the cache: kernels of any kind, and the run time; their sources find them."""
    folder, start = cache.cache_dir(), stored_objects.BUILDS
    for note in sorted(folder.glob(f"{start}*.note")):
        name = note.name.removeprefix(start).removesuffix(".note")
        known = stored_objects.find(name)
        if known is not None:
            maker.objects[stored_objects.SOURCE + name] = known.code


@functools.cache
def _facts(arch: str) -> dict[str, tuple[str, ...]]:
    """The facts that identify the machine on which a bundle is used."""
    return chip_match.facts(arch, map(load_target, names("chip")), map(load_isa, names("isa")))


def _about(kernel: Kernel) -> tuple[str, ...]:
    """Fields of the answer to a kernel's question, after the number of its object."""
    return kernel.name, str(int(kernel.swap)), str(BY_NAME[kernel.atom.acc].bytes), spelled(kernel.workspace)


def _families(shape: Shape, target: Target) -> list[str]:
    """The packed layouts of B, as problems have them."""
    return [str(x) for x in _layouts(shape, target)] if shape.b == "packed" else [""]


def _layouts(shape: Shape, target: Target) -> list[Family]:
    """The packed layouts of weights, the C library's first: of few columns another; of int4 values several.

    Those have offsets or not, and then scales of 32 or of 16 bits. A weight of no more rows than a group is one group,
    which has no number.
    """
    if types(shape.dtype)[1] != "u4":
        usual = family_of(cpu_kernels.family(shape.dtype, target))
        return list(dict.fromkeys((usual, cpu_kernels.for_columns(usual, shape.n))))
    groups = dict.fromkeys((shape.group, shape.group if shape.k > shape.group else 0))
    every = [cpu_kernels.family_of_codes(target, group) for group in groups]
    return [y for x in every for y in (x, *(replace(x, symmetric=True, half=half) for half in (False, True)))]


def _seconds(p: Problem, best: Any, target: Target) -> float:
    from portmm.dispatch.schedule_choice import schedule_cost

    with suppress(ArithmeticError):
        return float(schedule_cost(p, best.schedule, target).seconds)
    return 0.0
