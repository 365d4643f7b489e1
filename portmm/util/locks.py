"""Locks and imports across `fork`.

Owns `lock` and `reentrant_lock`, the only constructors of locks in portmm, `once`, and two hooks of `fork`.

A child has only the thread that forked. A lock that another thread of the parent held would stay locked in the child
for ever, so every lock is reinitialized in a child. That is sound because all structures that these locks guard are
changed by single assignments: the locks keep work from being done twice, they do not hide intermediate states.

A fork also waits while another thread starts a program: its child would inherit the pipes of the program, and the
thread would wait for their end until that child ends. So it does while another thread has a database open: SQLite has
locks of its own.

CPython reinitializes its global import lock, but not the lock of a module that another thread was importing: the
child would wait for it for ever, too. First calls import modules, so a fork waits until imports of `PACKAGES` have
ended, which takes milliseconds. An import that begins after the last check is dropped in the child, which repeats it.
"""

from __future__ import annotations

import _thread  # `threading` has the same, and takes 0.4 ms to import
import os
import sys
import time
from collections.abc import Callable
from importlib import _bootstrap
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

if TYPE_CHECKING:
    import threading

T = TypeVar("T")

PACKAGES = frozenset(("portmm", "numpy", "ml_dtypes", "cffi", "pycparser", *sys.stdlib_module_names))
"""Packages that a first call may import."""
IMPORT_SECONDS = 2.0
"""Most seconds that a fork waits for imports: hundreds of times their usual duration."""
POLL_SECONDS = 0.0002
"""Seconds between two checks, in which the importing thread has the interpreter."""

_locks: WeakSet[Any] = WeakSet()
starting = _thread.RLock()
"""Held while a program is started, or a database open, and during a fork."""
_importing: dict[str, Any] = getattr(_bootstrap, "_module_locks", {})


def lock() -> threading.Lock:
    """A new lock that is free in a forked child, even if a thread of the parent held it."""
    new = _thread.allocate_lock()
    _locks.add(new)
    return new


def reentrant_lock() -> Any:
    """A new reentrant lock with the same property, for code that finalizers may interrupt and enter again."""
    new = _thread.RLock()
    _locks.add(new)
    return new


class once(Generic[T]):  # noqa: N801 - a decorator
    """A property that is computed once per object, without the lock of `functools.cached_property` in Python 3.11."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> T:
        if instance is None:
            raise AttributeError(self.function.__name__)
        value = instance.__dict__[self.function.__name__] = self.function(instance)
        return value


def _imports_elsewhere() -> list[str]:
    """Modules of `PACKAGES` that other threads are importing."""
    me = _thread.get_ident()
    locks = [(name, reference()) for name, reference in list(_importing.items())]
    ours = [(name, module_lock) for name, module_lock in locks if name.partition(".")[0] in PACKAGES]
    return [name for name, module_lock in ours if getattr(module_lock, "owner", None) not in (None, me)]


def _parses() -> bool:
    """Whether a thread is in cffi's parser, whose lock cffi does not reinitialize in a child."""
    parser_lock = getattr(sys.modules.get("cffi.cparser"), "lock", None)
    return parser_lock is not None and parser_lock.locked()


def _before() -> None:
    until = time.monotonic() + IMPORT_SECONDS
    while (_imports_elsewhere() or _parses()) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    starting.acquire()


def _in_child() -> None:
    starting._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001 - as below
    for each in _locks:
        each._at_fork_reinit()  # noqa: SLF001 - what threading and logging call
    for name in _imports_elsewhere():
        _importing.pop(name, None)
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            del sys.modules[name]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=starting.release, after_in_child=_in_child)
