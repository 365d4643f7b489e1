"""What was made for kinds of calls, all to be forgotten at once.

Owns `Memory`. Imports nothing of portmm.
"""

from __future__ import annotations

import weakref
from typing import Any


class Memory(dict[Any, Any]):
    """What was made for each kind of call: emptied when there are too many kinds, and by `forget_all`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        _all.append(weakref.ref(self, _all.remove))

    def keep(self, key: Any, made: Any) -> Any:
        """Remember what was made."""
        if len(self) >= self.most:
            self.clear()
        self[key] = made
        return made


_all: list[weakref.ref[Memory]] = []


def forget_all() -> None:
    """Empty every memory of this process."""
    for ref in tuple(_all):
        memory = ref()
        if memory is not None:
            memory.clear()
