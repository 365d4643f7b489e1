"""The command `portmm bundle`: makes bundles of kernels, and checks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from portmm.cli import model_calls
from portmm.cli.options import Json  # noqa: TC001 - typer reads annotations
from portmm.errors import BundleError
from portmm.ops import bundle_wheel
from portmm.util.console import console, print_json, progress, table
from portmm.util.text import time as time_text

if TYPE_CHECKING:
    from portmm.ops.bundle_build import Maker
    from portmm.ops.c_programs import Function
    from portmm.target.target import Target

LINES = (
    "A file of lines M N K TYPES B, as 1-512 768 3072 f32 packed. "
    "M is a number, a range as 1-512 or a list as 1,16; B is row, col or packed."
)


def bundle(  # noqa: PLR0917 - typer's parameters
    output: Annotated[
        Path, typer.Argument(help=f"The bundle; as {bundle_wheel.EXAMPLE}, a wheel of it.", show_default=False)
    ],
    shapes: Annotated[Path | None, typer.Option(help=LINES)] = None,
    machines: Annotated[
        str,
        typer.Option(
            "--for",
            help="Chips, levels as x86_64_v3, instruction sets, sm_90 or cloud instances, with commas between; `chips` "
            "are all processors of instances, `levels` all levels.",
        ),
    ] = "",
    from_onnx: Annotated[
        Path | None, typer.Option("--from-onnx", help="A model in ONNX's format: all kernels that it calls.")
    ] = None,
    from_torch: Annotated[
        Path | None, typer.Option("--from-torch", help="A program of torch.export.save: all kernels that it calls.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sizes of axes for --from-onnx, as `batch=1 sequence=16,128`.")] = "",
    from_cache: Annotated[
        bool, typer.Option("--from-cache", help="All that the cache has for this machine's architecture.")
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(help="A model's safetensors or GGUF: layers that are packed for each machine, beside the bundle."),
    ] = None,
    to_c: Annotated[
        Path | None,
        typer.Option("--c", help="Also write a shared library, its header and sources to this folder, for C."),
    ] = None,
    functions: Annotated[
        Path | None, typer.Option(help="A file of lines NAME FILE.py:FUNCTION SHAPE ..., of functions for --c.")
    ] = None,
    threads: Annotated[
        str, typer.Option(help="Numbers of threads that kernels are selected for.", show_default="1,2,4,8,16,32,64")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Check a bundle, and run its kernels.")] = False,
    as_json: Json = False,
) -> None:
    """Make one file with the kernels of some shapes for some machines, or check it.

    Programs use it by `portmm.use_bundle`, or PORTMM_BUNDLE in the environment; they need no compiler then.
    """
    calls = [] if from_onnx is None else [model_calls.of_onnx(from_onnx, model_calls.sizes_of(sizes))]
    calls += [] if from_torch is None else [model_calls.of_torch(from_torch)]
    making = shapes is not None or functions is not None or from_cache or bool(calls)
    if not making and not check:
        raise typer.BadParameter("give --shapes, --functions, --from-onnx, --from-torch, --from-cache or --check")
    if to_c and shapes is None and functions is None:
        raise typer.BadParameter("--c takes --shapes FILE or --functions FILE")
    if weights and shapes is None:
        raise typer.BadParameter("--weights takes --shapes FILE: lines of packed B are for the products of its layers")
    if functions and not to_c:
        raise typer.BadParameter("--functions names functions of a library: give its folder, --c FOLDER")
    if making:
        lists = {"shapes": _read("--shapes", shapes), "functions": _read("--functions", functions)}
        places = {"shapes": str(shapes), "functions": str(functions)}
        _make(
            output,
            lists,
            places,
            (machines, threads),
            calls=calls,
            from_cache=from_cache,
            weights=weights,
            to_c=to_c,
            as_json=as_json,
        )
    if check:
        _check(output, as_json=as_json)


def _read(option: str, path: Path | None) -> str | None:
    """The text of a file that an option names."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{option} {path} cannot be read: {error}") from error


def _make(
    output: Path,
    lists: dict[str, str | None],
    places: dict[str, str],
    options: tuple[str, str],
    *,
    calls: list[Callable[[], None]],
    from_cache: bool,
    weights: Path | None,
    to_c: Path | None,
    as_json: bool,
) -> None:
    from portmm.build.cache import digest
    from portmm.build.trusted_files import write
    from portmm.dispatch.stored_kernels import here
    from portmm.host.detect import host
    from portmm.ops import bundle_build, bundle_shapes
    from portmm.target.target import load_target

    start, (machines, threads) = time.perf_counter(), options
    maker = bundle_build.Maker()
    words = [x.strip() for x in machines.split(",") if x.strip()]
    counts = _counts(threads) or bundle_build.COUNTS
    targets = bundle_shapes.targets_of(words) if words else ([here(load_target(host().name), host())], [])
    if not targets[0] and (calls or lists["functions"] is not None):
        raise BundleError("models and functions are recorded for processors; name one in --for")
    if from_cache:
        bundle_build.add_cache(maker)
    for run in calls:
        bundle_build.add_calls(maker, run, targets[0], counts)
    functions = _add_lists(maker, lists, places, targets, counts)
    with bundle_wheel.place(output) as bundle:
        files = _weights(maker, weights, str(lists["shapes"]), targets[0], bundle) if weights else []
        with progress("compiling") as report:
            data = maker.pack(counts, report)
        try:
            write(bundle.absolute(), data)
            bundle.chmod(0o644)
        except OSError as error:
            raise BundleError(f"{output} cannot be written: {error}") from error
        if bundle != output:
            bundle_wheel.write(output, [bundle, *files])
    libraries = _libraries(maker, to_c, targets, functions) if to_c else []
    about = {"path": str(output), "bytes": len(data), "sha256": digest(data), "seconds": time.perf_counter() - start}
    if as_json:
        rows = [
            {"machine": x.machine, "shape": str(x.shape), "m": x.m, "kernel": x.kernel, "kernels": x.kernels,
             "seconds": x.seconds}
            for x in maker.built
        ]  # fmt: skip
        print_json(
            about
            | {"built": rows, "models": maker.recorded, "libraries": libraries, "weights": [x.name for x in files]}
        )
        return
    _show(maker, about)
    for file in files:
        console().print(f"{file.name}: packed weights, beside the bundle", soft_wrap=True)
    for library in libraries:
        of_devices = "the table of launches, with the cubins for CUDA"
        what = of_devices if library.endswith(".json") else "the library for C, with portmm.h and its sources"
        console().print(f"{library}: {what}", soft_wrap=True)


def _weights(maker: Maker, path: Path, shapes: str, machines: list[Target], bundle: Path) -> list[Path]:
    """Pack the layers of a model's file for machines, and return the files."""
    from portmm.ops import bundle_shapes, bundle_weights

    try:
        makers = bundle_weights.layers_of(path, bundle_shapes.shapes_of(shapes))
    except OSError as error:
        raise BundleError(f"--weights {path} cannot be read: {error}") from error
    with progress("packing") as report:
        return bundle_weights.write(maker, makers, machines, bundle.absolute(), report)


def _add_lists(
    maker: Maker,
    lists: dict[str, str | None],
    places: dict[str, str],
    targets: tuple[list[Target], list[Target]],
    counts: Sequence[int],
) -> list[Function]:
    """Add the kernels that files list, for processors and for devices; return the functions."""
    from portmm.ops import bundle_attention, bundle_build, bundle_devices, bundle_shapes

    processors, devices = targets
    if (text := lists["shapes"]) is not None:
        attention = bundle_shapes.attention_of(text, places["shapes"])
        shapes = bundle_shapes.shapes_of(text, places["shapes"], empty=bool(attention))
        if processors:
            bundle_build.add_shapes(maker, shapes, processors, counts)
            bundle_attention.add_attention(maker, attention, processors, counts)
        if devices:
            with progress("compiling for CUDA") as report:
                bundle_devices.add_device_shapes(maker, shapes, devices, report)
    if (text := lists["functions"]) is None:
        return []
    from portmm.cli import library_calls

    bundle_build.add_shapes(maker, (), processors, counts)
    functions = library_calls.functions_of(library_calls.lines_of(text, places["functions"]), processors, counts)
    for kernel, arch in library_calls.kernels_of(functions, processors):
        maker.add_source(kernel, arch)
    return functions


def _libraries(
    maker: Maker, folder: Path, targets: tuple[list[Target], list[Target]], functions: Sequence[Function]
) -> list[str]:
    """Write the libraries for C, one for each architecture, and the cubins; return what was written."""
    from portmm.ops import bundle_devices, c_library

    processors, devices = targets
    archs = sorted({x.arch for x in processors})
    folders = {arch: folder if len(archs) == 1 else folder / arch for arch in archs}
    with progress("compiling the library") as report:
        written = [str(c_library.write(maker, folders[arch], arch, functions, report)) for arch in archs]
    return written + [str(bundle_devices.write_cubins(maker, folder / "cuda"))] * bool(devices)


def _show(maker: Maker, about: dict[str, Any]) -> None:
    """Print what a bundle has."""
    if maker.built:
        title, head = "predicted on one thread, at the largest M", ("chip", "shape", "kernel", "kernels", "time")
        cells = [
            (x.machine, str(x.shape), x.kernel, str(x.kernels), time_text(x.seconds) if x.seconds else "")
            for x in maker.built
        ]
        console().print(table(title, head, cells, words=("chip", "shape", "kernel")))
    if maker.recorded:
        counts = [(name, str(number)) for name, number in maker.recorded.items()]
        console().print(table("called by models", ("chip", "kernels"), counts, words=("chip",)))
    objects = len(maker.jobs) + len(maker.objects)
    console().print(
        f"{about['path']}: {about['bytes']} bytes, {objects} objects, {about['seconds']:.1f} s, "
        f"SHA-256 {about['sha256']}",
        soft_wrap=True,
    )


def _counts(text: str) -> tuple[int, ...]:
    """Numbers of threads, as in 1,2,8."""
    words = [x.strip() for x in text.split(",") if x.strip()]
    wrong = [x for x in words if not x.isdecimal() or int(x) < 1]
    if wrong:
        raise typer.BadParameter(f"--threads {wrong[0]!r} is no number of threads; write numbers as in 1,2,8")
    return tuple(sorted(map(int, words)))


def _check(path: Path, *, as_json: bool) -> None:
    from portmm.build.bundle import open_bundle
    from portmm.ops.bundle_check import LAYERS, check

    with bundle_wheel.unpacked(path) as bundle, progress("checking") as report:
        counts = check(open_bundle(bundle), report)
    if as_json:
        print_json(counts)
        return
    for what, number in counts.items():
        console().print(f"{number} {'' if what == LAYERS else 'kernels '}{what}")
    console().print("contents match their digests")
