"""The process that prepares races: it selects and builds rivals, at the lowest priority, while calls go on.

Owns its start, its end and the messages to it; `dispatch.rivals` is what runs there. A process has at most one such
helper, which starts when a race first needs one, ends after some idle seconds, and ends with the process: it holds the
other end of a socket. It has no standard streams, a session of its own and the module path of this process, and never
imports the user's main module. A forked child closes its copy of the socket, and starts a helper of its own. Where none
can be started, as in programs that embed Python, no race begins.
"""

from __future__ import annotations

import _socket  # `socket` has the same, and takes milliseconds to import
import _thread  # a thread that the end of the interpreter does not wait for
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from typing import Any

from portmm.util import locks
from portmm.util.records import dataclass

RACED, WORDS = "raced", 3
"""The field of a route's line in the cache after which a race follows, and words before the winner's spelling."""
MOST_PENDING = 4
"""Questions that wait for answers: each is a second of compilation, and calls that go on ask again."""
IDLE_SECONDS = 5.0
"""Seconds without a question after which a helper ends: a program's new kinds of calls come close together."""
MOST_BYTES = 1 << 16
"""Longest message; only very long epilogues make longer ones."""
MOST_CRASHES = 2
"""Helpers that ended before they had answered, after which no other is started."""

# Before all else: the priority, also where this process has one of real time, and files that this process has left
# open to children. With -P the working directory is not searched for `json`.
_CODE = """
import os
from contextlib import suppress
with suppress(AttributeError, OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.nice(19)
os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))
os.setsid()
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from portmm.dispatch.rivals import serve
serve(float(sys.argv[2]))
"""


@dataclass(slots=True)
class _Helper:
    """A process that runs.

    Attributes:
        pid: its id.
        connection: a socket to it, which keeps the boundaries of messages.
        pending: by number, what is called with an answer.
    """

    pid: int
    connection: Any
    pending: dict[int, Callable[[Any], None]] = field(default_factory=dict)


_lock = locks.lock()
_helpers: list[_Helper] = []
_state = {"questions": 0, "crashes": 0}


def ask(question: dict[str, Any], then: Callable[[Any], None]) -> bool:
    """Ask the helper, which is started if there is none; False if it cannot be asked now.

    Args:
        question: plain data.
        then: called in a thread with the answer, or with None if there is none.
    """
    with _lock:
        if not _helpers and not _start():
            return False
        helper = _helpers[0]
        if len(helper.pending) >= MOST_PENDING:
            return False
        import json  # by the first race: it takes milliseconds

        number = _state["questions"] = _state["questions"] + 1
        message = json.dumps([number, question]).encode()
        if len(message) > MOST_BYTES:
            return False
        helper.pending[number] = then
        try:
            helper.connection.send(message, _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL)
        except OSError:
            del helper.pending[number]
            return False
        return True


def possible() -> bool:
    """Whether a helper runs, or one may be started."""
    name = os.path.basename(sys.executable or "")  # noqa: PTH119 - no Path before it is needed
    return bool(_helpers) or (
        _state["crashes"] < MOST_CRASHES
        and name.startswith(("python", "pypy"))
        and not getattr(sys, "frozen", False)
        and hasattr(os, "posix_spawn")
        and hasattr(_socket, "SOCK_SEQPACKET")
    )


def _start() -> bool:
    """Start a helper, and a thread that listens to it."""
    if not possible():
        return False
    import json

    flags = [f"-{x}" for x, is_set in (("I", sys.flags.isolated), ("S", sys.flags.no_site)) if is_set]
    argv = [sys.executable, "-P", *flags, "-c", _CODE, json.dumps(sys.path), str(IDLE_SECONDS)]
    # It imports NumPy, and multiplies nothing.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PORTMM_RACE": "off"}
    try:
        with locks.starting:  # a child that is forked meanwhile would keep the other end open
            ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
            streams = [
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ]
            pid = os.posix_spawn(sys.executable, argv, env, file_actions=streams)
            theirs.close()
    except (OSError, ValueError):
        _state["crashes"] = MOST_CRASHES
        return False
    helper = _Helper(pid, ours)
    _helpers.append(helper)
    try:
        _thread.start_new_thread(_listen, (helper,))
    except RuntimeError:  # the interpreter shuts down, or has as many threads as it may have
        _helpers.clear()
        ours.close()
        _reap(pid)
        return False
    return True


def _listen(helper: _Helper) -> None:
    """Hand answers on until the helper ends."""
    import json

    message = b"first"
    while message:
        try:
            message = helper.connection.recv(MOST_BYTES)
        except OSError:
            message = b""
        if message:
            number, answer = json.loads(message)
            with suppress(Exception):
                helper.pending[number](answer)
            helper.pending.pop(number, None)
    with _lock:
        if helper in _helpers:  # else this is another process, or it has asked another one
            _helpers.remove(helper)
        left = list(helper.pending.values())
        _state["crashes"] += bool(left)
    helper.connection.close()
    for then in left:
        with suppress(Exception):
            then(None)
    _reap(helper.pid)


def _reap(pid: int) -> None:
    """Take the status of a helper that ends, so that no zombie stays; the user's program may have taken it."""
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.01)


def wait(seconds: float = 60.0) -> None:
    """Return when all questions are answered, or after some time."""
    until = time.monotonic() + seconds
    while any(x.pending for x in tuple(_helpers)) and time.monotonic() < until:
        time.sleep(0.005)


def _in_child() -> None:
    """A forked child has neither the thread nor the helper."""
    for helper in _helpers:
        helper.connection.close()
    _helpers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
