"""Programs of a graph of PyTorch's operators.

Owns `CompiledGraph`, which runs a graph as few kernels: a program for each kind of inputs (shapes, strides), made when
such inputs are first met. Parameters are read in place, or packed once; a parameter that was changed since is packed
again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

from portmm.arrays.interop import as_numpy, as_tensor
from portmm.fusion.compilation import compiled_program
from portmm.fusion.program import Explained
from portmm.torch.aten import Unsupported
from portmm.torch.translation import Constants, Translator
from portmm.trace.placeholders import Array

MOST_PROGRAMS = 256
_version = attrgetter("_version")
_PLAIN = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8,
                    torch.int8, torch.int16))  # fmt: skip


class CompiledGraph:
    """A graph as a callable of a list of inputs, which it empties.

    Args:
        module: a graph of PyTorch's operators, without mutation.
        fixed: positions of inputs that stay the same: parameters and buffers.
        name: in reports.
    """

    def __init__(self, module: torch.fx.GraphModule, fixed: tuple[int, ...], name: str) -> None:
        merge(module.graph)  # masks are computed once for all layers
        module.recompile()
        self.module, self.fixed, self.name = module, fixed, name
        self.programs: dict[Any, Callable[[Any], Any]] = {}
        self.explained: dict[Any, Explained] = {}
        self.begun = False
        self.varying: tuple[int, ...] = ()
        self.constants = Constants({})
        self.sources: tuple[Any, ...] = ()
        self.watched: tuple[Any, ...] = ()
        self.versions: list[int] = []
        self.eager = ""

    def __call__(self, args: list[Any]) -> Any:
        """The outputs of the graph."""
        if self.eager:
            return self.by_torch(args)
        if not self.begun or not self.current(args):
            self.begin(args)
        arrays, key = [], []
        for i in self.varying:
            x = args[i]
            if x.__class__ is int:
                key.append(x)
                continue
            try:
                a = x.numpy()
            except (RuntimeError, TypeError):  # it requires gradients, or is of a type that is not NumPy's
                a = as_numpy(x.detach())
            arrays.append(a)
            key += (a.shape, a.strides)
        kind = tuple(key)
        program = self.programs.get(kind)
        if program is None:
            try:
                program = self.make(kind, args)
            except Unsupported as error:
                self.eager = str(error)
                return self.by_torch(args)
        args.clear()
        return program(arrays)

    def current(self, args: list[Any]) -> bool:
        """Whether parameters are those of the programs, unchanged where these have read their values."""
        if not all(map(is_, [args[i] for i in self.fixed], self.sources)):
            return False
        return [*map(_version, self.watched)] == self.versions

    def begin(self, args: list[Any]) -> None:
        """Take parameters as they are now, and drop the programs for others."""
        self.begun = True
        self.programs.clear()
        self.explained.clear()
        self.sources = tuple([args[i] for i in self.fixed])
        self.constants = Constants({i: args[i].detach() for i in self.fixed})
        self.varying = tuple([i for i in range(len(args)) if i not in self.fixed])
        self.watch()

    def watch(self) -> None:
        """Note the versions of parameters whose values programs have read."""
        read = sorted(self.constants.read)
        sources = dict(zip(self.fixed, self.sources, strict=True))
        # Tensors of inference mode have no version, and cannot be changed outside of it.
        self.watched = tuple([sources[i] for i in read if not sources[i].is_inference()])
        self.versions = [*map(_version, self.watched)]

    def make(self, kind: Any, args: list[Any]) -> Callable[[Any], Any]:
        """The program for inputs of a kind.

        Raises:
            Unsupported: PyTorch must compute the graph.
        """
        with torch.no_grad():
            translator = Translator(self.module, self.constants, args)
            results = translator.run()
            traced = [x for x in results if isinstance(x, Array)]
            run, kernels, _, apart, source, notes = compiled_program(
                translator.recorder, [x.node for x in traced], tuple(traced)
            )
        translator.recorder.leaves, translator.recorder.values = [], {}
        blocked = dict.fromkeys([*translator.blocked(), *apart])
        if len(self.programs) >= MOST_PROGRAMS:
            self.programs.clear()
            self.explained.clear()
        self.explained[kind] = Explained(self.name, tuple(kernels), tuple(blocked), tuple(notes), source)
        program = self.programs[kind] = _with_outputs(run, results, translator.layouts())
        self.watch()
        return program

    def by_torch(self, args: list[Any]) -> Any:
        """The outputs, computed by PyTorch alone."""
        values = [*args]
        args.clear()
        return self.module(*values)

    def report(self) -> str:
        """The kernels of each program, and what PyTorch computes, with reasons."""
        if self.eager:
            return f"{self.name}: PyTorch computes the graph: {self.eager}"
        return "\n".join(map(str, self.explained.values())) or f"{self.name}: not called yet"


def _with_outputs(run: Callable[[Any], Any], results: list[Any], layouts: list[Any]) -> Callable[[Any], Any]:
    """A function of arrays that returns the outputs of the graph, as tensors."""
    places = [i for i, x in enumerate(results) if isinstance(x, Array)]
    names = {np.dtype(x.dtype).name for x in results if isinstance(x, Array)}
    plain = "bfloat16" not in names
    from_numpy = torch.from_numpy

    def tensor(x: np.ndarray[Any, Any]) -> Any:
        x = x if isinstance(x, np.ndarray) and x.flags.writeable else np.array(x)
        return from_numpy(x) if plain else as_tensor(x)

    laid_out = [(i, *layouts[i]) for i in places if layouts[i] is not None]
    if len(places) == len(results) and not laid_out:
        return lambda arrays: tuple([tensor(x) for x in run(arrays)])
    others = [None if isinstance(x, Array) else x for x in results]

    def program(arrays: Any) -> Any:
        outputs = others.copy()
        for i, x in zip(places, run(arrays), strict=True):
            outputs[i] = tensor(x)
        for i, stride, offset in laid_out:
            outputs[i] = _at(outputs[i], stride, offset)
        return tuple(outputs)

    return program


def _at(x: torch.Tensor, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor with these strides and this offset, by which PyTorch finds a view in the memory of another output."""
    sizes = zip(x.shape, x.stride(), stride, strict=True)
    if x.storage_offset() == offset and all(n == 1 or s == t for n, s, t in sizes):
        return x
    last = sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True)) if x.numel() else 0
    whole = x.new_empty(offset + last + 1)
    # Elements of an expanded axis are one: the first of each is copied.
    first = tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)
    whole.as_strided(x[first].shape, stride, offset).copy_(x[first])
    return whole.as_strided(x.shape, stride, offset)


def merge(graph: torch.fx.Graph) -> None:
    """Compute the same operator of the same operands once, in place.

    Results that share memory with an output stay apart, as they are for a caller who changes one of them. PyTorch's own
    function for this imports Inductor, which takes as long as all of portmm's compilation.
    """
    outputs = {_memory(x) for node in graph.nodes if node.op == "output" for x in node.all_input_nodes}
    known: dict[Any, Any] = {}
    for node in [*graph.nodes]:
        key = _key(node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is not node and _memory(node) not in outputs:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _memory(node: Any) -> Any:
    """The memory of a node's tensor; of another value, the node."""
    value = node.meta.get("val")
    try:
        return value.untyped_storage()._cdata  # noqa: SLF001 - as PyTorch compares storages
    except (AttributeError, NotImplementedError):
        return node


def _key(node: Any) -> Any:
    """A key that equal operators of equal operands have; None for one that is not a function of its operands."""
    if node.op != "call_function" or not _is_function(node.target):
        return None
    key = node.target, _frozen(node.args), _frozen(node.kwargs)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _is_function(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - the class of PyTorch's operators
        return target is operator.getitem
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    return not (seeded or target._schema.is_mutable or "empty" in str(target))  # noqa: SLF001


def _frozen(x: Any) -> Any:
    """Nested operands as a hashable value; numbers with their types and signs."""
    if isinstance(x, dict):
        return tuple([(name, _frozen(y)) for name, y in sorted(x.items())])
    if isinstance(x, (list, tuple)):
        return tuple(map(_frozen, x))
    if isinstance(x, slice):
        return "slice", _frozen((x.start, x.stop, x.step))
    return (type(x), repr(x)) if isinstance(x, (bool, int, float, complex)) else x
