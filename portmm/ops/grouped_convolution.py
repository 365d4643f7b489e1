"""Convolutions of groups of few channels in the host's memory: one kernel for all groups.

Owns `HostGrouped`, one call. Filters are in panels of several groups (`convolution_groups.GroupPanels`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.dispatch.view_routes import grouped_route
from portmm.ops.convolution_kernel import ConvolutionKernel, HostConvolution
from portmm.spec.dtype import spell
from portmm.spec.problem import Problem

if TYPE_CHECKING:
    from portmm.trace.tracer import Traced


class HostGrouped(HostConvolution):
    """A convolution of groups of few channels: see `HostConvolution`."""

    def selected(self, traced: Traced | None, c: tuple[int, ...]) -> Any:  # type: ignore[override]
        """The kernel for calls of this kind, a `ConvolutionKernel`.

        Raises:
            ScheduleError: there is none.
            NoCompilerError: there is no compiler.
            BuildError: the compiler failed.
        """
        size, steps = self.convolution, self._element_strides()
        step = None if traced is None else self.step(traced)
        merged = self._merges(c, step)
        m, batch = size.pixels * (self.images if merged else 1), 1 if merged else self.images
        image, filters, result = self.types()
        names = [numpy_arrays.name_of(y) for y in (image, filters, result if step is None else step.types[0])]
        panels = self.w.weight[0].panels
        p = Problem(
            m, self.n, size.depth, spell(names[0], panels.dtype, names[2]), batch, "any", "packed",
            family=panels.family, fused="" if step is None else step.text,
        )  # fmt: skip
        threads = config.limit() or config.get_num_threads()
        route = grouped_route(p, size, steps, panels, config.target(), threads)
        dims, strides = (m, self.n, size.depth, batch), (0, 0, steps[0] if batch > 1 else 0, 0, 0, 0)
        if step is None:
            return ConvolutionKernel(route, ((self.shape, result),), dims, strides, (0, 0), (0, 0))
        bound, results = self._bound(step)
        types = tuple(x.dtype for x in step.fused.operands)
        return ConvolutionKernel(
            route, results, dims, strides, (0, 0), (0, 0), bound, types=types, several=step.traced.several
        )  # fmt: skip
