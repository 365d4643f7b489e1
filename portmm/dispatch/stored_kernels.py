"""Kernels of bundles: the code of a schedule, and the route of a problem, without selection, source and compiler.

Owns the questions that a bundle answers about schedules and problems, and the choice of the machine in a bundle whose
kernels serve this one. Nothing that is imported here is slow to import.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from portmm.build import kernel_store
from portmm.ir.prefix import value
from portmm.runtime import route_cache
from portmm.runtime.cpu import clear_memo, load_kernel, runtime
from portmm.spec.row_classes import rows as class_of
from portmm.util.memo import Memory, forget_all
from portmm.util.records import dataclass, replace

if TYPE_CHECKING:
    from portmm.build.bundle import Bundle
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

CODE, PROGRAM, ROUTE, MACHINES, THREADS = "code ", "program ", "route ", "machines", "threads"
USED = "instruction sets"
PACKING, HALF = "pack ", " half"
"""Questions, or their beginnings: the code of a schedule, that of a block program without one (see
`cpu_kernels.program_text`), the route of a problem, for which machines, how many threads.

Answers: object, empty for one of the bundle's library, symbol, 1 if it computes the transpose, bytes of an element of
scratch, its elements; of a route also 1 if one thread does the work; of packing also the layout. Machines are as
"zen4=avx512,avx2,...", with their instruction sets; `USED` are those of kernels.
"""
MOST_KERNELS = 1024
"""Kernels loaded before all are dropped, as in `cpu_kernels`."""

_kernels = Memory(MOST_KERNELS, "kernels")
_machines: dict[tuple[str, int], tuple[Target, str]] = {}
_serving: dict[tuple[str, int], tuple[Target, Target]] = {}


@dataclass(frozen=True, slots=True)
class Code:
    """The loaded code of a schedule, which serves other sizes too.

    Attributes:
        code: the function that the run time launches.
        swap: the kernel computes the transpose.
        workspace: elements of its scratch, from fields of the argument block.
        bytes: of an element of scratch.
    """

    code: Any
    swap: bool
    workspace: Callable[[Mapping[str, int]], int]
    bytes: int

    def scratch(self, p: Problem, rows: int, workers: int) -> int:
        """Bytes of its scratch for problems like `p` with `rows` rows."""
        return self.workspace(fields_of(p, rows, workers, swap=self.swap)) * self.bytes


def fields_of(p: Problem, rows: int, workers: int, *, swap: bool) -> dict[str, int]:
    """Fields of the argument block that scratch depends on, with `rows` rows."""
    m, n = (p.n, rows) if swap else (rows, p.n)
    return {"m": m, "n": n, "k": p.k, "batch": p.batch, "workers": workers}


def code(schedule: str, *, last: bool = False) -> Code | None:
    """The code of a spelled schedule in a bundle; None if there is none.

    Args:
        schedule: its spelling.
        last: look into the base set instead, after the cache.

    Raises:
        BundleError: a bundle is damaged.
    """
    return answered(CODE + schedule, last=last)


def program(text: str) -> Code | None:
    """The code of a spelled block program in a bundle, or else in the base set; None if there is none.

    Raises:
        BundleError: a bundle is damaged.
    """
    return answered(PROGRAM + text) or answered(PROGRAM + text, last=True)


def packing(question: str) -> tuple[str, Any] | None:
    """The packed layout of weights, and the code that packs, of the base set; None if it has none.

    Raises:
        BundleError: it is damaged.
    """
    answer = kernel_store.answer(question, last=True)
    return None if answer is None else _packing(*answer)


def bundled_packing(word: str, layout: str, n: int, machine: Callable[[Bundle], str]) -> tuple[str, Any] | None:
    """The packed layout of weights of `n` columns, and the code that packs, of a bundle; None if there is none.

    Args:
        word: as of `packing_question`.
        layout: "row" or "col", of the weight.
        n: its columns.
        machine: as of `route`.

    Raises:
        BundleError: a bundle is damaged.
    """
    for bundle in kernel_store.bundles():
        name = machine(bundle)
        fields = bundle.answer(packing_question(name, word, layout, n)) if name else None
        if fields is not None:
            return _packing(bundle, fields)
    return None


def packing_question(machine: str, word: str, layout: str, n: int) -> str:
    """The question to bundles for packing weights of `n` columns for products of the types `word`.

    Of weights of four bits these are `base_kernels.int4_word`, and `HALF` where scales are of 16 bits.
    """
    return f"{PACKING}{machine} {word} {layout} {n}"


def _packing(bundle: Bundle, fields: list[str]) -> tuple[str, Any]:
    with read(bundle):
        number, symbol, *_, family = fields
        return family, _loaded(bundle, number, symbol)


def answered(question: str, *, last: bool = False) -> Code | None:
    """The code that answers a question to bundles, or with `last` to the base set; None if there is none.

    Raises:
        BundleError: a bundle is damaged.
    """
    answer = kernel_store.answer(question, last=last)
    return None if answer is None else code_of(*answer)


def code_of(bundle: Bundle, fields: list[str]) -> Code:
    """The loaded code of an answer of a bundle.

    Raises:
        BundleError: the bundle is damaged.
    """
    with read(bundle):
        number, symbol, swap, size, text, *_ = fields

        def workspace(sizes: Mapping[str, int]) -> int:
            with read(bundle):
                return value(text, sizes)

        return Code(_loaded(bundle, number, symbol), swap == "1", workspace, int(size))


@contextmanager
def read(bundle: Bundle) -> Iterator[None]:
    """Make errors of a block that reads answers those of a damaged bundle."""
    try:
        yield
    except (ArithmeticError, LookupError, ValueError) as error:
        raise bundle.damaged(f"an answer has other fields: {error!r}") from error


def _loaded(bundle: Bundle, number: str, symbol: str) -> Any:
    """A kernel of a bundle, or of its library, loaded once."""
    key = bundle.signature, number or symbol
    kernel = _kernels.get(key)
    if kernel is None and not number:
        kernel = _kernels.keep(key, runtime().load(kernel_store.library(bundle.library), symbol))
    elif kernel is None:
        entry, object_ = bundle.load(int(number))
        kernel = _kernels.keep(key, load_kernel(runtime(), object_, entry.path, symbol))
    return kernel


def route(
    p: Problem, machine: Callable[[Bundle], str], threads: Callable[[], int]
) -> tuple[Any, tuple[int, int]] | None:
    """A route of a bundle for a problem, and the least and the largest M that it serves; None if there is none.

    Args:
        p: the problem.
        machine: returns the machine of a bundle that serves this one, or an empty text; called if there is a bundle.
        threads: returns the most threads to use.

    Raises:
        BundleError: a bundle is damaged.
    """
    for bundle in kernel_store.bundles():
        name = machine(bundle)
        for served in dict.fromkeys((class_of(p), (p.m, p.m))) if name else ():
            fields = bundle.answer(question(name, count(bundle, threads()), p, served))
            if fields is not None:
                kernel, workers = code_of(bundle, fields), 1 if fields[-1] == "1" else threads()
                work = kernel.scratch(p, served[1], workers)
                return runtime().make_route(kernel.code, work, workers, p.storage, p.unit), served
    return None


def question(machine: str, threads: int, p: Problem, served: tuple[int, int]) -> str:
    """The question for a route on a machine of a bundle."""
    least, most = served
    return f"{ROUTE}{machine} {threads} {least if least == most else f'{least}-{most}'} {p.but_rows}"


def rows_of(schedule: str) -> tuple[int, int]:
    """The least and the most rows of register tiles of a spelled schedule."""
    least, _, most = schedule.split(":")[4].partition("-")
    return int(least), int(most)


def count(bundle: Bundle, threads: int) -> int:
    """The number of threads in a bundle for which kernels were selected: the least that is not less, or the largest."""
    with read(bundle):
        counts = [int(x) for x in bundle.answer(THREADS) or ("1",)]
    return min((x for x in counts if x >= threads), default=max(counts))


def machine_of(bundle: Bundle, target: Target) -> str:
    """The machine of a bundle whose kernels serve a target: its chip, or else the one that is most like it.

    It may have instruction sets that are not here and that no kernel uses. It is empty if there is none.
    """
    key = bundle.signature, id(target)
    if key not in _machines:
        name = fitting(bundle, target.name, {isa.name for isa in target.isas})
        _machines[key] = target, name  # the target is kept alive, since its identity is the key
    return _machines[key][1]


def fitting(bundle: Bundle, chip: str, has: Collection[str]) -> str:
    """As `machine_of`, of a chip by its name and the names of its instruction sets."""
    used, fit = set(bundle.answer(USED) or ()), []
    for text in bundle.answer(MACHINES) or ():
        name, _, isas = text.partition("=")
        lacks = set(isas.split(",")).difference(has)
        if not lacks & used:
            fit.append((name == chip, isas.count(",") - 2 * len(lacks), name))
    return max(fit)[2] if fit else ""


def served_by(target: Target) -> Target:
    """The machine of the bundles in use that serves a target, with instruction sets that are here; else the target.

    Programs of fused functions are planned for it, so that they ask for the kernels that bundles have.

    Raises:
        BundleError: a bundle cannot be used.
    """
    for bundle in kernel_store.bundles():
        name = machine_of(bundle, target)
        if not name:
            continue
        if (name, id(target)) not in _serving:
            from portmm.target.target import load_target

            _serving[name, id(target)] = target, here(load_target(name), target)
        return _serving[name, id(target)][1]
    return target


def here(machine: Target, target: Target) -> Target:
    """A described machine with the instruction sets that a target has as well, and the cores of the target."""
    has = {isa.name for isa in target.isas}
    return replace(machine, isas=tuple([x for x in machine.isas if x.name in has]), cores=target.cores)


def forget() -> None:
    """Drop what this process remembers of calls, routes and machines, as after a change of its bundles.

    Code that was built from sources stays loaded: see `cpu_kernels.forget`.
    """
    from portmm.host import chip_match  # not by calls of a base set, which is for no chip

    forget_all(functions=True)
    _machines.clear()
    _serving.clear()
    chip_match.forget()
    route_cache.forget(kernels=True)
    clear_memo()
