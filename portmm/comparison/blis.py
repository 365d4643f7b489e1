"""BLIS, through its CBLAS.

Owns one contender. A BLIS older than the processor falls back to portable code; an
expert user sets the nearest configuration by hand, and so does this adapter.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.comparison import native
from portmm.comparison.peers import Library, MissingError, Run

if TYPE_CHECKING:
    from portmm.comparison.case import Case
    from portmm.comparison.data import Arrays
    from portmm.comparison.environment import Setup

# More than the some thirty configurations of a BLIS; numbers beyond the last have no name.
ARCHITECTURES = 64
# Best first: the cpuinfo flag that a configuration needs.
NEAREST = (("skx", "avx512f"), ("haswell", "avx2"), ("sandybridge", "avx"))


def open_blis(setup: Setup) -> Library:
    """Open BLIS: its gemm and gemv."""
    path = native.shared_library(["libblis.so*"], system=["blis"])
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise MissingError(str(error)) from error
    native.driver()
    note = _configure(library, setup.isa)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        methods = {"gemm": native.gemm(library, case, data)}
        if native.is_vector(case):
            methods["gemv"] = native.gemv(library, case, data)
        return methods

    library.bli_info_get_version_str.restype = ctypes.c_char_p
    return Library(f"blis {library.bli_info_get_version_str().decode()} ({note})", prepare)


def _configure(library: Any, isa: str) -> str:
    """Set a configuration before BLIS initialises itself; return a description of it."""
    library.bli_arch_string.restype = ctypes.c_char_p
    own = _own_choice(library)
    wanted = {"avxvnni": "haswell", "avx2": "haswell", "sse2": "penryn"}.get(isa, "")
    if not wanted and own == "generic":
        flags = _cpu_flags()
        wanted = next((name for name, flag in NEAREST if flag in flags), "")
    if not wanted or wanted == own:
        return own
    ids = {_name(library, i): i for i in range(ARCHITECTURES)}
    if wanted not in ids:
        return own
    os.environ["BLIS_ARCH_TYPE"] = str(ids[wanted])
    return f"{wanted}, set by hand; its own choice is {own}"


def _name(library: Any, number: int) -> str:
    name = library.bli_arch_string(number)
    return name.decode() if name else ""


def _own_choice(library: Any) -> str:
    # BLIS keeps its first selection for the life of a process, so a child queries it.
    child = os.fork()
    if child == 0:
        os._exit(library.bli_arch_query_id() & 0xFF)
    status = os.waitpid(child, 0)[1]
    return _name(library, os.waitstatus_to_exitcode(status)) or "unknown"


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((x for x in lines if x.startswith("flags")), "").split())
