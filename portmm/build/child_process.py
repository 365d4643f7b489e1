"""Compilers as child processes with a time limit.

Owns running a program so that neither it nor its children outlive the limit, and the environment it runs in.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from portmm.util import locks
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from pathlib import Path

LOWEST_PRIORITY = 19
background: ContextVar[bool] = ContextVar("background", default=False)
"""Set where programs that are started should leave processors to others."""
GRACE_SECONDS = 1.0
"""Seconds to wait for processes that were killed: one that waits for a dead file server cannot end."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a program.

    Attributes:
        status: its exit status, negative for a signal; None if it exceeded its limit.
        output: its standard output, and standard error if requested.
    """

    status: int | None
    output: str


def environment() -> dict[str, str]:
    """Environment variables of a compiler: those of this process, with English messages."""
    return {**os.environ, "LC_ALL": "C"}


def run(argv: Sequence[str], seconds: float, *, folder: str | Path | None = None, errors: bool = True) -> Finished:
    """Run a program in a session of its own; at its time limit, kill it and all its children.

    Args:
        argv: the command.
        seconds: time limit.
        folder: working directory, and directory for temporary files; by default those of this process.
        errors: whether standard error is part of the output.

    Raises:
        OSError: it cannot be started.
    """
    import subprocess

    with locks.starting:
        child = subprocess.Popen(
            argv,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
            env=environment() if folder is None else {**environment(), "TMPDIR": str(folder)},
            start_new_session=True,
        )
    if background.get():
        with suppress(OSError):
            os.setpriority(os.PRIO_PGRP, child.pid, LOWEST_PRIORITY)
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(child)
        return Finished(None, "")
    except BaseException:
        # An interrupt from the keyboard does not reach another session.
        _end(child)
        raise
    return Finished(child.returncode, output.decode("utf-8", "replace"))


def _end(child: Any) -> None:
    """Kill a process and its group. It has not been waited for, so its id has not been reused."""
    import subprocess

    if child.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.communicate(timeout=GRACE_SECONDS)
    if child.stdout is not None:
        child.stdout.close()
