"""Checkpoints of models: folders of safetensors files, in shards or not, with quantized layers.

Owns `open_checkpoint`. Tensors stay in maps of their files; a layer's integers are decoded when they are asked for, so
that memory is bounded by the largest layer. Nothing in a file is executed, and names in an index stay in their folder.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.errors import CheckpointError
from portmm.weights.layer_formats import DECODERS, MARKS, Values, torchao_weights
from portmm.weights.safetensors import MAX_HEADER, Array, Location, mapped

if TYPE_CHECKING:
    from portmm.weights.quantized import Quantized

INDEX = "model.safetensors.index.json"
CONFIGURATIONS = ("config.json", "quantize_config.json", "quant_config.json")
"""Files that say how layers are quantized, the first that does."""


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A quantized linear layer of a checkpoint, whose tensors are in maps of files.

    Attributes:
        name: of the layer, or of the weight in a checkpoint of torchao.
        method: its format.
        tensors: those of the layer, by the last part of their names.
        options: of its format, from the configuration.
    """

    name: str
    method: str
    tensors: Mapping[str, Array]
    options: Mapping[str, Any]

    def quantized(self) -> tuple[Quantized, Array | None]:
        """The weight (inputs, outputs), and the order p of inputs, as in `x[..., p]`; None if they are in order.

        Raises:
            CheckpointError: tensors are missing, or do not fit together.
        """
        values = self._values()
        return values.matrix, values.order

    def dequantized(self) -> Array:
        """The weight (inputs, outputs) as floats, to the bit as the format computes it, in its type.

        Raises:
            CheckpointError: tensors are missing, or do not fit together.
        """
        return self._values().floats()

    def _values(self) -> Values:
        try:
            return DECODERS[self.method](self.tensors, self.options)
        except (ValueError, TypeError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"layer {reprlib.repr(self.name)} ({self.method}) cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files.

    Attributes:
        tensors: all of them, by name, read-only, each mapped when it is asked for.
        layers: those that are quantized, by name.
        metadata: text that the files have.
    """

    tensors: Mapping[str, Array]
    layers: Mapping[str, QuantizedLayer]
    metadata: Mapping[str, str]


class _Shards(Mapping[str, "Array"]):
    """Tensors of several files, by name."""

    def __init__(self, files: dict[str, Mapping[str, Array]], places: dict[str, str]) -> None:
        self._files, self._places = files, places

    def __getitem__(self, name: str) -> Array:
        return self._files[self._places[name]][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Renamed(Mapping[str, "Array"]):
    """Tensors by other names."""

    def __init__(self, tensors: Mapping[str, Array], names: dict[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Array:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_checkpoint(path: Location, *, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """The tensors and the quantized layers of a model's safetensors files, of which nothing is copied.

    Layers of GPTQ (with activation order as well), AWQ ("gemm"), compressed-tensors ("pack-quantized" of 4 and 8 bits,
    "int-quantized") and torchao (Int4Tensor, IntxUnpackedToInt8Tensor, Int8Tensor).

    Args:
        path: a folder with model.safetensors or with an index of shards, an index, or a safetensors file. Files must
            stay as they are while tensors are in use.
        config: the `quantization_config` of the model; by default that of config.json in the folder.

    Raises:
        CheckpointError: a file is damaged or missing, or has other tensors than its index; the format is not known.
        PackError: a safetensors file is damaged.
        OSError: a file cannot be read.
    """
    at = Path(path)
    if at.is_dir():
        at = next((at / n for n in (INDEX, "model.safetensors") if (at / n).exists()), at / "model.safetensors")
    tensors, metadata = _shards(at) if at.name.endswith(".json") else mapped(at)
    options = _configuration(at.parent) if config is None else config
    return Checkpoint(tensors, _layers(tensors, metadata, options, str(at)), metadata)


def _object(path: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    with path.open("rb") as file:
        raw = file.read(MAX_HEADER + 1)
    try:
        value = json.loads(raw) if len(raw) <= MAX_HEADER else None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not an object of JSON of at most {MAX_HEADER} bytes")
    return value


def _shards(index: Path) -> tuple[Mapping[str, Array], dict[str, str]]:
    """The tensors of the files of an index."""
    places = _object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise CheckpointError(f"{index} has no weight_map from names of tensors to names of files")
    files: dict[str, Mapping[str, Array]] = {}
    metadata: dict[str, str] = {}
    names: set[str] = set()
    for shard in dict.fromkeys(places.values()):
        if shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(f"{index} names the file {reprlib.repr(shard)}; files of an index are in its folder")
        try:
            files[shard], more = mapped(index.parent / shard)
        except FileNotFoundError as error:
            raise CheckpointError(f"{index} names the file {shard}, which is not there") from error
        metadata = _joined(metadata, more)
        names.update(files[shard])
    for name, shard in places.items():
        if name not in files[shard]:
            raise CheckpointError(f"{index} says that {shard} has the tensor {reprlib.repr(name)}; it does not")
    if len(names) != len(places):
        extra = next(iter(names - places.keys()))
        raise CheckpointError(f"the files of {index} have the tensor {reprlib.repr(extra)}, which it does not name")
    return _Shards(files, places), metadata


def _joined(some: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    """Metadata of several files; lists of torchao's tensors are put together."""
    both = some | more
    if "tensor_names" in some and "tensor_names" in more:
        try:
            both["tensor_names"] = json.dumps([*json.loads(some["tensor_names"]), *json.loads(more["tensor_names"])])
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"tensor_names in a file's metadata is no list: {error}") from error
    return both


def _configuration(folder: Path) -> Mapping[str, Any]:
    """The quantization of a folder's model, from its configuration."""
    for name in CONFIGURATIONS:
        if (folder / name).is_file():
            whole = _object(folder / name)
            options = whole.get("quantization_config") if name == "config.json" else whole
            if isinstance(options, dict):
                return options
    return {}


def _layers(
    tensors: Mapping[str, Array], metadata: Mapping[str, str], config: Mapping[str, Any], where: str
) -> dict[str, QuantizedLayer]:
    if "tensor_names" in metadata:
        return _torchao(tensors, metadata, where)
    if not config:
        marked = next((x for x in tensors if x.endswith(tuple(MARKS.values()))), None)
        if marked is None:
            return {}
        raise CheckpointError(
            f"{where} has the quantized tensor {reprlib.repr(marked)}, and there is no config.json that says how: "
            "pass its quantization_config as config="
        )
    method = config.get("quant_method") or ("awq" if "w_bit" in config else "gptq" if "desc_act" in config else None)
    mark = MARKS.get(method) if isinstance(method, str) else None
    if mark is None:
        raise CheckpointError(f"{where} is quantized by {method!r}; known are {', '.join(DECODERS)}")
    names = {x[: -len(mark)] for x in tensors if x.endswith(mark)}
    parts: dict[str, dict[str, str]] = {name: {} for name in sorted(names)}
    for x in tensors:
        base, _, last = x.rpartition(".")
        if base in parts:
            parts[base][last] = x
    return {n: QuantizedLayer(n, str(method), _Renamed(tensors, p), config) for n, p in parts.items()}


def _torchao(tensors: Mapping[str, Array], metadata: Mapping[str, str], where: str) -> dict[str, QuantizedLayer]:
    try:
        weights = torchao_weights(metadata)
    except ValueError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    prefixes = {"{}._{}_".format(*name.rpartition(".")[::2]): name for name in weights}
    parts: dict[str, dict[str, str]] = {name: {} for name in weights}
    attributes = ("qdata", "scale", "zero_point", "act_pre_scale")
    for x in tensors:
        for last in attributes:
            name = prefixes.get(x.removesuffix(last)) if x.endswith(last) else None
            if name is not None:
                parts[name][last] = x
    return {n: QuantizedLayer(n, "torchao", _Renamed(tensors, p), weights[n]) for n, p in parts.items()}
