"""Grouped matmul: products of groups of rows, each with a matrix of its own (experts, ragged batches).

Owns `grouped_matmul`. In the host's memory each group is an ordinary product. An epilogue is traced once for all of
them: a group's kernel gets addresses of captured arrays at its first row and its item, and, where the function uses
row or group indices, both as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import libraries, numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.errors import BuildError
from portmm.ops import host_matmul, routes
from portmm.ops.epilogues import VALUES
from portmm.ops.fused_matmul import fit
from portmm.ops.int4_panels import PackedInt4, pack_int4, unpack_int4
from portmm.ops.prepack import current, is_packed, items
from portmm.ops.product_kernel import HostProduct, first_type, of_part, operand_b
from portmm.ops.rowwise import by_numpy
from portmm.runtime.cpu import runtime
from portmm.trace.bind import Bound, Step, UserFunction, dense
from portmm.trace.closures import resolve
from portmm.util.array_subclasses import refuse_class

if TYPE_CHECKING:
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]


def grouped_matmul(
    a: Any, b: Any, ends: Any, out: Any = None, *, dtype: Any = None, epilogue: Callable[..., Any] | None = None
) -> Any:
    """The products of groups of rows, each with a matrix of its own, as for tokens that are sorted by expert.

    Rows ends[g - 1] to ends[g] of the result are those of `a` times b[g]. Groups may be empty. Rows from the last
    end on are zeros, or the epilogue of zeros.

    On a device, `ends` is there as well and is read by the kernel, without synchronisation, and it may change from
    call to call, in a captured graph too. Kernels never access memory out of bounds, whatever its values: an end below
    the one before, or above the number of rows, is clamped. In the host's memory it is an error.

    Args:
        a: (rows, k), of the types that `matmul` takes.
        b: (groups, k, n), any strides; in the host's memory also such a batch from `pack`, or a list of weights of
            one shape (k, n) and type: arrays, packed, or quantized.
        ends: the row after the last of each group, in ascending order; int32 on a device.
        out: the array of the result; may overlap an input.
        dtype: type of the result, as in `matmul`.
        epilogue: a function (acc, i) of the sums, as in `matmul`, with i.b the group, for rows
            of no group the last one, and i.m the row among all. It has no reductions.

    Returns:
        The products, (rows, n); `out` if given; of several results of an epilogue, a tuple.

    Raises:
        TypeError: a dtype is not supported, or `ends` is not of integers.
        ValueError: shapes do not match, or ends in the host's memory are invalid.
        ScheduleError: the epilogue reduces.
        TraceError: the epilogue cannot be traced.
    """
    if where := libraries.place_of(a, ends, out, *(b if isinstance(b, (list, tuple)) else (b,))):
        from portmm.arrays.interop import elsewhere

        more = {"out": out, "dtype": dtype, "epilogue": epilogue}
        return elsewhere(where, grouped_matmul, _on_device, (a, b, ends), more)
    groups = _groups(a, b, ends)
    if epilogue is not None:
        requested = None if dtype is None else np.dtype(dtype)
        try:
            return _with_epilogue(groups, out, requested, epilogue)
        except BuildError as error:
            fall_back(error)
            return _by_numpy(groups, out, requested, epilogue)
    return _plain(groups, out, None if dtype is None else np.dtype(dtype))


def _on_device(a: Any, b: Any, ends: Any, **options: Any) -> Any:
    """The same for arrays on a device."""
    from portmm.ops import grid_product

    return grid_product.product(a, b, ends=ends, **options)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The operands of a call.

    Attributes:
        a: all rows.
        b: a matrix for each group.
        ends: of the groups.
    """

    a: Array
    b: list[Any]
    ends: list[int]

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, columns and k."""
        return self.a.shape[0], self.b[0].shape[1], self.a.shape[1]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """The first row, the end and the index of each group that is not empty."""
        begin = 0
        for i, end in enumerate(self.ends):
            if end > begin:
                yield begin, end, i
            begin = end

    @property
    def memory(self) -> list[Array]:
        """The operands that are arrays."""
        return [self.a, *(x for x in self.b if isinstance(x, np.ndarray))]


def _groups(a: Any, b: Any, ends: Any) -> _Groups:
    """The operands of a call."""
    left = numpy_arrays.as_operand(a, "a", matrix=False)
    if isinstance(b, (list, tuple)):
        weights = [operand_b(x) for x in b]
    elif hasattr(b, "family"):
        weights = items(current(b)) if is_packed(b) and len(b.shape) == 3 else []
    else:
        batch = numpy_arrays.as_operand(b, "b")
        weights = list(batch) if batch.ndim == 3 else []
    shapes = {tuple(x.shape) for x in weights}
    if left.ndim != 2 or len(shapes) != 1 or len(shape := shapes.pop()) != 2:
        shapes_of_b = [x.shape for x in b] if isinstance(b, (list, tuple)) else b.shape
        raise ValueError(f"a has shape {left.shape} and b {shapes_of_b}; groups take (rows, k) and (groups, k, n)")
    if left.shape[1] != shape[0]:
        shape_of_b = [*map(tuple, [x.shape for x in b])] if isinstance(b, (list, tuple)) else tuple(b.shape)
        raise ValueError(
            f"cannot multiply {left.shape} by {shape_of_b}: a has {left.shape[1]} columns, b has {shape[0]} rows"
        )
    return _Groups(left, weights, _ends(ends, len(weights), left.shape[0]))


def _ends(ends: Any, groups: int, rows: int) -> list[int]:
    """The ends of groups."""
    refuse_class(ends, "ends")
    values = np.asarray(ends)
    if values.dtype.kind not in "iu":
        raise TypeError(f"ends has dtype {values.dtype}; pass integers")
    if values.shape != (groups,):
        raise ValueError(f"ends has shape {values.shape}, b has {groups} matrices; there is one end for each group")
    last = 0
    for i, end in enumerate(map(int, values)):
        if not last <= end <= rows:
            raise ValueError(f"ends[{i}] is {end}; it is from {last}, where the group begins, to {rows}, the rows of a")
        last = end
    return [int(x) for x in values]


def _plain(x: _Groups, out: Any, dtype: np.dtype[Any] | None) -> Any:
    """The products without an epilogue."""
    (m, n, _), first = x.size, x.b[0]
    b_type = first.dtype if isinstance(first, np.ndarray) else getattr(getattr(first, "owner", None), "dtype", None)
    int4 = b_type is None or (not isinstance(first, np.ndarray) and not is_packed(first))
    usual = x.a.dtype.newbyteorder("=") if int4 else numpy_arrays.types_of(x.a.dtype, b_type)[2]  # type: ignore[arg-type]
    direct = out is not None and not any(np.may_share_memory(out, y) for y in x.memory)
    result = numpy_arrays.check_out(out, (m, n), usual) if direct else np.empty((m, n), dtype or usual)
    for begin, end, i in x.runs():
        host_matmul.product(x.a[begin:end], x.b[i], result[begin:end], dtype=dtype)
    result[x.ends[-1] :] = 0
    if out is None or direct:
        return result
    np.copyto(numpy_arrays.check_out(out, (m, n), usual), result, casting="same_kind")
    return out


# -- an epilogue -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ready:
    """The expressions of an epilogue, and its operands.

    Attributes:
        step: the expressions.
        bound: operands and results, at the first row and the first group.
        places: index of the first row and the group among the numbers of a call; -1 if they are not used.
    """

    step: Step
    bound: Bound
    places: int


def _with_epilogue(x: _Groups, out: Any, dtype: np.dtype[Any] | None, epilogue: Callable[..., Any]) -> Any:
    """The products with an epilogue."""
    host_matmul.begin()
    x = replace(x, b=_of_one_family(x.b))
    m, n, _ = x.size
    first = first_type(out, dtype)
    call = HostProduct(x.a, x.b[0], dtype, first)
    user_function = UserFunction(epilogue)
    b_kind = x.b[0].dtype if call.array else x.b[0].family
    key = ("groups", x.a.shape, x.a.dtype, len(x.b), n, b_kind, dtype, first)
    ready: _Ready = user_function.ready(key, lambda traced: _ready(traced, call, len(x.b)), VALUES, 3)
    results = [
        np.empty((m, n if "n" in axes else 1), t) for axes, t in zip(ready.step.axes, ready.step.types, strict=True)
    ]
    memory = [*x.memory, *(resolve(y.key, user_function.closure) for y in ready.bound.traced.sources)]
    if isinstance(out, np.ndarray) and out.shape == (m, n) and numpy_arrays.dense_at(out, results[0].dtype, *memory):
        results[0] = out
    operands = ready.bound.fill(user_function.closure, [], results[1:])
    for begin, end, i in [*x.runs(), (x.ends[-1], m, len(x.b))]:
        if end > begin and n:
            _run(x, (begin, end, i), call, ready, (results[0], *operands))
    return fit(results, out, several=ready.step.traced.several)


def _by_numpy(x: _Groups, out: Any, dtype: np.dtype[Any] | None, epilogue: Callable[..., Any]) -> Any:
    """The products with an epilogue, computed by NumPy."""
    m, n, _ = x.size
    first, call = first_type(out, dtype), HostProduct(x.a, x.b[0], dtype, None)
    sums = np.dtype(np.int32 if call.sums() == "s32" else np.float32)
    group = np.minimum(np.searchsorted(x.ends, np.arange(m), "right"), len(x.b) - 1)
    indices = SimpleNamespace(m=np.arange(m)[:, None], n=np.arange(n)[None, :], b=group[:, None])
    products = _plain(x, None, sums).astype(np.float32, copy=False)
    usual = call.types()[2] if first is None else first
    results, several = by_numpy(epilogue, (products,), {}, usual, indices)
    return fit(list(results), out, several=several)


def _of_one_family(weights: list[Any]) -> list[Any]:
    """Weights as one kernel reads them: int4 values have offsets in all panels or in none."""
    families = {getattr(w, "family", "") for w in weights}
    if len(families) == 1:
        return weights
    if all(isinstance(w, PackedInt4) for w in weights):
        weights = [pack_int4(unpack_int4(w), symmetric=False) for w in weights]
        families = {w.family for w in weights}
    if len(families) > 1:
        raise ValueError(f"weights of groups are packed as {', '.join(sorted(families))}: an epilogue needs one family")
    return weights


def _ready(traced: Traced, call: Any, groups: int) -> _Ready:
    """The expressions of an epilogue, and its operands."""
    step, places = call.step_of_part(traced, "mb")
    size = (call.m, call.n, groups)
    bound = Bound(traced, size, [], [(0, *dense(axes, size)[1:]) for axes in step.axes[1:]])
    return _Ready(replace(step, traced=bound.traced), bound, places)


def _run(x: _Groups, at: tuple[int, int, int], call: Any, ready: _Ready, arrays: tuple[Array, ...]) -> None:
    """Run the product of a group: its first row, its end, and its index, which past the last is that of no group."""
    (begin, end, group), (c, table, numbers, *operands) = at, arrays
    n, k, rows = c.shape[1], x.size[2], end - begin
    item = min(group, len(x.b) - 1)
    if group < len(x.b) and k:
        left, right = x.a[begin:end], x.b[group]
    else:
        zeros, k = np.zeros(max(rows, n), np.float32), 1
        left, right = zeros[:rows, np.newaxis], zeros[np.newaxis, :n]
    p, a, b = HostProduct(left, right, call.wanted, call.first).question(ready.step)
    is_array = isinstance(b, numpy_arrays.Operand)
    array, *steps = (b.array, b.row, b.col) if is_array else (b.owner, b.b_k, b.b_n)
    types = [y.dtype for y in ready.step.fused.operands]
    table, numbers = of_part(table, numbers, types, (item, begin, 0), (ready.places, (begin, item)))
    runtime().execute(
        routes.route(p), rows, n, k, 1, a.array, a.row, a.col, 0, array, *steps, 0, c[begin:end], n, 1, rows * n, None,
        table, numbers, *operands,
    )  # fmt: skip
