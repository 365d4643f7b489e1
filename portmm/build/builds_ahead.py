"""Builds ahead of their use, in as many threads as there are processors.

Owns `begin`, and `announced`, a block whose builds are begun together where it would else wait for one compiler after
the other. A build that is needed while a thread makes it waits for that: see `build.build_lock`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context

from portmm.util import system

Builds = Iterable[Callable[[], object]]
_announced: ContextVar[Callable[[], object] | None] = ContextVar("announced", default=None)


@contextmanager
def announced(listed: Callable[[], Builds]) -> Iterator[None]:
    """Make what a block needs in threads, from the first time on that the block has to run a compiler.

    What no thread has begun when the block ends is dropped.

    Args:
        listed: returns functions that build, in the order in which the block needs them; errors are suppressed, as the
            block has them, too.
    """
    if len(system.processors()) < 2:
        yield
        return
    waiting: deque[Callable[[], object]] = deque()

    def start() -> None:
        builds = [*listed()]
        begin(builds if len(builds) > 1 else (), waiting)  # the caller makes a single one

    token = _announced.set(start)
    try:
        yield
    finally:
        _announced.reset(token)
        waiting.clear()


def compiling() -> None:
    """Begin what is announced, before a compiler runs."""
    function = _announced.get()
    if function is not None:
        _announced.set(None)
        with suppress(Exception):
            function()


def begin(builds: Builds, waiting: deque[Callable[[], object]] | None = None) -> None:
    """Make something in threads; errors are suppressed.

    Args:
        builds: functions that build.
        waiting: takes those that no thread has begun.
    """
    import threading

    left: deque[Callable[[], object]] = deque() if waiting is None else waiting
    left.extend(builds)

    def work() -> None:
        _announced.set(None)
        with suppress(IndexError):
            while True:
                build = left.popleft()
                with suppress(Exception):
                    build()

    for _ in range(min(len(system.processors()), len(left))):
        # At the interpreter's end, or where a process may have no more threads, nothing is built ahead.
        with suppress(RuntimeError):
            threading.Thread(target=copy_context().run, args=(work,), name="portmm-build").start()
