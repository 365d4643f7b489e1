"""PyTorch, through its public operators and through its compiler.

Owns two contenders. The first is its BLAS and oneDNN for plain products, its prepacked weights, its operators for
quantised ones, and epilogues by its functions or oneDNN's fused ones. Operators without out= return a result that is
copied for the check. The weights of its quantised operators are prepacked, like every packed weight.

The second is a module of the product and its epilogue, compiled for inference with frozen weights, in the default mode
and with autotuning. Its generated code is restricted to an instruction set by TORCHINDUCTOR_CPP_MARCH and
ATEN_CPU_CAPABILITY. The latter does not keep its GEMM templates from using AMX tiles, so the templates are disabled for
narrow types where contenders are restricted to less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from portmm.arrays.interop import as_tensor
from portmm.comparison import fused, native
from portmm.comparison.case import Case
from portmm.comparison.data import INPUTS, Arrays
from portmm.comparison.peers import Library, MissingError, Run, Setup, UnsupportedError, repeat, returning

if TYPE_CHECKING:
    Maker: TypeAlias = Callable[[Any, Case, Arrays], Run]


ONEDNN_LINEAR = ("f32", "bf16", "f16")
# Most operations of products for which PyTorch has plain loops only, at a hundredth of its
# other rates.
PATIENCE = 1 << 28
POINTWISE = {"relu": ("relu", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}
"""Functions of fused cases -> their names and algorithms in the operator of oneDNN."""
# Any number works: PyTorch keeps the argument for symmetry with its GPU operator.
INNER_TILES = 2


def imported(setup: Setup) -> Any:
    """The torch module, set up for inference with the threads of `setup`.

    Raises:
        MissingError: it is not installed.
    """
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise MissingError(str(error)) from error
    torch.set_num_threads(setup.threads)
    torch.set_grad_enabled(False)
    return torch


def open_torch(setup: Setup) -> Library:
    """Open PyTorch."""
    torch = imported(setup)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        native.only(case.flops <= PATIENCE or not _slow(torch, case), "plain loops here, too slow to wait for")
        makers: dict[str, Maker]
        if case.block:
            makers = {"int4pack_mm": _four_bits}
        elif case.scaled and not case.whole:
            makers = {"int8pack_mm": _eight_bits}
        elif case.scaled:
            makers = {"int_mm, scaled": _scaled}
            makers |= {"qlinear": _qlinear} if case.packed else {}
        elif case.whole:
            makers = {"int_mm": _int_mm}
        elif len(set(case.types)) == 1 and case.fused:
            makers = {"linear": _eager, "addmm": _overwriting}
            if case.packed and torch.backends.mkldnn.is_available() and case.dtype in ONEDNN_LINEAR:
                makers["oneDNN linear"] = _pointwise
        elif len(set(case.types)) == 1:
            return _floats(torch, case, data)
        else:
            raise UnsupportedError(f"no product of {case.dtype} on this device")
        return _those_that_work(makers, torch, case, data)

    return Library(f"torch {torch.__version__}", prepare, dtypes=None, precision=INPUTS, fused=True)


def _slow(torch: Any, case: Case) -> bool:
    """Whether this build has nothing but plain loops for the case on this processor."""
    if case.block or (case.scaled and not case.whole):
        return case.types[0] != "bf16"
    return case.dtype == "f16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported()  # noqa: SLF001


def _those_that_work(makers: dict[str, Maker], torch: Any, case: Case, data: Arrays) -> dict[str, Run]:
    """Methods that work in this build, on this processor and for this shape."""
    methods: dict[str, Run] = {}
    refused = []
    for name, make in makers.items():
        try:
            run = make(torch, case, data)
            run(1)
        except (RuntimeError, AttributeError) as error:
            refused.append(f"{name}: {str(error).partition(chr(10))[0][:200]}")
            continue
        methods[name] = run
    if not methods:
        raise UnsupportedError("; ".join(refused))
    return methods


def _floats(torch: Any, case: Case, data: Arrays) -> dict[str, Run]:
    a, b, c = (as_tensor(x) for x in (data.a, data.b, data.c))
    multiply: Any = torch.bmm if case.batch > 1 else torch.mm
    methods: dict[str, Run] = {multiply.__name__: repeat(lambda: multiply(a, b, out=c))}
    if case.m == 1 and case.batch == 1:
        matrix, x, y = b.t(), a[0], c[0]
        methods["mv"] = repeat(lambda: torch.mv(matrix, x, out=y))
    if case.packed and torch.backends.mkldnn.is_available() and case.dtype in ONEDNN_LINEAR:
        with suppress(UnsupportedError):
            methods |= _those_that_work({"oneDNN linear": _pointwise}, torch, case, data)
    return methods


def functions(torch: Any) -> dict[str, Callable[[Any], Any]]:
    """In-place functions by the words of fused cases."""
    gelu = torch.ops.aten.gelu_
    return {
        "relu": torch.relu_,
        "gelu": gelu,
        "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
        "silu": lambda x: torch.nn.functional.silu(x, inplace=True),
    }


def _after(torch: Any, words: Sequence[str], data: Arrays) -> Callable[[Any], Any]:
    """Function that applies epilogue steps to a product in place and returns it."""
    added = {name: as_tensor(x) for name, x in data.added.items()}
    known = functions(torch)
    steps = [partial(torch.Tensor.add_, other=added[word]) if word in added else known[word] for word in words]

    def after(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return after


def _eager(torch: Any, case: Case, data: Arrays) -> Run:
    a, b, c = (as_tensor(x) for x in (data.a, data.b, data.c))
    words, linear, weight = fused.steps(case.fused), torch.nn.functional.linear, b.t()
    bias = as_tensor(data.bias) if words[0] == "bias" else None
    after = _after(torch, words[1:] if bias is not None else words, data)
    return returning(lambda: after(linear(a, weight, bias)), c.copy_)


def _overwriting(torch: Any, case: Case, data: Arrays) -> Run:
    a, b, c = (as_tensor(x) for x in (data.a, data.b, data.c))
    words, added = fused.steps(case.fused), {name: as_tensor(x) for name, x in data.added.items()}
    after = _after(torch, words[1:] if words[0] in added else words, data)
    if words[0] in added:
        first = added[words[0]]
        return repeat(lambda: after(torch.addmm(first, a, b, out=c)))
    return repeat(lambda: after(torch.mm(a, b, out=c)))


def _pointwise(torch: Any, case: Case, data: Arrays) -> Run:
    """Run of oneDNN's linear operator, with a bias and one more step, and of the other steps after it."""
    a, b, c = (as_tensor(x) for x in (data.a, data.b, data.c))
    weight = torch.ops.mkldnn._reorder_linear_weight(b.t().contiguous(), a.shape[0])  # noqa: SLF001
    linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    words = fused.steps(case.fused)
    bias, words = (as_tensor(data.bias), words[1:]) if words[:1] == ("bias",) else (None, words)
    after = _after(torch, words[1:], data)
    if words[:1] == ("residual",):
        binary, residual = linear.binary, as_tensor(data.residual)
        return returning(lambda: after(binary(a, residual, weight, bias, "add")), c.copy_)
    name, algorithm = POINTWISE[words[0]] if words else ("none", "")
    return returning(lambda: linear(a, weight, bias, name, [], algorithm), c.copy_)


def _int_mm(torch: Any, _case: Case, data: Arrays) -> Run:
    a, b, c = (as_tensor(x) for x in (data.a, data.b, data.c))
    return repeat(lambda: torch._int_mm(a, b, out=c))  # noqa: SLF001


def _scaled(torch: Any, case: Case, data: Arrays) -> Run:
    a, b, c, columns = (as_tensor(x) for x in (data.a, data.b, data.c, data.columns))
    rows, sums = as_tensor(data.rows)[:, None], torch.empty(c.shape, dtype=torch.int32)
    after = _after(torch, fused.steps(case.fused), data)

    def call() -> None:
        torch._int_mm(a, b, out=sums)  # noqa: SLF001
        torch.mul(sums, columns, out=c)
        after(c.mul_(rows))

    return repeat(call)


def _qlinear(torch: Any, case: Case, data: Arrays) -> Run:
    # The operator has one scale for all activations, so rows are scaled afterwards.
    a, b, c, columns = (as_tensor(x) for x in (data.a, data.b, data.c, data.columns))
    weight = torch.ops.onednn.qlinear_prepack(b.t().contiguous(), list(a.shape))
    zeros, rows = torch.zeros(columns.shape, dtype=torch.int32), as_tensor(data.rows)[:, None]
    linear, after = torch.ops.onednn.qlinear_pointwise, _after(torch, fused.steps(case.fused), data)

    def call() -> Any:
        sums = linear(a, 1.0, 0, weight, columns, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        return after(sums.mul_(rows))

    return returning(call, c.copy_)


def _eight_bits(torch: Any, case: Case, data: Arrays) -> Run:
    a, c, columns = (as_tensor(x) for x in (data.a, data.c, data.columns))
    weight = as_tensor(np.ascontiguousarray(data.b.T))
    multiply, after = torch._weight_int8pack_mm, _after(torch, fused.steps(case.fused), data)  # noqa: SLF001
    return returning(lambda: after(multiply(a, weight, columns)), c.copy_)


def _four_bits(torch: Any, case: Case, data: Arrays) -> Run:
    a, c = (as_tensor(x) for x in (data.a, data.c))
    codes = as_tensor(np.ascontiguousarray(data.b.T).astype(np.int32))
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, INNER_TILES)  # noqa: SLF001
    scales = as_tensor(data.columns).to(a.dtype)
    both = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
    multiply, block = torch.ops.aten._weight_int4pack_mm_for_cpu, case.block  # noqa: SLF001
    after = _after(torch, fused.steps(case.fused), data)
    return returning(lambda: after(multiply(a, weight, block, both)), c.copy_)


# Seconds of the first mode, above which the second, which takes several times as long, is not tried.
COMPILING = 10.0
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
            if time.monotonic() - start < COMPILING:
                methods[mode] = _compiled(torch, case, data, mode)
        return methods

    return Library(f"torch {torch.__version__}, compiled", prepare, dtypes=None, precision=INPUTS, fused=True)


def _compiled(torch: Any, case: Case, data: Arrays, mode: str) -> Run:
    """Run of a compiled module, after a first call."""
    torch.compiler.reset()
    activations = [as_tensor(data.a)] + ([as_tensor(data.residual)] if data.residual is not None else [])
    module, c = _module(torch, case, data), as_tensor(data.c)
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
            weight = as_tensor(data.b)
            weight = weight.t().contiguous() if case.batch == 1 and (case.packed or case.b == "col") else weight
            for name, value in (
                ("weight", weight),
                ("bias", data.bias),
                ("rows", data.rows),
                ("columns", data.columns),
            ):
                self.register_buffer(name, value if value is None or value is weight else as_tensor(value))

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
