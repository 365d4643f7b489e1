"""The environment that a contender's process starts with.

Owns which variables are taken away and which are set. Imports nothing of
portmm. Every BLAS reads variables that pick a kernel, a block size or a number
of threads; one left over from a build system or a container image can halve a
library's speed and make any comparison with it worthless. So all of them go,
and the ones that this comparison needs are set, alike for all.
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
# Kernels stay cached where the user put them, and portmm computes with the tuned schedules that the user's calls find.
KEPT = ("PORTMM_CACHE", "PORTMM_TUNED", "TORCHINDUCTOR_CACHE_DIR")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "PORTMM_NUM_THREADS")

# What makes each library act as on a machine whose best ISA is this one. OpenVINO's own oneDNN obeys what oneDNN does.
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
    """How every contender runs.

    Attributes:
        threads: threads of each contender.
        isa: the instruction set that all are held to, empty for none.
        target: value of PORTMM_TARGET for portmm's own process, empty for none.
        cold: bytes after which no cache holds what was used before, 0 if caches may be warm.
        device: where the arrays are, "cuda", "cuda:1" or "opencl"; empty for the processor.
    """

    threads: int = 1
    isa: str = ""
    target: str = ""
    cold: int = 0
    device: str = ""


def removed(base: Mapping[str, str]) -> tuple[str, ...]:
    """Names in `base` that a contender will not see."""
    return tuple(sorted(name for name in base if name.startswith(PREFIXES) and name not in KEPT))


def environment(base: Mapping[str, str], setup: Setup, *, uses_openblas: bool) -> dict[str, str]:
    """`base` without what bends a library, plus threads and the forced ISA.

    Args:
        base: the parent's environment.
        setup: threads and ISA.
        uses_openblas: the contender computes with NumPy's OpenBLAS; all others
            keep that pool at one thread, since it would only stand in the way.
    """
    gone = set(removed(base))
    env = {name: value for name, value in base.items() if name not in gone}
    env |= dict.fromkeys(THREADS, str(setup.threads))
    env["OPENBLAS_NUM_THREADS"] = str(setup.threads if uses_openblas else 1)
    env |= FORCED.get(setup.isa, {})
    if setup.target:
        env["PORTMM_TARGET"] = setup.target
    return env
