"""Kernels that calls ask for on machines that are not here: the calls run with kernels that do nothing.

Owns `recorded`, and `launches_of`, which records what the run time is called with as well. Results of the calls are
whatever memory held, so that calls must not depend on them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_fallback
from portmm.build.sealed_library import load
from portmm.build.shared_object import build
from portmm.dispatch import base_kernels, config, cpu_kernels
from portmm.errors import BuildError, ScheduleError
from portmm.ir.abi import ARGS
from portmm.ops import host_matmul
from portmm.runtime import cpu as cpu_runtime
from portmm.runtime import route_cache
from portmm.runtime.cffi_launches import SYMBOLS
from portmm.runtime.cffi_records import Kernel as Loaded
from portmm.runtime.cffi_runtime import CffiRuntime
from portmm.runtime.cpu import load_kernel, runtime
from portmm.util.memo import cached

if TYPE_CHECKING:
    from portmm.ir.nodes import Kernel
    from portmm.target.target import Target

SETTINGS = {
    "PORTMM_RACE": "off", "PORTMM_TUNED": "off", "PORTMM_BASE": "off", "PORTMM_BUNDLE": "",
    "PORTMM_MISSING": "fallback",
}  # fmt: skip
"""Variables of the environment without which other kernels than those of the description may be selected."""


@contextmanager
def recorded(target: Target) -> Iterator[list[tuple[Kernel, str]]]:
    """Record the kernels of calls in a block as on a described processor, each once, and the questions for them."""
    kernels: dict[int, tuple[Kernel, str]] = {}
    code = _nothing()

    def loaded(kernel: Kernel, question: str) -> Any:
        kernels[id(kernel)] = kernel, question
        return code

    every: list[tuple[Kernel, str]] = []
    with _described(target, loaded):
        yield every
    every += kernels.values()


@contextmanager
def _described(target: Target, loaded: Callable[[Kernel, str], Any]) -> Iterator[None]:
    """Take a described processor for this one in a block, and the answers of a function for the code of kernels."""
    before = dict(os.environ)
    os.environ |= SETTINGS
    base_kernels.forget()
    try:
        with (
            route_cache.closed(),
            config.described(target),
            cpu_kernels.replaced(loaded),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in SETTINGS:
            os.environ.pop(name)
        os.environ |= {name: before[name] for name in SETTINGS if name in before}
        base_kernels.forget()


class Launch(NamedTuple):
    """A call of the run time's `execute`.

    Attributes:
        route: the kernel, as an `Uncompiled`, with its workspace and its threads.
        numbers: the 16 integers; arrays where addresses may be arrays.
        outer: offsets of further runs, or None.
        table: of operands, with their addresses; None without operands.
        constants: the numbers of expressions, likewise.
        arrays: all arrays that the call names.
    """

    route: Any
    numbers: tuple[Any, ...]
    outer: Any
    table: Any
    constants: Any
    arrays: tuple[Any, ...]


class Uncompiled(Loaded):
    """A kernel in the place of its code."""

    __slots__ = ("kernel",)

    def __init__(self, kernel: Kernel) -> None:
        super().__init__("", kernel.name, None)
        self.kernel = kernel


class Recorder(CffiRuntime):
    """A run time that records launches, and runs nothing."""

    launches: list[Launch]

    def execute(self, route: Any, *numbers: Any) -> None:
        """Record a launch."""
        outer, table, constants = (*numbers[16:19], None, None, None)[:3]
        arrays = numbers[19:]
        if arrays:
            table = table[: len(arrays)].copy()
            table[:, 0] += [self.address(x) for x in arrays]
        named = tuple(x for x in (*numbers[:16], *arrays) if isinstance(x, np.ndarray))
        self.launches.append(Launch(route, numbers[:16], outer, table, constants, named))

    def execute_all(self, routes: tuple[Any, ...], address: int) -> None:
        """Refuse a program.

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(f"a program of {len(routes)} kernels runs between others, at {address}")


@contextmanager
def launches_of(target: Target) -> Iterator[Recorder]:
    """Take a described processor for this one, and a `Recorder` for the run time, in a block; NumPy packs weights."""
    artifact = build(cpu_runtime.source(python=False), flags=cpu_runtime.flags(), name="portmm_run", symbols=SYMBOLS)
    host_matmul.begin()  # with the run time itself, not in the block with what takes its place
    recorder: Recorder = load(artifact.code, artifact.path, Recorder)
    recorder.launches = []
    with _described(target, _uncompiled), cpu_runtime.replaced(recorder):
        try:
            yield recorder
        finally:
            numpy_fallback.forget()


def _uncompiled(kernel: Kernel, _: str) -> Uncompiled:
    """The stand-in of a kernel that does not pack."""
    if kernel.name.startswith(("portmm_pack_", "portmm_fold_")):
        raise BuildError(f"{kernel.name} does not run here")
    return Uncompiled(kernel)


@cached("kernels", 1)
def _nothing() -> Any:
    """The code of a kernel that does nothing."""
    text = f"{ARGS}\nvoid nothing(const portmm_args *x) {{ (void)x; }}\n"
    artifact = build(text, flags=(), name="nothing", symbols=("nothing",))
    return load_kernel(runtime(), artifact.code, artifact.path, "nothing")


def of_calls(
    run: Callable[[], None], machines: Sequence[Target], counts: Sequence[int]
) -> dict[str, list[tuple[Kernel, str]]]:
    """The kernels that calls ask for on each machine, by its name, and the questions for them.

    Args:
        run: makes the calls; it is called for each machine and number of threads.
        machines: processors, as from `bundle_shapes.targets_of`.
        counts: numbers of threads.
    """
    every: dict[str, list[tuple[Kernel, str]]] = {}
    for target in machines:
        for threads in counts:
            with recorded(target) as kernels, config.config(threads=threads):
                run()
            every.setdefault(target.name, []).extend(kernels)
    return every
