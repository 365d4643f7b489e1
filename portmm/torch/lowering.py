"""Lowering of a graph of Dynamo's to PyTorch's operators in one pass.

Owns `lowered`, which runs a graph without gradients, mutation and symbolic extents once on tensors without memory and
notes the operators. AOT autograd runs each graph several times, for mutation and gradients that such a graph does not
have: for MiniLM in 1.1 s.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
_VARYING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _Refused(Exception):  # noqa: N818 - no error: AOT autograd lowers the graph
    """The graph is none that one pass can lower."""


def lowered(
    module: torch.fx.GraphModule, decompositions: dict[Any, Callable[..., Any]]
) -> tuple[torch.fx.GraphModule, tuple[int, ...]] | None:
    """A graph of PyTorch's operators, and the positions of inputs that are parameters or buffers.

    Args:
        module: a graph of Dynamo's.
        decompositions: operators that are written as others.

    Returns:
        None if the graph has gradients, mutation, attributes, extents that are symbols, outputs that share memory with
        each other or with inputs, or anything else than operators of dense tensors in the host's memory, and where
        PyTorch chooses types (`torch.autocast`).
    """
    if torch._C._is_any_autocast_enabled():  # noqa: SLF001 - AOT autograd's runs of a graph turn it off
        return None
    recorder = _Recorder(decompositions)
    try:
        fixed = _inputs(module, recorder)
        fake = next((x.fake_mode for x in recorder.tensors), None)
        if fake is None:
            return None
        with fake, enable_python_dispatcher(), recorder:
            outputs = _run(module, recorder)
        _alone(recorder.tensors[: recorder.inputs], outputs)
        recorder.graph.output(tuple(map(recorder.operand, outputs)))
    except _Refused:
        return None
    recorder.graph.eliminate_dead_code()
    return torch.fx.GraphModule(torch.nn.Module(), recorder.graph), fixed


class _Recorder(TorchDispatchMode):
    """Notes the operators that run.

    Attributes:
        graph: of the operators.
        nodes: by the identity of a tensor, the node that it is the value of.
        tensors: all of them, which keep their identities.
        inputs: how many of these are inputs of the graph.
        trace: the stack of the user's code that runs.
    """

    def __init__(self, decompositions: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.decompositions = decompositions
        self.graph = torch.fx.Graph()
        self.nodes: dict[int, torch.fx.Node] = {}
        self.tensors: list[Any] = []
        self.inputs = 0
        self.trace: str | None = None

    def note(self, node: torch.fx.Node, value: Any) -> None:
        """Let a node have a tensor as its value."""
        node.meta["val"] = value
        if self.trace:
            node.meta["stack_trace"] = self.trace
        self.nodes[id(value)] = node
        self.tensors.append(value)

    def operand(self, x: Any) -> Any:
        """An argument of an operator with nodes in the place of tensors."""
        if isinstance(x, (list, tuple)):
            return type(x)(map(self.operand, x)) if type(x) in (list, tuple) else [*map(self.operand, x)]
        if isinstance(x, torch.Tensor):
            node = self.nodes.get(id(x))
            if node is None:
                raise _Refused
            return node
        if not isinstance(x, _PLAIN):
            raise _Refused
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The value of an operator, noted."""
        del types
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        with self:
            other = self.decompositions.get(func)
            value = NotImplemented if other is None else other(*args, **kwargs)
            if value is NotImplemented:
                value = func.decompose(*args, **kwargs)
        if value is not NotImplemented:
            return value
        if func._schema.is_mutable or _varies(func, args) or _trains(func, args):  # noqa: SLF001
            raise _Refused
        operands = self.operand(args), {name: self.operand(x) for name, x in kwargs.items()}
        value = func(*args, **kwargs)
        node = self.graph.call_function(func, *operands)
        if isinstance(value, torch.Tensor):
            self.note(node, value)
        elif isinstance(value, (list, tuple)):
            node.meta.update(val=value, stack_trace=self.trace)
            for i, x in enumerate(value):
                if isinstance(x, torch.Tensor):
                    self.note(self.graph.call_function(operator.getitem, (node, i)), x)
        else:
            raise _Refused
        return value


def _varies(func: Any, args: Any) -> bool:
    """Whether extents of a result, or numbers, depend on elements of tensors."""
    if func is torch.ops.aten.index.Tensor:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return any(tag in func.tags for tag in _VARYING)


def _trains(func: Any, args: Any) -> bool:
    """Whether an operator changes statistics that its schema does not name as changed."""
    return "batch_norm" in str(func) and any(x is True for x in args)


def _inputs(module: torch.fx.GraphModule, recorder: _Recorder) -> tuple[int, ...]:
    """Note the inputs of a graph; positions of parameters and buffers."""
    fixed = []
    gradients = torch.is_grad_enabled()
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        x = node.meta.get("example_value")
        if not _is_dense(x) or (gradients and x.requires_grad) or id(x) in recorder.nodes:
            raise _Refused
        recorder.note(recorder.graph.placeholder(node.name), x)
        if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"):
            fixed.append(i)
    recorder.inputs = len(recorder.tensors)
    return tuple(fixed)


def _is_dense(x: Any) -> bool:
    """Whether a value is a tensor in the host's memory with strides and extents that are numbers."""
    return (
        isinstance(x, FakeTensor)
        and x.layout is torch.strided
        and x.device.type == "cpu"
        and all(type(n) is int for n in x.shape)
    )


def _run(module: torch.fx.GraphModule, recorder: _Recorder) -> list[Any]:
    """The outputs of a graph on tensors without memory."""
    values: dict[torch.fx.Node, Any] = {}
    inputs = iter(recorder.tensors)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return list(args[0])
        if not _is_plain(node):
            raise _Refused
        recorder.trace = node.meta.get("stack_trace")
        function = getattr(args[0], node.target) if node.op == "call_method" else node.target
        values[node] = function(*args[node.op == "call_method" :], **kwargs)
    raise _Refused


def _is_plain(node: torch.fx.Node) -> bool:
    """Whether a node is a function of tensors and numbers."""
    if node.op not in ("call_function", "call_method") or isinstance(node.target, torch._ops.HigherOrderOperator):  # noqa: SLF001
        return False
    value = node.meta.get("example_value")
    several: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return "example_value" in node.meta and all(_is_dense(x) or type(x) in (int, float, bool) for x in several)


def _alone(inputs: list[Any], outputs: list[Any]) -> None:
    """Refuse outputs that are no tensors, or share memory."""
    if not all(isinstance(x, FakeTensor) for x in outputs):
        raise _Refused
    memory = [x.untyped_storage()._cdata for x in outputs]  # noqa: SLF001 - as PyTorch compares storages
    if len({*memory}) < len(memory) or {*memory} & {x.untyped_storage()._cdata for x in inputs}:  # noqa: SLF001
        raise _Refused
