"""What a line of the manifest is of: a name, and a text that some compiler is given.

A text's head, its lines of comment, is kept apart: it says which schedule a kernel has, in the words of the day.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any
from zlib import crc32

from portmm.codegen import c_kernel
from portmm.dispatch.machine import source as device_source
from portmm.errors import ScheduleError
from portmm.spec.dtype import BY_NAME, accumulator, spell, types

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from portmm.ir.nodes import Kernel
    from portmm.schedule.schedule import Schedule


ELEMENTS = [x.name for x in BY_NAME.values() if x.pack == 1 and x.name not in ("b32", "b64", "s16")]
"""Of arrays."""


@dataclass(frozen=True)
class Case:
    """A text with its name.

    Attributes:
        name: words that set it apart from all others of its family.
        body: what is compiled.
        head: the comment above it.
    """

    name: str
    body: str
    head: str = ""


def on_host(name: str, build: Callable[..., Kernel], *given: Any) -> Iterator[Case]:
    """What a builder makes of what it is given, in C; nothing where there is no such kernel."""
    with suppress(ScheduleError):
        kernel = build(*given)
        yield Case(name, c_kernel.source(replace(kernel, header=())), "\n".join(kernel.header))


def on_device(name: str, language: str, build: Callable[..., Any], *given: Any, **more: Any) -> Iterator[Case]:
    """The same in CUDA or OpenCL: a kernel, or several that run one after the other."""
    with suppress(ScheduleError):
        made = build(*given, **more)
        kernels = made if isinstance(made, tuple) else (made,)
        texts = [device_source(replace(x, header=()), language) for x in kernels]
        yield Case(name, "\n".join(texts), "\n".join(line for x in kernels for line in x.header))


def few(named: dict[str, Any], most: int, make: Callable[[Any], Any] = lambda x: x) -> dict[str, Any]:
    """So many of some values, whatever the others are: those whose names have the least check sums.

    `make` makes something of each that is taken; those that it refuses with a ValueError are none.
    """
    found: dict[str, Any] = {}
    for name in sorted(named, key=_order):
        if len(found) == most:
            break
        with suppress(ValueError):
            found[name] = make(named[name])
    return {name: found[name] for name in sorted(found)}


def covering(pool: dict[str, tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    """Of values with features, for each feature the one whose name has the least check sum.

    One more of them changes little of what is chosen.
    """
    best: dict[Any, str] = {}
    for name in sorted(pool, key=_order):
        for feature in enumerate(pool[name][0]):
            best.setdefault(feature, name)
    return {name: pool[name][1] for name in sorted(set(best.values()))}


def _order(name: str) -> tuple[int, str]:
    return crc32(name.encode()), name


@cache
def all_words() -> tuple[str, ...]:
    """The types of A, B and C of all products that there are."""
    found = []
    for a, b, to in product(ELEMENTS, repeat=3):
        with suppress(ValueError):
            if (accumulator(a, b) == to or to not in ("f64", "s32", "u4")) and types(spell(a, b, to)):
                found.append(spell(a, b, to))
    return tuple(dict.fromkeys(found))


def smallest(listed: Callable[[], list[Schedule]], words: Callable[[Schedule], str]) -> dict[str, Schedule]:
    """Of the schedules of a problem, by the words that set the loops apart, those with the fewest statements.

    Nothing, where no schedule is legal.
    """
    found: dict[str, Schedule] = {}
    try:
        every = listed()
    except ScheduleError:
        return {}
    for s in sorted(every, key=lambda s: s.mr * s.nr * s.b.panels * len(s.heights)):
        found.setdefault(words(s), s)
    return found
