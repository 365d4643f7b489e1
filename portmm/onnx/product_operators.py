"""Products of matrices, with weights packed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.onnx.elementwise_operators import literals, same_type
from portmm.onnx.operators import MICROSOFT, UnsupportedError, is_traced, once, operator
from portmm.onnx.precision import summed
from portmm.ops.einsum import einsum
from portmm.ops.prepack import pack

if TYPE_CHECKING:
    from portmm.onnx.model import Node

FLOATS = ("float32", "float16", "bfloat16")


def packed(weight: Any, *, transposed: bool = False) -> Any:
    """A constant matrix, packed once."""
    return once(weight, "transposed" if transposed else "packed", lambda: pack(weight.T if transposed else weight))


def is_weight(a: Any, b: Any) -> bool:
    """Test whether the right operand of a product is a constant matrix that kernels take packed."""
    constant = is_traced(a) and not is_traced(b) and b.ndim == 2 and 0 not in b.shape
    return constant and b.dtype.name in FLOATS and a.dtype == b.dtype


@operator("MatMul")
def _matmul(node: Node, a: Any, b: Any) -> Any:
    return summed(node, product(a, b))


def product(a: Any, b: Any, *, transposed: bool = False) -> Any:
    """The product of two arrays, or of the first and the transpose of the second, a matrix."""
    if a.dtype.kind in "iu":
        if is_traced(a, b):
            raise UnsupportedError("integers wrap around, as NumPy's do")
        return np.matmul(a, b.T if transposed else b)
    if is_weight(a, b) and a.ndim > 1:
        return a @ a.recorder.weight(packed(b, transposed=transposed))
    return same_type(a @ (b.transpose((1, 0)) if transposed else b), a)


@operator("Gemm")
def _gemm(node: Node, a: Any, b: Any, c: Any = None) -> Any:
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    a = a.transpose((1, 0)) if node.attribute("transA", 0) else a
    if a.dtype.kind in "iu":
        raise UnsupportedError
    y = summed(node, product(a, b, transposed=bool(node.attribute("transB", 0))))
    y = y if alpha == 1 else y * float(alpha)
    if c is None or beta == 0:
        return y
    _, c = literals(y, c)
    return y + (c if beta == 1 else c * float(beta))


@operator("FusedMatMul", "TransposeMatMul", domains=(MICROSOFT,))
def _fused_matmul(node: Node, a: Any, b: Any) -> Any:
    if node.attribute("transBatchA", 0) or node.attribute("transBatchB", 0):
        raise UnsupportedError
    swapped = [x.swapaxes(-1, -2) if node.attribute(f"trans{n}", 0) else x for n, x in (("A", a), ("B", b))]
    y = product(*swapped)
    return y if node.attribute("alpha", 1.0) == 1 else y * float(node.attribute("alpha"))


@operator("Einsum")
def _einsum(node: Node, *xs: Any) -> Any:
    equation = node.attribute("equation").replace(" ", "")
    if not is_traced(*xs):
        return einsum(equation, *xs).astype(xs[0].dtype, copy=False)
    if len(xs) != 2 or "->" not in equation or "." in equation:
        raise UnsupportedError
    operands, result = equation.split("->")
    left, right = operands.split(",")
    if any(len(set(x)) < len(x) for x in (left, right, result)):
        raise UnsupportedError
    batch = [i for i in result if i in left and i in right]
    rows, columns = [i for i in result if i not in right], [i for i in result if i not in left]
    summed = [i for i in left if i in right and i not in result]
    if not summed or {*batch, *rows, *summed} != set(left) or {*batch, *columns, *summed} != set(right):
        raise UnsupportedError
    size = dict(zip(left, xs[0].shape, strict=True)) | dict(zip(right, xs[1].shape, strict=True))

    def shaped(x: Any, names: str, *groups: list[str]) -> Any:
        order = tuple(names.index(i) for g in groups for i in g)
        return x.transpose(order).reshape(tuple(int(np.prod([size[i] for i in g])) for g in groups))

    y = shaped(xs[0], left, batch, rows, summed) @ shaped(xs[1], right, batch, summed, columns)
    order = [*batch, *rows, *columns]
    return y.reshape(tuple(size[i] for i in order)).transpose(tuple(order.index(i) for i in result))
