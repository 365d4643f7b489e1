"""Kernels for CUDA in bundles: cubins for described devices, and a table of launches for programs of any language.

Owns the questions for a cubin and for the launches of a product, and the table. NVRTC needs no device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from portmm.arrays.grid_call import Product, grid_call
from portmm.arrays.operand import Operand
from portmm.build import stored_objects
from portmm.build.cache import digest
from portmm.build.nvrtc import compile_cuda
from portmm.codegen.lower import lower_grid
from portmm.dispatch.cpu_kernels import isa_of
from portmm.dispatch.device_routes import Route
from portmm.dispatch.machine import Launch, Mapping, source
from portmm.dispatch.schedule_choice import choose
from portmm.dispatch.stored_kernels import read
from portmm.errors import BundleError, ScheduleError
from portmm.spec.dtype import BY_NAME
from portmm.spec.dtype import types as types_of

if TYPE_CHECKING:
    from pathlib import Path

    from portmm.build.bundle import Bundle
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ops.bundle_build import Maker
    from portmm.ops.bundle_shapes import Shape
    from portmm.target.target import Target

LAUNCHES = "launches "
"""The start of a question for the launches of a product: `launches DEVICE M N K TYPES B`."""
TABLE = "launches"
"""The question for all questions of launches."""
PLACES = (1 << 20, 2 << 20, 3 << 20)
"""Addresses in the place of those of A, B and C: as aligned as those of allocations are."""


def add_device_shapes(
    maker: Maker, shapes: Sequence[Shape], devices: Sequence[Target], report: Callable[[int, int, str], None]
) -> None:
    """Add the cubins of products of dense arrays on devices, and how they are launched.

    Raises:
        BundleError: a device has no kernel for a shape.
        NoCompilerError: there is no NVRTC.
    """
    wanted = [(x, m, on) for on in devices for x in shapes for m in x.rows]
    with ThreadPoolExecutor(2) as pool:
        every = pool.map(lambda x: _launches(maker, *x), wanted)
        for i, ((shape, m, on), fields) in enumerate(zip(wanted, every, strict=True)):
            report(i, len(wanted), f"{shape} for {on.name}")
            question = f"{LAUNCHES}{on.name} {m} {shape.n} {shape.k} {shape.dtype} {_layout(shape)}"
            maker.facts[question] = (json.dumps(fields, separators=(",", ":"), sort_keys=True),)
    known = maker.facts.get(TABLE, ())
    maker.facts[TABLE] = tuple(sorted({*known, *(x for x in maker.facts if x.startswith(LAUNCHES))}))


def _layout(shape: Shape) -> str:
    """The layout of B: a packed weight on a device is a dense copy."""
    return "col" if shape.b == "col" else "row"


def _launches(maker: Maker, shape: Shape, m: int, on: Target) -> dict[str, Any]:
    """The launches of a product, whose cubins are added."""
    types, by_columns = types_of(shape.dtype), shape.b == "col"
    sides = ((m, shape.k), (shape.k, shape.n), (m, shape.n))
    operands = [
        Operand(None, "cuda", ("cuda", 0), at, size, _strides(size, t, across=by_columns and i == 1), t, None, False)
        for i, (at, size, t) in enumerate(zip(PLACES, sides, types, strict=True))
    ]
    try:
        call = grid_call(Product(*operands), types[2])
        choice = choose(call.problem, on, vectors=call.vectors)
        kernels = lower_grid(choice.schedule, isa_of(choice.schedule, on))
        launches, (work, element) = Route(choice, tuple((x, None) for x in kernels)).launches(call.values, call.problem)
    except ScheduleError as error:
        raise BundleError(f"{shape} has no kernel on {on.name}: {error}") from error
    return {
        "a": "b" if call.transposed else "a",
        "b": "a" if call.transposed else "b",
        "workspace": work * BY_NAME[element].bytes,
        "kernels": [_kernel(maker, k, x, on) for k, x in zip(kernels, launches, strict=True)],
    }


def _strides(size: tuple[int, int], dtype: str, *, across: bool) -> tuple[int, int]:
    """Strides in bytes of a dense matrix, by rows or, across, by columns."""
    each: int = BY_NAME[dtype].bytes
    return (each, size[0] * each) if across else (size[1] * each, each)


def _kernel(maker: Maker, kernel: GridKernel, launch: Launch, on: Target) -> dict[str, Any]:
    """A row of the table: the cubin, which is added, and the launch."""
    assert on.device is not None  # noqa: S101 - of a device
    text, architecture = source(kernel, "cuda"), on.device.architecture
    code = compile_cuda(text, kernel.name, architecture).code
    maker.objects[stored_objects.CUBIN + stored_objects.identity(text, (), f"sm_{architecture}")] = code
    return {
        "file": f"{digest(code)[:20]}.cubin",
        "sha256": digest(code),
        "architecture": f"sm_{architecture}",
        "entry": kernel.name,
        "grid": [*launch.grid, 1],
        "block": [launch.threads, 1, 1],
        "shared": launch.shared,
        "zeros": launch.counters,
        "arguments": [
            _argument(x.name, kind, value) for x, (kind, value) in zip(kernel.arguments, launch.arguments, strict=True)
        ],
    }


def _argument(name: str, kind: str, value: Any) -> dict[str, Any]:
    """An argument: a pointer by its name, a number with its value, or a tensor map without its address."""
    if isinstance(value, Mapping):
        return {
            "type": "tensor_map", "name": name, "element": value.dtype, "sizes": value.sizes, "strides": value.strides,
            "box": value.box, "swizzle": value.swizzle,
        }  # fmt: skip
    return {"type": kind, "name": name} | ({} if value is None else {"value": value})


def write_cubins(maker: Maker, folder: Path) -> Path:
    """Write the cubins to files, with the table of launches in JSON; return the table."""
    folder.mkdir(parents=True, exist_ok=True)
    for question, code in maker.objects.items():
        if question.startswith(stored_objects.CUBIN):
            (folder / f"{digest(code)[:20]}.cubin").write_bytes(code)
    table = {x.removeprefix(LAUNCHES): json.loads(maker.facts[x][0]) for x in maker.facts.get(TABLE, ())}
    path = folder / "launches.json"
    path.write_text(json.dumps(table, indent=1, sort_keys=True), encoding="utf-8")
    return path


def check_cubins(bundle: Bundle) -> int:
    """Check that each launch of a bundle has a cubin with its entry, for its architecture; return their number.

    Raises:
        BundleError: one has not.
    """
    digests = {digest(code): code for _, code in map(bundle.load, range(bundle.objects))}
    entries = set()
    for question in filter(None, bundle.answer(TABLE) or ()):
        with read(bundle):
            for x in json.loads((bundle.answer(question) or [""])[0])["kernels"]:
                code = digests.get(x["sha256"], b"")
                if code[:4] != b"\x7fELF" or x["entry"].encode() + b"\0" not in code:
                    raise bundle.damaged(f"{question} has no cubin with {x['entry']}")
                entries.add((x["sha256"], x["entry"]))
    return len(entries)
