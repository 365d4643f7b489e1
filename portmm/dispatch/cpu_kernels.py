"""Kernels on a CPU: lowered, built and loaded, once each in a process.

Owns the memos of kernels and of loaded code. Code of a schedule serves problems of many sizes, so that it is known
with its workspace as a function of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import atom_of, lower
from portmm.dispatch.cpu_units import isa_of
from portmm.ir.index import meaning, parsed, spelled
from portmm.runtime import route_cache
from portmm.schedule.text import spell
from portmm.spec.dtype import BY_NAME
from portmm.util import locks
from portmm.util.memo import Memory, cached, forget_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portmm.build.shared_object import Artifact
    from portmm.ir.nodes import Kernel
    from portmm.runtime.route_cache import RouteCache
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.isa import Isa
    from portmm.target.target import Target

MOST_LOADED = 1024
"""Kernels loaded before all are dropped: each takes some 30 KiB, and five of the 65,530 mappings that Linux
lets a process have."""

_loaded: dict[str, Any] = {}
_codes = Memory(MOST_LOADED, "kernels")
_lock = locks.lock()


@cached("kernels", 64)  # 150 KiB each
def kernel_of(s: Schedule, isa: Isa) -> Kernel:
    """The loop nest of a schedule, lowered once."""
    return lower(s, isa)


def build_kernel(kernel: Kernel) -> Artifact:
    """Emit and compile a kernel, or find it in the cache.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    from portmm.build.shared_object import build
    from portmm.codegen.c_kernel import source

    arch = None if kernel.isa.arch == "any" else kernel.isa.arch
    return build(source(kernel), flags=kernel.isa.flags, arch=arch, name=kernel.name, symbols=(kernel.name,))


def loaded(kernel: Kernel) -> Any:
    """The kernel's code in this process, built and loaded once per source."""
    from portmm.runtime.cpu import load_kernel, runtime

    artifact = build_kernel(kernel)
    if len(_loaded) >= MOST_LOADED and artifact.key not in _loaded:
        forget()  # memos keep code loaded
    with _lock:
        code = _loaded.get(artifact.key)
        if code is None:
            code = _loaded[artifact.key] = load_kernel(runtime(), artifact.code, artifact.path, kernel.name)
    return code


@cached("kernels", MOST_LOADED)
def loaded_program(lowering: Callable[..., Kernel], *arguments: Any) -> tuple[Kernel, Any]:
    """A kernel that has no schedule, of a block program other than a product's, and its code.

    The kernel comes without its loop nest, which takes most of its memory and is not needed once code is loaded.

    Args:
        lowering: a function of `codegen.lower`.
        arguments: for that function.
    """
    kernel = lowering(*arguments)
    return replace(kernel, entry=replace(kernel.entry, body=())), loaded(kernel)


@dataclass(frozen=True, slots=True)
class Code:
    """The loaded code of a schedule, which serves other sizes too.

    Attributes:
        code: the function that the run time launches.
        swap: the kernel computes the transpose.
        workspace: elements of its scratch, from fields of the argument block.
        bytes: of an element of scratch.
    """

    code: Any
    swap: bool
    workspace: Callable[[Mapping[str, int]], int]
    bytes: int

    def scratch(self, p: Problem, rows: int, workers: int) -> int:
        """Bytes of its scratch for problems like `p` with `rows` rows."""
        return self.workspace(_fields(p, rows, workers, swap=self.swap)) * self.bytes


def workspace_bytes(kernel: Kernel, p: Problem, workers: int) -> int:
    """Bytes of scratch of a kernel for a problem."""
    return meaning(kernel.workspace)(_fields(p, p.m, workers, swap=kernel.swap)) * BY_NAME[kernel.atom.acc].bytes


def _fields(p: Problem, rows: int, workers: int, *, swap: bool) -> dict[str, int]:
    m, n = (p.n, rows) if swap else (rows, p.n)
    return {"m": m, "n": n, "k": p.k, "batch": p.batch, "workers": workers}


def code_of(s: Schedule, target: Target, kept: RouteCache | None = None) -> Code:
    """The code of a schedule: from this process, from the route cache, or built now."""
    code = known_code(s, target, kept)
    if code is None:
        isa = isa_of(s, target)
        code = _built(s, isa, target, kept)
        _codes.keep((s, isa), code)
    return code


def known_code(s: Schedule, target: Target, kept: RouteCache | None) -> Code | None:
    """The code of a schedule from this process or from the route cache; None if it must be built."""
    isa = isa_of(s, target)
    key = s, isa
    code: Code | None = _codes.get(key)
    if code is None and kept is not None:
        code = _looked_up(s, isa, kept)
        if code is not None:
            _codes.keep(key, code)
    return code


def is_loaded(s: Schedule, target: Target) -> bool:
    """Whether the code of a schedule is in this process."""
    return (s, isa_of(s, target)) in _codes


def _looked_up(s: Schedule, isa: Isa, kept: RouteCache) -> Code | None:
    """Code that an earlier process built, looked up without its source."""
    from portmm.runtime.cpu import runtime

    entry = route_cache.code(kept, spell(s), runtime())
    if entry is None:
        return None
    code, workspace = entry
    return Code(code, s.atom.swap, meaning(parsed(workspace)), BY_NAME[atom_of(isa, s.dtype, s.atom.lanes).acc].bytes)


def _built(s: Schedule, isa: Isa, target: Target, kept: RouteCache | None) -> Code:
    kernel = kernel_of(s, isa)
    code = loaded(kernel)
    if kept is not None:
        route_cache.keep_code(kept, spell(s), code, spelled(kernel.workspace), target)
    return Code(code, kernel.swap, meaning(kernel.workspace), BY_NAME[kernel.atom.acc].bytes)


def forget() -> None:
    """Drop what this process remembers of calls, kernels and routes, as after a change that it cannot see.

    The cache on disk stays, and code that is in use. `portmm cache` names the caches.
    """
    from portmm.runtime.cpu import clear_memo

    forget_all(functions=True)
    route_cache.forget(kernels=True)
    with _lock:
        _loaded.clear()
    clear_memo()
