"""List of the kernels of a program, before it is built.

Owns `builds_of`: the kernels are selected and built while its functions run, in any order and in several threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from portmm.errors import PortmmError
from portmm.fusion.plan_cpu import HostBuilder
from portmm.ops import routes

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.partition import Split
    from portmm.spec.problem import Problem

T = TypeVar("T")


def builds_of(graph: Graph, outputs: list[Node], split: Split) -> list[Callable[[], Any]]:
    """Functions that select and build the kernels of a split graph, in the order of its units."""
    builder = ListBuilder(graph, outputs, split)
    with suppress(PortmmError, TypeError, ValueError):  # building the program fails, too, or splits further
        builder.built({}, {})
    return builder.builds


class ListBuilder(HostBuilder):
    """A builder that plans the steps of a program, and lists what they launch.

    Attributes:
        builds: functions that select and build it.
        kinds: of products that are listed, all but their rows.
    """

    def __init__(self, graph: Graph, outputs: list[Node], split: Split) -> None:
        super().__init__(graph, outputs, split)
        self.builds: list[Callable[[], Any]] = []
        self.kinds: set[Any] = set()

    def ready(self, make: Callable[[], T]) -> T:
        """List what a step launches: nothing launches it here."""
        self.builds.append(make)
        return None  # type: ignore[return-value]

    def route(self, p: Problem) -> Any:
        """List the kernel of a product, the first of its kind: others may take it, too."""
        if p.but_rows not in self.kinds:
            self.kinds.add(p.but_rows)
            self.builds.append(lambda: routes.build_selected(p))

    def launch(self, kernel: Any, operands: Any, fusing: Any, moved: Any) -> None:
        """Launch nothing."""

    def launched(self, x: Node, launch_of: Callable[..., Any]) -> bool:
        """List the launch of a function of portmm."""
        places = self.launch_operands(x)
        if places is None:
            return False
        self.buffers[x] = self.allocate(x)
        self.builds.append(lambda: launch_of(np.empty(x.shape, x.dtype), *(p.like for p in places)))
        return True
