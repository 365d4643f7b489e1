"""Registry of contenders, the interface of their adapters, and the settings of their processes.

Owns the registry, the records that adapters return, the adapter of NumPy, and the lists of environment variables that
are removed and set. A library is imported only when its adapter is opened, which happens in its own process.

An adapter is one function: it takes a `Setup`, opens its library, and returns a `Library`; it raises `MissingError` if
the library is not installed. `Library.prepare` takes a case and its arrays and returns every method by which an expert
user may compute it; the worker keeps the fastest.

Every BLAS reads variables that select a kernel, a block size or a number of threads; one that a build system or a
container image left behind can halve a library's speed and invalidate any comparison with it. So all of them are
removed, and those that the comparison needs are set, the same for all contenders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from portmm.comparison import fused
from portmm.comparison.case import PLAIN, Case
from portmm.comparison.data import EXACT, Arrays

PREFIXES = (
    "OPENBLAS_", "GOTO_", "MKL_", "ONEDNN_", "DNNL_", "BLIS_", "BLI_", "LIBXSMM_", "OMP_", "KMP_", "GOMP_",
    "NVPL_", "ATEN_", "TORCH_", "TORCHINDUCTOR_", "ORT_", "OPENVINO_", "OV_", "PORTMM_",
    "CUBLAS", "NVIDIA_TF32_", "CUPY_TF32", "CUPY_ACCELERATORS",
)  # fmt: skip
# Kernels stay in the user's cache, and portmm uses the tuned schedules of the user's calls.
KEPT = ("PORTMM_CACHE", "PORTMM_TUNED", "TORCHINDUCTOR_CACHE_DIR")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "PORTMM_NUM_THREADS")

_RESTRICTING = (
    "OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
    "TORCHINDUCTOR_CPP_MARCH", "LIBXSMM_TARGET",
)  # fmt: skip
_VALUES = """
avx512bf16  SkylakeX  AVX512_E3  AVX512_CORE_BF16  AVX512_CORE_BF16  avx512   cooperlake      cpx
avx512vnni  SkylakeX  AVX512_E1  AVX512_CORE_VNNI  AVX512_CORE_VNNI  avx512   cascadelake     clx
avx512      SkylakeX  AVX512     AVX512_CORE       AVX512_CORE       avx512   skylake-avx512  skx
avxvnni     Haswell   AVX2_E1    AVX2_VNNI         AVX2_VNNI         avx2     alderlake       hsw
avx2        Haswell   AVX2       AVX2              AVX2              avx2     haswell         hsw
sse2        Nehalem   SSE4_2     SSE41             SSE41             default  nehalem         wsm
"""
FORCED: Mapping[str, Mapping[str, str]] = {
    isa: dict(zip(_RESTRICTING, values, strict=True)) for isa, *values in map(str.split, _VALUES.strip().splitlines())
}
"""ISA -> the variables that restrict each library to it. OpenVINO's own oneDNN reads those of oneDNN."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of all contenders.

    Attributes:
        threads: threads of each contender.
        isa: the instruction set that all are restricted to, empty for none.
        target: value of PORTMM_TARGET for portmm's own process, empty for none.
        cold: bytes whose use evicts all earlier data from the caches, 0 if caches may be warm.
        device: device of the arrays, "cuda", "cuda:1" or "opencl"; empty for the processor.
    """

    threads: int = 1
    isa: str = ""
    target: str = ""
    cold: int = 0
    device: str = ""


def removed(base: Mapping[str, str]) -> tuple[str, ...]:
    """Names in `base` that are not passed to contenders."""
    return tuple(sorted(name for name in base if name.startswith(PREFIXES) and name not in KEPT))


def environment(base: Mapping[str, str], setup: Setup, *, uses_openblas: bool) -> dict[str, str]:
    """`base` without variables that change a library, plus threads and the forced ISA.

    Args:
        base: the parent's environment.
        setup: threads and ISA.
        uses_openblas: the contender computes with NumPy's OpenBLAS; for all others
            its pool has one thread, since it would only compete with theirs.
    """
    dropped = set(removed(base))
    env = {name: value for name, value in base.items() if name not in dropped}
    env |= dict.fromkeys(THREADS, str(setup.threads))
    env["OPENBLAS_NUM_THREADS"] = str(setup.threads if uses_openblas else 1)
    env |= FORCED.get(setup.isa, {})
    if setup.target:
        env["PORTMM_TARGET"] = setup.target
    return env


Run: TypeAlias = Callable[[int], object]
"""Function that computes C = A . B into the arrays it was prepared with, a number of times."""


class MissingError(Exception):
    """The library is not installed; the message's first line says so, further ones are details."""


class UnsupportedError(Exception):
    """The library cannot compute this case; the message says why."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A `Run` whose result is in an array of its own; copying it to the case's arrays is not timed.

    Attributes:
        run: the timed part.
        fetch: copies the last result into the case's arrays.
        spoil: fills the result of the next run with a value that marks elements as unwritten.
    """

    run: Run
    fetch: Callable[[], object]
    spoil: Callable[[], object] = lambda: None

    def __call__(self, count: int) -> object:
        """Run."""
        return self.run(count)


@dataclass(frozen=True, slots=True)
class Library:
    """An opened library.

    Attributes:
        version: its name and version, with the kernels that it selected if it reports them.
        prepare: returns the runs of one case by method; may raise
            `UnsupportedError`.
        dtypes: words of types that it multiplies; None where `prepare` decides.
        precision: its rounding, one of `data.PRECISIONS`.
        fused: `prepare` supports epilogues; otherwise fused cases are refused without it.
    """

    version: str
    prepare: Callable[[Case, Arrays], Mapping[str, Run]]
    dtypes: Collection[str] | None = PLAIN
    precision: str = EXACT
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Contender:
    """A library that takes part in a comparison.

    Attributes:
        name: short name, a column of the table.
        adapter: "module:function" that opens it.
        hint: what to do when it is not found.
        peer: False for portmm itself.
        uses_openblas: it computes with NumPy's OpenBLAS.
        device: language of its devices, "cuda" or "opencl"; empty for the processor.
        only: kinds of cases, of `Case.kinds`, to which it is restricted because it
            opens or compiles slowly; empty for all. Selected by name it computes all cases.
    """

    name: str
    adapter: str
    hint: str = ""
    peer: bool = True
    uses_openblas: bool = False
    device: str = ""
    only: frozenset[str] = frozenset()

    def adds_to(self, case: Case) -> bool:
        """Whether it takes part in a case without being selected by name."""
        return not self.only or not self.only.isdisjoint(case.kinds)


ALL = "all"
"""Name that stands for all contenders."""
ONLY_BY_NAME = frozenset({"by name"})
"""A kind that no case has: a contender that compiles for many seconds takes part only if selected by name."""
NARROW = frozenset({"narrow"})
MODELS = frozenset({"narrow", "fused"})
"""Kinds of cases of contenders that are runtimes of models."""

_CUDA = "pip install cupy-cuda13x nvidia-cuda-nvrtc"
CONTENDERS: tuple[Contender, ...] = (
    Contender("portmm", "portmm.comparison.ours:open_portmm", peer=False),
    Contender("numpy", "portmm.comparison.peers:open_numpy", "pip install numpy", uses_openblas=True),
    Contender("mkl", "portmm.comparison.mkl:open_mkl", "pip install mkl"),
    Contender("mkl-jit", "portmm.comparison.mkl:open_jit", "pip install mkl, and a C compiler"),
    Contender("onednn", "portmm.comparison.onednn:open_onednn", "pip install onednn-cpu-gomp"),
    Contender("torch", "portmm.comparison.pytorch:open_torch", "pip install torch"),
    Contender("blis", "portmm.comparison.small_kernels:open_blis", "apt install libblis4-openmp"),
    Contender("libxsmm", "portmm.comparison.small_kernels:open_libxsmm", "apt install libxsmm-dev, and a C compiler"),
    Contender(
        "torch.compile",
        "portmm.comparison.pytorch:open_compiled",
        "pip install torch, and a C++ compiler",
        only=ONLY_BY_NAME,
    ),
    Contender(
        "onnxruntime", "portmm.comparison.model_runtimes:open_onnxruntime", "pip install onnxruntime onnx", only=MODELS
    ),
    Contender(
        "onnxruntime-8bit", "portmm.comparison.model_runtimes:open_8bit", "pip install onnxruntime onnx", only=NARROW
    ),
    Contender("openvino", "portmm.comparison.model_runtimes:open_openvino", "pip install openvino", only=MODELS),
)

ON_DEVICES: tuple[Contender, ...] = (
    Contender("portmm", "portmm.comparison.device:open_portmm", _CUDA, peer=False, device="cuda"),
    Contender("torch-cuda", "portmm.comparison.device:open_torch", "pip install torch", device="cuda"),
    Contender("cupy", "portmm.comparison.device:open_cupy", _CUDA, device="cuda"),
    Contender("cublaslt", "portmm.comparison.device:open_cublaslt", "pip install torch", device="cuda"),
    Contender("portmm", "portmm.comparison.device:open_portmm", "pip install pyopencl", peer=False, device="opencl"),
    Contender("clblast", "portmm.comparison.clblast:open_clblast", "apt install libclblast1", device="opencl"),
)


def find(names: Iterable[str | Contender] | None, language: str = "") -> tuple[Contender, ...]:
    """Contenders by name, on devices of a language or the processor; all of them for None, or where "all" is a name.

    Raises:
        ValueError: a name is unknown there.
    """
    available = tuple(c for c in (*CONTENDERS, *ON_DEVICES) if c.device == language)
    known = {c.name: c for c in available}
    names = [ALL] if names is None else list(names)
    if ALL in names:
        return available
    picked = []
    for name in names:
        if isinstance(name, str) and name not in known:
            where = f" on devices of {language}" if language else ""
            raise ValueError(f"no contender called {name!r}{where}; known are {', '.join(known)}")
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
    """A `Run` that repeats a call."""

    def run(count: int) -> None:
        for _ in range(count):
            call()

    return run


def returning(call: Callable[[], object], take: Callable[[Any], object]) -> Fetched:
    """A `Run` of a call that returns its result; `take` copies the last one for the check."""
    last: list[object] = []

    def run(count: int) -> None:
        result = None
        for _ in range(count):
            result = call()
        last[:] = [result]

    return Fetched(run, lambda: take(last[0]))


def finishing(run: Run, case: Case, data: Arrays, normal: Callable[..., Any] | None) -> Run:
    """A `Run` of a bare product, each followed by an epilogue of ufuncs; see `fused.in_place`."""
    finish = fused.in_place(case.fused, data.c, data.added, normal)

    def call() -> None:
        run(1)
        finish()

    return repeat(call)


def open_numpy(_setup: Setup) -> Library:
    """Open NumPy, with the BLAS it was built on, and SciPy for its error function."""
    try:
        normal: Any = import_module("scipy.special").ndtr
    except ImportError:
        normal = None

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        if normal is None and "gelu" in fused.steps(case.fused):
            raise UnsupportedError("NumPy has no error function; pip install scipy")
        a, b, c = data.a, data.b, data.c
        if case.c == "col":
            # A column-major result would go through a temporary; its transpose does not.
            a, b, c = b.swapaxes(-1, -2), a.swapaxes(-1, -2), c.swapaxes(-1, -2)
        multiply = repeat(lambda: np.matmul(a, b, out=c))
        return {"matmul, ufuncs": finishing(multiply, case, data, normal)} if case.fused else {"matmul": multiply}

    blas: Any = np.show_config(mode="dicts")
    built = blas["Build Dependencies"]["blas"] if blas else {}
    name = f"numpy {np.__version__} ({built.get('name', 'no BLAS')} {built.get('version', '')})"
    return Library(name, prepare, fused=True)
