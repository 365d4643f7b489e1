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

# Variables that restrict each library to an ISA. OpenVINO's own oneDNN reads those of oneDNN.
FORCED: Mapping[str, Mapping[str, str]] = {
    "avx512bf16": {
        "OPENBLAS_CORETYPE": "SkylakeX",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "ATEN_CPU_CAPABILITY": "avx512",
        "TORCHINDUCTOR_CPP_MARCH": "cooperlake",
        "LIBXSMM_TARGET": "cpx",
    },
    "avx512vnni": {
        "OPENBLAS_CORETYPE": "SkylakeX",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "DNNL_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "ATEN_CPU_CAPABILITY": "avx512",
        "TORCHINDUCTOR_CPP_MARCH": "cascadelake",
        "LIBXSMM_TARGET": "clx",
    },
    "avx512": {
        "OPENBLAS_CORETYPE": "SkylakeX",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "DNNL_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
        "TORCHINDUCTOR_CPP_MARCH": "skylake-avx512",
        "LIBXSMM_TARGET": "skx",
    },
    "avxvnni": {
        "OPENBLAS_CORETYPE": "Haswell",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2_E1",
        "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI",
        "DNNL_MAX_CPU_ISA": "AVX2_VNNI",
        "ATEN_CPU_CAPABILITY": "avx2",
        "TORCHINDUCTOR_CPP_MARCH": "alderlake",
        "LIBXSMM_TARGET": "hsw",
    },
    "avx2": {
        "OPENBLAS_CORETYPE": "Haswell",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "TORCHINDUCTOR_CPP_MARCH": "haswell",
        "LIBXSMM_TARGET": "hsw",
    },
    "sse2": {
        "OPENBLAS_CORETYPE": "Nehalem",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "TORCHINDUCTOR_CPP_MARCH": "nehalem",
        "LIBXSMM_TARGET": "wsm",
    },
}


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
