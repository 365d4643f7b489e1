"""Certificates of equivalence: graphs, seeds, primes, bounds and digests, from which a check is repeated.

Owns `certify`, which checks a candidate and the kernels of its steps, and `repeat`, which does so again from the
certificate alone, with the same tests and with new ones.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.codegen.c_kernel import source
from portmm.errors import PortmmError, ScheduleError
from portmm.ir.mugraph import from_json, to_json
from portmm.schedule.text import parse, spell
from portmm.target.target import load_target, names_of
from portmm.verification.equivalence import Verdict, check
from portmm.verification.kernels import check_kernel
from portmm.verification.lowered import Lowered, lowered
from portmm.verification.stability import judge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portmm.ir.block_program import BlockProgram
    from portmm.ir.mugraph import MuGraph
    from portmm.schedule.schedule import Schedule

FORMAT = 1


class CertificateError(PortmmError):
    """Error of a certificate that is damaged, or of another format."""


class Outcome(NamedTuple):
    """Result of a check of a certificate.

    Attributes:
        what: is checked.
        holds: whether it does.
        detail: of the check.
    """

    what: str
    holds: bool
    detail: str


def digest(text: str) -> str:
    """The digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True)


def certify(
    reference: MuGraph, candidate: MuGraph, target: str = "", schedules: Sequence[Schedule | None] = ()
) -> dict[str, Any]:
    """The certificate of a candidate that computes what a reference does.

    Args:
        reference: computed operation by operation.
        candidate: the graph that takes its place.
        target: a chip whose kernels are checked too, of the steps that are products of matrices, rows or attention.
        schedules: of the steps, where they are not the first candidates.

    Raises:
        ScheduleError: they differ, or a kernel does, or the candidate is less stable.
    """
    verdict = check(reference, candidate)
    if not verdict:
        raise ScheduleError(f"the candidate is no equivalent of its reference: {verdict.reason}")
    stability = judge(reference, candidate)
    if not stability.stable:
        raise ScheduleError(f"the candidate is less stable than its reference: {stability.reason}")
    one, other = to_json(reference), to_json(candidate)
    data: dict[str, Any] = {
        "format": FORMAT, "reference": one, "candidate": other, "check": _numbers(verdict),
        "errors": [list(x) for x in stability.errors], "kernels": [],
        "digests": {"reference": digest(_text(one)), "candidate": digest(_text(other))},
    }  # fmt: skip
    for i, step in enumerate(candidate.steps if target in names_of("cpu") else ()):
        try:
            x = lowered(step.program, load_target(target), schedules[i] if i < len(schedules) else None)
        except ScheduleError:
            continue  # an operation on labels that no kernel has by these names
        data["kernels"].append(_kernel(i, step.program, x, target))
    return data


def _numbers(x: Verdict) -> dict[str, Any]:
    primes = [str(p) for p in x.primes]
    return {"seed": x.seed, "tests": x.tests, "bits": round(x.bits, 2), "extents": dict(x.extents), "primes": primes}


def _kernel(i: int, program: BlockProgram, x: Lowered, target: str) -> dict[str, Any]:
    """The part of a certificate for the kernel of a step."""
    verdict = check_kernel(program, x.kernel, x.extents)
    if not verdict:
        raise ScheduleError(f"the kernel of step {i} does not compute its record: {verdict.reason}")
    text = {"schedule": spell(x.schedule), "digest": digest(source(x.kernel))}
    return {"step": i, "target": target, **text, "check": _numbers(verdict)}


def repeat(data: Mapping[str, Any]) -> list[Outcome]:
    """The checks of a certificate, each with its own seed and with a new one.

    Raises:
        CertificateError: it is damaged, or of another format.
    """
    try:
        if data["format"] != FORMAT:
            raise CertificateError(f"a certificate of format {data['format']}; this portmm reads {FORMAT}")
        reference, candidate = from_json(data["reference"]), from_json(data["candidate"])
        outcomes = [
            Outcome(f"text of the {x}", digest(_text(data[x])) == data["digests"][x], data["digests"][x][:16])
            for x in ("reference", "candidate")
        ]
        extents, seed = data["check"]["extents"], int(data["check"]["seed"])
        same = check(reference, candidate, seed=seed, extents=extents)
        agree = bool(same) and _numbers(same) == data["check"]
        outcomes.append(Outcome("the same tests", agree, str(same)))
        fresh = check(reference, candidate)
        outcomes.append(Outcome("new tests", bool(fresh), str(fresh)))
        stability = judge(reference, candidate)
        outcomes.append(Outcome("stability", stability.stable, stability.reason or "no worse than the reference"))
        for x in data["kernels"]:
            outcomes += _repeated(x, candidate)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ScheduleError) as error:
        raise CertificateError(f"a damaged certificate: {error!r}") from error
    return outcomes


def _repeated(data: Mapping[str, Any], candidate: MuGraph) -> list[Outcome]:
    """The checks of a kernel."""
    program, schedule = candidate.steps[data["step"]].program, parse(data["schedule"])
    product = schedule.program not in ("rows", "columns", "attention")
    x = lowered(program, load_target(data["target"]), schedule if product else None)
    same_text = digest(source(x.kernel)) == data["digest"]
    verdict = check_kernel(program, x.kernel, x.extents, seed=int(data["check"]["seed"]))
    name = f"step {data['step']}, {data['target']}"
    text = "as it was certified" if same_text else "another text than was certified: this portmm emits another kernel"
    return [Outcome(f"text of {name}", same_text, text), Outcome(f"kernel of {name}", bool(verdict), str(verdict))]
