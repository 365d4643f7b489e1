"""The backend of `torch.compile`.

Owns `compile_graph`, which the entry point `torch_dynamo_backends` names "portmm": a graph is made functional and
lowered to PyTorch's operators by AOT autograd, for inference or with its gradients, and each of its parts is a
`CompiledGraph`.
"""

from __future__ import annotations

import itertools
import weakref
from functools import cache, partial
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

from portmm.arrays.interop import as_numpy
from portmm.build.builds_ahead import begin
from portmm.ops.prepack import pack
from portmm.runtime.cpu import runtime
from portmm.torch.compiled import CompiledGraph

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
