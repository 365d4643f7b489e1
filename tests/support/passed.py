"""Runs of kernels that need not be repeated: identical text, operands and tools give identical results.

A run is one use of compiled text in one test: it is compiled, or run on some operands and looked at. Its key is a
digest of all that its result depends on. `passed.txt` has the keys of the last runs of the tiers that were recorded:

    PORTMM_TESTS=fast pytest --record
    PORTMM_TESTS=rest pytest --record

A run whose key is there has passed, and `unchanged` says so. Of the others a user's session takes the first few of each
test and a share of those that follow, chosen by their keys, so that its time is bounded on machines with other tools
as well; in CI all of them run. PORTMM_TESTS=full and =all repeat the known ones, too.

A key is only recorded where the test that asked for it has passed.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import cover
import numpy as np
from places import HELPERS, TESTS

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE = TESTS / "passed.txt"
DIGITS = 12
"""Hexadecimal, of a key: a changed run has one of 20,000 keys by chance once in 10 ** 10."""
FIRST, SHARE = 1, 16
"""Of the runs of a test that have not passed, these many at first and one in so many of the others are repeated."""
CHOOSERS = ("cover.py", "passed.py", "places.py", "tiers.py")
"""Helper modules that say which runs there are, and nothing of their results."""
HEADER = "# Runs of kernels that have passed, of each tier; `pytest --record` writes them. See passed.py.\n"


@dataclass
class Counts:
    """Numbers of runs that were repeated, known, and left out."""

    repeated: int = 0
    unchanged: int = 0
    left_out: int = 0

    def add(self, more: Iterable[int]) -> None:
        self.repeated, self.unchanged, self.left_out = (
            x + y for x, y in zip((self.repeated, self.unchanged, self.left_out), more, strict=True)
        )

    def said(self) -> str:
        """One line for the end of a session."""
        text = f"{self.repeated} runs of kernels"
        if self.unchanged:
            text += f"; {self.unchanged} not repeated: the same text, operands and tools have passed (tests/passed.txt)"
        if self.left_out:
            text += f"; {self.left_out} left out: their text or tools are new, and the other runs stand for them"
        return text + ("; PORTMM_TESTS=full repeats all" if self.unchanged or self.left_out else "")


@dataclass
class Ledger:
    """The keys of one process: those that have passed before, and those of the tests that ran in it.

    Attributes:
        known: keys that have passed.
        every: repeat all runs, whatever is known.
        bounded: of the runs of a test that are not known, take a share.
        asked: the keys of the test that is running, those that are known included.
        taken: how many of them were not known.
        passed: keys of tests that have passed in this process.
    """

    known: frozenset[str]
    every: bool
    bounded: bool = True
    counts: Counts = field(default_factory=Counts)
    asked: list[str] = field(default_factory=list)
    taken: int = 0
    passed: set[str] = field(default_factory=set)

    def unchanged(self, key: str) -> bool:
        """A run need not be repeated."""
        if not self.every and key in self.known:
            self.counts.unchanged += 1
            self.asked.append(key)
            return True
        self.taken += 1
        if self.bounded and not self.every and self.taken > FIRST and int(key, 16) % SHARE:
            self.counts.left_out += 1
            return True
        self.asked.append(key)
        self.counts.repeated += 1
        return False

    def end(self, *, well: bool) -> None:
        """A test has ended: what it has asked for is worth something only if it has passed."""
        if well:
            self.passed.update(self.asked)
        self.asked.clear()
        self.taken = 0


def read(path: Path) -> dict[str, frozenset[str]]:
    """Tier -> the keys in a file; none if there is no file."""
    found: dict[str, set[str]] = {}
    now = found.setdefault(cover.TIERS[0], set())
    for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
        if line.startswith("# tier "):
            now = found.setdefault(line.removeprefix("# tier "), set())
        elif not line.startswith("#"):
            now.add(line)
    return {tier: frozenset(keys) for tier, keys in found.items()}


def write(keys: dict[str, Iterable[str]], path: Path) -> None:
    """Replace a file by the keys of each tier."""
    parts = [f"# tier {tier}\n" + "".join(f"{x}\n" for x in sorted(some)) for tier, some in keys.items()]
    path.write_text(HEADER + "".join(parts), encoding="ascii")


def known(path: Path) -> frozenset[str]:
    """The keys in a file, of whichever tier."""
    return frozenset().union(*read(path).values())


LEDGER = Ledger(
    frozenset() if cover.EVERY_RUN else known(FILE), cover.EVERY_RUN, bounded=os.environ.get("CI") != "true"
)


def unchanged(*parts: object) -> bool:
    """A run of the test that is running need not be repeated: all that it depends on has passed before.

    `parts` are the text that is compiled, its flags, what says which tools they are for (`compiler_of`, `version`,
    `processor`), and the operands. The test, and the text of its module and of the helpers, are added.
    """
    test = current_test()
    return LEDGER.unchanged(digest((test, text_of(test.partition("::")[0]), *parts)))


def current_test() -> str:
    """The test that is running, by the name of its module, wherever that lies."""
    where = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    module, _, name = where.partition("::")
    return f"{Path(module).name}::{name}"


# -- digests ----------------------------------------------------------------------


def digest(parts: Iterable[object]) -> str:
    """The key of a run. Arrays count by their bytes, types and shapes, other parts by how they print."""
    made = sha256()
    for x in parts:
        if isinstance(x, np.ndarray):
            made.update(f"{x.dtype.str} {x.shape} {x.strides}".encode())
            made.update(np.ascontiguousarray(x).tobytes())
        else:
            made.update(str(x).encode())
        made.update(b"\0")
    return made.hexdigest()[:DIGITS]


@functools.cache
def text_of(module: str) -> str:
    """A digest of the code of a test module and of the helper modules that it imports, and they import.

    Comments, docstrings and the breaks of lines do not count.
    """
    seen: dict[str, str] = {}
    todo = [module]
    while todo:
        path = _files().get(todo.pop())
        if path is None or path.name in seen or path.name in CHOOSERS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        seen[path.name] = _code(tree)
        for node in ast.walk(tree):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            todo += [f"{x}.py" for x in names]
    return digest(f"{name}\n{seen[name]}" for name in sorted(seen))


def _code(tree: ast.Module) -> str:
    """The syntax tree of a module, without docstrings, as text."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a sentence as a statement does nothing
            body[:] = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return ast.dump(tree)


@functools.cache
def _files() -> dict[str, Path]:
    """The modules of the tests, by the names of their files."""
    return {path.name: path for path in sorted(TESTS.rglob("*.py")) if path.parent.name != "lesser"}


@functools.cache
def folder_text(name: str) -> str:
    """A digest of the files in a folder of the helpers', or of one file."""
    place = HELPERS / name
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return digest(path.read_text(encoding="utf-8") for path in files if path.is_file())


# -- tools ------------------------------------------------------------------------


@functools.cache
def processor() -> str:
    """The processor that kernels run on, as the machine itself says it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace") if Path("/proc/cpuinfo").exists() else ""
    words = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
    said = re.findall(r"^([^\t\n]+)\t*: (.*)$", text.partition("\n\n")[0], re.MULTILINE)
    return "; ".join(f"{name}: {value}" for name, value in said if name in words)


@functools.cache
def version(program: str) -> str:
    """The output of a program's --version."""
    path = shutil.which(program)
    if path is None:
        return f"no {program}"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return f"{Path(path).name}: {' '.join((done.stdout + done.stderr).split())}"


@functools.cache
def nvrtc() -> str:
    """The compiler of kernels for CUDA, by its version."""
    from portmm.build import nvrtc as compiler

    return f"nvrtc {compiler._open(compiler.find_nvrtc()).version}"


def compiled_by(isa_flags: tuple[str, ...], arch: str | None = None) -> str:
    """The compiler that `build` takes for an architecture, and all of its options."""
    from portmm.build.compiler import command, find_compiler

    found = find_compiler(arch)
    words = command(found, isa_flags, (), "kernel")
    return " ".join((found.kind, found.version, found.arch, *words[1:]))


@functools.cache
def run_time() -> str:
    """The C that calls kernels."""
    from portmm.runtime import cpu as cpu_runtime

    return digest((cpu_runtime.source(python=True), cpu_runtime.flags()))
