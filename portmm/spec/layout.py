"""Layout of an array: from a coordinate to the offset of an element.

Owns `Layout`; `layouts` has the usual ones. An array in memory has a shape and strides; transforms are views on
top of it (`layout_transforms`), so that transposes, panels, gaps, ragged edges and the windows of a convolution are
coordinates of one array. The composition is one sum of the coordinate, simplified (`layout_index`), which kernels
compute with index expressions and NumPy with arrays. Sizes and strides are integers, names, or sums of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.spec import layout_transforms as views
from portmm.spec.layout_index import ZERO, Leaf, Sum, as_sum, bounds, coordinate, divisor, evaluate, is_positive, leaves
from portmm.spec.layout_transforms import is_less, moves, total
from portmm.util import locks
from portmm.util.records import dataclass, replace

if TYPE_CHECKING:
    from portmm.spec.layout_index import Size
    from portmm.spec.layout_transforms import Array, Transform, Values

    Names = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Position:
    """A coordinate with all indices below it, to be moved.

    Attributes:
        levels: the coordinate, and the index below each transform in the order in which they apply.
        linear: offset before the swizzle.
        offset: of the element.
    """

    levels: tuple[Values, ...]
    linear: Any
    offset: Any


@dataclass(frozen=True)
class Layout:
    """Map from a coordinate to the offset of an element.

    Attributes:
        shape: extents of the array in memory.
        stride: of its axes, in elements; by default those of rows without gaps.
        swizzle: bits, base and shift: bits [base, base + bits) of an offset are xored with those `shift` further up.
        transforms: views, each on top of those before.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...] = ()
    swizzle: tuple[int, int, int] | None = None
    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        shape = _sums(self.shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", _sums(self.stride) if self.stride or not shape else _dense(shape))
        if len(self.shape) != len(self.stride):
            raise ValueError(
                f"a layout of {len(self.shape)} axes has {len(self.stride)} strides; use one for each axis"
            )

    # -- views -------------------------------------------------------------------

    @locks.once
    def extents(self) -> tuple[Sum, ...]:
        """Extents of the coordinate."""
        extents = self.shape
        for x in self.transforms:
            extents = x.extents(extents)
        return extents

    def _view(self, transform: Transform) -> Layout:
        return replace(self, transforms=(*self.transforms, transform))

    def pad(self, axis: int, before: Size = 0, after: Size = 0) -> Layout:
        """An axis with padding, which is zero."""
        return self._view(views.Pad(axis, as_sum(before), as_sum(after)))

    def pad_to(self, axis: int, multiple: Size) -> Layout:
        """An axis padded at its end to a multiple of a size."""
        extent, each = self.extents[axis], as_sum(multiple)
        return self.pad(axis, 0, (extent + each - 1) // each * each - extent)

    def embed(self, axis: int, shape: Iterable[Size], stride: Iterable[Size], begin: Size = 0) -> Layout:
        """An axis as an affine function of others: the windows of a convolution, a view with gaps."""
        return self._view(views.Embed(axis, _sums(shape), _sums(stride), as_sum(begin)))

    def unmerge(self, axis: int, *shape: Size | None) -> Layout:
        """An axis as several, the last of them fastest; the extent None follows from the others."""
        sizes = [None if x is None else as_sum(x) for x in shape]
        whole = self.extents[axis]
        for x in sizes:
            whole = whole if x is None else whole // x
        sums = tuple(whole if x is None else x for x in sizes)
        return self._view(views.Embed(axis, sums, _dense(sums), ZERO))

    def slice(self, axis: int, begin: Size, count: Size, step: Size = 1) -> Layout:
        """Some indices of an axis."""
        return self.embed(axis, (count,), (step,), begin)

    def freeze(self, axis: int, index: Size) -> Layout:
        """The array at one index of an axis, without that axis."""
        return self.embed(axis, (), (), index)

    def merge(self, axis: int, count: int) -> Layout:
        """Neighbouring axes as one, the last of them fastest."""
        return self._view(views.Merge(axis, self.extents[axis : axis + count]))

    def broadcast(self, axis: int, extent: Size) -> Layout:
        """An additional axis on which elements do not depend."""
        return self._view(views.Broadcast(axis, as_sum(extent)))

    def permute(self, *order: int) -> Layout:
        """Axes in another order."""
        return self._view(views.Permute(order))

    def xor(self, axis: int, by: int, divide: int = 1, modulo: int = 8, times: int = 1) -> Layout:
        """An axis whose index is xored with bits of another's: see `Xor`."""
        return self._view(views.Xor(axis, by, divide, modulo, times))

    def compose(self, inner: Layout) -> Layout:
        """The layout whose offsets are this one's of the offsets of `inner`, which this one has as its coordinate.

        Raises:
            ValueError: this layout has several axes, or `inner` has a swizzle.
        """
        if len(self.extents) != 1 or inner.swizzle:
            raise ValueError("only a layout of one axis is composed with another, without a swizzle: merge the axes")
        return replace(self, transforms=(*self.embed(0, inner.shape, inner.stride).transforms, *inner.transforms))

    def bind(self, **sizes: Size) -> Layout:
        """The layout with names replaced by sizes."""
        return _bound(self, {x: as_sum(y) for x, y in sizes.items()})

    # -- offsets -----------------------------------------------------------------

    @locks.once
    def _levels(self) -> tuple[tuple[Sum, ...], ...]:
        """The coordinate and the index below each transform, as sums of the coordinate."""
        levels = [tuple(coordinate(f"i{i}", x) for i, x in enumerate(self.extents))]
        for x in reversed(self.transforms):
            levels.append(x.down(levels[-1]))
        return tuple(levels)

    @locks.once
    def form(self) -> Sum:
        """The offset as a sum of the coordinate, simplified."""
        return as_sum(self._swizzled(sum(map(mul, self._levels[-1], self.stride), ZERO)))

    @locks.once
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions under which an element is in no padding, those that always hold omitted."""
        extents, needed, last = self.shape, [], len(self.transforms)
        for i, (x, index) in enumerate(zip(self.transforms, reversed(self._levels[1:]), strict=True)):
            if isinstance(x, views.Pad):
                needed.append(_condition(index[x.axis], extents[x.axis], (last - i, x.axis)))
            extents = x.extents(extents)
        return tuple(dict.fromkeys(x for x in reversed(needed) if x.least is not None or x.end is not None))

    def _swizzled(self, offset: Any) -> Any:
        if not self.swizzle:
            return offset
        bits, base, shift = self.swizzle
        return offset ^ offset // (1 << base + shift) % (1 << bits) * (1 << base)

    def offset(self, index: Sequence[Any], names: Names = as_sum) -> Any:
        """Offset of an element, computed with the operators of the indices and of the sizes; in padding, of none."""
        return _value(self.form, index, names)

    def valid(self, index: Sequence[Any], names: Names = as_sum) -> Any:
        """1 where an element is in no padding, else 0."""
        result: Any = None
        for x in self.conditions:
            at = _value(x.index, index, names)
            least = [] if x.least is None else [1 - is_less(at, _value(x.least, index, names))]
            end = [] if x.end is None else [is_less(at, _value(x.end, index, names))]
            for test in (*least, *end):
                result = test if result is None else result * test
        return 1 if result is None else result

    def indices(self, index: Sequence[Any], names: Names = as_sum) -> list[Any]:
        """Index of each condition at a coordinate."""
        return [_value(x.index, index, names) for x in self.conditions]

    # -- movement ----------------------------------------------------------------

    def step(self, axis: int, delta: int) -> Sum | None:
        """Constant change of offsets by a change of one index, a sum of sizes; None if it depends on the coordinate."""
        if delta <= 0:
            back = self.step(axis, -delta) if delta else ZERO
            return None if back is None else -back
        index = list(self._levels[0])
        before = coordinate("moved", self.extents[axis] - delta)
        index[axis] = before + delta
        after = self.offset(index)
        index[axis] = before
        change = as_sum(after) - self.offset(index)
        return None if any(x.extent is not None for x in leaves(change)) else change

    def start(self, index: Sequence[Any], names: Names = as_sum) -> Position:
        """A coordinate and the indices below it, for `move`."""
        levels = tuple(tuple(_value(x, index, names) for x in level) for level in self._levels)
        strides = [_value(x, (), names) for x in self.stride]
        linear = total([x * s for x, s in zip(levels[-1], strides, strict=True)])
        return Position(levels, linear, self._swizzled(linear))

    def move(self, position: Position, axis: int, delta: Any, names: Names = as_sum) -> Position:
        """A position moved along one axis: additions of constants, comparisons for carries, and xors."""
        changes: Values = tuple(delta if i == axis else 0 for i in range(len(self.extents)))
        levels = [_moved(position.levels[0], changes)]
        for x, below in zip(reversed(self.transforms), position.levels[1:], strict=True):
            changes = x.move(views.Move(changes, levels[-1], below, lambda size: _value(size, (), names)))
            levels.append(_moved(below, changes))
        terms = [x * _value(s, (), names) for x, s in zip(changes, self.stride, strict=True) if moves(x)]
        linear = position.linear + total(terms)
        return Position(tuple(levels), linear, self._swizzled(linear))

    def padded(self, position: Position) -> list[Any]:
        """Index of each condition at a position."""
        return [position.levels[x.place[0]][x.place[1]] - x.before for x in self.conditions]

    def vector(self, axis: int, most: int, multiples: Mapping[str, int] | None = None) -> int:
        """Safe vector length along an axis: a power of two, up to `most`.

        So many neighbours, from an index that is a multiple of it, lie at successive offsets of which the first is a
        multiple of it, and are all in padding or all not. `multiples` are known divisors of sizes.
        """
        layout = self.bind(**{x: as_sum(x) * n for x, n in (multiples or {}).items()})
        lengths = [1 << x for x in range(most.bit_length())]
        return max(x for x in lengths if x == 1 or layout._moves_whole(axis, x))  # noqa: SLF001 - its own class

    def _moves_whole(self, axis: int, length: int) -> bool:
        within = coordinate("within", length)
        if divisor(self.extents[axis]) < length:
            return False
        index = list(self._levels[0])
        index[axis] = coordinate("vector", self.extents[axis] // length) * length + within

        def is_whole(x: Sum) -> bool:
            return divisor(x) >= length and Leaf("within", as_sum(length)) not in leaves(x)

        checks = [is_whole(as_sum(self.offset(index)) - within)]
        for x in self.conditions:
            at = as_sum(_value(x.index, index, as_sum))
            ends = [y for y in (x.least, x.end) if y is not None]
            still = Leaf("within", as_sum(length)) not in leaves(at)
            checks.append(still or (is_whole(at - within) and all(divisor(y) >= length for y in ends)))
        return all(checks)

    # -- meaning -----------------------------------------------------------------

    def offsets(self) -> Array:
        """Offsets of all elements, in an array of the extents."""
        extents = tuple(int(x) for x in self.extents)
        return np.broadcast_to(self.offset(np.indices(extents, sparse=True)), extents)

    def gather(self, array: Array) -> Array:
        """The elements of an array at all coordinates, zeros in padding; it may share the array's memory.

        Args:
            array: of this layout's shape, whatever its strides; or the memory, of one dimension, which is taken to
                continue with zeros.

        Raises:
            ValueError: names are not bound, or a view exceeds the array.
        """
        shape = tuple(int(x) for x in self.shape)
        view = array if array.ndim == len(shape) > 1 else self._in_memory(array, shape)
        if view.shape != shape:
            raise ValueError(f"the array has shape {array.shape}, the layout {shape}; one of them must change")
        for x in self.transforms:
            view = x.gather(view)
        return view

    def _in_memory(self, memory: Array, shape: tuple[int, ...]) -> Array:
        """The array of the layout's shape in memory."""
        strides = [int(x) for x in self.stride]
        needed = 1 + sum((x - 1) * s for x, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        if self.swizzle:
            index = np.ogrid[tuple(slice(0, x) for x in shape)]
            return memory[self._swizzled(sum(map(mul, index, strides)))]
        if needed > memory.size:
            memory = np.concatenate([memory, np.zeros(needed - memory.size, memory.dtype)])
        return np.lib.stride_tricks.as_strided(memory, shape, [x * memory.strides[0] for x in strides])


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition least <= index < end, of sums; None for a bound that always holds.

    Attributes:
        index: an index less its constant.
        least: see above.
        end: see above.
        before: the constant.
        place: of the index among the levels of a position, and in its level.
    """

    index: Sum
    least: Sum | None
    end: Sum | None
    before: int = field(compare=False)
    place: tuple[int, int] = field(compare=False)


def _condition(index: Sum, extent: Sum, place: tuple[int, int]) -> Condition:
    """The condition 0 <= index < extent, with the constant on the other side."""
    ends, constant = bounds(index), index.constant
    is_least = ends is not None and is_positive(ends[0] + 1)
    is_most = ends is not None and is_positive(extent - ends[1])
    least, end = None if is_least else as_sum(-constant), None if is_most else extent - constant
    return Condition(index - constant, least, end, constant, place)


def _sums(values: Iterable[Size]) -> tuple[Sum, ...]:
    return tuple(as_sum(x) for x in values)


def _dense(shape: Sequence[Sum]) -> tuple[Sum, ...]:
    """Strides of rows without gaps."""
    strides = [as_sum(1)]
    for x in reversed(shape[1:]):
        strides.append(strides[-1] * x)
    return tuple(reversed(strides[: len(shape)]))


def _value(x: Sum, index: Sequence[Any], names: Names) -> Any:
    """Value of a sum of a coordinate and of sizes."""
    return evaluate(x, lambda leaf: names(leaf.name) if leaf.extent is None else index[int(leaf.name[1:])])


def _moved(index: Values, changes: Values) -> Values:
    return tuple(x + d if moves(d) else x for x, d in zip(index, changes, strict=True))


def _bound(x: Any, sizes: Mapping[str, Sum]) -> Any:
    """A layout, a transform or a sum with names replaced by sizes."""
    if isinstance(x, Sum):
        return as_sum(evaluate(x, lambda leaf: sizes.get(leaf.name, as_sum(leaf.name))))
    if isinstance(x, tuple):
        return tuple(_bound(y, sizes) for y in x)
    if not is_dataclass(x):
        return x
    return replace(x, **{y.name: _bound(getattr(x, y.name), sizes) for y in fields(x)})  # type: ignore[type-var]
