"""Environment variables of a contender's process.

Owns the lists of variables that are removed and set. Every BLAS reads variables that
select a kernel, a block size or a number of threads; one that a build system or a
container image left behind can halve a library's speed and invalidate any comparison with
it. So all of them are removed, and those that the comparison needs are set, the same for
all contenders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

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
