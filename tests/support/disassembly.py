"""The instructions of a cubin, by NVIDIA's disassembler: from PyPI, or of a CUDA toolkit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from opencl_cpu import missing

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)|\b0x([0-9a-f]+)\s*$")
TOOLS = {"nvdisasm": ("-c",), "cuobjdump": ("-sass",)}
"""Disassemblers, and what has them print instructions."""


def _places():
    """Folders of tools: of Python's packages, of toolkits, of the path."""
    try:
        spec = find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(map(str, Path(root).glob("*/bin")), reverse=True)
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield str(Path(root, "bin"))
    yield from os.environ.get("PATH", "").split(os.pathsep)


@cache
def find(name=""):
    """The path of a disassembler, or of one by name; None if there is none."""
    found = (shutil.which(tool, path=place) for place in _places() for tool in ([name] if name else TOOLS))
    return next(filter(None, found), None)


def required():
    """The path of a disassembler; without one a test is skipped, or fails where CI promises it."""
    found = find()
    if found is None:
        missing("there is no nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found


@dataclass(frozen=True)
class Code:
    """The machine code of a cubin.

    Attributes:
        names: of its instructions, with their modifiers, in order.
        loops: where loops begin and end, by branches that lead back.
    """

    names: tuple
    loops: tuple

    def count(self, *words):
        """Instructions of some kinds: what stands before the first point of their names."""
        return sum(x.partition(".")[0] in words for x in self.names)

    def kinds(self, *words):
        """Names of such instructions, and how many of each."""
        return Counter(x for x in self.names if x.partition(".")[0] in words)

    def innermost(self, *words):
        """How many of them the smallest loop has that has one."""
        counts = ((end - first, Code(self.names[first : end + 1], ()).count(*words)) for first, end in self.loops)
        return min((x for x in counts if x[1]), default=(0, 0))[1]


def code_of(cubin, tool=None):
    """The code of a cubin's bytes."""
    tool = tool or required()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [tool, *TOOLS[Path(tool).name], file.name]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def parsed(text):
    """Code from what a disassembler prints; each kernel's addresses begin at 0, and branches stay inside of it."""
    names, loops, known = [], [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            known[label[1]] = len(names)
        found = _INSTRUCTION.search(line)
        if not found:
            continue
        if not int(found[1], 16):
            known = {key: at for key, at in known.items() if isinstance(key, str)}
        known[int(found[1], 16)] = len(names)
        target = _TARGET.search(found[3]) if found[2].startswith("BRA") else None
        if target:
            at = known.get(target[1] or int(target[2], 16))
            if at is not None and at < len(names):  # a kernel ends with a branch to itself
                loops.append((at, len(names)))
        names.append(found[2])
    return Code(tuple(names), tuple(loops))
