"""Commands of the command line.

Owns the commands of `portmm` and their parameters. Modules that are slow to
import are imported when their command runs.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from portmm.cli.bundling import bundle
from portmm.cli.clouds import clouds
from portmm.cli.measuring import compare, probe, report, tune, tuned
from portmm.cli.models import run
from portmm.cli.options import Json, Threads  # noqa: TC001 - typer reads annotations
from portmm.cli.programs import superoptimize, verify
from portmm.errors import PortmmError
from portmm.target.device import LANGUAGES
from portmm.util.console import console, print_json, progress

TARGET = "A chip, an ISA, a .toml file or a cloud instance."

app = typer.Typer(
    name="portmm",
    help="Matmul kernels generated for the machine you are on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Size = Annotated[int, typer.Argument(min=1, show_default=False)]
Element = Annotated[
    str,
    typer.Option(help="Element types: f32, f64, bf16, f16, s8, or those of A, B and C as in u8-s8-s32 or f32-u4-f32."),
]
LayoutA = Annotated[str, typer.Option("--a", help="Layout of A: row, col or any.")]
LayoutB = Annotated[
    str, typer.Option("--b", help="Layout of B: row, col, any or packed, as weights of four bits (u4) always are.")
]
LayoutC = Annotated[str, typer.Option("--c", help="Layout of C: row or col.")]
Batch = Annotated[int, typer.Option(min=1, help="Products in one call.")]
Where = Annotated[str | None, typer.Option(help=TARGET, show_default="this machine")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="One order of summation for every M and thread count.")
]
Language = Annotated[
    str, typer.Option(help="Language of kernels for a device: cuda or opencl.", show_default="the device's own")
]
Static = Annotated[bool, typer.Option("--static", help="Only for this size, as for a plan.")]


def _version(requested: bool) -> None:
    if requested:
        from portmm.version import VERSION

        typer.echo(f"portmm {VERSION}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def target(
    name: Annotated[
        str | None,
        typer.Argument(help=TARGET, show_default="this machine"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show this machine as detected: instruction sets, memory levels, measured rates."""
    from portmm.cli.views import target_data, target_view
    from portmm.explanation.product import target_called
    from portmm.target.clouds import size_of
    from portmm.target.target import instance

    machine = target_called(name)
    family = instance(name) if name else None
    if as_json:
        chips: dict[str, Any] = {}
        if family and name:
            size = asdict(size_of(name, family, arm=machine.arch == "aarch64"))
            chips = {"instance": name, "chips": list(family.chips), "families_source": family.source, "size": size}
        print_json(target_data(machine) | chips)
        return
    if family and name:
        console().print(family.sentence(name), soft_wrap=True, highlight=False)
        if about := str(size_of(name, family, arm=machine.arch == "aarch64")):
            console().print(about, highlight=False)
    console().print(target_view(machine))
    if name is None and not machine.measured:
        console(stderr=True).print("[dim]No rate is measured yet: run `portmm probe`.[/dim]")


@app.command()
def targets(as_json: Json = False) -> None:
    """List the described chips, and the cloud instances that may run on each."""
    from portmm.cli.views import chips, chips_view
    from portmm.target.target import clouds as families

    rows = chips(families())
    if as_json:
        print_json(rows)
    else:
        console().print(chips_view(rows))


app.command()(probe)


def _explained(
    size: tuple[int, int, int],
    layouts: tuple[str, str, str],
    *,
    dtype: str,
    batch: int,
    where: str | None,
    threads: int | None,
    deterministic: bool,
    static: bool,
) -> Any:
    from portmm.arrays import call
    from portmm.dispatch import cpu_kernels
    from portmm.explanation.product import explain, target_called
    from portmm.spec.dequantization import Dequantization
    from portmm.spec.dtype import accumulator, types

    machine = target_called(where)
    if threads is None and where is not None:
        threads = machine.cores
    try:
        of_a, of_b, of_c = types(dtype)
        if of_b == "u4":
            layouts = (layouts[0], "codes", layouts[2])
        fused = Dequantization().text if accumulator(of_a, of_b) == "s32" != of_c else ""
        family = cpu_kernels.family(dtype, machine, size[1]) if layouts[1] in ("packed", "codes") else ""
        dense = "any" not in layouts
        problem = call.problem(dtype, size, layouts, family, batch, dense=dense, static=static, fused=fused)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    problem = replace(problem, deterministic=deterministic or problem.deterministic)
    return explain(problem, target=where, threads=threads)


@app.command(name="explain")
def explain_command(
    m: Size,
    n: Size,
    k: Size,
    *,
    dtype: Element = "f32",
    a: LayoutA = "row",
    b: LayoutB = "row",
    c: LayoutC = "row",
    batch: Batch = 1,
    threads: Threads = None,
    target: Where = None,
    deterministic: Deterministic = False,
    static: Static = False,
    source: Annotated[bool, typer.Option("--source", help="Also print the emitted C.")] = False,
    build: Annotated[bool, typer.Option("--build", help="Also compile it, and print the path.")] = False,
    as_json: Json = False,
) -> None:
    """Explain how C[M, N] = A[M, K] . B[K, N] would be computed, and why."""
    how = {"deterministic": deterministic, "static": static}
    explanation = _explained((m, n, k), (a, b, c), dtype=dtype, batch=batch, where=target, threads=threads, **how)
    artifact: Any = explanation.artifact if build else None
    if as_json:
        built = {"artifact": str(artifact.path), "command": list(artifact.command)} if hasattr(artifact, "path") else {}
        print_json(explanation.as_dict() | built)
        return
    typer.echo(explanation.summary())
    if artifact:
        typer.echo(_built(artifact))
    if source:
        typer.echo(f"\n{explanation.source}", nl=False)


@app.command()
def warmup(
    shapes: Annotated[list[str], typer.Argument(help="MxNxK, or BATCHxMxNxK.", show_default=False)],
    *,
    dtype: Element = "f32",
    b: Annotated[str, typer.Option(help="Layout of B: row, or col for a transpose.")] = "row",
    device: Annotated[str, typer.Option(help="cuda, or cuda:1; by default the CPU.", show_default=False)] = "",
    as_json: Json = False,
) -> None:
    """Compile the kernels of products into the cache, so that first calls do not wait for a compiler."""
    from portmm.ops.warmup import warmup as warm

    numbers = []
    for x in shapes:
        sizes = x.split("x")
        if not all(n.isdecimal() for n in sizes):
            raise typer.BadParameter(f"{x!r} is no shape; write MxNxK or BATCHxMxNxK, as 64x3072x768")
        numbers.append(tuple(map(int, sizes)))
    try:
        result = warm(numbers, dtype, b=b, device=device or None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json(asdict(result))
        return
    typer.echo(str(result))
    for name in result.kernels:
        typer.echo(f"{'':<4}{name}")


def _built(artifact: Any) -> str:
    """Text on a compiled kernel: its file and command, or its size and registers."""
    if hasattr(artifact, "path"):
        return f"{'built':<12}{artifact.path}\n{'':<12}{' '.join(artifact.command)}"
    size = f"{len(artifact.code)} bytes for sm_{artifact.architecture} in {artifact.seconds:.2f} s"
    return f"{'built':<12}{size}\n{'':<12}{artifact.registers} registers, {artifact.spills} bytes spilled"


@app.command()
def emit(
    m: Annotated[int | None, typer.Argument(min=1, show_default=False)] = None,
    n: Annotated[int | None, typer.Argument(min=1, show_default=False)] = None,
    k: Annotated[int | None, typer.Argument(min=1, show_default=False)] = None,
    *,
    dtype: Element = "f32",
    a: LayoutA = "row",
    b: LayoutB = "row",
    c: LayoutC = "row",
    batch: Batch = 1,
    threads: Threads = None,
    target: Where = None,
    deterministic: Deterministic = False,
    static: Static = False,
    schedule: Annotated[
        str, typer.Option(help="A schedule, as spelled in the header of an emitted kernel.", show_default=False)
    ] = "",
    language: Language = "",
) -> None:
    """Print the source of a kernel, also for another machine."""
    if language not in ("", "c", *LANGUAGES):
        raise typer.BadParameter(f"language {language!r} is unknown; use c, {' or '.join(LANGUAGES)}")
    if schedule:
        typer.echo(_scheduled(schedule, language), nl=False)
        return
    if m is None or n is None or k is None:
        raise typer.BadParameter("pass M, N and K, or --schedule")
    from portmm.target.target import instance

    if language in LANGUAGES and target is None:
        target = f"{language}_gpu"  # no device is needed
    how = {"deterministic": deterministic, "static": static}
    explanation = _explained((m, n, k), (a, b, c), dtype=dtype, batch=batch, where=target, threads=threads, **how)
    if explanation.target.device is None and language in LANGUAGES:
        raise typer.BadParameter(
            f"{explanation.target.name} is a CPU, whose kernels are C; name a device, as in --target h200"
        )
    if explanation.target.device is not None and language:
        if language not in LANGUAGES:
            name = explanation.target.name
            raise typer.BadParameter(f"kernels of {name} are written in {' or '.join(LANGUAGES)}")
        from portmm.explanation.product import explained

        explanation = explained(explanation.choice.problem, explanation.target, language, explanation.notes)
    if target and instance(target):
        typer.echo(explanation.notes[0], err=True)  # standard output is input of a compiler
    typer.echo(explanation.source, nl=False)


def _scheduled(text: str, language: str) -> str:
    from portmm.codegen.c_kernel import source
    from portmm.codegen.lower import lower_grid
    from portmm.dispatch.cpu_kernels import kernel_of
    from portmm.dispatch.machine import source as source_of_device
    from portmm.schedule.text import parse
    from portmm.target.target import load_isa

    try:
        schedule = parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    isa = load_isa(schedule.isa)
    if schedule.stages:
        return "\n".join(source_of_device(x, language or "cuda") for x in lower_grid(schedule, isa))
    return source(kernel_of(schedule, isa))


app.command()(bundle)
app.command()(clouds)
app.command()(compare)


app.command()(tune)
app.command()(tuned)


@app.command(name="cache")
def cache_command(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all kernels and notes.")] = False,
    where: Annotated[bool, typer.Option("--where", help="Print only its path.")] = False,
    as_json: Json = False,
) -> None:
    """List the caches (calls, kernels, routes), the compiled kernels, and the scratch memory that a process keeps."""
    from portmm.arrays import scratch_budget
    from portmm.build import cache, cache_contents, cache_eviction
    from portmm.cli.views import cache_view, caches, entry_data
    from portmm.util.text import size

    directory = cache.cache_dir()
    if where:
        typer.echo(str(directory))
        return
    if clear:
        typer.echo(f"{cache_contents.cache_clear()} files removed from {directory}")
        return
    entries, total, limit = cache_contents.cache_entries(), cache_contents.cache_size(), cache_eviction.limit()
    if as_json:
        data = {"path": str(directory), "bytes": total, "limit": limit, "scratch_bytes": scratch_budget.budget()}
        print_json({**data, "caches": caches(entries), "kernels": [entry_data(e) for e in entries]})
    else:
        console().print(cache_view(entries, str(directory), total, limit))
        for name, x in caches(entries).items():
            kept = f"{x['entries']} on disk ({size(x['bytes'])}), " if x["lasts"] else ""
            typer.echo(f"{name}: {kept}at most {x['most']} in a process: {x['what']}")
        budget = size(scratch_budget.budget())
        typer.echo(f"Scratch memory that a process keeps between calls: at most {budget} ({scratch_budget.VARIABLE})")


@app.command()
def doctor(
    libraries: Annotated[bool, typer.Option(help="Open every library that compare supports.")] = True,
    as_json: Json = False,
) -> None:
    """Diagnose this machine: missing requirements and their remedies; status 0 if portmm works."""
    from portmm.cli import doctor as diagnosis
    from portmm.cli.views import check_view

    steps = diagnosis.steps(libraries=libraries)
    output = console()
    checks: list[diagnosis.Check] = []
    with progress("checking") as report_step:
        for i, step in enumerate(steps):
            report_step(i, len(steps), step[0])
            checks += diagnosis.run(step)
    usable = diagnosis.usable(checks)
    if as_json:
        print_json({"usable": usable, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            output.print(check_view(check))
        failure = "[bold red]portmm cannot make kernels here.[/bold red]"
        output.print("portmm works on this machine." if usable else failure)
    if not usable:
        raise typer.Exit(1)


app.command()(report)
app.command()(run)
app.command()(superoptimize)
app.command()(verify)


def main() -> None:
    """Run the command line; an error of portmm, of an import or of the system is one line, with status 1."""
    try:
        app()
    except (PortmmError, ImportError, OSError) as error:
        from rich.text import Text

        console(stderr=True).print(Text(f"portmm: {error}", style="red"), soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
