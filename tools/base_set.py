"""The base set of kernels of a wheel: for every level of processors the kernels that serve most calls.

    python tools/base_set.py x86_64 portmm/base

Owns the levels, and what is made for each: kernels of products, which `base_products.py` selects over a grid of sizes,
of packing, attention and rows. A table of the grid goes into the bundle, so that a first call needs no selection.
Kernels of products are in one shared object beside it, as is the run time for each version of Python: the dynamic
loader opens these files themselves. Kernels of other operations are those that calls of them ask for, recorded by
running these calls with kernels that do nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice, pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from base_products import EPILOGUES, FUSED, KINDS, epilogue, grids, summed

from portmm.build.bundle import HEADER, OBJECT, open_bundle
from portmm.build.cache import digest
from portmm.build.compiler import variable_of, zig_target
from portmm.codegen.lower import lower_int4_repack, lower_pack
from portmm.dispatch.base_kernels import FIRST, ROWS, grid_question
from portmm.ir.prefix import value
from portmm.ops.outlined_matmul import OUTLINE
from portmm.ops.outlined_matmul import question as question_of_outline
from portmm.ops.outlined_rows import outline
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


OVER_ROWS = (
    ("softmax", 0), ("gelu", 0), ("silu", 0), ("layer_norm", 0), ("layer_norm", 2), ("rms_norm", 0), ("rms_norm", 1),
    ("quantize_rows", 0),
)  # fmt: skip
"""Functions over rows, as of a fused function that is nothing else, and how many vectors they take."""
LIBRARIES = {"gnu": "gnu.2.17", "musl": "musl"}
"""C libraries as zig spells them; glibc's is that of manylinux2014, the oldest that wheels are still made for."""
WITHOUT_TABLES = ("-fno-asynchronous-unwind-tables",)
"""Options for objects that debuggers cannot unwind: a twentieth less."""
SMALLER = (*WITHOUT_TABLES, "-O2")
"""Options for the run time: zig's -Og, which builds fast, gives a quarter more code, which is slower."""
FOLDED = ("-ffunction-sections", "-fdata-sections")
FOLDING = ("--icf=all", "--ignore-data-address-equality", "--no-rosegment", "--hash-style=gnu")
"""Options of compilers and of LLVM's linker of ELF for which kernels share functions of the same code: half remains."""
SMALL_BLOCKS = """#if !defined(__clang__)
static void block(const long *, long, long) __attribute__((optimize("Os", "no-ivopts")));
#endif
"""
"""A declaration for gcc ahead of kernels: the loops over blocks, whose code is a third of all, are made small: a fifth
less. They call the functions with the inner loops, which stay as they are."""
PROCESSES = 3
SHARED, MOST_PHRASES = 40, 320
"""Uses of a pair of words for which it is one, and phrases of a base set: each takes a first call 0.1 us,
of 1 to 2 ms."""
EACH = 100
"""Kernels from one report to the next."""
MOST_QUERIES, ALL_WIDTHS = 600, 1 << 30
"""Numbers of queries that are looked at for forms of attention; no width of a head is a multiple of the second."""


def fused_rows(target):
    """The kernels over rows of common functions on a target, for any number of columns: expressions, and outlines."""
    import portmm as pm
    from portmm.dispatch.base_kernels import of_any_columns
    from portmm.dispatch.cpu_routes import expressions_route
    from portmm.spec.epilogue import parse

    n = 256
    x, vector = np.random.default_rng(0).random((40, n), np.float32), np.ones(n, np.float32)
    for name, vectors in OVER_ROWS:
        with recorded(target) as kernels:
            try:
                function, after = getattr(pm, name), [vector.copy() for _ in range(vectors)]
                explained, outlined = pm.fuse(function).explain(x, *after), outline(function, n, tuple(after))
            except Exception as error:  # noqa: BLE001 - an operation that this level lacks
                print(f"  {target.name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
                continue
            texts = [x.text for x in explained.kernels if x.kind == "rows"]
            every = {text: of_any_columns(text, n) for text in texts}
            for text in filter(None, every.values()):
                expressions_route(parse(text), (*x.shape, 1))
        texts += filter(None, every.values())
        for (kernel, question), text in zip(kernels, texts, strict=True):
            if not every.get(text):
                yield kernel, question, text, outlined[0]


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
        for kernel, question, text, outlined in fused_rows(target):
            maker.add_kernel(kernel, arch, question)
            maker.add_kernel(kernel, arch, f"{ROWS}{level} {text}")
            maker.facts[f"{OUTLINE}{outlined}"] = (text,)
    for dtype, name in dict.fromkeys((x.dtype, *x.steps) for x in kinds if x.steps and x.steps[0] in EPILOGUES):
        text, outlined = epilogue(name, dtype)
        maker.facts[question_of_outline(dtype, outlined)] = (text,)
    maker.facts["levels"] = tuple(f"{name}={','.join(words.split())}" for name, (_, words) in levels.items())
    link(maker, folder / f"{platform}.so", platform, report)
    maker.phrases = phrases
    (folder / f"{platform}.bundle").write_bytes(maker.pack((1,), report))
    return maker


def phrases(texts):
    """The phrases whose abbreviation makes some texts shortest, the longest first: by pairs of neighbours, joined."""
    lines = [re.findall(r"[^ ,;:\t]*[ ,;:\t]|[^ ,;:\t]+", x) for x in dict.fromkeys(texts)]
    while True:
        pairs = Counter(pair for line in lines for pair in pairwise(line))
        (pair, times), *_ = pairs.most_common(1) or [((), 0)]
        if times < SHARED:
            break
        lines = [joined(line, pair) if pair[0] in line else line for line in lines]
    saved = Counter(x for line in lines for x in line)
    saved = {x: times * (len(x) - 2) - len(x) for x, times in saved.items()}
    best = sorted((x for x in saved if saved[x] > 0), key=lambda x: (-saved[x], x))[:MOST_PHRASES]
    return sorted(best, key=lambda x: (-len(x), x))


def joined(line, pair):
    """A line of words in which a pair of neighbours is one word."""
    words = []
    for x in line:
        if words and (words[-1], x) == pair:
            words[-1] += x
        else:
            words.append(x)
    return words


def add_packings(maker, target, level, kinds):
    """Add the kernels that pack weights for kinds of products."""
    from portmm.dispatch import cpu_kernels
    from portmm.dispatch.base_kernels import int4_word
    from portmm.dispatch.stored_kernels import PACKING
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
    from portmm.ops.attention_launch import KEYS_OF_FEW
    from portmm.ops.attention_scores import function_of, score_expression, values
    from portmm.ops.attention_shapes import Options
    from portmm.schedule.cpu_attention import attention_schedule, few_queries, keys_of
    from portmm.spec.row_classes import last_of_class
    from portmm.trace.tracer import trace

    options = Options(None, None, None, False, None, None, None, False)
    score = score_expression(trace(function_of(options, 64), values(), by_value=False, rank=4)[0])
    forms = []
    for m in range(1, MOST_QUERIES):
        isa, atom, _ = cpu_kernels.attention_unit(dtype, score, target, last_of_class(m))
        few, step, columns = m <= few_queries(isa, atom, dtype), str(KEYS_OF_FEW), 0
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


def linker_of_llvm():
    """The command of LLVM's linker of ELF: zig's, which makes the run time too; else an installed one, or empty."""
    if find_spec("ziglang"):
        return sys.executable, "-m", "ziglang", "ld.lld"
    found = filter(None, map(shutil.which, ("ld.lld", "ld.lld-19")))
    return tuple(islice(found, 1))


def link(maker, output, platform, report):
    """Move kernels to one shared object."""
    from portmm.ops import c_library

    questions = dict.fromkeys(job for job, _ in (*maker.codes.values(), *maker.kernels.values()))
    maker.linked = {question: f"k{i}" for i, question in enumerate(questions)}
    with tempfile.TemporaryDirectory(prefix="portmm-link-") as folder:
        jobs = {symbol: maker.jobs.pop(question) for question, symbol in maker.linked.items()}
        jobs = dict(sorted(jobs.items(), key=lambda x: x[1].name))  # alike side by side: a seventh less in a wheel
        jobs = {symbol: replace(job, text=SMALL_BLOCKS + job.text) for symbol, job in jobs.items()}
        flags, linker = WITHOUT_TABLES, ()
        if not system.of(platform)[1] and (found := linker_of_llvm()):
            flags, linker = (*flags, *FOLDED), (*found, *FOLDING)

        def told(done, *of):
            if done % EACH == 0:
                report(done, *of)

        c_library.link(Path(folder), output.name, platform, jobs, flags, linker=linker, report=told)
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
        job = replace(job, flags=(*job.flags, *SMALLER))  # noqa: PLW2901 - the same, smaller
        if job.interface:
            (folder / f"{job.name}{job.interface}").write_bytes(job.compiled())
        else:
            maker.objects[question] = job.compiled()
    os.environ.pop(variable) if before is None else os.environ.update({variable: before})
    maker.jobs = kernels


def with_object(made, code):
    """The bytes of a bundle that has one object, with another in its place: the answers stay as they are."""
    small = zlib.compress(code, 9)
    table = OBJECT.pack(0, len(small), len(code), bytes.fromhex(digest(code)))
    index = made.data[HEADER.size : made.text - OBJECT.size] + table + made.data[made.text : made.code]
    header = list(HEADER.unpack_from(made.data))
    header[-3:-1] = zlib.crc32(index), bytes.fromhex(digest(index))
    return HEADER.pack(*header) + index + small


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", choices=LEVELS)
    parser.add_argument("output", type=Path, help="a folder")
    parser.add_argument("--libc", choices=LIBRARIES, default="gnu")
    parser.add_argument("--levels", default="", help="some levels only, with commas between")
    parser.add_argument("--types", default="", help="products of some types only, with commas between")
    parser.add_argument("--run-time", action="store_true", help="only the run time, beside kernels that were made")
    options = parser.parse_args()
    levels = {
        x: y for x, y in LEVELS[options.platform].items() if x in (options.levels.split(",") if options.levels else [x])
    }
    kinds = [x for x in (*KINDS, *FUSED) if x[0] in (options.types.split(",") if options.types else [x[0]])]
    os.environ |= {"PORTMM_RACE": "off", "PORTMM_TUNED": "off", "PORTMM_BASE": "off"}
    if options.run_time:
        from portmm.ops.bundle_build import Maker

        maker = Maker(system.of(options.platform)[1])
        run_time(maker, options.output, options.platform, options.libc)
        (code,) = maker.objects.values()
        path = options.output / f"{options.platform}.bundle"
        path.write_bytes(with_object(open_bundle(path), code))
        return
    from portmm.util.console import progress

    with progress(f"base set for {options.platform}", 600) as report:
        maker = make(options.output, options.platform, options.libc, levels, kinds, report=report)
    sizes = {x.name: x.stat().st_size for x in sorted(options.output.iterdir())}
    print(f"{len(maker.linked)} kernels of {len(maker.codes)} schedules, {len(maker.jobs)} others; bytes: {sizes}")


if __name__ == "__main__":
    main()
