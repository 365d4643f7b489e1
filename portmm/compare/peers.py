"""The contenders, and what an adapter is.

Owns the registry, the records that adapters speak in, and the adapters of
libraries that are called from Python: NumPy, PyTorch, and portmm itself.
Imports `compare.data`, `compare.suite`, `compare.environment`; a library is
imported only when its adapter is opened, which happens in its own process.

An adapter is one function: it takes a `Setup`, opens its library, and returns
a `Library`; it raises `MissingError` when there is none. `Library.prepare`
takes a case and its arrays and returns every sensible way in which a
knowledgeable user would compute it; the worker keeps the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from portmm.compare.data import Arrays
    from portmm.compare.environment import Setup
    from portmm.compare.suite import Case

Run: TypeAlias = Callable[[int], object]
"""Computes C = A . B into the arrays it was prepared with, so many times."""


class MissingError(Exception):
    """The library is not on this machine; the message says so."""


class UnsupportedError(Exception):
    """The library cannot compute this case; the message says why."""


@dataclass(frozen=True, slots=True)
class Library:
    """An opened library.

    Attributes:
        version: its name and version, with the kernels that it chose if it tells.
        prepare: name of a method -> how to run it, for one case; may raise
            `UnsupportedError`.
    """

    version: str
    prepare: Callable[[Case, Arrays], Mapping[str, Run]]


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody who takes part.

    Attributes:
        name: short name, a column of the table.
        adapter: "module:function" that opens it.
        hint: what to do when it is not found.
        peer: False for portmm itself.
        uses_openblas: it computes with NumPy's OpenBLAS.
    """

    name: str
    adapter: str
    hint: str = ""
    peer: bool = True
    uses_openblas: bool = False


CONTENDERS: tuple[Contender, ...] = (
    Contender("portmm", "portmm.compare.peers:open_portmm", peer=False),
    Contender("numpy", "portmm.compare.peers:open_numpy", "pip install numpy", uses_openblas=True),
    Contender("mkl", "portmm.compare.mkl:open_mkl", "pip install mkl"),
    Contender("mkl-jit", "portmm.compare.mkl:open_jit", "pip install mkl, and a C compiler"),
    Contender("onednn", "portmm.compare.onednn:open_onednn", "pip install onednn-cpu-gomp"),
    Contender("torch", "portmm.compare.peers:open_torch", "pip install torch"),
    Contender("blis", "portmm.compare.blis:open_blis", "apt install libblis4-openmp"),
    Contender("libxsmm", "portmm.compare.libxsmm:open_libxsmm", "apt install libxsmm-dev, and a C compiler"),
)


def find(names: Iterable[str | Contender] | None) -> tuple[Contender, ...]:
    """Contenders by name; all of them for None.

    Raises:
        ValueError: nobody is called that.
    """
    known = {c.name: c for c in CONTENDERS}
    if names is None:
        return CONTENDERS
    picked = []
    for name in names:
        if isinstance(name, str) and name not in known:
            raise ValueError(f"no contender called {name!r}; known are {', '.join(known)}")
        picked.append(known[name] if isinstance(name, str) else name)
    return tuple(picked)


def open_adapter(adapter: str, setup: Setup) -> Library:
    """Open the library behind "module:function"."""
    module, _, function = adapter.partition(":")
    library = getattr(import_module(module), function)(setup)
    if not isinstance(library, Library):
        raise TypeError(f"adapter {adapter} returned {library!r}, not a Library")
    return library


def repeat(call: Callable[[], object]) -> Run:
    """Turn one call into a `Run`."""

    def run(count: int) -> None:
        for _ in range(count):
            call()

    return run


def open_numpy(_setup: Setup) -> Library:
    """Open NumPy, with whatever BLAS it was built on."""
    import numpy as np

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        a, b, c = data.a, data.b, data.c
        if case.c == "col":
            # A column-major result would go through a temporary; its transpose does not.
            a, b, c = b.swapaxes(-1, -2), a.swapaxes(-1, -2), c.swapaxes(-1, -2)
        return {"matmul": repeat(lambda: np.matmul(a, b, out=c))}

    blas: Any = np.show_config(mode="dicts")
    built = blas["Build Dependencies"]["blas"] if blas else {}
    return Library(f"numpy {np.__version__} ({built.get('name', 'no BLAS')} {built.get('version', '')})", prepare)


def open_torch(setup: Setup) -> Library:
    """Open PyTorch: its BLAS for plain products, its oneDNN for prepacked weights."""
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise MissingError(str(error)) from error
    torch.set_num_threads(setup.threads)
    torch.set_grad_enabled(False)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        a, b, c = (torch.from_numpy(x) for x in (data.a, data.b, data.c))
        multiply: Any = torch.bmm if case.batch > 1 else torch.mm
        methods = {multiply.__name__: repeat(lambda: multiply(a, b, out=c))}
        if case.m == 1 and case.batch == 1:
            matrix, x, y = b.t(), a[0], c[0]
            methods["mv"] = repeat(lambda: torch.mv(matrix, x, out=y))
        if case.packed and torch.backends.mkldnn.is_available() and case.dtype == "f32":
            methods["oneDNN linear"] = _linear(torch, a, b, c)
        return methods

    return Library(f"torch {torch.__version__}", prepare)


def _linear(torch: Any, a: Any, b: Any, c: Any) -> Run:
    weight = torch.ops.mkldnn._reorder_linear_weight(b.t().contiguous(), a.shape[0])  # noqa: SLF001
    linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

    def run(count: int) -> None:
        result = None
        for _ in range(count):
            result = linear(a, weight, None, "none", [], "")
        # The operator has no out=; one copy per run lets the result be checked.
        c.copy_(result)

    return run


def open_portmm(setup: Setup) -> Library:
    """Open portmm as a user calls it: `matmul` with `out=`, a packed weight where the case has one."""
    import portmm

    pm: Any = portmm
    if not hasattr(pm, "matmul"):
        raise MissingError("this portmm has no matmul")
    pm.set_num_threads(setup.threads)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        a, c = data.a, data.c
        b = pm.pack(data.b) if case.packed else data.b
        return {"packed" if case.packed else "matmul": repeat(lambda: pm.matmul(a, b, out=c))}

    return Library(f"portmm {metadata.version('portmm')}", prepare)
