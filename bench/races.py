"""Cost and gain of races between schedules in the first calls of a kind: see `dispatch/cpu_race.py`.

    python bench/races.py [WORD ...]

For each case (those whose names have one of the words), processes with races on and off in turn, each with an empty
cache of routes and kernels: the quotient of the times of their first 200 calls, of which none may wait for a compiler,
and of the last 50, after the rivals are built and the race is over. On one thread. `PORTMM_TARGET` names a target.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = [
    *(f"f32 {x}" for x in (
        "128x128x128", "240x240x240", "512x512x512", "1024x1024x1024", "8x4096x1024", "128x768x768", "2048x32x64",
        "100x1000x300",
    )),
    "f64 240x240x240", "f32-packed 64x768x768", "f32-epilogue 128x768x768", "f32-fuse 128x768x768",
    "bf16 256x256x256", "bf16-packed 128x1024x1024", "f16 256x256x256",
    "s8 256x256x256", "s8-packed 128x1024x1024", "linear 128x1024x1024", "int4 32x1024x1024", "int4 1x4096x4096",
]  # fmt: skip
PAIRS = 5
FIRST, LAST = 200, 50
SECONDS = 0.5
"""Of calls, 200 at least: before rivals are compiled, while they are, and after that."""
CALLS = """
import json, sys, time
import ml_dtypes
import numpy as np
import portmm as pm
from portmm.dispatch import rival_process
kind, m, n, k = sys.argv[1], *map(int, sys.argv[2:5])
pm.set_num_threads(1)
rng = np.random.default_rng(0)
word, _, form = kind.partition("-")
t = {"f32": "f4", "f64": "f8", "f16": "f2", "bf16": ml_dtypes.bfloat16, "s8": "i1", "linear": "i1", "int4": "f4"}[word]
t = np.dtype(t)
draw = (lambda *s: rng.integers(-9, 9, s, np.int8)) if t == np.int8 else lambda *s: rng.standard_normal(s).astype(t)
a, b, bias = draw(m, k), draw(k, n), rng.random(n, np.float32)
out = np.empty((m, n), np.int32 if word == "s8" else np.float32 if word == "linear" else t)
if word == "linear":
    w = pm.pack(b)
    call = lambda: pm.linear(a, w, bias, x_scale=0.1, w_scale=0.1, out=out)
elif word == "int4":
    w = pm.pack(pm.quantize(b, bits=4, group=128))
    call = lambda: pm.matmul(a, w, out=out)
elif form == "epilogue":
    call = lambda: pm.matmul(a, b, out=out, epilogue=lambda x, i: pm.gelu(x + bias[i.n]))
elif form == "fuse":
    block = pm.fuse(lambda x: pm.gelu(x @ b + bias))
    call = lambda: block(a)
else:
    w = pm.pack(b) if form == "packed" else b
    call = lambda: pm.matmul(a, w, out=out)
call()  # waits for a compiler
call()
took = []
for _ in range(3):
    deadline, least = time.perf_counter() + float(sys.argv[5]), len(took) + 200
    while len(took) < least or time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    rival_process.wait()
print(json.dumps(took))
"""


def calls(case, race):
    """Seconds of each call of a process."""
    kind, _, size = case.partition(" ")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        env = {**os.environ, "PORTMM_CACHE": folder, "PORTMM_RACE": race}
        command = [sys.executable, "-c", CALLS, kind, *size.split("x"), str(SECONDS)]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout)


def main(*words):
    """Print a line for each case, and the means over cases."""
    every = []
    for case in CASES:
        if words and not any(x in case for x in words):
            continue
        first, last = [], []
        for _ in range(PAIRS):
            on, off = (calls(case, x) for x in ("on", "off"))
            first.append(sum(on[:FIRST]) / sum(off[:FIRST]))
            last.append(statistics.median(off[-LAST:]) / statistics.median(on[-LAST:]))
        every.append((statistics.median(first), statistics.median(last)))
        print(f"{case:28} first {FIRST} calls {every[-1][0]:5.3f} of the time, rate at the end {every[-1][1]:5.3f}")
    first, last = (math.exp(statistics.fmean(map(math.log, x))) for x in zip(*every, strict=True))
    print(f"{len(every)} cases: {first:.3f} of the time, rate {last:.3f}, at least {min(x for _, x in every):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
