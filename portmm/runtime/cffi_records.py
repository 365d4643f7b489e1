"""Types of the run time in Python: kernels, routes, packed weights, plans.

Owns the Python counterparts of the extension's types, and the rules that both implementations share: layouts and
signatures. Owns `PLAIN`, the fallback of the run time where that cannot be built for want of a compiler: weights can be
packed and read, and plans built, which NumPy computes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import BuildError
from portmm.spec.dtype import BY_NAME
from portmm.util.array_subclasses import refuse_class

if TYPE_CHECKING:
    from pathlib import Path

_DTYPES = {x: np.dtype(BY_NAME[x].numpy) for x in ("f32", "f64", "f16", "s8", "u8", "s32")}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
CLOSED = {"f32", "f64", "f16", "bf16"}
"""Types whose products with themselves are of that type as well."""
ORIGIN = bytes(24)
_NUMBERS = 13
_MAX_ND = 8


def register_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Register the NumPy dtype of an element type that NumPy does not define."""
    if name != "bf16":
        raise ValueError(f"{name!r} is not a type from elsewhere; NumPy has it, or it is unknown")
    _DTYPES[name] = dtype
    NAMES[dtype] = name


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bf16" and name not in _DTYPES:
        import ml_dtypes

        register_dtype(name, np.dtype(ml_dtypes.bfloat16))
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; use {', '.join(map(repr, _DTYPES))}")
    return _DTYPES[name]


def _dtypes(word: str) -> tuple[np.dtype[Any], ...]:
    """The types of A, B and C from "f32" or "u8-s8-s32"."""
    if not isinstance(word, str):
        raise TypeError(f"dtype is {word!r}; need a string")
    parts = word.split("-")
    if len(parts) not in (1, 3):
        raise ValueError(f"dtype {word!r} is unknown; name one type, or three with - between")
    return tuple(map(_dtype, parts * (3 // len(parts))))


class Kernel:
    """A function in a loaded library."""

    __slots__ = ("function", "path", "symbol")

    def __init__(self, path: Any, symbol: str, function: Any) -> None:
        self.path, self.symbol, self.function = path, symbol, function


class Route:
    """A kernel that is ready to be launched, with its workspace and threads."""

    __slots__ = ("bytes", "dtype", "dtypes", "kernel", "work_bytes", "workers")

    def __init__(self, kernel: Kernel, work_bytes: int, workers: int, dtype: str, unit: int = 1) -> None:
        if not isinstance(kernel, Kernel):
            raise TypeError(f"{kernel!r} is no Kernel")
        if work_bytes < 0 or workers < 1:
            raise ValueError(f"work_bytes is {work_bytes} and workers {workers}; need >= 0 and >= 1")
        self.dtypes = a, b, c = _dtypes(dtype)
        self.bytes = (a.itemsize, b.itemsize * unit, c.itemsize)
        self.kernel, self.work_bytes, self.workers, self.dtype = kernel, work_bytes, workers, dtype


class Packed:
    """A weight in a packed layout."""

    __slots__ = ("b_batch", "b_k", "b_n", "element", "family", "k", "n", "owner", "shape")

    def __init__(  # noqa: PLR0917
        self,
        owner: Any,
        k: int,
        n: int,
        dtype: str,
        family: str,
        b_k: int,
        b_n: int,
        b_batch: int,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        storage = _dtype(dtype)
        if not isinstance(owner, np.ndarray):
            raise TypeError(f"packed data is {type(owner).__name__}; need a numpy array")
        flags = owner.flags
        if owner.ndim != 1 or owner.dtype != storage or not (flags.aligned and flags.c_contiguous) or min(k, n) < 0:
            raise ValueError(f"packed data must be a contiguous 1-D {storage} array and k, n >= 0 (got {k = }, {n = })")
        self.owner, self.k, self.n, self.element, self.family = owner, k, n, dtype, family
        self.b_k, self.b_n, self.b_batch = b_k, b_n, b_batch
        if not isinstance(shape, (tuple, type(None))):
            raise TypeError(f"shape is {shape!r}; need a tuple")
        self.shape = (k, n) if shape is None else tuple(map(operator.index, shape))
        if self.shape[-2:] != (k, n):
            raise ValueError(f"shape {shape} does not end with {k = } and {n = }")


def offsets_of(outer: Any) -> bytes:
    """Triples of offsets as bytes; without any, one for the origin."""
    if outer is None:
        return ORIGIN
    data = bytes(memoryview(outer))
    if len(data) % 24:
        raise ValueError(f"outer has {len(data)} bytes; give triples of int64 offsets")
    return data


def address(x: np.ndarray[Any, Any]) -> int:
    """The address of element zero."""
    # x.ctypes would import ctypes
    return int(x.__array_interface__["data"][0])


def largest_scale(vector: np.ndarray[Any, Any]) -> float:
    """See `CffiRuntime`."""
    return float(vector.max(initial=0)) if bool(((vector >= 0) & (vector < np.inf)).all()) else -1.0


def layout_of(x: Any) -> tuple[str, int, int, bool] | None:
    """Layout, both strides in elements, and density of a matrix; None off the fast path.

    A stack of matrices by rows that follow each other is a taller one.
    """
    if type(x) is not np.ndarray or not 2 <= x.ndim <= _MAX_ND or x.dtype not in NAMES:
        return None
    joined = _joined(x) if x.ndim > 2 else (x.shape[0], x.strides[0])
    if joined is None or not x.flags.aligned or x.size == 0:
        return None
    (rows, s0), cols, s1, size = joined, x.shape[-1], x.strides[-1], x.itemsize
    if (s1 == size or cols == 1) and (rows == 1 or (s0 >= cols * size and s0 % size == 0)):
        lead = cols if rows == 1 else s0 // size
        return "row", lead, 1, lead == cols
    if x.ndim == 2 and (s0 == size or rows == 1) and (cols == 1 or (s1 >= rows * size and s1 % size == 0)):
        lead = rows if cols == 1 else s1 // size
        return "col", 1, lead, lead == rows
    return None


def _joined(x: Any) -> tuple[int, int] | None:
    """Extent and step of all dimensions but the last as one; None if they are not evenly spaced."""
    rows, step = 1, 0
    for extent, stride in zip(x.shape[-2::-1], x.strides[-2::-1], strict=True):
        if extent == 1:
            continue  # whose stride means nothing
        if rows == 1:
            step = stride
        elif stride != rows * step:
            return None
        rows *= extent
    return rows, step


def _signed(x: Any) -> tuple[Any, ...] | None:
    """Type, shape and strides of an array that a plan can take, or None."""
    if type(x) is not np.ndarray or x.dtype not in NAMES or not x.flags.aligned or x.size == 0 or x.ndim > _MAX_ND:
        return None
    return x.dtype, x.shape, tuple(0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True))


def signature(a: Any, b: Any, out: Any) -> tuple[Any, ...] | None:
    """The key of a plan for these operands, or None if no plan can take them."""
    left = _signed(a)
    right: tuple[Any, ...] | None = None
    into: tuple[Any, ...] | None = ()
    if not isinstance(b, Packed):
        right = _signed(b)
    elif len(b.shape) <= _MAX_ND and min(b.shape) > 0:
        right = (b.element, b.family, b.owner.size, b.b_k, b.b_n, b.b_batch, b.shape)
    if out is not None:
        into = _signed(out) if type(out) is np.ndarray and out.flags.writeable else None
    return None if left is None or right is None or into is None else (left, right, into)


class Operand:
    """The type, shape and strides that a plan requires of one operand."""

    __slots__ = ("dtype", "shape", "strides")

    def __init__(self, pair: Any, dtype: np.dtype[Any]) -> None:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"need (shape, strides); got {pair!r}")
        for what in pair:
            if not isinstance(what, tuple) or len(what) > _MAX_ND:
                raise ValueError(f"need tuples of at most {_MAX_ND} integers; got {what!r}")
        self.shape, self.strides = (tuple(map(operator.index, what)) for what in pair)
        self.dtype = dtype
        if len(self.shape) != len(self.strides):
            raise ValueError(f"{pair!r} has no stride for each dimension")
        if any(extent < 0 for extent in self.shape):
            raise ValueError(f"negative dimension in {self.shape}")

    def same_strides(self, strides: tuple[int, ...]) -> bool:
        """Test whether `strides` equal these, except for axes of extent 1."""
        if 0 in self.shape:
            return True
        return all(n == 1 or s == t for n, s, t in zip(self.shape, self.strides, strides, strict=True))

    def check(self, x: Any, name: str) -> None:
        """Raise unless `x` has this type, shape and strides."""
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name} is {type(x).__name__}; a plan takes numpy arrays")
        refuse_class(x, name, matrix=False)
        if x.dtype != self.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; this plan is for {self.dtype}")
        if x.shape != self.shape:
            raise ValueError(f"{name} has shape {x.shape}; this plan is for {self.shape}")
        if not self.same_strides(x.strides):
            raise ValueError(f"{name} has strides {x.strides}; this plan is for {self.strides}")
        if not x.flags.aligned:
            raise ValueError(f"{name} is not aligned to its elements; copy it first")


class Plan:
    """A product with fixed shapes and strides."""

    __slots__ = ("_a", "_b", "_bound_launch", "_c", "_numbers", "_outer", "_runtime", "detail", "packed", "route")

    def __init__(self, runtime: Any, route: Route, operands: tuple[Any, Any, Any], numbers: Any, outer: Any) -> None:
        a, b, c = operands
        self._a, self._c = Operand(a, route.dtypes[0]), Operand(c, route.dtypes[2])
        self.packed = b if isinstance(b, Packed) else None
        self._b = None if isinstance(b, Packed) else Operand(b, route.dtypes[1])
        if self.packed is not None and _dtype(self.packed.element) != route.dtypes[1]:
            raise TypeError("b is packed for another dtype than the route")
        if not isinstance(numbers, tuple) or len(numbers) != _NUMBERS:
            raise ValueError(f"numbers must be a tuple of {_NUMBERS} integers; got {numbers!r}")
        self._runtime, self.route, self._numbers = runtime, route, tuple(map(operator.index, numbers))
        self._outer = offsets_of(outer)
        self._bound_launch: Any = None
        self.detail: Any = None

    @property
    def pointer(self) -> tuple[int, int]:
        """Addresses of a C function and of its first argument; see the plan of the run time in C."""
        if self._bound_launch is None:
            weight = address(self.packed.owner) if self.packed else 0
            self._bound_launch = self._runtime.bind(self.route, self._at(0, weight, 0), self._outer)
        return self._bound_launch[:2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """plan(a, b, out=None), or plan(a, out=None) when b is bound."""
        return self._bound(*args, **kwargs) if self._b is None else self._free(*args, **kwargs)

    def _bound(self, a: Any, out: Any = None) -> Any:
        return self._run(a, self.packed.owner, out)  # type: ignore[union-attr]

    def _free(self, a: Any, b: Any, out: Any = None) -> Any:
        return self._run(a, b, out)

    def check(self, a: Any, b: Any, out: Any) -> Any:
        """The array for the result; raises unless the plan can take these operands."""
        self._a.check(a, "a")
        if self._b is not None:
            self._b.check(b, "b")
        if out is None:
            out = np.empty(self._c.shape, self._c.dtype)
            if not self._c.same_strides(out.strides):
                raise ValueError("this plan is for an out that is not C-contiguous; give out=")
        else:
            self._c.check(out, "out")
            if not out.flags.writeable:
                raise ValueError("out is read-only")
        return out

    def _run(self, a: Any, b: Any, out: Any) -> Any:
        into = self.check(a, b, out)
        for x, name in ((a, "a"), (b, "b")):
            if out is not None and np.may_share_memory(out, x):
                raise ValueError(f"out overlaps {name} in memory; give another array")
        return self.run(a, b, into, scalar=out is None)

    def run(self, a: Any, b: Any, out: Any, *, scalar: bool) -> Any:
        """Compute into a checked `out`; with `scalar`, return a 0-D result as a number."""
        self._runtime.launch(self.route, self._at(address(a), address(b), address(out)), self._outer)
        return out[()] if scalar and out.ndim == 0 else out

    def _at(self, a: int, b: int, c: int) -> tuple[int, ...]:
        """The numbers of a launch with these addresses."""
        x = self._numbers
        return (*x[:4], a, *x[4:7], b, *x[7:10], c, *x[10:])


class Plain:
    """The part of `CffiRuntime` that needs no machine code."""

    Packed, Kernel, Route, Plan = Packed, Kernel, Route, Plan
    register_dtype = staticmethod(register_dtype)
    address = staticmethod(address)

    @staticmethod
    def load(path: str | Path, symbol: str, file: str | Path = "") -> Any:
        """See `CffiRuntime`: nothing can be loaded here."""
        del file
        raise BuildError(f"{symbol} of {path} cannot be loaded: there is no run time to call it")

    @staticmethod
    def describe(*_: Any) -> None:
        """See `CffiRuntime`: there is no fast path here."""

    largest_scale = staticmethod(largest_scale)


class PlainPlan(Plan):
    """A plan that NumPy computes: the same checks, and `product(a, b)` in place of a kernel.

    Args:
        word: types of A, B and C, spelled as in routes.
        operands: shapes and strides of A, B and C, or a packed weight for B.
        product: computes the product of two arrays, the second being the array of panels of a packed weight.
    """

    __slots__ = ("_product",)

    def __init__(self, word: str, operands: tuple[Any, Any, Any], product: Callable[[Any, Any], Any]) -> None:
        route = Route(Kernel("", "", None), 0, 1, word)
        super().__init__(lambda *_: None, route, operands, (0,) * 13, None)
        self._product = product

    def run(self, a: Any, b: Any, out: Any, *, scalar: bool) -> Any:
        """See `Plan`."""
        np.copyto(out, self._product(a, b), casting="same_kind")
        return out[()] if scalar and out.ndim == 0 else out


PLAIN = Plain()
