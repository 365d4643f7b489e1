"""Compilers as child processes, with a limit of time.

Owns how a program is run so that nothing of it outlives its limit, and the environment that it gets. Imports nothing
of portmm.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GRACE_SECONDS = 1.0
"""Patience with processes that were killed: one that waits for a dead file server cannot end."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that has run.

    Attributes:
        status: its exit status, negative for a signal; None if its time was over.
        output: its standard output, and standard error if that was asked for.
    """

    status: int | None
    output: str


def environment() -> dict[str, str]:
    """Variables for running a compiler: this process's own, with English messages."""
    return {**os.environ, "LC_ALL": "C"}


def run(words: Sequence[str], seconds: float, *, folder: str | Path | None = None, errors: bool = True) -> Finished:
    """Run a program in a session of its own; when its time is over, kill it and all that it has started.

    Args:
        words: the command.
        seconds: limit of time.
        folder: the directory that it runs in, and puts temporary files in; this process's own by default.
        errors: standard error is part of the output.

    Raises:
        OSError: it cannot be started.
    """
    import subprocess

    child = subprocess.Popen(
        words,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
        env=environment() if folder is None else {**environment(), "TMPDIR": str(folder)},
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(child)
        return Finished(None, "")
    except BaseException:
        # An interrupt from the keyboard does not reach another session by itself.
        _end(child)
        raise
    return Finished(child.returncode, output.decode("utf-8", "replace"))


def _end(child: Any) -> None:
    """Kill a process and its group. It has not been waited for, so that its number is still its own."""
    import subprocess

    if child.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.communicate(timeout=GRACE_SECONDS)
    if child.stdout is not None:
        child.stdout.close()
