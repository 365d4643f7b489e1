"""PyTorch's compiler.

Owns one contender: a module of the product and its epilogue, compiled for inference with
frozen weights, in the default mode and with autotuning.

Its generated code is restricted to an instruction set by TORCHINDUCTOR_CPP_MARCH and
ATEN_CPU_CAPABILITY. The latter does not keep its GEMM templates from using AMX tiles, so
the templates are disabled for narrow types where contenders are restricted to less.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from portmm.comparison import fused, native
from portmm.comparison.data import INPUTS
from portmm.comparison.peers import Library, MissingError, Run, UnsupportedError, returning
from portmm.comparison.pytorch import imported, tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.comparison.case import Case
    from portmm.comparison.data import Arrays
    from portmm.comparison.environment import Setup

# Seconds of the first mode, above which the second, which takes several times as long, is not tried.
PATIENCE = 10.0
LIBRARY_ONLY = "ATEN"


def open_compiled(setup: Setup) -> Library:
    """Open PyTorch and its compiler."""
    torch = imported(setup)
    config: Any = import_module("torch._inductor.config")
    if setup.isa and not hasattr(config.cpp, "march"):
        raise MissingError(f"the compiler of PyTorch {torch.__version__} cannot be held to {setup.isa}")
    config.freezing, config.compile_threads = True, 1

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        native.only(not case.dynamic and (case.whole or len(set(case.types)) == 1), f"no {case.dtype} in one module")
        native.only(case.c == "row", "results by rows")
        if setup.isa and case.narrow:
            config.max_autotune_gemm_backends = LIBRARY_ONLY
        methods: dict[str, Run] = {}
        start = time.monotonic()
        for mode in ("default", "max-autotune"):
            if time.monotonic() - start < PATIENCE:
                methods[mode] = _compiled(torch, case, data, mode)
        return methods

    return Library(f"torch {torch.__version__}, compiled", prepare, dtypes=None, precision=INPUTS, fused=True)


def _compiled(torch: Any, case: Case, data: Arrays, mode: str) -> Run:
    """Run of a compiled module, after a first call."""
    torch.compiler.reset()
    activations = [tensor(torch, data.a)] + ([tensor(torch, data.residual)] if data.residual is not None else [])
    module, c = _module(torch, case, data), tensor(torch, data.c)
    try:
        call = torch.compile(module, mode=mode, dynamic=False, fullgraph=True)
        call(*activations)
    except Exception as error:  # of many classes, a missing C++ compiler among them
        raise UnsupportedError(str(error).partition("\n")[0][:200]) from error
    return returning(lambda: call(*activations), c.copy_)


def _module(torch: Any, case: Case, data: Arrays) -> Any:
    """Module with a weight, laid out as in torch.nn.Linear, called with activations and a residual."""
    product, words = _product(torch, case, data), fused.steps(case.fused)
    f = torch.nn.functional
    known: dict[str, Callable[[Any], Any]] = {
        "relu": f.relu,
        "gelu": f.gelu,
        "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"),
        "silu": f.silu,
    }

    class Layer(torch.nn.Module):  # type: ignore[misc]
        """The product and its epilogue."""

        def __init__(self) -> None:
            super().__init__()
            weight = tensor(torch, data.b)
            weight = weight.t().contiguous() if case.batch == 1 and (case.packed or case.b == "col") else weight
            for name, value in (
                ("weight", weight),
                ("bias", data.bias),
                ("rows", data.rows),
                ("columns", data.columns),
            ):
                self.register_buffer(name, value if value is None or value is weight else tensor(torch, value))

        def forward(self, x: Any, residual: Any = None) -> Any:
            y = product(self, x)
            if residual is not None:
                y = y + residual
            return known[words[-1]](y) if words and words[-1] in known else y

    return Layer().eval()


def _product(torch: Any, case: Case, data: Arrays) -> Callable[[Any, Any], Any]:
    """Function of a layer and its activations: the product with scales and bias, before residual and activation."""
    linear, transposed = torch.nn.functional.linear, case.batch == 1 and (case.packed or case.b == "col")
    biased = data.bias is not None

    def sums(layer: Any, x: Any) -> Any:
        y = torch._int_mm(x, layer.weight.t() if transposed else layer.weight)  # noqa: SLF001
        if not case.scaled:
            return y
        y = y * layer.columns * layer.rows[:, None]
        return y + layer.bias if biased else y

    def floats(layer: Any, x: Any) -> Any:
        if transposed:
            return linear(x, layer.weight, layer.bias)
        y = torch.matmul(x, layer.weight)
        return y + layer.bias if biased else y

    return sums if case.whole else floats
