"""Peers of portmm on a device: PyTorch, cublasLt's best algorithm, CLBlast.

A method for each family of cases gives callables of one rotation's operands, by name, and says why others are missing.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from portmm.comparison import cublaslt
from portmm.comparison.case import Case
from portmm.comparison.clblast import Blast, BlastError


class NoPeers:
    """Nothing to compare with: for checks and surveys."""

    def __init__(self):
        self.missing, self.notes = {}, {}

    def versions(self):
        return {}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda _case, _sets: {}


class TorchPeers:
    """PyTorch's own calls, and cublasLt's search."""

    def __init__(self, on, library=None, limit=cublaslt.LIMIT):
        self.on, self.torch, self.limit = on, on.torch, limit
        self.missing, self.notes = {}, {}
        self.lt, self.memory, self.compiles = None, None, True
        try:
            self.lt = cublaslt.open_library(library)
            self.memory = on.empty((cublaslt.WORKSPACE,), "u8")
        except cublaslt.LtError as error:
            self.unavailable = str(error)

    def versions(self):
        """Of what takes part."""
        found = {"torch": str(self.torch.__version__), "cuda": str(self.torch.version.cuda)}
        return found | ({"cublaslt": self.lt.version} if self.lt else {"cublaslt": self.unavailable})

    def dense(self, case, sets):
        """A product as it is, its result of the operands' type, or bf16 of fp8, or s32."""
        torch, found = self.torch, {}
        if case.dtype in ("e4m3", "e5m2"):
            one = self.on.array(np.ones(()), "f32")
            found["torch"] = lambda x: torch._scaled_mm(x[0], x[1], one, one, out_dtype=torch.bfloat16)  # noqa: SLF001
        elif case.dtype != "s8":
            found["torch"] = lambda x: torch.matmul(x[0], x[1])
        elif case.m > 16:
            found["torch"] = lambda x: torch._int_mm(x[0], x[1])  # noqa: SLF001
        else:
            self.missing["torch"] = "torch._int_mm takes more than 16 rows"
        return found | self.searched(case, sets)

    def searched(self, case, sets, *, tf32=False, epilogue=""):
        """The fastest algorithm that cublasLt's search finds, maybe with an epilogue of its own: see `cublaslt`."""
        if self.lt is None:
            self.missing["cublaslt"] = self.unavailable
            return {}
        on, result = self.on, {"s8": "s32", "e4m3": "bf16", "e5m2": "bf16"}.get(case.dtype, case.dtype)
        c = on.empty((case.m, case.n), result)
        place = (on.pointer(self.memory), cublaslt.WORKSPACE)
        try:
            types, size = (case.dtype, case.dtype, result), (case.m, case.n, case.k)
            product = self.lt.product(types, size, by_columns=case.b == "col", tf32=tf32)
            if epilogue:
                product.follow(epilogue, on.pointer(sets[0][2]))
            places = [(on.pointer(a), on.pointer(b), on.pointer(c)) for a, b, *_ in sets]
            ranked = product.search(places, on.seconds, place, on.stream(), limit=self.limit)
        except cublaslt.LtError as error:
            self.missing["cublaslt"] = str(error)
            return {}
        best = ranked[0]
        self.notes["cublaslt"] = {"near": len(ranked), "workspace": best.workspace, "seconds": best.seconds}

        def run(x):
            product.run(best.algorithm, on.pointer(x[0]), on.pointer(x[1]), on.pointer(c), place, on.stream())
            return c

        return {"cublaslt": run}

    def tf32(self, case, sets):
        """Products of float32 as tf32."""
        flags = self.torch.backends.cuda.matmul

        def product(x):
            flags.allow_tf32 = True
            try:
                return self.torch.matmul(x[0], x[1])
            finally:
                flags.allow_tf32 = False

        return {"torch": product} | self.searched(case, sets, tf32=True)

    def int8(self, case, sets):
        """Sums in int32, and one kernel more that multiplies them by scales of rows and columns."""
        wide, narrow = self.torch.float32, self.torch.bfloat16
        scale = self.compiled(
            lambda sums, rows, columns: (sums.to(wide) * rows[:, None] * columns).to(narrow),
            lambda: (self.on.empty((case.m, case.n), "s32"), sets[0][2], sets[0][3]),
        )
        return {name: lambda x, call=call: scale(call(x), x[2], x[3]) for name, call in self.dense(case, sets).items()}

    def epilogue(self, case, sets):
        """A product, and one kernel more that adds and takes GELU."""
        gelu = self.torch.nn.functional.gelu
        end = self.compiled(
            lambda c, d, e: gelu(c + d + e, approximate="tanh"),
            lambda: (self.on.random((case.m, case.n), case.dtype, 1), sets[0][2], sets[0][3]),
        )
        return {name: lambda x, call=call: end(call(x), x[2], x[3]) for name, call in self.dense(case, sets).items()}

    def bias(self, case, sets):
        """cublasLt's own epilogues, by its search, and as PyTorch asks for them; and a kernel more."""
        torch, functions = self.torch, self.torch.nn.functional
        last = {
            "gelu": lambda x: functions.gelu(x, approximate="tanh"), "relu": functions.relu, "": lambda x: x,
        }[case.more]  # fmt: skip
        if case.more:
            asked = lambda x: torch._addmm_activation(x[2], x[0], x[1], use_gelu=case.more == "gelu")  # noqa: E731, SLF001
        else:
            asked = lambda x: torch.addmm(x[2], x[0], x[1])  # noqa: E731
        found = {}
        for name, call in (("torch", asked), ("torch, two kernels", lambda x: last(torch.addmm(x[2], x[0], x[1])))):
            try:
                call(sets[0])
                found[name] = call
            except (AttributeError, RuntimeError, TypeError) as error:
                self.missing[name] = str(error)[:200]
        return found | self.searched(case, sets, epilogue=f"{case.more} bias".strip())

    def rows(self, case, _sets):
        """PyTorch's kernel of the same function."""
        functions = self.torch.nn.functional
        ways = {
            "softmax": lambda x: functions.softmax(x[0], -1),
            "layer_norm": lambda x: functions.layer_norm(x[0], (case.n,)),
        }
        return {"torch": ways[case.more]}

    def conv(self, case, sets):
        """cuDNN's, with its own bias and ReLU, and as PyTorch's layers ask for it; images and filters channels last."""
        torch, functions = self.torch, self.torch.nn.functional
        said = dict(word.split("=") for word in case.more.split())
        stride, padding = int(said.get("stride", 1)), int(said.get("taps", 1)) // 2
        last = [x[1].contiguous(memory_format=torch.channels_last) for x in sets]
        filters = {id(x[1]): y for x, y in zip(sets, last, strict=True)}
        torch.backends.cudnn.benchmark = True

        def fused(x):
            more = ([stride] * 2, [padding] * 2, [1, 1], 1)
            return torch.cudnn_convolution_relu(x[0].permute(0, 3, 1, 2), filters[id(x[1])], x[2], *more)

        def layers(x):
            images = x[0].permute(0, 3, 1, 2)
            return torch.relu_(functions.conv2d(images, filters[id(x[1])], x[2], stride, padding))

        found = {"torch": layers}
        try:
            fused(sets[0])
            found["cudnn"] = fused
        except (AttributeError, RuntimeError) as error:
            self.missing["cudnn"] = str(error)[:200]
        return found

    def compiled(self, function, operands):
        """A function as one kernel, or as PyTorch's own where its compiler does not work."""
        if self.compiles:
            try:
                made = self.torch.compile(function, dynamic=False)
                made(*operands())
            except Exception as error:  # noqa: BLE001 - whatever a compiler of another project raises
                self.compiles = False
                self.notes["torch.compile"] = f"{type(error).__name__}: {str(error)[:200]}"
            else:
                return made
        self.notes["elementwise"] = "eager"
        return function

    def codes(self, case, sets):
        """The product with the weight in bf16."""
        return self.dense(case, sets)

    def attention(self, case, sets):
        """PyTorch's, by FlashAttention and by cuDNN."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        call = self.torch.nn.functional.scaled_dot_product_attention
        found, shared = {}, {"enable_gqa": True} if "group=" in case.more else {}

        def attend(backend, x):
            with sdpa_kernel(backend):
                return call(*x, is_causal="causal" in case.more, **shared)

        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            try:
                attend(backend, sets[0])
                found[name] = partial(attend, backend)
            except RuntimeError as error:
                self.missing[name] = str(error)[:200]
        return found

    def grouped(self, _case, sets):
        """Products of runs of rows with a weight each."""
        torch = self.torch
        ends = [int(x) for x in self.on.wide(sets[0][2])]

        def loop(x):
            out = torch.empty((x[0].shape[0], x[1].shape[2]), dtype=x[0].dtype, device=x[0].device)
            first = 0
            for i, end in enumerate(ends):
                torch.matmul(x[0][first:end], x[1][i], out=out[first:end])
                first = end
            return out

        found = {"loop": loop}
        try:
            torch._grouped_mm(sets[0][0], sets[0][1], offs=sets[0][2])  # noqa: SLF001
            found["torch"] = lambda x: torch._grouped_mm(x[0], x[1], offs=x[2])  # noqa: SLF001
        except (AttributeError, RuntimeError) as error:
            self.missing["torch"] = str(error)[:200]
        return found


class ClPeers:
    """CLBlast, where it is installed: of f32."""

    def __init__(self, on):
        self.on, self.missing, self.notes = on, {}, {}
        try:
            self.library = Blast()
        except BlastError as error:
            self.library, self.why = None, str(error)

    def versions(self):
        return {}

    def __getattr__(self, name):
        """Of all families but `dense`: nothing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda _case, _sets: {}

    def dense(self, case, _sets):
        if case.dtype != "f32" or self.library is None:
            self.missing["clblast"] = self.why if self.library is None else f"not of {case.dtype}"
            return {}
        return {"clblast": self.multiply} if case.b == "row" else {}

    def multiply(self, operands):
        (x, y) = operands
        (m, k), n = x.shape, y.shape[1]
        out = self.on.empty((m, n), "f32")
        places = tuple(z.data.int_ptr for z in (x, y, out))
        self.library.gemm(Case("", "", m, n, k), places, self.on.queue.int_ptr)()
        return out
