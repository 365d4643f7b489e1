"""Weights of bundles: matrices of a model, packed for each machine, in files beside the bundle that map into memory.

Owns what is packed, the files, and `bundled_layers`. There is one file for each layout of panels, as
`layers.f32x32.safetensors` beside `layers.bundle`; it has what `load_packed` reads, with the scales and the orders of
layers. The bundle says which files serve a machine, with their SHA-256, so that an image needs those of its machine
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portmm.arrays import numpy_arrays
from portmm.build import kernel_store
from portmm.dispatch import config
from portmm.dispatch.stored_kernels import read
from portmm.errors import BundleError, PackError, ScheduleError
from portmm.ops import packed_files
from portmm.ops.checkpoint_layers import PackedLayer, opened, packed_layer, quantized_layers
from portmm.ops.prepack import in_panels
from portmm.spec.dtype import types

if TYPE_CHECKING:
    from pathlib import Path

    from portmm.build.bundle import Bundle
    from portmm.ops.bundle_build import Maker
    from portmm.ops.bundle_shapes import Shape
    from portmm.target.target import Target

Makers = dict[str, "Callable[[], PackedLayer]"]
WEIGHTS = "weights "
"""The beginning of questions for the files of a machine; answers are families with SHA-256s, as "f32x32=90ab..."."""
FLOATS = ("f32", "f16", "bf16")
PARTS = ("scales", "order")
"""Arrays of a layer beside its weight, in files as NAME.scales and NAME.order."""


def layers_of(path: Path, shapes: Sequence[Shape]) -> Makers:
    """Functions that pack the layers of a model for the current target, by the names of its file.

    They are its quantized layers, and the matrices of floats, (N, K) as torch.nn.Linear keeps them, that a line of
    packed B has; they are converted to the line's type of B.

    Raises:
        BundleError: there are none.
        PackError: a file is damaged, or a layer is in a form that is not read.
        OSError: a file cannot be read.
    """
    file = opened(path)
    quantized = quantized_layers(file)
    makers: Makers = {name: lambda q=q: packed_layer(*q()) for name, q in quantized.items()}  # type: ignore[misc]
    lines: dict[tuple[int, int], str] = {}
    for x in shapes:
        if x.b == "packed" and types(x.dtype)[1] in FLOATS and lines.setdefault((x.n, x.k), x.dtype) != x.dtype:
            raise BundleError(
                f"--weights: lines of packed B of {x.n} x {x.k} are of {lines[x.n, x.k]} and of {x.dtype}; a layer is "
                "packed for one: bundle them apart"
            )
    for name, tensor in {} if str(path).endswith(".gguf") else file.tensors.items():
        word = lines.get(tensor.shape)
        if word and numpy_arrays.name_of(tensor.dtype) in FLOATS and name.rpartition(".")[0] not in quantized:
            makers[name] = lambda word=word, tensor=tensor: _dense(tensor, word)  # type: ignore[misc]
    if not makers:
        raise BundleError(
            f"--weights {path}: it has no quantized layers, and no matrix of floats (N, K) of a line of packed B"
        )
    return makers


def _dense(tensor: Any, word: str) -> PackedLayer:
    return PackedLayer(in_panels(tensor.T.astype(numpy_arrays.numpy_of(types(word)[1]), copy=False), word))


def write(
    maker: Maker,
    makers: Makers,
    machines: Sequence[Target],
    bundle: Path,
    report: Callable[[int, int, str], None] = lambda *_: None,
) -> list[Path]:
    """Pack layers for machines, and write the files; all of them are in memory before. Returns the files.

    Args:
        maker: of the bundle; it is told what its machines have.
        makers: as of `layers_of`.
        machines: the processors.
        bundle: the path of the bundle.
        report: called with layers packed, layers in all, and what is being packed.

    Raises:
        BundleError: a file cannot be written.
        ScheduleError: a machine does not multiply by a layer's weight.
    """
    from portmm.ops.recorded_kernels import launches_of

    files: dict[str, dict[str, PackedLayer]] = {}
    served: dict[str, dict[str, None]] = {x.name: {} for x in machines}
    for number, target in enumerate(machines):
        with launches_of(target):
            for i, (name, make) in enumerate(makers.items()):
                report(number * len(makers) + i, len(machines) * len(makers), f"packing {name} for {target.name}")
                try:
                    layer = make()
                except ScheduleError as error:
                    raise ScheduleError(f"{name} for {target.name}: {error}") from error
                served[target.name][layer.weight.family] = None
                files.setdefault(layer.weight.family, {}).setdefault(name, layer)
    paths, digests = {}, {}
    for family, layers in sorted(files.items()):
        paths[family] = _file(bundle, family)
        more = {f"{n}.{p}": getattr(x, p) for n, x in layers.items() for p in PARTS if getattr(x, p) is not None}
        try:
            packed_files.save_with({n: x.weight for n, x in layers.items()}, more, paths[family])
        except OSError as error:
            raise BundleError(f"{paths[family]} cannot be written: {error}") from error
        digests[family] = _sha(paths[family])
    for machine, families in served.items():
        maker.facts[WEIGHTS + machine] = tuple(f"{x}={digests[x]}" for x in families)
    return list(paths.values())


def _file(bundle: Path, family: str) -> Path:
    return bundle.with_suffix(f".{family}.safetensors")


def _sha(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bundled_layers() -> dict[str, PackedLayer]:
    """The layers that `portmm bundle --weights` packed for this machine, of all bundles in use, by name.

    Files map into memory: nothing is packed or copied, and processes share them.

    Returns:
        Layers by the names of the model's file: call one with rows, or pass its `weight` as `b`.

    Raises:
        BundleError: a bundle cannot be used, or a file of weights is not beside it or is damaged.
    """
    layers: dict[str, PackedLayer] = {}
    for bundle in kernel_store.bundles():
        machine = config.machine_of(bundle)
        for family in _files(bundle, machine) if machine else ():
            for name, layer in _layers(bundle, family).items():
                layers.setdefault(name, layer)
    return layers


def _files(bundle: Bundle, machine: str) -> dict[str, str]:
    """The families of the files of a machine, with their SHA-256."""
    with read(bundle):
        return dict(x.split("=") for x in bundle.answer(WEIGHTS + machine) or ())


def _layers(bundle: Bundle, family: str) -> dict[str, PackedLayer]:
    path = _file(bundle.path, family)
    try:
        weights, arrays = packed_files.load_with(path)
    except (OSError, PackError) as error:
        raise BundleError(f"{path} has weights of {bundle.path}, and is not used: {error}; copy it again") from error
    layers = {name: PackedLayer(weight) for name, weight in weights.items()}
    return {n: replace(x, **{p: arrays.get(f"{n}.{p}") for p in PARTS}) for n, x in layers.items()}


def check(bundle: Bundle, machines: Sequence[str]) -> int:
    """Compare the files of weights with their SHA-256; returns the number of layers.

    Raises:
        BundleError: one is not there, is damaged, or has other contents.
    """
    files = {family: sha for machine in machines for family, sha in _files(bundle, machine).items()}
    count = 0
    for family, sha in files.items():
        count += len(_layers(bundle, family))
        if _sha(_file(bundle.path, family)) != sha:
            raise BundleError(
                f"{_file(bundle.path, family)} has another SHA-256 than {bundle.path} says: copy it again"
            )
    return count
