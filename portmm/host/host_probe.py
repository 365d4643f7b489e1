"""Raw facts about the host.

Owns the record of them (`Snapshot`), the code that reads them: /proc, sysfs,
cpuid, the auxiliary vector, and py-cpuinfo where there is no /proc/cpuinfo; and the
number of cores, which first calls need. `host.detect` interprets the others.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from portmm.util import system
from portmm.util.records import dataclass

CPUINFO = "/proc/cpuinfo"
CPU = "/sys/devices/system/cpu"
CACHE_FILES = ("type", "level", "size", "coherency_line_size", "ways_of_associativity", "shared_cpu_list")
QUOTA_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
LEAVES = ((0, 0), (1, 0), (7, 0), (7, 1), (0x80000001, 0))
OSXSAVE = 27

# Fields of /proc/cpuinfo, and the names of py-cpuinfo for them.
PACKAGE_FIELDS = {
    "vendor_id": "vendor_id_raw",
    "cpu family": "family",
    "model": "model",
    "model name": "brand_raw",
    "stepping": "stepping",
}
# Flags that py-cpuinfo spells differently from Linux when it reads them by cpuid: its name, Linux's name.
PACKAGE_FLAGS = {
    "avx512bitalg": "avx512_bitalg",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512vpopcntdq": "avx512_vpopcntdq",
}

# Linux, arch/arm64: include/uapi/linux/auxvec.h and prctl.h.
AT_HWCAP, AT_HWCAP2, PR_SVE_GET_VL, SVE_VL_MASK = 16, 26, 51, 0xFFFF

# void cpuid(unsigned leaf, unsigned sub, unsigned out[4]), System V x86-64:
# endbr64; push rbx; mov r8, rdx; mov eax, edi; mov ecx, esi; cpuid;
# mov [r8], eax; mov [r8+4], ebx; mov [r8+8], ecx; mov [r8+12], edx; pop rbx; ret
CPUID_CODE = bytes.fromhex("f30f1efa 53 4989d0 89f8 89f1 0fa2 418900 41895804 41894808 4189500c 5b c3")
# unsigned long xgetbv(void): endbr64; xor ecx, ecx; xgetbv; shl rdx, 32; or rax, rdx; ret
XGETBV_CODE = bytes.fromhex("f30f1efa 31c9 0f01d0 48c1e220 4809d0 c3")
XGETBV_AT = 64


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Raw facts about a host.

    Attributes:
        machine: "x86_64" or "aarch64", from uname.
        cpuinfo: text of /proc/cpuinfo (x86: at least the first processor), or its substitute; see `macos_probe`.
        files: path -> text, of sysfs and cgroup files.
        affinity: processors that this process may use.
        cpuid: "leaf.sub-leaf" in hexadecimal -> eax, ebx, ecx, edx; empty if unknown.
        xcr0: register state that the kernel saves; 0 without XGETBV.
        hwcap: Arm AT_HWCAP.
        hwcap2: Arm AT_HWCAP2.
        sve_bytes: length of an SVE vector, 0 without SVE.
        tiles: whether this process has permission to use AMX's tiles, and they work.
    """

    machine: str
    cpuinfo: str
    files: dict[str, str]
    affinity: tuple[int, ...]
    cpuid: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    xcr0: int = 0
    hwcap: int = 0
    hwcap2: int = 0
    sve_bytes: int = 0
    tiles: bool = False

    @property
    def lasting(self) -> str:
        """All facts as one string, without those that vary from one moment to the next."""
        moving = "cpu MHz", "bogomips", "BogoMIPS"  # fields of /proc/cpuinfo that change with the clock
        constant = (line for line in self.cpuinfo.splitlines() if not line.startswith(moving))
        # EBX of leaf 1 has the number of the processor that executes CPUID.
        cpuid = [(leaf, a, b if leaf != "1.0" else 0, c, d) for leaf, (a, b, c, d) in self.cpuid.items()]
        rest = self.machine, sorted(self.files.items()), self.affinity, cpuid, self.xcr0, self.hwcap, self.hwcap2
        return "\n".join((*constant, repr((*rest, self.sve_bytes, self.tiles))))


def parse_list(text: str) -> set[int]:
    """Set of the numbers in a list as "0-3,8"."""
    ranges = (part.partition("-") for part in text.split(",") if part.strip())
    return {cpu for first, dash, last in ranges for cpu in range(int(first), int(last if dash else first) + 1)}


def processors(cpuinfo: str) -> list[dict[str, str]]:
    """Fields of each processor in /proc/cpuinfo."""
    blocks = (block for block in cpuinfo.split("\n\n") if block.strip())
    pairs = ([line.partition(":") for line in block.splitlines()] for block in blocks)
    return [{key.strip(): value.strip() for key, _, value in lines} for lines in pairs]


def cgroup_folders(text: str) -> Iterator[str]:
    """Folders whose CPU quota applies to a process with this /proc/self/cgroup, innermost first.

    In a container the path may be one of the machine outside; the mount then
    starts at the container's own group, so every parent is included.
    """
    for line in text.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        elif "cpu" in controllers.split(","):
            roots = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")
        else:
            continue
        inner = "" if ".." in path else path.rstrip("/")
        while True:
            yield from (root + inner for root in roots)
            if not inner:
                break
            inner = inner.rpartition("/")[0]


def text_of(path: str) -> str:
    """Text of a file, empty where it cannot be read."""
    # Without pathlib and buffers, the forty small files take half the time.
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    parts = []
    try:
        while part := os.read(file, 1 << 16):
            parts.append(part)
    except OSError:
        return ""
    finally:
        os.close(file)
    return b"".join(parts).decode(errors="replace").strip()


def first_processor() -> str:
    """The part of /proc/cpuinfo about the first processor; empty where it cannot be read."""
    # Each further x86 processor costs the kernel a measurement of its clock.
    text = b""
    with suppress(OSError), Path(CPUINFO).open("rb", buffering=0) as file:
        while b"\n\n" not in text and (part := file.read(1 << 14)):
            text += part
    return text.decode(errors="replace").partition("\n\n")[0]


def package_facts() -> dict[str, Any]:
    """Facts about the processor from py-cpuinfo, with the flags in Linux's names; takes up to a second.

    Its cache sizes are left out: some are of one core, some sums over all, depending on the source that it finds.

    Raises:
        Exception: py-cpuinfo is not installed, or does not support this machine.
    """
    facts = import_module("cpuinfo").get_cpu_info()
    flags = sorted(PACKAGE_FLAGS.get(flag, flag) for flag in facts.get("flags") or ())
    return {name: facts[name] for name in PACKAGE_FIELDS.values() if facts.get(name) is not None} | {"flags": flags}


@cache
def substitute_cpuinfo(*, flags: bool) -> str:
    """Text in the format of /proc/cpuinfo from py-cpuinfo, for a host without that file; empty where it fails.

    Args:
        flags: whether to include flags. Unlike those of the kernel, they are not masked by the register state that the
            kernel saves: include them only where XCR0 is known.
    """
    try:
        facts = package_facts()
    except Exception:  # noqa: BLE001 - the package raises plain exceptions; without it the host is still usable
        return ""
    lines = [f"{field}\t: {facts[name]}" for field, name in PACKAGE_FIELDS.items() if name in facts]
    if flags and facts["flags"]:
        lines.append(f"flags\t: {' '.join(facts['flags'])}")
    return "\n".join(lines)


def _cpuid() -> tuple[dict[str, tuple[int, int, int, int]], int]:
    """Results of cpuid and XCR0; empty where memory may not be executable."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except (OSError, ValueError):
        return {}, 0
    page[: len(CPUID_CODE)] = CPUID_CODE
    page[XGETBV_AT : XGETBV_AT + len(XGETBV_CODE)] = XGETBV_CODE
    view = ctypes.c_char.from_buffer(page)
    start = ctypes.addressof(view)
    cpuid = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(start)
    xgetbv = ctypes.CFUNCTYPE(ctypes.c_uint64)(start + XGETBV_AT)
    out = (ctypes.c_uint32 * 4)()
    results: dict[str, tuple[int, int, int, int]] = {}
    last: dict[int, int] = {}
    for leaf, sub in LEAVES:
        # A leaf above the last one of its range returns the numbers of that one. In a virtual machine each takes 20 us.
        if (start_of := leaf & 0x80000000) not in last:
            cpuid(start_of, 0, out)
            last[start_of] = out[0]
        if leaf <= last[start_of]:
            if leaf != start_of:
                cpuid(leaf, sub, out)
            results[f"{leaf:x}.{sub:x}"] = (out[0], out[1], out[2], out[3])
    # Without OSXSAVE the instruction does not exist.
    xcr0 = int(xgetbv()) if results.get("1.0", (0, 0, 0, 0))[2] >> OSXSAVE & 1 else 0
    del view
    page.close()
    return results, xcr0


def sharing(affinity: tuple[int, ...]) -> dict[str, str]:
    """Files that say how many cores the processors of this process are: path -> text."""
    path = "/proc/self/cgroup"
    files = {path: text} if (text := text_of(path)) else {}
    quotas = [f"{folder}/{name}" for folder in cgroup_folders(text) for name in QUOTA_FILES]
    files |= {path: text for path in quotas if (text := text_of(path))}
    known: set[int] = set()
    for cpu in affinity:
        path = f"{CPU}/cpu{cpu}/topology/thread_siblings_list"
        if cpu not in known and (text := text_of(path)):
            siblings = parse_list(text)
            files |= {f"{CPU}/cpu{x}/topology/thread_siblings_list": text for x in siblings}
            known |= siblings
    return files


def _files(cpuinfo: str, affinity: tuple[int, ...]) -> dict[str, str]:
    # On a chip with several kinds of cores, one processor of each kind has the caches of its kind.
    kinds = {b.get("CPU part", ""): int(b["processor"]) for b in reversed(processors(cpuinfo)) if "processor" in b}
    folders = [f"{CPU}/cpu{cpu}/cache/index{i}" for cpu in {*affinity[:1], *kinds.values()} for i in range(5)]
    paths = [f"{folder}/{name}" for folder in folders for name in CACHE_FILES]
    return {path: text for path in paths if (text := text_of(path))} | sharing(affinity)


def _arm() -> tuple[int, int, int]:
    libc = ctypes.CDLL(None)
    libc.getauxval.restype = ctypes.c_ulong
    hwcap, hwcap2 = (int(libc.getauxval(ctypes.c_ulong(entry))) for entry in (AT_HWCAP, AT_HWCAP2))
    length = int(libc.prctl(PR_SVE_GET_VL, 0, 0, 0, 0))
    return hwcap, hwcap2, length & SVE_VL_MASK if length > 0 else 0


def _tiles(cpuinfo: str) -> bool:
    if "amx_tile" not in cpuinfo.split():
        return False
    from portmm.host.amx_permission import tiles

    return tiles()


def snapshot(*, caches: bool = True) -> Snapshot:
    """Facts about this host, read in a few milliseconds; hidden facts are left out without an error.

    Where AMX is detected in a sandbox for the first time, a subprocess tries it: see `host.amx_permission`.

    Args:
        caches: whether to read the sizes of caches, of which some thirty files tell.
    """
    machine, affinity = system.machine(), system.processors()
    if machine == "x86_64":
        cpuid, xcr0 = _cpuid()
        cpuinfo = first_processor() or substitute_cpuinfo(flags=bool(cpuid))
        files = _files(cpuinfo, affinity) if caches else sharing(affinity)
        return Snapshot(machine, cpuinfo, files, affinity, cpuid, xcr0, tiles=_tiles(cpuinfo))
    if system.of(system.platform())[1] == system.MACOS:
        from portmm.host import macos_probe

        return Snapshot(machine, macos_probe.cpuinfo(), {}, affinity)
    cpuinfo = text_of(CPUINFO) or substitute_cpuinfo(flags=False)
    hwcap, hwcap2, sve = _arm() if machine == "aarch64" else (0, 0, 0)
    files = _files(cpuinfo, affinity) if caches else sharing(affinity)
    return Snapshot(machine, cpuinfo, files, affinity, hwcap=hwcap, hwcap2=hwcap2, sve_bytes=sve)


def number(text: str) -> int:
    """A number as Python writes it, or 0."""
    try:
        return int(text, 0)
    except ValueError:
        return 0


def siblings(shot: Snapshot, cpu: int) -> set[int]:
    """The processors of the core of a processor."""
    return parse_list(shot.files.get(f"{CPU}/cpu{cpu}/topology/thread_siblings_list", "")) or {cpu}


def _quota(shot: Snapshot) -> float:
    """CPU time per second that the control groups allow, in processors; infinite without a limit."""
    allowed = math.inf
    for folder in cgroup_folders(shot.files.get("/proc/self/cgroup", "")):
        quota, _, period = shot.files.get(f"{folder}/cpu.max", "").partition(" ")
        if not quota:
            quota = shot.files.get(f"{folder}/cpu.cfs_quota_us", "")
            period = shot.files.get(f"{folder}/cpu.cfs_period_us", "")
        if number(quota) > 0 and number(period) > 0:
            allowed = min(allowed, number(quota) / number(period))
    return allowed


def cores(shot: Snapshot, cpus: Iterable[int]) -> int:
    """Number of physical cores that may be used; two threads of one core count once."""
    physical = {min(siblings(shot, cpu)) for cpu in cpus}
    return max(1, min(len(physical), math.ceil(min(_quota(shot), len(physical)))))
