"""Compilation of a recorded graph: rewrites, partition, kernels and the program that runs them.

Owns `compiled_program`, which splits a graph further until each of its units has a kernel or is computed by NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.arrays.numpy_fallback import fall_back
from portmm.build.builds_ahead import announced
from portmm.errors import BuildError, ScheduleError
from portmm.fusion.depth_to_space import match_depth_to_space
from portmm.fusion.group_norm import match_group_norm
from portmm.fusion.joins import join_products
from portmm.fusion.partition import Splitter
from portmm.fusion.plan_cpu import HostBuilder
from portmm.fusion.program import Kernel
from portmm.fusion.rewrites import match_attention
from portmm.ops import host_matmul
from portmm.trace.placeholders import Placeholder, rebuilt

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.partition import Split
    from portmm.fusion.plan import Builder

MOST_TRIES = 64
"""Partitions of one graph that are tried."""


_builders: list[Callable[..., Builder]] = []


@contextmanager
def built_by(make: Callable[..., Builder]) -> Iterator[None]:
    """Build programs for the host by another builder in a block, which no NumPy stands in for."""
    _builders.append(make)
    try:
        yield
    finally:
        _builders.pop()


class Compiled(NamedTuple):
    """A program.

    Attributes:
        run: its function of the arrays, weights and numbers of a call.
        kernels: its steps.
        scratch: bytes of memory between its kernels.
        apart: lines with reasons why operations there are not fused.
        source: its text.
        notes: further remarks.
    """

    run: Any
    kernels: list[Kernel]
    scratch: int
    apart: list[Any]
    source: str
    notes: list[str]


def compiled_program(
    graph: Graph, outputs: list[Node], result: Any, clock: Callable[[int], None] | None = None
) -> Compiled:
    """The program of a graph.

    Args:
        graph: the operations.
        outputs: the nodes of its results.
        result: the results as placeholders, in lists, tuples or dicts.
        clock: called after each kernel with the number of kernels that have run; they then run one by one.

    Raises:
        TypeError: some of its arrays are on a device, others in the host's memory.
        ValueError: its arrays are on several devices.
        ScheduleError: something has no kernel on a device, or for the builder of `built_by`.
    """
    there = bool(graph.device_arrays)
    strict, make = there or bool(_builders), _builder_of(graph, clock)
    if not strict and any(0 in x.shape or (x.kind == "matmul" and 0 in x.inputs[0].shape) for x in graph.nodes):
        return _evaluated(graph, result, "an array is empty: NumPy computes the function")
    plain: dict[Node, str] = {}
    numpy: dict[Node, str] = {}
    unjoined: list[tuple[str, str]] = []
    stored = [] if there else _rewritten(graph, outputs)
    for _ in range(MOST_TRIES):
        split = Splitter(graph, outputs, plain, numpy).split()
        if not (there or plain or numpy) and (reasons := join_products(graph, split)) is not None:
            unjoined = reasons
            split = Splitter(graph, outputs, plain, numpy).split()
        try:
            builder = make(graph, outputs, split)
            if not _built(builder, split, plain, numpy):
                continue
            run, source = builder.program(result)
        except (ScheduleError, BuildError) as error:
            if strict:
                raise
            if isinstance(error, BuildError):
                fall_back(error)
                graph.lasting = graph.lasting and math.isinf(error.retry_at)
            return _evaluated(graph, result, f"no kernel: {error}")
        apart = [*stored, *split.apart, *unjoined, *((x.where, f"{x.name}: {why}") for x, why in numpy.items())]
        scratch = builder.writer.arena.size if isinstance(builder, HostBuilder) else 0
        return Compiled(run, builder.kernels, scratch, apart, source, [])
    if strict:
        raise ScheduleError("no way to split the function into kernels was found")
    return _evaluated(graph, result, "no way to split it was found")


def _built(builder: Builder, split: Split, plain: dict[Node, str], numpy: dict[Node, str]) -> bool:
    """Add the steps of all units, as `Builder.built`; the kernels of a program for the host are built in parallel."""
    if type(builder) is not HostBuilder:
        return builder.built(plain, numpy)

    def listed() -> list[Callable[[], Any]]:
        from portmm.fusion.listed_kernels import builds_of

        return builds_of(builder.graph, builder.outputs, split)

    with announced(listed):
        return builder.built(plain, numpy)


def _rewritten(graph: Graph, outputs: list[Node]) -> list[tuple[str, str]]:
    """Rewrite a graph for kernels of the host; lines, and reasons why near matches are kept."""
    apart = match_attention(graph, outputs)
    if graph.along:
        match_group_norm(graph, outputs)
    if graph.windows:
        match_depth_to_space(graph, outputs)
    return apart


def _builder_of(graph: Graph, clock: Callable[[int], None] | None) -> Callable[..., Builder]:
    """The builder of a graph's program, after the run time is loaded, where it runs."""
    if graph.device_arrays:
        from portmm.fusion import plan_grid

        return plan_grid.GridBuilder
    if _builders:
        return _builders[-1]
    host_matmul.begin()
    return partial(HostBuilder, clock=clock)


def _evaluated(graph: Graph, result: Any, why: str) -> Compiled:
    """A program that evaluates the graph with NumPy, one operation after the other."""

    def run(leaves: list[Any]) -> Any:
        values: dict[Node, Any] = {}
        return rebuilt(result, lambda x: graph.evaluate(x.node, leaves, values) if isinstance(x, Placeholder) else x)

    kernels = [Kernel("numpy", x.name, (x.where,)) for x in graph.nodes if x.inputs and x.kind not in ("view", "item")]
    return Compiled(run, kernels, 0, [], "", [why])
