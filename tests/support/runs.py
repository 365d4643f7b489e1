"""Ways to run a kernel: by the interpreter, or built, with each operand beside a guard page unless it has passed so."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import passed

from portmm.spec.epilogue import PRODUCT
from portmm.spec.problem import AXES, Family

if TYPE_CHECKING:
    from operands import Case, Laid


def interpret(kernel: Any, k: Case, workers: int = 1, shuffle: int = 0, c: np.ndarray | None = None) -> np.ndarray:
    """C as the interpreter computes it."""
    return interpret_all(kernel, k, workers, shuffle, c)[0]


def interpret_all(
    kernel: Any, k: Case, workers: int = 1, shuffle: int = 0, c: np.ndarray | None = None
) -> list[np.ndarray]:
    """C and the operands of its epilogue as the interpreter leaves them."""
    from portmm.ir.interpreter import run

    c, flats = k.fresh() if c is None else c, [x.flat.copy() for x in k.operands]
    arrays = {"a": (k.a, k.a_offset), "b": (k.b, k.b_offset), "c": (c, k.c.offset), "numbers": (k.numbers, 0)}
    arrays |= {f"x{i}": (x, k.operands[i].offset) for i, x in enumerate(flats)}
    steps = {f"x{i}_{axis}": s for i, x in enumerate(k.operands) for axis, s in zip(PRODUCT, x.steps, strict=True)}
    run(kernel, k.fields | {"workers": workers} | steps, arrays, shuffle=shuffle)
    return [c, *flats]


class Guarded:
    """Memory between two pages that cannot be touched, flush with one of them."""

    PAGE = mmap.PAGESIZE
    _protect = ctypes.CDLL(None, use_errno=True).mprotect
    _protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def __init__(self, nbytes: int, *, end: bool = True) -> None:
        pages = max(1, -(-nbytes // self.PAGE))
        self.map = mmap.mmap(-1, (pages + 2) * self.PAGE)
        raw = np.frombuffer(self.map, np.uint8)
        first = raw.ctypes.data
        for at in (first, first + (pages + 1) * self.PAGE):
            assert self._protect(at, self.PAGE, 0) == 0
        begin = self.PAGE + (pages * self.PAGE - nbytes if end else 0)
        self.bytes = raw[begin : begin + nbytes]


def guarded(x: np.ndarray, *, end: bool = True) -> np.ndarray:
    """A copy of a flat array that faults if it is overrun (`end`) or underrun."""
    copy = Guarded(x.nbytes, end=end).bytes.view(x.dtype)
    copy[...] = x
    return copy


def load(kernel: Any) -> Any:
    """A kernel built and loaded through the real pipeline."""
    from portmm.dispatch import cpu_kernels

    return cpu_kernels.loaded(kernel)


def execute(kernel: Any, k: Case, workers: int = 1, *, code: Any = None, end: bool = True) -> np.ndarray:
    """C as the built kernel computes it, every operand beside a guard page."""
    return execute_all(kernel, k, workers, code=code, end=end)[0]


def execute_all(kernel: Any, k: Case, workers: int = 1, *, code: Any = None, end: bool = True) -> list[np.ndarray]:
    """C and the operands of its epilogue as the built kernel leaves them, each beside a guard page."""
    from portmm.dispatch import cpu_kernels
    from portmm.runtime.cpu import runtime

    route = runtime().make_route(
        code or load(kernel),
        cpu_kernels.workspace_bytes(kernel, k.problem, workers),
        workers,
        k.problem.storage,
        k.problem.unit,
    )
    a, b, c, values, *flats = (
        guarded(x, end=end) for x in (k.a, k.b, k.fresh(), k.numbers, *(x.flat for x in k.operands))
    )
    at = {"a": a.ctypes.data + k.a_offset * a.itemsize, "b": b.ctypes.data + k.b_offset * b.itemsize}
    at["c"] = c.ctypes.data + k.c.offset * c.itemsize
    f = k.fields
    numbers = [f[x] for x in ("m", "n", "k", "batch")]
    for name, steps in (("a", "mk"), ("b", "kn"), ("c", "mn")):
        numbers += [at[name], *(f[f"{name}_{s}"] for s in steps), f[f"{name}_batch"]]
    places = [
        (x.ctypes.data + y.offset * x.itemsize, *y.steps, *(0,) * (len(AXES) - len(PRODUCT)))
        for x, y in zip(flats, k.operands, strict=True)
    ] or [(0,) * (1 + len(AXES))]
    runtime().execute(route, *numbers, None, np.array(places, np.int64), values)
    return [c.copy(), *(x.copy() for x in flats)]


def packed_by(  # noqa: PLR0917
    kernel: Any, b: Laid, like: np.ndarray, kept: Family, k: int, n: int
) -> np.ndarray:
    """A packer's result for an operand."""
    from portmm.runtime.cpu import runtime

    flat, to = guarded(b.flat), guarded(np.zeros_like(like))
    route = runtime().make_route(load(kernel), 1024, 2, kept.dtype)
    at = flat.ctypes.data + b.offset * flat.itemsize
    item = like.size // kept.kr
    runtime().execute(route, 1, n, k, 1, at, 0, 0, 0, at, b.row, b.col, b.item, to.ctypes.data, 0, 0, item)
    return to.copy()


def same_as_before(kernel: Any, *parts: object) -> bool:
    """A kernel is built from a text and run as it was when it passed."""
    from portmm.codegen.c_kernel import source

    arch = None if kernel.isa.arch == "any" else kernel.isa.arch
    tools = (passed.compiled_by(kernel.isa.flags, arch), passed.run_time(), passed.processor())
    return passed.unchanged(source(kernel), kernel.name, *tools, passed.folder_text("tiles.h"), *parts)


def called_as_before(kernel: Any, k: Case, workers: int, *more: object) -> bool:
    """A kernel is called in this process as it was when it passed, with a scratch of the same size."""
    from portmm.dispatch import cpu_kernels

    p = k.problem
    work = cpu_kernels.workspace_bytes(kernel, p, workers)
    return same_as_before(kernel, "here", work, workers, p.storage, p.unit, *more, *k.parts())


def check_built(
    kernel: Any, k: Case, workers: int = 1, what: object = "", *, code: Any = load, end: bool = True
) -> None:
    """C as the built kernel computes it is the product, or was so before. `code` builds and loads a kernel."""
    if not called_as_before(kernel, k, workers, code.__name__, end):
        k.check(execute(kernel, k, workers, code=code(kernel), end=end), what)
