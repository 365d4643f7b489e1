"""The recorder of fused functions: operations on placeholders of whole arrays become nodes of a graph.

Owns `WholeArrays`, and `Axis`, the indices of epilogues and prologues of products inside a fused function: in [] i.m
and i.n name the axes of arrays, elsewhere they are integers. Operations without a kernel become calls of NumPy between
kernels; an operation that reads data, or changes it in place, is an error that names the line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from portmm.arrays.libraries import on_device
from portmm.errors import TraceError
from portmm.fusion.array_methods import COPIES, LOOKS, METHODS, OF_FUNCTIONS, STATIC, VIEWS, is_last, squeezed
from portmm.fusion.graph import CALLED, Graph, Node, refuse
from portmm.spec import elementwise
from portmm.spec.epilogue import index
from portmm.spec.expr import FUNCTIONS, UFUNCS
from portmm.trace.placeholders import Array, Indices, Number, Placeholder, rebuilt

_REDUCTIONS = {"sum": elementwise.sum, "mean": elementwise.sum, "max": elementwise.max}
_QUESTIONS = {
    "bool": (
        "an if, while, and, or, not, min or max looks at values, which differ from call to call; "
        "use pm.where, & and |, pm.minimum or pm.maximum"
    ),
    "array": (
        "a traced array has no values yet, so it cannot be converted; write x.astype(np.float32) in place "
        "of np.float32(x) and np.asarray(x), np.stack([x, y]) in place of np.array([x, y])"
    ),
    "contains": "in looks at values, which differ from call to call",
    "": "a traced array is not a number; use portmm's or NumPy's functions in place of math's",
}
"""Special methods that ask for values -> why they cannot be traced; the last one is of conversions."""


_LAYOUT: dict[str, Callable[[Node], Any]] = {
    "shape": lambda x: x.shape, "ndim": lambda x: len(x.shape), "size": lambda x: x.size,
    "dtype": lambda x: np.dtype(float) if x.dtype is None else x.dtype,
}  # fmt: skip
"""Attributes of an array that are known while a function is traced."""


class Index(Array):
    """Integers computed from indices of elements."""

    __slots__ = ()


class Axis(Index):
    """An index along an axis of a product: an integer in expressions, the axis itself in []."""

    __slots__ = ("extent",)
    extent: tuple[int, int]


class Converted(Array):
    """An array of the type that it was converted to: the same one, but for a function that returns it."""

    __slots__ = ()


class WholeArrays(Graph):
    """The recorder of a fused function."""

    __slots__ = ()

    # Captures of the function, and its arguments.

    def array(self, x: Any, at: Any) -> Any:
        """The placeholder of an array in the host's memory or on a device."""
        return Array(self, self.leaf(np.asarray(x) if isinstance(x, np.ndarray) else x, at.name))

    def number(self, x: Any, at: Any) -> Any:
        """The placeholder of a number; None for NumPy's of other types than float64, which are constants."""
        return Number(self, self.leaf(x, at.name)) if isinstance(x, float) else None

    def weight(self, x: Any, at: Any) -> Any:
        """The placeholder of a packed weight, which kernels read."""
        return Array(self, self.leaf(x, at.name))

    def kind(self, x: Placeholder) -> type:
        """The class of what a placeholder stands for."""
        if issubclass(type(x), Index):
            return int
        value = self.leaves[x.node.leaf] if x.node.leaf >= 0 else None
        return np.ndarray if value is None or isinstance(value, np.ndarray) else type(value)

    def refusal(self, text: str) -> TraceError:
        """The error for what cannot be traced, with the line."""
        return refuse(text)

    # Operations.

    def operation(self, name: str, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """The result of an operator."""
        if name == "matmul":
            return self.product(*operands)
        return self.mapped(name, function, function, operands)

    def ufunc(self, ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a ufunc."""
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        if options.get("out") is not None:
            raise refuse(f"out= of np.{name} changes an array in place; use what it returns")
        if ufunc is np.matmul and method == "__call__" and not options:
            return self.product(*inputs)
        known = UFUNCS.get(ufunc.__name__)
        if method == "__call__" and known is not None and not options:
            return self.mapped(ufunc.__name__, known, ufunc, inputs)
        x = inputs[0]
        reduces = method == "reduce" and isinstance(x, Array) and not options.keys() - {"axis", "keepdims"}
        if reduces and ufunc in (np.add, np.maximum):
            kind, axis = "sum" if ufunc is np.add else "max", options.get("axis", 0)
            return self.reduced(x, kind, axis, keepdims=options.get("keepdims", False), plain=ufunc.reduce)
        return self.called(f"np.{name}", getattr(ufunc, method), inputs, options)

    def function(self, function: Any, kinds: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of another function of NumPy's."""
        del kinds
        name = function.__name__
        if options.get("out") is not None:
            raise refuse(f"out= of np.{name} changes an array in place; use what it returns")
        if function in STATIC:
            return STATIC[function](*args)
        of_array = bool(args) and isinstance(args[0], Array)
        if of_array and name in OF_FUNCTIONS and not options.keys() - OF_FUNCTIONS[name]:
            return METHODS[name.removeprefix("a") if name in ("amax", "amin") else name](*args, **options)
        if name in ("dot", "matmul") and len(args) == 2 and not options and all(len(np.shape(x)) <= 2 for x in args):
            return self.product(*args)
        if of_array and name in VIEWS and not _any_inside((args[1:], options)):
            return self.viewed(name, lambda x: function(x, *args[1:], **options), args[0])
        known = FUNCTIONS.get(name)
        if known is not None and not options:
            return self.mapped(name, known, function, args) if name == "where" else known(*args)
        return self.called(f"np.{name}", function, args, options, own=name in COPIES)

    def record_(self, function: Callable[..., Any], values: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a function of `elementwise`."""
        name = function.__name__
        if name in ("sum", "max", "mean"):
            x, axis = values[0], options.get("axis", values[1] if len(values) > 1 else -1)
            return self.reduced(self.whole(x), name, axis, keepdims=True, plain=function)
        if name == "cast":
            x, dtype = values[0], np.dtype(options.get("dtype", values[1] if len(values) > 1 else None))

            def cast(y: Any) -> Any:
                return function(y, dtype)

            return Array(self, self.map(name, cast, cast, (self.node_of(x),), dtype))
        if name == "dropout":
            x, rate, seed = (dict(zip(("x", "rate", "seed"), values, strict=False)) | options).values()
            if isinstance(seed, Placeholder):
                raise refuse("the seed of dropout is an array; give an integer")

            def dropped(y: Any, r: Any) -> Any:
                return function(y, r, seed)

            return self.mapped(name, dropped, dropped, (x, rate))
        return self.mapped(name, function, function, values)

    def matmul_(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of `portmm.matmul`."""
        del function
        if options.get("out") is not None:
            raise refuse("out= changes an array in place; use what matmul returns")
        left, right = map(self.whole, args)
        if options.get("prologue_a") is not None:
            left = self.applied(options["prologue_a"], left, "mk")
        if options.get("prologue_b") is not None:
            right = self.applied(options["prologue_b"], right, "kn")
        product = self.wrap(self.matmul("matmul", left.node, right.node, options.get("dtype")))
        epilogue = options.get("epilogue")
        return product if epilogue is None else self.applied(epilogue, product, "mn")

    def call_conv_(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of `portmm.conv`."""
        from portmm.fusion.convolutions import recorded

        return recorded(self, function, args, options)

    def over_windows(  # noqa: PLR0917 - the fields of a node
        self, kind: str, xs: Any, about: Any, shape: tuple[int, ...], plain: Callable[..., Any], dtype: Any = None
    ) -> Any:  # fmt: skip
        """Record a convolution ("conv") or pooling ("pool") of images with channels last: see `fusion.plan_windows`."""
        operands = tuple(map(self.node_of, xs if isinstance(xs, tuple) else (xs,)))
        node = self.add(kind, shape, operands[0].dtype if dtype is None else dtype, operands, plain, kind)
        self.windows[node] = about
        return self.wrap(node)

    def call_(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The result of a function of portmm with a kernel of its own."""
        if options.get("out") is not None:
            raise refuse("out= changes an array in place; use what is returned")
        return self.called(function.__name__, function, args, options, own=True)

    # Parts and attributes of arrays.

    def item(self, x: Array, key: Any) -> Any:
        """A view of an array, or what NumPy selects."""
        indices = key if isinstance(key, tuple) else (key,)
        if any(type(i) is Axis for i in indices):
            return self.viewed("[i]", _along(indices, x.ndim), x)
        plain = (int, np.integer, slice, type(None), type(Ellipsis))
        if _any_inside((indices, [(i.start, i.stop, i.step) for i in indices if isinstance(i, slice)])):
            return self.called("[] by an array", operator.getitem, (x, key), {})
        if not all(isinstance(i, plain) for i in indices):
            return self.called("[] by an array", lambda y: y[key], (x,), {})
        same = all(i is None or i is Ellipsis or i == slice(None) for i in indices)
        return self.viewed("reshape" if same else "[]", lambda y: y[key], x)

    def attribute(self, x: Array, name: str) -> Any:
        """An attribute or a method."""
        if name in _LAYOUT:
            return _LAYOUT[name](x.node)
        if name in METHODS:
            return partial(METHODS[name], x)
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"an array that is traced has no attribute {name!r}")
        if name in ("T", "mT"):
            return METHODS["transpose"](x) if name == "T" else METHODS["swapaxes"](x, -1, -2)
        if name in LOOKS:
            raise refuse(f".{name} looks at values or memory, which differ from call to call")
        if name in ("itemsize", "nbytes"):
            return getattr(np.broadcast_to(np.zeros((), x.dtype), x.shape), name)
        return lambda *args, **options: self.called(
            name, lambda y, *a, **o: getattr(y, name)(*a, **o), (x, *args), options
        )

    def value(self, x: Array, question: str, *args: Any) -> Any:
        """The answer of an array's values, which only a captured array without dimensions has."""
        captured = self.leaves[x.node.leaf] if x.node.leaf >= 0 else None
        if question == "array" and not x.node.shape and isinstance(captured, np.ndarray):
            self.lasting = False  # the next call may have another number
            return np.array(captured, *args)
        raise refuse(_QUESTIONS.get(question, _QUESTIONS[""]))

    # Nodes, and placeholders for them.

    def wrap(self, nodes: Any) -> Any:
        """Placeholders for a node or a list of nodes."""
        return [Array(self, x) for x in nodes] if isinstance(nodes, list) else Array(self, nodes)

    def whole(self, x: Any) -> Array:
        """The placeholder of an array-like operand."""
        return x if isinstance(x, Array) else Array(self, self.node_of(x))

    def node_of(self, x: Any) -> Node:
        """The node of an array-like operand."""
        if isinstance(x, Placeholder):
            return x.node
        is_weight = hasattr(x, "family") or type(x).__name__ == "Quantized"
        if is_weight or on_device(x):
            self.lasting = False
            return self.leaf(x, "a weight" if is_weight else "an array on a device")
        value = np.asarray(x)
        if value.dtype == object:
            raise refuse(f"a {type(x).__name__} cannot be an operand beside a traced array")
        return self.constant(value)

    def mapped(self, name: str, traced: Any, plain: Any, values: tuple[Any, ...]) -> Any:
        """Record an element-wise function."""
        whole = [x.dtype for x in values if isinstance(x, Array) and not isinstance(x, Index) and x.dtype is not None]
        whole = whole if all(x.kind in "iub" for x in whole) else []
        node = self.map(
            name, traced, plain, tuple([self._operand(name, x, whole) for x in values]),
            index=any(isinstance(x, Index) for x in values),
        )  # fmt: skip
        if node.dtype == np.int32 and all(isinstance(x, (Index, int, np.integer)) for x in values):
            return Index(self, node)
        return self.wrap(node)

    def copied(self, x: Array) -> Any:
        """An array of the same elements that shares no memory with it."""
        return self.mapped("copy", lambda y: y, np.copy, (x,))

    def converted(self, x: Array, dtype: Any) -> Array:
        """An array of another type, as `ndarray.astype`."""
        node = self.convert(x.node, dtype)
        return Converted(self, node) if node is x.node else Array(self, node)

    def _operand(self, name: str, x: Any, whole: list[Any]) -> Any:
        """A node, or a literal: NumPy's scalars of float64 or integer type become Python's.

        Those of integers that arrays of integers, of the types `whole`, cannot hold are part of the result's type.
        """
        if isinstance(x, Placeholder):
            return x.node
        if isinstance(x, (np.ndarray, list, tuple)) and np.ndim(x):
            return self.node_of(x)
        if isinstance(x, (bool, np.bool_)):
            return bool(x)
        if isinstance(x, (int, np.integer)):
            fits = isinstance(x, int) or not whole or any(np.can_cast(x.dtype, y) for y in whole)
            return int(x) if fits else x
        if isinstance(x, (float, np.floating)) or (isinstance(x, np.ndarray) and x.dtype.kind == "f"):
            # A float32 or float16 scalar takes part in the type of the result, as in NumPy.
            return np.asarray(x)[()] if np.asarray(x).dtype in (np.float32, np.float16) else float(x)
        if x is None or isinstance(x, str):
            raise refuse(f"{name} of {x!r}")
        return self.node_of(x)

    def product(self, a: Any, b: Any) -> Any:
        """The product of two arrays, as `@`."""
        return self.wrap(self.matmul("@", self.node_of(a), self.node_of(b)))

    def viewed(self, name: str, function: Callable[[Any], Any], x: Array) -> Any:
        """A view of the same elements."""
        return self.wrap(self.view(name, function, x.node))

    def reduced(
        self, x: Array, name: str, axis: Any, *, keepdims: bool, plain: Any, options: dict[str, Any] | None = None
    ) -> Any:
        """The result of a reduction, in a kernel if it is along the last axis."""
        if not is_last(x, axis) or options or x.node.dtype is None:
            keeps = {} if plain is getattr(elementwise, plain.__name__, None) else {"keepdims": keepdims}
            return self.called(name, plain, (x,), {"axis": axis, **(options or {}), **keeps})
        value = self.wrap(self.reduce(name, "max" if name == "max" else "add", x.node, _REDUCTIONS[name]))
        return squeezed(value / float(x.shape[-1]) if name == "mean" else value, keepdims)

    def called(self, name: str, function: Any, args: Any, options: dict[str, Any], *, own: bool = False) -> Any:
        """Record a function that NumPy or portmm runs on arrays between kernels."""
        inputs: list[Node] = []

        def replaced(x: Any) -> Any:
            if not isinstance(x, Placeholder):
                return x
            inputs.append(x.node)
            return _Slot(len(inputs) - 1)

        arguments = rebuilt((tuple(args), dict(options)), replaced)

        def plain(*arrays_: Any) -> Any:
            positional, keywords = rebuilt(arguments, lambda x: arrays_[x.number] if isinstance(x, _Slot) else x)
            return function(*positional, **keywords)

        try:
            node = self.call(name, plain, tuple(inputs), CALLED, own=own)
        except TraceError:
            raise
        except TypeError as error:
            raise refuse(f"{name}: {error}") from error
        kind = name.removeprefix("np.")
        if kind in ("mean", "var") and not options.keys() - {"axis", "keepdims"}:
            self.along[node] = kind, options.get("axis"), bool(options.get("keepdims"))
        return self.wrap(node)

    # Epilogues and prologues of products inside a fused function.

    def applied(self, function: Callable[..., Any], x: Array, names: str) -> Any:
        """The result of an epilogue or a prologue on an array."""
        code = getattr(function, "__code__", None)
        if code is not None and code.co_argcount == 1 and not code.co_flags & 0x04:
            return function(x)
        last = {name: 1 - i for i, name in enumerate(names)} | ({"b": 2} if x.ndim > 2 else {})
        return function(x, Indices({name: (name, back) for name, back in last.items()}, partial(self._axis, x)))

    def _axis(self, x: Array, name_and_place: tuple[str, int]) -> Axis:
        """The index along an axis of an array, counted from the last one."""
        name, back = name_and_place
        length = x.shape[-1 - back]

        def plain(y: Any) -> Any:
            return np.broadcast_to(np.arange(length, dtype=np.int32).reshape(-1, *(1,) * back), y.shape)

        node = self.map(f"i.{name}", lambda _: index("nmb"[back]), plain, (x.node,), np.dtype(np.int32))
        axis = Axis(self, node)
        axis.extent = back, length
        return axis


def _along(indices: tuple[Any, ...], ndim: int) -> Callable[[Any], Any]:
    """The view function of an array indexed by axes, as in b[i.n]; axes have the lengths of the product."""
    if len(indices) != ndim or not all(isinstance(x, (Axis, int, np.integer)) for x in indices):
        raise refuse(
            f"an array of {ndim} dimensions is indexed by {len(indices)}; give an index or an integer for each"
        )
    axes = sorted((x.extent[0] for x in indices if isinstance(x, Axis)), reverse=True)
    order = [i for back in axes for i, x in enumerate(y for y in indices if isinstance(y, Axis)) if x.extent[0] == back]
    key = tuple(slice(0, x.extent[1]) if isinstance(x, Axis) else x for x in indices)
    spread = tuple(slice(None) if back in axes else None for back in range(max(axes, default=0), -1, -1))
    return lambda x: x[key].transpose(order)[spread]


def _any_inside(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_any_inside(y) for y in x)
    return any(_any_inside(y) for y in x.values()) if isinstance(x, dict) else isinstance(x, Placeholder)


class _Slot:
    """A placeholder of an array among the arguments of a call."""

    def __init__(self, number: int) -> None:
        self.number = number
