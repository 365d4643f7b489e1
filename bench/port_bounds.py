"""Main loops of kernels beside what the ports of processors allow that need not be here, by LLVM's models of these.

    python bench/port_bounds.py [CHIP ...]

For each type that a chip multiplies, the kernel that the cost model selects there is compiled, and the innermost loop
with most accumulators goes through llvm-mca. Prints cycles of an iteration, those that the ports allow for its
instructions (no latency, no order), those that they allow for its multiply-adds alone, and both as shares of the
first. Operands are in L1. Units of tiles have no model, and Zen 5 none of its own.

`pytest bench/test_port_bounds.py` compares the shares with stored ones; `--store` writes these, and the table of
docs/notes/port-bounds.md.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from portmm.build.compiler import command, find_compiler
from portmm.codegen.c_kernel import source
from portmm.codegen.lower import lower
from portmm.dispatch.cpu_kernels import family, family_of_codes, isa_of
from portmm.dispatch.schedule_choice import choose
from portmm.errors import ScheduleError
from portmm.schedule.text import spell
from portmm.spec.problem import Problem
from portmm.target.target import load_target

CHIPS = {
    "haswell": "haswell",
    "skylake_sp": "skylake-avx512",
    "cascade_lake": "cascadelake",
    "icelake_sp": "icelake-server",
    "sapphire_rapids": "sapphirerapids",
    "granite_rapids": "graniterapids",
    "zen2": "znver2",
    "zen3": "znver3",
    "zen4": "znver4",
    "neoverse_n1": "neoverse-n1",
    "neoverse_n2": "neoverse-n2",
    "neoverse_v1": "neoverse-v1",
    "neoverse_v2": "neoverse-v2",
}
"""Described chips -> LLVM's names of their processors."""
SIZES = (384, 768, 512)
TYPES = {
    "f32": ("f32", "row"),
    "f32 packed": ("f32", "packed"),
    "f64": ("f64", "row"),
    "f16 packed": ("f16", "packed"),
    "bf16 packed": ("bf16", "packed"),
    "s8 packed": ("s8-s8-s32", "packed"),
    "u8 packed": ("u8-s8-s32", "packed"),
    "u4 codes": ("f32-u4-f32", "codes"),
}
MULTIPLY = re.compile(
    r"\t(vfn?m(add|sub)\d*[ps][sdh]|v?dpbf16ps|vpdp\w+|vp?maddu?w[bd]\w*|v?pmaddwd|v?pmaddubsw|mul[ps][sd]|"
    r"fml[as]l?[2bt]?|[su]dot|usdot|[su]mmla|usmmla|bfdot|bfmmla|bfmlal[bt]|[su]mlal[2bt]?)\b"
)
"""Instructions that multiply and add."""
ADD = re.compile(r"\tv?p?add[pd][sd]?\t.*mm")
"""Instructions that add products of others: they have accumulators."""
JUMP = re.compile(r"\t(?:j[a-z]+|b\.?[a-z]*|cbn?z\s+\w+,|tbn?z\s+\w+,\s*#?\d+,)\s+(\.L\w+)")
"""Jumps, with their labels."""
BROADCAST = re.compile(r"\tv(?:p)?broadcast(?:s[sd]|[bwdq])(\t.*\(.*)")
"""Broadcasts from memory, which AMD's load units do alone; LLVM's models give them two operations on FP pipes, too."""


ITERATIONS = 300
BASELINE = Path(__file__).parent / "baselines" / "port_bounds.json"
NOTE = Path(__file__).parents[1] / "docs" / "notes" / "port-bounds.md"
TABLE = "<!-- made by pytest bench/test_port_bounds.py --store -->\n"


@dataclass(frozen=True, slots=True)
class Bound:
    """An iteration of a loop: cycles by LLVM's model.

    Attributes:
        chip: a described chip.
        dtype: a key of `TYPES`.
        schedule: as text.
        multiplies: instructions that multiply and add.
        instructions: all of them.
        cycles: of an iteration.
        peak: cycles if ports bound the multiply-adds, and nothing else.
        ports: cycles if ports bound all instructions, and nothing else.
    """

    chip: str
    dtype: str
    schedule: str
    multiplies: int
    instructions: int
    cycles: float
    peak: float
    ports: float

    @property
    def of_ports(self):
        """Share of what the ports allow."""
        return self.ports / self.cycles

    @property
    def of_peak(self):
        """Share of the multiply-adds that the ports allow if there is nothing else."""
        return self.peak / self.cycles


def main_loop(text):
    """The lines of the innermost loop with most accumulators; empty if there is none."""
    lines = [x for x in text.splitlines() if re.match(r"\.L\w+:|\t[a-z]", x) and not x.startswith("\t.")]
    labels = {x[:-1]: i for i, x in enumerate(lines) if x.startswith(".L")}
    best = []
    for end, line in enumerate(lines):
        jump = JUMP.match(line)
        start = labels.get(jump[1], end) if jump else end
        inner = [x for x in lines[start : end + 1] if not x.startswith(".L")]
        backward = [
            j for i, x in enumerate(lines[start:end], start) if (j := JUMP.match(x)) and labels.get(j[1], end) <= i
        ]
        if not backward and size(inner) > size(best):
            best = inner
    return best


def size(lines):
    """Accumulators of a loop, and its multiply-adds."""
    macs = [x for x in lines if MULTIPLY.match(x)]
    into = [x.split() for x in lines if ADD.match(x)] or [x.split() for x in macs]
    # AT&T's syntax has the destination last, and its registers begin with a percent sign.
    return len({x[-1] if "%" in x[-1] else x[1] for x in into}), len(macs)


def model(lines, arch, cpu, tool):
    """Cycles of an iteration of a loop, and of one bounded by ports alone."""
    if cpu.startswith("znver"):
        lines = [BROADCAST.sub(r"\tvmovups\1", x) for x in lines]
    command = [tool, "-json", f"-mtriple={arch}-linux-gnu", f"-mcpu={cpu}", f"-iterations={ITERATIONS}"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout[done.stdout.index("{") :])["CodeRegions"][0]["SummaryView"]
    return summary["TotalCycles"] / ITERATIONS, summary["BlockRThroughput"]


def bound(chip, kind, tool):
    """The main loop of the selected kernel of a chip for a type; None if no unit computes it, or none has a model."""
    target, (dtype, b) = load_target(chip), TYPES[kind]
    try:
        kept = ""
        if b == "packed":
            kept = family(dtype, target)
        elif b == "codes":
            kept = str(family_of_codes(target, 32))
        choice = choose(Problem(*SIZES, dtype, b=b, family=kept), target, tuned=False)
    except ScheduleError:
        return None
    s = choice.schedule
    if b == "codes":  # a single row is multiplied by vectors where others are by tiles
        s = next(x for x in (s, *(x for x, _ in choice.runners_up)) if x.program != "tiles")
    kernel = lower(s, isa_of(s, target))
    if kernel.atom.tiled:
        return None
    compiler = find_compiler(kernel.isa.arch)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.c").write_text(source(kernel))
        argv = [x for x in command(compiler, kernel.isa.flags, (), "kernel") if x not in ("-shared", "-nostdlib")]
        argv[argv.index("-o") :] = ["-S", "-o", "kernel.s"]
        subprocess.run(argv, cwd=folder, check=True, capture_output=True)
        lines = main_loop((Path(folder) / "kernel.s").read_text())
    cycles, ports = model(lines, kernel.isa.arch, CHIPS[chip], tool)
    _, peak = model([x for x in lines if MULTIPLY.match(x)], kernel.isa.arch, CHIPS[chip], tool)
    return Bound(chip, kind, spell(s), size(lines)[1], len(lines), round(cycles, 2), peak, ports)


def find_tool():
    """Path of llvm-mca; None without it."""
    return shutil.which("llvm-mca-19") or shutil.which("llvm-mca")


def of_chip(chip, tool):
    """The loops of a chip, one for each type."""
    return [one for kind in TYPES if (one := bound(chip, kind, tool)) is not None]


def load():
    """Stored loops, by chip."""
    rows = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    return {chip: [Bound(**x) for x in kept] for chip, kept in rows.items()}


def store(by_chip):
    """Write the loops of all chips, and their table."""
    BASELINE.write_text(json.dumps({chip: list(map(asdict, x)) for chip, x in by_chip.items()}, indent=1) + "\n")
    head, _, _ = NOTE.read_text().partition(TABLE)
    kinds = list(TYPES)
    lines = [f"| chip | {' | '.join(kinds)} |", f"| --- |{' --: |' * len(kinds)}"]
    for chip, kept in by_chip.items():
        shares = {x.dtype: f"{x.of_ports:.2f} ({x.of_peak:.2f})" for x in kept}
        lines.append(f"| {chip} | {' | '.join(shares.get(x, '') for x in kinds)} |")
    NOTE.write_text(head + TABLE + "\n".join(lines) + "\n")


def main(chips):
    """Print a line for each kernel."""
    for chip in chips or CHIPS:
        for x in of_chip(chip, find_tool()):
            shares = f"{x.cycles:6.1f} {x.ports:6.1f} {x.peak:6.1f} {x.of_ports:5.2f} {x.of_peak:5.2f}"
            print(f"{x.chip:16} {x.dtype:12} {x.multiplies:3} of {x.instructions:3} {shares}  {x.schedule}")


if __name__ == "__main__":
    main(sys.argv[1:])
