"""Memo tables of a process, which are all cleared together.

Owns `Memory` and the list of its instances.
"""

from __future__ import annotations

import weakref
from typing import Any


class Memory(dict[Any, Any]):
    """A memo table with a bounded number of keys: cleared when it is full, and by `forget_all`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        _all.append(weakref.ref(self, _all.remove))

    def keep(self, key: Any, value: Any) -> Any:
        """Store a value under a key, and return it."""
        if len(self) >= self.most:
            self.clear()
        self[key] = value
        return value


_all: list[weakref.ref[Memory]] = []


def forget_all() -> None:
    """Clear every `Memory` of this process."""
    for ref in tuple(_all):
        memory = ref()
        if memory is not None:
            memory.clear()
