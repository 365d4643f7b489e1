"""Kernels that calls ask for on machines that are not here: the calls run with kernels that do nothing.

Owns `recorded`. Results of the calls are whatever memory held, so that calls must not depend on them.
"""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from portmm.build.shared_object import build
from portmm.dispatch import config, cpu_kernels
from portmm.ir.abi import ARGS
from portmm.runtime import route_cache
from portmm.runtime.cpu import load_kernel, runtime
from portmm.util.memo import cached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from portmm.ir.nodes import Kernel
    from portmm.target.target import Target

SETTINGS = {"PORTMM_RACE": "off", "PORTMM_TUNED": "off", "PORTMM_BASE": "off", "PORTMM_BUNDLE": ""}
"""Variables of the environment without which other kernels than those of the description may be selected."""


@contextmanager
def recorded(target: Target) -> Iterator[list[Kernel]]:
    """Record the kernels of calls in a block as on a described processor, each once.

    Raises:
        NoCompilerError: there is no compiler for this machine, for the run time.
        BuildError: it failed.
    """
    before = dict(os.environ)
    os.environ |= SETTINGS
    kernels: dict[int, Kernel] = {}
    code = _nothing()

    def loaded(kernel: Kernel) -> Any:
        kernels[id(kernel)] = kernel
        return code

    every: list[Kernel] = []
    try:
        with (
            route_cache.closed(),
            config.described(target),
            cpu_kernels.replaced(loaded),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield every
    finally:
        for name in SETTINGS:
            os.environ.pop(name)
        os.environ |= {name: before[name] for name in SETTINGS if name in before}
    every += kernels.values()


@cached("kernels", 1)
def _nothing() -> Any:
    """The code of a kernel that does nothing."""
    text = f"{ARGS}\nvoid nothing(const portmm_args *x) {{ (void)x; }}\n"
    artifact = build(text, flags=(), name="nothing", symbols=("nothing",))
    return load_kernel(runtime(), artifact.code, artifact.path, "nothing")


def of_calls(run: Callable[[], None], machines: Sequence[Target], counts: Sequence[int]) -> dict[str, list[Kernel]]:
    """The kernels that calls ask for on each machine, by its name.

    Args:
        run: makes the calls; it is called for each machine and number of threads.
        machines: as from `bundle_shapes.machines_of`.
        counts: numbers of threads.
    """
    every: dict[str, list[Kernel]] = {}
    for target in machines:
        for threads in counts:
            with recorded(target) as kernels, config.config(threads=threads):
                run()
            every.setdefault(target.name, []).extend(kernels)
    return every
