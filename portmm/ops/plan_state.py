"""Plans as descriptions, which other processes make plans of.

Owns the state of a plan in a pickle: shapes, strides, types and settings, no addresses and no kernels. The process
that loads it selects kernels for its own machine, and finds them in its cache.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import config
from portmm.errors import BuildError, PortmmError
from portmm.ops.host_matmul import make_plan, numpy_plan
from portmm.ops.prepack import current

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
    Form = tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class PlanState:
    """The arguments of `plan`, without the memory of arrays.

    Attributes:
        a: shape, strides in bytes, and type.
        b: likewise, or a packed weight.
        out: likewise, or None.
        settings: of `config`, where the plan was made in a block of it.
    """

    a: Form
    b: Any
    out: Form | None
    settings: dict[str, Any]

    def operands(self) -> tuple[Array, Any, Array | None]:
        """Arrays of these forms, which own no memory and are not to be read."""
        b = _like(self.b) if isinstance(self.b, tuple) else self.b
        return _like(self.a), b, None if self.out is None else _like(self.out)


def make(a: Array, b: Any, out: Array | None) -> Any:
    """A plan for checked operands in the host's memory, which can be pickled.

    Raises:
        ValueError: no kernel can read an operand in place.
        ScheduleError: the packed weight was made for another machine.
    """
    right = _form(b) if isinstance(b, np.ndarray) else b
    state = PlanState(_form(a), right, None if out is None else _form(out), config.overrides())
    try:
        plan = make_plan(a, b, out, bind=True, static=True, detail=state)
    except BuildError as error:
        fall_back(error)
        plan = numpy_plan(a, b, out, state)
    if plan is None:
        raise ValueError(
            "a plan takes an out by rows or columns, without repeated elements, and an evenly spaced batch"
        )
    copyreg.pickle(type(plan), _reduced)  # the runtime in C has no method for it
    return plan


def _reduced(plan: Any) -> tuple[Callable[[PlanState], Any], tuple[PlanState]]:
    if not isinstance(plan.detail, PlanState):
        raise PortmmError("this plan is part of a call's memo and is not pickled; pickle a result of portmm.plan")
    return restore, (plan.detail,)


def restore(state: PlanState) -> Any:
    """A plan from its state, as in unpickling.

    Raises:
        ScheduleError: a packed weight, which is part of the plan, was made for another machine.
        TargetError: the plan was made for a target that this machine cannot run.
    """
    a, b, out = state.operands()
    with config.config(**state.settings):
        return make(a, current(b), out)


def _form(x: Array) -> Form:
    return x.shape, x.strides, x.dtype


def _like(form: Form) -> Array:
    shape, strides, dtype = form
    return as_strided(np.empty(1, dtype), shape, strides)
