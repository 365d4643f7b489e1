"""Features of the processor, from a snapshot of the host.

Owns the tables of feature bits. What this module imports is quick to import: a first call by the base set of kernels
needs no more of the host.
"""

from __future__ import annotations

from portmm.host.host_probe import Snapshot, processors

# Every x86-64 and every AArch64 Linux has these, whatever /proc hides.
BASELINE = {"x86_64": {"cx8", "cmov", "fxsr", "sse", "sse2"}, "aarch64": {"fp", "asimd"}}

EAX, EBX, ECX, EDX = range(4)
# Intel SDM vol. 2 and AMD APM vol. 3, CPUID: leaf and register -> bits by Linux's names.
CPUID = {
    ("1.0", EDX): {"cx8": 8, "cmov": 15, "fxsr": 24, "sse": 25, "sse2": 26},
    ("1.0", ECX): {
        "pni": 0, "ssse3": 9, "fma": 12, "cx16": 13, "sse4_1": 19, "sse4_2": 20, "movbe": 22, "popcnt": 23, "xsave": 26,
        "avx": 28, "f16c": 29,
    },
    ("7.0", EBX): {
        "bmi1": 3, "avx2": 5, "bmi2": 8, "avx512f": 16, "avx512dq": 17, "avx512cd": 28, "avx512bw": 30, "avx512vl": 31,
    },
    ("7.0", ECX): {"avx512_vnni": 11},
    ("7.0", EDX): {"amx_bf16": 22, "avx512_fp16": 23, "amx_tile": 24, "amx_int8": 25},
    ("7.1", EAX): {"avx_vnni": 4, "avx512_bf16": 5},
    ("7.1", EDX): {"prefetchi": 14},
    ("80000001.0", ECX): {"lahf_lm": 0, "abm": 5},
}  # fmt: skip
UNLISTED = {"prefetchi"}
"""Features that Linux knows and leaves out of /proc/cpuinfo."""
# Intel SDM vol. 1, ch. 13: the parts of XCR0 that an instruction's registers need, by the beginning of its name.
XCR0 = {"avx512": 0xE6, "amx": 0x60000, "avx": 0x6, "fma": 0x6, "f16c": 0x6, "": 0}


def state_of(name: str) -> int:
    """The parts of XCR0 that a feature of x86-64 needs."""
    return next(x for start, x in XCR0.items() if name.startswith(start))


# Linux, arch/arm64/include/uapi/asm/hwcap.h.
HWCAP = {0: "fp", 1: "asimd", 9: "fphp", 10: "asimdhp", 20: "asimddp", 22: "sve"}
HWCAP2 = {1: "sve2", 13: "i8mm", 14: "bf16"}


def _decoded(shot: Snapshot) -> dict[str, bool]:
    """Features of the table `CPUID` -> whether cpuid and XCR0 enable them."""
    return {
        name: bool(shot.cpuid.get(leaf, (0, 0, 0, 0))[register] >> bit & 1 and not state_of(name) & ~shot.xcr0)
        for (leaf, register), bits in CPUID.items()
        for name, bit in bits.items()
    }


def table(arch: str) -> str:
    """The table of features of an architecture in C, for `runtime/features.c`."""
    if arch == "x86_64":
        rows = [
            f'{{0x{leaf.partition(".")[0]}, {leaf.partition(".")[2]}, {word}, {bit}, {state_of(name)}, "{name}"}}'
            for (leaf, word), bits in CPUID.items()
            for name, bit in bits.items()
        ]
        head = "unsigned leaf, sub, word, bit; unsigned long state;"
    else:
        rows = [f'{{{i}, {bit}, "{x}"}}' for i, y in enumerate((HWCAP, HWCAP2)) for bit, x in y.items()]
        head = "int word, bit;"
    return f"static const struct {{ {head} const char *name; }} feature_bits[] = {{\n  " + ",\n  ".join(rows) + "\n};\n"


def macos_table() -> str:
    """The table of names in C, for `runtime/features_macos.c`."""
    from portmm.host.macos_probe import ALWAYS, FEATURES

    rows = ",\n  ".join(f'{{"{key}", "{name}"}}' for name, key in FEATURES.items())
    always = f'#define ALWAYS "{" ".join(ALWAYS)} "\n'
    return always + f"static const struct {{ const char *key, *name; }} feature_names[] = {{\n  {rows}\n}};\n"


def features(shot: Snapshot) -> frozenset[str]:
    """Features that the processor has and the kernel enables, in Linux's names.

    An Arm host with SVE also has "sve_vl<bits>", its vector length.
    """
    flags: set[str] = set()
    if shot.machine == "aarch64":
        flags |= {name for bit, name in HWCAP.items() if shot.hwcap >> bit & 1}
        flags |= {name for bit, name in HWCAP2.items() if shot.hwcap2 >> bit & 1}
        if shot.sve_bytes:
            flags.add(f"sve_vl{8 * shot.sve_bytes}")
        if not flags:  # no auxiliary vector
            flags |= set((processors(shot.cpuinfo) or [{}])[0].get("Features", "").split())
        return frozenset(flags or BASELINE["aarch64"])
    for first in processors(shot.cpuinfo)[:1]:
        flags |= set(first.get("flags", "").split())
        letters, *words = first.get("isa", "").removeprefix("rv64").split("_")  # as in rv64imafdcv_zicsr_zvfh
        flags |= {*letters, *words, *(["zvl128b"] if "v" in letters else [])}
    if shot.cpuid:
        decoded = _decoded(shot)
        enabled = {name for name, is_enabled in decoded.items() if is_enabled}
        flags = flags - (decoded.keys() - enabled) | enabled & UNLISTED if flags else enabled
    if not shot.tiles:
        flags = {name for name in flags if not name.startswith("amx_")}
    return frozenset(flags | BASELINE.get(shot.machine, set()))
