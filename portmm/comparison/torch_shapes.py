"""The products of a PyTorch program.

Owns `from_torch`. Imports `comparison.seen`; torch when it is called. Every operator that
PyTorch dispatches is looked at while the program runs; products are written down.

Attention that PyTorch computes in one operator has no product to see, and convolutions are
no products here.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.comparison.seen import FIELDS, case, merged, word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from portmm.comparison.case import Case

NAMES = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16",
    "int8": "s8", "uint8": "u8", "int32": "s32",
}  # fmt: skip
# Operator -> the arguments that are A and B.
OPERANDS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "_int_mm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addmv": (1, 2),
}
ACTIVATIONS = {"relu": "relu", "relu_": "relu", "gelu": "gelu", "gelu_": "gelu"}


@dataclass(slots=True)
class _Seen:
    """A product as it was called.

    Attributes:
        shape: M, N, K and batch.
        layouts: of A and B.
        dtype: the word for its types, empty if there is none.
        b: B itself, kept so that no other tensor takes its memory, and its place.
        after: what follows it: "bias+relu".
    """

    shape: tuple[int, int, int, int]
    layouts: tuple[str, str]
    dtype: str
    b: Any
    after: str = ""


def from_torch(spec: str) -> tuple[Case, ...]:
    """The products of a run of a PyTorch program, each with its count.

    A B that is a parameter, that was there before, or that several products share, is a weight that
    may be packed.

    Args:
        spec: "module:function"; the module is looked for in the working directory too. The
            function runs the program, or returns what does: a callable, or a pair of a model and its
            arguments (a tuple, a dict of names, or a single one).

    Raises:
        ImportError: there is no torch, or no such module.
        ValueError: the module has no such function, or it computes no product.
    """
    module, _, name = spec.partition(":")
    if not (module and name):
        raise ValueError(f"{spec!r} names no function; say module:function")
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise ImportError("torch, which runs the program, is not installed: pip install torch") from error
    with _working_directory():
        found_in = import_module(module)
        if not hasattr(found_in, name):
            raise ValueError(f"module {module} has no function {name!r}")
        recorder = _Recorder(torch)
        with torch.no_grad(), recorder.mode():
            found = getattr(found_in, name)()
        call, given = _call(found)
        if call:
            recorder = _Recorder(torch, given)
            with torch.no_grad(), recorder.mode():
                call()
    cases = recorder.cases(name)
    if not cases:
        raise ValueError(f"{spec} computes no product of matrices that portmm has types for")
    return cases


@contextmanager
def _working_directory() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _call(found: Any) -> tuple[Callable[[], object] | None, list[Any] | None]:
    """How to run what a function returned, and the arguments; (None, None) if it ran by itself."""
    if callable(found):
        return found, []
    if not (isinstance(found, tuple) and len(found) == 2 and callable(found[0])):
        return None, None
    model, given = found
    if isinstance(given, dict):
        return lambda: model(**given), list(given.values())
    values = list(given) if isinstance(given, (tuple, list)) else [given]
    return lambda: model(*values), values


class _Recorder:
    """Writes down the products of a run.

    Args:
        torch: the package.
        given: the arguments of what runs, all else that was there before being weights; None if the
            run makes its weights itself.
    """

    def __init__(self, torch: Any, given: Sequence[Any] | None = None) -> None:
        self.torch = torch
        self.seen: list[_Seen] = []
        self._last: Any = None
        self._parameters: dict[int, Any] = {}
        self._inputs = None if given is None else {_place(x) for x in given if isinstance(x, torch.Tensor)}
        self._made: set[int] = set()

    def mode(self) -> Any:
        """A context in which all that PyTorch dispatches passes by."""
        recorder = self
        base: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode

        class Mode(base):  # type: ignore[misc]
            def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                recorder.note(function, args, result)
                return result

        return Mode()

    def note(self, function: Any, args: Sequence[Any], result: Any) -> None:
        """An operator was called."""
        tensors = [x for x in args if isinstance(x, self.torch.Tensor)]
        self._parameters.update((_place(x), x) for x in tensors if isinstance(x, self.torch.nn.Parameter))
        name = function.name().removeprefix("aten::").partition(".")[0]
        if name in ACTIVATIONS and self._last is not None and _place(args[0]) == _place(self._last):
            self.seen[-1].after = "+".join(filter(None, (self.seen[-1].after, ACTIVATIONS[name])))
            self._last = None
        if name in OPERANDS:
            a, b = (args[i] for i in OPERANDS[name])
            bias = name == "addmm" and args[0].dim() == 1
            self.seen.append(_seen(a, b, result, "bias" if bias else ""))
            self._last = result
        if isinstance(result, self.torch.Tensor) and _place(result) not in map(_place, tensors):
            self._made.add(_place(result))

    def cases(self, group: str) -> tuple[Case, ...]:
        """What was seen, but products that are empty or of types without a word."""
        uses = Counter(_place(seen.b) for seen in self.seen)
        weights = {place for place, count in uses.items() if count > 1} | self._parameters.keys()
        if self._inputs is not None:
            weights |= uses.keys() - self._made - self._inputs
        kept = [seen for seen in self.seen if seen.dtype and 0 not in seen.shape]
        return merged(_case(seen, group, packed=_place(seen.b) in weights) for seen in kept)


def _place(tensor: Any) -> int:
    """Where a tensor's memory begins: that of its views too."""
    return int(tensor.untyped_storage().data_ptr())


def _seen(a: Any, b: Any, result: Any, after: str) -> _Seen:
    dtype = word(*(NAMES.get(str(x.dtype).removeprefix("torch."), "") for x in (a, b, result)))
    left, right = a, b
    if b.dim() == 1:
        # A matrix by a vector is the same product as that vector by the matrix, turned.
        left, right, b = b[None], a.t(), a
    (m, k), n = left.shape[-2:], right.shape[-1]
    batch = left.shape[0] if left.dim() == 3 else 1
    return _Seen((m, n, k, batch), (_layout(left), _layout(right)), dtype, b, after)


def _case(seen: _Seen, group: str, *, packed: bool) -> Case:
    m, n, k, batch = seen.shape
    a, b = seen.layouts
    more = {"fused": seen.after} if seen.after and batch == 1 and "fused" in FIELDS else {}
    sizes = {"m": m, "n": n, "k": k, "batch": batch}
    return case(group=group, **sizes, dtype=seen.dtype, a=a, b=b, packed=packed and batch == 1, **more)


def _layout(tensor: Any) -> str:
    """How a matrix lies; one that lies in neither way would be copied to rows."""
    rows, columns = tensor.shape[-2:]
    steps = tensor.stride()[-2:]
    return "col" if steps[1] != 1 and steps[0] == 1 and columns > 1 and rows > 1 else "row"
