"""Rates of the base set of a wheel beside those of kernels that are selected for this machine, on one thread.

    python bench/base_speed.py [--base FOLDER] [--suite quick] [--rounds N] [NAME ...]

Two processes compute the products of a suite in turns: one without a compiler, by the base set, one by kernels that
are selected and compiled for this machine. Prints for each case both times, and the median over rounds of the ratio of
the other's time to the base set's; in the end their geometric mean, of all cases and by element types. `--base` names a
folder of `tools/base_set.py`; else the installed wheel has the base set.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

import numpy as np

ENOUGH = 5e-3
"""Seconds of the calls that are timed together."""
WARM = 4
"""Calls before: from the second on a kernel is compiled."""


def call_of(pm, name, suite):
    """A function that computes a case of a suite, with operands drawn at random."""
    import ml_dtypes

    from portmm.comparison.shapes import cases

    types = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "s8": np.int8, "u8": np.uint8}
    case = next(x for x in cases(suite) if x.name == name)
    left, right, *_ = case.dtype.split("-") * 2
    rng = np.random.default_rng(0)

    def drawn(rows, columns, layout, word):
        shape = (columns, rows) if layout == "col" else (rows, columns)
        array = rng.integers(0, 9, shape).astype(types[word]) if "8" in word else rng.random(shape).astype(types[word])
        return array.T if layout == "col" else array

    a, b = drawn(case.m, case.k, case.a, left), drawn(case.k, case.n, case.b, right)
    if case.packed:
        b = pm.pack(b, activations=np.uint8) if left == "u8" else pm.pack(b)
    c = pm.matmul(a, b)
    return lambda: pm.matmul(a, b, out=c)


def child(suite, bare):
    """Answer lines: the name of a case prepares it, an empty one times it in seconds a call."""
    if bare:
        sys.modules["ziglang"] = None
    import portmm as pm

    pm.set_num_threads(1)
    call, repeats = None, 1
    for line in sys.stdin:
        if line.strip():
            call = call_of(pm, line.strip(), suite)
            for _ in range(WARM):
                call()
                from portmm.dispatch import cpu_background

                cpu_background.wait()  # by the base set calls are slow until it has found no compiler
            once = min(timeit.repeat(call, number=1, repeat=WARM))
            repeats = max(1, int(ENOUGH / once))
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        print((time.perf_counter() - start) / repeats, flush=True)


def asked(process, line=""):
    """The answer of a child."""
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def names_of(suite):
    """The cases of a suite that both can compute: products of one item whose types have a base set."""
    from portmm.comparison.shapes import cases

    kinds = ("f32", "f16", "bf16", "s8-s8-s32", "u8-s8-s32")
    return {x.name: x.dtype for x in cases(suite) if x.batch == 1 and not x.fused and x.dtype in kinds}


def main():
    """Run both processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--base", help="folder of a base set")
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--child", choices=("bare", "compiled"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.suite, options.child == "bare")
        return
    types = names_of(options.suite)
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PORTMM_TUNED": "off", "PORTMM_RACE": "off"}
        bare = {k: v for k, v in env.items() if k != "CC"} | {"PATH": folder, "PORTMM_CACHE": str(Path(folder, "none"))}
        bare |= {"PORTMM_BASE": str(Path(options.base).absolute())} if options.base else {}
        run = [sys.executable, __file__, "--suite", options.suite, "--child"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (
            subprocess.Popen([*run, "bare"], env=bare, **pipes) as base,
            subprocess.Popen([*run, "compiled"], env=env | {"PORTMM_BASE": "off"}, **pipes) as compiled,
        ):
            print(f"{'case':28s} {'base ms':>9s} {'compiled':>9s} {'ratio':>6s}")
            for name in options.names or types:
                asked(compiled, name)
                asked(base, name)
                rounds = [(asked(base), asked(compiled)) for _ in range(options.rounds)]
                ratios[name] = statistics.median(y / x for x, y in rounds)
                times = [1e3 * statistics.median(x) for x in zip(*rounds, strict=True)]
                print(f"{name:28s} {times[0]:9.4f} {times[1]:9.4f} {ratios[name]:6.2f}", flush=True)
            base.stdin.close()
            compiled.stdin.close()
    for of in ("", *dict.fromkeys(types[x] for x in ratios)):
        some = [y for x, y in ratios.items() if of in ("", types[x])]
        print(f"geometric mean of {len(some)}{' ' * bool(of)}{of}: {statistics.geometric_mean(some):.3f}")


if __name__ == "__main__":
    main()
