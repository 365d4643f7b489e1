"""Plans of einsums: notation, order of products, and the views in which each is a batch of matrix products.

Owns `planned`. A plan depends on shapes, strides and types only. Labels are numbers: 0 to 51 for A to Z and a to z, and
from 52 on the axes of an ellipsis, counted from the right. An axis of one element is in no step: an operand that
has it does not depend on its label, so that operands broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from portmm.arrays.numpy_arrays import FACTORS, name_of, types_of

Labels = tuple[int, ...]
ELLIPSIS = 52
"""The label of the last axis of an ellipsis."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
FEW = 32
"""Rows or columns of a matrix from which one product for each of several matrices is better than a copy of them."""


class Form(NamedTuple):
    """An operand: its shape, its strides in bytes, and its type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]


class View(NamedTuple):
    """A view of an operand: the order of its axes, then a shape, in which some are merged."""

    axes: tuple[int, ...]
    shape: tuple[int, ...]


class Step(NamedTuple):
    """A product of two operands, which leave the list of operands, to whose end its result goes.

    Attributes:
        first: the number of an operand, the left one of a product of matrices.
        second: of the other.
        labels: of both.
        a: the view of the first operand as matrices; None if NumPy multiplies.
        b: of the second.
        into: the view of the result, as matrices, if it is written straight to its place; else None.
        shape: of the result of matrices, with an axis for each label.
        result: labels of the result.
        dtype: of the result.
        wider: whether this is not the type that a product of the operands has.
    """

    first: int
    second: int
    labels: tuple[Labels, Labels]
    a: View | None
    b: View | None
    into: View | None
    shape: tuple[int, ...]
    result: Labels
    dtype: np.dtype[Any]
    wider: bool


class Plan(NamedTuple):
    """An einsum of several operands.

    Attributes:
        singles: of each operand, its labels, those of what is multiplied (without axes of one element, repetitions,
            and labels that are only there), and the type in which it is summed along the latter.
        steps: in order.
        order: the axes of the last result in the order of the output.
        shape: of the output.
        dtype: of the output.
    """

    singles: tuple[tuple[Labels, Labels, np.dtype[Any]], ...]
    steps: tuple[Step, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


# -- notation --------------------------------------------------------------------------


def parsed(subscripts: str, ndims: tuple[int, ...]) -> tuple[list[Labels], Labels]:
    """Labels of operands and of the output.

    Raises:
        ValueError: the subscripts are malformed, or do not fit the operands.
    """
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ndims):
        raise ValueError(f"subscripts {subscripts!r} are of {len(terms)} operands, and there are {len(ndims)}")
    labels = [_labels(term, ndim, subscripts) for term, ndim in zip(terms, ndims, strict=True)]
    dots = max((sum(i >= ELLIPSIS for i in x) for x in labels), default=0)
    every = [i for x in labels for i in x]
    if not arrow:
        once = sorted({i for i in every if i < ELLIPSIS and every.count(i) == 1})
        return labels, (*range(ELLIPSIS + dots - 1, ELLIPSIS - 1, -1), *once)
    if dots and "..." not in output:
        raise ValueError(f"the output of {subscripts!r} has no '...' for the axes that those of operands stand for")
    result = _labels(output, len(output.replace("...", "")) + dots, subscripts)
    for i in result:
        if result.count(i) > 1 or i not in every:
            why = "twice" if i in every else "and no operand has it"
            raise ValueError(f"the output of {subscripts!r} has {LETTERS[i]!r} {why}")
    return labels, result


def _labels(term: str, ndim: int, subscripts: str) -> Labels:
    head, dots, tail = term.partition("...")
    wrong = sorted({x for x in head + tail if x not in LETTERS})
    if wrong:
        raise ValueError(f"subscripts {subscripts!r} have {wrong[0]!r} in {term!r}; labels are letters, and one '...'")
    missing = ndim - len(head) - len(tail)
    if missing < 0 or (missing and not dots):
        raise ValueError(f"{term!r} of subscripts {subscripts!r} is of an operand of {ndim} axes")
    middle = range(ELLIPSIS + missing - 1, ELLIPSIS - 1, -1)
    return (*map(LETTERS.index, head), *middle, *map(LETTERS.index, tail))


def spelled(labels: list[Labels], output: Labels) -> str:
    """Subscripts of as few letters as there are labels."""
    names = dict(zip(sorted({i for x in labels for i in x}), LETTERS, strict=False))
    return "->".join((",".join("".join(names[i] for i in x) for x in labels), "".join(names[i] for i in output)))


def extents_of(labels: list[Labels], shapes: Sequence[tuple[int, ...]], subscripts: str) -> dict[int, int]:
    """The number of elements along each label of operands of these shapes.

    Raises:
        ValueError: axes of a label differ.
    """
    extents: dict[int, int] = {}
    for number, (x, shape) in enumerate(zip(labels, shapes, strict=True)):
        own: dict[int, int] = {}
        for i, n in zip(x, shape, strict=True):
            if own.setdefault(i, n) != n:
                raise ValueError(f"a label's axes in operand {number} of {subscripts!r} have {own[i]} and {n} elements")
        for i, n in own.items():
            known = extents.setdefault(i, n)
            if n not in (1, known) and known != 1:
                name = LETTERS[i] if i < ELLIPSIS else "..."
                raise ValueError(f"{name!r} of {subscripts!r} has {known} elements, and {n} in operand {number}")
            extents[i] = n if known == 1 else known
    return extents


# -- the order of products -------------------------------------------------------------


def order_of(labels: list[Labels], output: Labels, extents: dict[int, int], optimize: Any) -> Sequence[tuple[int, ...]]:
    """Numbers of operands that leave the list in each step; opt_einsum's where it is installed, else NumPy's."""
    if isinstance(optimize, tuple):
        return optimize
    if len(labels) == 2 or optimize is False:
        return [(0, 1)] + [(0, n) for n in range(len(labels) - 2, 0, -1)]
    equation, shapes = spelled(labels, output), [tuple(extents[i] for i in x) for x in labels]
    how = optimize if isinstance(optimize, str) else None
    try:
        from opt_einsum import contract_path
    except ImportError:
        empty = [np.broadcast_to(np.float32(0), x) for x in shapes]  # of any size in four bytes
        path = np.einsum_path(equation, *empty, optimize=(how or "greedy", 2**62))[0][1:]
        return [tuple(x) for x in path]
    return [tuple(x) for x in contract_path(equation, *shapes, shapes=True, optimize=how or "auto")[0]]


def pairs_of(path: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, int]]:
    """Steps of two operands each, of a path whose steps may have more or fewer.

    Raises:
        ValueError: it does not multiply all operands.
    """
    pairs = []
    left = count
    for step in path:
        numbers = sorted({n % left for n in step if -left <= n < left}, reverse=True)
        if len(numbers) != len(step):
            raise ValueError(f"step {step} of the path is not of {left} operands")
        for i, n in enumerate(numbers[1:]):
            # A product is appended to the operands; those before the removed ones keep their positions.
            pairs.append((n, numbers[0] if i == 0 else left - 1))
            left -= 1
    if left != 1:
        raise ValueError(f"the path leaves {left} operands")
    return pairs


# -- products of matrices --------------------------------------------------------------


def _by_stride(labels: list[int], strides: dict[int, int]) -> list[int]:
    return sorted(labels, key=lambda i: -abs(strides[i]))


def _runs(labels: list[int], strides: dict[int, int], extents: dict[int, int]) -> list[list[int]]:
    """Labels in order, in groups that are one axis of memory each."""
    runs: list[list[int]] = []
    for i in labels:
        if runs and strides[runs[-1][-1]] == extents[i] * strides[i]:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _strides(labels: Labels, form: Form) -> dict[int, int]:
    return dict(zip(labels, form.strides, strict=True))


class _Pair:
    """Two operands and the place of their product, of which `step` makes a product of matrices."""

    def __init__(self, x: tuple[Labels, Form], y: tuple[Labels, Form], kept: set[int], extents: dict[int, int]) -> None:
        self.x, self.y, self.extents = x, y, extents
        both = [i for i in x[0] if i in y[0]]
        self.batch, self.summed = [i for i in both if i in kept], [i for i in both if i not in kept]

    def rows(self, operand: tuple[Labels, Form], place: dict[int, int]) -> tuple[list[int], list[int]]:
        """Labels of one operand only: those of its matrices, and others, for each of which there is a matrix."""
        own = [i for i in operand[0] if i not in self.batch and i not in self.summed]
        strides = _strides(*operand)
        for order in (_by_stride(own, place), _by_stride(own, strides)) if place else (_by_stride(own, strides),):
            if len(_runs(order, strides, self.extents)) <= 1:
                return order, []
        runs = _runs(order, strides, self.extents)
        largest = max(runs, key=self.size)
        if self.size(largest) < FEW:
            return (_by_stride(own, place) if place else order), []
        return largest, [i for i in order if i not in largest]

    def size(self, labels: list[int]) -> int:
        """The product of extents."""
        return math.prod([self.extents[i] for i in labels])

    def sums(self) -> list[int]:
        """The order of labels that are summed for which fewer bytes are copied."""

        def copied(order: list[int]) -> int:
            return sum(
                math.prod(form.shape) * form.dtype.itemsize
                for labels, form in (self.x, self.y)
                if len(_runs(order, _strides(labels, form), self.extents)) > 1
            )

        return min((_by_stride(self.summed, _strides(*operand)) for operand in (self.x, self.y)), key=copied)

    def views(self, place: tuple[Labels, Form] | None) -> tuple[View, View, View | None, tuple[int, ...], Labels]:
        """Views of both operands, of the place of the result or None, and the result's shape and labels."""
        wanted = _strides(*place) if place else {}
        (m, outer_m), (n, outer_n) = self.rows(self.x, wanted), self.rows(self.y, wanted)
        larger = max(self.x, self.y, key=lambda operand: math.prod(operand[1].shape))
        batch, k = _by_stride(self.batch, _strides(*larger)), self.sums()
        outer = [*batch, *outer_m, *outer_n]
        a, b = self.view(self.x[0], outer, m, k), self.view(self.y[0], outer, k, n)
        result = (*outer, *m, *n)
        into = None
        if place and all(len(_runs(i, wanted, self.extents)) <= 1 for i in (m, n)):
            lasts = [abs(wanted[i[-1]]) for i in (m, n) if i]
            if not lasts or place[1].dtype.itemsize in lasts:
                into = self.view(place[0], outer, m, n)
        return a, b, into, tuple([self.extents[i] for i in result]), result

    def view(self, labels: Labels, outer: list[int], rows: list[int], columns: list[int]) -> View:
        """The view of an array as matrices."""
        axes = [labels.index(i) for i in (*outer, *rows, *columns) if i in labels]
        shape = [self.extents[i] if i in labels else 1 for i in outer]
        return View(tuple(axes), (*shape, self.size(rows), self.size(columns)))


def _natural(a: np.dtype[Any], b: np.dtype[Any]) -> tuple[np.dtype[Any], bool, bool]:
    """The type of a product, whether kernels multiply these types, and whether only with operands exchanged."""
    if name_of(a) in FACTORS and name_of(b) in FACTORS:
        for x, y in ((a, b), (b, a)):
            try:
                return types_of(x, y)[2], True, (x, y) != (a, b)
            except TypeError:
                continue
    both = np.result_type(a, b)
    return np.dtype(np.int32) if both.kind in "iu" and both.itemsize == 1 else both, False, False


def type_of_product(types: list[np.dtype[Any]]) -> np.dtype[Any]:
    """The type of the products of operands: integers of eight bits are summed in int32 unless one is a float."""
    kinds = sorted(dict.fromkeys(types), key=lambda x: x.kind in "biu")
    return reduce(lambda a, b: _natural(a, b)[0], kinds) if len(kinds) > 1 else _natural(kinds[0], kinds[0])[0]


def _contiguous(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Form:
    strides = [dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return Form(shape, tuple(strides), dtype)


def _step(
    pair: tuple[int, int],
    operands: list[tuple[Labels, Form]],
    kept: set[int],
    extents: dict[int, int],
    *,
    place: tuple[Labels, Form] | None,
    dtype: np.dtype[Any],
) -> Step:
    first, second = pair
    x, y = operands[first], operands[second]
    natural, has_kernel, exchanged = _natural(x[1].dtype, y[1].dtype)
    if not np.can_cast(natural, dtype, casting="same_kind"):
        raise TypeError(f"dtype is {dtype}, which cannot hold {natural} results")
    summed = [i for i in x[0] if i in y[0] and i not in kept]
    own = [[i for i in z if i not in w] for z, w in ((x[0], y[0]), (y[0], x[0]))]
    items = [i for i in x[0] if i in y[0] and i in kept]
    matrices = (all(own) and not items) or (summed and (any(own) or not items))  # an outer product is one of k = 1
    if not (has_kernel and matrices):
        order = tuple(dict.fromkeys([i for i in (*(place[0] if place else ()), *x[0], *y[0]) if i in kept]))
        shape = tuple([extents[i] for i in order])
        return Step(first, second, (x[0], y[0]), None, None, None, shape, order, dtype, dtype != natural)
    if exchanged or (natural.kind == "f" and place and place[0] and place[0][-1] in own[0]):
        first, second, x, y = second, first, y, x
    a, b, into, shape, result = _Pair(x, y, kept, extents).views(place)
    return Step(first, second, (x[0], y[0]), a, b, into, shape, result, dtype, dtype != natural)


def planned(subscripts: str, forms: tuple[Form, ...], out: Form | None, dtype: Any, optimize: Any) -> Plan:
    """The plan of an einsum of two or more operands.

    Args:
        subscripts: NumPy's.
        forms: of the operands.
        out: of the array of the result.
        dtype: of the result, or None for that of the products.
        optimize: the order of products, as for `numpy.einsum`.

    Raises:
        ValueError: subscripts do not fit the operands, an order is invalid, or `out` has another shape.
        TypeError: `dtype` cannot hold the result.
    """
    labels, output = parsed(subscripts, tuple([len(x.shape) for x in forms]))
    extents = extents_of(labels, [x.shape for x in forms], subscripts)
    if len(extents) > len(LETTERS):
        raise ValueError(f"operands have {len(extents)} axes of different labels; at most {len(LETTERS)} are supported")
    shape, wanted = tuple([extents[i] for i in output]), tuple([i for i in output if extents[i] != 1])
    if out and out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the result has shape {shape}")
    singles, operands = [], []
    dtype = dtype or type_of_product([form.dtype for form in forms])
    long = [[i for i, n in zip(x, form.shape, strict=True) if n != 1] for x, form in zip(labels, forms, strict=True)]
    for number, (x, form) in enumerate(zip(labels, forms, strict=True)):
        others = {i for j, y in enumerate(long) if j != number for i in y} | set(output)
        once = tuple([i for i in dict.fromkeys(long[number]) if i in others])
        narrow = form.dtype.kind in "iu" and form.dtype.itemsize == 1
        sums = dtype if narrow or np.can_cast(form.dtype, dtype, "safe") else form.dtype
        singles.append((x, once, sums))
        operands.append((once, _single(x, once, form, sums)))
    steps: list[Step] = []
    path = order_of([x for x, _ in operands], wanted, extents, optimize)
    for pair in pairs_of(path, len(operands)):
        rest = [x for i, x in enumerate(operands) if i not in pair]
        kept = {i for x, _ in rest for i in x} | set(wanted)
        place = None
        if not rest:
            form = out or _contiguous(shape, dtype)
            place = wanted, Form(*_squeezed(form, shape), form.dtype)
        step = _step(pair, operands, kept, extents, place=place, dtype=dtype)
        steps.append(step)
        operands = [*rest, (step.result, _contiguous(step.shape, step.dtype))]
    last = operands[0]
    return Plan(tuple(singles), tuple(steps), tuple([last[0].index(i) for i in wanted]), shape, last[1].dtype)


def _squeezed(form: Form, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides without axes of one element."""
    long = [i for i, n in enumerate(shape) if n != 1]
    return tuple([shape[i] for i in long]), tuple([form.strides[i] for i in long])


def _single(labels: Labels, once: Labels, form: Form, sums: np.dtype[Any]) -> Form:
    """The form of an operand of which each label is there once: a view, or new sums."""
    shape = tuple([form.shape[labels.index(i)] for i in once])
    if any(n != 1 and i not in once for i, n in zip(labels, form.shape, strict=True)):
        return _contiguous(shape, sums)
    strides = [sum(s for j, s in zip(labels, form.strides, strict=True) if j == i) for i in once]
    return Form(shape, tuple(strides), form.dtype)
