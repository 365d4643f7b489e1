"""Explanations of schedules that were selected for the CPU.

Owns `explain` and the record it returns. Explaining never compiles: it makes the
problem that `matmul` would make, gets the schedule from `dispatch`, and lowers and emits it.
So other machines than this one can be explained as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Any

from portmm.arrays import libraries
from portmm.arrays.problem_of import problem_of_call
from portmm.codegen.c_kernel import source
from portmm.dispatch import config, cpu_kernels, cpu_selection, cpu_units
from portmm.errors import ScheduleError, TargetError
from portmm.explanation.summary import Selected
from portmm.host import detect
from portmm.host.calibrate import measured
from portmm.schedule import cpu_textbook
from portmm.schedule.cpu_cost_table import DEFAULT_BYTES_PER_CYCLE
from portmm.schedule.legality import footprint
from portmm.schedule.text import spell
from portmm.spec.problem import Problem
from portmm.target.target import Target, instance
from portmm.util.text import field, flop, size, terms, time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from portmm.build.shared_object import Artifact
    from portmm.explanation.gpu import GridExplanation
    from portmm.ir.nodes import Kernel
    from portmm.target.atom import Atom

SHOWN = 5
"""Runners-up in the printed form; all are in the record."""


@dataclass(frozen=True, slots=True)
class Explanation(Selected):
    """An explanation of a problem's kernel: schedule, prediction, source. `print` it.

    Attributes:
        choice: the problem, the target, the selected schedule and the runners-up.
        kernel: the loop nest of the schedule.
        source: the C that is emitted for it.
        notes: further remarks.
    """

    kernel: Kernel
    source: str
    notes: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """Threads that share the work."""
        return self.choice.workers

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags of the instruction set."""
        return self.kernel.isa.flags

    @property
    def rates(self) -> dict[str, tuple[float, str]]:
        """Rates of the prediction -> value, and its origin: "measured", "described" or "assumed".

        Multiply-adds in GFLOP/s or, unless measured, instructions per cycle;
        memory levels in GB/s or, unless measured, bytes per cycle.
        """
        target, atom = self.target, self.kernel.atom.name
        known = _rate(target, atom)
        rates_ = {atom: known} if known else {}
        for name, assumed in DEFAULT_BYTES_PER_CYCLE.items():
            level = target.level(name)
            if level is None and name != "memory":
                continue
            described = level.load_bytes_per_cycle if level else 0.0
            rates_[name] = (described, "described") if described else (assumed, "assumed")
        return rates_ | {x: (target.measured[x], "measured") for x in rates_ if x in target.measured}

    @property
    def runs_here(self) -> bool:
        """Test whether this machine can run the kernel."""
        return not detect.missing(self.kernel.isa) and self.target.arch in ("any", detect.host().arch)

    @property
    def artifact(self) -> Artifact:
        """The compiled kernel: built now, or loaded from the cache.

        For another architecture it is cross-compiled.

        Raises:
            NoCompilerError: there is no compiler for the target.
            BuildError: the compiler failed.
        """
        from portmm.build.shared_object import build

        arch = None if self.target.arch == "any" else self.target.arch
        return build(self.source, flags=self.flags, arch=arch, name=self.kernel.name)

    def as_dict(self) -> dict[str, Any]:
        """All fields but the artifact, in types of JSON."""
        return {
            "problem": {**asdict(self.problem), "flops": self.problem.flops, "bytes": self.problem.bytes},
            "target": self.target.name,
            "rates": {name: {"value": value, "origin": origin} for name, (value, origin) in self.rates.items()},
            "threads": self.workers,
            "origin": self.origin,
            "schedule": spell(self.schedule),
            "description": str(self.schedule),
            "cost": asdict(self.cost),
            "gflops": self.gflops,
            "runners_up": [
                {"schedule": spell(s), "description": str(s), "cost": asdict(cost)} for s, cost in self.runners_up
            ],
            "kernel": self.kernel.name,
            "flags": list(self.flags),
            "runs_here": self.runs_here,
            "notes": list(self.notes),
            "source": self.source,
        }

    def summary(self) -> str:
        """The printed form without the source."""
        return "\n".join(line.rstrip() for line in _lines(self))

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.source}"


def _rate(target: Target, atom: str) -> tuple[float, str] | None:
    """The rate of an atom's multiply-adds: GFLOP/s if measured, else instructions per cycle."""
    if atom in target.measured:
        return target.measured[atom], "measured"
    return (target.rates[atom], "described") if atom in target.rates else None


def _lines(x: Explanation) -> Iterator[str]:
    p, target, s = x.problem, x.target, x.schedule
    yield field("problem", f"{p}; {flop(p.flops)}, at least {size(p.bytes)} moved")
    if p.fused:
        yield field("fused", p.fused)
    yield field("target", f"{target.name}: {target.title}{'' if x.runs_here else ' (cannot run here)'}")
    yield field("", ", ".join(isa.name for isa in target.isas))
    yield from _rates(x)
    yield field("chosen", f"{x.origin}, from {len(x.runners_up) + 1} candidates, for {_threads(x.workers)}")
    if x.origin == cpu_textbook.ORIGIN:
        rule = f"a textbook blocking within {1 - cpu_textbook.WITHIN:.0%} of the least predicted time"
        yield field("", f"no search stored for this chip: {rule}")
    yield field("schedule", str(s))
    yield from _tiles(x)
    yield field("predicted", f"{time(x.seconds)}, {x.gflops:.4g} GFLOP/s; {x.cost.bound} decides")
    yield field("", f"the largest of {terms(x.cost.overlapped)}")
    yield field("", f"plus {terms(x.cost.added)}")
    yield from _others(x)
    yield field("kernel", f"{x.kernel.name}, workspace {size(cpu_kernels.workspace_bytes(x.kernel, p, x.workers))}")
    yield field("", f"portmm emit --schedule {quote(spell(s))}")
    yield field("flags", " ".join(x.flags) or "none beyond those of every kernel")
    yield field("artifact", "built on first access, unless the cache has it")
    for note in x.notes:
        yield field("note", note)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _rates(x: Explanation) -> Iterator[str]:
    for name, (value, origin) in x.rates.items():
        level = x.target.level(name)
        if not level and name != "memory":
            yield field("", _speed(x.kernel.atom, (value, origin)))
            continue
        counted = x.target.counted(name)
        part = f", {size(counted)} counted for one core" if level and counted != level.bytes else ""
        extent = f"{name}, {size(level.bytes)}{part}" if level else name
        unit = "GB/s" if origin == "measured" else "bytes a cycle"
        yield field("", f"{extent}: {value:.4g} {unit}, {origin}")


def _speed(atom: Atom, rate: tuple[float, str]) -> str:
    value, origin = rate
    unit = "GFLOP/s" if origin == "measured" else f"macs of {atom.m}x{atom.n}x{atom.k} a cycle"
    return f"{atom.name}: {value:.4g} {unit}, {origin}"


def _tiles(x: Explanation) -> Iterator[str]:
    """Lines with the footprint of each tile in its level of memory."""
    s, target = x.schedule, x.target
    for name, needs in footprint(s, x.problem, x.kernel.atom).items():
        level = target.level(name)
        if level:
            yield field("", f"{name}: {size(needs)} of {size(level.bytes)}")
        elif name == "registers":
            yield field("", f"registers: {needs} of {x.kernel.isa.registers}")


def _others(x: Explanation) -> Iterator[str]:
    if not x.runners_up:
        yield field("runners-up", "none")
    for i, (s, cost) in enumerate(x.runners_up[:SHOWN]):
        slower = f"{cost.seconds / x.seconds:.3g}x" if x.seconds else ""
        yield field("runners-up" if i == 0 else "", f"{time(cost.seconds)} ({slower}) {s}")
        yield field("", f"  {terms(cost.overlapped)}; plus {terms(cost.added)}")
    yield from _other_units(x)
    if len(x.runners_up) > SHOWN:
        yield field("", f"and {len(x.runners_up) - SHOWN} more in .runners_up")


def _other_units(x: Explanation) -> Iterator[str]:
    """Lines with the best schedule of each instruction set not shown yet."""
    seen = {x.schedule.isa, *(s.isa for s, _ in x.runners_up[:SHOWN])}
    for s, cost in x.runners_up[SHOWN:]:
        isa = x.target.isa(s.isa)
        atom = isa.atom(s.dtype, s.atom.lanes) if isa else None
        if s.isa in seen or atom is None:
            continue
        seen.add(s.isa)
        rate = _rate(x.target, atom.name)
        speed = f" ({_speed(atom, rate)})" if rate else ""
        yield field("", f"{time(cost.seconds)} ({cost.seconds / x.seconds:.3g}x) by {s.isa}{speed}: {s}")


def target_called(name: str | Target | None) -> Target:
    """The target of a name, whether or not this machine can run its code.

    Args:
        name: None for the current target; a chip, an ISA or a .toml file, resolved
            as in `config` if this machine can run them.

    Raises:
        TargetError: there is no target of that name.
    """
    if isinstance(name, Target):
        return name
    if name is None:
        return config.target()
    try:
        return measured(detect.resolve(name))
    except TargetError:
        return detect.described(name)


def explain(
    a: Any,
    b: Any = None,
    *,
    out: Any = None,
    dtype: str = "f32",
    target: str | Target | None = None,
    threads: int | None = None,
    deterministic: bool | None = None,
    static: bool = False,
    epilogue: Callable[..., Any] | None = None,
    grouped: bool = False,
) -> Explanation | GridExplanation:
    """Explain how a product would be computed, without compiling anything.

    Args:
        a: an example array or a shape (..., m, k); or a `Problem`, without `b` and `out`.
        b: an example array, a shape (..., k, n), or a weight from `pack`.
        out: an example of the output; without one, C-contiguous.
        dtype: of operands that are shapes, unless an array determines it: "f32", "f64", "bf16",
            "f16", "s8", or those of A, B and C as in "u8-s8-s32".
        target: a chip, an ISA, a .toml file or a cloud instance, here or not; None for the current target.
        threads: the most to use; 0 for every core; None for the current setting, or,
            with a `target`, for its cores.
        deterministic: as in `config`; None for the current setting, or the `Problem`'s.
        static: for this size only, as `plan` computes.
        epilogue: the epilogue function, as in `matmul`; `a` and `b` are arrays then.
        grouped: as `grouped_matmul` computes, (rows, k) by (groups, k, n), with rows distributed evenly; in the
            host's memory, one of the groups.

    Returns:
        A record that prints, with all that it prints as attributes; for a device a
        `GridExplanation`, for contiguous and aligned operands.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes do not match, or the product is empty.
        TargetError: there is no target of that name.
        ScheduleError: the target has no schedule for the problem.
    """
    if libraries.on_device(a) or libraries.on_device(b):
        from portmm.explanation import gpu as gpu_explanation

        return gpu_explanation.of_arrays(a, b, out, epilogue, grouped=grouped)
    machine = target_called(target)
    family = instance(target) if isinstance(target, str) else None
    if threads is None:
        threads = config.get_num_threads() if target is None else machine.cores
    threads = threads or max(1, machine.cores)
    explanation = _explanation(a, b, out, (dtype, deterministic, static), machine, threads, epilogue, grouped=grouped)
    return replace(explanation, notes=(family.sentence(str(target)), *explanation.notes)) if family else explanation


def _explanation(  # noqa: PLR0917 - the arguments of `explain`
    a: Any,
    b: Any,
    out: Any,
    how: tuple[str, bool | None, bool],
    machine: Target,
    threads: int,
    epilogue: Callable[..., Any] | None,
    *,
    grouped: bool,
) -> Explanation | GridExplanation:
    """The explanation for a machine: see `explain`."""
    dtype, deterministic, static = how
    if isinstance(a, Problem):
        if b is not None or out is not None:
            raise ValueError("a Problem describes both operands; pass no b and no out")
        return _explained(_with(a, deterministic), machine, threads)
    if grouped:
        return _explained(_with(_group(a, b, dtype, machine), deterministic), machine, threads)
    if epilogue is not None:
        from portmm.ops.fused_matmul_kernel import fused_problem

        problem, notes = fused_problem(
            a, b, dtype if out is None else out.dtype, epilogue, typed_result=out is not None
        )
        return _explained(_with(problem, deterministic), machine, threads, notes)
    problem = _with(problem_of_call(a, b, out, dtype=dtype, static=static), deterministic)
    try:
        return _explained(problem, machine, threads)
    except ScheduleError:
        if problem.b != "packed":
            raise
    problem = _with(problem_of_call(a, tuple(b.shape), out, dtype=b.dtype.name), deterministic)
    note = f"the weight is packed as {b.family}, which does not suit this call: matmul unpacks it"
    return _explained(problem, machine, threads, (note,))


def _group(a: Any, b: Any, dtype: str, target: Target) -> Problem:
    """The problem of groups of equal sizes on a device; for a CPU that of one group."""
    (rows, k), (groups, *one) = (x if isinstance(x, tuple) else x.shape for x in (a, b))
    each = -(-rows // max(groups, 1))
    word = dtype if isinstance(a, tuple) else a.dtype.name
    p = problem_of_call((each, k), tuple(one), dtype=word)
    return p if target.device is None else replace(p, batch=groups, grouped=True)


def _with(p: Problem, deterministic: bool | None) -> Problem:
    return p if deterministic is None else replace(p, deterministic=deterministic)


def _explained(p: Problem, target: Target, threads: int, notes: tuple[str, ...] = ()) -> Explanation | GridExplanation:
    if not p.flops:
        raise ValueError(f"{p} has nothing to multiply, so no kernel is needed")
    if target.device is not None:
        from portmm.explanation import gpu as gpu_explanation

        return gpu_explanation.explained(replace(p, tf32=p.tf32 or config.rounds(p.dtype)), target, notes=notes)
    choice = cpu_selection.choose(p, target, threads)
    kernel = cpu_kernels.kernel_of(choice.schedule, cpu_units.isa_of(choice.schedule, target))
    return Explanation(choice, kernel, source(kernel), notes)
