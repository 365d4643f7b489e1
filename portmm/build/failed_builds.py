"""Record of failed builds, and when to retry them.

Owns the failures of this process, by a name derived from compiler and source, and their classification.

- Permanent: a source that a compiler rejects is rejected again. The failure is kept as long as the process.
- Transient: lack of disk space, memory or processes. The same build is retried after a second, then after a delay
  that doubles each time, up to a minute.
- Hung: a compiler that exceeded its time limit may hang, or the machine was busy. It is not run again for ten
  minutes, nor by other processes, which read a note in the cache.
"""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from dataclasses import dataclass

from portmm.build.cache import digest, read_note, write_note
from portmm.errors import BuildError

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds until a transient failure is retried: the first delay, and the longest."""
HUNG_SECONDS = 600.0
"""Seconds for which a compiler that exceeded its time limit is not run again. With a limit of half a minute, a machine
that is only slow loses a twentieth of its time to retries."""

TRANSIENT_ERRORS = frozenset((
    errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.ETXTBSY,
))  # fmt: skip
"""System errors for lack of a resource that may be available later."""
_TRANSIENT_MESSAGES = (
    "no space left on device",
    "disk quota exceeded",
    "cannot allocate memory",
    "memory exhausted",
    "out of memory",
    "std::bad_alloc",
    "resource temporarily unavailable",
    "too many open files",
    "killed signal",  # gcc, whose own child was killed for memory
    "read-only file system",
)


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: type[BuildError]
    text: str
    retry_at: float
    delay: float


_known: dict[str, _Failure] = {}


def is_transient(status: int | None, output: str) -> bool:
    """Whether a compiler failed for a reason that may be gone at a retry.

    Args:
        status: its exit status, negative for a signal.
        output: its output.
    """
    text = output.lower()
    return (status is not None and status < 0) or any(message in text for message in _TRANSIENT_MESSAGES)


def _error(failure: _Failure) -> BuildError:
    # A new object each time: the traceback and context of a shared one would grow.
    error = failure.kind(failure.text)
    error.retry_at = failure.retry_at
    return error


def _note(name: str) -> str:
    return "hung-" + digest(name.encode("utf-8", "surrogateescape"))


def known(name: str) -> BuildError | None:
    """The failure recorded under a name, or None if there is none or it is time to retry."""
    failure = _known.get(name)
    if failure is not None:
        return _error(failure) if time.monotonic() < failure.retry_at else None
    seconds, _, text = (read_note(_note(name)) or "").partition("\n")
    with suppress(ValueError):
        age = abs(time.time() - float(seconds))  # another machine's clock may be ahead
        if text and age < HUNG_SECONDS:
            _known[name] = _Failure(BuildError, text, time.monotonic() + HUNG_SECONDS - age, 0.0)
            return _error(_known[name])
    return None


def _keep(name: str, error: BuildError, retry_at: float, delay: float) -> BuildError:
    _known[name] = _Failure(type(error), str(error), retry_at, delay)
    error.retry_at = retry_at
    return error


def permanent(name: str, error: BuildError) -> BuildError:
    """Record a failure that is not retried in this process, and return it."""
    return _keep(name, error, float("inf"), 0.0)


def transient(name: str, error: BuildError) -> BuildError:
    """Record a failure that is retried after a delay, and return it."""
    before = _known.get(name)
    delay = min(LONGEST_DELAY, 2 * before.delay) if before is not None and before.delay else FIRST_DELAY
    return _keep(name, error, time.monotonic() + delay, delay)


def hung(name: str, error: BuildError) -> BuildError:
    """Record a compiler that exceeded its time limit, in the cache too, and return the error."""
    write_note(_note(name), f"{time.time():.0f}\n{error}")
    return _keep(name, error, time.monotonic() + HUNG_SECONDS, 0.0)


def succeeded(name: str) -> None:
    """Drop the failure recorded under a name, after a successful build."""
    _known.pop(name, None)


def forget() -> None:
    """Drop all failures of this process; notes in the cache stay."""
    _known.clear()
