"""Traced arrays, which record operations in a graph.

Owns `Value`, which stands for an array while a function is traced,
with its interface: operators, ufuncs, NumPy's functions, methods, views.
Operations without a kernel become calls of NumPy between kernels; an operation
that reads data, or changes it in place, is an error that names the line.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.libraries import on_device
from portmm.errors import TraceError
from portmm.fusion.array_methods import ArrayMethods, is_last, squeezed
from portmm.fusion.graph import Node, refuse
from portmm.spec import elementwise
from portmm.spec.expr import FUNCTIONS, UFUNCS
from portmm.trace.proxies import posing
from portmm.trace.tensor import CHANGES, COPIES, LOOKS, METHODS, SIGNS, STATIC, STATIC_METHODS, VIEWS, rebuilt

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.fusion.graph import Graph

# ruff: noqa: D102 - most methods here are those of ndarray


class Recorded:
    """A value that records the operations on it in a graph: a traced array, or a number that varies per call."""

    __slots__ = ("graph", "node")
    __hash__ = object.__hash__
    __array_priority__ = 1000
    placeholder_ = True

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    # The protocol by which portmm's functions record themselves.

    def record_(self, function: Callable[..., Any], values: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Record a function of `elementwise`, called with this among its operands."""
        name = function.__name__
        if name in ("sum", "max", "mean"):
            x, axis = values[0], options.get("axis", values[1] if len(values) > 1 else -1)
            return _value(self.graph, x).reduced_(name, axis, keepdims=True, plain=function)
        if name == "cast":
            x, dtype = values[0], np.dtype(options.get("dtype", values[1] if len(values) > 1 else None))
            traced = self.graph.map(
                name, lambda y: function(y, dtype), lambda y: function(y, dtype), (_node(self.graph, x),), dtype
            )
            return Value(self.graph, traced)
        if name == "dropout":
            x, rate, seed = _named(values, options)
            if isinstance(seed, Recorded):
                raise refuse("the seed of dropout is an array; give an integer")

            def dropped(y: Any, r: Any) -> Any:
                return function(y, r, seed)

            return _mapped(self.graph, name, dropped, dropped, (x, rate))
        return _mapped(self.graph, name, function, function, values)

    def matmul_(self, a: Any, b: Any, out: Any, dtype: Any, options: dict[str, Any]) -> Any:
        """Record `portmm.matmul`, called with this as an operand."""
        if out is not None:
            raise refuse("out= changes an array in place; use what matmul returns")
        left, right = _value(self.graph, a), _value(self.graph, b)
        if options.get("prologue_a") is not None:
            left = self.graph.applied(options["prologue_a"], left, "mk")
        if options.get("prologue_b") is not None:
            right = self.graph.applied(options["prologue_b"], right, "kn")
        product = _wrap(self.graph, self.graph.matmul("matmul", left.node, right.node, dtype))
        epilogue = options.get("epilogue")
        return product if epilogue is None else self.graph.applied(epilogue, product, "mn")

    def call_(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Record a function of portmm with a kernel of its own, called with this among its arguments."""
        if options.get("out") is not None:
            raise refuse("out= changes an array in place; use what is returned")
        return called(self.graph, function.__name__, function, args, options, own=True)

    # NumPy's protocols.

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if options.get("out") is not None:
            raise refuse(f"out= of np.{ufunc.__name__} changes an array in place; use what it returns")
        if ufunc is np.matmul and method == "__call__" and not options:
            return _product(self.graph, *inputs)
        known = UFUNCS.get(ufunc.__name__)
        if method == "__call__" and known is not None and not options:
            return _mapped(self.graph, ufunc.__name__, known, ufunc, inputs)
        reduces = method == "reduce" and isinstance(self, Value)
        if reduces and ufunc in (np.add, np.maximum) and not options.keys() - {"axis", "keepdims"}:
            axis = options.get("axis", 0)
            name = "sum" if ufunc is np.add else "max"
            return _value(self.graph, self).reduced_(
                name, axis, keepdims=options.get("keepdims", False), plain=ufunc.reduce
            )
        name_of_call = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return called(self.graph, f"np.{name_of_call}", getattr(ufunc, method), inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        del types
        name = function.__name__
        if options.get("out") is not None:
            raise refuse(f"out= of np.{name} changes an array in place; use what it returns")
        if function in STATIC:
            return STATIC[function](*args)
        if name in METHODS and isinstance(args[0], Value) and not options.keys() - METHODS[name]:
            return getattr(args[0], {"amax": "max", "amin": "min"}.get(name, name))(*args[1:], **options)
        if name in ("dot", "matmul") and len(args) == 2 and not options and all(len(np.shape(x)) <= 2 for x in args):
            return _product(self.graph, *args)
        if name in VIEWS and isinstance(args[0], Value) and not _any_inside((args[1:], options)):
            return args[0].view_(name, lambda x: function(x, *args[1:], **options))
        known = FUNCTIONS.get(name)
        if known is not None and not options:
            return _mapped(self.graph, name, known, function, args) if name == "where" else known(*args)
        return called(self.graph, f"np.{name}", function, args, options, own=name in COPIES)

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def __neg__(self) -> Any:
        return _mapped(self.graph, "neg", operator.neg, operator.neg, (self,))


class Value(Recorded, ArrayMethods):
    """A traced array."""

    __slots__ = ()

    def class_(self) -> Any:
        """The class of the array that it stands for."""
        value = self.graph.leaves[self.node.leaf] if self.node.leaf >= 0 else None
        return np.ndarray if value is None or isinstance(value, np.ndarray) else type(value)

    __class__ = posing(class_, "a traced array", refuse)

    def __repr__(self) -> str:
        return f"<traced {self.node.dtype} {self.node.shape}>"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.node.shape

    @property
    def dtype(self) -> Any:
        return np.dtype(float) if self.node.dtype is None else self.node.dtype

    @property
    def ndim(self) -> int:
        return len(self.node.shape)

    @property
    def size(self) -> int:
        return self.node.size

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        value = self.graph.leaves[self.node.leaf] if self.node.leaf >= 0 else None
        if not self.shape and isinstance(value, np.ndarray):
            self.graph.cacheable = False  # the next call may have another number
            return np.array(value, dtype)
        raise refuse(
            "a traced array has no values yet, so it cannot be converted; write x.astype(np.float32) in place "
            "of np.float32(x) and np.asarray(x), np.stack([x, y]) in place of np.array([x, y])"
        )

    def __bool__(self) -> bool:
        raise refuse(
            "an if, while, and, or, not, min or max looks at values, which differ from call to call; "
            "use pm.where, & and |, pm.minimum or pm.maximum"
        )

    def __float__(self) -> float:
        raise refuse("a traced array is not a number; use portmm's or NumPy's functions in place of math's")

    __int__ = __index__ = __complex__ = __float__

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __contains__(self, x: Any) -> bool:
        raise refuse("in looks at values, which differ from call to call")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise refuse("x[...] = changes an array in place; use pm.where, or compute a new array")

    def __delitem__(self, key: Any) -> None:
        self.__setitem__(key, None)

    # Views.

    def view_(self, name: str, function: Callable[[Any], Any]) -> Any:
        """A view of the same elements."""
        return _wrap(self.graph, self.graph.view(name, function, self.node))

    def __getitem__(self, key: Any) -> Any:
        indices = key if isinstance(key, tuple) else (key,)
        axis = next((x for x in indices if hasattr(x, "along_")), None)
        if axis is not None:
            return axis.along_(self, indices)
        plain = (int, np.integer, slice, type(None), type(Ellipsis))
        if _any_inside((indices, [(x.start, x.stop, x.step) for x in indices if isinstance(x, slice)])):
            return called(self.graph, "[] by an array", operator.getitem, (self, key), {})
        if not all(isinstance(x, plain) for x in indices):
            return called(self.graph, "[] by an array", lambda x: x[key], (self,), {})
        same = all(x is None or x is Ellipsis or x == slice(None) for x in indices)
        return self.view_("reshape" if same else "[]", lambda x: x[key])

    # Operations that the methods of arrays use.

    def product_(self, a: Any, b: Any) -> Any:
        """The product of two arrays, as `@`."""
        return _product(self.graph, a, b)

    def converted_(self, dtype: Any) -> Any:
        """The elements in another type."""
        return _wrap(self.graph, self.graph.convert(self.node, dtype))

    def called_(self, name: str, function: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
        """The result of a function that NumPy runs between kernels."""
        return called(self.graph, name, function, args, options)

    def reduced_(
        self, name: str, axis: Any, *, keepdims: bool, plain: Any, options: dict[str, Any] | None = None
    ) -> Any:
        """The result of a reduction, in a kernel if it is along the last axis."""
        if not is_last(self, axis) or options or self.node.dtype is None:
            keeps = {} if plain is getattr(elementwise, plain.__name__, None) else {"keepdims": keepdims}
            return self.called_(name, plain, (self,), {"axis": axis, **(options or {}), **keeps})
        kind = {"sum": elementwise.sum, "mean": elementwise.sum, "max": elementwise.max}[name]
        value = _wrap(self.graph, self.graph.reduce(name, "max" if name == "max" else "add", self.node, kind))
        if name == "mean":
            value = value / float(self.shape[-1])
        return squeezed(value, keepdims)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"an array that is traced has no attribute {name!r}")
        if name in CHANGES:
            raise refuse(f"{name}() changes an array in place; use the function of NumPy that returns a new one")
        if name in LOOKS:
            raise refuse(f".{name} looks at values or memory, which differ from call to call")
        if name in STATIC_METHODS:
            return getattr(np.broadcast_to(np.zeros((), self.dtype), self.shape), name)
        return lambda *args, **options: called(
            self.graph, name, lambda x, *a, **o: getattr(x, name)(*a, **o), (self, *args), options
        )


def _operators() -> None:
    """Define Python's operators on what is recorded."""

    def binary(name: str, function: Any) -> None:
        def method(self: Recorded, other: Any) -> Any:
            return _mapped(self.graph, name, function, function, (self, other))

        def reflected(self: Recorded, other: Any) -> Any:
            return _mapped(self.graph, name, function, function, (other, self))

        def changed(*_: Any) -> Any:
            raise refuse(f"an operator with = changes an array in place; write x = x {SIGNS[name]} ...")

        setattr(Recorded, f"__{name}__", method)
        if name in SIGNS:
            setattr(Recorded, f"__r{name}__", reflected)
            setattr(Recorded, f"__i{name}__", changed)

    for name in (*SIGNS, "lt", "le", "gt", "ge", "eq", "ne"):
        binary(name, getattr(operator, f"{name}_" if name in ("and", "or") else name))
    for name in ("pos", "abs", "invert"):
        function = getattr(operator, name)
        setattr(
            Recorded, f"__{name}__",
            lambda self, name=name, function=function: _mapped(self.graph, name, function, function, (self,)),
        )  # fmt: skip


_operators()


class Index(Value):
    """Traced integers computed from element indices."""

    __slots__ = ()

    __class__ = posing(lambda _: int, "an index", refuse)


def _wrap(graph: Graph, nodes: Any) -> Any:
    """Traced values for a node or a list of nodes."""
    return [Value(graph, x) for x in nodes] if isinstance(nodes, list) else Value(graph, nodes)


def _value(graph: Graph, x: Any) -> Value:
    return x if isinstance(x, Value) else Value(graph, _node(graph, x))


def _node(graph: Graph, x: Any) -> Node:
    """The node of an array-like operand."""
    if isinstance(x, Recorded):
        return x.node
    if hasattr(x, "family") or type(x).__name__ == "Quantized":
        graph.cacheable = False
        return graph.leaf(x, "a weight")
    if on_device(x):
        graph.cacheable = False
        return graph.leaf(x, "an array on a device")
    value = np.asarray(x)
    if value.dtype == object:
        raise refuse(f"a {type(x).__name__} cannot be an operand beside a traced array")
    return graph.constant(value)


def _mapped(graph: Graph, name: str, traced: Any, plain: Any, values: tuple[Any, ...]) -> Any:
    """Record an element-wise function; NumPy scalars of float64 or integer type become Python literals."""
    operands: list[Any] = []
    for x in values:
        if isinstance(x, Recorded):
            operands.append(x.node)
        elif isinstance(x, (np.ndarray, list, tuple)) and np.ndim(x):
            operands.append(_node(graph, x))
        elif isinstance(x, (bool, np.bool_)):
            operands.append(bool(x))
        elif isinstance(x, (int, np.integer)):
            operands.append(int(x))
        elif isinstance(x, (float, np.floating)) or (isinstance(x, np.ndarray) and x.dtype.kind == "f"):
            # A float32 or float16 scalar takes part in the type of the result, as in NumPy.
            operands.append(np.asarray(x)[()] if np.asarray(x).dtype in (np.float32, np.float16) else float(x))
        elif x is None or isinstance(x, str):
            raise refuse(f"{name} of {x!r}")
        else:
            operands.append(_node(graph, x))
    node = graph.map(name, traced, plain, tuple(operands), index=any(isinstance(x, Index) for x in values))
    if node.dtype == np.int32 and all(isinstance(x, (Index, int, np.integer)) for x in values):
        return Index(graph, node)
    return _wrap(graph, node)


def _product(graph: Graph, a: Any, b: Any) -> Any:
    return _wrap(graph, graph.matmul("@", _node(graph, a), _node(graph, b)))


def _named(values: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((dict(zip(("x", "rate", "seed"), values, strict=False)) | options).values())


def _any_inside(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_any_inside(y) for y in x)
    return any(_any_inside(y) for y in x.values()) if isinstance(x, dict) else isinstance(x, Recorded)


def called(graph: Graph, name: str, function: Any, args: Any, options: dict[str, Any], *, own: bool = False) -> Any:
    """Record a function that NumPy or portmm runs on arrays between kernels."""
    inputs: list[Node] = []

    def replaced(x: Any) -> Any:
        if not isinstance(x, Recorded):
            return x
        inputs.append(x.node)
        return _Slot(len(inputs) - 1)

    arguments = rebuilt((tuple(args), dict(options)), replaced)

    def plain(*arrays_: Any) -> Any:
        positional, keywords = rebuilt(arguments, lambda x: arrays_[x.number] if isinstance(x, _Slot) else x)
        return function(*positional, **keywords)

    try:
        return _wrap(graph, graph.call(name, plain, tuple(inputs), "NumPy computes it", own=own))
    except TraceError:
        raise
    except TypeError as error:
        raise refuse(f"{name}: {error}") from error


class _Slot:
    """A placeholder of an array among the arguments of a call."""

    def __init__(self, number: int) -> None:
        self.number = number
