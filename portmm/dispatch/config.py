"""Settings of calls: target, threads, determinism, tf32.

Owns the current configuration: a context variable, with a process-wide default.
The target is detected and calibrated on first use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any

from portmm.spec.dtype import types
from portmm.util.records import dataclass, replace
from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from portmm.build.bundle import Bundle
    from portmm.host.chip_match import Here
    from portmm.target.target import Target


ANY = "any"
"""The setting of races in which results may change."""
THREADS, OPENMP = "PORTMM_NUM_THREADS", "OMP_NUM_THREADS"
"""Variables of the environment that limit the threads of a call: the second where the first is not set."""
MOST_THREADS = 1024
"""Capacity of the thread pool in runtime/pool.c."""


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a call.

    Attributes:
        target: name of a chip, an ISA or a .toml file; empty for PORTMM_TARGET,
            or this machine.
        threads: the most threads that one call may use; 0 for all cores.
        deterministic: results do not depend on threads or on the other rows.
        tf32: products of float32 on a device may round their operands to tf32.
        race: the first calls of a kind may try several schedules, with "any" also those of other results; None:
            PORTMM_RACE decides, and if it is not set, yes.
    """

    target: str = ""
    threads: int = 0
    deterministic: bool = False
    tf32: bool = False
    race: bool | str | None = None


_default = Config()
_current: ContextVar[Config | None] = ContextVar("portmm_config", default=None)
_depth = 0
_targets: dict[str, Target] = {}
_described: list[Target] = []
"""Machines that blocks take for this one: see `described`."""


def current() -> Config:
    """The current settings."""
    return _current.get() or _default


def overrides() -> dict[str, Any]:
    """The settings of the open `config` block, if there is one, that differ from those of the process."""
    now = current()
    return {name: getattr(now, name) for name in now.__match_args__ if getattr(now, name) != getattr(_default, name)}


def overridden() -> bool:
    """Test whether some thread is inside a `config` block, so that defaults may not apply."""
    return _depth > 0


def target_name() -> str:
    """Name of the configured target; empty for this machine."""
    return current().target or os.environ.get("PORTMM_TARGET", "")


def race() -> str:
    """The schedules that the first calls of a kind may try: "same" for those with the same results, "any", or ""."""
    setting = current().race
    if setting is None:
        setting = _environment_race(os.environ.get("PORTMM_RACE", ""))
    return setting if isinstance(setting, str) else "same" if setting else ""


@cache
def _environment_race(text: str) -> str | bool:
    if text not in ("", "1", "on", "0", "off", ANY):
        warn(f"PORTMM_RACE is {text!r}, not on, off or {ANY}: schedules with the same results race")
    return text if text == ANY else text not in ("0", "off")


def rounds(dtype: str) -> bool:
    """Test whether operands of a product may be rounded to tf32; `dtype` is spelled as in `Problem`."""
    return current().tf32 and types(dtype)[:2] == ("f32", "f32")


def set_num_threads(threads: int) -> None:
    """Set the number of threads that one call may use, for the whole process.

    Args:
        threads: at least 1; 0 means every core this process may use.

    Raises:
        TypeError: `threads` is no integer.
        ValueError: `threads` is negative, or more than the pool has room for.
    """
    global _default  # noqa: PLW0603 - the one process-wide setting
    _default = replace(_default, threads=_checked(threads))
    _changed()


def _checked(threads: int) -> int:
    """A validated number of threads."""
    try:
        count = index(threads)
    except TypeError:
        raise TypeError(f"threads is {threads!r}; give an integer") from None
    if not 0 <= count <= MOST_THREADS:
        raise ValueError(f"{count} threads; give 1 to {MOST_THREADS}, or 0 for every core")
    return count


def get_num_threads() -> int:
    """The number of threads that one call may use now."""
    if threads := limit():
        return threads
    here = None if target_name() in _targets else _identified()
    return max(1, here.cores if here else target().cores)


def machine_of(bundle: Bundle) -> str:
    """The machine of a bundle whose kernels serve calls under the current settings; empty if there is none.

    Raises:
        TargetError: as `target`.
        BundleError: a bundle in use cannot be read.
    """
    from portmm.dispatch import stored_kernels

    if here := _identified():
        return stored_kernels.fitting(bundle, here.name, here.isas)
    return stored_kernels.machine_of(bundle, target())


def _identified() -> Here | None:
    """This machine by the only bundle in use, without descriptions of chips; None where they are needed."""
    from portmm.build import kernel_store

    if target_name() or _described or len(kernel_store.bundles()) != 1:
        return None
    from portmm.host import chip_match
    from portmm.runtime import cpu as cpu_runtime

    return chip_match.here(kernel_store.bundles()[0], cpu_runtime.processor_words)


def limit() -> int:
    """The configured limit of threads, 0 for every core."""
    threads = current().threads
    if threads:
        return threads
    own = os.environ.get(THREADS, "")
    return _environment_threads(THREADS, own) if own else _environment_threads(OPENMP, os.environ.get(OPENMP, ""))


@cache
def _environment_threads(name: str, text: str) -> int:
    if not text:
        return 0
    try:
        return _checked(int(text.partition(",")[0] if name == OPENMP else text))  # OpenMP's has a number for each level
    except ValueError:
        warn(f"{name} is {text!r}, not a number from 0 to {MOST_THREADS}: every core is used")
        return 0


@contextmanager
def config(
    *,
    target: str | None = None,
    threads: int | None = None,
    deterministic: bool | None = None,
    tf32: bool | None = None,
    race: bool | str | None = None,
) -> Iterator[Config]:
    """Change settings for a block of code; blocks nest, and each thread has its own.

    Args:
        target: name of a chip, an ISA, a .toml file or a cloud instance.
        threads: the most threads that one call may use; 0 for all cores.
        deterministic: additions in one order per element of C, a function of K alone: the same bits for any number of
            threads, and for a row by itself and among others.
        tf32: products of float32 by float32 on a device may round each element of A and B to tf32, 11 bits of
            precision: by at most 2**-11 of it, half away from zero. Tensor cores then multiply them, and sums
            stay in float32. Off by default, and where results are deterministic.
        race: while a kind of product is called for the first times, several schedules with the same results are tried
            in turn, and the fastest stays. On by default; False where every call should take the same time. "any" lets
            schedules with other results race as well: they add in another order, so that the bits of a result may
            change from call to call.

    Yields:
        The settings of the block.

    Raises:
        TargetError: there is no such target, or this machine cannot run it.
        TypeError: `target` is no string, or `threads` no integer.
        ValueError: `threads` is negative, or more than the pool has room for; `race` is another word than "any".
    """
    global _depth  # noqa: PLW0603 - counts the blocks that are open in any thread
    outer = current()
    if isinstance(race, str) and race != ANY:
        raise ValueError(f"race is {race!r}; give True, False, or {ANY!r} for schedules with other results, too")
    settings = Config(
        outer.target if target is None else target,
        outer.threads if threads is None else _checked(threads),
        outer.deterministic if deterministic is None else deterministic,
        outer.tf32 if tf32 is None else tf32,
        outer.race if race is None else race,
    )
    if target is not None:
        _resolve(target)
    token = _current.set(settings)
    _depth += 1
    _changed()
    try:
        yield settings
    finally:
        _depth -= 1
        _current.reset(token)
        _changed()


def target(name: str | None = None) -> Target:
    """The target of calls, or that of a name in the settings.

    Raises:
        TargetError: PORTMM_TARGET or the configured name is unknown or cannot run here.
        BundleError: a bundle in use cannot be read.
    """
    wanted = target_name() if name is None else name
    resolved = _resolve(wanted)
    if wanted or _described:
        return resolved
    from portmm.build import kernel_store

    if not kernel_store.bundles():
        return resolved
    from portmm.dispatch.stored_kernels import served_by

    return served_by(resolved)


def _resolve(name: str) -> Target:
    resolved = _targets.get(name)
    if resolved is None:
        from portmm.host.calibrate import measured
        from portmm.host.detect import resolve

        resolved = _targets[name] = measured(resolve(name))
    return resolved


def is_described() -> bool:
    """Whether calls are those of a described machine, and run no kernels: see `described`."""
    return bool(_described)


@contextmanager
def described(machine: Target) -> Iterator[None]:
    """Take a described machine for this one in a block, whose calls run no kernels."""
    before = dict(_targets)
    _targets.clear()
    _targets[target_name()] = machine
    _described.append(machine)
    _changed()
    try:
        yield
    finally:
        _described.pop()
        _targets.clear()
        _targets.update(before)
        _changed()


_listeners: list[object] = []


def on_change(function: object) -> None:
    """Register a function to be called after each change of a setting."""
    _listeners.append(function)


def _changed() -> None:
    for function in _listeners:
        function()  # type: ignore[operator]
