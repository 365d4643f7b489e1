"""Products of rows in groups, each group with a matrix of its own: experts, ragged batches.

Owns `grouped_matmul`. Imports `api`, `arrays`; for arrays of devices `grouped_on_device`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm import foreign

if TYPE_CHECKING:
    from collections.abc import Callable


def grouped_matmul(
    a: Any, b: Any, ends: Any, out: Any = None, *, dtype: Any = None, epilogue: Callable[..., Any] | None = None
) -> Any:
    """TODO."""
    if any(map(foreign.on_device, (a, b, ends))):
        from portmm import grouped_on_device

        return grouped_on_device.matmul(grouped_on_device.given(a, b, ends, out), dtype, epilogue)
    raise NotImplementedError
