"""Permission to use AMX tiles.

Owns the request to Linux for the state of AMX, whose registers a process may not use
without it, and the test whether tiles work here: some sandboxes refuse the system
call, and some kill the process that makes it. So another process tries first, once per
machine, kernel and sandbox.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

from portmm.build.bundle import key_of
from portmm.build.cache import read_note, write_note
from portmm.util import system

# Linux, Documentation/arch/x86/xstate.rst: arch_prctl requests the state of a feature by its bit in XCR0.
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18

TRIAL_SECONDS = 20.0
"""Time limit of the trial process, which takes tens of milliseconds."""
STATUS_BYTES = 1 << 13
"""Bytes of /proc/self/status that are read, of some 1500; with many groups or processors it is longer."""

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
"""Program of the trial: its exit status is 0 if tiles work, and a signal may end it if not."""


def _sandbox() -> str:
    """Restrictions of a sandbox on this process, as far as /proc shows them."""
    try:
        file = os.open("/proc/self/status", os.O_RDONLY)  # a third of the time of a file object
    except OSError:
        return ""
    try:
        lines = os.read(file, STATUS_BYTES).decode("utf-8", "replace").splitlines()
    finally:
        os.close(file)
    return "\n".join([x for x in lines if x.startswith(("Seccomp", "NoNewPrivs"))])


def _trial_succeeds() -> bool:
    """Whether a process like this one can use tiles: the cached result of a trial, or a new trial."""
    kernel = os.uname()
    words = (kernel.release, kernel.version, sys.executable, _sandbox(), _TRIAL)
    note = "tiles-" + key_of("\n".join(words).encode("utf-8", "surrogateescape").decode("latin-1")).hex()
    result = read_note(note)
    if result in ("yes", "no"):
        return result == "yes"
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
    """Request tiles for this process, its threads and its children; returns whether they work.

    Call it only where /proc/cpuinfo has the flag amx_tile. The system call is made once per process.
    """
    if system.machine() != "x86_64" or not sys.executable or not _trial_succeeds():
        return False
    syscall = ctypes.pythonapi.syscall  # of a library that is loaded: another takes a twentieth of a first call
    syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_long)
    return int(syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) == 0
