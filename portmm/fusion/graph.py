"""Computation graph of a traced function of arrays.

Owns `Node`, one operation on whole arrays with its shape, its type and its line
in the user's function, and `Graph`, which records nodes. A node holds its NumPy function, so
that a graph can be evaluated as it was written, and, where kernels can compute it,
its expression of its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from portmm.arrays import interop, libraries, numpy_arrays, operand
from portmm.arrays.numpy_arrays import numpy_name
from portmm.errors import TraceError
from portmm.ops.matmul import matmul
from portmm.spec.dtype import accumulator
from portmm.spec.elementwise import Typed
from portmm.spec.epilogue import argument, reduction
from portmm.spec.expr import Expr, apply, node, ordered, real
from portmm.spec.expr_ops import OPS
from portmm.trace.placeholders import ByValueError
from portmm.trace.recorder import run
from portmm.util.memo import Memory, cached
from portmm.util.records import dataclass
from portmm.util.user_warnings import caller

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
_READS = dict.fromkeys(("float32", "float16", "bfloat16", "int8", "uint8"), "f32") | {"int32": "s32", "bool": "mask"}
"""Types that expressions read -> their type in expressions."""
_WRITES = {"float32": "f32", "float16": "f32", "bfloat16": "f32", "int32": "s32", "bool": "mask"}
"""Types of results that kernels compute -> the type of the expression."""
FLOATS = ("float32", "float16", "bfloat16")
CALLED = "NumPy computes it"
"""The reason why a call between kernels is one."""
_NARROW = frozenset(("float16", "bfloat16", "int8", "uint8"))


@dataclass(eq=False, slots=True)
class Node:
    """One operation on whole arrays.

    Attributes:
        kind: "array", "weight" (packed), "number", "view", "map" (element by element), "reduce"
            (along the last axis, which stays), "matmul", "conv", "pool", "norm" (of groups of channels), "join"
            (vectors, one after the other), "call" (NumPy, between kernels) or "item" (one of the results of a call).
        shape: of the result.
        dtype: of the result; None for a number, which takes the type of the other operand.
        inputs: its operands.
        plain: its function in NumPy, of arrays for `inputs`.
        name: its name in the user's function.
        line: file and line of the operation.
        number: its index in the order of the graph.
        template: for "map" and "reduce", the expression of its operands; of a product, that of its sums and of the
            operands after the first two.
        leaf: its index among the arrays, weights and numbers of a call.
        rounds: operations that follow must read the narrow type, so that it is stored before it is read.
        note: a further remark.
    """

    kind: str
    shape: Shape
    dtype: Any
    inputs: tuple[Node, ...]
    plain: Callable[..., Any]
    name: str
    line: tuple[str, int]
    number: int
    template: Expr | None = None
    leaf: int = -1
    rounds: bool = False
    note: str = ""

    @property
    def where(self) -> str:
        """The line, with the name of the file, or the name of the operation where no file has it."""
        file, line = self.line
        if not line and file:
            return file
        return f"{Path(file).name}:{line}" if file else "?"

    @property
    def origin(self) -> Node:
        """The node that a view is a view of."""
        x = self
        while x.kind == "view":
            x = x.inputs[0]
        return x

    @property
    def size(self) -> int:
        """Number of elements."""
        elements = 1
        for n in self.shape:
            elements *= n
        return elements

    def of(self, op: str) -> bool:
        """Test whether the expression contains an operation."""
        return self.template is not None and op in _operations_of(self.template)

    def operations(self) -> int:
        """Number of operations for each element."""
        return 0 if self.template is None else sum([x in OPS for x in _operations_of(self.template)])


@cached("kernels", 1024)
def _operations_of(template: Expr) -> tuple[str, ...]:
    """The operations and leaves of an expression, each as often as it occurs."""
    return tuple([x.op for x in ordered((template,))])


def here() -> tuple[str, int]:
    """The line of the user's function that is running."""
    frame = caller()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def refuse(text: str) -> TraceError:
    """An error that names the line of the user's function."""
    file, line = here()
    return TraceError(f"{file}, line {line}: {text}")


_dtypes = Memory(1024, "calls")


def _dtype_of(plain: Callable[..., Any], values: tuple[Any, ...]) -> np.dtype[Any]:
    """The result type in NumPy of a function of arrays (nodes) and literals."""
    key = (plain, *((x.dtype, bool(x.shape)) if isinstance(x, Node) else (type(x), x) for x in values))
    dtype = _dtypes.get(key)
    if dtype is None:
        like = [
            x if not isinstance(x, Node) else 1.0 if x.dtype is None else np.zeros((0,) if x.shape else (), x.dtype)
            for x in values
        ]
        with np.errstate(all="ignore"):
            dtype = np.asarray(plain(*like)).dtype
        _dtypes.keep(key, dtype)
    return dtype


def _itself(x: Array) -> Array:
    return x


@dataclass(eq=False, slots=True)
class Graph:
    """The operations recorded while a function is traced.

    Attributes:
        strict: an operation without a kernel is an error.
        nodes: in the order in which they were recorded.
        leaves: the arrays, weights and numbers of this call.
        blocked: line -> the reason why an operation there is not part of a kernel.
        lasting: the next call would record the same.
        values: of nodes that were evaluated while tracing.
        fixed: arrays and weights that are not arguments, but the same in all calls.
        device_arrays: leaves on a device, with their layouts.
        line: that messages name for all operations; None: the line of each, in the user's function.
        along: calls of NumPy's reductions -> "mean" or "var", the axes, and whether these stay.
        windows: what convolutions, pooling and group norms are of.
    """

    strict: bool = False
    nodes: list[Node] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    blocked: list[tuple[str, str]] = field(default_factory=list)
    lasting: bool = True
    values: dict[Node, Any] = field(default_factory=dict)
    fixed: dict[Node, Any] = field(default_factory=dict)
    device_arrays: dict[int, operand.Operand] = field(default_factory=dict)
    line: tuple[str, int] | None = None
    along: dict[Node, tuple[str, Any, bool]] = field(default_factory=dict)
    windows: dict[Node, Any] = field(default_factory=dict)

    def add(  # noqa: PLR0917 - the fields of a node
        self, kind: str, shape: Shape, dtype: Any, inputs: tuple[Node, ...], plain: Any, name: str, **more: Any
    ) -> Node:
        """Record an operation."""
        line = ("", 0) if kind == "number" else self.line or here()  # no message names a number's
        node = Node(kind, tuple(shape), dtype, inputs, plain, name, line, len(self.nodes), **more)
        self.nodes.append(node)
        return node

    def leaf(self, value: Any, name: str) -> Node:
        """Record an array, a weight or a number that varies per call."""
        self.leaves.append(value)
        index = len(self.leaves) - 1
        if isinstance(value, np.ndarray):
            kind, shape, dtype = "array", value.shape, value.dtype.newbyteorder("=")
        elif isinstance(value, float):
            kind, shape, dtype = "number", (), None
        elif (layout := interop.adopt(value) if libraries.on_device(value) else None) is not None:
            self.device_arrays[index] = layout
            kind, shape, dtype = "array", layout.shape, numpy_arrays.numpy_of(layout.dtype)
        else:
            # An int4 weight is dequantized to the type of the other operand.
            kind, shape, dtype = "weight", value.shape, value.owner.dtype if type(value).__name__ == "Packed" else None
        return self.add(kind, shape, dtype, (), _itself, name, leaf=index)

    def fixed_leaf(self, value: Any, name: str) -> Node:
        """Record an array or a packed weight that is the same in all calls: programs hold its address."""
        weight = not isinstance(value, np.ndarray)
        int4 = weight and type(value).__name__ != "Packed"
        dtype = None if int4 else value.owner.dtype if weight else value.dtype
        x = self.add("weight" if weight else "array", value.shape, dtype, (), lambda: value, name)
        self.fixed[x] = value
        return x

    def constant(self, value: Array) -> Node:
        """Record an array created while tracing: the next call must trace again."""
        self.lasting = False
        return self.leaf(value, "an array made while tracing")

    def sample(self, node: Node) -> Any:
        """The results of a call on the arrays of this trace, for their shapes and types."""
        return self.evaluate(node, self.leaves, self.values)

    def evaluate(self, wanted: Node, leaves: list[Any], values: dict[Node, Any]) -> Any:
        """The value of a node, computed by NumPy."""
        stack = [wanted]
        while stack:
            x = stack[-1]
            missing = [y for y in x.inputs if y not in values]
            stack += missing
            if not missing:
                stack.pop()
                if x not in values:
                    operands = [values[y] for y in x.inputs]
                    values[x] = leaves[x.leaf] if x.leaf >= 0 else x.plain(*operands)
        return values[wanted]

    def map(
        self, name: str, traced: Any, plain: Any, values: tuple[Any, ...], dtype: Any = None, *, index: bool = False
    ) -> Node:
        """Record an element-wise function of arrays and literals.

        Results are rounded to `dtype` where it is passed and narrow. With `index`
        some of the values are element indices: they take the type of the other operands.
        """
        nodes = tuple(x for x in values if isinstance(x, Node))
        if all(x.kind == "number" for x in nodes):
            raise ByValueError("an operation on numbers alone")
        if any(x.kind == "weight" for x in nodes):
            raise refuse(f"{name} of a packed weight; pack its result instead")
        shape = np.broadcast_shapes(*(x.shape for x in nodes))
        kind = dtype if dtype is not None else _dtype_of(plain, values)
        if index and kind == np.float64:
            floats = [x.dtype for x in nodes if x.dtype is not None and x.dtype.kind not in "iub"]
            kind, function = np.result_type(*floats) if floats else np.dtype(np.float32), plain

            def plain(*xs: Any) -> Any:
                return np.asarray(function(*xs)).astype(kind)

        positions = iter(range(len(nodes)))
        at = [(next(positions), x) if isinstance(x, Node) else (-1, x) for x in values]

        def filled(function: Any, operands: Any) -> Any:
            return function(*(x if i < 0 else operands[i] for i, x in at))

        template, why = self._template(filled, traced, nodes, kind)
        if template is None:
            return self.call(name, lambda *xs: filled(plain, xs), nodes, why, shape=shape, dtype=kind)
        numpy_function, rounds = (lambda *xs: filled(plain, xs)), dtype is not None and numpy_name(kind) in _NARROW
        return self.add("map", shape, kind, nodes, numpy_function, name, template=template, rounds=rounds)

    @staticmethod
    def _template(filled: Any, traced: Any, nodes: tuple[Node, ...], dtype: Any) -> tuple[Expr | None, str]:
        """The expression of an operation, or None and the reason why it has none."""
        strange = [x.dtype for x in nodes if x.dtype is not None and numpy_name(x.dtype) not in _READS]
        if strange:
            return None, f"{strange[0]} is computed by NumPy; kernels compute float32, float16, bfloat16 and int32"
        if numpy_name(dtype) not in _WRITES and numpy_name(dtype) not in _NARROW:
            return None, f"its result is {dtype}, which only NumPy computes"
        leaves = [
            node("given", (i,), "f32" if x.dtype is None else _READS[numpy_name(x.dtype)]) for i, x in enumerate(nodes)
        ]
        try:
            result = run(lambda: filled(traced, leaves))
        except TraceError as error:
            return None, str(error)
        if isinstance(result, Typed):
            result = result.value
        elif numpy_name(dtype) in _WRITES and isinstance(result, Expr) and result.dtype != _WRITES[numpy_name(dtype)]:
            return None, f"its result in NumPy is {dtype}, which kernels do not compute"
        elif numpy_name(dtype) not in _WRITES:
            return None, f"its result is {dtype}, which only NumPy computes"
        return (result, "") if isinstance(result, Expr) else (real(result), "")

    def reduce(self, name: str, kind: str, x: Node, plain: Any) -> Node:
        """Record a sum ("add") or maximum ("max") along the last axis, which stays."""
        if numpy_name(x.dtype) not in FLOATS:
            return self.call(name, plain, (x,), f"NumPy reduces {x.dtype}")
        template = reduction(kind, argument(0, "f32"))
        return self.add("reduce", (*x.shape[:-1], 1), x.dtype, (x,), plain, name, template=template)

    def matmul(self, name: str, a: Node, b: Node, dtype: Any = None, shapes: Any = None) -> Node:
        """Record a product as `numpy.matmul`, of type `dtype` if passed; `shapes` are the caller's, of operands."""
        for x in (a, b):
            if x.kind == "number" or not x.shape:
                raise ValueError("matmul: an operand is a scalar; use * to scale")
        if a.kind == "weight":
            raise refuse("a packed weight must be the right operand of @")
        if len(a.shape) == 1 or len(b.shape) == 1:
            return self._vectors(name, a, b, dtype)
        numpy_arrays.product_shape(*shapes or (a.shape, b.shape))  # whose error names the caller's shapes
        _, batch, (m, n, _) = numpy_arrays.product_shape(a.shape, b.shape)
        shape = (*batch, m, n)
        result, why = self._product(a, b, dtype, by_numpy=name == "@")
        if why:
            plain = np.matmul if result is None else lambda x, y: matmul(x, y, dtype=result)
            return self.call(name, plain, (a, b), why, shape=shape, dtype=result, own=result is not None)
        return self.add("matmul", shape, result, (a, b), lambda x, y: matmul(x, y, dtype=result), name)

    def scaled(self, a: Node, b: Node, operands: tuple[Node, ...], template: Expr, plain: Any) -> Node:
        """Record a product whose sums an expression of arrays makes float32, as scales and zero points do."""
        shape = (*a.shape[:-1], b.shape[-1])
        return self.add("matmul", shape, np.dtype(np.float32), (a, b, *operands), plain, "@", template=template)

    def _vectors(self, name: str, a: Node, b: Node, dtype: Any) -> Node:
        """Record a product with vectors, as one of matrices."""
        row, column = len(a.shape) == 1, len(b.shape) == 1
        left = self.view("reshape", lambda x: x[None, :], a) if row else a
        right = self.view("reshape", lambda x: x[:, None], b) if column else b
        product: Node = self.matmul(name, left, right, dtype, (a.shape, b.shape))
        index = (..., *((0,) if row else (slice(None),)), *((0,) if column else (slice(None),)))
        return self.view("[]", lambda x: x[index], product)

    @staticmethod
    def _product(a: Node, b: Node, wanted: Any, *, by_numpy: bool) -> tuple[Any, str]:
        """The type of a product, or None if NumPy must compute it, and the reason why it is not fused, or ""."""
        int4 = b.kind == "weight" and b.dtype is None
        storage = a.dtype if int4 else b.dtype
        if by_numpy and a.dtype.kind in "iub" and storage.kind in "iub":
            return None, f"{a.dtype} @ {storage} wraps around in NumPy; write portmm.matmul for sums in int32"
        if int4:
            return np.dtype(wanted or a.dtype), ""
        if by_numpy and {*map(numpy_arrays.name_of, (a.dtype, storage))} - {*numpy_arrays.FACTORS}:
            return None, f"{a.dtype} by {storage} is multiplied by NumPy"
        types = numpy_arrays.types_of(a.dtype, storage, np.dtype(wanted) if wanted is not None else None)
        usual = (
            np.result_type(a.dtype, storage)
            if by_numpy and "bfloat16" not in (a.dtype.name, storage.name)
            else types[2]
        )
        result = np.dtype(wanted) if wanted is not None else usual
        if types[:2] != (a.dtype, storage) or accumulator(*map(numpy_arrays.name_of, types[:2])) != "f32":
            return result, f"{a.dtype} by {storage} needs a kernel of its own"
        if result.name not in FLOATS:
            return result, f"its result is {result}"
        return result, ""

    def view(self, name: str, function: Any, x: Node) -> Any:
        """Record a view of the same elements: a node, or a list of them."""
        if x.kind in ("number", "weight"):
            raise refuse(f"{name} of a {'number' if x.kind == 'number' else 'packed weight'}")
        like = np.broadcast_to(np.zeros((), x.dtype), x.shape)
        looked = function(like)
        if isinstance(looked, (list, tuple)):
            return [self.view(name, lambda y, i=i: function(y)[i], x) for i in range(len(looked))]
        base = x.inputs[0] if x.kind == "view" else x
        if looked.shape == x.shape and name == "reshape":
            return x
        if x.kind == "view" and name == x.name == "reshape" and base.shape == looked.shape:
            return base  # the inverse reshape
        return self.add("view", looked.shape, looked.dtype, (x,), function, name)

    def call(
        self, name: str, plain: Any, inputs: tuple[Node, ...], why: str, *, shape: Any = None, dtype: Any = None,
        own: bool = False,
    ) -> Any:  # fmt: skip
        """Record a function that NumPy computes between kernels: a node, or a list of them.

        Raises:
            TraceError: only kernels are allowed, or the result is no array.
        """
        if any(x.kind == "number" for x in inputs):
            raise ByValueError("NumPy is called with a number")
        if self.device_arrays and not (own and shape is not None):
            raise refuse(f"{name} has no kernel, and NumPy does not compute on a device: {why}")
        if not own:
            if self.strict:
                raise refuse(f"{name} is no part of a kernel: {why}")
            self.blocked.append((_short(self.line or here()), f"{name}: {why}"))
        if shape is not None and dtype is not None:
            return self.add("call", shape, dtype, inputs, plain, name)
        node = self.add("call", (), None, inputs, plain, name)
        value = self.sample(node)
        if isinstance(value, (list, tuple)) and all(isinstance(x, (np.ndarray, np.generic)) for x in value):
            node.kind = "several"
            return [
                self.add("item", x.shape, x.dtype, (node,), lambda xs, i=i: xs[i], name) for i, x in enumerate(value)
            ]
        if not isinstance(value, (np.ndarray, np.generic)):
            raise refuse(f"{name} returns a {type(value).__name__}, which depends on data")
        node.shape, node.dtype = value.shape, value.dtype
        return node

    def convert(self, x: Node, dtype: Any) -> Node:
        """Record a conversion, as `ndarray.astype`."""
        wanted = np.dtype(dtype)
        if wanted == x.dtype:
            return x
        if not wanted.isnative:
            why = "kernels write numbers in native byte order"
            return self.call("astype", lambda y: y.astype(wanted), (x,), why, shape=x.shape, dtype=wanted)
        kinds = (_READS.get(numpy_name(x.dtype)), _WRITES.get(numpy_name(wanted)))
        known: dict[Any, Any] = {
            ("f32", "f32"): lambda y: y, ("s32", "f32"): real, ("mask", "f32"): real,
            ("f32", "s32"): lambda y: apply("int", y), ("mask", "s32"): lambda y: apply("int", real(y)),
            ("f32", "mask"): lambda y: apply("ne", y, 0), ("s32", "mask"): lambda y: apply("ne", y, 0),
        }  # fmt: skip
        traced = known.get(kinds)
        if traced is None or (kinds[1] == "s32" and numpy_name(x.dtype) in ("int8", "uint8")):
            why = f"only NumPy converts {x.dtype} to {wanted}"
            return self.call("astype", lambda y: y.astype(wanted), (x,), why, shape=x.shape, dtype=wanted)
        return self.map("astype", traced, lambda y: y.astype(wanted), (x,), dtype=wanted)


def _short(line: tuple[str, int]) -> str:
    return f"{Path(line[0]).name}:{line[1]}"
