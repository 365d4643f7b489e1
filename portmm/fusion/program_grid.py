"""Programs of fused functions on a device: a sequence of launches.

Owns the steps of such a program, and `runner`, which returns a function that runs them. Each call allocates
the arrays between kernels in the library of its first array, and on its queue; it drops them after their last
read, and their library frees them when the queue is done with them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop
from portmm.arrays.operand import Operand, address
from portmm.ops.kernel_call import start
from portmm.trace.numpy_names import rebuilt

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.dispatch.launches import Launch
    from portmm.dispatch.machine import Machine
    from portmm.ops.kernel_call import Moves

State = dict[str, Operand]
"""Arrays of a call, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Make:
    """A step that allocates an array.

    Attributes:
        name: of the array.
        shape: its shape.
        dtype: its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def run(self, state: State, like: Operand, _: list[Any]) -> None:
        """Allocate it."""
        state[self.name] = interop.empty_like(like, self.shape, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A step that launches kernels.

    Attributes:
        on: the device.
        launches: the kernels.
        buffers: parameter -> array, and bytes from its first element.
        numbers: parameter -> leaf.
        workspace: elements of 32 bits shared by the kernels.
    """

    on: Machine
    launches: tuple[tuple[Launch, Moves], ...]
    buffers: tuple[tuple[str, str, int], ...]
    numbers: tuple[tuple[str, int], ...]
    workspace: int = 0

    def run(self, state: State, like: Operand, leaves: list[Any]) -> None:
        """Launch them."""
        values = {name: address(state[root], at) for name, root, at in self.buffers}
        values |= {name: float(leaves[i]) for name, i in self.numbers}
        start(self.on, self.launches, values, like, (self.workspace, "f32"))


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """A step that calls a function of portmm.

    Attributes:
        name: of its result.
        function: the function.
        arguments: the names of its arrays.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]

    def run(self, state: State, _: Operand, __: list[Any]) -> None:
        """Call it."""
        result = interop.adopt(self.function(*(state[x].source for x in self.arguments)))
        assert result is not None  # noqa: S101 - of arrays on a device
        state[self.name] = result


Step = Make | Run | Own


@dataclass(frozen=True, slots=True)
class Output:
    """An array that is returned.

    Attributes:
        root: its name.
        shape: of the returned array.
        masks: its elements are bytes of 0 and 1.
    """

    root: str
    shape: tuple[int, ...]
    masks: bool

    def array(self, state: State) -> Any:
        """The array to return."""
        source = state[self.root].source
        if self.masks:
            own = isinstance(source.dtype, np.dtype)
            source = source.view(np.dtype(np.bool_) if own else sys.modules["torch"].bool)
        return (
            source if self.root.startswith("L") or state[self.root].shape == self.shape else source.reshape(self.shape)
        )


def runner(every: tuple[Step, ...], arrays: tuple[int, ...], result: Any) -> Callable[[list[Any]], Any]:
    """A function of the arrays and numbers of a call.

    Args:
        every: the steps.
        arrays: indices of the leaves that are arrays.
        result: the value to return, with an `Output` for each array.
    """
    kept: set[str] = set()
    rebuilt(result, lambda x: kept.add(x.root) if isinstance(x, Output) else None)
    steps = _until(every, kept)

    def run(leaves: list[Any]) -> Any:
        state: State = {}
        for i in arrays:
            array = interop.adopt(leaves[i])
            assert array is not None  # noqa: S101 - the key of the call says so
            state[f"L{i}"] = array
        like = state[f"L{arrays[0]}"]
        for step, done in steps:
            step.run(state, like, leaves)
            for name in done:
                del state[name]
        return rebuilt(result, lambda x: x.array(state) if isinstance(x, Output) else x)

    return run


def _until(steps: tuple[Step, ...], kept: set[str]) -> tuple[tuple[Step, tuple[str, ...]], ...]:
    """Steps, each with the arrays between kernels that no later step reads."""
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        if isinstance(step, Run):
            names = [root for _, root, _ in step.buffers]
        else:
            names = [step.name, *(step.arguments if isinstance(step, Own) else ())]
        last |= {x: i for x in names if x.startswith("M") and x not in kept}
    return tuple((x, tuple(n for n, at in last.items() if at == i)) for i, x in enumerate(steps))
