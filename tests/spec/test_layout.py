"""Layouts: the simplified map, validity, movement and vectors agree with each transform by itself and with NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from portmm.ir.index import const, var
from portmm.ir.interpreter import evaluate
from portmm.spec.layout import Layout
from portmm.spec.layout_index import as_sum
from portmm.spec.layout_runs import runs
from portmm.spec.layout_transforms import Pad
from portmm.spec.layouts import column_major, in_panels, panels, row_major, swizzled_tile, windows
from portmm.spec.problem import family

EXAMPLES = settings(derandomize=True, deadline=None, max_examples=150, database=None)
MOST = 3000
"""Coordinates of a layout that is searched whole."""


def sizes(layout):
    return tuple(int(x) for x in layout.extents)


def padded(draw, _, axis, __):
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return lambda x: x.pad(axis, before, after)


def blocked(draw, _, axis, __):
    count = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return lambda x: x.pad_to(axis, count).unmerge(axis, None, count)


def sliced(draw, _, axis, extent):
    begin, step = draw(st.integers(0, extent - 1)), draw(st.integers(1, 2))
    count = draw(st.integers(1, (extent - 1 - begin) // step + 1))
    return lambda x: x.slice(axis, begin, count, step)


def embedded(draw, _, axis, extent):
    size, dilation, stride = (draw(st.integers(1, 3)) for _ in range(3))
    assume((size - 1) * dilation < extent)
    return lambda x: x.embed(
        axis, ((x.extents[axis] - 1 - (size - 1) * dilation) // stride + 1, size), (stride, dilation)
    )


def frozen(draw, _, axis, extent):
    index = draw(st.integers(0, extent - 1))
    return lambda x: x.freeze(axis, index)


def repeated(draw, _, axis, __):
    count = draw(st.integers(1, 3))
    return lambda x: x.broadcast(axis, count)


def merged(_, x, axis, __):
    count = min(2, len(x.extents) - axis)
    return lambda x: x.merge(axis, count)


def permuted(draw, x, _, __):
    order = draw(st.permutations(range(len(x.extents))))
    return lambda x: x.permute(*order)


def xored(draw, x, axis, extent):
    modulo, times, divide = (draw(st.sampled_from(y)) for y in ([2, 4], [1, 2], [1, 2]))
    by = draw(st.integers(0, len(x.extents) - 1))
    assume(by != axis and extent % (modulo * times) == 0)
    return lambda x: x.xor(axis, by, divide, modulo, times)


VIEWS = (padded, blocked, sliced, embedded, frozen, repeated, merged, permuted, xored)


@st.composite
def layouts(draw, *, swizzles=True):
    """A layout of a few views on a small array with any strides; the same of named sizes, and these sizes."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=1, max_size=3))
    order, stride, step = draw(st.permutations(range(len(shape)))), [0] * len(shape), 1
    for i in order:
        stride[i] = step
        step *= shape[i] + draw(st.sampled_from([0, 0, 1, 3]))
    swizzle = draw(st.sampled_from([None, None, (1, 0, 1), (2, 1, 2), (2, 0, 3)])) if swizzles else None
    sizes_of = {f"n{i}": x for i, x in enumerate(shape)} | {f"s{i}": x for i, x in enumerate(stride)}
    names = tuple(tuple(x for x in sizes_of if x[0] == kind) for kind in "ns")
    layout, named = Layout(tuple(shape), tuple(stride), swizzle), Layout(*names, swizzle)
    for _ in range(draw(st.integers(0, 4))):
        if not layout.extents:
            break
        axis, view = draw(st.integers(0, len(layout.extents) - 1)), draw(st.sampled_from(VIEWS))
        apply = view(draw, layout, axis, sizes(layout)[axis])
        layout, named = apply(layout), apply(named)
    assume(np.prod(sizes(layout)) <= MOST)
    return layout, named, sizes_of


def whole(layout):
    """All coordinates, one array for each axis."""
    return np.indices(sizes(layout), sparse=True)


def plain(layout, index):
    """Offset and validity of one coordinate, through each transform by itself."""
    index, is_valid, below = tuple(as_sum(x) for x in index), True, [layout.shape]
    for x in layout.transforms:
        below.append(x.extents(below[-1]))
    for x, extents in zip(reversed(layout.transforms), reversed(below[:-1]), strict=True):
        index = x.down(index)
        if isinstance(x, Pad):
            is_valid &= 0 <= int(index[x.axis]) < int(extents[x.axis])
    offset = sum(int(x) * int(s) for x, s in zip(index, layout.stride, strict=True))
    if layout.swizzle:
        bits, base, shift = layout.swizzle
        offset ^= (offset >> (base + shift) & (1 << bits) - 1) << base
    return offset, is_valid


@EXAMPLES
@given(layouts())
def test_the_simplified_map_and_validity_are_those_of_all_transforms(drawn):
    layout = drawn[0]
    for index in product(*map(range, sizes(layout))):
        offset, is_valid = plain(layout, index)
        assert int(layout.offset(index)) == offset
        assert bool(layout.valid(index)) == is_valid


@EXAMPLES
@given(layouts())
def test_gather_reads_the_memory_at_offsets_and_zeros_in_padding(drawn):
    layout = drawn[0]
    memory = np.arange(1, 2000)
    index = whole(layout)
    valid = np.broadcast_to(np.asarray(layout.valid(index), bool), sizes(layout))
    offset = np.broadcast_to(np.asarray(layout.offset(index), int), sizes(layout))
    expected = np.where(valid, memory[np.where(valid, offset, 0)], 0)
    np.testing.assert_array_equal(layout.gather(memory), expected)


@EXAMPLES
@given(layouts(), st.data())
def test_names_of_sizes_mean_the_same_as_their_numbers(drawn, data):
    """And kernels compute what NumPy does."""
    layout, named, bound = drawn
    assert named.bind(**bound) == layout
    index = [data.draw(st.integers(0, x - 1)) for x in sizes(layout)]
    coordinates = [var(f"x{i}") for i in range(len(index))]
    values = bound | {f"x{i}": x for i, x in enumerate(index)}
    offset, is_valid = plain(layout, index)
    if is_valid:  # C has no quotient of a negative number
        assert evaluate(const(0) + named.offset(coordinates, var), values) == offset
    assert bool(evaluate(const(0) + named.valid(coordinates, var), values)) == is_valid


@EXAMPLES
@given(layouts(), st.data())
def test_a_moved_position_is_where_its_coordinate_says(drawn, data):
    layout = drawn[0]
    extents = sizes(layout)
    assume(extents)
    index = [data.draw(st.integers(0, x - 1)) for x in extents]
    position = layout.start(index)
    for _ in range(4):
        axis = data.draw(st.integers(0, len(extents) - 1))
        delta = data.draw(st.integers(-index[axis], extents[axis] - 1 - index[axis]))
        index[axis] += delta
        moved, step = layout.move(position, axis, delta), layout.step(axis, delta)
        assert int(moved.offset) == int(layout.offset(index))
        assert step is None or int(moved.offset) - int(position.offset) == int(step)
        position = moved


@EXAMPLES
@given(layouts(), st.data())
def test_vectors_are_successive_aligned_and_in_padding_or_not(drawn, data):
    layout = drawn[0]
    assume(layout.extents)
    axis = data.draw(st.integers(0, len(layout.extents) - 1))
    length = layout.vector(axis, 16)
    assert sizes(layout)[axis] % length == 0
    shape = sizes(layout)
    offset = np.broadcast_to(np.asarray(layout.offset(whole(layout)), int), shape)
    valid = np.broadcast_to(np.asarray(layout.valid(whole(layout)), bool), shape)
    offset, valid = (np.moveaxis(x, axis, -1).reshape(-1, length) for x in (offset, valid))
    assert (valid == valid[:, :1]).all()
    offset = offset[valid[:, 0]]
    assert (offset == offset[:, :1] + np.arange(length)).all()
    assert (offset[:, 0] % length == 0).all()


@EXAMPLES
@given(layouts(), st.data(), st.booleans())
def test_runs_of_an_axis_add_to_the_other_axes(drawn, data, still):
    layout = drawn[0]
    assume(layout.extents)
    axis = data.draw(st.integers(0, len(layout.extents) - 1))
    found = runs(layout, axis, still=still)
    assume(found)
    length, step = int(found.length), int(found.step)
    assert sizes(layout)[axis] % length == 0
    for index in product(*map(range, sizes(layout))):
        first = layout.start((*index[:axis], 0, *index[axis + 1 :]))
        run, within = divmod(index[axis], length)
        there = layout.start(index)
        assert int(there.offset) == int(first.offset) + int(found.offset_of(run, as_sum)) + step * within
        at = zip(*(map(int, layout.padded(x)) for x in (first, there)), found.indices_of(run, as_sum), strict=True)
        for (before, now, own), (least, most) in zip(at, found.reach, strict=True):
            reached = now - before - int(own)
            assert int(least) <= reached <= int(most)
            assert reached == 0 or not still


@pytest.mark.parametrize(
    ("kernel", "still", "length", "offset"),
    [((3, 3), False, "c * 3", "run * c * w"), ((3, 3), True, "c", "run / 3 * c * w + run % 3 * c")],
)
def test_runs_of_windows_are_lines_of_them(kernel, still, length, offset):
    view = row_major(1, "h", "w", "c").pad(1, 1, 1).pad(2, 1, 1)
    for axis, size in ((2, kernel[1]), (1, kernel[0])):
        view = view.embed(axis, (view.extents[axis] - (size - 1), size), (1, 1))
    view = view.permute(0, 1, 3, 2, 4, 5).merge(0, 3).merge(1, 3)
    found = runs(view, 1, still=still)
    assert [str(x) for x in (found.length, found.step, found.offset)] == [length, "1", offset]


def test_what_mixes_axes_has_no_runs():
    assert runs(row_major(8, 8).xor(1, 0), 1) is None


@EXAMPLES
@given(layouts(swizzles=False), st.data())
def test_composition_is_the_composition_of_the_maps(drawn, data):
    inner = drawn[0]
    columns = data.draw(st.sampled_from([1, 3, 4, 8]))
    outer = row_major(1000, columns).permute(1, 0).merge(0, 2)
    both = outer.compose(inner)
    for index in product(*map(range, sizes(inner))):
        offset, is_valid = plain(inner, index)
        if is_valid:
            assert int(both.offset(index)) == int(outer.offset((offset,)))


PERMUTATIONS = {
    "row-major": row_major(3, 5),
    "column-major": column_major(4, 3, 2),
    "panels": panels(6, 8, 4),
    "units of VNNI": panels(8, 32, 16, 4),
    "swizzled shared memory": Layout((16, 64), swizzle=(3, 3, 3)),
    "swizzled lines of 64 bytes": Layout((8, 32), swizzle=(2, 3, 3)),
    "tiles of wgmma along k": swizzled_tile(2, 64, along_k=True).bind(rows=24),
    "tiles of wgmma along rows": swizzled_tile(2, 64, along_k=False).bind(strips=2),
    "tiles of wgmma of bytes": swizzled_tile(1, 128, along_k=True).bind(rows=16),
    "a dense batch": row_major(3, 4, 5).permute(0, 2, 1),
    "lines that are no power of two": row_major(8, 96).unmerge(1, None, 8).unmerge(1, None, 4).xor(2, 0, 1, 4),
}


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_permutations_are_bijections(name):
    layout = PERMUTATIONS[name]
    offsets = layout.offsets()
    assert sorted(offsets.ravel()) == list(range(offsets.size))
    np.testing.assert_array_equal(layout.gather(np.arange(offsets.size)), offsets)


INJECTIONS = {
    "a view with gaps": Layout((4, 5), (17, 3)),
    "a strided batch": Layout((3, 4, 5), (100, 7, 1)),
    "columns of a batch": Layout((2, 6, 5), (64, 1, 9)),
    "every second row": row_major(8, 6).slice(0, 1, 3, 2),
    "panels with sums": panels(6, 20, 8, 4, step=96),
    "scales of int4 values": family("u4x8k8g16").parts(40, 20)[0],
    "offsets of int4 values": family("u4x8k8g16").parts(40, 20)[1],
    "words of int4 values": family("u4x8k8g16").parts(40, 20)[2],
}


@pytest.mark.parametrize("name", INJECTIONS)
def test_gaps_separate_elements(name):
    layout = INJECTIONS[name]
    offsets = layout.offsets().ravel()
    assert len(set(offsets)) == offsets.size
    assert (
        0
        <= offsets.min()
        <= offsets.max()
        <= sum((int(x) - 1) * int(s) for x, s in zip(layout.shape, layout.stride, strict=True))
    )
    for index in product(*map(range, sizes(layout))):
        for axis, extent in enumerate(sizes(layout)):
            if index[axis] + 1 < extent:
                there = (*index[:axis], index[axis] + 1, *index[axis + 1 :])
                assert layout.move(layout.start(index), axis, 1) == layout.start(there)


def test_parts_of_int4_values_are_disjoint():
    kept = family("u4x8k8g16")
    every = np.concatenate([x.offsets().ravel() for x in kept.parts(40, 24)])
    assert len(set(every)) == every.size <= 3 * kept.panel(40)


def test_panels_and_the_view_that_fills_them_are_inverse():
    weight = np.arange(1, 7 * 10 + 1).reshape(7, 10)
    filled = in_panels(row_major(7, 10), 4, 2).gather(weight)
    assert filled.shape == (3, 4, 4, 2)
    assert (filled.ravel() == 0).sum() == filled.size - weight.size
    np.testing.assert_array_equal(panels(7, 10, 4, 2).gather(filled.ravel()), weight)


def test_windows_make_a_convolution_a_product():
    rng = np.random.default_rng(0)
    image, kernel = rng.integers(-9, 9, (2, 3, 7, 6)), rng.integers(-9, 9, (4, 3, 3, 2))
    view = windows(row_major(2, 3, 7, 6).pad(2, 1, 1).pad(3, 0, 2), (3, 2), (2, 1), (1, 2))
    got = view.gather(image) @ kernel.reshape(4, -1).T
    wide = np.pad(image, ((0, 0), (0, 0), (1, 1), (0, 2)))
    rows, columns = (9 - 3) // 2 + 1, (8 - 3) // 1 + 1
    expected = np.zeros((2, rows, columns, 4), int)
    for y, x in product(range(rows), range(columns)):
        part = wide[:, :, 2 * y : 2 * y + 3, x : x + 3 : 2]
        expected[:, y, x] = np.einsum("ncrs,ocrs->no", part, kernel)
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)


def test_faults_are_named():
    with pytest.raises(ValueError, match="one for each axis"):
        Layout((2, 3), (1,))
    with pytest.raises(ValueError, match="pad it first"):
        row_major(4).slice(0, 2, 3).gather(np.arange(4))
    with pytest.raises(ValueError, match="bind its names"):
        row_major("m", 4).gather(np.arange(8))
    with pytest.raises(ValueError, match="merge the axes"):
        row_major(2, 2).compose(row_major(2))
    with pytest.raises(ValueError, match="one of them must change"):
        row_major(2, 3).gather(np.zeros((3, 2)))


def test_names_of_packed_layouts_are_read_back_and_others_refused():
    for name in ("f32x32", "bf16x64k2", "s8x32k4s", "u4x32k8g0", "u4x32k8g32c", "u4x16k8g64e", "u4x32k8g128ch"):
        assert str(family(name)) == name
    for name in ("f32", "f32x", "x32", "f99x3", "f32x0", "f32x032", "f32x32k0", "f32x32kk4", "f32x32k4ss", "f32x32 "):
        with pytest.raises(ValueError, match="is no family of packed weights"):
            family(name)
    with pytest.raises(ValueError, match="offsets beside scales of 16 bits"):
        family("u4x32k8g128h")
