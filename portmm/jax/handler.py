"""The handler of XLA's foreign functions for products: compiled at run time, and its plans.

Owns the target "portmm_matmul" of `jax.ffi`. Its C finds the plan for the shapes of a call, or asks `_resolve` for it,
and calls it without Python; what no kernel can read in place is multiplied by `matmul`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cffi import FFI  # type: ignore[import-untyped]

from portmm.build.sealed_library import load
from portmm.build.shared_object import build
from portmm.errors import BuildError, PortmmError
from portmm.ops.matmul import matmul
from portmm.ops.plan_state import PlanState, make
from portmm.runtime.cpu import flags

TARGET, SYMBOL = "portmm_matmul", "portmm_jax_matmul"
TRANSPOSED_A, TRANSPOSED_B = 1, 2
"""Bits of the attribute: the last two axes of an operand are exchanged."""
_TYPES = {
    2: np.dtype(np.int8), 4: np.dtype(np.int32), 6: np.dtype(np.uint8), 10: np.dtype(np.float16),
    11: np.dtype(np.float32), 12: np.dtype(np.float64), 16: np.dtype(jnp.bfloat16),
}  # fmt: skip
"""XLA's numbers of types (XLA_FFI_DataType)."""
_DECLARATIONS = """
typedef int (*function)(const void *, const void *, const void *, void *);
void portmm_jax_resolver(void (*)(const int64_t *, long, function *, const void **));
void *portmm_jax_matmul(void *);
"""
_kept: list[Any] = []
"""Plans, and what C calls or points to."""


@cache
def registered() -> bool:
    """Whether XLA knows the target: it is compiled and registered at the first call, where there is a compiler."""
    source = f"/* jaxlib {jax.lib.__version__} */\n" + Path(__file__).with_name("handler.c").read_text(encoding="utf-8")
    symbols = (SYMBOL, "portmm_jax_resolver")
    include = (Path(jax.ffi.include_dir()),)
    try:
        artifact = build(source, flags=flags(), name="portmm_jax", include=include, symbols=symbols)
    except BuildError:
        return False
    ffi = FFI()
    ffi.cdef(_DECLARATIONS)
    library = load(artifact.code, artifact.path, ffi.dlopen)
    resolver = ffi.callback("void(const int64_t *, long, function *, const void **)", _resolver(ffi))
    library.portmm_jax_resolver(resolver)
    _kept.extend((ffi, library, resolver))
    pointer = int(ffi.cast("intptr_t", ffi.addressof(library, SYMBOL)))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_function(pointer)), platform="cpu")
    return True


def _function(pointer: int) -> Any:
    """The address as `pycapsule` takes it."""
    import ctypes

    return ctypes.CFUNCTYPE(ctypes.c_void_p)(pointer)


def _resolver(ffi: Any) -> Any:
    def resolve(key: Any, words: int, run: Any, plan: Any) -> None:
        transposed, operands = _operands(ffi.unpack(key, words))
        function, argument = _planned(transposed, operands) or _by_python(ffi, transposed, operands)
        run[0], plan[0] = ffi.cast("function", function), ffi.cast("void *", argument)

    return resolve


def _operands(key: list[int]) -> tuple[int, list[tuple[tuple[int, ...], np.dtype[Any]]]]:
    """The attribute, and shapes and types of A, B and C."""
    operands, at = [], 1
    while at < len(key):
        dtype, rank = key[at : at + 2]
        operands.append((tuple(key[at + 2 : at + 2 + rank]), _TYPES[dtype]))
        at += 2 + rank
    return key[0], operands


def _forms(transposed: int, operands: list[Any]) -> list[Any]:
    """Shapes, strides and types as the product reads them."""
    forms = []
    for (shape, dtype), swapped in zip(
        operands, (transposed & TRANSPOSED_A, transposed & TRANSPOSED_B, 0), strict=True
    ):
        strides = [dtype.itemsize] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
        order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2] if swapped else range(len(shape))
        forms.append((tuple(shape[i] for i in order), tuple(strides[i] for i in order), dtype))
    return forms


def _planned(transposed: int, operands: list[Any]) -> tuple[int, int] | None:
    """The function of a plan and its argument; None where no kernel reads these operands in place."""
    if any(0 in shape for shape, _ in operands):
        return None
    try:
        a, b, c = _forms(transposed, operands)
        plan = make(*PlanState(a, b, c, {}).operands())
        function, argument = plan.pointer
    except (PortmmError, TypeError, ValueError, AttributeError):
        return None
    _kept.append(plan)
    return function, argument


def _by_python(ffi: Any, transposed: int, operands: list[Any]) -> tuple[Any, int]:
    """A function that multiplies through Python, and an argument that it does not read."""

    def run(_plan: Any, *pointers: Any) -> int:
        a, b, c = (
            np.frombuffer(ffi.buffer(p, int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
            for p, (shape, dtype) in zip(pointers, operands, strict=True)
        )
        a = a.swapaxes(-1, -2) if transposed & TRANSPOSED_A else a
        b = b.swapaxes(-1, -2) if transposed & TRANSPOSED_B else b
        matmul(a, b, out=c)
        return 0

    callback = ffi.callback("int(const void *, const void *, const void *, void *)", run, error=-1)
    _kept.append(callback)
    return callback, 0
