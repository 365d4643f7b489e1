"""Constants that are packed while a model is loaded."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from portmm.arrays.pages import adjoining
from portmm.onnx.product_operators import FLOATS, packed

if TYPE_CHECKING:
    from portmm.onnx.executor import Executor
    from portmm.onnx.model import Node


def pack_constants(executor: Executor, *, progress: bool | None = None) -> None:
    """Pack the constant matrices of products, which the first run would pack otherwise."""
    work = [(n, weight) for part in executor.parts for n in part.nodes if (weight := _weight(n, executor)) is not None]
    if progress is False or not work:
        bar: Any = nullcontext(lambda *_: None)
    else:
        from portmm.util.console import progress as shown

        bar = shown("packing")
    with bar as step, adjoining(executor.memory):
        for i, (node, weight) in enumerate(work):
            step(i, len(work), node.name)
            packed(weight, transposed=bool(node.op == "Gemm" and node.attribute("transB", 0)))


def _weight(node: Node, executor: Executor) -> Any:
    """The constant matrix of a product, or None."""
    if node.op not in ("MatMul", "Gemm") or node.inputs[0] in executor.constants:
        return None
    weight = executor.constants.get(node.inputs[1])
    usable = weight is not None and weight.ndim == 2 and weight.dtype.name in FLOATS and 0 not in weight.shape
    return weight if usable else None
