"""Translation of a graph of PyTorch's operators into a graph of whole arrays, for one kind of inputs.

Owns `Translator`, which walks the nodes: operators with a row in `portmm.torch.aten` become nodes that kernels compute;
operators of constants alone are computed now; PyTorch computes all others between kernels, with a reason in the report.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from portmm.arrays.interop import as_numpy, as_tensor
from portmm.arrays.pages import Chunk, adjoining
from portmm.errors import TraceError
from portmm.fusion.recorder import WholeArrays
from portmm.ops.prepack import pack
from portmm.torch import convolutions, products  # noqa: F401 - their rows are registered
from portmm.torch.aten import HANDLERS, MOVES, Unsupported
from portmm.trace.placeholders import Array

if TYPE_CHECKING:
    from portmm.fusion.graph import Node

_LINE = re.compile(r'File "([^"]+)", line (\d+)')


class Constants:
    """The values that stay the same between calls: parameters, buffers, and what is computed of them.

    Attributes:
        sources: the tensors of the graph's inputs.
        read: inputs whose values are part of programs, as they were packed or computed with; others are read in place.
        memory: of what is packed.
    """

    def __init__(self, sources: dict[int, torch.Tensor]) -> None:
        self.sources = sources
        self.read: set[int] = set()
        self.views: dict[int, np.ndarray[Any, Any]] = {}
        self.packed: dict[tuple[Any, ...], Any] = {}
        self.memory = Chunk()
        self.origins: dict[int, frozenset[int]] = {}
        self.kept: list[Any] = []
        for i, x in sources.items():
            self.origin(x, frozenset((i,)))

    def origin(self, x: torch.Tensor, origins: frozenset[int]) -> None:
        """Note the inputs that a constant depends on."""
        self.kept.append(x)
        self.origins[id(x)] = self.origins.get(id(x), frozenset()) | origins

    def computed(self, function: Callable[..., Any], args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """The result of an operator of constants."""
        result = function(*args, **kwargs)
        origins = frozenset().union(*(self.origins.get(id(x), ()) for x in tensors))
        storages = {x.untyped_storage().data_ptr() for x in tensors}
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.origin(x, origins)
                if x.untyped_storage().data_ptr() not in storages:
                    self.read |= origins
        return result

    def array(self, x: torch.Tensor) -> np.ndarray[Any, Any]:
        """A constant as an array over the same memory."""
        if id(x) not in self.views:
            self.kept.append(x)
            self.views[id(x)] = as_numpy(x.detach())
        return self.views[id(x)]

    def number(self, x: torch.Tensor) -> Any:
        """The value of a constant without dimensions."""
        self.read |= self.origins.get(id(x), frozenset())
        return x.item()

    def weight(self, x: torch.Tensor, activations: np.dtype[Any]) -> Any:
        """A matrix in panels, packed once for all programs."""
        key = (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, activations)
        self.read |= self.origins.get(id(x), frozenset())
        if key not in self.packed:
            with adjoining(self.memory):
                self.packed[key] = pack(self.array(x), activations=activations)
        return self.packed[key]

    def panels(self, tensors: list[torch.Tensor], make: Callable[[], Any], *more: Any) -> Any:
        """A value made of tensors and of nothing else but `more`, once for all programs."""
        self.read |= frozenset().union(*(self.origins.get(id(x), ()) for x in tensors))
        key = (*map(id, tensors), *more)
        if key not in self.packed:
            with adjoining(self.memory):
                self.packed[key] = make()
        return self.packed[key]


class Translator:
    """The translation of one graph for the shapes of one call.

    Args:
        module: a graph of PyTorch's operators, without mutation.
        constants: the inputs that stay the same, by position.
        args: the inputs of the call.

    Attributes:
        recorder: the graph of whole arrays.
        eager: of each operator that PyTorch computes, its line, its name, and the reason.
        ready: values of operators that the kernel of one before them has computed.
    """

    def __init__(self, module: torch.fx.GraphModule, constants: Constants, args: list[Any]) -> None:
        self.module, self.constants = module, constants
        self.recorder = WholeArrays()
        self.eager: list[tuple[str, str]] = []
        self.ready: dict[Any, Any] = {}
        self.values: dict[Any, Any] = {}
        self.arrays: dict[Any, Array] = {}
        self.symbols: dict[Any, int] = {}
        self.leaves: list[np.ndarray[Any, Any]] = []
        self.now: Any = None
        self.args = args

    def run(self) -> list[Any]:
        """The outputs: placeholders of arrays, constants, numbers and None."""
        inputs = iter(enumerate(self.args))
        for node in self.module.graph.nodes:
            self.now = node
            if node.op == "placeholder":
                i, x = next(inputs)
                self.values[node] = self.input(node, i, x)
            elif node.op == "get_attr":
                self.values[node] = _attribute(self.module, node.target)
            elif node.op == "output":
                return list(torch.fx.node.map_arg(node.args[0], self.values.__getitem__))
            else:
                first = len(self.recorder.nodes)
                self.values[node] = self.call(node)
                self.locate(node, first)
        raise Unsupported("the graph has no output")

    def input(self, node: Any, i: int, x: Any) -> Any:
        """The value of an input."""
        val = node.meta.get("val")
        if isinstance(x, torch.Tensor):
            self.bind(getattr(val, "shape", ()), x.shape)
            if i in self.constants.sources:
                return self.constants.sources[i]
            array = as_numpy(x.detach())
            self.leaves.append(array)
            return Array(self.recorder, self.recorder.leaf(array, node.name))
        if isinstance(val, torch.SymInt):
            self.bind([val], [x])
        return x

    def bind(self, symbolic: Any, concrete: Any) -> None:
        """Bind the symbols of extents to those of this call."""
        for s, n in zip(symbolic, concrete, strict=False):
            if isinstance(s, torch.SymInt) and s.node.expr.is_symbol:
                self.symbols[s.node.expr] = int(n)

    def extent(self, s: Any) -> int:
        """An extent of this call.

        Raises:
            Unsupported: it depends on elements of tensors.
        """
        if not isinstance(s, torch.SymInt):
            return int(s)
        expression = s.node.expr.xreplace(self.symbols)
        if getattr(expression, "free_symbols", ()):
            raise Unsupported(f"an extent, {expression}, depends on elements of tensors")
        return int(expression)

    def layouts(self) -> list[tuple[tuple[int, ...], int] | None]:
        """Strides and the offset of each output that is a view, or may be columns of a joined product; else None."""
        outputs = next(iter(self.module.graph.find_nodes(op="output"))).args[0]
        return [self.layout(x) if _is_view(x) or _is_quantized(x) else None for x in outputs]

    def layout(self, node: Any) -> tuple[tuple[int, ...], int]:
        """Strides and the offset of a tensor, in elements."""
        val = node.meta["val"]
        return tuple(map(self.extent, val.stride())), self.extent(val.storage_offset())

    def locate(self, node: Any, first: int) -> None:
        """Give the new nodes of the array graph the line of the user's module."""
        line = _line(node)
        for x in self.recorder.nodes[first:]:
            x.line = line

    # Operators.

    def call(self, node: Any) -> Any:
        """The value of an operator."""
        if node in self.ready:
            return self.ready[node]
        function = node.target
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        traced, tensors = _among((args, kwargs))
        if not traced and torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
            return self.constants.computed(function, args, kwargs, tensors)
        if getattr(function, "__name__", "") == "getitem":
            return args[0][args[1]]
        if node.meta.get("val") is None:
            return None  # an assertion
        name = str(function)
        handler = HANDLERS.get(name)
        why = "no kernel computes it"
        if handler is not None:
            first = len(self.recorder.nodes)
            try:
                return self.converted(handler(self, *args, **kwargs), node.meta["val"])
            except (Unsupported, TraceError) as error:
                del self.recorder.nodes[first:]
                why = str(error)
        return self.by_torch(function, args, kwargs, traced, "" if name in MOVES else why)

    def converted(self, value: Any, val: Any) -> Any:
        """The value of an operator in the type that PyTorch gives it."""
        if isinstance(value, (list, tuple)):
            vals = val if isinstance(val, (list, tuple)) else [val] * len(value)
            return [self.converted(x, v) for x, v in zip(value, vals, strict=False)]
        if not isinstance(value, Array) or not isinstance(val, torch.Tensor):
            return value
        shape, dtype = tuple(map(self.extent, val.shape)), numpy_dtype(val.dtype)
        if value.dtype != dtype:
            value = value.astype(dtype)
        return value if value.shape == shape else np.broadcast_to(value, shape)

    def by_torch(self, function: Any, args: Any, kwargs: Any, traced: list[Array], why: str) -> Any:
        """The value of an operator that PyTorch computes between kernels; not reported if there is no reason `why`."""
        name = str(function).removesuffix(".default")
        if why:
            file, line = _line(self.now)
            self.eager.append((f"{Path(file).name}:{line}", f"{name}: {why}"))
        numbers = {id(x.node): i for i, x in enumerate(traced)}
        slots = _nested((args, kwargs), lambda x: _Slot(numbers[id(x.node)]) if type(x) is Array else x)

        def plain(*arrays: Any) -> Any:
            tensors = [as_tensor(x) for x in arrays]
            positional, named = _nested(slots, lambda x: tensors[x.number] if type(x) is _Slot else x)
            result = function(*positional, **named)
            if isinstance(result, torch.Tensor):
                return as_numpy(result.to(types[0]))
            return tuple([as_numpy(x.to(y)) for x, y in zip(result, types, strict=True) if isinstance(x, torch.Tensor)])

        val, inputs = self.now.meta["val"], tuple([x.node for x in traced])
        # Statistics of a normalisation of narrow types are of another type than PyTorch describes.
        types = [getattr(v, "dtype", None) for v in (val if isinstance(val, (list, tuple)) else [val])]
        if isinstance(val, torch.Tensor):
            shape, dtype = self.described(val)
            return Array(self.recorder, self.recorder.add("call", shape, dtype, inputs, plain, name))
        if not isinstance(val, (list, tuple)):
            raise Unsupported(f"{name} returns a {type(val).__name__}")
        several = self.recorder.add("several", (), None, inputs, plain, name)
        results: list[Array | None] = []
        i = 0
        for v in val:
            if not isinstance(v, torch.Tensor):
                results.append(None)
                continue
            item = self.recorder.add("item", *self.described(v), (several,), lambda xs, i=i: xs[i], name)
            results.append(Array(self.recorder, item))
            i += 1
        return results

    def described(self, val: torch.Tensor) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape and the type of a result."""
        return tuple(map(self.extent, val.shape)), numpy_dtype(val.dtype)

    def blocked(self) -> list[tuple[str, str]]:
        """Lines, and the reasons why PyTorch computes an operator there."""
        return self.eager

    # Operands, for handlers.

    def array(self, x: Any) -> Array:
        """An operand as a traced array."""
        if isinstance(x, Array):
            return x
        if id(x) not in self.arrays:
            self.arrays[id(x)] = Array(self.recorder, self.recorder.fixed_leaf(self.constants.array(x), "a constant"))
        return self.arrays[id(x)]

    def operand(self, x: Any) -> Any:
        """An operand of an element-wise function: a traced array of a type that kernels read, or a number."""
        if isinstance(x, torch.Tensor) and not x.ndim:
            return self.constants.number(x)
        if isinstance(x, torch.Tensor) and not (x.dtype.is_floating_point or x.dtype is torch.bool):
            x = self.constants.computed(torch.Tensor.to, (x, torch.float32), {}, [x])
        y = self.array(x) if isinstance(x, torch.Tensor) else x
        if isinstance(y, Array) and y.dtype.name not in READS:
            raise Unsupported(f"kernels do not read {y.dtype}")
        return y

    def weight(self, x: Any, activations: np.dtype[Any]) -> Any:
        """The right operand of a product: a constant matrix is packed once."""
        if isinstance(x, torch.Tensor) and x.ndim == 2 and min(x.shape) > 0:
            key = id(x), activations
            if key not in self.arrays:
                node: Node = self.recorder.fixed_leaf(self.constants.weight(x, activations), "a weight")
                self.arrays[key] = Array(self.recorder, node)
            return self.arrays[key]
        return self.array(x)


READS = frozenset(("float32", "float16", "bfloat16", "bool"))
"""Types of operands that kernels read as PyTorch does; PyTorch computes with integers."""


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy's type of elements.

    Raises:
        Unsupported: there is none.
    """
    if dtype not in _dtypes:
        try:
            _dtypes[dtype] = as_numpy(torch.empty(0, dtype=dtype)).dtype
        except TypeError as error:
            raise Unsupported(f"NumPy has no type for {dtype}") from error
    return _dtypes[dtype]


_dtypes: dict[torch.dtype, np.dtype[Any]] = {}


def _line(node: Any) -> tuple[str, int]:
    """The line of the user's code that an operator comes from."""
    lines = _LINE.findall(node.meta.get("stack_trace") or "")
    users = [x for x in lines if "/portmm/torch/" not in x[0]] or lines
    return (users[-1][0], int(users[-1][1])) if users else (str(node.name), 0)


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    if not isinstance(module, torch.Tensor):
        raise Unsupported(f"the graph has a part {name} with control flow")
    return module


def _among(values: Any) -> tuple[list[Array], list[torch.Tensor]]:
    """Traced arrays, each once, and tensors among nested values."""
    traced: dict[int, Array] = {}
    tensors: list[torch.Tensor] = []

    def seen(x: Any) -> Any:
        if isinstance(x, Array):
            traced.setdefault(id(x.node), x)
        elif isinstance(x, torch.Tensor):
            tensors.append(x)
        return x

    _nested(values, seen)
    return list(traced.values()), tensors


class _Slot(NamedTuple):
    """The place of a traced array among the arguments of an operator."""

    number: int


def _nested(x: Any, function: Callable[[Any], Any]) -> Any:
    """Nested lists, tuples and dicts with a function of their leaves."""
    kind = type(x)
    if kind is dict or issubclass(kind, dict):
        return {k: _nested(y, function) for k, y in x.items()}
    if issubclass(kind, (list, tuple)) and kind not in (torch.Size, _Slot):
        items = [_nested(y, function) for y in x]
        return tuple(items) if issubclass(kind, tuple) else items
    return function(x)


def _is_quantized(node: Any) -> bool:
    """Whether a node is a quantized layer: by name, since the operator is there only where such layers are."""
    return str(getattr(node, "target", "")) == products.QUANTIZED


def _is_view(node: Any) -> bool:
    """Whether the value of a node is a view of another's."""
    if getattr(node, "op", "") != "call_function":
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return _is_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(x.alias_info is not None for x in schema.returns)
