"""Times of first calls by the base set of a wheel, without a compiler: each in fresh processes.

    python bench/base_calls.py [--base FOLDER] [--processes N] [NAME ...]

Prints for each kind of call, in milliseconds, the least time and the median over the processes, with what it needs
before it (a packed weight, the run time) made outside of the time. The first process fills the cache of bytecode and is
left out. `--base` names a folder of `tools/base_set.py`; else the installed wheel has the base set.
"""

import os
import sys
import time

import numpy as np

M, N, K = 40, 128, 256
BF16 = "import ml_dtypes; bf16 = ml_dtypes.bfloat16"
CALLS = {
    "import": "import portmm as pm",
    "matmul": "pm.matmul(x, w)",
    "pack": "pm.pack(w)",
    "packed matmul": "packed = pm.pack(w); pm.matmul(x, packed)",
    "linear": "packed = pm.pack(codes); pm.linear(small, packed, x_scale=0.5, w_scale=bias)",
    "linear, dynamic": "packed = pm.pack(codes); pm.linear(x, packed, w_scale=bias, dynamic=True)",
    "pack of int4": "quantized = pm.quantize(w, bits=4, group=32); pm.pack(quantized)",
    "int4": "packed = pm.pack(pm.quantize(w, bits=4, group=32)); pm.matmul(x, packed)",
    "attention": "pm.attention(many, many, many)",
    "attention, causal": "pm.attention(many, many, many, causal=True)",
    "attention of one query": "pm.attention(one, many, many)",
    "epilogue": "packed = pm.pack(w); pm.matmul(x, packed, epilogue=lambda acc, i: pm.gelu(acc + bias[i.n]))",
    "epilogue of an array": "pm.matmul(x, w, epilogue=lambda acc, i: pm.relu(acc + bias[i.n]))",
    "fuse, softmax": "f = pm.fuse(pm.softmax); f(x)",
    "fuse, rms_norm": "f = pm.fuse(pm.rms_norm); f(x)",
    "fuse, layer_norm": "f = pm.fuse(pm.layer_norm); f(x)",
    "fuse, gelu": "f = pm.fuse(pm.gelu); f(x)",
    "rows to int8": "f = pm.fuse(pm.quantize_rows); f(x)",
    "f16": "a, b = x.astype(np.float16), w.astype(np.float16); pm.matmul(a, b)",
    "packed f16": "a, b = x.astype(np.float16), pm.pack(w.astype(np.float16)); pm.matmul(a, b)",
    "bf16": f"{BF16}; a, b = x.astype(bf16), w.astype(bf16); pm.matmul(a, b)",
    "packed bf16": f"{BF16}; a, b = x.astype(bf16), pm.pack(w.astype(bf16)); pm.matmul(a, b)",
    "epilogue in bf16": f"{BF16}; a, b, c = x.astype(bf16), pm.pack(w.astype(bf16)), bias.astype(bf16); "
    "pm.matmul(a, b, epilogue=lambda acc, i: pm.gelu(acc + c[i.n]))",
    "attention in bf16": f"{BF16}; q = many.astype(bf16); pm.attention(q, q, q)",
    "int8": "pm.matmul(small, codes)",
    "pack of int8": "pm.pack(codes)",
    "packed int8": "packed = pm.pack(codes); pm.matmul(small, packed)",
    "int4, A in 8 bits": "packed = pm.pack(pm.quantize(w, bits=4, group=32)); pm.linear(x, packed, dynamic=True)",
}
"""Preparation and first call of each operation, with a semicolon between."""


def child(name):
    """Milliseconds of a call in this process."""
    rng = np.random.default_rng(0)
    x, w = rng.random((M, K), np.float32), rng.random((K, N), np.float32)
    codes, small = (rng.integers(-9, 9, shape, dtype=np.int8) for shape in ((K, N), (M, K)))
    many = rng.random((1, 4, 70, 64), np.float32)
    operands = {"np": np, "x": x, "w": w, "codes": codes, "small": small, "many": many, "one": many[:, :, :1]}
    operands["bias"] = np.ones(N, np.float32)
    sys.modules["ziglang"] = None
    before, _, call = CALLS[name].rpartition("; ")
    if name != "import":
        exec("import portmm as pm", operands)  # noqa: S102 - of this file
    exec(before, operands)  # noqa: S102 - as above
    code = compile(call, name, "exec")
    start = time.perf_counter()
    exec(code, operands)  # noqa: S102 - as above
    print(1e3 * (time.perf_counter() - start))


def main():
    """Run the processes and print the table."""
    import argparse  # here, as what these load is no longer part of a child's first call
    import statistics
    import subprocess
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CALLS))
    parser.add_argument("--base", help="folder of a base set")
    parser.add_argument("--processes", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if k not in ("CC", "PYTHONDONTWRITEBYTECODE")}
        env |= {"PATH": folder, "PORTMM_CACHE": os.path.join(folder, "none")}  # noqa: PTH118 - a string is wanted
        env |= {"PORTMM_TUNED": "off"}  # as where nothing was tuned
        env |= {"PORTMM_BASE": os.path.abspath(options.base)} if options.base else {}  # noqa: PTH100 - as above
        print(f"{'call':24s} {'least':>7s} {'median':>7s}  ms")
        for name in options.names:
            run = [sys.executable, __file__, "--child", name]
            every = [
                float(subprocess.run(run, env=env, check=True, capture_output=True, text=True).stdout)
                for _ in range(options.processes + 1)
            ][1:]
            print(f"{name:24s} {min(every):7.2f} {statistics.median(every):7.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()
