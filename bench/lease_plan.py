"""The plans of the commands of `lease.py`: phases, the most valuable first, and seconds of each.

A phase is data: a name, the seconds after which the next phase goes first, and jobs as `gpu.py` has them. What a phase
had no time for is done last.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import gpu_cases
from gpu_cases import Case

KINDS = [f"200x264x328:{dtype}:{b}" for dtype in ("f32", "bf16", "f16", "s8", "e4m3") for b in ("col", "row")]
"""Products of which every kind of kernel is checked."""
CHECK_PATIENCE, PATIENCE, LONG_PATIENCE = 25.0, 40.0, 70.0
"""Seconds of silence that end a check, a case that is timed, and one of which PyTorch compiles a peer."""
COMPILED = ("epilogue", "int8")
"""Sections of those."""


@dataclass(frozen=True)
class Phase:
    """Jobs that belong together.

    Attributes:
        name: of the phase.
        seconds: after which the next phase goes first.
        jobs: dicts, as `gpu.work` takes them.
    """

    name: str
    seconds: float
    jobs: tuple


def _job(kind, case, name=None, **more):
    named = name or (case.name if kind == "measure" else f"{kind} {case.name}")
    return {"do": kind, "name": named, "case": asdict(case), **more}


def _phase(name, seconds, jobs):
    return Phase(name, seconds, tuple({**x, "phase": name} for x in jobs))


def _timed(section, seconds, *, load=False):
    """The cases of a section; `load`: each contender runs alone as well, while clocks are sampled."""
    patience = LONG_PATIENCE if section in COMPILED else PATIENCE
    jobs = [_job("measure", x, patience=patience, load=load, timed=True) for x in gpu_cases.cases((section,))]
    return _phase(section, seconds, jobs)


def _of(*given):
    return Case("schedules", *given)


def _product(text):
    size, dtype, b = text.split(":")
    return _of("dense", *map(int, size.split("x")), dtype, b)


FAMILIES = (
    _of("epilogue", 200, 264, 328, "bf16", "row"), _of("bias", 200, 264, 328, "bf16", "col", "gelu"),
    _of("int8", 200, 264, 328, "s8"), _of("tf32", 200, 264, 328, "f32", "col"),
    _of("codes", 40, 264, 512, "bf16", "row"), _of("codes", 3, 264, 512, "bf16", "row"),
    _of("codes", 300, 264, 512, "f16", "row"), _of("grouped", 200, 264, 328, "bf16", "row", "5"),
    _of("dense", 3, 264, 1024, "bf16", "col"), _of("dense", 3, 264, 1024, "f32", "row"),
    _of("attention", 200, 4, 128, "bf16", "row", "causal"), _of("attention", 200, 4, 64, "f16", "row"),
    _of("attention", 3, 8, 128, "bf16", "row", "keys=1100 group=4"),
    _of("attention", 100, 2, 80, "f32", "row", "causal"),
)  # fmt: skip
"""Calls of which every kind of kernel is checked, beside products."""


def checks():
    """Every section's kinds at small sizes, and every kind of kernel of products and other calls."""
    found = [_job("measure", x, check=True, patience=CHECK_PATIENCE) for x in gpu_cases.tiny()]
    every = [*map(_product, KINDS), *FAMILIES]
    return found + [_job("check", x, f"check {x.name} {x.kind}", patience=CHECK_PATIENCE) for x in every]


def _surveys(seconds, every):
    jobs = [_job("survey", x, f"survey {x.name} {x.kind}", patience=CHECK_PATIENCE, timed=True) for x in every]
    return _phase("surveys", seconds, jobs)


LOOKED = 2
"""Cases of each section that a look takes, its first."""


def look():
    """All checks, the first cases of each section, and the candidates of four kinds of calls."""
    notes = _phase("notes", 15, [{"do": "note", "name": "notes", "case": {}, "timed": True}])
    timed = [x for name in gpu_cases.SECTIONS if name not in COMPILED for x in gpu_cases.cases((name,))[:LOOKED]]
    jobs = [
        _job("measure", x, patience=PATIENCE, load=x.section in ("squares", "attention"), timed=True) for x in timed
    ]
    survey = (
        _product("4096x4096x4096:bf16:col"), _of("attention", 4096, 64, 128, "bf16", "row", "causal"),
        _of("codes", 16, 4096, 4096, "bf16", "row"), _product("16x4096x4096:bf16:col"),
        _product("4096x4096x4096:s8:col"), _product("2048x2048x2048:f32:row"),
    )  # fmt: skip
    return [_phase("checks", 110, checks()), notes, _phase("first of each section", 120, jobs), _surveys(90, survey)]


def first():
    """Checks, and what is bound by arithmetic."""
    notes = _phase("notes", 15, [{"do": "note", "name": "notes", "case": {}, "timed": True}])
    survey = (
        _product("4096x4096x4096:bf16:col"), _of("attention", 4096, 64, 128, "bf16", "row", "causal"),
        _product("8192x8192x8192:bf16:col"), _product("4096x4096x4096:e4m3:col"), _product("4096x4096x4096:s8:col"),
        _product("4096x28672x4096:bf16:col"), _product("1024x1024x1024:bf16:col"), _product("2048x2048x2048:bf16:row"),
        _of("attention", 16384, 32, 128, "bf16", "row"), _product("512x4096x4096:bf16:col"),
    )  # fmt: skip
    return [
        _phase("checks", 110, checks()), _timed("squares", 45, load=True), _timed("prefill", 110, load=True),
        _timed("attention", 60, load=True), _timed("fp8", 25, load=True), _timed("int8", 40, load=True),
        notes, _surveys(200, survey),
    ]  # fmt: skip


def second():
    """Cases bound by memory or by calls, and those that follow products."""
    survey = (
        _product("16x4096x4096:bf16:col"), _of("codes", 16, 4096, 4096, "bf16", "row"),
        _of("epilogue", 3840, 4096, 4096, "bf16", "row"), _product("1x4096x4096:bf16:col"),
        _of("bias", 4096, 3072, 768, "bf16", "col", "gelu"), _of("codes", 512, 4096, 4096, "bf16", "row"),
        _of("grouped", 4096, 14336, 4096, "bf16", "row", "8"), _product("64x28672x4096:bf16:col"),
        _of("attention", 1, 512, 128, "bf16", "row", "keys=8192 group=4"), _product("2048x2048x2048:f32:row"),
        _of("tf32", 4096, 4096, 4096, "f32", "col"), _of("codes", 1, 4096, 14336, "bf16", "row"),
        _of("grouped", 512, 14336, 4096, "bf16", "row", "8"), _product("512x512x512:f32:row"),
    )  # fmt: skip
    notes = _phase("notes", 15, [{"do": "note", "name": "notes", "case": {}, "timed": True}])
    return [
        _timed("decode", 90), _timed("w4a16", 75), _timed("epilogue", 35), _timed("bias", 40), _timed("grouped", 25),
        _timed("tf32", 25, load=True), _timed("f32", 30), _timed("few", 15), _timed("rows", 20),
        _timed("conv", 30), notes, _surveys(200, survey),
    ]  # fmt: skip


def third():
    """The prepared cases that the tools of `lease.tools` run: see `PROFILED`."""
    return [_phase("checks", 60, checks())]


COMMANDS = {0: look, 1: first, 2: second, 3: third}
TOOLS = {"memcheck": 120.0, "racecheck": 130.0, "synccheck": 50.0}
"""Seconds of each tool of compute-sanitizer."""
PROFILE = 40.0
"""Seconds of one case under ncu."""
PROFILED = (
    "squares 8192x8192x8192 bf16 col", "squares 4096x4096x4096 bf16 col", "attention 4096x64x128 bf16 row causal",
    "decode 16x28672x4096 bf16 col 8B gate/up", "w4a16 16x4096x14336 bf16 row 8B down", "fp8 8192x8192x8192 e4m3 col",
    "epilogue 3840x4096x4096 bf16 row", "w4a16 512x4096x4096 bf16 row 8B O", "decode 1x4096x4096 bf16 col 8B O",
    "int8 4096x4096x4096 s8 col", "grouped 4096x14336x4096 bf16 row 8", "bias 4096x4096x4096 bf16 col gelu",
    "few 1x512x128 bf16 row keys=8192 group=4", "tf32 4096x4096x4096 f32 col", "f32 4096x4096x4096 f32 row",
    "rows 8192x4096x1 bf16 row softmax", "attention 16384x32x64 bf16 row",
)  # fmt: skip


def thinned(phase):
    """The same phase with the first job of each kind, and the last: for a rehearsal."""
    found = []
    for kind in dict.fromkeys(x["do"] for x in phase.jobs):
        first, *rest = (x for x in phase.jobs if x["do"] == kind)
        found += [first, *rest[-1:]]
    return Phase(phase.name, phase.seconds, tuple(found))
