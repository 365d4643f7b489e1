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
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from portmm.build.compiler import variable_of, zig_target
from portmm.codegen.lower import lower_int4_repack, lower_pack
from portmm.dispatch.base_kernels import FIRST, ROWS, grid_question
from portmm.ir.prefix import value
from portmm.ops.outlined_matmul import question as question_of_outline
from portmm.ops.recorded_kernels import recorded
from portmm.util import system

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
    f"aarch64-{system.MACOS}": {
        "i8mm": ("apple_m2", "i8mm bf16 asimddp asimd"),
        "dotprod": ("apple_m1", "asimddp asimd"),
        "neon": ("armv8a", "asimd"),
    },
}
"""By platform, the best first: the chip whose description selects, and the features that a processor must have."""


def level_of(target, platform=""):
    """The level that a described chip selects, by the features of its instruction sets; empty if there is none.

    Args:
        target: the chip.
        platform: by default Linux on its architecture.
    """
    has = {x for isa in target.isas for x in isa.features}
    has |= {x for match in target.match for x in (f"vendor={match.vendor}", f"family={match.family}")}
    levels = LEVELS.get(platform or target.arch, {})
    return next((x for x, (_, words) in levels.items() if has.issuperset(words.split())), "")


def families():
    """Levels with the families of cloud instances that may run on a chip of each, by their clouds."""
    from portmm.target.target import clouds, load_target

    linux = [levels for platform, levels in LEVELS.items() if not system.of(platform)[1]]
    table = {level: {"AWS": [], "Google": [], "Azure": []} for levels in linux for level in levels}
    for family in clouds():
        for level in dict.fromkeys(level_of(load_target(x)) for x in family.chips):
            if level:
                table[level][family.cloud].append(family.name)
    return table


class AttentionForm(NamedTuple):
    """A form of attention kernels for numbers of queries from one on: see `attention_launch.stored`."""

    queries: int
    few: int
    kr: int
    k_step: int
    columns: int
    step: str


class Kind(NamedTuple):
    """Products with tables of their own: types, the layouts of A and B, and what is fused with them.

    Attributes:
        dtype: types.
        a: layout of A.
        b: layout of B.
        group: of a B of four bits, the rows of a group, 0 for all.
        steps: of an epilogue of `linear`: its fields in `Dequantization`; of another, its name in `EPILOGUES`.
        source: the type of A before its rows are quantized.
        symmetric: a B of four bits has no offsets.
    """

    dtype: str
    a: str = "row"
    b: str = "row"
    group: int = 0
    steps: tuple[str, ...] = ()
    source: str = ""
    symmetric: bool = False


FLOATS = ("f32", "f16", "bf16")
GROUPS, BOTH = (32, 64, 128, 0), (False, True)
EPILOGUES = ("biased", "relu", "gelu", "silu")
"""A bias, and functions after one."""
KINDS = (
    Kind("f32"), Kind("f32", "row", "col"), Kind("f32", "col", "row"), Kind("f32", "row", "packed"),
    Kind("f64"),
    Kind("bf16"), Kind("bf16", "row", "packed"), Kind("f16"), Kind("f16", "row", "packed"),
    Kind("s8-s8-s32"), Kind("s8-s8-s32", "row", "packed"), Kind("u8-s8-s32", "row", "packed"),
)  # fmt: skip
FUSED = (
    *(Kind(f"{x}-u4-{x}", "row", "codes", g, (), "", y) for x in FLOATS for g in GROUPS for y in BOTH),
    *(
        Kind(f"s8-u4-{x}", "row", "codes", *y)
        for x in ("f32", "bf16")
        for y in product((32, 128), (("dynamic",),), (x,), BOTH)
    ),
    *(Kind("s8-s8-f32", "row", "packed", 0, steps) for steps in (("",), ("bias",))),
    *(Kind("u8-s8-f32", "row", "packed", 0, steps) for steps in (("a_zero",), ("a_zero", "bias"))),
    *(Kind("s8-s8-f32", "row", "packed", 0, ("dynamic", *x), y) for x in ((), ("bias",)) for y in FLOATS),
    *(Kind("f32", "row", "packed", 0, (x,)) for x in EPILOGUES),
    *(Kind("f32", "row", "row", 0, (x,)) for x in EPILOGUES),
    *(Kind("bf16", "row", "packed", 0, (x,)) for x in ("biased", "gelu", "silu")),
)
"""Products of floats by weights of four bits, of `linear`, and with epilogues: they have fewer kernels."""
OVER_ROWS = ("softmax", "gelu", "silu", "layer_norm", "rms_norm", "quantize_rows")
"""Functions over rows, as of a fused function that is nothing else."""
FEW = tuple(range(1, 9))
"""Rows of A with a kernel of their own, whose register tile has them all."""
MS = (*FEW, 12, 16, 32, 64, 128, 512, 2048)
NS = (63, 255, 1023, 4095)
KS = (63, 255, 1023, 4095)
"""The grid. Odd numbers of columns ask for kernels that serve any."""
WIDE = tuple(Kind(x) for x in FLOATS)
"""Kinds whose B is read as it lies, by rows: how, depends on their length."""
NS_OF_WIDE = (31, 63, 127, 255, 1023, 4095, 16383)
"""The columns of their grid."""
MS_OF_FUSED = (1, 4, 12, 32, 128, 512)
AXES_OF_FUSED = (255, 1023, 4095)
"""The grid of products with fused operations."""
LIBRARIES = {"gnu": "gnu.2.17", "musl": "musl"}
"""C libraries as zig spells them; glibc's is that of manylinux2014, the oldest that wheels are still made for."""
PROCESSES = 3
MOST_QUERIES, ALL_WIDTHS = 600, 1 << 30
"""Numbers of queries that are looked at for forms of attention; no width of a head is a multiple of the second."""
MOST, MOST_WIDE, MOST_FUSED = (1, 4), (4, 6), (1, 2)
"""Kernels of a kind for each number of few rows, and for more."""
WORTH = 0.01
"""The least gain, relative and on average, for which another is added."""


def grid(target, kind):
    """The schedules of a kind, the number of one for each point of the grid, or -1, a problem, and the grid."""
    from portmm.errors import ScheduleError

    (ms, ns, ks), (most_few, most) = (MS, NS_OF_WIDE if kind in WIDE else NS, KS), MOST_WIDE if kind in WIDE else MOST
    if kind in FUSED:
        (ms, ns, ks), (most_few, most) = (MS_OF_FUSED, AXES_OF_FUSED, AXES_OF_FUSED), MOST_FUSED
    few = [x for x in ms if x in FEW] if kind not in FUSED else [1]
    try:
        p = problem(kind, target)
        points = zip((0, *ms), ms, strict=False)
        rows = [[times(target, replace(p, m=m, n=n, k=k), before, few) for n in ns for k in ks] for before, m in points]
    except ScheduleError:
        return [], [], None, ()
    parts = [rows[i] for i in range(len(few))], [x for row in rows[len(few) :] for x in row]
    schedules, table = [], []
    for points, number in (*((x, most_few) for x in parts[0]), (parts[1], most)):
        own, best = portfolio(points, number)
        schedules += [s for s in own if s not in schedules]
        table += [schedules.index(own[i]) if i >= 0 else -1 for i in best]
    return schedules, table, p, (ms, ns, ks)


def problem(kind, target):
    """A problem of a kind on a machine."""
    from portmm.dispatch import cpu_kernels
    from portmm.spec.dequantization import Dequantization
    from portmm.spec.problem import Problem

    if kind.b == "codes":
        family = str(cpu_kernels.family_of_codes(target, kind.group, symmetric=kind.symmetric))
    else:
        family = cpu_kernels.family(summed(kind), target) if kind.b == "packed" else ""
    if kind.steps and kind.steps[0] in EPILOGUES:
        fused, _ = epilogue(kind.steps[0], kind.dtype)
    else:
        fused = Dequantization(**{x: True for x in kind.steps if x}).text if kind.steps else ""
    about = {"dtype": kind.dtype, "a": kind.a, "b": kind.b, "family": family}
    return Problem(64, 64, 64, **about, source=kind.source, fused=fused)


def summed(kind):
    """The types of a kind's products before an epilogue, as weights are packed for."""
    left, right, _ = kind.dtype.split("-") if "-" in kind.dtype else ("",) * 3
    return f"{left}-{right}-s32" if right == "s8" else kind.dtype


def times(target, p, before, few):
    """Predicted time of the schedules of a problem that serve all rows from after `before`; few rows have their own."""
    from portmm.dispatch.schedule_choice import predicted
    from portmm.schedule.cpu_candidate_sets import candidate_set

    listed = candidate_set(p, target)
    seconds = predicted(p, listed, 1)
    serving = range(max(1, before + 1), p.m + 1)
    return {
        s: t
        for s, t in zip(listed.schedules, seconds, strict=True)
        if not s.atom.swap and "k" not in s.parallel.over and not s.b.once and not s.static
        and (p.m in few or (s.heights[0] < s.mr and s.heights[0] <= serving[0]))
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


def epilogue(name, dtype):
    """The text of an epilogue of products of floats, as of a problem, and its outline."""
    import portmm as pm
    from portmm.arrays.numpy_arrays import numpy_of
    from portmm.ops.epilogues import VALUES, fusible
    from portmm.ops.outlined_matmul import outline
    from portmm.trace.tracer import trace

    bias, of = np.ones(64, numpy_of(dtype)), {"relu": pm.relu, "gelu": pm.gelu, "silu": pm.silu}.get(name)

    def biased(acc, i):
        return acc + bias[i.n]

    def function(acc, i):
        return of(acc + bias[i.n])

    function = function if of else biased
    traced, *_ = trace(function, VALUES, by_value=False, rank=2)
    (outlined, _) = outline(function, 64)
    return fusible(traced, "f32", lambda: bias.dtype).text, outlined


def fused_rows(target):
    """The kernels over rows of common functions on a target, each with the text of its expressions."""
    import portmm as pm

    x = np.random.default_rng(0).random((40, 256), np.float32)
    for function in (getattr(pm, name) for name in OVER_ROWS):
        with recorded(target) as kernels:
            try:
                explained = pm.fuse(function).explain(x)
            except Exception as error:  # noqa: BLE001 - an operation that this level lacks
                print(f"  {target.name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
                continue
        texts = [x.text for x in explained.kernels if x.kind == "rows"]
        yield from ((kernel, question, text) for (kernel, question), text in zip(kernels, texts, strict=True))


def make(folder, platform, libc, levels, kinds, *, report=lambda *_: None):
    """Write the base set of a platform to a folder; returns what it was made of."""
    from portmm.ops.bundle_build import Maker
    from portmm.target.target import load_target

    arch, of = system.of(platform)
    maker = Maker(of)
    folder.mkdir(parents=True, exist_ok=True)
    run_time(maker, folder, platform, libc)
    pool = ProcessPoolExecutor(PROCESSES)
    found = [pool.submit(grids, chip, kinds) for chip, _ in levels.values()]
    for number, (level, (chip, _)) in enumerate(levels.items()):
        target = load_target(chip)
        maker.machines[chip] = tuple(isa.name for isa in target.isas)
        report(number, len(levels), f"selecting for {level}")
        for _, schedules, table, p, axes in found[number].result():
            if not schedules:
                continue
            texts = [maker.add_schedule(s, target) for s in schedules]
            words = tuple(",".join(map(str, x)) for x in axes)
            numbers = "".join(chr(ord(FIRST) + i) if i >= 0 else "-" for i in table)
            maker.facts[grid_question(level, p)] = (*words, numbers, *texts)
        add_packings(maker, target, level, kinds)
        add_attention(maker, target, level, kinds)
        for kernel, question, text in fused_rows(target):
            maker.add_kernel(kernel, arch, question)
            maker.add_kernel(kernel, arch, f"{ROWS}{level} {text}")
    for dtype, name in dict.fromkeys((x.dtype, *x.steps) for x in kinds if x.steps and x.steps[0] in EPILOGUES):
        text, outlined = epilogue(name, dtype)
        maker.facts[question_of_outline(dtype, outlined)] = (text,)
    maker.facts["levels"] = tuple(f"{name}={','.join(words.split())}" for name, (_, words) in levels.items())
    link(maker, folder / f"{platform}.so", platform, report)
    (folder / f"{platform}.bundle").write_bytes(maker.pack((1,), report))
    return maker


def add_packings(maker, target, level, kinds):
    """Add the kernels that pack weights for kinds of products."""
    from portmm.dispatch import cpu_kernels
    from portmm.dispatch.base_kernels import PACKING, int4_word
    from portmm.errors import ScheduleError
    from portmm.spec.problem import family as family_of

    for word in dict.fromkeys(summed(x) for x in kinds if x.b == "packed"):
        try:
            isa, _ = cpu_kernels.packing_unit(word, target)
        except ScheduleError:
            continue
        name = cpu_kernels.family(word, target)
        for layout in ("row", "col"):
            kernel = lower_pack(isa, word, family_of(name).nr, layout)
            maker.add_kernel(kernel, target.arch, f"{PACKING}{level} {word} {layout}", name)
    for group, symmetric in dict.fromkeys((x.group, x.symmetric) for x in kinds if x.b == "codes"):
        layout = cpu_kernels.family_of_codes(target, group, symmetric=symmetric)
        try:
            kernel = lower_int4_repack(cpu_kernels.int4_unit(target)[0], layout)
        except ScheduleError:
            continue
        word = int4_word(group, symmetric=symmetric)
        maker.add_kernel(kernel, target.arch, f"{PACKING}{level} {word} row", str(layout))


def add_attention(maker, target, level, kinds):
    """Add the kernels of attention without functions, of the types of kinds: the forms of each, and their codes."""
    import ml_dtypes

    import portmm as pm
    from portmm.ops.attention_launch import ATTENTION, packs

    every = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
    for dtype, of in ((x, y) for x, y in every.items() if any(kind.dtype == x for kind in kinds)):
        forms = attention_forms(target, dtype)
        question = f"{ATTENTION}{level} {dtype}"
        maker.facts[question] = tuple(":".join(map(str, x)) for x in forms)
        for (i, form), dv, causal in product(enumerate(forms), (64, 65), (False, True)):
            packed = packs(form.columns, dv)
            q, k, v = (np.ones((1, 1, *x), of) for x in ((form.queries, 64), (64, 64), (64, dv)))
            with recorded(target) as kernels:
                pm.attention(q, k, v, causal=causal)
            ((kernel, _),) = kernels
            maker.add_kernel(kernel, target.arch, f"{question} {i} {int(packed)} {int(causal)}")


def attention_forms(target, dtype):
    """The forms of attention kernels by the least number of queries: see `ops.attention_kernel.make_kernel`."""
    from portmm.dispatch import cpu_kernels
    from portmm.ops.attention_launch import FEW, KEYS_OF_FEW
    from portmm.ops.attention_scores import function_of, score_expression, values
    from portmm.ops.attention_shapes import Options
    from portmm.schedule.cpu_attention import attention_schedule, keys_of
    from portmm.spec.row_classes import last_of_class
    from portmm.trace.tracer import trace

    options = Options(None, None, None, False, None, None, None, False)
    score = score_expression(trace(function_of(options, 64), values(), by_value=False, rank=4)[0])
    forms = []
    for m in range(1, MOST_QUERIES):
        isa, atom, _ = cpu_kernels.attention_unit(dtype, score, target, last_of_class(m))
        few, step, columns = m <= FEW // atom.k_pack, str(KEYS_OF_FEW), 0
        if not few:
            s = attention_schedule(isa, atom)
            masks = isa.spelling(atom, "load_mask", dtype)
            columns = ALL_WIDTHS if atom.k_pack > 1 or atom.tiled else 0 if masks else s.parallel.cell[1]
            step = keys_text(s, target)
            if any(value(step, {"d": d}) != keys_of(s, target, d) for d in range(1, 520)):
                raise ValueError(f"{step} are not the keys of a block on {target.name}")
        form = AttentionForm(m, int(few), atom.k_pack, atom.k, columns, step)
        if not forms or forms[-1]._replace(queries=m) != form:
            forms.append(form)
    return forms


def keys_text(s, target):
    """The keys of a block in prefix notation: see `cpu_attention.keys_of`."""
    from portmm.schedule.cpu_blocking import capacity
    from portmm.target.model import CPU

    near = capacity(target, "L2") or capacity(target, "L1") or CPU.unknown_l2
    step, queries = 2 * s.mr, s.tile("L2").n
    return f"* max 1 / min {int(CPU.most_keys)} / {int(near) // 2} * 4 + {queries} * 2 d {step} {step}"


def link(maker, output, platform, report):
    """Move kernels to one shared object."""
    from portmm.ops import c_library

    questions = dict.fromkeys(job for job, _ in (*maker.codes.values(), *maker.kernels.values()))
    maker.linked = {question: f"k{i}" for i, question in enumerate(questions)}
    report(0, len(questions), "linking kernels")
    with tempfile.TemporaryDirectory(prefix="portmm-link-") as folder:
        jobs = {symbol: maker.jobs.pop(question) for question, symbol in maker.linked.items()}
        jobs = dict(sorted(jobs.items(), key=lambda x: x[1].name))  # alike side by side: a seventh less in a wheel
        c_library.link(Path(folder), output.name, platform, jobs, ("-fno-asynchronous-unwind-tables",))
        shutil.copy(Path(folder, output.name), output)


def run_time(maker, folder, platform, libc):
    """Compile the run time for each version of Python, by zig against an old C library."""
    arch, of = system.of(platform)
    kernels, maker.jobs = maker.jobs, {}
    for headers in os.environ.get("PORTMM_PYTHONS", "").split(os.pathsep):
        maker.add_run_time(arch, Path(headers) if headers else None, libc)
    variable = variable_of(platform)
    target = zig_target(platform) if of else f"{arch}-linux-{LIBRARIES[libc]}"
    before = os.environ.get(variable)
    os.environ[variable] = f"{sys.executable} -m ziglang cc -target {target}"
    for question, job in maker.jobs.items():
        if job.interface:
            (folder / f"{job.name}{job.interface}").write_bytes(job.compiled())
        else:
            maker.objects[question] = job.compiled()
    os.environ.pop(variable) if before is None else os.environ.update({variable: before})
    maker.jobs = kernels


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", choices=LEVELS)
    parser.add_argument("output", type=Path, help="a folder")
    parser.add_argument("--libc", choices=LIBRARIES, default="gnu")
    parser.add_argument("--levels", default="", help="some levels only, with commas between")
    parser.add_argument("--types", default="", help="products of some types only, with commas between")
    parser.add_argument("--run-time", action="store_true", help="only the run time for versions of Python")
    options = parser.parse_args()
    levels = {
        x: y for x, y in LEVELS[options.platform].items() if x in (options.levels.split(",") if options.levels else [x])
    }
    kinds = [x for x in (*KINDS, *FUSED) if x[0] in (options.types.split(",") if options.types else [x[0]])]
    os.environ |= {"PORTMM_RACE": "off", "PORTMM_TUNED": "off", "PORTMM_BASE": "off"}
    if options.run_time:
        from portmm.ops.bundle_build import Maker

        run_time(Maker(system.of(options.platform)[1]), options.output, options.platform, options.libc)
        return
    from portmm.util.console import progress

    with progress(f"base set for {options.platform}", 600) as report:
        maker = make(options.output, options.platform, options.libc, levels, kinds, report=report)
    sizes = {x.name: x.stat().st_size for x in sorted(options.output.iterdir())}
    print(f"{len(maker.linked)} kernels of {len(maker.codes)} schedules, {len(maker.jobs)} others; bytes: {sizes}")


if __name__ == "__main__":
    main()
