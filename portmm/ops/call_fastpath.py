"""The fast path of calls with an epilogue, whose kind is in a memo.

Owns `FastPath`, all that such a call needs but addresses, and `see`, which computes the key of its kind with
little work: after a kernel has streamed through megabytes, every object that a call
touches is a cache miss. All M of a class are one kind, where nothing else depends on M. Functions that capture
arrays, floats and modules are handled here; others, and operands that must be converted
first, take the general path each time.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays.numpy_arrays import name_of
from portmm.dispatch import config
from portmm.runtime.cpu import runtime
from portmm.runtime.cpu import types as types_of_runtime
from portmm.spec.problem import AXES
from portmm.spec.row_classes import last_of_class, row_class
from portmm.trace.closures import compares_identities, global_names, numbers_of, resolve
from portmm.trace.closures import fixed as is_fixed
from portmm.trace.guards import place
from portmm.util.memo import Memory, cached
from portmm.util.records import dataclass, replace

if TYPE_CHECKING:
    from portmm.ops.convolution_kernel import ConvolutionKernel
    from portmm.ops.product_kernel import ProductKernel
    from portmm.trace.bind import Bound
    from portmm.trace.recorder import Source

    Shapes = Sequence[tuple[int, ...]]

Array = np.ndarray[Any, Any]
MOST = 1024
"""Kinds of calls remembered before the memo is emptied."""
_PLAIN = (int, bool, str, type(None))


class Seen(NamedTuple):
    """A call, reduced to the properties that its kind depends on.

    Attributes:
        key: its kind, the same for all M of a class.
        rows: M, if the operands are matrices, or 0.
        operands: A, B or its panels, `out`, if there is one, and the arrays that the function captures.
        numbers: the floats that it captures.
        places: the keys of the arrays and floats, as in `trace`.
    """

    key: Any
    rows: int
    operands: list[Array]
    numbers: list[float]
    places: list[Any]


def see(function: Any, left: Array, right: Any, out: Any, dtype: Any) -> Seen | None:
    """The kind of a call; None if the call needs the general path."""
    if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    try:
        captured = _captured(function)
    except ValueError:  # an empty cell
        return None
    packed = getattr(right, "owner", None)
    operands, numbers, arrays_at, numbers_at = [left, right if packed is None else packed], [], [], []
    fixed: list[Any] = []
    if out is not None:
        operands.append(out)
    for key_of, x in captured:
        kind = type(x)
        if kind is np.ndarray and x.ndim:
            operands.append(x)
            arrays_at.append(key_of)
        elif kind is float:
            numbers.append(x)
            numbers_at.append(key_of)
        elif kind in _PLAIN:
            fixed.append((key_of, kind, x))
        elif is_fixed(x):
            fixed.append((key_of, x))
        else:
            return None
    rows = left.shape[0] if left.ndim == len(right.shape) == 2 else 0
    described = types_of_runtime().describe(tuple(operands), rows)
    if described is None:
        return None
    weight = None if packed is None else (right.family, right.shape)
    places = (tuple(arrays_at), tuple(numbers_at), tuple(fixed))
    key = (function.__code__, described, places, weight, out is None, dtype, config.current())
    return Seen(key, rows, operands, numbers, [*arrays_at, *numbers_at])


def _captured(function: types.FunctionType) -> list[tuple[tuple[str], Any]]:
    """The values that a function captures, by their keys."""
    namespace, (cells, names) = function.__globals__, _keys(function.__code__)
    values = [(cells[i], x.cell_contents) for i, x in enumerate(function.__closure__ or ())]
    return values + [(key, namespace[n]) for n, key in names if n in namespace]


@cached("calls", 1024)
def _keys(code: types.CodeType) -> tuple[list[tuple[str]], list[tuple[str, tuple[str]]]]:
    """The keys of captured values, as in `trace`: of cells, and by the names of globals."""
    cells = [(place("f", cell=i),) for i in range(len(code.co_freevars))]
    return cells, [(n, (place("f", name=n),)) for n in global_names(code)]


@dataclass(frozen=True, slots=True)
class FastPath:
    """The kernel of one kind of call, and its arguments.

    Attributes:
        route: the kernel.
        sizes: M, N, K and items of a batch; an M of 0 stands for that of the call.
        middle: the arguments of `execute` between the addresses of A, B and C.
        after: those after C, up to the operands.
        template: the operands' table without addresses.
        sources: for each operand that is read, its index among the operands of `Seen`.
        numbers: for each number that the kernel takes, its index among the numbers of `Seen`, or the key of one that
            is computed from these.
        results: shapes, with M where there is one, and types.
        several: the function returns a tuple.
        repeats: the runtime repeats such calls by itself; it needs each of the kinds that are one here.
    """

    route: Any
    sizes: tuple[int, int, int, int]
    middle: tuple[tuple[int, ...], tuple[int, ...]]
    after: tuple[Any, ...]
    template: Array
    sources: tuple[int, ...]
    numbers: tuple[Any, ...]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    several: bool
    repeats: bool = False

    def hand_on(self, call: tuple[Any, ...], *, by_class: bool) -> bool:
        """Let the runtime repeat calls as this one by itself; False if a number is computed from those captured."""
        if not all(type(x) is int for x in self.numbers):
            return False
        function, *rest = call
        numbers = (*self.sizes, *self.middle[0], *self.middle[1], *self.after[:3])
        results = tuple([(shape, name_of(dtype)) for shape, dtype in self.results])
        names = tuple(global_names(function.__code__))
        return runtime().keep_call(
            (function, *rest, config.current()), names, self.route, numbers, self.template, self.sources, self.numbers,
            results, self.several, by_class,
        )  # fmt: skip

    def __call__(self, seen: Seen, out: Any) -> Any:
        """The results of a call."""
        operands = seen.operands
        (m, n, k, batch), results = self.sizes, self.results
        if not m:
            m = seen.rows
            results = tuple([((m, *s[1:]), t) for s, t in results])
        first = np.empty(*results[0]) if out is None else out
        rest = [np.empty(s, t) for s, t in results[1:]] if self.several else []
        numbers = np.array([_number(x, seen) for x in self.numbers], np.float32) if self.numbers else None
        a, b = self.middle
        runtime().execute(
            self.route, m, n, k, batch, operands[0], *a, operands[1], *b, first, *self.after, self.template, numbers,
            *[operands[i] for i in self.sources], *rest,
        )  # fmt: skip
        return (first, *rest) if self.several else first


def _number(x: Any, seen: Seen) -> Any:
    """A number of a call, by its index or by the key of what computes it."""
    if type(x) is int:
        return seen.numbers[x]
    return resolve(x, dict(zip(seen.places[-len(seen.numbers) :], seen.numbers, strict=True)))


_known = Memory(MOST, "calls")


def known(seen: Seen, out: Any) -> FastPath | None:
    """The fast path of a kind of call, if `out` overlaps nothing that is read."""
    fast_path: FastPath | None = _known.get(seen.key) or _known.get((seen.key, seen.rows))
    if fast_path is not None and out is not None:
        if not out.flags.writeable:
            return None
        rest = seen.operands[:2] + seen.operands[3:]
        if any([np.may_share_memory(out, x) for x in rest]):  # noqa: C419 - faster
            return None
    return fast_path


def keep(seen: Seen, kernel: ProductKernel, skip: int, call: tuple[Any, ...]) -> None:
    """Remember a kind of call, if each operand and number is used without conversion.

    Args:
        seen: the call.
        kernel: of the product with its epilogue.
        skip: operands seen that the function does not capture.
        call: the function, A, B, out and the type of the result as the user passed them.
    """
    bound, (m, n, batch) = kernel.bound, kernel.size
    traced, places, arrays_at = bound.traced, _places(seen, bound, skip), _arrays_at(seen, skip)
    if places is None:
        return
    by_class = kernel.shared and not traced.by_extents and _by_class(seen, traced.sources, arrays_at, skip)
    several = by_class and last_of_class(m) != row_class(m)[0]
    fast_path = FastPath(
        kernel.route, (0 if several else m, n, seen.operands[0].shape[-1], batch),
        (kernel.strides[:3], kernel.strides[3:]), (n, 1, m * n, None), bound.template, *places,
        kernel.results, kernel.several,
    )  # fmt: skip
    fast_path = replace(fast_path, repeats=fast_path.hand_on(call, by_class=by_class))
    _known.keep(seen.key if by_class else (seen.key, seen.rows), fast_path)


def keep_item(call: tuple[Any, ...], kernel: ConvolutionKernel, strides: tuple[int, int], shapes: Shapes) -> bool:
    """Let the runtime repeat a convolution that is one product by itself; False if it cannot.

    Args:
        call: the function, A, B, out, and an object that is the same in all calls of this kind, and in no others.
        kernel: of the convolution.
        strides: of rows and items of the first result, in elements.
        shapes: of the results, in the layout of the images.
    """
    function, left, right, out, _ = call
    bound, seen = kernel.bound, see(function, left, right, out, None)
    if seen is None:
        return False
    places = ((), ()) if bound is None else _places(seen, bound, 2 + (out is not None))
    if places is None:
        return False
    template = np.zeros((1, 1 + len(AXES)), np.int64) if bound is None else bound.template
    results, (row, item) = tuple(zip(shapes, [t for _, t in kernel.results], strict=True)), strides
    fast_path = FastPath(
        kernel.route, kernel.size, (kernel.strides[:3], kernel.strides[3:]), (row, 1, item, None), template, *places,
        results, kernel.several,
    )  # fmt: skip
    return fast_path.hand_on(call, by_class=True)


def _arrays_at(seen: Seen, skip: int) -> dict[Any, int]:
    """The index among the operands of a call of each captured array, by its key."""
    return {place: i + skip for i, place in enumerate(seen.places[: len(seen.operands) - skip])}


def _places(seen: Seen, bound: Bound, skip: int) -> tuple[tuple[int, ...], tuple[Any, ...]] | None:
    """`sources` and `numbers` of a fast path; None where an operand or a number is not used as it is captured."""
    traced, arrays_at = bound.traced, _arrays_at(seen, skip)
    numbers_at = {place: i for i, place in enumerate(seen.places[len(arrays_at) :])}
    sources, numbers = [x.key for x in traced.sources], list(traced.numbers)
    bases = {base for x in numbers for base in numbers_of(x)}
    captured = seen.operands[skip:]
    if compares_identities(seen.key[0]) or len({id(x) for x in captured}) < len(captured):
        return None  # the kernel depends on which arrays are the same
    if bound.converts or not set(sources) <= arrays_at.keys() or not bases <= numbers_at.keys():
        return None
    if seen.numbers and not numbers:
        return None  # the function's control flow depends on them
    return tuple([arrays_at[x] for x in sources]), tuple([numbers_at.get(x, x) for x in numbers])


def _by_class(seen: Seen, sources: Sequence[Source], arrays_at: dict[Any, int], skip: int) -> bool:
    """Whether the kernel of a call serves each M of its class.

    No extent but those along M may equal M, and longer arrays must be long enough for all M.
    """
    last = row_class(seen.rows)[1]
    along = {(0, 0), (2, 0)} if skip > 2 else {(0, 0)}
    for source in sources:
        at = arrays_at[source.key]
        for axis, name in enumerate(source.view):
            if name == "m":
                along.add((at, axis))
                length = seen.operands[at].shape[axis]
                if length != seen.rows and (source.exact or length < last):
                    return False
    extents = ((i, axis, n) for i, x in enumerate(seen.operands) for axis, n in enumerate(x.shape))
    return all(n != seen.rows or (i, axis) in along for i, axis, n in extents)
