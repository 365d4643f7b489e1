"""Failed builds, remembered.

Owns the memory of what did not build, by a name that stands for compiler and source, and the judgement how long a
failure lasts. Imports `build.cache`, `errors`.

- A source that a compiler refuses is refused again: the failure lasts as long as the process.
- Want of disk space, memory or processes passes: the same build is tried again after a second, then after twice as
  long each time, up to a minute.
- A compiler that did not answer in time may hang, or the machine was busy. It is left alone for ten minutes, by
  other processes too, which find a note in the cache.
"""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from dataclasses import dataclass

from portmm.build.cache import digest, read_note, write_note
from portmm.errors import BuildError

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds until a build that failed for a passing reason is tried again: the first time, and at most."""
HUNG_SECONDS = 600.0
"""Seconds for which a compiler that did not answer is not asked again. With a limit of half a minute, a machine that is
only slow loses a twentieth of its time to trying again."""

PASSING = frozenset((
    errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.ETXTBSY,
))  # fmt: skip
"""System errors for want of something that may be there later."""
_PASSING_WORDS = (
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


def passes(status: int | None, said: str) -> bool:
    """Whether a compiler failed for a reason that may be gone when it is asked again.

    Args:
        status: its exit status, negative for a signal.
        said: its output.
    """
    text = said.lower()
    return (status is not None and status < 0) or any(words in text for words in _PASSING_WORDS)


def _again(failure: _Failure) -> BuildError:
    # A new object each time: tracebacks and contexts of one would grow.
    error = failure.kind(failure.text)
    error.retry_at = failure.retry_at
    return error


def _note(name: str) -> str:
    return "hung-" + digest(name.encode("utf-8", "surrogateescape"))


def known(name: str) -> BuildError | None:
    """The failure that is remembered under a name, if it is too early to try again."""
    failure = _known.get(name)
    if failure is not None:
        return _again(failure) if time.monotonic() < failure.retry_at else None
    seconds, _, text = (read_note(_note(name)) or "").partition("\n")
    with suppress(ValueError):
        age = abs(time.time() - float(seconds))  # another machine's clock may be ahead
        if text and age < HUNG_SECONDS:
            _known[name] = _Failure(BuildError, text, time.monotonic() + HUNG_SECONDS - age, 0.0)
            return _again(_known[name])
    return None


def _keep(name: str, error: BuildError, retry_at: float, delay: float) -> BuildError:
    _known[name] = _Failure(type(error), str(error), retry_at, delay)
    error.retry_at = retry_at
    return error


def lasting(name: str, error: BuildError) -> BuildError:
    """Remember a failure for as long as this process lives; returns it."""
    return _keep(name, error, float("inf"), 0.0)


def passing(name: str, error: BuildError) -> BuildError:
    """Remember a failure until it is worth trying again; returns it."""
    before = _known.get(name)
    delay = min(LONGEST_DELAY, 2 * before.delay) if before is not None and before.delay else FIRST_DELAY
    return _keep(name, error, time.monotonic() + delay, delay)


def hung(name: str, error: BuildError) -> BuildError:
    """Remember that nothing answered in time, in the cache too; returns the error."""
    write_note(_note(name), f"{time.time():.0f}\n{error}")
    return _keep(name, error, time.monotonic() + HUNG_SECONDS, 0.0)


def succeeded(name: str) -> None:
    """Forget what is remembered under a name: it has been built."""
    _known.pop(name, None)


def forget() -> None:
    """Forget all failures of this process; notes in the cache stay."""
    _known.clear()
