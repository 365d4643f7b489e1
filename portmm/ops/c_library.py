"""A shared library for programs without Python: the kernels of a bundle, the run time, and one header.

Owns the tables in C, and the folder with all sources, of which a shell script makes the library. `runtime/library.c`
selects the machine at load, by the features of the processor, and the kernel in each call.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from portmm.build.compiler import find_compiler, object_command
from portmm.dispatch.stored_kernels import rows_of
from portmm.errors import BuildError
from portmm.host.features import CPUID
from portmm.ir.index import Index, parsed
from portmm.runtime import cpu as cpu_runtime
from portmm.spec.dtype import BY_NAME, types
from portmm.util.templates import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portmm.build.compiler import Compiler
    from portmm.ops.bundle_build import Call, Job, Maker
    from portmm.spec.problem import Family, Problem

LETTERS = {"row": "r", "col": "c", "packed": "p"}
NAME = "libportmm.so"
LISTED = {name for bits in CPUID.values() for name in bits}
"""Features of x86-64 that the library reads by cpuid; others are those that the system lists."""
HIDDEN = ("-fvisibility=hidden",)


def write(maker: Maker, folder: Path, arch: str) -> Path:
    """Write the sources of the library for an architecture, and build it.

    Args:
        maker: with shapes.
        folder: where to; it is made.
        arch: architecture.

    Returns:
        The library.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    calls = [x for x in maker.calls if x.target.arch == arch and x.problem.b in LETTERS and not x.problem.fused]
    packings = {x: y for x, y in maker.packings.items() if any(c.target.name == x[0] for c in calls)}
    questions = dict.fromkeys(maker.codes[x.schedule][0] for x in calls)
    questions |= dict.fromkeys(y for _, *every in packings.values() for y in every)
    numbers = {question: i for i, question in enumerate(questions)}
    here = Path(cpu_runtime.__file__).parent
    header, code = ((here / x).read_text(encoding="utf-8") for x in ("portmm.h", "library.c"))
    run_time = cpu_runtime.source(python=False).replace("__dso_handle", "not_from_crtbegin")
    tables = _tables(maker, calls, packings, numbers)
    (folder / "portmm.h").write_text(header, encoding="utf-8")
    run_time += cpu_runtime.features_source()
    (folder / "portmm.c").write_text(f'{run_time}#line 1 "portmm.h"\n{header}\n{tables}\n{code}', encoding="utf-8")
    kernels = {f"portmm_kernel_{i}": maker.jobs[question] for question, i in numbers.items()}
    own = object_command(_compiler(arch), (*HIDDEN, "-D_GNU_SOURCE", "-pthread"), "portmm")
    link(folder, NAME, arch, kernels, HIDDEN, [own], ("-lm", "-lpthread", "-ldl"))
    return folder / NAME


def link(  # noqa: PLR0917 - of a library
    folder: Path,
    name: str,
    arch: str,
    kernels: Mapping[str, Job],
    flags: tuple[str, ...] = (),
    more: Sequence[tuple[str, ...]] = (),
    libraries: tuple[str, ...] = ("-nostdlib",),
) -> None:
    """Compile kernels and link them to one library; `build.sh` beside it has the commands.

    Args:
        folder: of the library.
        name: of the library.
        arch: architecture.
        kernels: sources, by the symbols that their functions are to have.
        flags: for all kernels.
        more: commands for further objects, as of `object_command`.
        libraries: the last words of the link.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: it failed.
    """
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    compiler, commands = _compiler(arch), list(more)
    for symbol, job in kernels.items():
        (folder / f"kernels/{symbol}.c").write_text(f"#define {job.name} {symbol}\n{job.text}", encoding="utf-8")
        commands.append(object_command(compiler, (*job.flags, *flags), f"kernels/{symbol}"))
    objects = [x[-2] for x in commands]
    first = object_command(compiler, (), "")[:-4]
    last = (*first, "-shared", "-s", "-Wl,-z,noseparate-code", *objects, *libraries, "-o", name)
    script = "".join(f"{shlex.join(x)}\n" for x in (*commands, last))
    text = f"#!/bin/sh\n# Makes {name} of the sources beside this file.\nset -e\n{script}"
    (folder / "build.sh").write_text(text, encoding="utf-8")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda x: _run(x, folder), commands))
    _run(last, folder)


def _compiler(arch: str) -> Compiler:
    return find_compiler(None if arch == os.uname().machine else arch)


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed in {folder}:\n{done.stderr[:2000]}")


def _tables(
    maker: Maker, calls: list[Call], packings: dict[tuple[str, str], tuple[Family, str, str]], numbers: dict[str, int]
) -> str:
    """The tables of the library in C: a template, with what its rows hold."""
    machines = {x.target.name: x.target for x in calls}
    # The one with the most instruction sets first.
    order = sorted(machines, key=lambda x: -len(machines[x].isas))
    index = {name: i for i, name in enumerate(order)}
    heights = {maker.codes[x.schedule][0]: rows_of(x.schedule) for x in calls}
    about = {maker.codes[x.schedule][0]: maker.codes[x.schedule][1] for x in calls}
    needs = {name: dict.fromkeys(x for isa in machines[name].isas for x in isa.features) for name in order}
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
        machines=needs.items(),
        unlisted=sorted({y for x in order if machines[x].arch == "x86_64" for y in needs[x]} - LISTED),
        rows=[_row(x, index, numbers[maker.codes[x.schedule][0]]) for x in calls],
        packings=[
            _packing(dtype, layout, (index[machine], numbers[by_rows], numbers[by_columns]))
            for (machine, dtype), (layout, by_rows, by_columns) in packings.items()
            if machine in index
        ],
    )


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
    return f'{{"{dtype}", {", ".join(map(str, places))}, {int(layout.sums)}, {layout.nr}, {layout.kr}, {width}}}'


def _c(x: Index) -> str:
    """An integer expression in C."""
    if x.op in ("const", "var"):
        return str(x.args[0])
    left, right = (_c(y) for y in x.args)  # type: ignore[arg-type]
    if x.op in ("min", "max"):
        return f"(({left}) {'<' if x.op == 'min' else '>'} ({right}) ? ({left}) : ({right}))"
    return f"({left} {x.op} {right})"
