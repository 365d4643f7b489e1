"""Units and kernels of a CPU: what computes products of given types, or expressions, lowered, built and loaded once.

Owns the selection of units by rate, and the packed layouts of weights that follow from it; the memos of kernels and of
loaded code. Code of a schedule serves problems of many sizes, so that it is known with its workspace as a function of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import atom_of, lower
from portmm.dispatch import stored_kernels
from portmm.dispatch.stored_kernels import CODE, PROGRAM, Code, fields_of
from portmm.errors import BuildError, ScheduleError, TargetError
from portmm.ir.block_program import BlockProgram
from portmm.ir.block_program import spelled as program_spelled
from portmm.ir.index import meaning, parsed, spelled
from portmm.runtime import route_cache
from portmm.runtime.cpu import load_kernel, runtime
from portmm.schedule.candidates import PACKED_VECTORS, units
from portmm.schedule.cpu_table import macs_per_cycle
from portmm.schedule.schedule import Schedule
from portmm.schedule.text import spell
from portmm.spec.dtype import BY_NAME, CODES_KR, UNCONVERTED, USUAL_GROUP, types, unit
from portmm.spec.problem import Family, Problem
from portmm.target.atom import Atom
from portmm.target.isa import Isa
from portmm.target.supports import lacks
from portmm.util import locks
from portmm.util.memo import Memory, cached
from portmm.util.records import replace
from portmm.version import VERSION

if TYPE_CHECKING:
    from portmm.build.shared_object import Artifact
    from portmm.ir.nodes import Kernel
    from portmm.runtime.route_cache import RouteCache
    from portmm.spec.epilogue import Fused
    from portmm.target.target import Target

NARROW = (1, 3)
"""Vectors of columns that have a panel of their own width."""


def isa_of(s: Schedule, target: Target) -> Isa:
    """The ISA record that a schedule names.

    Raises:
        TargetError: the target lacks it.
    """
    isa = target.isa(s.isa)
    if isa is None:
        raise TargetError(f"schedule needs {s.isa}, which {target.name} does not have")
    return isa


def packing_unit(dtype: str, target: Target) -> tuple[Isa, Atom]:
    """The unit that weights for products of these types are packed for: the fastest one.

    Raises:
        ScheduleError: no atom of the target multiplies these types.
    """
    return max(units(dtype, target), key=lambda unit: _rate(unit, dtype, target))


def vector_unit(dtype: str, target: Target, channels: int = 0) -> tuple[Isa, Atom]:
    """The fastest vectors that sum products of a narrow float, or of its elements widened to f32, in f32.

    Units of several elements are excluded where they do not divide `channels`.

    Raises:
        ScheduleError: there are none.
    """
    pairs = units("f32", target) + (units(dtype, target) if dtype != "f32" else [])
    fits = [x for x in pairs if x[1].m == 1 and not x[1].tiled and channels % x[1].k_pack == 0]
    if not fits:
        raise ScheduleError(f"{target.name} has no vectors for {dtype}")
    return max(fits, key=lambda x: _rate(x, "f32" if x[1].k_pack == 1 else dtype, target))


def group_unit(image: str, filters: str, target: Target, channels: int) -> tuple[Isa, Atom]:
    """The fastest vectors for groups of few channels: of bytes, those that multiply units of them in place.

    Raises:
        ScheduleError: there are none.
    """
    if filters != "s8":
        return vector_unit(filters, target, channels)
    dtype = f"{image}-s8-s32"
    fits = [
        (isa, x) for isa, x in units(dtype, target)
        if x.m == 1 < x.k_pack and not x.tiled and channels % x.k_pack == 0
        and (x.left, x.right) == (unit(image, x.k_pack), unit("s8", x.k_pack))
    ]  # fmt: skip
    if not fits:
        raise ScheduleError(f"{target.name} has no vectors for units of {image}")
    return max(fits, key=lambda x: _rate(x, dtype, target))


def int4_unit(target: Target) -> tuple[Isa, Atom]:
    """The unit of vectors that int4 weights are packed for, in panels that tiles read as well.

    Raises:
        ScheduleError: no atom of the target multiplies int4 values.
    """
    pairs = units("f32-u4-f32", target)
    return next((x for x in pairs if not x[1].tiled), pairs[0])


def family(dtype: str, target: Target, n: int = 0) -> str:
    """The packed layout that suits a target: see `PACKED_VECTORS`; of int4 values, in groups of the default size.

    Args:
        dtype: types of the product.
        target: the machine.
        n: columns of the weight, if few may have panels of their own: see `for_columns`.

    Raises:
        ScheduleError: no atom of the target multiplies these types.
    """
    if types(dtype)[1] == "u4":
        return str(family_of_codes(target, USUAL_GROUP))
    isa, atom = packing_unit(dtype, target)
    usual = Family(types(dtype)[1], isa.columns(atom) * PACKED_VECTORS, atom.k_pack, atom.acc == "s32")
    return str(for_columns(usual, n))


def for_columns(usual: Family, n: int) -> Family:
    """The packed layout of a weight of `n` columns: of floats, panels of one or three vectors where these are enough.

    Padding of wider ones is multiplied like columns: it is a half of a panel, or a quarter of two.
    """
    vector = usual.nr // PACKED_VECTORS
    needed = -(-n // vector)
    return replace(usual, nr=needed * vector) if usual.dtype in UNCONVERTED and needed in NARROW else usual


def family_of_codes(target: Target, group: int, *, symmetric: bool = False, e2m1: bool = False) -> Family:
    """The packed layout of an int4 weight on a target: one for all types of A.

    Raises:
        ScheduleError: no atom of the target multiplies int4 values, or its instruction set has no floats of four bits.
    """
    isa, atom = int4_unit(target)
    if e2m1 and not atom.e2m1:
        raise ScheduleError(f"{isa.name} has no floats of four bits: dequantize the weight")
    return Family("u4", atom.n * PACKED_VECTORS, CODES_KR, group=group, symmetric=symmetric, e2m1=e2m1)


def unit_for(fused: Fused, target: Target) -> tuple[Isa, Atom]:
    """The instruction set, and its vectors of f32, that compute fused expressions.

    Raises:
        ScheduleError: none of the target's can.
    """
    missing = ""
    for isa in target.isas:
        real = isa.atom("f32")
        missing = lacks(isa, real, fused) if real else "f32"
        if real and not missing:
            return isa, real
    raise ScheduleError(f"{target.name} has no {missing} for {fused}")


def attention_unit(dtype: str, fused: Fused, target: Target, rows: int) -> tuple[Isa, Atom, Atom]:
    """The fastest unit for products of a type that attention kernels support, and its vectors of f32.

    Units with more than twice the rows that there are `rows` of queries are excluded: 8 queries by tiles of 16 take
    0.86 of the time that they take by vectors along keys, 15 take 0.41 (Granite Rapids, 16 heads, 4096 keys).

    Raises:
        ScheduleError: there is none.
    """
    fits = []
    for isa, atom in units(f"{dtype}-{dtype}-f32" if dtype != "f32" else dtype, target):
        real = isa.vector("f32", atom.n)
        lines = isa.row_atom(atom) or atom
        interleaves = atom.k_pack == 1 or isa.spelling(lines, "load_rows", "f32", atom.right)
        if (
            (2 * rows >= atom.m if atom.tiled else atom.m == 1)
            and atom.acc == "f32"
            and interleaves
            and real
            and not lacks(isa, real, fused)
        ):
            fits.append((_rate((isa, atom), dtype, target), isa, atom, real))
    if not fits:
        raise ScheduleError(f"{target.name} has no unit that computes {fused} of {dtype}")
    return max(fits, key=lambda x: x[0])[1:]


def _rate(unit: tuple[Isa, Atom], dtype: str, target: Target) -> float:
    """Multiply-adds of elements per cycle of a unit."""
    isa, atom = unit
    return macs_per_cycle(target, isa, atom, dtype) * atom.m * atom.n * atom.k


MOST_LOADED = 1024
"""Kernels loaded before all are dropped: each takes some 30 KiB, and five of the 65,530 mappings that Linux
lets a process have."""

_loaded: dict[str, Any] = {}
_replaced: list[Callable[[Kernel, str], Any]] = []
_codes = Memory(MOST_LOADED, "kernels")
_lock = locks.lock()


def recording() -> bool:
    """Whether kernels are those for a machine that is not here, which calls record and do not run."""
    return bool(_replaced)


@cached("kernels", 64)  # 150 KiB each
def kernel_of(s: Schedule, isa: Isa) -> Kernel:
    """The loop nest of a schedule, lowered once."""
    return lower(s, isa)


def build_kernel(kernel: Kernel) -> Artifact:
    """Emit and compile a kernel, or find it in the cache."""
    from portmm.build.shared_object import build
    from portmm.codegen.c_kernel import source

    arch = None if kernel.isa.arch == "any" else kernel.isa.arch
    return build(source(kernel), flags=kernel.isa.flags, arch=arch, name=kernel.name, symbols=(kernel.name,))


@contextmanager
def replaced(code: Callable[[Kernel, str], Any]) -> Iterator[None]:
    """Take the answers of a function for the code of kernels in a block; nothing is built, or remembered after it.

    Its second argument is the question to bundles for the kernel, if it has one.
    """
    forget()
    _replaced.append(code)
    try:
        yield
    finally:
        _replaced.pop()
        forget()


def loaded(kernel: Kernel, question: str = "") -> Any:
    """The kernel's code in this process, built and loaded once per source; `question` is that to bundles, if any."""
    if _replaced:
        return _replaced[-1](kernel, question)
    artifact = build_kernel(kernel)
    if len(_loaded) >= MOST_LOADED and artifact.key not in _loaded:
        forget()  # memos keep code loaded
    with _lock:
        code = _loaded.get(artifact.key)
        if code is None:
            code = _loaded[artifact.key] = load_kernel(runtime(), artifact.code, artifact.path, kernel.name)
    return code


@cached("kernels", MOST_LOADED)
def loaded_program(lowering: Callable[..., Kernel], *arguments: Any) -> Code:
    """The code of a kernel of a block program other than a product's, or of one with views.

    Args:
        lowering: a function of `codegen.lower`.
        arguments: for that function.
    """
    text = program_text(lowering, arguments)
    code = stored_kernels.program(text) if text and not _replaced else None
    if code is None:
        kernel, question = lowering(*arguments), PROGRAM + text if text else ""
        code = Code(loaded(kernel, question), kernel.swap, meaning(kernel.workspace), BY_NAME[kernel.atom.acc].bytes)
    return code


def workspace_bytes(kernel: Kernel, p: Problem, workers: int) -> int:
    """Bytes of scratch of a kernel for a problem."""
    return meaning(kernel.workspace)(fields_of(p, p.m, workers, swap=kernel.swap)) * BY_NAME[kernel.atom.acc].bytes


def program_text(lowering: Callable[..., Kernel], arguments: tuple[Any, ...]) -> str:
    """The arguments of a lowering as a line: one for each kernel of a version; empty where there is none."""
    words = [VERSION, lowering.__name__]
    for x in arguments:
        if isinstance(x, (Isa, Atom)):
            words.append(x.name)
        elif isinstance(x, BlockProgram):
            words.append(program_spelled(x))
        elif isinstance(x, (Schedule, Family, str, int)):
            words.append(repr(x))
        else:
            return ""
    return " ".join(words)


def code_of(s: Schedule, target: Target, kept: RouteCache | None = None) -> Code:
    """The code of a schedule: from this process, from a bundle or the route cache, or built now."""
    code = known_code(s, target, kept)
    if code is None:
        isa = isa_of(s, target)
        code = _built(s, isa, target, kept)
        _codes.keep((s, isa), code)
    return code


def known_code(s: Schedule, target: Target, kept: RouteCache | None) -> Code | None:
    """The code of a schedule from this process, a bundle or the route cache; None if it must be built."""
    isa = isa_of(s, target)
    key = s, isa
    code: Code | None = _codes.get(key)
    if code is None:
        code = _looked_up(s, isa, kept)
        if code is not None:
            _codes.keep(key, code)
    return code


def stored_code(s: Schedule, target: Target, kept: RouteCache | None) -> Code | None:
    """The code of a schedule if it was built before, by this process or another, with a compiler or without."""
    from portmm.build.shared_object import stored
    from portmm.codegen.c_kernel import source

    code, isa = known_code(s, target, kept), isa_of(s, target)
    if code is None:
        kernel = kernel_of(s, isa)
        arch = None if isa.arch == "any" else isa.arch
        if stored(source(kernel), flags=isa.flags, arch=arch) is not None:
            code = code_of(s, target, kept)
    return code


def is_loaded(s: Schedule, target: Target) -> bool:
    """Whether the code of a schedule is in this process."""
    return (s, isa_of(s, target)) in _codes


def can_build(isa: Isa) -> bool:
    """Whether there is a compiler for kernels of an instruction set."""
    from portmm.build.compiler import find_compiler

    try:
        find_compiler(None if isa.arch == "any" else isa.arch)
    except BuildError:
        return False
    return True


def _looked_up(s: Schedule, isa: Isa, kept: RouteCache | None) -> Code | None:
    """Code of a bundle, or that an earlier process built, looked up without its source."""
    text = spell(s)
    code = stored_kernels.code(text)
    if code is not None:
        return code
    entry = None if kept is None else route_cache.code(kept, text, runtime())
    if entry is None:
        return stored_kernels.code(text, last=True)
    loaded_code, workspace = entry
    size = BY_NAME[atom_of(isa, s.dtype, s.atom.lanes).acc].bytes
    return Code(loaded_code, s.atom.swap, meaning(parsed(workspace)), size)


def _built(s: Schedule, isa: Isa, target: Target, kept: RouteCache | None) -> Code:
    kernel = kernel_of(s, isa)
    code = loaded(kernel, CODE + spell(s))
    if kept is not None:
        route_cache.keep_code(kept, spell(s), code, spelled(kernel.workspace), target)
    return Code(code, kernel.swap, meaning(kernel.workspace), BY_NAME[kernel.atom.acc].bytes)


def forget() -> None:
    """Drop what this process remembers of calls, kernels and routes, as after a change that it cannot see.

    The cache on disk stays, and code that is in use. `portmm cache` names the caches.
    """
    stored_kernels.forget()
    with _lock:
        _loaded.clear()
