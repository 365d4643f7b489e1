"""The backend of `torch.compile`.

Owns `compile_graph`, which the entry point `torch_dynamo_backends` names "portmm": a graph is made functional and
lowered to PyTorch's operators by AOT autograd, for inference or with its gradients, and each of its parts is a
`CompiledGraph`.

`CompiledGraph` runs a graph of PyTorch's operators as few kernels: a program for each kind of inputs (shapes,
strides), made when such inputs are first met. Parameters are read in place, or packed once; a parameter that was
changed since is packed again.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

from portmm.arrays.interop import as_numpy
from portmm.build.builds_ahead import begin
from portmm.fusion.compilation import compiled_program
from portmm.fusion.program import Explained
from portmm.ops.prepack import pack
from portmm.runtime.cpu import runtime
from portmm.torch.aten import Unsupported
from portmm.torch.lowering import lowered
from portmm.torch.outputs import memory_of, with_outputs
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
            if x.__class__ is int or x.__class__ is float:
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
        program = self.programs[kind] = with_outputs(run, self.module.graph, results, translator)
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


def merge(graph: torch.fx.Graph) -> None:
    """Compute the same operator of the same operands once, in place.

    Results that share memory with an output stay apart, as they are for a caller who changes one of them. PyTorch's own
    function for this imports Inductor, which takes as long as all of portmm's compilation.
    """
    outputs = {memory_of(x) for node in graph.nodes if node.op == "output" for x in node.all_input_nodes}
    known: dict[Any, Any] = {}
    for node in [*graph.nodes]:
        key = _key(node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is not node and memory_of(node) not in outputs:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


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


MATRIX = 2
PACKED = 128
"""Rows and columns of a matrix that is packed like most parameters, in panels of the usual width."""

_graphs: weakref.WeakValueDictionary[int, CompiledGraph] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_LOWERED = (
    "gelu_backward", "native_layer_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data",
    "tanh_backward", "sigmoid_backward", "silu_backward", "threshold_backward", "elu", "elu_backward",
    "leaky_relu_backward", "hardtanh_backward", "hardswish_backward", "addcmul", "addcdiv", "lerp", "mse_loss",
    "mse_loss_backward", "nll_loss_forward", "nll_loss_backward", "_fused_rms_norm_backward", "logaddexp",
    "_unsafe_index", "glu", "glu_backward", "huber_loss", "smooth_l1_loss", "linalg_vector_norm", "std", "var",
    "addmv", "addr", "mv", "dot",
)  # fmt: skip
"""Operators that are written as others, for which there are rows."""


@cache
def decompositions() -> dict[Any, Any]:
    """The decompositions of `_LOWERED`."""
    packets = [getattr(torch.ops.aten, name) for name in _LOWERED if hasattr(torch.ops.aten, name)]
    return dict(torch._decomp.get_decompositions(packets))  # noqa: SLF001 - Inductor's and exporters' function, too


def compile_graph(module: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
    """The function that runs a graph of Dynamo's.

    Args:
        module: the graph.
        inputs: examples of its inputs.

    Returns:
        A function of the same inputs.
    """
    _build_ahead(inputs)
    name = _title(module)
    lower = lowered(module, decompositions())
    if lower is not None:
        graph = CompiledGraph(*lower, name)
        _graphs[next(_numbers)] = graph
        return lambda *args: graph([*args])
    return aot_autograd(
        fw_compiler=partial(_compiled, name=f"{name}, forward"),
        bw_compiler=partial(_compiled, name=f"{name}, backward"),
        inference_compiler=partial(_compiled, name=name, fixed=True),
        decompositions=decompositions(),
    )(module, inputs)


def _build_ahead(inputs: list[Any]) -> None:
    """Build the run time, and the kernels that pack parameters, while PyTorch traces the graph."""
    dtypes = {
        x.dtype for x in inputs if isinstance(x, torch.nn.Parameter) and x.ndim == MATRIX and x.device.type == "cpu"
    }
    packs = [] if torch.is_grad_enabled() else [partial(_pack, x) for x in sorted(dtypes, key=str)]
    begin([runtime, *packs])


def _pack(dtype: torch.dtype) -> None:
    """Pack a matrix by rows of outputs, as parameters of linear layers are."""
    pack(as_numpy(torch.zeros(PACKED, PACKED, dtype=dtype)).T)


def _title(module: torch.fx.GraphModule) -> str:
    for node in module.graph.nodes:
        if node.op != "placeholder" and (stack := node.meta.get("nn_module_stack")):
            kind = next(iter(stack.values()))[1]  # of an exported program, a name
            return str(getattr(kind, "__name__", str(kind).rpartition(".")[2]))
    return "graph"


def _compiled(module: torch.fx.GraphModule, inputs: list[Any], *, name: str, fixed: bool = False) -> Any:
    """A graph of PyTorch's operators as kernels; where its tensors are not in the host's memory, as it is."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    constant: tuple[int, ...] = ()
    context = torch._guards.TracingContext.try_get()  # noqa: SLF001 - how backends learn of parameters
    if fixed and context is not None and context.fw_metadata is not None:
        constant = tuple(context.fw_metadata.static_input_indices or ())
    graph = CompiledGraph(module, constant, name)
    elsewhere = {str(x.device) for x in tensors if x.device.type != "cpu"}
    if elsewhere:
        graph.eager = f"its tensors are on {', '.join(sorted(elsewhere))}"
    _graphs[next(_numbers)] = graph

    def run(args: list[Any]) -> Any:
        return graph(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001 - AOT autograd's protocol: `args` is emptied
    return run


def reports() -> list[str]:
    """Reports on the compiled graphs: their kernels, and the operators that PyTorch computes, with reasons."""
    return [graph.report() for _, graph in sorted(_graphs.items())]
