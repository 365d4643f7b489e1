"""Terms on arrays: the function that computes them, of NumPy's arrays or of traced ones.

Owns `compute`. Products are of matrices, whose rows and columns are all dimensions of one operand alone; a reduction
keeps a last dimension of extent 1, as kernels over rows have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.fusion.term_rewrites import joined_extents
from portmm.ops.matmul import matmul
from portmm.spec import elementwise
from portmm.spec.function_patterns import NAMES

if TYPE_CHECKING:
    from portmm.fusion.terms import Heads, Term

_ARRAYS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y,
    "neg": lambda x: -x, "sqrt": np.sqrt, "abs": np.abs, "max": elementwise.maximum, "min": elementwise.minimum,
    "select": elementwise.where, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, **{x: getattr(elementwise, x) for x in NAMES},
}  # fmt: skip


def compute(
    results: Sequence[Term], axes: Sequence[str], arrays: Sequence[Any], extents: dict[str, int], dtype: str = "float32"
) -> list[Any]:
    """The arrays of terms: of NumPy, or traced ones.

    Args:
        results: the terms.
        axes: labels of each result's dimensions.
        arrays: inputs, whose dimensions of extent 1 are dropped.
        extents: of labels.
        dtype: of all arrays, and of literals, which then widen none; or "mixed": what is computed of arrays, and of
            literals, is float32, and products take narrow arrays as they are.
    """
    mixed = dtype == "mixed"
    literal_type = np.dtype(dtype.replace("mixed", "float32")).type
    known: dict[Term, tuple[Any, str]] = {}
    extents = joined_extents(tuple(results), extents)

    def value(x: Term) -> tuple[Any, str]:
        if x not in known:
            known[x] = build(x)
        return known[x]

    def operand(x: Term, axes: str, *, wide: bool = mixed) -> Any:
        return _aligned(*_float32(*value(x), mixed=wide), axes)

    def build(x: Term) -> tuple[Any, str]:
        """An array and its axes: after a reduction, a last one of extent 1 remains, as kernels over rows have it."""
        if x.op == "input":
            return _shaped(arrays[x.data], tuple(extents[y] for y in x.labels)), x.labels
        if x.op in ("sum", "most"):
            moved = operand(x.args[0], x.labels + x.data)
            return (moved.sum if x.op == "sum" else moved.max)(-1, keepdims=True), f"{x.labels}1"
        if x.op == "dot":
            return _product(x, [operand(y, y.labels, wide=False) for y in x.args], extents, mixed=mixed), x.labels
        if x.op in ("attention", "concat"):
            return _joined(x, value, extents), x.labels
        of = [value(y)[1] for y in x.args if y.labels]
        axes_ = x.labels + "1" * all(y.endswith("1") for y in of)
        values = (literal_type(y.data) if y.op == "const" else operand(y, axes_) for y in x.args)
        return _ARRAYS[x.op](*values), axes_

    ends = []
    for x, labels in zip(results, axes, strict=True):
        (array, own), shape = value(x), tuple(1 if y == "1" else extents[y] for y in labels)
        ends.append(array if own == labels else _shaped(_aligned(array, own, labels.replace("1", "")), shape))
    return ends


def _aligned(x: Any, axes: str, to: str) -> Any:
    """An array with other axes: in their order, with extent 1 for those that it lacks, as its last one may be."""
    if axes == to:
        return x
    labels = axes.rstrip("1")
    if axes != labels and to and to[-1] not in labels:
        order = [labels.index(y) for y in to if y in labels]
        if order != sorted(order):
            x = x.transpose(*order, len(labels))
        missing = tuple(slice(None) if y in labels else None for y in to[:-1])
        lead = next((i for i, y in enumerate(missing) if y is not None), len(missing))
        return x[missing[lead:]] if None in missing[lead:] else x
    if axes != labels:
        x = x.reshape(x.shape[:-1])
    return _moved(x, labels, to)


def _shaped(x: Any, shape: tuple[int, ...]) -> Any:
    return x if isinstance(x, float) or x.shape == shape else x.reshape(shape)


def _moved(x: Any, labels: str, to: str) -> Any:
    """An array with its dimensions in the order of other labels; with a dimension of extent 1 for one that it lacks."""
    order = [labels.index(y) for y in to if y in labels]
    if order != sorted(order):
        x = x.transpose(order)
    lead = len(to) - len(to.lstrip("".join(set(to) - set(labels))))
    index = tuple(slice(None) if y in labels else None for y in to[lead:])
    return x[index] if None in index else x


def _merged(x: Any, labels: str, groups: Sequence[str], extents: dict[str, int]) -> Any:
    """An array with a dimension for each group of labels."""
    x = _moved(x, labels, "".join(groups))
    return _shaped(x, tuple(int(np.prod([extents[y] for y in group], dtype=np.int64)) for group in groups))


def _float32(x: Any, axes: str, *, mixed: bool = True) -> tuple[Any, str]:
    """A value of float32, where types are mixed, and its axes."""
    return (x.astype(np.float32) if mixed and _narrow(x) else x), axes


def _joined(x: Term, value: Callable[[Term], tuple[Any, str]], extents: dict[str, int]) -> Any:
    """Attention, or a concatenation, of operands of one type; factors are of float32, or None."""
    values = [value(y) if y.labels else None for y in x.args]
    every = values[:3] if x.op == "attention" else values
    first = every if len({y[0].dtype for y in every if y}) == 1 else [y and _float32(*y) for y in every]
    both = zip([*first, *(y and _float32(*y) for y in values[len(every) :])], x.args, strict=True)
    arrays = [y and _aligned(*y, of.labels) for y, of in both]
    return (_attended if x.op == "attention" else _concatenated)(x, arrays, extents)


def _narrow(x: Any) -> bool:
    """Whether a value is an array of another type than float32."""
    return not isinstance(x, float) and bool(x.dtype != np.float32)


def _product(x: Term, arrays: list[Any], extents: dict[str, int], *, mixed: bool) -> Any:
    """A product as `@` of matrices, in which the dimensions of one operand alone are one; of float32, if `mixed`."""
    left, right = (y.labels for y in x.args)
    both = [y for y in left if y in right and y != x.data]
    rows, columns = ("".join(y for y in z if y not in w) for z, w in ((left, right), (right, left)))
    a, b = arrays
    a, b = _merged(a, left, [*both, rows, x.data], extents), _merged(b, right, [*both, x.data, columns], extents)
    if mixed and _narrow(a) and not _narrow(b):
        a = a.astype(np.float32)
    product = matmul(a, b, dtype=np.float32) if mixed and _narrow(a) else a @ b
    return _shaped(product, tuple(extents[y] for y in x.labels))


def _concatenated(x: Term, arrays: list[Any], _: dict[str, int]) -> Any:
    """Arrays one after the other, with their other dimensions in the order of the result's."""
    label, *parts = x.data
    each = zip(x.args, arrays, parts, strict=True)
    ordered = [_moved(array, y.labels, x.labels.replace(label, part)) for y, array, part in each]
    return np.concatenate(ordered, axis=x.labels.index(label))


def _attended(x: Term, arrays: list[Any], extents: dict[str, int]) -> Any:
    """A call of attention; with factors of queries, of keys and of values, of which some may be None."""
    from portmm.ops.attention import attention as attend
    from portmm.ops.attention_factors import attention_by_factors

    h: Heads = x.data
    (q, k, v), factors = _heads(x, arrays, extents), arrays[3:]
    if factors:
        each = zip(x.args[3:], factors, (h.queries, h.keys, h.keys), strict=True)
        rows, keys, values = (y if y is None else _merged(y, of.labels, [h.heads, row], extents) for of, y, row in each)
        result = attention_by_factors(q, k, v, (rows, keys, values), scale=h.scale)
    else:
        result = attend(q[None], k[None], v[None], scale=h.scale)
    return _shaped(result, tuple(extents[y] for y in x.labels))


def _heads(x: Term, arrays: list[Any], extents: dict[str, int]) -> list[Any]:
    """Queries, keys and values, of heads and rows."""
    h: Heads = x.data
    groups = ([h.heads + h.groups, h.queries, h.elements], [h.heads, h.keys, h.elements], [h.heads, h.keys, h.columns])
    return [_merged(y, of.labels, group, extents) for y, of, group in zip(arrays, x.args, groups, strict=False)]
