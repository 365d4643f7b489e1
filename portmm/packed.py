"""Prepacked weights.

Owns `pack` and the class it returns. The layout, panels of NR columns, belongs
to a micro-kernel family and not to one M, one blocking or one thread count:
see kernels/packing.py. Imports `dispatch`, `settings`, `arrays`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from portmm import arrays, settings
from portmm.errors import PackError


@cache
def packed_class() -> type[Any]:
    """The class of packed weights, on top of what the run time reads without Python."""
    from portmm.run.host import runtime

    base: Any = runtime().Packed

    class Packed(base):  # type: ignore[misc]
        """A weight in panels, usable wherever `b` is.

        Attributes:
            shape: shape of the weight it was made from.
            family: element type and panel width, for example "f32x32".
        """

        __slots__ = ()

        def __reduce__(self) -> tuple[Any, ...]:
            return (restore, (np.asarray(self.owner), self.shape, self.dtype, self.family))

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
            del copy
            return unpack(self).astype(dtype or self.owner.dtype, copy=False)

        @property
        def ndim(self) -> int:
            """Dimensions of the weight."""
            return len(self.shape)

        @property
        def nbytes(self) -> int:
            """Bytes of the panels."""
            return int(self.owner.nbytes)

        def __repr__(self) -> str:
            return f"<portmm.Packed {self.shape} {self.dtype}, family {self.family}>"

    Packed.__module__ = "portmm"
    Packed.__qualname__ = "Packed"
    return Packed


def restore(owner: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: str, family: str) -> Any:
    """Make a packed weight from its panels, as unpickling does.

    Raises:
        PackError: there are not as many elements as the shape asks for.
    """
    from portmm.candidates import panel_width

    nr = panel_width(family)
    k, n = shape[-2:]
    item = -(-n // nr) * nr * k
    count = int(np.prod(shape[:-2]))
    if owner.size < item * count:
        raise PackError(f"packed weight of shape {shape} needs {item * count} elements; it has {owner.size}")
    return packed_class()(aligned_copy(owner), k, n, dtype, family, nr, k * nr, item, tuple(shape))


def aligned_empty(elements: int, dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised 1-D array that starts on a cache line."""
    size = np.dtype(dtype).itemsize
    raw = np.empty(elements * size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + elements * size].view(dtype)


def aligned_copy(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`x` itself if it starts on a cache line, else a copy that does."""
    if x.ctypes.data % 64 == 0 and x.flags.c_contiguous:
        return x
    to = aligned_empty(x.size, x.dtype)
    to[...] = x.ravel()
    return to


def pack(b: Any) -> Any:
    """Lay a weight out for the kernels of the current target.

    Args:
        b: float32 or float64, at least 2-D; (..., k, n).

    Returns:
        A packed weight: pass it as `b`. It is immutable, may be pickled, and
        serves every number of rows and threads.

    Raises:
        TypeError: the dtype is not supported.
        ValueError: `b` has fewer than two dimensions.
        NoCompilerError: there is no compiler, so that no kernel could use it.
    """
    from portmm import dispatch
    from portmm.candidates import panel_width
    from portmm.run.host import runtime

    array = arrays.as_operand(b, "b")
    if array.ndim < 2:
        raise ValueError(f"b has shape {array.shape}; a weight has at least two dimensions")
    dtype = array.dtype.newbyteorder("=")
    name = arrays.NAMES[dtype]
    target = settings.target()
    family = dispatch.family(name, target)
    nr = panel_width(family)
    k, n = array.shape[-2:]
    count = int(np.prod(array.shape[:-2]))
    item = -(-n // nr) * nr * k
    owner = aligned_empty(item * count, dtype)
    made = packed_class()(owner, k, n, name, family, nr, k * nr, item, array.shape)
    if owner.size:
        src = arrays.canonical(array, dtype)
        steps = (arrays.strides_over(src.array, array.shape[:-2]), (0,) * (array.ndim - 2), _dense(array, item))
        walk = arrays.collapse(array.shape[:-2], (steps[1], steps[0], steps[2]))
        isa = next(x for x in target.isas if x.atom(name))
        route = dispatch.pack_route(isa, name, nr, src.layout, settings.get_num_threads())
        address = int(owner.__array_interface__["data"][0])
        numbers = (1, n, k, walk.count, src.address, 0, 0, 0, src.address, src.row, src.col, walk.strides[1])
        runtime().execute(route, *numbers, address, 0, 0, walk.strides[2], walk.outer)
    owner.flags.writeable = False
    return made


def _dense(array: np.ndarray[Any, Any], item: int) -> tuple[int, ...]:
    steps, total = [], item
    for n in reversed(array.shape[:-2]):
        steps.append(total)
        total *= n
    return tuple(reversed(steps))


def unpack(p: Any) -> np.ndarray[Any, Any]:
    """The weight that was packed, as an ordinary array."""
    from portmm.candidates import panel_width

    nr = panel_width(p.family)
    *batch, k, n = p.shape
    panels = -(-n // nr)
    count = int(np.prod(batch))
    whole = p.owner[: count * panels * k * nr].reshape(count, panels, k, nr).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(whole.reshape(count, k, panels * nr)[:, :, :n]).reshape(p.shape)
