"""portmm: matmul kernels generated for the machine you are on.

Importing does no work: nothing is detected, compiled or started before the
first call.
"""

from typing import TYPE_CHECKING

from portmm.api import matmul, plan
from portmm.errors import (
    BuildError,
    NoCompilerError,
    PackError,
    PortmmError,
    ScheduleError,
    TargetError,
)
from portmm.packed import pack
from portmm.settings import config, get_num_threads, set_num_threads
from portmm.version import VERSION

if TYPE_CHECKING:
    from portmm.explanation import Explanation, explain

__version__ = VERSION

__all__ = [
    "BuildError",
    "Explanation",
    "NoCompilerError",
    "PackError",
    "PortmmError",
    "ScheduleError",
    "TargetError",
    "__version__",
    "config",
    "explain",
    "get_num_threads",
    "matmul",
    "pack",
    "plan",
    "set_num_threads",
]


def __getattr__(name: str) -> object:
    # Explaining needs the emitter and the detector, which a matmul from the cache does not.
    if name not in ("Explanation", "explain"):
        raise AttributeError(f"module 'portmm' has no attribute {name!r}")
    from portmm import explanation

    return globals().setdefault(name, getattr(explanation, name))
