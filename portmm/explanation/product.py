"""Explanations of products, on CPUs and devices.

Owns `explain`. Explaining never compiles: it makes the problem that `matmul` would make, gets the schedule from
`dispatch`, and lowers and emits it. So other machines than this one can be explained as well; operands on a device that
is not here are assumed contiguous and aligned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from portmm.arrays import libraries
from portmm.arrays.call import problem_of_call
from portmm.arrays.numpy_arrays import as_operand
from portmm.dispatch import config, cpu_kernels, cpu_race, schedule_choice
from portmm.errors import ScheduleError, TargetError
from portmm.explanation.record import Explanation
from portmm.host import detect
from portmm.host.calibrate import measured
from portmm.schedule.program import VECTOR_BYTES, device_of
from portmm.spec.dtype import BY_NAME
from portmm.spec.problem import Problem
from portmm.target.clouds import size_of
from portmm.target.target import Target, instance


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
    """A number of threads."""
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
) -> Explanation:
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
        A record that prints, with all that it prints as attributes; for a device that is not here, for contiguous
        and aligned operands.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes do not match, the product is empty, or `threads` is negative.
        TargetError: there is no target of that name.
        ScheduleError: the target has no schedule for the problem.
    """
    if libraries.on_device(a) or libraries.on_device(b):
        return _of_arrays(a, b, out, epilogue, grouped=grouped)
    machine = target_called(target)
    family = instance(target) if isinstance(target, str) else None
    if threads is None:
        threads = config.get_num_threads() if target is None else machine.cores
    about, cores = _about(str(target), machine) if family else ((), 0)
    threads = _positive(threads) or max(1, cores or machine.cores)
    called = target is None and threads == config.get_num_threads()

    def answer(p: Problem, notes: tuple[str, ...] = ()) -> Explanation:
        problem = p if deterministic is None else replace(p, deterministic=deterministic)
        return _explained(problem, machine, threads, (*about, *notes), called=called)

    if isinstance(a, Problem):
        if b is not None or out is not None:
            raise ValueError("a Problem describes both operands; pass no b and no out")
        return answer(a)
    if grouped:
        return answer(_group(a, b, dtype, machine))
    if epilogue is not None:
        word = dtype if out is None else out.dtype
        return answer(*_fused(a, b, word, epilogue, typed_result=out is not None))
    problem = problem_of_call(a, b, out, dtype=dtype, static=static)
    try:
        return answer(problem)
    except ScheduleError:
        if problem.b != "packed":
            raise
    note = f"the weight is packed as {b.family}, which does not suit this call: matmul unpacks it"
    return answer(problem_of_call(a, tuple(b.shape), out, dtype=b.dtype.name), (note,))


def _fused(
    a: Any, b: Any, dtype: Any, epilogue: Callable[..., Any], *, typed_result: bool
) -> tuple[Problem, tuple[str, ...]]:
    """The problem of a product with an epilogue in the host's memory, and notes.

    Args:
        a: an array.
        b: an array, or a packed weight.
        dtype: of the result, if `typed_result`.
        epilogue: the function.
        typed_result: the user has passed a result type.
    """
    from portmm.ops.epilogues import VALUES, rank_of
    from portmm.ops.product_kernel import HostProduct, better_unfused, operand_b
    from portmm.trace.tracer import trace

    left, right = as_operand(a, "a"), operand_b(b)
    call = HostProduct(left, right, np.dtype(dtype) if typed_result else None, None)
    traced, *_ = trace(epilogue, VALUES, by_value=False, rank=rank_of(left.shape, right.shape))
    try:
        step = call.step(traced)
        p, *_ = call.question(step)
    except ScheduleError as error:
        return problem_of_call(a, b), (f"the epilogue is a separate kernel, over the rows of the product: {error}",)
    if better_unfused(p, step):
        return replace(p, fused=""), ("the epilogue is a separate kernel: predicted to be faster",)
    return p, ("the epilogue is part of the kernel",)


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
) -> Explanation:
    """The explanation; where it is of what calls do now (`called`), with what a race found."""
    if not p.flops:
        raise ValueError(f"{p} has nothing to multiply, so no kernel is needed")
    if target.device is not None:
        return explained(replace(p, tf32=p.tf32 or config.rounds(p.dtype)), target, notes=notes)
    from portmm.codegen.c_kernel import source

    choice = schedule_choice.choose(p, target, threads)
    choice = cpu_race.raced(choice) if called else choice
    kernel = cpu_kernels.kernel_of(choice.schedule, cpu_kernels.isa_of(choice.schedule, target))
    return Explanation(choice, (kernel,), "c", source(kernel), notes)


# -- devices ---------------------------------------------------------------------------


def _of_arrays(a: Any, b: Any, out: Any, epilogue: Any, *, grouped: bool = False) -> Explanation:
    """The explanation for arrays on a device, with their device and layouts."""
    from portmm.arrays import grid_call
    from portmm.dispatch.machine import machine_of
    from portmm.ops.grid_product import adopted, question

    x = adopted(a, b, out)
    call, notes = question(replace(x, ends=x.a) if grouped else x, epilogue)
    p, vectors = call.problem, call.vectors
    if not p.flops:
        raise ValueError(f"{p} has nothing to multiply, so no kernel is needed")
    on = machine_of(x.a)
    if call.outer is None:
        once = "".join(side for side in "ab" if not call.values[f"{side}_batch"])
        sides, seconds = grid_call.faster(p, on.target, vectors, once)
        notes += grid_call.copy_notes(p, sides, seconds)
        p, vectors = grid_call.after_copies(p, sides), grid_call.vectors_after_copies(p, vectors, sides)
    return explained(p, on.target, on.language, notes, vectors)


def explained(
    p: Problem, target: Target, language: str = "", notes: tuple[str, ...] = (),
    moved: tuple[int, int, int] | None = None,
) -> Explanation:  # fmt: skip
    """The explanation for a problem on a device.

    Raises:
        ScheduleError: the device has no schedule for the problem.
    """
    from portmm.codegen.lower import lower_grid
    from portmm.dispatch.machine import source

    device = device_of(target)
    language = language or device.language
    target = replace(target, device=replace(device, language=language))
    choice = schedule_choice.choose(p, target, vectors=moved or _vectors(p))
    kernels = lower_grid(choice.schedule, cpu_kernels.isa_of(choice.schedule, target))
    return Explanation(choice, kernels, language, "\n".join(source(x, language) for x in kernels), notes)


def _vectors(p: Problem) -> tuple[int, int, int]:
    """Elements of a vector access to A, B and C, for contiguous and aligned operands."""
    near = {"a": {"row": p.k, "col": p.m}, "b": {"row": p.n, "col": p.k}, "c": {"row": p.n}}
    sides = zip("abc", (p.a, p.b, p.c), p.types, strict=True)
    return tuple(math.gcd(near[x].get(at, 1), VECTOR_BYTES // BY_NAME[t].bytes) for x, at, t in sides)  # type: ignore[return-value]
