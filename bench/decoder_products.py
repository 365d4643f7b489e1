"""Products of some layers of a decoder and of its vocabulary by int4 weights: portmm beside OpenVINO and PyTorch.

    taskset -c 1 python bench/decoder_products.py --layers 4 --rows 1 8 512

Weights are seeded random values of four bits in groups of 32. Libraries run in turns in one process: `int4-dynamic` of
`examples/llama.py`; OpenVINO, which rounds activations to int8 in the same groups; PyTorch's product of bfloat16 by
int4, torchao's on CPUs. A round multiplies by each weight once, so that these come from memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import portmm as pm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
GROUP = 32
WRONG = 0.3
"""Error of a result, relative to that of exact activations, above which a library computes something else."""


def ours(x, codes, scales):
    """The example's product."""
    import llama

    product = llama.Product(pm.Quantized(codes, scales, scales * -8, 4, GROUP), "int4-dynamic")
    return lambda: product(x)


def openvino(x, codes, scales):
    """OpenVINO's product, its weight a constant of four bits."""
    import openvino as ov
    import openvino.opset13 as ops

    (k, n), rows = codes.shape, np.ascontiguousarray(codes.T)
    pairs = (rows[:, ::2] | rows[:, 1::2] << 4).reshape(-1)  # the constant is this memory
    values = ov.op.Constant(ov.Tensor(pairs, ov.Shape([n, k // GROUP, GROUP]), ov.Type.u4))
    zeros = ops.convert(ops.constant(np.full((1, 1, 1), 8, np.uint8)), np.float32)
    steps = ops.constant(np.ascontiguousarray(scales.T)[..., None])
    weight = ops.multiply(ops.subtract(ops.convert(values, np.float32), zeros), steps)
    weight = ops.reshape(weight, np.array((n, k)), special_zero=False)
    given = ops.parameter(list(x.shape), np.float32)
    options = {
        "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": pm.get_num_threads(), "ENABLE_CPU_PINNING": False,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
    }  # fmt: skip
    model = ov.Model([ops.matmul(given, weight, False, True)], [given], "product")
    request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
    request.set_input_tensor(0, ov.Tensor(x, shared_memory=True))

    def run():
        request.infer()
        return request.get_output_tensor(0).data

    run.kept = pairs
    return run


def pytorch(x, codes, scales):
    """PyTorch's product, activations bfloat16."""
    import torch

    torch.set_num_threads(pm.get_num_threads())
    values = torch.from_numpy(np.ascontiguousarray(codes.T).astype(np.int32))
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 8)  # noqa: SLF001 - what torchao calls
    steps = torch.from_numpy(scales).to(torch.bfloat16)
    both, rows = torch.stack([steps, torch.zeros_like(steps)], -1).contiguous(), torch.from_numpy(x).to(torch.bfloat16)
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001 - the same
    return lambda: multiply(rows, weight, GROUP, both).float().numpy()


LIBRARIES = {"int4-dynamic": ours, "OpenVINO": openvino, "PyTorch": pytorch}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    options = parser.parse_args()
    pm.set_num_threads(options.threads)
    import llama

    c, rng = llama.SIZES[options.size], np.random.default_rng(0)
    layer = [(c.width, (c.heads + 2 * c.key_heads) * c.head), (c.width, c.width), (c.width, 2 * c.inner)]
    sizes = [*[*layer, (c.inner, c.width)] * options.layers, (c.width, c.vocabulary)]
    weights = [
        (rng.integers(0, 16, (k, n), np.uint8), rng.uniform(0.5, 1.5, (k // GROUP, n)).astype(np.float16).astype("f4"))
        for k, n in sizes
    ]
    for rows in options.rows:
        inputs = {k: rng.standard_normal((rows, k)).astype(np.float32) for k, _ in sizes}
        runs = {
            name: [LIBRARIES[name](inputs[codes.shape[0]], codes, scales) for codes, scales in weights]
            for name in options.libraries
        }
        codes, scales = weights[0]
        exact = inputs[codes.shape[0]] @ ((codes - np.float32(8)) * np.repeat(scales, GROUP, 0))
        seconds = {name: [] for name in runs}
        for _ in range(options.rounds + 2):
            for name, calls in runs.items():
                start = time.perf_counter()
                for call in calls:
                    call()
                seconds[name].append(time.perf_counter() - start)
        base = statistics.median(seconds[options.libraries[0]][2:])  # in the first two rounds kernels are compiled
        for name, times in seconds.items():
            middle = statistics.median(times[2:])
            error = np.linalg.norm(runs[name][0]() - exact) / np.linalg.norm(exact)
            assert error < WRONG, f"{name} is off by {error}"
            print(f"{rows:4} rows {name:13} {middle * 1e3:9.2f} ms {middle / base:5.2f}  error {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
