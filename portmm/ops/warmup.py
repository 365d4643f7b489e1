"""Warmup: selection and compilation of kernels before their first call.

Owns `warmup`. Kernels that are compiled here go to the cache on disk as well, for other processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any

from portmm.arrays import interop
from portmm.arrays.grid_call import GridCall, Product, grid_call
from portmm.arrays.operand import Operand, dense_like, named, transposed
from portmm.dispatch import config
from portmm.dispatch.machine import Machine, machine_of
from portmm.spec.dtype import BY_NUMPY, types, word_of

MOST_COMPILERS = 16
"""Threads that compile for a device at once: each takes a core, and some 100 MB."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """The kernels that `warmup` has loaded.

    Attributes:
        shapes: number of shapes.
        kernels: names of the distinct kernels that they need, with those of relayout copies and of
            split-K; shapes share them, whatever their M, where one schedule suits. Kernels of one name
            differ in their blocks.
        seconds: the time it took; almost nothing where the cache had them.
        where: "host", "cuda:0", or the name of an OpenCL device's target.
    """

    shapes: int
    kernels: tuple[str, ...]
    seconds: float
    where: str

    def __str__(self) -> str:
        return f"{self.shapes} shapes on {self.where}: {len(self.kernels)} kernels in {self.seconds:.2f} s"


def warmup(shapes: Any, dtype: Any = "f32", *, b: str = "row", device: Any = None) -> Warmed:
    """Select, compile and load the kernels of products, so that their first calls do not wait for a compiler.

    Args:
        shapes: one (m, n, k), or (batch, m, n, k), or an iterable of them. M may be any: kernels do not depend on
            it, so that a few values cover those in between.
        dtype: of A and B, as "bf16", "float8_e4m3fn" or NumPy's; or of A, B and C, as "s8-s8-s32".
        b: layout of B: "row", or "col" for the transpose of an array by rows, as in x @ w.T.
        device: None for the processor; "cuda", "cuda:1"; or an array on the device.

    Returns:
        The kernels that are ready.

    Raises:
        TypeError: a type is not supported.
        ValueError: a shape is not three or four positive numbers, or `b` or `device` is unknown.
        NoDeviceError: the device is not there.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    if b not in ("row", "col"):
        raise ValueError(f"b is {b!r}; use row or col")
    sizes = _shapes(shapes)
    word = _word(dtype)
    start = time.perf_counter()
    if device is None:
        names, where = _on_host(sizes, word, b), "host"
    else:
        names, where = _on_device(sizes, word, b, device)
    return Warmed(len(sizes), tuple(names.values()), time.perf_counter() - start, where)


def _shapes(shapes: Any) -> list[tuple[int, int, int, int]]:
    """Batch, m, n and k of each shape."""
    if isinstance(shapes, str) or not isinstance(shapes, Iterable):
        raise TypeError(f"shapes is {shapes!r}; pass (m, n, k), or a list of them")
    every = list(shapes)
    if every and not isinstance(every[0], Iterable):
        every = [every]
    sizes = []
    for x in every:
        numbers = tuple(index(n) for n in x)
        if len(numbers) not in (3, 4) or min(numbers) < 1:
            raise ValueError(f"shape {tuple(x)} is invalid; pass (m, n, k) or (batch, m, n, k), all of them positive")
        batch, m, n, k = (1, *numbers)[-4:]
        sizes.append((batch, m, n, k))
    return sizes


def _word(dtype: Any) -> str:
    """The types of A, B and C."""
    text = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str) and text not in BY_NUMPY:
        text = named(dtype)
    try:
        return word_of(text)
    except ValueError as error:
        raise TypeError(f"dtype {dtype!r} is not supported: {error}") from error


# -- the processor -------------------------------------------------------------------


def _on_host(shapes: list[tuple[int, int, int, int]], word: str, b: str) -> dict[Any, str]:
    """Names of the kernels that the host has loaded, by schedule."""
    import numpy as np

    from portmm.arrays import numpy_arrays
    from portmm.arrays.call import problem_of_call
    from portmm.dispatch import cpu_kernels, schedule_choice
    from portmm.ops import host_matmul, routes

    host_matmul.begin()
    names = {}
    kinds = [numpy_arrays.numpy_of(x) for x in types(word)]
    for batch, m, n, k in shapes:
        lead = (batch,) if batch > 1 else ()
        left, right = (
            np.empty((*lead, m, k), kinds[0]),
            np.empty((*lead, *((k, n) if b == "row" else (n, k))), kinds[1]),
        )
        p = problem_of_call(left, right if b == "row" else right.swapaxes(-1, -2), dtype=word)
        routes.route(p)
        choice = schedule_choice.choose(p, config.target(), config.get_num_threads())
        names[choice.schedule] = cpu_kernels.kernel_of(
            choice.schedule, cpu_kernels.isa_of(choice.schedule, choice.target)
        ).name
    return names


# -- devices -------------------------------------------------------------------------


def _on_device(shapes: list[tuple[int, int, int, int]], word: str, b: str, device: Any) -> tuple[dict[Any, str], str]:
    """Names of the kernels that a device has loaded, by schedule, and the device's name."""
    from portmm.arrays.grid_call import arranged
    from portmm.dispatch import device_routes

    like, on = _machine(device)
    problems = []
    names: dict[Any, str] = {}
    for shape in shapes:
        call = _dense_call(shape, word, b, like)
        p, vectors, _, copies = arranged(call.problem, call.vectors, call.values, on)
        names |= {x.name: x.name for x in copies}
        problems.append((p, vectors))
    for route in device_routes.routes(problems, on, min(MOST_COMPILERS, os.cpu_count() or 1)):
        names |= {(route.choice.schedule, i): x.name for i, (x, _) in enumerate(route.kernels)}
    where = f"cuda:{on.handle}" if on.language == "cuda" else on.target.name
    return names, where


def _machine(device: Any) -> tuple[Operand, Machine]:
    """A device, and an array as an example of those on it."""
    if not isinstance(device, str):
        array = interop.adopt(device)
        if array is None:
            raise ValueError(f"device is a {type(device).__name__}; pass cuda, cuda:1, or an array on a device")
        return array, machine_of(array)
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number.isdigit() or device == "cuda"):
        raise ValueError(f"device {device!r} is unknown; pass cuda, cuda:1, or an array on the device")
    from portmm.runtime import cuda

    at = cuda.current(int(number) if number else None)
    like = Operand(None, "cuda", ("cuda", at), 0, (), (), "f32", None, readonly=False)
    return like, machine_of(like)


def _dense_call(shape: tuple[int, int, int, int], word: str, b: str, like: Operand) -> GridCall:
    """A call with dense operands, reduced to a problem."""
    batch, m, n, k = shape
    lead = (batch,) if batch > 1 else ()
    a, right, c = types(word)
    left, to = dense_like(like, (*lead, m, k), a), dense_like(like, (*lead, m, n), c)
    if b == "row":
        return grid_call(Product(left, dense_like(like, (*lead, k, n), right), to), c)
    return grid_call(Product(left, transposed(dense_like(like, (*lead, n, k), right)), to), c)
