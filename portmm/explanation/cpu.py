"""Explanations of schedules that were selected for the CPU.

Owns `explain` and the record it returns. Explaining never compiles: it makes the
problem that `matmul` would make, gets the schedule from `dispatch`, and lowers and emits it.
So other machines than this one can be explained as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portmm.arrays import libraries
from portmm.arrays.call import problem_of_call
from portmm.codegen.c_kernel import source
from portmm.dispatch import config, cpu_kernels, cpu_race, schedule_choice
from portmm.errors import ScheduleError, TargetError
from portmm.explanation.summary import SHOWN, Selected
from portmm.host import detect
from portmm.host.calibrate import measured
from portmm.schedule import cpu_textbook
from portmm.schedule.cpu_table import DEFAULT_BYTES_PER_CYCLE
from portmm.schedule.legality import footprint
from portmm.spec.problem import Problem
from portmm.target.clouds import size_of
from portmm.target.model import CPU as MODEL
from portmm.target.target import Target, instance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from portmm.build.shared_object import Artifact
    from portmm.explanation.gpu import GridExplanation
    from portmm.ir.nodes import Kernel
    from portmm.schedule.roofline import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom


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

    def _data(self) -> tuple[dict[str, Any], dict[str, Any]]:
        rates = {name: {"value": value, "origin": origin} for name, (value, origin) in self.rates.items()}
        kernel = {"kernel": self.kernel.name, "flags": list(self.flags), "runs_here": self.runs_here}
        return {"rates": rates, "threads": self.workers}, kernel

    def _shown(self) -> tuple[str, dict[str, Any]]:
        needs = footprint(self.schedule, self.problem, self.kernel.atom)
        workspace = cpu_kernels.workspace_bytes(self.kernel, self.problem, self.workers)
        return "cpu.txt", {
            "footprint": needs, "workspace": workspace, "others": list(self._others()), "speed": _speed,
            "textbook": cpu_textbook.ORIGIN, "within": MODEL.within,
        }  # fmt: skip

    def _others(self) -> Iterator[tuple[Schedule, Cost, str]]:
        """The best schedule of each instruction set not shown yet, with the rate of its atom."""
        seen = {self.schedule.isa, *(s.isa for s, _ in self.runners_up[:SHOWN])}
        for s, cost in self.runners_up[SHOWN:]:
            atom = self.target.atom(s.isa, s.dtype, s.atom.lanes)
            if s.isa not in seen and atom is not None:
                seen.add(s.isa)
                rate = _rate(self.target, atom.name)
                yield s, cost, f" ({_speed(atom, rate)})" if rate else ""


def _rate(target: Target, atom: str) -> tuple[float, str] | None:
    """The rate of an atom's multiply-adds: GFLOP/s if measured, else instructions per cycle."""
    if atom in target.measured:
        return target.measured[atom], "measured"
    return (target.rates[atom], "described") if atom in target.rates else None


def _speed(atom: Atom, rate: tuple[float, str]) -> str:
    value, origin = rate
    unit = "GFLOP/s" if origin == "measured" else f"macs of {atom.m}x{atom.n}x{atom.k} a cycle"
    return f"{atom.name}: {value:.4g} {unit}, {origin}"


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


def _positive(threads: int) -> int:
    """A number of threads.

    Raises:
        ValueError: it is negative.
    """
    if threads < 0:
        raise ValueError(f"threads is {threads}; give a positive number, or 0 for every core")
    return threads


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
        ValueError: shapes do not match, the product is empty, or `threads` is negative.
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
    about, cores = _about(str(target), machine) if family else ((), 0)
    threads = _positive(threads) or max(1, cores or machine.cores)
    called = target is None and threads == config.get_num_threads()

    def answer(p: Problem, notes: tuple[str, ...] = ()) -> Explanation | GridExplanation:
        problem = p if deterministic is None else replace(p, deterministic=deterministic)
        return _explained(problem, machine, threads, (*about, *notes), called=called)

    if isinstance(a, Problem):
        if b is not None or out is not None:
            raise ValueError("a Problem describes both operands; pass no b and no out")
        return answer(a)
    if grouped:
        return answer(_group(a, b, dtype, machine))
    if epilogue is not None:
        from portmm.ops.product_kernel import fused_problem

        word = dtype if out is None else out.dtype
        return answer(*fused_problem(a, b, word, epilogue, typed_result=out is not None))
    problem = problem_of_call(a, b, out, dtype=dtype, static=static)
    try:
        return answer(problem)
    except ScheduleError:
        if problem.b != "packed":
            raise
    note = f"the weight is packed as {b.family}, which does not suit this call: matmul unpacks it"
    return answer(problem_of_call(a, tuple(b.shape), out, dtype=b.dtype.name), (note,))


def _about(name: str, machine: Target) -> tuple[tuple[str, ...], int]:
    """Notes on a cloud instance, and the number of its cores, 0 if its name does not say."""
    family = instance(name)
    assert family is not None  # noqa: S101 - it is the name of one
    size = size_of(name, family, arm=machine.arch == "aarch64")
    return (family.sentence(name), *(x for x in (str(size),) if x)), size.cores


def _group(a: Any, b: Any, dtype: str, target: Target) -> Problem:
    """The problem of groups of equal sizes on a device; for a CPU that of one group."""
    (rows, k), (groups, *one) = (x if isinstance(x, tuple) else x.shape for x in (a, b))
    each = -(-rows // max(groups, 1))
    word = dtype if isinstance(a, tuple) else a.dtype.name
    p = problem_of_call((each, k), tuple(one), dtype=word)
    return p if target.device is None else replace(p, batch=groups, grouped=True)


def _explained(
    p: Problem, target: Target, threads: int, notes: tuple[str, ...] = (), *, called: bool = False
) -> Explanation | GridExplanation:
    """The explanation; where it is of what calls do now (`called`), with what a race found."""
    if not p.flops:
        raise ValueError(f"{p} has nothing to multiply, so no kernel is needed")
    if target.device is not None:
        from portmm.explanation import gpu as gpu_explanation

        return gpu_explanation.explained(replace(p, tf32=p.tf32 or config.rounds(p.dtype)), target, notes=notes)
    choice = schedule_choice.choose(p, target, threads)
    choice = cpu_race.raced(choice) if called else choice
    kernel = cpu_kernels.kernel_of(choice.schedule, cpu_kernels.isa_of(choice.schedule, target))
    return Explanation(choice, kernel, source(kernel), notes)
