"""Kernels that a fused program runs, with their records, for its certificate.

Owns `all_emitted`, `unlisted`, those whose records it does not know, and `with_threads`, a graph down to its
threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portmm.dispatch.cpu_kernels import attention_unit
from portmm.dispatch.schedule_choice import select_for_class
from portmm.errors import ScheduleError
from portmm.ir.attention_program import Form, attention_of, of_attention
from portmm.ir.block_program import BlockProgram, program_of
from portmm.ir.mugraph import MuGraph, Threads, program_to_json
from portmm.ir.product_program import RESULT, A, B, of_product
from portmm.schedule.cpu_attention import attention_schedule, few_queries, packs_values
from portmm.schedule.text import parse as spelled
from portmm.spec.epilogue import C, Fused, acc, load, parse
from portmm.spec.problem import AXES
from portmm.verification.certificate import Emitted
from portmm.verification.lowered import PRODUCTS, VECTORS

if TYPE_CHECKING:
    from portmm.fusion.program import Kernel
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

MOST_EXACT = 32
"""Rows of A up to which a schedule is for their number alone: see `spec.row_classes`."""


def emitted(kernels: Iterable[Kernel], target: Target, threads: int) -> list[Emitted]:
    """The records of products and of operations over rows, each of them once, with the schedules of products."""
    every: dict[str, Emitted] = {}
    for i, x in enumerate(kernels, 1):
        name = f"kernel {i}, {x.what}"
        if not emitted_alone(x):
            continue
        if x.problem is not None:
            schedule = select_for_class(x.problem, target, threads).schedule
            rows = x.problem.m if x.problem.m <= MOST_EXACT else 0
            every[str(x.problem)] = Emitted(name, _laid_out(x.problem), replace(schedule, static=None), rows)
        else:
            every[x.text] = Emitted(name, program_of(parse(x.text), "L1"))
    return list(every.values())


def all_emitted(graph: MuGraph, kernels: Sequence[Kernel], target: Target, threads: int) -> list[Emitted]:
    """The records of attention, of products and of operations over rows that the kernels of a graph compute."""
    return [*attentions(graph, target, kernels), *emitted(kernels, target, threads)]


def attentions(graph: MuGraph, target: Target, kernels: Iterable[Kernel]) -> list[Emitted]:
    """Attention in a graph that runs as kernels: those that calls of its types have, of few queries and of many."""
    ran = {x.kind: x.types for x in kernels if x.types is not None}
    every = []
    for form in _forms(graph):
        if (types := ran.get(_call(form))) is None:
            continue
        dtype, to = types
        called = form._replace(score=_called(form.score), dtype=dtype, to=to)
        for name, queries in (("few", 1), ("many", MOST_EXACT)):
            with suppress(ScheduleError):
                every.append(_attention(f"attention, {name} queries", called, target, queries))
    return every


def _forms(graph: MuGraph) -> list[Form]:
    """The kinds of attention of a graph's steps."""
    forms = []
    for x in graph.steps:
        with suppress(ScheduleError):
            forms += [attention_of(x.program).form] if x.program.is_attention else []
    return forms


def _call(form: Form) -> str:
    """The kind of the kernel that a call has: factors are read from operands of its score."""
    return "attention_by_factors" if form.score.operands else "attention"


def _called(score: Fused) -> Fused:
    """The score of a call: the scale is part of a factor of queries, if there is one."""
    if "m" not in "".join(x.axes for x in score.operands):
        return score
    s = acc()
    for i in range(len(score.operands) - (len(score.results) > 1)):
        s = s * load(i, "f32")
    return replace(score, results=((C, s), *score.results[1:]))


def _attention(name: str, form: Form, target: Target, queries: int) -> Emitted:
    """The kernel of a call with some queries, by the unit and the schedule that it selects.

    Raises:
        ScheduleError: there is none.
    """
    isa, atom, lanes = attention_unit(form.dtype, form.score, target, queries)
    if form.to != form.dtype and not atom.tiled:
        raise ScheduleError("tile units alone have results of another type than the operands")
    few = queries <= few_queries(isa, atom, form.dtype) and len(form.score.results) == 1
    loop = "n" if few else "m"
    program = of_attention(form if few else form._replace(score=_transposed(form.score)), loop)
    if form.dtype == "f32":
        return Emitted(name, program)
    packs = not few and packs_values(isa, atom, form.dtype, 1, attention_schedule(isa, atom).parallel.cell[1])
    schedule = attention_schedule(isa, lanes if few else atom, packs=packs)
    return Emitted(name, program, schedule, unit=VECTORS if few else PRODUCTS)


def _transposed(score: Fused) -> Fused:
    """The score of a kernel whose rows are keys."""
    other = {"m": "n", "n": "m"}
    swapped = (sorted((other.get(y, y) for y in x.axes), key=AXES.index) for x in score.operands)
    each = zip(score.operands, swapped, strict=True)
    return replace(score, operands=tuple(replace(x, axes="".join(axes)) for x, axes in each))


def unlisted(kernels: Iterable[Kernel], graph: MuGraph | None) -> list[tuple[str, str]]:
    """Kernels that a program runs and neither `emitted` nor a step of its graph has, and the reason.

    A step of attention has the kernel of its record, as a call of `attention` does.
    """
    calls = () if graph is None else tuple(map(_call, _forms(graph)))
    reasons = {"product": "its weight is packed, or its rows are quantized", "rows": "it has no text of expressions"}
    every = [
        (i, x) for i, x in enumerate(kernels, 1) if not (x.kind == "block" or (x.types is not None and x.kind in calls))
    ]
    listed = [(i, x) for i, x in every if not emitted_alone(x)]
    return [(f"kernel {i}, {x.what}", reasons.get(x.kind, "greedy fusion made it of several steps")) for i, x in listed]


def with_threads(graph: MuGraph, certificate: Mapping[str, Any], target: Target) -> MuGraph:
    """A graph whose kernels have their thread level: by the schedules that a certificate names for their records."""
    known = {json.dumps(x["record"]): spelled(x["schedule"]) for x in certificate["kernels"]}
    steps = []
    for x in graph.steps:
        s = known.get(json.dumps(program_to_json(x.program)))
        atom = None if s is None else next((y.atom("f32") for y in target.isas if y.name == s.isa), None)
        threads = None
        if s is not None and atom is not None:
            threads = Threads(s.isa, s.mr, s.nr, atom.n, s.parallel.over, s.parallel.split)
        steps.append(x._replace(threads=threads))
    return replace(graph, steps=tuple(steps))


def emitted_alone(x: Kernel) -> bool:
    """Whether the record of a kernel follows from what it is described by."""
    product = x.problem is not None and x.problem.b != "packed" and not x.problem.source
    return product or (x.problem is None and x.kind == "rows" and bool(x.text))


def _laid_out(p: Problem) -> BlockProgram:
    """The record of a problem, whose operands have their labels in the order of its layouts."""
    program = of_product(p)
    operands = list(program.operands)
    for i, layout in ((A, p.a), (B, p.b), (RESULT, p.c)):
        if layout == "col":
            axes = operands[i].axes
            operands[i] = replace(operands[i], axes=axes[:-2] + axes[:-3:-1])
    return replace(program, operands=tuple(operands))
