"""Calls of models, for bundles: models in ONNX's format, and exported programs of PyTorch.

Owns the inputs that a model is run with: ones, of the sizes that its dynamic axes are to have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import BundleError, PortmmError

if TYPE_CHECKING:
    from pathlib import Path

USUAL = {0: (1,)}
"""Sizes of a dynamic axis that nothing is said of, by its number: one item."""
OTHERS = (1, 16, 128)
"""Sizes of the other dynamic axes."""


def sizes_of(text: str) -> dict[str, tuple[int, ...]]:
    """Sizes of axes, as `batch=1,8 sequence=16,128`.

    Raises:
        BundleError: they are none.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for word in text.split():
        name, _, values = word.partition("=")
        try:
            sizes[name] = tuple(int(x) for x in values.split(","))
        except ValueError as error:
            raise BundleError(f"{word!r} is no size of an axis; write as: batch=1 sequence=16,128") from error
    return sizes


def of_onnx(path: Path, sizes: Mapping[str, tuple[int, ...]]) -> Callable[[], None]:
    """The calls of a model in ONNX's format, with each combination of sizes of its axes."""

    def run() -> None:
        for _, call in calls_of_onnx(path, sizes):
            call()

    return run


def calls_of_onnx(
    path: Path, sizes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """The inputs of a model in ONNX's format for each combination of sizes of its axes, and the call with them."""
    from portmm.onnx import load

    session = load(path, progress=False)
    inputs = session.get_inputs()
    axes: dict[Any, tuple[int, ...]] = {
        x: sizes.get(str(x), USUAL.get(i, OTHERS))
        for y in inputs
        for i, x in enumerate(y.shape)
        if not isinstance(x, int)
    }
    for each in product(*axes.values()):
        known: dict[Any, int] = dict(zip(axes, each, strict=True))
        shapes = {x.name: [n if isinstance(n, int) else known[n] for n in x.shape] for x in inputs}
        values = {x.name: np.ones(shapes[x.name], _dtype(x.type)) for x in inputs}
        yield values, partial(session.run, values)


def _dtype(text: str) -> Any:
    name = text.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(name, name))


def of_torch(path: Path) -> Callable[[], None]:
    """The call of a program that `torch.export.save` wrote, with its example inputs."""
    try:
        import torch
    except ImportError as error:
        raise PortmmError(f"--from-torch needs PyTorch: {error}; `pip install 'portmm[torch]'`") from error
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise BundleError(f"--from-torch {path} is no program that torch.export.save wrote: {error}") from error
    args, kwargs = program.example_inputs or ((), {})

    def run() -> None:
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(program.module(), backend="portmm")(*args, **kwargs)

    return run
