"""Adapter of portmm, which calls its public functions.

Owns that adapter. It imports portmm by its name, as a user's program does, since the package
itself offers this comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from importlib import import_module, metadata
from typing import Any

import numpy as np

from portmm.comparison import fused, native
from portmm.comparison.case import Case
from portmm.comparison.data import ZERO, Arrays
from portmm.comparison.peers import Library, MissingError, Run, Setup, UnsupportedError, repeat, returning
from portmm.dispatch import cpu_background, cpu_race
from portmm.trace.closures import traced_through

SMALL = 1 << 20
"""Multiply-adds below which a look-up of the kernel matters: other libraries' kernels are looked up once, too."""


def open_portmm(setup: Setup) -> Library:
    """Open portmm: `matmul` with `out=`, `linear` for scales, weights packed where the case says."""
    pm: Any = import_module("portmm")
    if not hasattr(pm, "matmul"):
        raise MissingError("this portmm has no matmul")
    pm.set_num_threads(setup.threads)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        a, c, b = data.a, data.c, _weight(pm, case, data)
        if case.fused:
            return _fused(pm, case, data, b)
        if case.dynamic or case.scaled:
            options = _scales(case, data)
            call = returning(lambda: pm.linear(a, b, **options), lambda result: np.copyto(c, result))
            return {"linear, dynamic" if case.dynamic else "linear": call}
        pm.matmul(a, b, out=c)
        cpu_background.wait()  # measure the selected kernel, and not the one that serves while a compiler runs
        methods: dict[str, Run] = {"packed" if case.packed else "matmul": repeat(lambda: pm.matmul(a, b, out=c))}
        if not case.block and case.batch * case.m * case.n * case.k < SMALL:
            plan = pm.plan(a, b, out=c)
            methods |= _planned(plan, (a, c) if case.packed else (a, b, c), data, None if case.packed else b)
        if case.block:
            methods["packed, new result"] = returning(lambda: pm.matmul(a, b), lambda result: np.copyto(c, result))
        return methods

    def await_races(run: Run) -> None:  # so that winners are measured
        cpu_race.await_races(lambda: run(1))

    return Library(f"portmm {metadata.version('portmm')}", prepare, dtypes=None, fused=True, await_races=await_races)


def _planned(plan: Any, operands: tuple[Any, ...], data: Arrays, b: Any) -> dict[str, Run]:
    """Loop of the driver over a plan, as over the kernels of other libraries, or of Python."""
    try:
        loop, (function, bound) = native.driver().loop_plan, map(c_void_p, plan.pointer)
    except (MissingError, AttributeError):  # no compiler, or NumPy computes the product
        return {"plan": repeat(lambda: plan(*operands))}
    after = [bound, native.pointer(data.a), None if b is None else native.pointer(b), native.pointer(data.c)]
    return {"plan, from C": native.counted(loop, [function], after, plan)}


def _weight(pm: Any, case: Case, data: Arrays) -> Any:
    """B as the operand of the call: packed, quantised or plain."""
    if case.block:
        return pm.pack(pm.Quantized(data.b, data.columns, -ZERO * data.columns, 4, case.block))
    if case.packed:
        return pm.pack(data.b, activations=np.int8 if case.dynamic else data.a.dtype)
    return data.b


def _scales(case: Case, data: Arrays) -> dict[str, Any]:
    """Options of `linear` for the scales of a case."""
    if case.dynamic:
        return {"dynamic": True} | ({} if case.block else {"w_scale": data.columns})
    return {"w_scale": data.columns} | ({"x_scale": data.rows} if case.whole else {})


def _fused(pm: Any, case: Case, data: Arrays, b: Any) -> dict[str, Run]:
    """Method of a fused case: one call with an epilogue."""
    a, c = data.a, data.c
    if case.dtype == "f64":
        raise UnsupportedError("epilogues are in float32")
    if not (case.dynamic or case.scaled):
        epilogue = _epilogue(pm, fused.steps(case.fused), data)
        return {"matmul, epilogue": repeat(lambda: pm.matmul(a, b, out=c, epilogue=epilogue))}
    words, options = fused.steps(case.fused), _scales(case, data) | {"out": c}
    if words[0] == "bias":
        options, words = options | {"bias": data.bias}, words[1:]
    if words:
        options["epilogue"] = _epilogue(pm, words, data)
    return {"linear, epilogue": repeat(lambda: pm.linear(a, b, **options))}


def _epilogue(pm: Any, words: tuple[str, ...], data: Arrays) -> Callable[[Any, Any], Any]:
    """Epilogue as a function of a sum and its index, as a user writes it: each call reads the captured variables."""
    bias, residual = data.bias, data.residual
    *added, last = words
    f: Any = getattr(pm, last, None)
    after: dict[tuple[str, ...], Callable[[Any, Any], Any]] = {
        (): lambda acc, _i: f(acc),
        ("bias",): lambda acc, i: f(acc + bias[i.n]),
        ("residual",): lambda acc, i: f(acc + residual[i.m, i.n]),
        ("bias", "residual"): lambda acc, i: f(acc + bias[i.n] + residual[i.m, i.n]),
    }
    bare: dict[tuple[str, ...], Callable[[Any, Any], Any]] = {
        ("bias",): lambda acc, i: acc + bias[i.n],
        ("residual",): lambda acc, i: acc + residual[i.m, i.n],
        ("bias", "residual"): lambda acc, i: acc + bias[i.n] + residual[i.m, i.n],
    }
    epilogue = bare[words] if last in fused.ADDED else after[tuple(added)]
    return traced_through(epilogue)
