"""Work of a fused epilogue, which the cost models of CPUs and devices count alike."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from portmm.spec.dtype import size
from portmm.spec.epilogue import Operand, parse
from portmm.spec.expr_ops import OPS
from portmm.spec.shortened import shortened

if TYPE_CHECKING:
    from portmm.spec.problem import Problem


class EpilogueWork(NamedTuple):
    """Work of a fused epilogue.

    Attributes:
        operations: of each element of C.
        operands: arrays that it reads or writes beside C.
    """

    operations: int
    operands: tuple[Operand, ...]

    @classmethod
    def of(cls, p: Problem, *, device: bool = False) -> EpilogueWork:
        """The work of a problem's epilogue; none without one."""
        if not p.fused:
            return cls(0, ())
        fused = shortened(parse(p.fused), p.types[2], device=device)
        return cls(sum(x.op in OPS for x in fused.steps), fused.operands)

    def moved(self, p: Problem) -> float:
        """Bytes of the operands."""
        extents = {"b": p.batch, "m": p.m, "n": p.n}
        return sum((float(prod(extents[axis] for axis in x.axes)) * size(x.dtype) for x in self.operands), 0.0)

    @property
    def whole(self) -> list[Operand]:
        """Operands with an element for each of C's; those of others stay in caches and registers."""
        return [x for x in self.operands if x.whole]
