"""Searches of seven programs without hints, each in a process of its own, on two threads, with empty caches.

    python bench/found_programs.py --out bench/results/superoptimiser/granite_rapids-2t-found.json

Seconds are those of the process: from its start, with the compiler and the proofs of all kernels, to its end, but for
the repetition of the certificate. A program counts as found where what `wanted` says is in the finding, as one kernel
whether it is faster or not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from superoptimiser import CASES, arrays_of, attend

import portmm as pm
from portmm.verification.certificate import repeat

THREADS = 2


def chain(x, a, b):
    return x @ (a @ b)


PROGRAMS = {
    "a norm and its product as one kernel": (*CASES["artifact-rmsnorm"], "kernel"),
    "LoRA as one kernel": (*CASES["artifact-lora"], "kernel"),
    "a gated MLP as one kernel": (*CASES["artifact-gatedmlp"], "kernel"),
    "QKNorm with attention as one kernel": (*CASES["artifact-qknorm"], "kernel"),
    "grouped decoding with split keys": (attend, ((1, 8, 1, 64), (1, 1, 4096, 64), (1, 1, 4096, 64)), "runs of keys"),
    "a softmax as attention": (*CASES["mha-decode"], "attention"),
    "x @ (a @ b) associated": (chain, ((16, 1024), (1024, 16), (16, 1024)), "association"),
}
"""Function, shapes, and what is to be found."""


def found(name):
    """The record of a program."""
    function, shapes, wanted = PROGRAMS[name]
    arrays = arrays_of(function, shapes)
    pm.set_num_threads(THREADS)
    fused = pm.fuse(function, search=True)
    got, want = fused(*arrays), function(*arrays)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3 * float(np.abs(want).max()))
    explained = fused.explain(*arrays)
    finding = explained.finding
    has = {
        "kernel": finding.kernel is not None,
        "runs of keys": any("split=" in x["schedule"] for x in finding.certificate["kernels"])
        or any(x.kind == "attention" for x in explained.kernels),
        "attention": any(x.kind == "attention" for x in explained.kernels),
        "association": "association" in finding.path,
    }
    began = time.perf_counter()
    outcomes = repeat(json.loads(json.dumps(finding.certificate)))
    repeated = time.perf_counter() - began
    return {
        "shapes": [list(x) for x in shapes], "wanted": wanted, "found": has[wanted], "path": list(finding.path),
        "forms": finding.forms, "verified": finding.verified, "faster": finding.run is not None,
        "over_greedy": finding.before / finding.seconds if finding.run is not None else 1.0,
        "search_seconds": finding.elapsed, "repeated_seconds": repeated, "bits": finding.certificate["check"]["bits"],
        "kernels": [f"{x.kind} {x.what}" for x in explained.kernels],
        "schedules": [x["schedule"] for x in finding.certificate["kernels"]],
        "unchecked": finding.certificate["unchecked"], "holds": all(x.holds for x in outcomes),
        "one_kernel": str(finding.kernel.graph).splitlines() if finding.kernel else [],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(found(options.one)))
        return
    known = {}
    for name in PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            more = {"PORTMM_TUNED": f"{folder}/tuned.sqlite", "PORTMM_CACHE": folder}
            words = [sys.executable, __file__, "--one", name]
            began = time.perf_counter()
            done = subprocess.run(words, capture_output=True, text=True, env=os.environ | more, check=False)
            seconds = time.perf_counter() - began
        if done.returncode:
            print(f"{name}: {done.stderr.splitlines()[-1] if done.stderr else 'failed'}")
            continue
        x = known[name] = json.loads(done.stdout.splitlines()[-1])
        x["seconds"] = seconds - x["repeated_seconds"]
        how = f"{x['over_greedy']:.2f} of greedy" if x["faster"] else "verified, not faster"
        what = "found" if x["found"] else "NOT found"
        print(f"{name}: {what}, {how}, {x['seconds']:.1f} s, holds {x['holds']}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
