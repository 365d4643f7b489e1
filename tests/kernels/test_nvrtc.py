"""CUDA source to cubins, by the real NVRTC, which needs no GPU."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time

import pytest
from opencl_cpu import missing

from portmm.build import cache, cache_contents, nvrtc
from portmm.build.nvrtc import compile_cuda
from portmm.errors import BuildError, NoCompilerError, TargetError

pytestmark = pytest.mark.rest("NVRTC")

ARCHITECTURES = ("75", "80", "86", "89", "90a", "100a", "120")

SOURCE = """
extern "C" __global__ void scale(const float *a, float *b, int n, float s)
{
    __shared__ float part[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = i < n ? a[i] : 0.0f;
    __syncthreads();
    if (i < n) b[i] = part[threadIdx.x ^ 1] * s;
}
"""

# Two blocks of 1024 threads leave 32 registers to a thread, of which each sum wants one.
SPILLING = """
extern "C" __global__ __launch_bounds__(1024, 2) void spill(float *a)
{
    float x[64];
#pragma unroll
    for (int i = 0; i < 64; i++) x[i] = a[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; i++) a[i * 1024 + threadIdx.x] = x[63 - i] * x[i] + x[(i * 7) % 64];
}
"""


@pytest.fixture(autouse=True, scope="module")
def _installed():
    try:
        nvrtc.find_nvrtc()
    except NoCompilerError as error:
        missing(str(error))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture):
    made = compile_cuda(SOURCE, "scale", architecture)
    assert made.code[:4] == b"\x7fELF"
    assert int.from_bytes(made.code[18:20], "little") == 190  # EM_CUDA
    assert (made.spills, made.shared) == (0, 256)
    assert 4 <= made.registers <= 64
    assert made.version >= (12, 8)
    assert f"'sm_{architecture}'" in made.log
    assert "warning" not in made.log
    assert made.architecture == architecture
    assert b"scale" in made.code


def test_the_whole_of_the_code_is_there():
    """An ELF file of NVIDIA's ends with its tables, and its last byte counts."""
    code = compile_cuda(SOURCE, "scale", "80").code
    at, count = int.from_bytes(code[32:40], "little"), int.from_bytes(code[56:58], "little")
    size = int.from_bytes(code[54:56], "little")
    sections = int.from_bytes(code[40:48], "little")
    n, each = int.from_bytes(code[60:62], "little"), int.from_bytes(code[58:60], "little")
    assert len(code) == max(at + count * size, sections + n * each)


def test_spills_are_counted():
    made = compile_cuda(SPILLING, "spill", "80")
    assert made.registers == 32
    assert made.spills > 0
    assert compile_cuda(SPILLING.replace("1024, 2", "256"), "spill", "80").spills == 0


@pytest.mark.usefixtures("empty_cache")
def test_of_several_kernels_the_largest_numbers():
    both = compile_cuda(SOURCE + SPILLING, "both", "80")
    assert (both.registers, both.shared) == (32, 256)
    assert both.spills == compile_cuda(SPILLING, "spill", "80").spills


@pytest.mark.usefixtures("empty_cache")
def test_cold_then_warm():
    cold = compile_cuda(SOURCE, "scale", "80")
    warm = compile_cuda(SOURCE, "scale", "80")
    assert (cold.cached, warm.cached) == (False, True)
    assert (cold.code, cold.log, cold.key, cold.version) == (warm.code, warm.log, warm.key, warm.version)
    assert (cold.registers, cold.spills, cold.shared) == (warm.registers, warm.spills, warm.shared)
    assert warm.seconds == pytest.approx(cold.seconds, abs=1e-3)
    (entry,) = cache_contents.cache_entries()
    assert (entry.key, entry.path.suffix, entry.name) == (cold.key, ".cubin", "scale")
    assert cache_contents.cache_size() > len(cold.code)
    assert cache_contents.cache_clear() == 2
    assert not compile_cuda(SOURCE, "scale", "80").cached


@pytest.mark.usefixtures("empty_cache")
def test_what_the_key_depends_on(monkeypatch, tmp_path):
    base = compile_cuda(SOURCE, "scale", "80")
    others = [compile_cuda(SOURCE + "\n", "scale", "80"), compile_cuda(SOURCE, "scale", "86")]
    monkeypatch.setattr(nvrtc, "VERSION", "0.0.0")
    others.append(compile_cuda(SOURCE, "scale", "80"))
    real = nvrtc.find_nvrtc()
    newer = tmp_path / "libnvrtc.so.99"
    newer.symlink_to(real)
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: newer)
    others.append(compile_cuda(SOURCE, "scale", "80"))
    assert len({base.key, *(x.key for x in others)}) == 5
    assert not any(x.cached for x in others)


@pytest.mark.usefixtures("empty_cache")
def test_what_was_tampered_with_is_compiled_again():
    cold = compile_cuda(SOURCE, "scale", "80")
    path = cache_contents.cache_entries()[0].path
    path.write_bytes(cold.code[:-1])
    again = compile_cuda(SOURCE, "scale", "80")
    assert not again.cached
    assert again.code == cold.code


@pytest.mark.usefixtures("empty_cache")
def test_a_log_of_any_text_comes_back():
    text = 'tab\t quote " backslash \\n äöü \u2028 end\n\nlast'
    cache.keep("k", b"code", name="x", seconds=0, compiler="c", command="d", suffix=".cubin", more={"log": text})
    entry, code = cache.load("k", ".cubin")
    assert (code, entry.more) == (b"code", {"log": text})
    assert cache.find("k") is None


@pytest.mark.usefixtures("empty_cache")
def test_a_warm_hit_is_quick():
    """In a process of its own: two milliseconds, without opening the library."""
    compile_cuda(SOURCE, "scale", "80")
    script = f"""
import sys, time, ctypes
from portmm.build.nvrtc import compile_cuda
def audit(event, args):
    assert event != "ctypes.dlopen", args
    assert not event.startswith(("subprocess", "os.fork", "os.exec", "os.posix_spawn")), event
sys.addaudithook(audit)
assert compile_cuda({SOURCE!r}, "scale", "80").cached
with open("/proc/self/maps") as maps:
    assert "nvrtc" not in maps.read()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds = []
    for _ in range(31):
        start = time.perf_counter()
        assert compile_cuda(SOURCE, "scale", "80").cached
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) <= 2e-3


@pytest.mark.usefixtures("empty_cache")
def test_threads_compile_once(monkeypatch):
    calls = []
    real = nvrtc._run
    monkeypatch.setattr(nvrtc, "_run", lambda *a: calls.append(1) or real(*a))
    made = []
    threads = [threading.Thread(target=lambda: made.append(compile_cuda(SOURCE, "scale", "80"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({x.key for x in made}) == 1
    assert len(made) == 4
    assert len(calls) == 1


@pytest.mark.usefixtures("empty_cache")
def test_a_source_that_does_not_compile():
    source = SOURCE.replace("* s;", "* t;")
    with pytest.raises(BuildError, match=r'(?s)identifier "t" is undefined.*failed\.cu.*--gpu-architecture=sm_80') as e:
        compile_cuda(source, "scale", "80")
    (kept,) = cache.cache_dir().glob("*.failed.cu")
    assert kept.read_text() == source
    assert str(kept) in str(e.value)
    assert cache_contents.cache_clear() == 1


def test_an_architecture_that_nvrtc_does_not_know():
    with pytest.raises(BuildError, match="invalid value for --gpu-architecture"):
        compile_cuda(SOURCE, "scale", "52")


@pytest.mark.parametrize("architecture", ["", "sm_80", "8.0", "90A", "80 --use_fast_math", "9000"])
def test_an_architecture_that_is_none(architecture):
    with pytest.raises(TargetError, match="is no compute capability"):
        compile_cuda(SOURCE, "scale", architecture)


# -- finding the library ---------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without NVRTC, and what makes a file of it in a folder."""
    for name in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvrtc, "_packages", lambda: iter(()))
    monkeypatch.setattr(nvrtc, "_SYSTEM", (str(tmp_path / "cuda"),))
    monkeypatch.setattr(nvrtc, "_LOADER_CONFIGURATION", str(tmp_path / "ld.so.conf.d"))
    monkeypatch.setattr(nvrtc, "_LOADER_FOLDERS", ())
    nvrtc._find.cache_clear()

    def put(folder, *names):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            (tmp_path / folder / name).write_bytes(b"no library")
        return tmp_path / folder

    yield put
    nvrtc._find.cache_clear()


@pytest.mark.usefixtures("bare")
def test_without_nvrtc():
    with pytest.raises(NoCompilerError, match="pip install nvidia-cuda-nvrtc"):
        compile_cuda(SOURCE, "scale", "80")


def test_a_toolkit_is_found(bare, monkeypatch):
    folder = bare("cuda/lib64", "libnvrtc.so", "libnvrtc.so.9.2", "libnvrtc.so.13.0.88", "libnvrtc-builtins.so.13.0")
    assert nvrtc.find_nvrtc() == folder / "libnvrtc.so.13.0.88"
    other = bare("other/lib", "libnvrtc.so.12")
    monkeypatch.setenv("CUDA_PATH", str(other.parent))
    assert nvrtc.find_nvrtc() == other / "libnvrtc.so.12"


def test_the_loaders_folders_are_looked_in(bare, monkeypatch, tmp_path):
    folder = bare("here", "libnvrtc.so.12.8")
    configuration = bare("ld.so.conf.d")
    (configuration / "cuda.conf").write_text(f"# a comment\n{folder}\n")
    assert nvrtc.find_nvrtc() == folder / "libnvrtc.so.12.8"
    nearer = bare("nearer", "libnvrtc.so.12")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{nearer}")
    assert nvrtc.find_nvrtc() == nearer / "libnvrtc.so.12"


def test_packages_come_first_and_the_newest_of_them(bare, monkeypatch, tmp_path):
    monkeypatch.undo()
    bare("site/nvidia/cuda_nvrtc/lib", "libnvrtc.so.12", "libnvrtc-builtins.so.12.9")
    newest = bare("site/nvidia/cu13/lib", "libnvrtc.so.13")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    for name in [x for x in sys.modules if x.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("CUDA_HOME", os.devnull)
    nvrtc._find.cache_clear()
    assert nvrtc.find_nvrtc() == newest / "libnvrtc.so.13"


@pytest.mark.usefixtures("empty_cache")
def test_a_file_that_is_no_library(bare):
    folder = bare("cuda/lib", "libnvrtc.so.13")
    with pytest.raises(NoCompilerError, match="is not a usable NVRTC") as caught:
        compile_cuda(SOURCE, "scale", "80")
    assert str(folder / "libnvrtc.so.13") in str(caught.value)
