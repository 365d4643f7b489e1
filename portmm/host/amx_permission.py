"""Permission to use AMX tiles.

Owns the request to Linux for the state of AMX, whose registers a process may not use
without it, and the test whether tiles work here: some sandboxes refuse the system
call, and some kill the process that makes it. Where a filter of system calls or a tracer may do so, another process
tries first: a child of machine code, or where memory may not be executable one of the interpreter, once per machine,
kernel and sandbox.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
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
"""Bytes of /proc/thread-self/status that are read, of some 1500; with many groups or processors it is longer."""

FREE = {"Seccomp:\t0", "TracerPid:\t0"}
"""Lines of a thread that Linux itself answers: with an error, where it does not grant tiles. It needs no trial, which
takes a quarter of a first call."""

TILE_BYTES, UNWRITTEN = 1024, 255
"""Size of a tile of 16 rows, and a byte that it is stored to, before."""

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


_CHILD = bytes.fromhex("""
f30f1efa 53 55 4154 4155 4989fc 4889f3 4989d5 4889cd b83a000000 0f05 85c0 0f8882000000 7567
bf04000000 498d7520 b8a0000000 0f05 bf04000000
4c89ee 31d2 41ba08000000 b80d000000 0f05 ffc7 83ff20 72e7
bf23100000 be12000000 b89e000000 0f05 89c7 85c0 751b
c4c278490424 b840000000 c4e27b49c0 c4e27a4b0403 c4e27849c0 b8e7000000 0f05
89c3 89df 4889ee 31d2 4531d2 b83d000000 0f05 4883f8fc 74e9 415d 415c 5d 5b c3
""")
"""The trial without an interpreter, in machine code: long try(const void *shapes, void *to, const void *words, int
*status), System V x86-64.

It begins a child by vfork, which shares memory and uses none but `to`; returns its number, or -errno; and waits for it.
The child: setrlimit(RLIMIT_CORE, words + 32), so that no signal dumps the memory of both; rt_sigaction(signal, words,
NULL, 8) for signals 4 to 31, whose handlers are the parent's; arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
ldtilecfg [shapes]; tilezero tmm0; tilestored [to + 64 rows]; tilerelease; exit_group(0, or what arch_prctl returns).
"""


def _restrictions() -> list[str]:
    """Lines of /proc about filters of system calls, and a tracer, of this thread; none where there is no such file."""
    try:
        file = os.open("/proc/thread-self/status", os.O_RDONLY)  # a third of the time of a file object
    except OSError:
        return []
    try:
        lines = os.read(file, STATUS_BYTES).decode("utf-8", "replace").splitlines()
    finally:
        os.close(file)
    return [x for x in lines if x.startswith(("Seccomp", "NoNewPrivs", "TracerPid"))]


def _trial_succeeds(restrictions: list[str]) -> bool:
    """Whether a process like this one can use tiles: by a child; else the cached result of a trial, or a new trial."""
    works = _child_succeeds()
    if works is not None:
        return works
    kernel = os.uname()
    lines = [x for x in restrictions if not x.startswith("TracerPid")]  # its number is of no other process
    words = (kernel.release, kernel.version, sys.executable, "\n".join(lines), _TRIAL)
    note = "tiles-" + key_of("\n".join(words).encode("utf-8", "surrogateescape").decode("latin-1")).hex()
    result = read_note(note)
    if result in ("yes", "no"):
        return result == "yes"
    works = _process_succeeds()
    if works is None:
        return False
    atexit.register(write_note, note, "yes" if works else "no")
    return works


def _child_succeeds() -> bool | None:
    """Whether tiles work in a child without an interpreter, in 0.3 ms; None where there can be none."""
    try:
        page = mmap.mmap(-1, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except (OSError, ValueError):
        return None
    page[: len(_CHILD)] = _CHILD
    # Types of arrays of ctypes take a fifth of a millisecond: what the child reads and writes is on the second page.
    config, rows, words, status = (mmap.PAGESIZE + x for x in (0, 1024, 128, 256))
    page[config], page[config + 16], page[config + 48] = 1, 64, 16
    page[rows : rows + TILE_BYTES] = bytes([UNWRITTEN]) * TILE_BYTES
    page[words + 32] = page[words + 40] = 1
    page[status : status + 4] = b"\xff" * 4
    view = ctypes.c_char.from_buffer(page)
    start = ctypes.addressof(view)
    call = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_void_p] * 4)(start)
    child = call(*[start + x for x in (config, rows, words, status)])
    ended, written = any(page[status : status + 4]), page[rows : rows + TILE_BYTES]
    del view
    page.close()
    if child < 0 or (not ended and written == bytes([UNWRITTEN]) * TILE_BYTES):  # an emulator's shares no memory
        return None
    return not ended and not any(written)


def _process_succeeds() -> bool | None:
    """Whether tiles work in another process of this interpreter; None where there can be none."""
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
        return None
    return not done.returncode


@cache
def tiles() -> bool:
    """Request tiles for this process, its threads and its children; returns whether they work.

    Call it only where /proc/cpuinfo has the flag amx_tile. The system call is made once per process.
    """
    if system.machine() != "x86_64":
        return False
    lines = _restrictions()
    if not FREE.issubset(lines) and not (sys.executable and _trial_succeeds(lines)):
        return False
    syscall = ctypes.pythonapi.syscall  # of a library that is loaded: another takes a twentieth of a first call
    syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_long)
    return int(syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) == 0
