"""Runs the source of a CUDA kernel on the CPU: it is compiled as C++ with shim/cuda.h before it.

The threads of a block are fibers of one OS thread, so that a launch in an order is repeatable; shared memory is
poisoned, and every access to it is checked for races and bounds. What a GPU would not forgive is a `ShimError`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import passed
from machines import require
from operands import poison
from runs import Guarded

from portmm.build.cache import cache_dir, digest

SOURCES = Path(__file__).with_name("shim")
IN_ORDER, BACKWARDS, SHUFFLED = range(3)
"""Seeds of orders of threads and blocks; each larger one shuffles another way."""
ORDERS = (IN_ORDER, BACKWARDS, SHUFFLED)
ALIGNMENT = 16
"""Of operands, at least: the largest vector has as many bytes. CUDA's allocator gives 256."""

_FLAGS = (
    "-std=c++17", "-fPIC",
    "-fno-strict-aliasing",  # vectors are loaded from arrays of scalars
    "-ffp-contract=off",  # kernels say where they fuse, so that -mfma changes no result
    "-fno-math-errno",
    "-fwrapv",  # sums of s32 wrap
)  # fmt: skip
_KERNEL_FLAGS = (
    "-O1", "-g1",
    "-fstack-clash-protection",  # a large frame does not step over the page below a stack
    "-fsanitize=thread",  # a hook before each access, which shim/faults.h defines
    "-fsanitize=bounds,alignment,shift-exponent,integer-divide-by-zero",  # object-size would keep sums in memory
    "-fno-sanitize-recover=all",
)  # fmt: skip
_TYPES = {"int": ("i", ctypes.c_int), "long": ("l", ctypes.c_long), "float": ("f", ctypes.c_float)}
_WORDS = {"p": "a pointer", "m": "a TensorMap", **{letter: f"a {word}" for word, (letter, _) in _TYPES.items()}}

# gcc has another word for what keeps `float acc[8][8]` in registers.
_UNROLL = re.compile(r"#pragma unroll\b[ \t]*(\d*)")
_MOST_STEPS = 128
_MAGIC, _IMAGES = 0x504D5F4D4150, 0x504D5F494D47
_WORD = (1 << 32) - 1
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")
# Threads of kernels that say these meet in other ways than at barriers of the block and of warps.
_MEETS = re.compile(r"\b(mbarrier|block_barrier|cluster|tma|wgmma)_")


class ShimError(Exception):
    """A launch that a GPU refuses, or whose result means nothing there."""


@dataclass(frozen=True)
class Kernel:
    """A kernel compiled for the CPU."""

    name: str
    path: Path
    library: ctypes.CDLL
    meets: bool = False

    def launch(  # noqa: PLR0917 - as CUDA has it
        self,
        grid: tuple[int, int, int],
        block: int,
        arguments: list[Any],
        seed: int = 0,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        """Run on arrays as they lie, numbers, as ("int", 3), ("long", 3), ("float", 3.0), and ("map", shim_map(...)).

        `seed` is an order, `shared` a number of bytes of dynamic shared memory, `cluster` one of blocks along x. A
        map may be followed by the array that it describes, so that `launch_in_orders` moves both.
        """
        self._check(arguments)
        values = [_value(x) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        where = (ctypes.c_size_t * 3)()
        text = self.library.shim_launch(
            (ctypes.c_uint * 3)(*grid), block, ctypes.c_size_t(shared), cluster, self.meets, seed, pointers, where
        )
        if text is not None:
            place = _near(where[0], [_array(x) for x in arguments]) + self._line(where[1], where[2])
            raise ShimError(f"{self.name}: {text.decode()}{place}")

    def launch_in_orders(  # noqa: PLR0917 - as CUDA has it
        self,
        grid: tuple[int, int, int],
        block: int,
        arguments: list[Any],
        seeds: tuple[int, ...] = ORDERS,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        """Run in several orders, each on copies beside guard pages, now before them and now behind.

        All orders must give the same bits, which then lie in the arrays.
        """
        arrays = [_array(x) for x in arguments]
        results: list[list[Any]] = []
        for i, seed in enumerate(seeds):
            laid = [x if x is None else Laid.beside(x, end=i % 2 == 0) for x in arrays]
            given = [x if y is None else _moved(x, y.array) for x, y in zip(arguments, laid, strict=True)]
            self.launch(grid, block, given, seed, shared, cluster)
            for j, x in enumerate(laid):
                if x is not None:
                    x.check(f"{self.name}: argument {j}")
            results.append([x if x is None else x.array for x in laid])
        for j, first in enumerate(results[0]):
            if first is None:
                continue
            for seed, others in zip(seeds, results, strict=True):
                if others[j].tobytes() != first.tobytes():
                    raise ShimError(f"{self.name}: argument {j} depends on the order of threads (seed {seed})")
            arrays[j][...] = first

    def _check(self, arguments: list[Any]) -> None:
        want = self.library.shim_signature().decode()
        letters = {"map": "m", **{word: letter for word, (letter, _) in _TYPES.items()}}
        got = "".join("p" if isinstance(x, np.ndarray) else letters[x[0]] for x in arguments)
        if len(want) != len(got):
            raise ShimError(f"{self.name} takes {len(want)} arguments, not {len(got)}")
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            if a != b:
                raise ShimError(f"{self.name}: argument {i} is {_WORDS[a]}, not {_WORDS[b]}")

    def _line(self, code: int, line: int) -> str:
        tool = shutil.which("addr2line")
        if code and tool:
            # The address of code is that of the next instruction.
            answer = subprocess.run([tool, "-e", self.path, hex(code - 1)], capture_output=True, text=True, check=False)
            found = re.search(r":(\d+)", answer.stdout)
            line = int(found[1]) if found else 0
        return f", on line {line}" if line else ""


@dataclass(frozen=True)
class Laid:
    """An array at an aligned address beside a page that cannot be touched."""

    array: np.ndarray
    slack: np.ndarray

    @classmethod
    def beside(cls, x: np.ndarray, *, end: bool) -> Laid:
        """A copy of an array; what rounds its size up to the alignment is slack, which holds poison."""
        memory = Guarded(-(-x.nbytes // ALIGNMENT) * ALIGNMENT, end=end).bytes
        array = memory[: x.nbytes].view(x.dtype).reshape(x.shape)
        array[...] = x
        memory[x.nbytes :] = poison(memory.dtype)
        return cls(array, memory[x.nbytes :])

    def check(self, what: str) -> None:
        if (self.slack != poison(self.slack.dtype)).any():
            raise ShimError(f"{what} was written beyond its end")


def _value(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        if not x.flags.c_contiguous:
            raise ValueError("an array whose elements do not follow one another has no single address")
        return ctypes.c_void_p(x.ctypes.data)
    if x[0] == "map":
        memory = (ctypes.c_ubyte * (128 + 64))()
        made = (ctypes.c_ubyte * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
        made[:] = bytes(x[1])
        return made
    word, number = x
    return _TYPES[word][1](number)


def _array(x: Any) -> Any:
    """The array that an argument is, or that its map describes, or None."""
    return x if isinstance(x, np.ndarray) else x[2] if x[0] == "map" and len(x) > 2 else None


def _moved(x: Any, to: np.ndarray) -> Any:
    """An argument, on another array."""
    if isinstance(x, np.ndarray):
        return to
    words = np.frombuffer(bytes(x[1]), np.uint64).copy()
    words[0] = int(words[0]) + to.ctypes.data - x[2].ctypes.data
    return ("map", words.tobytes(), to)


def shim_map(  # noqa: PLR0917 - in the order of cuTensorMapEncodeTiled
    dtype_bytes: int,
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
    rounds: bool = False,
) -> bytes:
    """A TensorMap of three or four axes as the shim has it: x first; strides are bytes between elements along y, z, w.

    With `rounds`, elements are f32 that copies round to tf32.

    Raises:
        ValueError: cuTensorMapEncodeTiled refuses it.
    """
    row = box[0] * dtype_bytes
    wrong = {
        f"elements have 1, 2, 4 or 8 bytes, not {dtype_bytes}": dtype_bytes not in {1, 2, 4, 8},
        f"the address {address:#x} is no multiple of 16": address % 16,
        f"sizes are from 1 to 2**32, not {sizes}": not all(1 <= x <= 1 << 32 for x in sizes),
        f"strides are multiples of 16 below 2**40, not {strides}": any(x % 16 or not 0 <= x < 1 << 40 for x in strides),
        f"a box has 1 to 256 elements along each dimension, not {box}": not all(1 <= x <= 256 for x in box),
        f"a row of a box is a multiple of 16 bytes, not {row}": row % 16,
        f"a swizzle is of 0, 32, 64 or 128 bytes, not {swizzle}": swizzle not in {0, 32, 64, 128},
        f"a row of a box has at most the {swizzle} bytes of the swizzle, not {row}": swizzle and row > swizzle,
    }
    for text, found in wrong.items():
        if found:
            raise ValueError(text)
    one = (1,) * (4 - len(sizes))
    words = [address, dtype_bytes, *sizes, *one, *strides, *(0 for _ in one), *box, *one, swizzle, _MAGIC, int(rounds)]
    return np.array(words, np.uint64).tobytes()


def shim_images(  # noqa: PLR0917 - in the order of cuTensorMapEncodeIm2col
    dtype_bytes: int,
    address: int,
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    box: tuple[int, int],
    pixels: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    swizzle: int = 0,
    rounds: bool = False,
) -> bytes:
    """A TensorMap of images (channels first in `sizes`) for windows that begin at some pixels, as the shim has it.

    Raises:
        ValueError: cuTensorMapEncodeIm2col refuses it.
    """
    row, (lower, upper, step) = box[0] * dtype_bytes, pixels
    wrong = {
        f"the address {address:#x} is no multiple of 16": address % 16,
        f"sizes are from 1 to 2**32, not {sizes}": not all(1 <= x <= 1 << 32 for x in sizes),
        f"strides are multiples of 16 below 2**40, not {strides}": any(x % 16 or not 0 <= x < 1 << 40 for x in strides),
        f"a copy has 1 to 256 channels of 1 to 1024 pixels, not {box}": not (
            1 <= box[0] <= 256 and 1 <= box[1] <= 1024
        ),
        f"channels are a multiple of 16 bytes, not {row}": row % 16,
        f"a swizzle is of 0, 32, 64 or 128 bytes, not {swizzle}": swizzle not in {0, 32, 64, 128},
        f"channels have at most the {swizzle} bytes of the swizzle, not {row}": swizzle and row > swizzle,
        f"corners are from -128 to 127, not {lower} and {upper}": not all(-128 <= x < 128 for x in (*lower, *upper)),
        f"steps are from 1 to 8, not {step}": not all(1 <= x <= 8 for x in step),
    }
    for text, found in wrong.items():
        if found:
            raise ValueError(text)
    pairs = [x & _WORD | (y & _WORD) << 32 for x, y in (box, lower, upper, step)]
    words = [address, dtype_bytes, *sizes, *strides, *pairs, swizzle, _IMAGES, int(rounds)]
    return np.array(words, np.uint64).tobytes()


def _near(address: int, arguments: list[Any]) -> str:
    """Where an address is, seen from the nearest array."""
    if not address:
        return ""
    found = []
    for i, x in enumerate(arguments):
        if isinstance(x, np.ndarray):
            before, after = x.ctypes.data - address, address - (x.ctypes.data + x.nbytes)
            found.append((max(before, after), i, f"{before} bytes before" if before > 0 else f"{after} bytes after"))
    distance, i, text = min(found, default=(0, 0, ""))
    return f", {text} argument {i}" if 0 <= distance < (1 << 20) and text else ""


# -- compiling ----------------------------------------------------------------------


@functools.cache
def _host_flags() -> tuple[str, ...]:
    """Flags that make kernels faster here. Without -mfma fmaf is a call of the C library."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace") if Path("/proc/cpuinfo").exists() else ""
    return ("-mfma",) if re.search(r"^flags\b.*\bfma\b", text, re.MULTILINE) else ()


def _run(argv: list[Any], folder: Path) -> None:
    answer = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if answer.returncode:
        raise ShimError(f"{' '.join(map(str, argv))} failed:\n{answer.stderr}")


def _made(name: str, text: str, flags: tuple[str, ...], make: Any) -> Path:
    """The file that `make(folder, source)` leaves, kept under the hash of all that it comes from.

    It is kept in the cache, or in $PORTMM_TEST_SHIM, where later sessions find it: no host has other kernels of CUDA.
    """
    compiler = Path(require("g++")).resolve()
    version = f"{compiler} {compiler.stat().st_mtime_ns}"
    headers = "".join(p.read_text(encoding="utf-8") for p in sorted(SOURCES.iterdir()))
    key = digest("\0".join([text, headers, version, *flags]).encode())[:32]
    kept = Path(os.environ.get("PORTMM_TEST_SHIM") or cache_dir().absolute() / "shim") / f"{key}-{name}"
    if not kept.exists():
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            source = Path(folder, f"{Path(name).stem}.cu")
            source.write_text(text, encoding="utf-8")
            make(Path(folder), source).replace(kept)
    return kept


@functools.cache
def version() -> str:
    """The shim and its compiler."""
    return " ".join((passed.version("g++"), passed.folder_text("shim"), *_FLAGS, *_KERNEL_FLAGS, *_host_flags()))


@functools.cache
def _runtime(flags: tuple[str, ...]) -> Path:
    flags = (*_FLAGS, "-O2", *flags)
    argv = [require("g++"), *flags, "-c", SOURCES / "runtime.cpp", "-o", "runtime.o"]

    def make(folder: Path, _source: Path) -> Path:
        _run(argv, folder)
        return folder / "runtime.o"

    return _made("runtime.o", "", flags, make)


@functools.cache
def _header(flags: tuple[str, ...]) -> Path:
    """The shim's header, precompiled for kernels; what is to be included is this without its last suffix."""

    def make(folder: Path, _source: Path) -> Path:
        _run([require("g++"), *flags, "-w", "-x", "c++-header", SOURCES / "cuda.h", "-o", "cuda.h.gch"], folder)
        return folder / "cuda.h.gch"

    return _made("cuda.h.gch", "", flags, make)


@functools.cache
def compile(source: str, name: str, runtime: tuple[str, ...] = ()) -> Kernel:  # noqa: A001
    """The kernel of a source; `runtime` are more flags for the run time that it is linked with.

    Raises:
        ShimError: it does not compile, or calls what neither it nor the shim defines.
    """
    flags = (*_FLAGS, *_KERNEL_FLAGS, *_host_flags())

    def make(folder: Path, text: Path) -> Path:
        gcc = require("g++")
        ready = _header(flags)
        words = [*flags, f"-I{ready.parent}", f"-I{SOURCES}", "-include", ready.stem, "-x", "c++", "-c", text.name]
        _run([gcc, *words, "-o", "kernel.o"], folder)
        # The run time comes last: its part of the section of shared memory is the end of it.
        _run([gcc, "-shared", "-Wl,-Bsymbolic,-z,defs", "kernel.o", _runtime(runtime), "-o", "kernel.so"], folder)
        return folder / "kernel.so"

    text = _UNROLL.sub(lambda found: f"#pragma GCC unroll {found[1] or _MOST_STEPS}", source)
    text = _DYNAMIC.sub(r"\1 *const \2 = (\1 *)shim_dynamic;", text)
    path = _made(f"{name}.so", f"{text}\nSHIM_KERNEL({name})\n", (*flags, *runtime), make)
    library = ctypes.CDLL(str(path))
    library.shim_launch.restype = library.shim_signature.restype = ctypes.c_char_p
    return Kernel(name, path, library, bool(_MEETS.search(source)))


def kernel(body: str, arguments: str = "float *x", shared: str = "", name: str = "small", before: str = "") -> Kernel:
    """A kernel of a few statements, which begin on line 2; `t` is the thread. `before` are functions on line 1."""
    head = f'{before}extern "C" __global__ void {name}({arguments}) {{ const int t = threadIdx.x; {shared}'
    return compile(f"{head}\n{body}\n}}\n", name)
