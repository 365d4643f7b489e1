"""Cost and gain of races between schedules in the first calls of a kind: see `dispatch/cpu_race.py`.

    python bench/races.py [TARGET]

For each shape, processes with races on and off in turn, each with an empty cache of routes and kernels: the quotient of
the times of their first 200 calls, of which none may wait for a compiler, and of the last 50 of 1.5
seconds. On one thread.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPES = [(128, 128, 128), (240, 240, 240), (512, 512, 512), (8, 4096, 1024), (128, 768, 768), (2048, 32, 64)]
PAIRS = 5
FIRST, LAST = 200, 50
SECONDS = 1.5
"""Of calls."""
CALLS = """
import json, sys, time
import numpy as np
import portmm as pm
m, n, k = map(int, sys.argv[1:4])
pm.set_num_threads(1)
rng = np.random.default_rng(0)
a, b, c = rng.random((m, k), np.float32), rng.random((k, n), np.float32), np.empty((m, n), np.float32)
pm.matmul(a, b, out=c)  # waits for a compiler
took = []
deadline = time.perf_counter() + float(sys.argv[4])
while len(took) < 300 or time.perf_counter() < deadline:
    start = time.perf_counter()
    pm.matmul(a, b, out=c)
    took.append(time.perf_counter() - start)
print(json.dumps(took))
"""


def calls(shape, race, target):
    """Seconds of each call of a process."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        env = {**os.environ, "PORTMM_CACHE": folder, "PORTMM_RACE": race, "PORTMM_TARGET": target}
        command = [sys.executable, "-c", CALLS, *map(str, (*shape, SECONDS))]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def main(target=""):
    """Print a line for each shape."""
    for shape in SHAPES:
        first, last = [], []
        for _ in range(PAIRS):
            on, off = (calls(shape, x, target) for x in ("on", "off"))
            first.append(sum(on[:FIRST]) / sum(off[:FIRST]))
            last.append(statistics.median(off[-LAST:]) / statistics.median(on[-LAST:]))
        size = "x".join(map(str, shape))
        print(
            f"{size:14} first {FIRST} calls {statistics.median(first):5.3f} of the time, "
            f"rate of the last {LAST} {statistics.median(last):5.3f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
