"""The base set of kernels of a wheel: for every level of processors the kernels that serve most calls.

    python tools/base_set.py x86_64 portmm/base

Owns the levels, the kinds of products, and the selection of a few kernels for each kind: those whose predicted times
over a grid of sizes lose least to the best candidate of each size. A table of the grid goes into the bundle, so that a
first call needs no selection. Kernels of products are in one shared object beside it, as is the run time for each
version of Python: the dynamic loader opens these files themselves. Kernels of other operations are those that calls of
them ask for, recorded by running these calls with kernels that do nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

LEVELS = {
    "x86_64": {
        "amx": (
            "sapphire_rapids",
            "amx_tile amx_bf16 amx_int8 avx512_bf16 avx512_vnni avx512f avx512vl avx512bw avx512dq",
        ),
        "zen5": (
            "zen5",
            "vendor=AuthenticAMD family=26 avx512_bf16 avx512_vnni avx_vnni avx512f avx512vl avx512bw avx512dq",
        ),
        "avx512_bf16": ("zen4", "avx512_bf16 avx512_vnni avx512f avx512vl avx512bw avx512dq"),
        "avx512_vnni": ("icelake_sp", "avx512_vnni avx512f avx512vl avx512bw avx512dq"),
        "v4": ("skylake_sp", "avx512f avx512vl avx512bw avx512dq"),
        "v3": ("haswell", "avx2 fma f16c"),
        "v2": ("x86_64_v2", "sse2"),
    },
    "aarch64": {
        "sve256": ("neoverse_v1", "sve sve_vl256 i8mm bf16 asimddp asimd"),
        "sve128": ("neoverse_v2", "sve sve_vl128 i8mm bf16 asimddp asimd"),
        "dotprod": ("neoverse_n1", "asimddp asimd"),
        "neon": ("armv8a", "asimd"),
    },
}
"""By architecture, the best first: the chip whose description selects, and the features that a processor must have."""
KINDS = (
    ("f32", "row", "row"), ("f32", "row", "col"), ("f32", "col", "row"), ("f32", "row", "packed"),
    ("f64", "row", "row"),
    ("bf16", "row", "row"), ("bf16", "row", "packed"), ("f16", "row", "row"), ("f16", "row", "packed"),
    ("s8-s8-s32", "row", "row"), ("s8-s8-s32", "row", "packed"), ("u8-s8-s32", "row", "packed"),
)  # fmt: skip
"""Types, and the layouts of A and B."""
FEW = tuple(range(1, 9))
"""Rows of A with a kernel of their own, whose register tile has them all."""
MS = (*FEW, 12, 16, 32, 64, 128, 512, 2048)
NS = (63, 255, 1023, 4095)
KS = (63, 255, 1023, 4095)
"""The grid. Odd numbers of columns ask for kernels that serve any."""
LIBRARIES = {"gnu": "gnu.2.17", "musl": "musl"}
"""C libraries as zig spells them; glibc's is that of manylinux2014, the oldest that wheels are still made for."""
PROCESSES = 3
MOST, WORTH = 4, 0.01
"""Kernels of a kind for more rows; the least gain, relative and on average, for which another is added."""


def grid(target, kind):
    """The schedules of a kind, the number of one for each point of the grid, or -1, and the packed layout."""
    from portmm.dispatch import cpu_kernels
    from portmm.errors import ScheduleError

    dtype, _, b = kind
    try:
        family = cpu_kernels.family(dtype, target) if b == "packed" else ""
        rows = [[times(target, kind, family, (m, n, k), before) for n in NS for k in KS] for before, m in steps()]
    except ScheduleError:
        return [], [], ""
    parts = [rows[i] for i in range(len(FEW))], [x for row in rows[len(FEW) :] for x in row]
    schedules, table = [], []
    for points, most in (*((x, 1) for x in parts[0]), (parts[1], MOST)):
        own, best = portfolio(points, most)
        schedules += [s for s in own if s not in schedules]
        table += [schedules.index(own[i]) if i >= 0 else -1 for i in best]
    return schedules, table, family


def steps():
    """Values of M of the grid, each with the one before."""
    return zip((0, *MS), MS, strict=False)


def times(target, kind, family, size, before):
    """Predicted time of the schedules of a size that serve all rows from after `before`; few rows have their own."""
    from portmm.dispatch.schedule_choice import predicted
    from portmm.ops.bundle_shapes import problem_of
    from portmm.schedule.cpu_candidate_sets import candidate_set

    dtype, a, b = kind
    p = problem_of(size, dtype, b, family, a)
    listed = candidate_set(p, target)
    seconds = predicted(p, listed, 1)
    serving = range(max(1, before + 1), size[0] + 1)
    return {
        s: t
        for s, t in zip(listed.schedules, seconds, strict=True)
        if not s.atom.swap and "k" not in s.parallel.over and not s.b.once and not s.static
        and (size[0] in FEW or (s.heights[0] < s.mr and s.heights[0] <= serving[0]))
    }  # fmt: skip


def portfolio(points, most):
    """The schedules that lose least together over some points, and which of them is best at each, -1 if none is."""
    index = {s: i for i, s in enumerate(dict.fromkeys(s for row in points for s in row))}
    if not index:
        return [], [-1] * len(points)
    matrix = np.full((len(points), len(index)), np.inf)
    for i, row in enumerate(points):
        for s, t in row.items():
            matrix[i, index[s]] = t
    least = np.minimum(matrix.min(axis=1, keepdims=True), 1e3)
    logs = np.log(np.minimum(matrix / least, 1e3))
    selected, best = [], np.full(len(logs), np.log(1e3))
    while len(selected) < most:
        after = np.minimum(best[:, None], logs).mean(axis=0)
        i = int(after.argmin())
        if selected and best.mean() - after[i] < WORTH:
            break
        selected.append(i)
        best = np.minimum(best, logs[:, i])
    own, which = list(index), logs[:, selected].argmin(axis=1)
    legal = np.isfinite(matrix[:, selected][np.arange(len(points)), which])
    return [own[i] for i in selected], np.where(legal, which, -1).tolist()


def grids(chip, kinds):
    """Kinds of products of a chip with their schedules and tables: for a process of its own."""
    from portmm.target.target import load_target

    return [(kind, *grid(load_target(chip), kind)) for kind in kinds]


def calls():  # noqa: C901 - a list
    """Calls of operations besides products: each runs once on every level."""
    import ml_dtypes

    import portmm as pm

    r = np.random.default_rng(0)
    x = r.random((40, 256), np.float32)
    w = r.random((256, 128), np.float32)
    half, brain = np.float16, ml_dtypes.bfloat16
    few = r.random((1, 4, 1, 64), np.float32)
    many = r.random((1, 4, 70, 64), np.float32)
    codes = r.integers(-9, 9, (256, 128), dtype=np.int8)
    small = r.integers(-9, 9, (40, 256), dtype=np.int8)
    scales = np.ones(128, np.float32)

    def of(dtype):
        yield lambda: pm.matmul(x.astype(dtype), pm.pack(w.astype(dtype)))
        yield lambda: pm.pack(np.asfortranarray(w.astype(dtype)))
        for q, mask in ((few, False), (many, False), (many, True)):
            keys = many.astype(dtype)
            yield lambda q=q, mask=mask, keys=keys: pm.attention(q.astype(dtype), keys, keys, causal=mask)
        for rows in (1, 40):
            for group in (32, 128):
                weight = pm.quantize(w, bits=4, group=group)
                yield lambda rows=rows, weight=weight: pm.matmul(x[:rows].astype(dtype), pm.pack(weight))

    for dtype in (np.float32, half, brain):
        yield from of(dtype)
    yield lambda: pm.pack(codes)
    yield lambda: pm.pack(np.asfortranarray(codes))
    for rows in (1, 40):
        for options in ({}, {"bias": scales}):
            for dtype in (np.float32, half, brain):
                yield lambda rows=rows, o=options, dtype=dtype: pm.linear(
                    x[:rows].astype(dtype), pm.pack(codes), w_scale=scales, dynamic=True, **o
                )
            yield lambda rows=rows, o=options: pm.linear(small[:rows], pm.pack(codes), x_scale=0.5, w_scale=scales, **o)
    for function in (pm.relu, pm.gelu, pm.silu):
        for rows in (1, 40):
            yield lambda rows=rows, f=function: pm.matmul(
                x[:rows], pm.pack(w), epilogue=lambda acc, i: f(acc + scales[i.n])
            )
    for function in (pm.softmax, pm.gelu, pm.silu, pm.layer_norm, pm.rms_norm, pm.quantize_rows):
        yield lambda f=function: pm.fuse(f)(x)


def record(target):
    """The kernels of all calls on a target."""
    from portmm.ops.recorded_kernels import recorded

    with recorded(target) as kernels:
        for call in calls():
            try:
                call()
            except Exception as error:  # noqa: BLE001 - an operation that this level lacks
                print(f"  {target.name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
    return kernels


def make(folder, arch, libc, levels, kinds, *, report=lambda *_: None):
    """Write the base set of an architecture to a folder; returns what it was made of."""
    from portmm.ops.bundle_build import Maker
    from portmm.target.target import load_target

    maker = Maker()
    folder.mkdir(parents=True, exist_ok=True)
    run_time(maker, folder, arch, libc)
    pool = ProcessPoolExecutor(PROCESSES)
    found = [pool.submit(grids, chip, kinds) for chip, _ in levels.values()]
    for number, (level, (chip, _)) in enumerate(levels.items()):
        target = load_target(chip)
        maker.machines[chip] = tuple(isa.name for isa in target.isas)
        report(number, len(levels), f"selecting for {level}")
        for kind, schedules, table, family in found[number].result():
            if not schedules:
                continue
            texts = [maker.add_schedule(s, target) for s in schedules]
            question = f"grid {level} {' '.join(kind)} {family}".rstrip()
            axes = tuple(",".join(map(str, x)) for x in (MS, NS, KS))
            maker.facts[question] = (*axes, "".join(chr(48 + i) if i >= 0 else "-" for i in table), *texts)
            if kind[2] == "packed":
                maker.add_packing(kind[0], target)
        for kernel in record(target):
            maker.add_source(kernel, arch)
    maker.facts["levels"] = tuple(f"{name}={','.join(words.split())}" for name, (_, words) in levels.items())
    link(maker, folder / f"{arch}.so", arch, report)
    (folder / f"{arch}.bundle").write_bytes(maker.pack((1,), report))
    return maker


def link(maker, output, arch, report):
    """Move the kernels of products to one shared object."""
    from portmm.ops import c_library

    questions = dict.fromkeys(job for job, _ in maker.codes.values())
    maker.linked = {question: f"k{i}" for i, question in enumerate(questions)}
    report(0, len(questions), "linking kernels of products")
    with tempfile.TemporaryDirectory(prefix="portmm-link-") as folder:
        jobs = {symbol: maker.jobs.pop(question) for question, symbol in maker.linked.items()}
        c_library.link(Path(folder), output.name, arch, jobs)
        shutil.copy(Path(folder, output.name), output)


def run_time(maker, folder, arch, libc):
    """Compile the run time for each version of Python, by zig against an old C library."""
    kernels, maker.jobs = maker.jobs, {}
    for headers in os.environ.get("PORTMM_PYTHONS", "").split(os.pathsep):
        maker.add_run_time(arch, Path(headers) if headers else None, libc)
    variable = "CC" if arch == os.uname().machine else f"CC_{arch}"
    before = os.environ.get(variable)
    os.environ[variable] = f"{sys.executable} -m ziglang cc -target {arch}-linux-{LIBRARIES[libc]}"
    for question, job in maker.jobs.items():
        if job.interface:
            (folder / f"{job.name}{job.interface}").write_bytes(job.compiled())
        else:
            maker.objects[question] = job.compiled()
    os.environ.pop(variable) if before is None else os.environ.update({variable: before})
    maker.jobs = kernels


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", choices=LEVELS)
    parser.add_argument("output", type=Path, help="a folder")
    parser.add_argument("--libc", choices=LIBRARIES, default="gnu")
    parser.add_argument("--levels", default="", help="some levels only, with commas between")
    parser.add_argument("--types", default="", help="products of some types only, with commas between")
    options = parser.parse_args()
    levels = {
        x: y for x, y in LEVELS[options.arch].items() if x in (options.levels.split(",") if options.levels else [x])
    }
    kinds = [x for x in KINDS if x[0] in (options.types.split(",") if options.types else [x[0]])]
    os.environ |= {"PORTMM_RACE": "off", "PORTMM_TUNED": "off", "PORTMM_BASE": "off"}
    from portmm.util.console import progress

    with progress(f"base set for {options.arch}", 600) as report:
        maker = make(options.output, options.arch, options.libc, levels, kinds, report=report)
    sizes = {x.name: x.stat().st_size for x in sorted(options.output.iterdir())}
    print(f"{len(maker.linked)} kernels of {len(maker.codes)} schedules, {len(maker.jobs)} others; bytes: {sizes}")


if __name__ == "__main__":
    main()
