"""Checks of bundles: contents against their digests, and kernels by running them, here or under an emulator.

Owns the operands and the comparison. Elements are -1, 0 and 1, so that all sums are exact in every type and results
have one value.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_fallback
from portmm.build import bundle as bundles
from portmm.dispatch.stored_kernels import CODE, fields_of, read
from portmm.errors import BundleError
from portmm.host import detect
from portmm.ir.abi import ARGS
from portmm.ir.index import meaning, parsed
from portmm.ops.bundle_build import SCHEDULES
from portmm.ops.bundle_devices import check_cubins
from portmm.schedule.text import parse
from portmm.spec.problem import Problem, family
from portmm.target.target import load_isa

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portmm.build.bundle import Bundle
    from portmm.schedule.schedule import Schedule
    from portmm.target.isa import Isa

JOB = struct.Struct("17l")
MOST = 64
"""Kernels of one run of the driver."""
CUBINS = "for CUDA not run: no device runs them here; each has its entry"
RAN, OPERANDS, MACHINE = "correct", "not run: operands of fused expressions or of four bits", "not run: no machine here"
PLAIN = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "s8": np.int8, "u8": np.uint8, "s32": np.int32}


def check(bundle: Bundle, report: Callable[[int, int, str], None] = lambda *_: None) -> dict[str, int]:
    """Check all of a bundle.

    Returns:
        Numbers of kernels by what was done with them.

    Raises:
        BundleError: contents are damaged, or a kernel computes another result.
    """
    bundles.check(bundle)
    texts = bundle.answer(SCHEDULES) or []
    counts: Counter[str] = Counter()
    groups: dict[str, list[str]] = {}
    for text in filter(None, texts):
        with read(bundle):
            s = parse(text)
        if s.epilogue or s.b.layout == "codes" or s.static:
            counts[OPERANDS] += 1
        else:
            groups.setdefault(s.isa, []).append(text)
    done = 0
    with tempfile.TemporaryDirectory(prefix="portmm-check-") as folder:
        for name, every in groups.items():
            command = _command(load_isa(name), Path(folder))
            for at in range(0, len(every), MOST):
                report(done, len(texts), f"{name} kernels" if command else f"{name} has no machine here")
                part = every[at : at + MOST]
                if command:
                    _run(bundle, part, command, Path(folder))
                counts[RAN if command else MACHINE] += len(part)
                done += len(part)
    report(len(texts), len(texts), "done")
    if cubins := check_cubins(bundle):
        counts[CUBINS] = cubins
    return dict(counts)


def _command(isa: Isa, folder: Path) -> list[str]:
    """The command of the driver for an instruction set; empty where it cannot run."""
    from portmm.build.compiler import find_compiler
    from portmm.errors import NoCompilerError

    here = os.uname().machine
    arch = here if isa.arch == "any" else isa.arch
    before: list[str] = []
    if arch == here:
        if detect.missing(isa):
            return []
    else:
        emulator = shutil.which(f"qemu-{arch}") or shutil.which(f"qemu-{arch}-static")
        root = Path(f"/usr/{arch}-linux-gnu")
        if not emulator or not root.is_dir():
            return []
        length = isa.vector_bytes if isa.name.startswith("sve") else 0
        cpu = f"max,sve-default-vector-length={length}" if length else "max"
        before = [emulator, "-L", str(root), "-cpu", cpu]
    program = folder / f"driver-{arch}"
    if not program.exists():
        try:
            compiler = find_compiler(None if arch == here else arch)
        except NoCompilerError:
            return []
        text = (Path(__file__).parent.parent / "runtime" / "check.c").read_text(encoding="utf-8")
        program.with_suffix(".c").write_text(f"#define _GNU_SOURCE 1\n{ARGS}{text}", encoding="utf-8")
        words = [*compiler.argv, "-O1", "-std=gnu11", f"{program}.c", "-o", str(program), "-ldl"]
        words += ["-target", f"{arch}-linux-gnu.2.28"] if compiler.kind == "zig" else []
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BundleError(f"the driver of kernels for {arch} was not built: {done.stderr[:500]}")
    return [*before, str(program)]


def _run(bundle: Bundle, texts: Sequence[str], command: Sequence[str], folder: Path) -> None:
    """Run kernels and compare their results.

    Raises:
        BundleError: one computes another result, or ends the driver.
    """
    words, jobs, expected = [], [], []
    for text in texts:
        path = bundle.library
        with read(bundle):
            fields = bundle.answer(CODE + text) or []
            number, symbol, swap, size, scratch, *_ = fields
            if number:
                entry, code = bundle.load(int(number))
                path = folder / f"{entry.key}.so"
                path.write_bytes(code)
            job, result = _job(parse(text), meaning(parsed(scratch)), int(size), swap=swap == "1")
        words += [str(path), symbol]
        jobs.append(job)
        expected.append(result)
    done = subprocess.run([*command, *words], input=b"".join(jobs), capture_output=True, check=False)
    at = 0
    for text, (result, dtype, steps) in zip(texts, expected, strict=True):
        size = result.size * dtype.itemsize
        if len(done.stdout) < at + size:
            raise BundleError(f"{text} of {bundle.path} ends the driver with status {done.returncode}")
        got = _values(np.frombuffer(done.stdout, dtype, result.size, at))
        at += size
        m, n = result.shape
        got = got.reshape(m, n) if steps == "row" else got.reshape(n, m).T
        if not np.array_equal(got, result):
            raise BundleError(
                f"{text} of {bundle.path} computes another product: {np.sum(got != result)} elements differ"
            )


def _job(s: Schedule, workspace: Any, size: int, *, swap: bool) -> tuple[bytes, tuple[Any, np.dtype[Any], str]]:
    """The driver's input for a schedule; the product, and type and layout of C."""
    # A register tile of one height serves as many rows, others all from the least.
    rows, columns, k = s.mr if len(s.heights) == 1 else 2 * s.mr + 1, 2 * s.nr + 1, min(97, s.kc + 5)
    m, n = (columns, rows) if swap else (rows, columns)
    a_type, b_type, c_type = s.types
    c_layout = "col" if swap else "row"
    a_layout, b_layout = ({"any": "row"}.get(x.layout, x.layout) for x in (s.a, s.b))
    if swap:
        flip = {"row": "col", "col": "row", "packed": "packed"}
        a_layout, b_layout = flip[b_layout], flip[a_layout]
        a_type, b_type = b_type, a_type
    rng = np.random.default_rng(m * n)
    a = rng.integers(0 if a_type == "u8" else -1, 2, (m, k))
    b = rng.integers(0 if b_type == "u8" else -1, 2, (k, n))
    packed = b_layout == "packed"
    p = Problem(m, n, k, s.dtype, 1, a_layout, b_layout, c_layout, s.family if packed else "")
    left, a_steps = _laid(a, a_type, a_layout)
    if packed:
        layout = family(s.family)
        words = _encoded(b, b_type)
        owner = np.zeros(-(-n // layout.nr) * layout.panel(k) * layout.kr, words.dtype)
        numpy_fallback.pack(words, owner, layout)
        right, b_steps = owner.tobytes(), (layout.nr, layout.panel(k))
    else:
        right, b_steps = _laid(b, b_type, b_layout)
    dtype = _encoded(np.zeros(1, int), c_type).dtype
    scratch = workspace(fields_of(p, m, 2, swap=swap)) * size
    c_steps = (n, 1) if c_layout == "row" else (1, m)
    c_bytes = m * n * dtype.itemsize
    numbers = (m, n, k, 2, len(left), len(right), c_bytes, scratch, *a_steps, *b_steps, *c_steps, 0, 0, 0)
    return JOB.pack(*numbers) + left + right, (a @ b, dtype, c_layout)


def _laid(x: Any, dtype: str, layout: str) -> tuple[bytes, tuple[int, int]]:
    """A matrix in a layout, with its strides."""
    words = _encoded(x, dtype)
    rows, columns = x.shape
    return (words.tobytes(), (columns, 1)) if layout == "row" else (words.T.tobytes(), (1, rows))


def _encoded(x: Any, dtype: str) -> Any:
    """Small integers as elements of a type; bfloat16 as words of 16 bits."""
    if dtype == "bf16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(PLAIN[dtype])


def _values(x: Any) -> Any:
    """Elements as numbers, of words of 16 bits as of bfloat16."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x
