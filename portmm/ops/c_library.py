"""A shared library for programs without Python: the kernels of a bundle, the run time, and one header.

Owns the tables in C, and the folder with all sources, of which a shell script makes the library. `runtime/library.c`
selects the machine at load, by the features of the processor, and the kernel in each call.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from portmm.build.compiler import Compiler, find_compiler, object_command, system_flags
from portmm.dispatch.stored_kernels import rows_of
from portmm.errors import BuildError
from portmm.host.features import CPUID
from portmm.ir.index import Index, parsed
from portmm.ops import c_programs
from portmm.runtime import cpu as cpu_runtime
from portmm.spec.dtype import BY_NAME, types
from portmm.util import system
from portmm.util.templates import render

if TYPE_CHECKING:
    from portmm.ops.bundle_build import Maker
    from portmm.ops.bundle_jobs import AttentionCall, Call, Job
    from portmm.ops.c_programs import Function
    from portmm.spec.problem import Family, Problem
    from portmm.target.target import Target

    Packings = dict[tuple[str, str], tuple[Family, str, str]]
    """By machine and types the layout of weights, and the questions for the kernels that pack."""

LETTERS = {"row": "r", "col": "c", "packed": "p", "codes": "4"}
NAME = "libportmm.so"
LISTED = {name for bits in CPUID.values() for name in bits}
"""Features of x86-64 that the library reads by cpuid; others are those that the system lists."""
LINK = {"": ("-Wl,-z,noseparate-code",), system.MACOS: ()}
"""Options of the linker by system."""
HIDDEN = ("-fvisibility=hidden",)


def write(
    maker: Maker,
    folder: Path,
    arch: str,
    functions: Sequence[Function] = (),
    report: Callable[[int, int, str], None] = lambda *_: None,
) -> Path:
    """Write the sources of the library for an architecture, and build it.

    Args:
        maker: with shapes.
        folder: where to; it is made.
        arch: architecture.
        functions: functions by name, of programs for machines of the maker.
        report: as of `link`.

    Returns:
        The library.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets = {x.name: x for x in maker.targets if x.arch == arch}
    packings = {x: y for x, y in maker.packings.items() if x[0] in targets}
    calls = [x for x in maker.calls if x.target.arch == arch and _has(x, packings)]
    attentions = [x for x in maker.attentions if x.machine in targets]
    functions = [_of_machines(x, targets) for x in functions]
    sources = {i: maker.add_source(x, arch) for i, x in c_programs.kernels_of(functions).items()}
    questions = dict.fromkeys(maker.codes[x.schedule][0] for x in calls)
    questions |= dict.fromkeys(y for _, *every in packings.values() for y in every)
    questions |= dict.fromkeys([*(x.question for x in attentions), *sources.values()])
    numbers = {question: i for i, question in enumerate(questions)}
    here = Path(cpu_runtime.__file__).parent
    header, code = ((here / x).read_text(encoding="utf-8") for x in ("portmm.h", "library.c"))
    header = header.replace("/* functions */\n", c_programs.header_of(functions))
    run_time = cpu_runtime.source(python=False).replace("__dso_handle", "not_from_crtbegin")
    machines = dict(sorted(targets.items(), key=lambda x: -len(x[1].isas)))  # the one with the most first
    tables = _tables(maker, machines, (calls, packings, attentions), numbers)
    code += c_programs.tables_of(
        functions, {x: i for i, x in enumerate(machines)}, lambda x: f"portmm_kernel_{numbers[sources[id(x)]]}"
    )
    for key, data in {k: v for x in functions for k, v in x.constants.items()}.items():
        (folder / "constants").mkdir(exist_ok=True)
        (folder / f"constants/{key}.bin").write_bytes(data)
    (folder / "portmm.h").write_text(header, encoding="utf-8")
    run_time += cpu_runtime.features_source()
    (folder / "portmm.c").write_text(f'{run_time}#line 1 "portmm.h"\n{header}\n{tables}\n{code}', encoding="utf-8")
    kernels = {f"portmm_kernel_{i}": maker.jobs[question] for question, i in numbers.items()}
    own = object_command(_compiler(arch), (*HIDDEN, "-D_GNU_SOURCE", "-pthread"), "portmm")
    link(folder, NAME, arch, kernels, HIDDEN, [own], ("-lm", "-lpthread", "-ldl"), report=report)
    return folder / NAME


def link(  # noqa: PLR0917 - of a library
    folder: Path,
    name: str,
    arch: str,
    kernels: Mapping[str, Job],
    flags: tuple[str, ...] = (),
    more: Sequence[tuple[str, ...]] = (),
    libraries: tuple[str, ...] = ("-nostdlib",),
    *,
    linker: tuple[str, ...] = (),
    report: Callable[[int, int, str], None] = lambda *_: None,
) -> None:
    """Compile kernels and link them to one library; `build.sh` beside it has the commands.

    Args:
        folder: of the library.
        name: of the library.
        arch: platform.
        kernels: sources, by the symbols that their functions are to have.
        flags: for all kernels.
        more: commands for further objects, as of `object_command`.
        libraries: the last words of the link.
        linker: its command and options, if it is not the compiler that links; it needs no libraries.
        report: called with objects compiled, objects in all, and what is being done.
    """
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    compiler, commands = _compiler(arch), list(more)
    for symbol, job in kernels.items():
        (folder / f"kernels/{symbol}.c").write_text(f"#define {job.name} {symbol}\n{job.text}", encoding="utf-8")
        commands.append(object_command(compiler, (*job.flags, *flags), f"kernels/{symbol}"))
    objects = [x[-2] for x in commands]
    first, after = (
        (*object_command(compiler, (), "")[:-4], *LINK[system.of(arch)[1]]),
        (*libraries, *system_flags(arch)),
    )
    first, after = (linker, ()) if linker else (first, after)
    last = (*first, "-shared", "-s", *objects, *after, "-o", name)
    script = "".join(f"{shlex.join(x)}\n" for x in (*commands, last))
    text = f"#!/bin/sh\n# Makes {name} of the sources beside this file.\nset -e\n{script}"
    (folder / "build.sh").write_text(text, encoding="utf-8")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done, _ in enumerate(pool.map(lambda x: _run(x, folder), commands)):
            report(done, len(commands), f"compiling {name}")
    report(len(commands), len(commands), f"linking {name}")
    _run(last, folder)


def _compiler(arch: str) -> Compiler:
    return find_compiler(None if arch == system.platform() else arch)


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed in {folder}:\n{done.stderr[:2000]}")


def _of_machines(f: Function, targets: Mapping[str, Target]) -> Function:
    """A function with the programs for some machines alone, and their constants."""
    programs = {x: y for x, y in f.programs.items() if x[0] in targets}
    used = {key for p in programs.values() for key in p.constants}
    return f._replace(programs=programs, constants={k: v for k, v in f.constants.items() if k in used})


def _tables(
    maker: Maker,
    machines: Mapping[str, Target],
    has: tuple[list[Call], Packings, list[AttentionCall]],
    numbers: dict[str, int],
) -> str:
    """The tables of the library in C: a template, with what its rows hold."""
    calls, packings, attentions = has
    order = list(machines)
    index = {name: i for i, name in enumerate(order)}
    heights = {maker.codes[x.schedule][0]: rows_of(x.schedule) for x in calls}
    about = {maker.codes[x.schedule][0]: maker.codes[x.schedule][1] for x in calls}
    features = {name: dict.fromkeys(x for isa in machines[name].isas for x in isa.features) for name in order}
    used = {name: [isa for isa in machines[name].isas if isa.name in maker.isas] for name in order}
    needs = {name: dict.fromkeys(x for isa in isas for x in isa.features) for name, isas in used.items()}
    kernels = []
    for question, i in numbers.items():
        _, swap, size, workspace = about.get(question, ("", "0", "1", "0"))
        least, most = heights.get(question, (1, 1))
        sizes = {"swap": swap, "size": size, "least": least, "most": most}
        kernels.append({"number": i, "workspace": _c(parsed(workspace)), **sizes})
    return render(
        __file__,
        "library_tables.c",
        kernels=kernels,
        machines=[(name, features[name], needs[name]) for name in order],
        unlisted=sorted({y for x in order if machines[x].arch == "x86_64" for y in features[x]} - LISTED),
        rows=[_row(x, index, numbers[maker.codes[x.schedule][0]]) for x in calls],
        packings=[
            _packing(dtype, layout, (index[machine], numbers[by_rows], numbers[by_columns]))
            for (machine, dtype), (layout, by_rows, by_columns) in packings.items()
        ],
        scratches=[_c(x.workspace) for x in attentions],
        attentions=[_attention(x, i, index[x.machine], numbers[x.question]) for i, x in enumerate(attentions)],
    )


def _has(x: Call, packings: Packings) -> bool:
    """Whether the library has a function for a call: its int4 weights have offsets, and one group for each type."""
    p = x.problem
    if p.b not in LETTERS or p.fused or p.symmetric:
        return False
    layout, *_ = packings.get((x.target.name, p.dtype), (None,))
    return p.b != "codes" or (layout is not None and p.group == layout.group)


def _row(x: Call, index: dict[str, int], kernel: int) -> str:
    """The initializer of a `struct row`."""
    p: Problem = x.problem
    sizes = [BY_NAME[t].bytes for t in p.types]
    sizes[1] *= p.unit
    places = f"{index[x.target.name]}, {kernel}, {int(x.one)}, {x.threads}, {x.rows[0]}, {x.rows[1]}, {p.n}, {p.k}"
    return f"{{\"{p.dtype}\", '{LETTERS[p.a]}', '{LETTERS[p.b]}', {places}, {{{', '.join(map(str, sizes))}}}}}"


def _packing(dtype: str, layout: Family, places: tuple[int, int, int]) -> str:
    """The initializer of a `struct packing`: `places` are the machine, and the kernels for B by rows and by columns."""
    width = BY_NAME[types(dtype)[1]].bytes
    numbers = (*places, int(layout.sums), layout.group, layout.nr, layout.kr, width)
    return f'{{"{dtype}", {", ".join(map(str, numbers))}}}'


def _attention(x: AttentionCall, number: int, machine: int, kernel: int) -> str:
    """The initializer of a `struct attention`."""
    shape = x.shape
    flags = f"{int(shape.causal)}, {int(shape.window)}, {int(shape.lse)}, scratch_{number}"
    numbers = (x.threads, x.queries, shape.keys, shape.d, x.step, x.run, x.least, *x.units, x.align)
    places = f'"{shape.dtype}", {machine}, {kernel}'
    return f"{{{places}, {flags}, {', '.join(map(str, numbers))}, {BY_NAME[shape.dtype].bytes}}}"


def _c(x: Index) -> str:
    """An integer expression in C."""
    if x.op == "var":
        return str(x.args[0]) if x.args[0] in ("m", "n", "workers") else f"p->{x.args[0]}"
    if x.op == "const":
        return str(x.args[0])
    left, right = (_c(y) for y in x.args)  # type: ignore[arg-type]
    if x.op in ("min", "max"):
        return f"(({left}) {'<' if x.op == 'min' else '>'} ({right}) ? ({left}) : ({right}))"
    return f"({left} {x.op} {right})"
