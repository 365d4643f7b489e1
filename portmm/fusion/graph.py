"""What a function of arrays does, as a graph.

Owns `Node`, one operation on whole arrays with its shape, its type and the line
of the user's function that asked for it, and `Graph`, which takes them down.
Imports `ops.matmul`, `arrays.numpy_arrays`, `spec.expr`, `spec.epilogue`. A node knows what it means in NumPy, so
that a graph can be evaluated as it was written, and, where kernels can compute it,
the expression that it is of its operands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, numpy_arrays
from portmm.errors import TraceError
from portmm.ops import matmul as matmul_op
from portmm.spec.dtype import accumulator
from portmm.spec.elementwise import Typed
from portmm.spec.epilogue import argument, reduction
from portmm.spec.expr import OPS, Expr, apply, node, ordered, real
from portmm.util.memo import Memory
from portmm.util.user_warnings import caller

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
_READ = dict.fromkeys(("float32", "float16", "bfloat16", "int8", "uint8"), "f32") | {"int32": "s32", "bool": "mask"}
"""Types that expressions read -> what they are read as."""
_MADE = {"float32": "f32", "float16": "f32", "bfloat16": "f32", "int32": "s32", "bool": "mask"}
"""Types that kernels compute results of -> the type of the expression."""
FLOATS = ("float32", "float16", "bfloat16")
_NARROW = frozenset(("float16", "bfloat16", "int8", "uint8"))


class ByValueError(TraceError):
    """A number that each call gives must be known to go on: trace again, with its value."""


@dataclass(eq=False, slots=True)
class Node:
    """One operation on whole arrays.

    Attributes:
        kind: "array", "weight" (packed), "number", "view", "map" (element by element), "reduce"
            (along the last axis, which stays), "matmul", "call" (NumPy, between kernels) or "item"
            (one of the results of a call).
        shape: of the result.
        dtype: of the result; None for a number, which takes the type of what it meets.
        inputs: what it is computed from.
        plain: its meaning in NumPy, of arrays for `inputs`.
        name: what the user called it.
        line: where that was: file and line.
        number: where it comes in the order of the graph.
        template: for "map" and "reduce", the expression, of values given.
        leaf: which of the arrays, weights and numbers of a call it is.
        rounds: what follows must see the narrow type, so that it is stored before it is read.
        note: what else there is to say of it.
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
        """The line, shortly."""
        file, line = self.line
        return f"{Path(file).name}:{line}" if file else "?"

    @property
    def size(self) -> int:
        """Elements."""
        found = 1
        for n in self.shape:
            found *= n
        return found

    def of(self, op: str) -> bool:
        """The expression holds an operation."""
        return self.template is not None and any(x.op == op for x in ordered((self.template,)))

    def operations(self) -> int:
        """Operations for each element."""
        return sum(x.op in OPS for x in ordered((self.template,))) if self.template is not None else 0


def here() -> tuple[str, int]:
    """The line of the user's function that is running."""
    frame = caller()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def refuse(text: str) -> TraceError:
    """An error that names the line of the user's function."""
    file, line = here()
    return TraceError(f"{file}, line {line}: {text}")


_dtypes = Memory(1024)


def _dtype_of(plain: Callable[..., Any], values: tuple[Any, ...]) -> np.dtype[Any]:
    """The type that NumPy gives a function of arrays (nodes) and literals."""
    key = (plain, *((x.dtype, bool(x.shape)) if isinstance(x, Node) else (type(x), x) for x in values))
    found = _dtypes.get(key)
    if found is None:
        like = [
            x if not isinstance(x, Node) else 1.0 if x.dtype is None else np.zeros((0,) if x.shape else (), x.dtype)
            for x in values
        ]
        with np.errstate(all="ignore"):
            found = np.asarray(plain(*like)).dtype
        _dtypes.keep(key, found)
    return found


def _itself(x: Array) -> Array:
    return x


@dataclass(eq=False, slots=True)
class Graph:
    """What is taken down while a function runs.

    Attributes:
        strict: what no kernel computes is an error.
        nodes: in the order in which they arose.
        leaves: the arrays, weights and numbers of this call.
        blocked: line -> why something there is no part of a kernel.
        lasting: the same will come of the next call.
        values: of nodes that were needed while tracing.
        fixed: weights that no call gives, made of others.
        there: leaves that lie on a device, and what is known of them.
    """

    strict: bool = False
    nodes: list[Node] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    blocked: list[tuple[str, str]] = field(default_factory=list)
    lasting: bool = True
    values: dict[Node, Any] = field(default_factory=dict)
    fixed: dict[Node, Any] = field(default_factory=dict)
    there: dict[int, interop.Foreign] = field(default_factory=dict)

    def add(  # noqa: PLR0917 - what a node is
        self, kind: str, shape: Shape, dtype: Any, inputs: tuple[Node, ...], plain: Any, name: str, **more: Any
    ) -> Node:
        """Take an operation down."""
        made = Node(kind, tuple(shape), dtype, inputs, plain, name, here(), len(self.nodes), **more)
        self.nodes.append(made)
        return made

    def leaf(self, value: Any, name: str) -> Node:
        """An array, a weight or a number that each call gives anew."""
        self.leaves.append(value)
        where = len(self.leaves) - 1
        if isinstance(value, np.ndarray):
            kind, shape, dtype = "array", value.shape, value.dtype.newbyteorder("=")
        elif isinstance(value, float):
            kind, shape, dtype = "number", (), None
        elif (found := interop.adopt(value) if interop.on_device(value) else None) is not None:
            self.there[where] = found
            kind, shape, dtype = "array", found.shape, numpy_arrays.numpy_of(found.dtype)
        else:
            # One of four bits is multiplied as numbers of the type of what it meets.
            kind, shape, dtype = "weight", value.shape, value.owner.dtype if type(value).__name__ == "Packed" else None
        return self.add(kind, shape, dtype, (), _itself, name, leaf=where)

    def constant(self, value: Array) -> Node:
        """An array that arose while tracing: the next call must look again."""
        self.lasting = False
        return self.leaf(value, "an array made while tracing")

    def evaluate(self, wanted: Node, leaves: list[Any], values: dict[Node, Any]) -> Any:
        """The value of a node, as NumPy computes it."""
        stack = [wanted]
        while stack:
            x = stack[-1]
            missing = [y for y in x.inputs if y not in values]
            stack += missing
            if not missing:
                stack.pop()
                if x not in values:
                    given_ = [values[y] for y in x.inputs]
                    values[x] = leaves[x.leaf] if x.leaf >= 0 else x.plain(*given_)
        return values[wanted]

    def map(
        self, name: str, traced: Any, plain: Any, values: tuple[Any, ...], dtype: Any = None, *, index: bool = False
    ) -> Node:
        """A function of each element of some arrays and literals.

        Results of a type that is given are rounded to it, where it is narrow. With `index`
        some of the values are integers that count elements: they take the type of what they meet.
        """
        nodes = tuple(x for x in values if isinstance(x, Node))
        if all(x.kind == "number" for x in nodes):
            raise ByValueError("numbers meet")
        if any(x.kind == "weight" for x in nodes):
            raise refuse(f"{name} of a packed weight; pack what it makes of the weight instead")
        shape = np.broadcast_shapes(*(x.shape for x in nodes))
        kind = dtype if dtype is not None else _dtype_of(plain, values)
        if index and kind == np.float64:
            floats = [x.dtype for x in nodes if x.dtype is not None and x.dtype.kind not in "iub"]
            kind, function = np.result_type(*floats) if floats else np.dtype(np.float32), plain

            def plain(*xs: Any) -> Any:
                return np.asarray(function(*xs)).astype(kind)

        places = iter(range(len(nodes)))
        at = [(next(places), x) if isinstance(x, Node) else (-1, x) for x in values]

        def filled(function: Any, given_: Any) -> Any:
            return function(*(x if i < 0 else given_[i] for i, x in at))

        template, why = self._template(filled, traced, nodes, kind)
        if template is None:
            called: Node = self.call(name, lambda *xs: filled(plain, xs), nodes, why, shape=shape, dtype=kind)
            return called
        whole, rounds = (lambda *xs: filled(plain, xs)), dtype is not None and kind.name in _NARROW
        return self.add("map", shape, kind, nodes, whole, name, template=template, rounds=rounds)

    @staticmethod
    def _template(filled: Any, traced: Any, nodes: tuple[Node, ...], dtype: Any) -> tuple[Expr | None, str]:
        """The expression of values given, or None and why there is none."""
        strange = [x.dtype for x in nodes if x.dtype is not None and x.dtype.name not in _READ]
        if strange:
            return None, f"{strange[0]} is computed by NumPy; kernels compute float32, float16, bfloat16 and int32"
        if dtype.name not in _MADE and dtype.name not in _NARROW:
            return None, f"its result is {dtype}, which NumPy computes"
        leaves = [node("given", (i,), "f32" if x.dtype is None else _READ[x.dtype.name]) for i, x in enumerate(nodes)]
        try:
            found = filled(traced, leaves)
        except TraceError as error:
            return None, str(error)
        if isinstance(found, Typed):
            found = found.value
        elif dtype.name in _MADE and isinstance(found, Expr) and found.dtype != _MADE[dtype.name]:
            return None, f"NumPy makes {dtype} of it, which kernels do not"
        elif dtype.name not in _MADE:
            return None, f"its result is {dtype}, which NumPy computes"
        return (found, "") if isinstance(found, Expr) else (real(found), "")

    def reduce(self, name: str, kind: str, x: Node, plain: Any) -> Node:
        """A sum ("add") or maximum ("max") along the last axis, which stays."""
        if x.dtype.name not in FLOATS:
            return self.call(name, plain, (x,), f"NumPy reduces {x.dtype}")  # type: ignore[no-any-return]
        template = reduction(kind, argument(0, "f32"))
        return self.add("reduce", (*x.shape[:-1], 1), x.dtype, (x,), plain, name, template=template)

    def matmul(self, name: str, a: Node, b: Node, dtype: Any = None, given: Any = None) -> Node:
        """A product, as `numpy.matmul`, of a type that may be asked for; its operands had the shapes `given`."""
        for x in (a, b):
            if x.kind == "number" or not x.shape:
                raise ValueError("matmul: an operand is a scalar; use * to scale")
        if a.kind == "weight":
            raise refuse("a packed weight stands on the right of @")
        if len(a.shape) == 1 or len(b.shape) == 1:
            return self._vectors(name, a, b, dtype)
        batch, (m, n) = numpy_arrays.result_shape(np.broadcast_to(np.zeros((), np.int8), a.shape), b.shape, given)
        shape = (*batch, m, n)
        result, why = self._product(a, b, dtype, by_numpy=name == "@")
        if why:
            plain = np.matmul if result is None else lambda x, y: matmul_op.matmul(x, y, dtype=result)
            apart: Node = self.call(name, plain, (a, b), why, shape=shape, dtype=result, own=result is not None)
            return apart
        return self.add("matmul", shape, result, (a, b), lambda x, y: matmul_op.matmul(x, y, dtype=result), name)

    def _vectors(self, name: str, a: Node, b: Node, dtype: Any) -> Node:
        """A product with vectors, as one of matrices."""
        row, column = len(a.shape) == 1, len(b.shape) == 1
        left = self.view("reshape", lambda x: x[None, :], a) if row else a
        right = self.view("reshape", lambda x: x[:, None], b) if column else b
        found: Node = self.matmul(name, left, right, dtype, (a.shape, b.shape))
        index = (..., *((0,) if row else (slice(None),)), *((0,) if column else (slice(None),)))
        return self.view("[]", lambda x: x[index], found)  # type: ignore[no-any-return]

    @staticmethod
    def _product(a: Node, b: Node, wanted: Any, *, by_numpy: bool) -> tuple[Any, str]:
        """The type of a product, and why no kernel of a fused function computes it; None for the type if NumPy must."""
        coded = b.kind == "weight" and b.dtype is None
        held = a.dtype if coded else b.dtype
        if by_numpy and a.dtype.kind in "iub" and held.kind in "iub":
            return None, f"{a.dtype} @ {held} wraps around in NumPy; write portmm.matmul for sums in int32"
        if coded:
            return np.dtype(wanted or a.dtype), ""
        types = numpy_arrays.types_of(a.dtype, held, np.dtype(wanted) if wanted is not None else None)
        usual = np.result_type(a.dtype, held) if by_numpy and "bfloat16" not in (a.dtype.name, held.name) else types[2]
        result = np.dtype(wanted) if wanted is not None else usual
        if types[:2] != (a.dtype, held) or accumulator(*map(numpy_arrays.name_of, types[:2])) != "f32":
            return result, f"{a.dtype} by {held} is a product of its own"
        if result.name not in FLOATS:
            return result, f"its result is {result}"
        return result, ""

    def view(self, name: str, function: Any, x: Node) -> Any:
        """Other looks at the same elements: a node, or a list of them."""
        if x.kind in ("number", "weight"):
            raise refuse(f"{name} of a {'number' if x.kind == 'number' else 'packed weight'}")
        like = np.broadcast_to(np.zeros((), x.dtype), x.shape)
        found = function(like)
        if isinstance(found, (list, tuple)):
            return [self.view(name, lambda y, i=i: function(y)[i], x) for i in range(len(found))]
        base = x.inputs[0] if x.kind == "view" else x
        if found.shape == x.shape and name == "reshape":
            return x
        if x.kind == "view" and name == x.name == "reshape" and base.shape == found.shape:
            return base  # there and back again
        return self.add("view", found.shape, found.dtype, (x,), function, name)

    def call(
        self, name: str, plain: Any, inputs: tuple[Node, ...], why: str, *, shape: Any = None, dtype: Any = None,
        own: bool = False,
    ) -> Any:  # fmt: skip
        """What NumPy computes between kernels: a node, or a list of them.

        Raises:
            TraceError: nothing but kernels is wanted, or what comes of it is no array.
        """
        if any(x.kind == "number" for x in inputs):
            raise ByValueError("NumPy is given a number")
        if self.there and not (own and shape is not None):
            raise refuse(f"{name} has no kernel, and NumPy does not compute on a device: {why}")
        if not own:
            if self.strict:
                raise refuse(f"{name} is no part of a kernel: {why}")
            self.blocked.append((_short(here()), f"{name}: {why}"))
        if shape is not None and dtype is not None:
            return self.add("call", shape, dtype, inputs, plain, name)
        made = self.add("call", (), None, inputs, plain, name)
        found = self.evaluate(made, self.leaves, self.values)
        if isinstance(found, (list, tuple)) and all(isinstance(x, (np.ndarray, np.generic)) for x in found):
            made.kind = "several"
            return [
                self.add("item", x.shape, x.dtype, (made,), lambda xs, i=i: xs[i], name) for i, x in enumerate(found)
            ]
        if not isinstance(found, (np.ndarray, np.generic)):
            raise refuse(f"{name} gives a {type(found).__name__}, which depends on data")
        made.shape, made.dtype = found.shape, found.dtype
        return made

    def convert(self, x: Node, dtype: Any) -> Node:
        """As `ndarray.astype`."""
        wanted = np.dtype(dtype)
        if wanted == x.dtype:
            return x
        if not wanted.isnative:
            why = "kernels write numbers in the machine's order of bytes"
            swapped: Node = self.call("astype", lambda y: y.astype(wanted), (x,), why, shape=x.shape, dtype=wanted)
            return swapped
        kinds = (_READ.get(x.dtype.name), _MADE.get(wanted.name))
        known: dict[Any, Any] = {
            ("f32", "f32"): lambda y: y, ("s32", "f32"): real, ("mask", "f32"): real,
            ("f32", "s32"): lambda y: apply("int", y), ("mask", "s32"): lambda y: apply("int", real(y)),
            ("f32", "mask"): lambda y: apply("ne", y, 0), ("s32", "mask"): lambda y: apply("ne", y, 0),
        }  # fmt: skip
        traced = known.get(kinds)
        if traced is None or (kinds[1] == "s32" and x.dtype.name in ("int8", "uint8")):
            why = f"{x.dtype} becomes {wanted} by NumPy"
            return self.call("astype", lambda y: y.astype(wanted), (x,), why, shape=x.shape, dtype=wanted)  # type: ignore[no-any-return]
        return self.map("astype", traced, lambda y: y.astype(wanted), (x,), dtype=wanted)


def _short(line: tuple[str, int]) -> str:
    return f"{Path(line[0]).name}:{line[1]}"
