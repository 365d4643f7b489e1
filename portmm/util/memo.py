"""Three named caches of a process, which are bounded and dropped together.

Owns `Memory` and `cached`, tables of a cache, and `forget_all` and `sizes`. Facts of the machine and of files, and
functions of a few types, are no part of a cache: they do not grow with calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound="Callable[..., Any]")
CACHES = {
    "calls": "kinds of calls, with what they launch",
    "kernels": "schedules and sources, with loaded code",
    "routes": "problems, with their schedule and kernel",
}
"""The name of a cache -> what it has."""


class Memory(dict[Any, Any]):
    """A table of a cache, with a bounded number of keys: cleared when it is full, and by `forget_all`."""

    def __init__(self, most: int, cache: str = "calls") -> None:
        super().__init__()
        self.cache, self.most = cache, most
        _tables.append(weakref.ref(self, _tables.remove))

    def keep(self, key: Any, value: Any) -> Any:
        """Store a value under a key, and return it."""
        if len(self) >= self.most:
            self.clear()
        self[key] = value
        return value


_tables: list[weakref.ref[Memory]] = []
_functions: list[tuple[str, Any]] = []


def cached(cache: str, most: int) -> Callable[[F], F]:
    """Remember the results of a function in a cache, `most` of them: the one that was not used for longest goes."""

    def remembered(function: F) -> F:
        wrapper: Any = lru_cache(maxsize=most)(function)
        _functions.append((cache, wrapper))
        return wrapper

    return remembered


def forget_all(*, functions: bool = False) -> None:
    """Clear every table of this process, and with `functions` the results of `cached` ones; loaded code stays."""
    for ref in tuple(_tables):
        memory = ref()
        if memory is not None:
            memory.clear()
    for _, function in _functions if functions else ():
        function.cache_clear()


class Size(NamedTuple):
    """The size of a cache in this process.

    Attributes:
        tables: their number.
        entries: of all tables.
        most: the bound on them.
    """

    tables: int
    entries: int
    most: int


def sizes() -> dict[str, Size]:
    """The size of each cache in this process, by its name."""
    tables = [(x.cache, len(x), x.most) for ref in tuple(_tables) if (x := ref()) is not None]
    for cache, function in _functions:
        about = function.cache_info()
        tables.append((cache, about.currsize, about.maxsize))
    every = {name: [x for x in tables if x[0] == name] for name in CACHES}
    return {name: Size(len(x), sum(y[1] for y in x), sum(y[2] for y in x)) for name, x in every.items()}
