"""Replies to requests, in the process of one contender of bench/fusion.py: see `portmm.comparison.worker`.

An adapter returns a `Library` whose `prepare` takes a case and
its operands, and gives name of a method -> a function that makes ready, untimed, and
returns what is timed: a function without arguments that returns the result, or several
that lie side by side.

Requests: {"do": "prepare", "case": {...}, "right": FILE, "limit": seconds, "trial": seconds},
{"do": "time", "seconds": float}, {"do": "drop"}. Times are by method: those that are
right, of an overhead, else the fastest alone.
"""

import signal
from contextlib import contextmanager

import numpy as np
from fusion_cases import VARIANTS, case_of, operands, worst

from portmm.arrays.numpy_arrays import numpy_of
from portmm.comparison.measure import seconds_per_call
from portmm.comparison.peers import UnsupportedError, open_adapter, repeat
from portmm.comparison.worker import wait_until_idle


class LateError(BaseException):
    """Time is up; no library takes it for an error of its own and goes on."""


@contextmanager
def limited(seconds):
    """Raise LateError in what takes longer."""

    def late(*_):
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def whole(result):
    """One array of a result."""
    return np.concatenate(result, axis=-1) if isinstance(result, tuple | list) else np.asarray(result)


def first_line(error):
    """An error's message, shortened."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def rights(path):
    """Exact results by variant: see `fusion_cases.right`."""
    with np.load(path) as kept:
        rows = kept.get("rows", None)
        return {x: (kept[f"want{x}"], kept[f"bound{x}"], rows) for x in (*VARIANTS, "") if f"want{x}" in kept}


class Bench:
    """The library, calls and exact results that a process has prepared."""

    def __init__(self, setup, adapter):
        self.threads = setup.threads
        self.library = open_adapter(adapter, setup) if adapter else None
        self.hello = {"version": self.library.version if adapter else ""}
        self.calls, self.rights, self.dtype = {}, {}, None

    def share(self, name):
        """How much of the error that is allowed a result has."""
        result = self.calls[name]()
        fetch = getattr(self.calls[name], "fetch", None)
        found = whole(fetch(result) if fetch else result)
        if found.dtype != self.dtype:
            raise TypeError(f"a result of {found.dtype}, not of {self.dtype}")
        return worst(found, *self.rights[name if name in self.rights else ""])

    def prepare(self, case, right, limit, trial):
        """Make every method ready, judge it, and keep the fastest."""
        case = case_of(case)
        self.calls, self.rights = {}, rights(right)
        self.dtype = np.dtype(np.int8) if case.kind == "requantise" else numpy_of(case.dtype)
        try:
            makers = self.library.prepare(case, operands(case))
        except UnsupportedError as error:
            return {"state": "unsupported", "reason": str(error)}
        except Exception as error:  # noqa: BLE001 - a library's failure
            return {"state": "unsupported", "reason": first_line(error)}
        errors, refused = {}, []
        for name, make in makers.items():
            fault = self.attempt(name, make, limit, errors)
            if fault:
                self.calls.pop(name, None)
                refused.append(f"{name}: {fault}")
        if not self.calls:
            state = "wrong" if any(error > 1 for error in errors.values()) else "unsupported"
            return {"state": state, "reason": "; ".join(refused) or "no method"}
        if case.group != "overhead" and len(self.calls) > 1:
            took = {name: seconds_per_call(repeat(call), trial) for name, call in self.calls.items()}
            best = min(took, key=lambda name: took[name])
            self.calls = {best: self.calls[best]}
        error = max(errors[name] for name in self.calls)
        if self.threads > 1:
            wait_until_idle()
        return {"state": "ok", "method": ", ".join(self.calls), "refused": refused, "error": error}

    def attempt(self, name, make, limit, errors):
        """Make a method ready and judge it; why it is not to be had."""
        try:
            with limited(limit):
                self.calls[name] = make()
                errors[name] = self.share(name)
        except LateError:
            return f"not ready after {limit:.0f} s"
        except Exception as error:  # noqa: BLE001 - whatever a library raises is a fact about it
            return first_line(error)
        return f"{errors[name]:.3g} of the error that is allowed" if errors[name] > 1 else ""

    def time(self, seconds):
        """Seconds per call of each method, another one first each time."""
        names = [*self.calls]
        took = {name: seconds_per_call(repeat(self.calls[name]), seconds) for name in names}
        if len(names) > 1:
            self.calls = {name: self.calls[name] for name in (*names[1:], names[0])}
        if self.threads > 1:
            wait_until_idle()
        return {"state": "ok", "seconds": took}

    def drop(self):
        """Judge once more, and forget."""
        error = max((self.share(name) for name in self.calls), default=0.0)
        self.calls, self.rights = {}, {}
        if error > 1:
            return {"state": "wrong", "reason": f"after timing, {error:.3g} of the error that is allowed"}
        return {"state": "ok", "error": error}
