"""Checks of what users call on a CUDA device beside the cases of `gpu_cases`, against float64, with PyTorch's tensors.

    python gpu_features.py --save features.json --seconds 60

Each check is a function; what it raises is its outcome, and the next goes on. Hangs are for whoever runs it to end.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path

import numpy as np
import torch

import portmm as pm

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def drawn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device="cuda", generator=generator)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def near(found, want, *, rtol=1e-5, name=""):
    """The largest difference over the largest magnitude of a result is at most `rtol`."""
    assert isinstance(found, torch.Tensor), f"{name}: {type(found)}"
    assert tuple(found.shape) == tuple(want.shape), f"{name}: {found.shape}, not {want.shape}"
    error = float((found.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))
    assert error <= rtol, f"{name}: error {error:.3g} of the largest"


@check
def views():
    """Operands with gaps, transposed, reversed by strides, and a result given."""
    big = drawn(300, 500)
    a, b = big[3:203, 5:405:2], drawn(333, 200).T
    near(pm.matmul(a, b), a.double() @ b.double(), name="gaps")
    out = torch.full((200, 400), float("nan"), device="cuda")
    pm.matmul(a, b, out[:, 10:343])
    near(out[:, 10:343], a.double() @ b.double(), name="out")
    assert bool(out[:, :10].isnan().all() and out[:, 343:].isnan().all()), "written beside the result"


@check
def batches():
    """Batches, one operand shared, of many types."""
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float64, 1e-13)):
        a, b = drawn(5, 3, 70, 130, dtype=dtype), drawn(3, 130, 90, dtype=dtype, seed=1)
        near(pm.matmul(a, b), a.double() @ b.double(), rtol=rtol, name=str(dtype))


@check
def sizes():
    """Products of sizes drawn at random, small ones and ragged ones."""
    rng = np.random.default_rng(3)
    for i in range(60):
        m, n, k = (int(x) for x in np.exp(rng.uniform(0, np.log(700), 3)))
        dtype, rtol = ((torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3))[i % 3]
        a, b = drawn(m, k, dtype=dtype, seed=i), drawn(k, n, dtype=dtype, seed=i + 1000)
        b = b if i % 2 else b.T.contiguous().T
        near(pm.matmul(a, b), a.double() @ b.double(), rtol=rtol, name=f"{m}x{n}x{k} {dtype} {i % 2}")
        if i % 20 == 0:
            a, b = drawn(m, k, dtype=torch.int8, seed=i), drawn(k, n, dtype=torch.int8, seed=i + 7)
            assert bool((pm.matmul(a, b).double() == a.double() @ b.double()).all()), f"{m}x{n}x{k} int8"


@check
def split_sums():
    """Long sums of few tiles, many times over: counters of tiles are left as zeros."""
    a, b = drawn(64, 65536, dtype=torch.bfloat16), drawn(65536, 96, dtype=torch.bfloat16, seed=1)
    want = a.double() @ b.double()
    first = pm.matmul(a, b)
    for _ in range(50):
        found = pm.matmul(a, b)
        assert bool((found == first).all()), "the bits of two calls differ"
    near(found, want, rtol=1e-2)


@check
def streams():
    """Calls on streams of PyTorch, two at a time."""
    a, b = drawn(512, 4096), drawn(4096, 512, seed=1)
    want, found = a.double() @ b.double(), []
    queues = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        for queue in queues:
            with torch.cuda.stream(queue):
                found.append(pm.matmul(a, b))
    torch.cuda.synchronize()
    for x in found:
        near(x, want)


@check
def prologues():
    """A function of the elements of A before, and of the sums after."""
    a, b, s = drawn(130, 200), drawn(200, 77, seed=1), drawn(77, seed=2)
    found = pm.matmul(a, b, prologue_a=lambda x, _: pm.relu(x), epilogue=lambda acc, i: pm.silu(acc * s[i.n]))
    near(found, torch.nn.functional.silu(torch.relu(a).double() @ b.double() * s.double()))


@check
def norms():
    """Functions of rows, fused: RMS norm, softmax with a mask, sums down columns."""
    x, w = drawn(513, 1030), drawn(1030, seed=1)
    rms = pm.fuse(lambda x, w: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * w)
    wide = x.double()
    near(rms(x, w), wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double(), name="rms")
    near(pm.fuse(lambda x: np.sum(x * x, -1))(x), wide.pow(2).sum(-1), name="sums")
    near(pm.fuse(lambda x: np.max(x, -1))(x), wide.amax(-1), name="max")


@check
def fused_products():
    """Functions with products: a gated MLP, and a norm before a product."""
    x, g, u, d = (drawn(*s, seed=i) * 0.1 for i, s in enumerate(((70, 256), (256, 512), (256, 512), (512, 256))))
    mlp = pm.fuse(lambda x, g, u, d: (pm.silu(x @ g) * (x @ u)) @ d)
    wide = [y.double() for y in (x, g, u, d)]
    near(mlp(x, g, u, d), (torch.nn.functional.silu(wide[0] @ wide[1]) * (wide[0] @ wide[2])) @ wide[3], rtol=1e-4)
    norm = pm.fuse(lambda x, g: (x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5)) @ g)
    near(norm(x, g), (wide[0] / (wide[0].pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()) @ wide[1], rtol=1e-4)


@check
def convolutions():
    """Layouts, strides, dilations, groups, types, the transposed one and both gradients."""
    conv2d = torch.nn.functional.conv2d
    x, w = drawn(2, 24, 13, 17), drawn(32, 24, 3, 3, seed=1)
    for more in ({"padding": 1}, {"stride": 2}, {"padding": 2, "dilation": 2}):
        want = conv2d(x.double(), w.double(), **more)
        near(pm.conv(x, w, layout="NCHW", **more), want, name=f"first {more}")
        last = x.permute(0, 2, 3, 1).contiguous()
        near(pm.conv(last, w, **more), want.permute(0, 2, 3, 1), name=f"last {more}")
    narrow = [y.to(torch.bfloat16) for y in (last, w)]
    want = conv2d(narrow[0].permute(0, 3, 1, 2).double(), narrow[1].double(), padding=1)
    near(pm.conv(*narrow, padding=1), want.permute(0, 2, 3, 1), rtol=1e-2, name="bf16")
    grouped = drawn(32, 6, 3, 3, seed=2)
    near(pm.conv(last, grouped, padding=1, groups=4),
         conv2d(x.double(), grouped.double(), padding=1, groups=4).permute(0, 2, 3, 1), name="groups")  # fmt: skip


@check
def gradients():
    """Of a convolution in its images and in its filters, and a transposed one."""
    x, w = drawn(2, 13, 17, 24), drawn(32, 24, 3, 3, seed=1)
    wide = [y.double().requires_grad_() for y in (x.permute(0, 3, 1, 2).contiguous(), w)]
    y = torch.nn.functional.conv2d(*wide, padding=1)
    dy = drawn(2, 13, 17, 32, seed=3)
    y.backward(dy.permute(0, 3, 1, 2).double())
    near(pm.conv_input_gradient(dy, w, (13, 17), padding=1), wide[0].grad.permute(0, 2, 3, 1), name="images")
    near(pm.conv_filter_gradient(x, dy, (3, 3), padding=1), wide[1].grad, name="filters")


@check
def attentions():
    """Shared heads, causal, a bias, float32, odd lengths."""
    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v = drawn(2, 8, 77, 64), drawn(2, 2, 131, 64, seed=1), drawn(2, 2, 131, 64, seed=2)
    wide = [q.double(), *(y.double().repeat_interleave(4, 1) for y in (k, v))]
    near(pm.attention(q, k, v), attend(*wide), rtol=1e-4, name="f32")
    narrow = [y.to(torch.bfloat16) for y in (q, k, v)]
    wide = [narrow[0].double(), *(y.double().repeat_interleave(4, 1) for y in narrow[1:])]
    near(pm.attention(*narrow), attend(*wide), rtol=1e-2, name="bf16")
    same = [narrow[0], narrow[0].flip(2), narrow[0].flip(3)]
    near(
        pm.attention(*same, causal=True), attend(*(y.double() for y in same), is_causal=True), rtol=1e-2, name="causal"
    )


@check
def plans():
    """A plan, and its calls in a graph of PyTorch."""
    a, b = drawn(256, 512, dtype=torch.float16), drawn(512, 384, dtype=torch.float16, seed=1)
    out = torch.empty(256, 384, dtype=torch.float16, device="cuda")
    plan = pm.plan(a, b, out)
    plan(a, b, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(a, b, out)
    a.copy_(drawn(256, 512, dtype=torch.float16, seed=9))
    out.zero_()
    graph.replay()
    near(out, a.double() @ b.double(), rtol=2e-3)


@check
def extremes():
    """Infinities and NaN stay in their rows and columns; nothing of what is beside operands is read into sums."""
    for dtype in (torch.float32, torch.bfloat16):
        a, b = drawn(100, 130, dtype=dtype), drawn(130, 90, dtype=dtype, seed=1)
        a[7, 3], b[5, 11] = float("inf"), float("nan")
        found, want = pm.matmul(a, b).float(), a.float() @ b.float()
        assert bool((found.isnan() == want.isnan()).all()), f"{dtype}: NaN elsewhere"
        assert bool((found.isinf() == want.isinf()).all()), f"{dtype}: infinities elsewhere"


@check
def layers():
    """`torch.compile` with this backend, on CUDA's tensors; as a function, as the name takes an installed package."""
    from portmm.torch.backend import compile_graph

    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)).cuda().eval()
    x = drawn(33, 256)
    with torch.no_grad():
        near(torch.compile(model, backend=compile_graph)(x), model.double()(x.double()), rtol=1e-4)


@check
def cupy_arrays():
    """CuPy's arrays, and results that are CuPy's."""
    import cupy as cp

    a, b = cp.random.rand(64, 300, dtype="f4"), cp.random.rand(300, 200, dtype="f4")
    found = pm.matmul(a, b, epilogue=lambda acc, _: pm.gelu(acc))
    assert isinstance(found, cp.ndarray)
    assert pm.matmul(a, b).shape == (64, 200)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--only", action="append", default=[])
    given = parser.parse_args(argv)
    ends, found = time.monotonic() + given.seconds, {}
    for name, function in CHECKS.items():
        if given.only and name not in given.only:
            continue
        if time.monotonic() > ends:
            found[name] = "not run"
            continue
        began = time.monotonic()
        try:
            function()
            torch.cuda.synchronize()
            found[name] = "ok"
        except Exception as error:  # noqa: BLE001 - one check must not end the others
            found[name] = f"{type(error).__name__}: {error}"[:600] + " | " + traceback.format_exc()[-900:]
        print(f"{name}: {time.monotonic() - began:.1f} s, {found[name][:300]}", flush=True)
        if given.save:
            given.save.write_text(json.dumps(found, indent=1))
    return 0 if all(x == "ok" for x in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
