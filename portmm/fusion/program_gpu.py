"""Launches one after the other: what a fused function of arrays on a device runs as.

Owns the steps of such a program, and `runner`, which makes a function of them. Imports `arrays.interop`,
`ops.matmul_gpu`, `ops.rowwise_gpu`. Arrays between kernels are made by each call, in the library of its first
array, and on its queue; when nobody reads them any more they are dropped, and their library frees them when the queue
is done with them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import device_arrays, interop
from portmm.arrays.interop import DeviceArray
from portmm.ops.rowwise_gpu import start
from portmm.spec.dtype import BY_NAME
from portmm.trace.numpy_names import rebuilt

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.dispatch.gpu import Launch, Machine

State = dict[str, DeviceArray]
"""Arrays of a call, by their names."""


@dataclass(frozen=True, slots=True, eq=False)
class Make:
    """A new array.

    Attributes:
        name: of the array.
        shape: its shape.
        dtype: its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def run(self, state: State, like: DeviceArray, _: list[Any]) -> None:
        """Make it."""
        state[self.name] = interop.empty_like(like, self.shape, self.dtype)[1]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Kernels.

    Attributes:
        on: the device.
        every: the kernels.
        places: parameter -> array, and bytes from its first element.
        numbers: parameter -> leaf.
        workspace: elements of 32 bits between them.
    """

    on: Machine
    every: tuple[Launch, ...]
    places: tuple[tuple[str, str, int], ...]
    numbers: tuple[tuple[str, int], ...]
    workspace: int = 0

    def run(self, state: State, like: DeviceArray, leaves: list[Any]) -> None:
        """Launch them."""
        values: dict[str, Any] = {}
        for name, root, at in self.places:
            x = state[root]
            place = interop.argument(x)[1]
            values[name] = device_arrays.shifted(place, at // BY_NAME[x.dtype].bytes, x) if at else place
        values |= {name: float(leaves[i]) for name, i in self.numbers}
        start(self.every, self.on, values, self.workspace, like)


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """A function of portmm's, called as it is.

    Attributes:
        name: of what it gives.
        function: what is called.
        given: the names of its arrays.
    """

    name: str
    function: Callable[..., Any]
    given: tuple[str, ...]

    def run(self, state: State, _: DeviceArray, __: list[Any]) -> None:
        """Call it."""
        found = interop.adopt(self.function(*(state[x].source for x in self.given)))
        assert found is not None  # noqa: S101 - of arrays on a device
        state[self.name] = found


Step = Make | Run | Own


@dataclass(frozen=True, slots=True)
class Output:
    """An array that the caller gets.

    Attributes:
        root: its name.
        shape: in which it is given.
        masks: it holds bytes of 0 and 1.
    """

    root: str
    shape: tuple[int, ...]
    masks: bool

    def given(self, state: State) -> Any:
        """The array."""
        source = state[self.root].source
        if self.masks:
            own = isinstance(source.dtype, np.dtype)
            source = source.view(np.dtype(np.bool_) if own else sys.modules["torch"].bool)
        return (
            source if self.root.startswith("L") or state[self.root].shape == self.shape else source.reshape(self.shape)
        )


def runner(every: tuple[Step, ...], there: tuple[int, ...], result: Any) -> Callable[[list[Any]], Any]:
    """A function of the arrays and numbers of a call.

    Args:
        every: what runs.
        there: which of the leaves are arrays.
        result: what the caller gets, with an `Output` for each array.
    """
    kept: set[str] = set()
    rebuilt(result, lambda x: kept.add(x.root) if isinstance(x, Output) else None)
    steps = _until(every, kept)

    def run(leaves: list[Any]) -> Any:
        state: State = {}
        for i in there:
            found = interop.adopt(leaves[i])
            assert found is not None  # noqa: S101 - the kind of a call says so
            state[f"L{i}"] = found
        like = state[f"L{there[0]}"]
        for step, done in steps:
            step.run(state, like, leaves)
            for name in done:
                del state[name]
        return rebuilt(result, lambda x: x.given(state) if isinstance(x, Output) else x)

    return run


def _until(steps: tuple[Step, ...], kept: set[str]) -> tuple[tuple[Step, tuple[str, ...]], ...]:
    """Steps, each with the arrays between kernels that nobody reads after it."""
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        if isinstance(step, Run):
            names = [root for _, root, _ in step.places]
        else:
            names = [step.name, *(step.given if isinstance(step, Own) else ())]
        last |= {x: i for x in names if x.startswith("M") and x not in kept}
    return tuple((x, tuple(n for n, at in last.items() if at == i)) for i, x in enumerate(steps))
