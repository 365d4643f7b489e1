"""The run time without a compiler: its types, and no kernels.

Owns `PLAIN`, the fallback of the run time where that cannot be built: weights can be packed and read, and
plans built, which NumPy computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import BuildError
from portmm.runtime.cffi_records import Kernel, Packed, Plan, Route, address, largest_scale, register_dtype

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Plain:
    """The part of `Runtime` that needs no machine code."""

    Packed, Kernel, Route, Plan = Packed, Kernel, Route, Plan
    register_dtype = staticmethod(register_dtype)
    address = staticmethod(address)

    @staticmethod
    def load(path: str | Path, symbol: str, file: str | Path = "") -> Any:
        """See `Runtime`: nothing can be loaded here."""
        del file
        raise BuildError(f"{symbol} of {path} cannot be loaded: there is no run time to call it")

    @staticmethod
    def describe(*_: Any) -> None:
        """See `Runtime`: there is no fast path here."""

    largest_scale = staticmethod(largest_scale)


class PlainPlan(Plan):
    """A plan that NumPy computes: the same checks, and `product(a, b)` in place of a kernel.

    Args:
        word: types of A, B and C, spelled as in routes.
        operands: shapes and strides of A, B and C, or a packed weight for B.
        product: computes the product of two arrays, the second being the array of panels of a packed weight.
    """

    __slots__ = ("_product",)

    def __init__(self, word: str, operands: tuple[Any, Any, Any], product: Callable[[Any, Any], Any]) -> None:
        route = Route(Kernel("", "", None), 0, 1, word)
        super().__init__(lambda *_: None, route, operands, (0,) * 13, None)
        self._product = product

    def run(self, a: Any, b: Any, out: Any, *, scalar: bool) -> Any:
        """See `Plan`."""
        np.copyto(out, self._product(a, b), casting="same_kind")
        return out[()] if scalar and out.ndim == 0 else out


PLAIN = Plain()
