"""Leave to use tiles.

Owns asking Linux for the state of AMX, whose registers a process may not touch
before, and the question whether they work here: some sandboxes refuse the system
call, and some end whoever makes it. So another process tries first, once per
machine, kernel and sandbox. Imports `build.cache`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

from portmm.build.cache import digest, read_note, write_note

# Linux, Documentation/arch/x86/xstate.rst: arch_prctl asks for the state of a feature by its bit in XCR0.
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18

TRIAL_SECONDS = 20.0
"""Patience with the process that tries; it takes tens of milliseconds."""

# void try(const void *shapes, void *to), System V x86-64: endbr64; ldtilecfg (rdi); mov eax, 64; tilezero tmm0;
# tilestored (rsi + rax), tmm0; tilerelease; ret
_CODE = "f30f1efa c4e2784907 b840000000 c4e27b49c0 c4e27a4b0406 c4e27849c0 c3"

_TRIAL = f"""
import ctypes, mmap
if ctypes.CDLL(None).syscall({SYS_ARCH_PRCTL}, {ARCH_REQ_XCOMP_PERM}, {XFEATURE_XTILEDATA}):
    raise SystemExit(1)
code = bytes.fromhex("{_CODE}")
page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page[: len(code)] = code
shapes = (ctypes.c_uint8 * 64)()
shapes[0], shapes[16], shapes[48] = 1, 64, 16
to = (ctypes.c_uint8 * 1024)(*[255] * 1024)
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(start)(ctypes.addressof(shapes), ctypes.addressof(to))
raise SystemExit(any(to))
"""
"""A program that ends with 0 if tiles work; it may end in any other way."""


def _sandbox() -> str:
    """What else decides, beside the kernel, as far as it shows."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return "\n".join(x for x in lines if x.startswith(("Seccomp", "NoNewPrivs")))


def _tried() -> bool:
    """Whether a process like this one could use tiles, by trying it unless that has been done."""
    system = os.uname()
    words = (system.release, system.version, sys.executable, _sandbox(), _TRIAL)
    note = "tiles-" + digest("\n".join(words).encode("utf-8", "surrogateescape"))
    found = read_note(note)
    if found in ("yes", "no"):
        return found == "yes"
    import subprocess

    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRIAL],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TRIAL_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return False
    write_note(note, "no" if done.returncode else "yes")
    return not done.returncode


@cache
def tiles() -> bool:
    """Let this process use tiles, if that works here; its threads and children may then use them too.

    To be called only where /proc/cpuinfo names amx_tile. Asks once per process.
    """
    if os.uname().machine != "x86_64" or not sys.executable or not _tried():
        return False
    ask = ctypes.CDLL(None).syscall
    ask.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_long)
    return int(ask(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) == 0
