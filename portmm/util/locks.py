"""Locks and imports across `fork`.

Owns `lock` and `reentrant_lock`, the only constructors of locks in portmm, `once`, and two hooks. Imports nothing of
portmm.

A child has only the thread that forked. A lock that another thread of the parent held stays held there for ever, so
every lock is made anew in a child. That is sound because all structures that these locks guard are changed by single
assignments: the locks keep work from being done twice, they do not hide states in between.

CPython makes its global import lock anew, but not the lock of a module that another thread was importing: the child
would wait for it for ever, too. First calls import modules, so a fork waits for imports of the modules below to end,
which takes milliseconds. An import that begins after the last look is forgotten in the child, which does it itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib import _bootstrap
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

OURS = frozenset(("portmm", "numpy", "ml_dtypes", "cffi", "pycparser", *sys.stdlib_module_names))
"""Packages that a first call may import."""
PATIENCE = 2.0
"""Seconds that a fork waits for imports at most: hundreds of times what they take."""
PAUSE = 0.0002
"""Seconds between two looks, in which the importing thread has the interpreter."""

_locks: WeakSet[Any] = WeakSet()
_importing: dict[str, Any] = getattr(_bootstrap, "_module_locks", {})


def lock() -> threading.Lock:
    """A lock that is free in a forked child, whoever held it in the parent."""
    made = threading.Lock()
    _locks.add(made)
    return made


def reentrant_lock() -> Any:
    """The same for a lock that its holder may take again, as finalizers do that run in between."""
    made = threading.RLock()
    _locks.add(made)
    return made


class once(Generic[T]):  # noqa: N801 - a decorator
    """A property that is computed once per object, without the lock of `functools.cached_property` in Python 3.11."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> T:
        if instance is None:
            raise AttributeError(self.function.__name__)
        found = instance.__dict__[self.function.__name__] = self.function(instance)
        return found


def _imports_elsewhere() -> list[str]:
    """The modules of `OURS` that other threads are importing."""
    me = threading.get_ident()
    locks = [(name, reference()) for name, reference in list(_importing.items())]
    ours = [(name, held) for name, held in locks if name.partition(".")[0] in OURS]
    return [name for name, held in ours if getattr(held, "owner", None) not in (None, me)]


def _parses() -> bool:
    """Whether a thread has cffi parse declarations, under a lock that cffi does not make anew."""
    held = getattr(sys.modules.get("cffi.cparser"), "lock", None)
    return held is not None and held.locked()


def _before() -> None:
    until = time.monotonic() + PATIENCE
    while (_imports_elsewhere() or _parses()) and time.monotonic() < until:
        time.sleep(PAUSE)


def _in_child() -> None:
    for held in _locks:
        held._at_fork_reinit()  # noqa: SLF001 - what threading and logging call
    for name in _imports_elsewhere():
        _importing.pop(name, None)
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            del sys.modules[name]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_child=_in_child)
