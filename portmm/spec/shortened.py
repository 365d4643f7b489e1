"""Replacement of functions in expressions whose results have 16 bits, by shorter ones of `short_math`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from portmm.spec.device_math import DEVICE
from portmm.spec.epilogue import C, Fused
from portmm.spec.expr import Expr, node
from portmm.spec.function_patterns import function_of
from portmm.spec.short_math import SHORT, TYPES

_RELATIVE = "bf16"
"""Type whose functions have relative errors, which a product keeps."""


def shortened(fused: Fused, to: str, *, device: bool = False) -> Fused:
    """Expressions whose last functions are those for the types of their results; `to` is that of C.

    Those of a device have its instruction for powers of two.

    The last functions are results, or of bfloat16 factors of results: what is added to them may cancel. Where a result
    is float32, nothing changes, as it may share a function with another.
    """
    types = [to if i == C else fused.operands[i].dtype for i, _ in fused.results]
    if not set(types) <= set(TYPES):
        return fused
    table = DEVICE if device else SHORT
    results = [(i, _shortened(x, dtype, table)) for (i, x), dtype in zip(fused.results, types, strict=True)]
    return Fused(fused.operands, tuple(results))


def _shortened(x: Expr, dtype: str, table: Mapping[str, Callable[..., Expr]]) -> Expr:
    if (named := function_of(x)) is not None:
        name, argument = named
        return table[name](argument, dtype) if name in table else x
    if x.op == "mul" and dtype == _RELATIVE:
        return node("mul", tuple(_shortened(y, dtype, table) for y in x.inner), "f32")
    return x
