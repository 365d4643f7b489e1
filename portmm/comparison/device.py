"""Contenders on a device: portmm, PyTorch, CuPy and cublasLt.

Owns the runs of a case there: its arrays are allocated in the host's memory, as for all
contenders, copied to the device before the timing and back for the check; a
run enqueues its calls and synchronizes once, at its end.

The host's work for a call overlaps with the device's work, unless that is short: so small
products are also timed as a CUDA graph of many calls, for every contender.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from portmm.comparison import cublaslt, device_arrays
from portmm.comparison.case import Case
from portmm.comparison.data import INPUTS, Arrays
from portmm.comparison.device_arrays import CupyArrays, OpenClArrays, TorchArrays, of_cuda, parsed
from portmm.comparison.peers import Fetched, Library, MissingError, Setup, UnsupportedError
from portmm.errors import PortmmError
from portmm.spec.dtype import FP8

if TYPE_CHECKING:
    Calls: TypeAlias = Mapping[str, Callable[[], Any]]
    Ways: TypeAlias = Callable[["Operands"], Calls]

GRAPHED_ROWS, GRAPHED_FLOPS = 64, 2 * 2048**3
"""Most rows, or operations, of products that are short enough for the host's overhead to show."""
IN_A_GRAPH = 16
"""Approximate number of calls of a graph."""
MOST_SETS = 64
FEWEST_ROWS_INT = 17
"""Fewest rows that `torch._int_mm` takes on CUDA."""


@dataclass(frozen=True, slots=True)
class Operands:
    """Arrays of a case on a device: A, B and C in the case's layouts, and C's memory as a row-major array."""

    a: Any
    b: Any
    c: Any
    memory: Any


def runs(on: device_arrays.Arrays, case: Case, data: Arrays, ways: Ways, *, cold: int = 0) -> dict[str, Fetched]:
    """Runs of a case by method, each of calls that return the array with the result.

    Args:
        on: the library of the arrays.
        case: the case.
        data: its arrays in the host's memory.
        ways: function of operands that returns calls by method.
        cold: least bytes of all copies of the operands, through which calls rotate; 0 for one copy.

    Raises:
        UnsupportedError: no method works here; the message says why.
    """
    sets = [_operands(on, data) for _ in range(_turns(case.bytes, cold) if cold else 1)]
    methods: dict[str, Fetched] = {}
    refused = []
    by_name: dict[str, list[Callable[[], Any]]] = {}
    for x in sets:
        for name, call in ways(x).items():
            by_name.setdefault(name, []).append(call)
    for name, calls in by_name.items():
        try:
            with on.working():
                calls[0]()
                on.wait()
        except (PortmmError, RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            refused.append(f"{name}: {str(error).partition(chr(10))[0][:200]}")
            continue
        methods[name] = _rotated(on, data, sets, calls)
        if case.m <= GRAPHED_ROWS or case.flops <= GRAPHED_FLOPS:
            # A library that cannot be captured raises an error of its own, and is timed without a graph.
            with suppress(Exception):
                methods[f"{name}, graph"] = _graphed(on, data, sets, calls)
    if not methods:
        raise UnsupportedError("; ".join(refused) or "no way of computing it")
    return methods


def _operands(on: device_arrays.Arrays, data: Arrays) -> Operands:
    """Copies of a case's arrays on the device."""
    a, b = (_view(on, x, on.put(_by_rows(x))) for x in (data.a, data.b))
    memory = on.put(_by_rows(data.c))
    return Operands(a, b, _view(on, data.c, memory), memory)


def _by_rows(x: Any) -> Any:
    return x if x.flags.c_contiguous else x.swapaxes(-1, -2)


def _view(on: device_arrays.Arrays, x: Any, copy: Any) -> Any:
    return copy if x.flags.c_contiguous else on.transposed(copy)


def _turns(bytes_: int, cold: int) -> int:
    return max(2, min(MOST_SETS, math.ceil(cold / max(bytes_, 1))))


def _judged(on: device_arrays.Arrays, data: Arrays, sets: list[Operands], run: Callable[[int], Any]) -> Fetched:
    """A run whose last result is copied back when it is fetched."""
    last: list[Any] = []

    def timed(count: int) -> None:
        with on.working():
            result = run(count)
            on.wait()
        last[:] = [result]

    def spoil() -> None:
        for x in sets:
            on.store(x.memory, _by_rows(data.c))

    return Fetched(timed, lambda: np.copyto(data.c, on.host(last[0])), spoil)


def _rotated(on: device_arrays.Arrays, data: Arrays, sets: list[Operands], calls: list[Callable[[], Any]]) -> Fetched:
    """A run call by call, which rotates through the operands from run to run."""
    at = 0

    def run(count: int) -> Any:
        nonlocal at
        result = None
        for i in range(at, at + count):
            result = calls[i % len(calls)]()
        at = (at + count) % len(calls)
        return result

    return _judged(on, data, sets, run)


def _graphed(on: device_arrays.Arrays, data: Arrays, sets: list[Operands], calls: list[Callable[[], Any]]) -> Fetched:
    """A run by a graph of many calls, and by graphs of one call for the rest of a count."""
    size = len(calls) * math.ceil(IN_A_GRAPH / len(calls))
    single = [on.graph([call]) for call in calls]
    many, _ = on.graph(calls * (size // len(calls)))
    at = 0

    def run(count: int) -> Any:
        nonlocal at
        whole, rest = divmod(count, size)
        # The last is a graph of one call, whose result is checked.
        if not rest:
            whole, rest = whole - 1, size
        for _ in range(whole):
            many()
        for _ in range(rest):
            launch, result = single[at]
            launch()
            at = (at + 1) % len(single)
        return result

    return _judged(on, data, sets, run)


def refuse(case: Case, *, batches: bool = True, whole_layouts: bool = True) -> None:
    """Refuse cases that are not compared on devices.

    Args:
        case: the case.
        batches: the contender computes several products in one call.
        whole_layouts: A and C may be column-major.

    Raises:
        UnsupportedError: the case is one of them; the message says why.
    """
    reasons = {
        "weights of four bits are not compared on devices": case.block,
        "codes with scales are not compared on devices": case.scaled or case.dynamic,
        f"{case.fused}: fused cases are not compared on devices": case.fused,
        "not of batches": case.batch > 1 and not batches,
        "A and C by rows only": (case.a, case.c) != ("row", "row") and not whole_layouts,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(reason)


def open_portmm(setup: Setup) -> Library:
    """Open portmm on arrays of PyOpenCL, or of CuPy, or of PyTorch where CuPy lacks a type."""
    pm: Any = import_module("portmm")
    language, number = parsed(setup.device)
    usual: device_arrays.Arrays = CupyArrays(number) if language == "cuda" else OpenClArrays()
    others: list[device_arrays.Arrays] = []

    def holder(case: Case) -> device_arrays.Arrays:
        if usual.holds(case.types):
            return usual
        try:
            others[:] = others or [TorchArrays(number)]
        except MissingError as missing:
            raise UnsupportedError(f"{usual.version} has no arrays of {case.dtype}; {missing}") from missing
        return others[0]

    def prepare(case: Case, data: Arrays) -> dict[str, Fetched]:
        refuse(case)
        on = holder(case)

        def ways(x: Operands) -> Calls:
            return {"matmul": lambda: pm.matmul(x.a, x.b, out=x.c), "plan": _plan(pm, x)}

        return runs(on, case, data, ways, cold=setup.cold)

    return Library(f"portmm {metadata.version('portmm')}, {usual.version}", prepare, dtypes=None)


def _plan(pm: Any, x: Operands) -> Callable[[], Any]:
    """Function that creates a plan on its first call, and runs it."""
    plans: list[Any] = []

    def call() -> Any:
        if not plans:
            plans.append(pm.plan(x.a, x.b, x.c))
        return plans[0](x.a, x.b, x.c)

    return call


def open_cupy(setup: Setup) -> Library:
    """Open CuPy, whose products of floats are cuBLAS's."""
    _, number = parsed(setup.device)
    on = CupyArrays(number)
    cupy: Any = import_module("cupy")

    def prepare(case: Case, data: Arrays) -> dict[str, Fetched]:
        refuse(case)
        if len(set(case.types)) > 1 or case.whole or not on.holds(case.types):
            raise UnsupportedError(f"no product of {case.dtype} by cuBLAS")
        return runs(on, case, data, lambda x: {"matmul": lambda: cupy.matmul(x.a, x.b, out=x.c)}, cold=setup.cold)

    return Library(f"{on.version}, cuBLAS", prepare, dtypes=None, precision=INPUTS)


def open_torch(setup: Setup) -> Library:
    """Open PyTorch on CUDA."""
    _, number = parsed(setup.device)
    return torch_library(TorchArrays(number), cold=setup.cold)


def torch_library(on: TorchArrays, *, cold: int = 0) -> Library:
    """PyTorch's own products of these arrays."""
    torch = on.torch

    def prepare(case: Case, data: Arrays) -> dict[str, Fetched]:
        refuse(case)
        return runs(on, case, data, _torch_ways(torch, case, on), cold=cold)

    return Library(f"torch {torch.__version__}, CUDA {torch.version.cuda}", prepare, dtypes=None, precision=INPUTS)


def _torch_ways(torch: Any, case: Case, on: TorchArrays) -> Ways:
    """PyTorch's methods for a case."""
    if case.types[0] in FP8 and case.types[2] == "bf16" and case.batch == 1:
        one = on.put(np.ones((), np.float32))
        scaled = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: SLF001
        return lambda x: {"_scaled_mm": lambda: scaled(x.a, x.b, out=x.c)}
    if case.types == ("s8", "s8", "s32") and case.batch == 1:
        if case.m < FEWEST_ROWS_INT:
            raise UnsupportedError(f"torch._int_mm takes {FEWEST_ROWS_INT} rows or more")
        return lambda x: {"_int_mm": lambda: torch._int_mm(x.a, x.b, out=x.c)}  # noqa: SLF001
    if len(set(case.types)) > 1 or case.whole:
        raise UnsupportedError(f"no product of {case.dtype} on this device")

    def ways(x: Operands) -> Calls:
        calls: dict[str, Callable[[], Any]] = {"matmul": lambda: torch.matmul(x.a, x.b, out=x.c)}
        if case.b == "col" and case.batch == 1:
            calls["linear"] = lambda: torch.nn.functional.linear(x.a, x.b.t())
        return calls

    return ways


def open_cublaslt(setup: Setup) -> Library:
    """Open cublasLt, and search all algorithms that it proposes for each case."""
    _, number = parsed(setup.device)
    return lt_library(of_cuda(number), cold=setup.cold)


def lt_library(on: device_arrays.Arrays, library: Any = None, *, cold: int = 0) -> Library:
    """Library cublasLt on arrays of this kind; tests pass their own `library`.

    Raises:
        MissingError: it is not installed.
    """
    try:
        lt = cublaslt.open_library(library)
    except (cublaslt.LtError, AttributeError) as error:
        raise MissingError(str(error)) from error
    scratch = on.put(np.empty((cublaslt.WORKSPACE,), np.uint8))
    workspace = on.address(scratch), cublaslt.WORKSPACE

    def prepare(case: Case, data: Arrays) -> dict[str, Fetched]:
        refuse(case, batches=False, whole_layouts=False)
        if not on.holds(case.types) or any(x not in cublaslt.TYPES for x in case.types):
            raise UnsupportedError(f"no product of {case.dtype}")
        try:
            product = lt.product(case.types, (case.m, case.n, case.k), by_columns=case.b == "col")
        except cublaslt.LtError as error:
            raise UnsupportedError(str(error)) from error
        best: list[cublaslt.Algorithm] = []

        def ways(x: Operands) -> Calls:
            at = on.address(x.a), on.address(x.b), on.address(x.c)
            if not best:
                try:
                    with on.working():
                        timed = product.search([at], partial(_seconds, on), workspace, on.stream())
                except cublaslt.LtError as error:
                    raise UnsupportedError(str(error)) from error
                best.append(timed[0].algorithm)

            def call() -> Any:
                product.run(best[0], *at, workspace, on.stream())
                return x.c

            return {"search": call}

        return runs(on, case, data, ways, cold=cold)

    return Library(f"cublasLt {lt.version}", prepare, dtypes=None, precision=INPUTS)


def _seconds(on: device_arrays.Arrays, calls: list[Callable[[], object]]) -> float:
    """Mean seconds of calls that run one after another."""
    on.wait()
    start = time.perf_counter()
    for call in calls:
        call()
    on.wait()
    return (time.perf_counter() - start) / len(calls)
