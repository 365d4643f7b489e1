"""Matrix products of a PyTorch program.

Owns `from_torch`; torch is imported when it is called. While the program runs, the products among
the operators that PyTorch dispatches are recorded.

Attention that PyTorch computes in one operator has no visible product, and convolutions do not
count as products.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from portmm.comparison.case import Case
from portmm.comparison.shapes import case, merged, word

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
class _Product:
    """A recorded product.

    Attributes:
        shape: M, N, K and batch.
        layouts: of A and B.
        dtype: the word for its types, empty if there is none.
        b: B itself, kept so that no other tensor takes its memory, and so its address.
        after: its epilogue: "bias+relu".
    """

    shape: tuple[int, int, int, int]
    layouts: tuple[str, str]
    dtype: str
    b: Any
    after: str = ""


def from_torch(spec: str) -> tuple[Case, ...]:
    """Products of a run of a PyTorch program, each with its count.

    A B that is a parameter, that existed before the run, or that several products share, is a weight that
    may be packed.

    Args:
        spec: "module:function"; the working directory is searched for the module too. The
            function runs the program, or returns a program: a callable, or a pair of a model and its
            arguments (a tuple, a dict of names, or a single one).

    Raises:
        ImportError: torch is not installed, or the module does not exist.
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
        user_module = import_module(module)
        if not hasattr(user_module, name):
            raise ValueError(f"module {module} has no function {name!r}")
        recorder = _Recorder(torch)
        with torch.no_grad(), recorder.mode():
            program = getattr(user_module, name)()
        call, arguments = _call(program)
        if call:
            recorder = _Recorder(torch, arguments)
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


def _call(program: Any) -> tuple[Callable[[], object] | None, list[Any] | None]:
    """Call of a program that a function returned, and its arguments; (None, None) if the function was the program."""
    if callable(program):
        return program, []
    if not (isinstance(program, tuple) and len(program) == 2 and callable(program[0])):
        return None, None
    model, arguments = program
    if isinstance(arguments, dict):
        return lambda: model(**arguments), list(arguments.values())
    values = list(arguments) if isinstance(arguments, (tuple, list)) else [arguments]
    return lambda: model(*values), values


class _Recorder:
    """Recorder of the products of a run.

    Args:
        torch: the package.
        arguments: the arguments of the program, all other tensors from before the run being weights; None if the
            run creates its weights itself.
    """

    def __init__(self, torch: Any, arguments: Sequence[Any] | None = None) -> None:
        self.torch = torch
        self.products: list[_Product] = []
        self._last: Any = None
        self._parameters: dict[int, Any] = {}
        self._inputs = None if arguments is None else {_address(x) for x in arguments if isinstance(x, torch.Tensor)}
        self._results: set[int] = set()

    def mode(self) -> Any:
        """A context in which every operator that PyTorch dispatches is recorded."""
        recorder = self
        base: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode

        class Mode(base):  # type: ignore[misc]
            def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                recorder.note(function, args, kwargs or {}, result)
                return result

        return Mode()

    def note(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Record a call of an operator."""
        tensors = [x for x in args if isinstance(x, self.torch.Tensor)]
        self._parameters.update((_address(x), x) for x in tensors if isinstance(x, self.torch.nn.Parameter))
        name = function.name().removeprefix("aten::").partition(".")[0]
        if name in ACTIVATIONS and self._last is not None and _address(args[0]) == _address(self._last):
            kind = ACTIVATIONS[name] + ("_tanh" if kwargs.get("approximate") == "tanh" else "")
            self.products[-1].after = "+".join(filter(None, (self.products[-1].after, kind)))
            self._last = None
        if name in OPERANDS:
            a, b = (args[i] for i in OPERANDS[name])
            bias = name == "addmm" and args[0].dim() == 1
            self.products.append(_product(a, b, result, "bias" if bias else ""))
            self._last = result
        if isinstance(result, self.torch.Tensor) and _address(result) not in map(_address, tensors):
            self._results.add(_address(result))

    def cases(self, group: str) -> tuple[Case, ...]:
        """Cases of the recorded products, without those that are empty or of types without a word."""
        uses = Counter(_address(x.b) for x in self.products)
        weights = {address for address, count in uses.items() if count > 1} | self._parameters.keys()
        if self._inputs is not None:
            weights |= uses.keys() - self._results - self._inputs
        kept = [x for x in self.products if x.dtype and 0 not in x.shape]
        return merged(_case(x, group, packed=_address(x.b) in weights) for x in kept)


def _address(tensor: Any) -> int:
    """Address of a tensor's storage, which its views share."""
    return int(tensor.untyped_storage().data_ptr())


def _product(a: Any, b: Any, result: Any, after: str) -> _Product:
    dtype = word(*(NAMES.get(str(x.dtype).removeprefix("torch."), "") for x in (a, b, result)))
    left, right = a, b
    if b.dim() == 1:
        # A matrix by a vector is the same product as that vector by the transposed matrix.
        left, right, b = b[None], a.t(), a
    (m, k), n = left.shape[-2:], right.shape[-1]
    batch = left.shape[0] if left.dim() == 3 else 1
    return _Product((m, n, k, batch), (_layout(left), _layout(right)), dtype, b, after)


def _case(product: _Product, group: str, *, packed: bool) -> Case:
    m, n, k, batch = product.shape
    a, b = product.layouts
    after = product.after if batch == 1 and not product.dtype.endswith("s32") else ""
    sizes = {"m": m, "n": n, "k": k, "batch": batch, "packed": packed and batch == 1}
    return case(group=group, dtype=product.dtype, a=a, b=b, fused=after, **sizes)


def _layout(tensor: Any) -> str:
    """Layout of a matrix, "col" or "row"; one that is neither counts as "row", since it is copied by rows."""
    rows, columns = tensor.shape[-2:]
    steps = tensor.stride()[-2:]
    return "col" if steps[1] != 1 and steps[0] == 1 and columns > 1 and rows > 1 else "row"
