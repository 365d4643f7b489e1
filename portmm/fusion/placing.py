"""Candidates of a search as programs that run: forms, kernels of the whole function, and what a path leads to.

Owns `Placing`, and the names that one kernel has in a path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.fusion.finding import Path, Placed, Run, Task
from portmm.fusion.one_kernel import compiled_kernel, laid_out, schedules
from portmm.fusion.term_arrays import compute
from portmm.fusion.term_cost import Rates, predicted, predicted_kernel
from portmm.fusion.term_kernels import Kernel, one_kernels
from portmm.fusion.term_reader import leaf_of
from portmm.fusion.term_rewrites import alternatives
from portmm.fusion.terms import Term, graph_of
from portmm.trace.placeholders import Placeholder, rebuilt

if TYPE_CHECKING:
    from portmm.fusion.term_reader import Labelled
    from portmm.ir.mugraph import MuGraph
    from portmm.schedule.schedule import Schedule

ONE_KERNEL = "one kernel along "
"""Start of the last entry of a path that ends in one kernel: with the label of its loop, and its number."""
MOST_SCHEDULES = 4
"""Schedules of such a kernel that are measured."""


class Placing(NamedTuple):
    """A function whose candidates are compiled.

    Attributes:
        task: the function.
        labelled: its terms.
        rates: of the target.
    """

    task: Task
    labelled: Labelled
    rates: Rates

    def graph(self, roots: tuple[Term, ...]) -> MuGraph:
        """The µGraph of a form."""
        return graph_of(roots, self.labelled.axes, self.labelled.inputs)

    def seconds(self, roots: tuple[Term, ...], *, optimistic: bool = False) -> float:
        """Predicted seconds of a form."""
        return predicted(roots, self.labelled.extents, self.rates, optimistic=optimistic)

    def promise(self, seconds: float) -> float:
        """The predicted speed-up of a program that is predicted to take some seconds; 1 if it computes nothing."""
        return self.seconds(self.labelled.results) / seconds if seconds else 1.0

    def kernels(self, roots: tuple[Term, ...]) -> list[Kernel]:
        """A form as one kernel, for each loop with which it is one."""
        labelled = self.labelled
        return list(one_kernels(roots, labelled.axes, labelled.inputs, labelled.extents, self.rates.near))

    def schedules(self, kernel: Kernel) -> tuple[MuGraph, tuple[Schedule, ...]]:
        """The graph of one kernel, as operands lie, and the schedules that are measured.

        Raises:
            PortmmError: there are no loops for it.
        """
        graph = laid_out(kernel.graph, self.labelled, self.task.arrays)
        return graph, schedules(graph, kernel.sizes)[:MOST_SCHEDULES]

    def kernel(self, kernel: Kernel, graph: MuGraph, s: Schedule) -> Placed:
        """One kernel as a program, by its graph as operands lie.

        Raises:
            PortmmError: there are no loops for it, or they are not built.
        """
        task = self.task
        run, kernels, source = compiled_kernel(graph, self.labelled, task.arrays, task.result, kernel.sizes, s)
        seconds = predicted_kernel(graph.steps[0].program, kernel.sizes, s, self.rates)
        return Placed(graph, run, task.described(kernels, source), seconds, s)

    def form(self, roots: tuple[Term, ...]) -> tuple[Run, Any]:
        """The program of a form, and what it explains."""
        labelled, result = self.labelled, self.task.result
        # Results of equal terms are arrays of their own, and none is an argument, unless the function returns one.
        apart = [
            (x in roots[:i] or x.op == "input") and leaf_of(y) is None
            for i, (x, y) in enumerate(zip(roots, self.task.outputs, strict=True))
        ]

        def function(*arrays: Any) -> Any:
            inputs = labelled.read(arrays)
            every = compute(roots, labelled.axes, inputs, labelled.extents, labelled.dtype)
            types = labelled.types[len(inputs) :]
            if types:
                every = [x if x.dtype == y else x.astype(y) for x, y in zip(every, types, strict=True)]
            ends = iter([x.copy() if alone else x for x, alone in zip(every, apart, strict=True)])
            return rebuilt(result, lambda x: next(ends) if isinstance(x, Placeholder) else x)

        return self.task.compiled(self.task.arrays, function)

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
            return Placed(self.graph(roots), *self.form(roots), seconds) if pays else None
        kernels = self.kernels(roots)
        ((name, number),) = one
        i, j = divmod(number, MOST_SCHEDULES)
        if i >= len(kernels) or name != ONE_KERNEL + kernels[i].loop:
            return None
        graph, few = self.schedules(kernels[i])
        if j >= len(few):
            return None
        program = self.kernel(kernels[i], graph, few[j])
        return program if trust * self.promise(program.predicted) >= 1 else None
