"""Mirage's benchmarks: functions as they are written, fused greedily, by what a search finds, and by torch.compile.

    python bench/superoptimiser.py --list
    python bench/superoptimiser.py --out bench/results/superoptimiser/zen5-1t.json gqa-decode lora

ONNX Runtime and PyTorch are measured where they are installed. Each case is a process of its own with one thread; ways
are measured in turns, and the median of each is stored with its least. Where nothing faster is found the search leaves
the greedy program in its place: one program, measured once, and a ratio of 1. Sizes are those of the paper's twelve and
of its artifact's six, in float32; or, with --bf16, in bfloat16, where the scale of attention is part of the queries,
and norms are of float32 inside, as NumPy has it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import portmm as pm
from portmm.fusion.finding import Finding

SCALE, EPS = np.float32(0.125), np.float32(1e-5)
SEARCH = 40.0
SECONDS = 2.0


def attend(q, k, v):
    s = q @ k.swapaxes(-1, -2) * SCALE
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


def attend_scaled(q, k, v):
    s = q @ k.swapaxes(-1, -2)
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


def norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


def qk_norm(q, k, v):
    e = np.exp(norm(q) @ k.swapaxes(-1, -2) * SCALE)
    return (e / e.sum(-1, keepdims=True)) @ norm(v)


def mlp(x, a, b):
    return np.exp(x @ a) @ b


def gated(x, w, u):
    return pm.silu(x @ w) * (x @ u)


def lora(x, w, a, b):
    return x @ w + (x @ a) @ b


def rms_linear(x, g, w):
    return (norm(x) * g) @ w


def n_trans(h, a, alpha):
    return norm(h + alpha * (norm(a) - h))


def torch_ways():
    """The same functions for PyTorch."""
    import torch
    import torch.nn.functional as f

    def t_norm(x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)

    def t_attend(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v

    def t_qk_norm(q, k, v):
        e = torch.exp(t_norm(q) @ k.transpose(-1, -2) * 0.125)
        return (e / e.sum(-1, keepdim=True)) @ t_norm(v)

    return {
        attend: t_attend,
        attend_scaled: lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v,
        qk_norm: t_qk_norm,
        mlp: lambda x, a, b: torch.exp(x @ a) @ b,
        gated: lambda x, w, u: f.silu(x @ w) * (x @ u),
        lora: lambda x, w, a, b: x @ w + (x @ a) @ b,
        rms_linear: lambda x, g, w: (t_norm(x) * g) @ w,
        n_trans: lambda h, a, alpha: t_norm(h + alpha * (t_norm(a) - h)),
    }


def onnx_way(function, arrays):
    """The same function as a model in ONNX's format, by ONNX Runtime on one thread: a call of it."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    nodes, known = [], [numpy_helper.from_array(np.array([-1], np.int64), "last")]

    def op(kind, *of, **more):
        nodes.append(helper.make_node(kind, list(of), [f"t{len(nodes)}"], **more))
        return f"t{len(nodes) - 1}"

    def literal(x):
        known.append(numpy_helper.from_array(np.float32(x), f"c{len(known)}"))
        return known[-1].name

    def o_norm(x):
        mean = op("ReduceMean", op("Mul", x, x), "last")
        return op("Div", x, op("Sqrt", op("Add", mean, literal(EPS))))

    def o_attend(q, k, v):
        last = list(range(arrays[1].ndim))
        s = op("MatMul", q, op("Transpose", k, perm=[*last[:-2], last[-1], last[-2]]))
        return op("MatMul", op("Softmax", op("Mul", s, literal(SCALE)), axis=-1), v)

    def o_gated(x, w, u):
        a = op("MatMul", x, w)
        return op("Mul", op("Mul", a, op("Sigmoid", a)), op("MatMul", x, u))

    def o_n_trans(h, a, alpha):
        return o_norm(op("Add", h, op("Mul", alpha, op("Sub", o_norm(a), h))))

    ways = {
        attend: o_attend, gated: o_gated, n_trans: o_n_trans,
        qk_norm: lambda q, k, v: o_attend(o_norm(q), k, o_norm(v)),
        mlp: lambda x, a, b: op("MatMul", op("Exp", op("MatMul", x, a)), b),
        lora: lambda x, w, a, b: op("Add", op("MatMul", x, w), op("MatMul", op("MatMul", x, a), b)),
        rms_linear: lambda x, g, w: op("MatMul", op("Mul", o_norm(x), g), w),
    }  # fmt: skip
    names = [f"x{i}" for i in range(len(arrays))]
    result = ways[function](*names)
    inputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, y.shape) for x, y in zip(names, arrays, strict=True)]
    output = helper.make_tensor_value_info(result, TensorProto.FLOAT, function(*arrays).shape)
    known = [x for x in known if any(x.name in y.input for y in nodes)]
    graph = helper.make_graph(nodes, function.__name__, inputs, [output], known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = dict(zip(names, arrays, strict=True))
    return lambda: session.run(None, feed)[0]


def heads(group, queries, kv=2, keys=4096):
    """Q, K and V of heads of 64 elements: groups of heads of queries share those of keys."""
    if not group:
        return (kv, queries, 64), (kv, keys, 64), (kv, keys, 64)
    return (kv, group, queries, 64), (kv, 1, keys, 64), (kv, 1, keys, 64)


CASES = {
    "mha-decode": (attend, heads(0, 1, 16)),
    "mha-speculative": (attend, heads(0, 8, 16)),
    "mha-prefill": (attend, heads(0, 512, 4, 1024)),
    "gqa-decode": (attend, heads(8, 1)),
    "gqa-speculative": (attend, heads(8, 8)),
    "gqa-prefill": (attend, heads(8, 256, 2, 1024)),
    "mqa-decode": (attend, ((16, 1, 64), (4096, 64), (4096, 64))),
    "mqa-speculative": (attend, ((16, 8, 64), (4096, 64), (4096, 64))),
    "mqa-prefill": (attend, ((16, 256, 64), (1024, 64), (1024, 64))),
    "mlp": (mlp, ((16, 8192), (8192, 8), (8, 8192))),
    "moe": (gated, ((8, 8, 4096), (8, 4096, 4096), (8, 4096, 4096))),
    "lora": (lora, ((16, 256), (256, 4096), (256, 16), (16, 4096))),
    "artifact-gqa": (attend, heads(16, 16)),
    "artifact-qknorm": (qk_norm, ((2, 256, 64), (2, 4096, 64), (2, 4096, 64))),
    "artifact-rmsnorm": (rms_linear, ((2, 4096), (4096,), (4096, 6144))),
    "artifact-lora": (lora, ((16, 256), (256, 4096), (256, 16), (16, 4096))),
    "artifact-gatedmlp": (gated, ((8, 4096), (4096, 4096), (4096, 4096))),
    "artifact-ntrans": (n_trans, ((8, 4096), (8, 4096), (4096,))),
}  # fmt: skip


def arrays_of(function, shapes):
    """Operands whose products do not grow: weights are divided by the root of their rows."""
    rng = np.random.default_rng(0)
    block = rng.standard_normal(1 << 20, dtype=np.float32)
    arrays = []
    for shape in shapes:
        n = int(np.prod(shape))
        x = np.resize(block, n).reshape(shape)
        weight = arrays and len(shape) > 1 and function not in (attend, qk_norm, n_trans)
        arrays.append(np.ascontiguousarray(x * np.float32(shape[-2] ** -0.5) if weight else x))
    return arrays


def turns(ways):
    """The median and the least of each way; each follows each other one equally often, as caches keep operands."""
    order = random.Random(0)  # noqa: S311 - an order of calls
    names = list(ways)
    times = {name: [] for name in ways}
    for run in ways.values():
        run()
        run()
    end = time.perf_counter() + SECONDS * len(ways)
    for i in range(4000):
        if time.perf_counter() > end and i >= 5:
            break
        order.shuffle(names)
        for name in names:
            run = ways[name]
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: {"median": float(np.median(x)), "least": min(x), "calls": len(x)} for name, x in times.items()}


def narrow(function, arrays):
    """A function and its operands in bfloat16, and its result in float32."""
    import ml_dtypes

    if function is attend:
        function, arrays[0] = attend_scaled, arrays[0] * SCALE
    arrays = [x.astype(ml_dtypes.bfloat16) for x in arrays]
    return function, arrays, function(*[x.astype(np.float32) for x in arrays])


def measured(name, *, torch_too, bf16=False):
    """The record of a case."""
    function, shapes = CASES[name]
    arrays = arrays_of(function, shapes)
    function, arrays, want = narrow(function, arrays) if bf16 else (function, arrays, function(*arrays))
    pm.set_num_threads(1)
    greedy, searched = pm.fuse(function), pm.fuse(function, search=SEARCH)
    results = {"greedy": greedy(*arrays), "search": searched(*arrays)}
    explained = searched.explain(*arrays)
    finding = explained.finding or Finding(note="not searched")
    ways = {"greedy": lambda: greedy(*arrays), "search": lambda: searched(*arrays)}
    if finding.run is None:
        del ways["greedy"]  # it is the program that `searched` runs
    ways |= {} if bf16 else {"numpy": lambda: function(*arrays)}
    if torch_too:
        import torch

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        kind = torch.bfloat16 if bf16 else torch.float32
        tensors = [torch.from_numpy(x.astype(np.float32)).to(kind) for x in arrays]
        compiled = torch.compile(torch_ways()[function], dynamic=False)
        results["torch.compile"] = compiled(*tensors).float().numpy()
        ways["torch.compile"] = lambda: compiled(*tensors)
    if not bf16 and importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        ways["ONNX Runtime"] = onnx_way(function, arrays)
        results["ONNX Runtime"] = ways["ONNX Runtime"]()
    near = 2e-2 if bf16 else 2e-3
    for way, x in results.items():
        most = near * float(np.abs(want).max())
        np.testing.assert_allclose(np.asarray(x, np.float32), want, rtol=near, atol=most, err_msg=way)
    certificates = (finding.certificate or {}).get("parts", [finding.certificate])
    bits = min((x["check"]["bits"] for x in certificates if x is not None), default=None)
    times = turns(ways)
    return {
        "shapes": [list(x) for x in shapes], "path": list(finding.path), "forms": finding.forms,
        "bounded": finding.bounded,
        "graph": str(finding.graph).splitlines(),
        "one_kernel": str(finding.kernel.graph).splitlines() if finding.kernel else [],
        "verified": finding.verified, "search_seconds": finding.elapsed, "note": finding.note, "bits": bits,
        "same_program": finding.run is None, "parts": len(finding.parts),
        "unchecked": [y for x in certificates if x is not None for y in x["unchecked"]],
        "kernels": [f"{x.kind} {x.what}" for x in explained.kernels],
        "greedy_kernels": [f"{x.kind} {x.what}" for x in greedy.explain(*arrays).kernels],
        "times": {"greedy": times["search"]} | times,
    }  # fmt: skip


def table(records):
    """A table of all cases, and geometric means."""
    words = "case", "greedy, ms", *(f"over {x}" for x in ("greedy", "torch.compile", "ONNX Runtime"))
    lines = [f"| {' | '.join(words)} | search | forms | rewrites | passes as one kernel |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|---|---|")
    gains, rivals, others = [], [], []
    for name, x in records.items():
        t = {way: y["median"] for way, y in x["times"].items()}
        alone = x.get("same_program", x["bits"] is None)
        if alone:  # one program: two readings of it differ by the measurement's error alone
            t["greedy"] = t["search"]
        gains.append(t["greedy"] / t["search"])
        rivals.append(t["torch.compile"] / t["search"] if "torch.compile" in t else np.nan)
        others.append(t["ONNX Runtime"] / t["search"] if "ONNX Runtime" in t else np.nan)
        same = "none is faster" if alone else "labels of one operand are one dimension"
        words = ", ".join(dict.fromkeys(x["path"])) or (x["note"].split(":")[0] if not x["forms"] else "") or same
        loop = next((y.split("loop ")[1] for y in x["one_kernel"] if "loop " in y), "")
        passes = sum(y.startswith("    pass") for y in x["one_kernel"])
        one = f"{passes - 1} along {loop}" if loop else "none"
        ratios = [f"{y:.2f}" if np.isfinite(y) else "" for y in (gains[-1], rivals[-1], others[-1])]
        ratios = " | ".join(["1" if alone else ratios[0], *ratios[1:]])
        lines.append(f"| {name} | {t['greedy'] * 1e3:.3f} | {ratios} "
                     f"| {x['search_seconds']:.1f} s | {x['forms']} | {words} | {one} |")  # fmt: skip
    means = [f"{np.exp(np.nanmean(np.log(x))):.2f}" if np.isfinite(x).any() else "" for x in (gains, rivals, others)]
    return "\n".join([*lines, f"| geometric mean | | {' | '.join(means)} | | | | |"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the table of --out")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="in bfloat16")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return
    if options.one:
        print(json.dumps(measured(options.cases[0], torch_too=not options.no_torch, bf16=options.bf16)))
        return
    known = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for name in () if options.table else options.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            words = [
                sys.executable,
                __file__,
                "--one",
                name,
                *(["--no-torch"] * options.no_torch),
                *(["--bf16"] * options.bf16),
            ]
            more = {"PORTMM_TUNED": f"{folder}/tuned.sqlite"}
            done = subprocess.run(words, capture_output=True, text=True, env=os.environ | more, check=False)
        if done.returncode:
            print(f"{name}: {done.stderr.splitlines()[-1] if done.stderr else 'failed'}")
            continue
        known[name] = json.loads(done.stdout.splitlines()[-1])
        if options.out:
            options.out.write_text(json.dumps({x: known[x] for x in CASES if x in known}, indent=1) + "\n")
        print(table({name: known[name]}).splitlines()[2], flush=True)
    print(table({x: known[x] for x in CASES if x in known}))


if __name__ == "__main__":
    main()
