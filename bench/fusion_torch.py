"""How PyTorch computes the cases of bench/fusion.py: eagerly, compiled, and by oneDNN's fused operators.

Owns three adapters: see `fusion_ways`. Weights are (n, k), as those of torch.nn.Linear
are. The compiled module is what a user gets at most: max-autotune, weights frozen into it.
"""

from importlib import import_module

import numpy as np
from fusion_cases import EPS, SCALE, WEIGHTS
from fusion_ways import cut

from portmm.arrays.numpy_arrays import numpy_of
from portmm.comparison.peers import Library, MissingError, UnsupportedError

VECTORS = ("bias", "gain")


def _torch(setup):
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise MissingError(str(error)) from error
    torch.set_num_threads(setup.threads)
    torch.set_grad_enabled(False)
    return torch


def open_eager(setup):
    """Modules as they are written; of attention, its operator for it."""
    torch = _torch(setup)

    def prepare(case, d):
        return _attentions(torch, case, d) if case.kind == "attention" else _modules(torch, case, d, lambda x: x)

    return Library(f"torch {torch.__version__}", prepare, dtypes=None)


def open_compiled(setup):
    """Modules compiled for inference."""
    torch = _torch(setup)
    config = import_module("torch._inductor.config")
    config.freezing, config.compile_threads = True, 1

    def prepare(case, d):
        if case.kind == "attention":
            raise UnsupportedError("attention is one operator, which it calls as it is")

        def compiled(module):
            torch.compiler.reset()
            return torch.compile(module, mode="max-autotune", dynamic=False)

        return _modules(torch, case, d, compiled)

    return Library(f"torch {torch.__version__}, compiled", prepare, dtypes=None)


def open_onednn(setup):
    """oneDNN with what it can do after a product, through PyTorch, with weights laid out beforehand."""
    torch = _torch(setup)
    if not torch.backends.mkldnn.is_available():
        raise MissingError("this PyTorch has no oneDNN")

    def prepare(case, d):
        if case.kind == "attention":
            raise UnsupportedError("a product with post-ops only")
        return {"post-ops": lambda: _pointwise(torch, case, d)}

    return Library(f"oneDNN of torch {torch.__version__}", prepare, dtypes=None)


def tensor(torch, array):
    """A tensor over an array's memory; PyTorch does not know NumPy's bfloat16."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _fetched(torch, call):
    """A call whose result is turned to arrays when it is judged."""

    def fetch(result):
        if isinstance(result, tuple | list):
            return [fetch(x) for x in result]
        if result.dtype == torch.bfloat16:
            return result.contiguous().view(torch.uint16).numpy().view(numpy_of("bf16"))
        return result.numpy()

    call.fetch = fetch
    return call


def _forward(torch, case):
    """The function of activations that a module with weights computes."""
    f = torch.nn.functional
    linear, gelu = f.linear, f.gelu
    return {
        "gelu": lambda s, x: gelu(linear(x, s.w, s.bias)),
        "residual": lambda s, x, r: linear(x, s.w, s.bias) + r,
        "add2-fastgelu": lambda s, x, r, r2: gelu(linear(x, s.w) + r + r2, approximate="tanh"),
        "requantise": lambda s, x: (f.relu(linear(x, s.w, s.bias)) * SCALE).round().clamp(-128, 127).to(torch.int8),
        "mlp": lambda s, x: linear(f.silu(linear(x, s.w)) * linear(x, s.up), s.down),
        "lora": lambda s, x: linear(x, s.w) + linear(linear(x, s.a), s.b),
        "rmsnorm": lambda s, x: linear(f.rms_norm(x, x.shape[-1:], s.gain, EPS), s.w),
        "qkv": lambda s, x: linear(x, s.w).split(list(case.parts), -1),
    }[case.kind]


def _activations(torch, d):
    return [tensor(torch, d[name]) for name in ("x", "residual", "residual2") if name in d]


def _modules(torch, case, d, change):
    forward = _forward(torch, case)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in d.items():
                if name in WEIGHTS + VECTORS:
                    held = tensor(torch, value).t().contiguous() if name in WEIGHTS else tensor(torch, value)
                    self.register_parameter(name, torch.nn.Parameter(held, requires_grad=False))

        def forward(self, *activations):
            return forward(self, *activations)

    def make():
        module, given = change(Block().eval()), _activations(torch, d)
        return _fetched(torch, lambda: module(*given))

    return {"module": make}


def _pointwise(torch, case, d):
    """Calls of oneDNN's linear operator."""
    ops, f = torch.ops.mkldnn, torch.nn.functional
    point, both = ops._linear_pointwise, ops._linear_pointwise.binary  # noqa: SLF001
    x, *others = _activations(torch, d)
    w = {
        name: ops._reorder_linear_weight(tensor(torch, d[name]).t().contiguous(), case.m)  # noqa: SLF001
        for name in WEIGHTS
        if name in d
    }
    bias, gain = (tensor(torch, d[name]) if name in d else None for name in VECTORS)

    def linear(x, name, attr="none", algorithm=""):
        return point(x, w[name], bias if name == "w" else None, attr, [], algorithm)

    def requantised():
        return linear(x, "w", "relu").mul_(SCALE).round_().clamp_(-128, 127).to(torch.int8)

    def fast_gelu():
        return f.gelu(both(x, others[0], w["w"], None, "add").add_(others[1]), approximate="tanh")

    calls = {
        "gelu": lambda: linear(x, "w", "gelu", "none"),
        "residual": lambda: both(x, others[0], w["w"], bias, "add"),
        "add2-fastgelu": fast_gelu,
        "requantise": requantised,
        "mlp": lambda: linear(both(x, linear(x, "w", "swish"), w["up"], None, "mul"), "down"),
        "lora": lambda: both(linear(x, "a"), linear(x, "w"), w["b"], None, "add"),
        "rmsnorm": lambda: linear(f.rms_norm(x, x.shape[-1:], gain, EPS), "w"),
        "qkv": lambda: cut(linear(x, "w"), case.parts),
    }
    return _fetched(torch, calls[case.kind])


def _attentions(torch, case, d):
    """Its operator for attention, which chooses among its kernels."""
    q, k, v = (tensor(torch, d[name]) for name in "qkv")
    attend = torch.nn.functional.scaled_dot_product_attention
    if case.causal and case.m != case.n:
        raise UnsupportedError("its causal mask starts at the first key")
    shared = case.heads // case.kv_heads
    more = {"is_causal": case.causal, "enable_gqa": shared > 1}
    found = {"sdpa": lambda: _fetched(torch, lambda: attend(q, k, v, **more))}
    if shared > 1 and case.m == 1:
        # Queries that share keys are as good as several of one head.
        rows = q.reshape(1, case.kv_heads, shared, case.k)
        found["sdpa, heads as queries"] = lambda: _fetched(torch, lambda: attend(rows, k, v).reshape(q.shape))
    return found
