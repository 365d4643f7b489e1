"""Reports of comparisons that never ran, for the tests of what is made of them."""

from __future__ import annotations

from dataclasses import asdict, replace

from portmm.comparison import Case, Entrant, Entry, Report, Result
from portmm.comparison.peers import Setup
from portmm.comparison.worker import Bench

PEERS = ("numpy", "mkl", "mkl-jit", "onednn", "torch", "blis", "onnxruntime-8bit")
RATES = {"avx512_f32": 116.0, "avx512_f64": 58.0, "L1": 212.0, "L2": 111.0, "L3": 100.0, "memory": 30.0}
RATES |= {"memory@all": 34.0}


def prepare(library, case, seed=0):
    """The bench of a library, and its reply to a case."""
    bench = Bench(Setup(), library)
    return bench, bench.prepare(asdict(case), seed)


def ran(case, gflops):
    seconds = case.flops / gflops / 1e9
    return Entry("ok", seconds, (0.9 * seconds, seconds, 1.2 * seconds), "gemm", "", 1e-6, 1e-5)


def result(i, group, size):
    case = Case(f"{group}-{i}", group, *size)
    entries = {name: ran(case, 40.0 + (7 * i + 11 * j) % 60) for j, name in enumerate(("portmm", *PEERS))}
    entries["mkl-jit"] = Entry("unsupported", reason="no kernel")
    if i % 50 == 7:
        entries["torch"] = Entry("wrong", reason=f"off by much in case {i}")
        entries["blis"] = Entry("crashed", reason=f"signal {i}")
    best = max((n for n in PEERS if entries[n].state == "ok"), key=lambda n: -entries[n].seconds)
    ratio = entries[best].seconds / entries["portmm"].seconds
    limit = min(116.0, 30.0 * case.flops / case.bytes)
    return Result(case, entries, best, ratio, limit)


def sample(count=200):
    sizes = ((64, 64, 64), (1, 4096, 4096), (128, 768, 3072), (2048, 64, 512))
    groups = ("cube", "llama", "bert", "skinny")
    results = tuple(result(i, groups[i % 4], tuple(x + i // 4 for x in sizes[i % 4])) for i in range(count))
    entrants = (
        Entrant("portmm", False, "ok", "portmm 0.1.0"),
        *(Entrant(name, True, "ok", f"{name} 1.2.3") for name in PEERS),
        Entrant("lost", True, "missing", "", "no liblost.so", "pip install lost"),
    )
    return Report(
        "A chip", "zen4", 1, "", "full", entrants, results, "2026-01-01", ("left-out",), ("OMP_X",), dict(RATES)
    )


def noisy(report, rounds=5):
    """The same on a busy machine: in every other case the rounds of portmm lie far apart, and some load is told."""
    results = []
    for i, r in enumerate(report.results):
        shaken = {n: e if e.state != "ok" else replace(e, samples=(e.seconds,) * rounds) for n, e in r.entries.items()}
        own = shaken["portmm"]
        if i % 2:
            spoilt = tuple(own.seconds * (1 + 2 * abs(j - rounds // 2) / rounds) for j in range(rounds))
            shaken["portmm"] = replace(own, samples=spoilt)
        results.append(replace(r, entries=shaken, load=0.25 * (i % 8), roof="avx512_f32"))
    return replace(report, results=tuple(results), load=0.875, cores=2)
