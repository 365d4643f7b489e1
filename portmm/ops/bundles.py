"""Use of bundles: compiled kernels in a file, for machines without a compiler.

A process that uses one loads this module before its first call, and with it what identifies the machine, and reads and
loads kernels: half of what that call would take.
"""

from __future__ import annotations

import zlib  # noqa: F401 - loaded, as three below
from typing import TYPE_CHECKING

import portmm.build.sealed_library
import portmm.host.chip_match  # noqa: F401 - loaded
from portmm.build import kernel_store
from portmm.build.bundle import open_bundle
from portmm.build.cache import sha256
from portmm.dispatch import base_kernels, stored_kernels

if TYPE_CHECKING:
    from os import PathLike

sha256()


def use_bundle(path: str | PathLike[str]) -> None:
    """Look into a bundle before anything else, in this process from now on.

    `portmm bundle` makes bundles; `$PORTMM_BUNDLE` names others, which are looked into after those of this function.
    A kernel that a bundle lacks is looked for in the cache, then in the base set of the wheel, and is then compiled;
    see `$PORTMM_MISSING` for machines without a compiler.

    Args:
        path: of the bundle.

    Raises:
        BundleError: it cannot be read, other users can write to it, it is damaged, or for another version of portmm.
    """
    kernel_store.use(open_bundle(path))
    stored_kernels.forget()
    base_kernels.forget()
