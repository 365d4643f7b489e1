"""Convolutions of groups in the host's memory: one kernel for all groups.

Owns `HostGrouped`, one call whose filters are in panels of several groups (`convolution_groups.GroupPanels`), and
`HostStacked`, one on tile units, where the panels of all groups follow each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.dispatch.view_routes import grouped_route, stacked_route
from portmm.ops.convolution_kernel import ConvolutionKernel, HostConvolution
from portmm.spec.dequantization import IDENTITY
from portmm.spec.dtype import spell
from portmm.spec.problem import Problem

if TYPE_CHECKING:
    from portmm.trace.tracer import Traced


class HostGrouped(HostConvolution):
    """A convolution of groups of few channels: see `HostConvolution`."""

    def selected(self, traced: Traced | None, c: tuple[int, ...]) -> Any:  # type: ignore[override]
        """The kernel for calls of this kind, a `ConvolutionKernel`."""
        size, steps = self.convolution, self._element_strides()
        step = None if traced is None else self.step(traced)
        merged = self._merges(c, step)
        m, batch = size.pixels * (self.images if merged else 1), 1 if merged else self.images
        image, filters, result = self.types()
        names = [numpy_arrays.name_of(y) for y in (image, filters, result if step is None else step.types[0])]
        p = Problem(
            m, self.n, size.depth, spell(names[0], self.of_panels, names[2]), batch, "any", "packed",
            family=self.w.weight[0].family, fused=self.without(names[2]) if step is None else step.text,
        )  # fmt: skip
        route = self.route(p, steps, config.limit() or config.get_num_threads())
        dims = (m, self.n, size.depth, batch)
        strides = (0, 0, steps[0] if batch > 1 else 0, 0, self.apart, 0)
        if step is None:
            return ConvolutionKernel(route, ((self.shape, result),), dims, strides, (0, 0), (0, 0))
        bound, results = self._bound(step)
        types = tuple(x.dtype for x in step.fused.operands)
        return ConvolutionKernel(
            route, results, dims, strides, (0, 0), (0, 0), bound, types=types, several=step.traced.several
        )  # fmt: skip

    @property
    def of_panels(self) -> str:
        """The type of the elements of panels."""
        return self.w.weight[0].panels.dtype

    @property
    def apart(self) -> int:
        """Units from a panel to the next, if the kernel does not know it."""
        return 0

    def without(self, result: str) -> str:
        """The text of a call without an epilogue, of a type of results."""
        del result
        return ""

    def route(self, p: Problem, steps: tuple[int, ...], threads: int) -> Any:
        """The route of a problem, of images with these strides."""
        return grouped_route(p, config.target(), threads, self.convolution, steps, self.w.weight[0].panels)


class HostStacked(HostGrouped):
    """A convolution of groups on tile units: see `HostConvolution`."""

    @property
    def of_panels(self) -> str:
        """The type of the elements of panels."""
        return numpy_arrays.name_of(self.w.dtype)

    @property
    def apart(self) -> int:
        """Units from a panel to the next."""
        return int(self.w.weight[0].b_n)

    def without(self, result: str) -> str:
        """The text of a call without an epilogue, of a type of results."""
        return IDENTITY if self.sums() == "s32" != result else ""

    def route(self, p: Problem, steps: tuple[int, ...], threads: int) -> Any:
        """The route of a problem, of images with these strides."""
        return stacked_route(p, config.target(), threads, self.convolution, steps)
