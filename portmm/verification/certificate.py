"""Certificates of equivalence: graphs, seeds, primes, bounds and digests, from which a check is repeated.

Owns `certify`, which checks a candidate and the kernels of its steps, and `repeat`, which does so again from the
certificate alone, with the same tests and with new ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.codegen.c_kernel import source
from portmm.errors import PortmmError, ScheduleError
from portmm.ir.graph_reader import from_json, program_from_json
from portmm.ir.mugraph import MuGraph, program_to_json, to_json
from portmm.schedule.text import parse, spell
from portmm.target.target import load_target, names_of
from portmm.verification.equivalence import Verdict, check
from portmm.verification.lowered import Lowered, every_on_device, lowered
from portmm.verification.stability import EPS, judge
from portmm.verification.values import LateError, UncompiledError, UnsupportedError

if TYPE_CHECKING:
    from portmm.ir.block_program import BlockProgram
    from portmm.schedule.schedule import Schedule

FORMAT = 2
CHECKED = ("f32", "bf16")
"""Types of operands of kernels of a host that are checked."""
COMPILED, INTERPRETED = "compiled", "interpreted"
"""Ways to check an emitted kernel: its text with symbols for floats, or its loops."""
LATE = "the time of the search ended before it was checked"
"""Reason of a kernel that is not checked."""
_FIELDS = {"reference": dict, "candidate": dict, "check": dict, "errors": list, "kernels": list, "digests": dict}
_OF_CHECK = {"seed": int, "extents": dict, "primes": list}
_OF_KERNEL = {"name": str, "target": str, "record": dict, "rows": int, "schedule": str, "digest": str, "emitted": dict,
              "check": dict}  # fmt: skip
ROUNDING = 8.0
"""Largest ratio of errors of one program on two machines."""


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


class Emitted(NamedTuple):
    """A kernel that a program runs.

    Attributes:
        name: for messages.
        program: its record.
        schedule: of a product, or of attention by `unit`.
        rows, unit: see `lowered.lowered`.
    """

    name: str
    program: BlockProgram
    schedule: Schedule | None = None
    rows: int = 0
    unit: str = ""


def certify(
    reference: MuGraph, candidate: MuGraph, target: str = "", emitted: Sequence[Emitted] = (),
    unchecked: Sequence[tuple[str, str]] = (), *, steps: bool = True, until: float = math.inf,
) -> dict[str, Any]:  # fmt: skip
    """The certificate of a candidate that computes what a reference does.

    Args:
        reference: computed operation by operation.
        candidate: the graph that takes its place.
        target: a chip whose kernels are checked too: those of steps that are products of matrices, rows or attention.
        emitted: further kernels, which the program runs in the place of steps.
        unchecked: names of kernels that it runs, too, and why they are not checked.
        steps: whether steps of the candidate run as kernels of their own.
        until: by the monotonic clock; kernels that are not checked then remain so, for the reason `LATE`.

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
        "unchecked": [{"name": name, "reason": reason} for name, reason in unchecked],
        "digests": {"reference": digest(_text(one)), "candidate": digest(_text(other))},
    }  # fmt: skip
    if target in names_of("cpu"):
        named = [x.program for x in emitted]
        own = [Emitted(f"step {i}", x.program) for i, x in enumerate(candidate.steps) if x.program not in named]
        for x in (*own * steps, *emitted):
            kernel = _lowered(x, target)
            if kernel is None and emitted and x not in emitted:
                continue  # what runs in the place of this step is among those
            if kernel is None or time.monotonic() > until:
                part = {"name": x.name, "reason": "labels or types" if kernel is None else LATE}
            else:
                part = _kernel(x, kernel, target, until)
            data["unchecked" if "reason" in part else "kernels"].append(part)
    return data


def late(data: Mapping[str, Any]) -> bool:
    """Whether a certificate has kernels that were not checked for want of time."""
    return any(x["reason"] == LATE for x in data["unchecked"])


def of_sizes(data: dict[str, Any], target: str, emitted: Sequence[Emitted]) -> dict[str, Any]:
    """A certificate for other sizes than where it was made: kernels whose texts it has not are not checked."""
    digests = {x["digest"] for x in data["kernels"]}
    lowered_ones = [(x.name, _lowered(x, target)) for x in emitted]
    others = [name for name, x in lowered_ones if x is None or digest(source(x.kernel)) not in digests]
    reason = "other sizes were certified, where another kernel runs; search again for these"
    return data | {"unchecked": [*data["unchecked"], *({"name": x, "reason": reason} for x in others)]}


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The certificate of a function of several parts, or None if there are none."""
    return {"format": FORMAT, "parts": list(parts)} if parts else None


def _lowered(x: Emitted, target: str) -> Lowered | None:
    """The kernel of a record, or None: of operations on labels, or of types, that no kernel is checked with."""
    if any(y.dtype not in CHECKED for y in x.program.operands):
        return None
    try:
        return lowered(x.program, load_target(target), x.schedule, x.rows, x.unit)
    except ScheduleError:
        return None


def _numbers(x: Verdict) -> dict[str, Any]:
    primes = [str(p) for p in x.primes]
    return {"seed": x.seed, "tests": x.tests, "bits": round(x.bits, 2), "extents": dict(x.extents), "primes": primes}


def _kernel(of: Emitted, x: Lowered, target: str, until: float) -> dict[str, Any]:
    """The part of a certificate for a kernel, or the reason why it is not checked."""
    emitted, text = {"by": COMPILED, "reason": ""}, source(x.kernel)
    verdict = x.check(of.program, text=text, until=until)
    if not verdict and verdict.reason.startswith(LateError.__name__):
        return {"name": of.name, "reason": LATE}
    if _unsupported(verdict):
        compiled = not verdict.reason.startswith(UncompiledError.__name__)
        emitted = {"by": INTERPRETED, "reason": verdict.reason}
        verdict = x.check(of.program)
        if verdict and compiled:
            raise ScheduleError(f"the text of {of.name} is another kernel than its loops are: {emitted['reason']}")
    if _unsupported(verdict):
        return {"name": of.name, "reason": verdict.reason}
    if not verdict:
        raise ScheduleError(f"the kernel of {of.name} does not compute its record: {verdict.reason}")
    record: dict[str, Any] = {"record": program_to_json(of.program), "rows": of.rows, "schedule": spell(x.schedule)}
    record |= {"unit": of.unit} if of.unit else {}
    stated = {"digest": digest(text), "emitted": emitted, "check": _numbers(verdict)}
    return {"name": of.name, "target": target, **record, **stated}


def _unsupported(verdict: Verdict) -> bool:
    kinds = UnsupportedError.__name__, UncompiledError.__name__
    return not verdict and verdict.reason.startswith(kinds)


def repeat(data: Mapping[str, Any]) -> list[Outcome]:
    """The checks of a certificate, each with its own seed and with a new one.

    Raises:
        CertificateError: it is damaged, or of another format.
    """
    if not isinstance(data, dict) or "format" not in data:
        raise CertificateError("this is no certificate: it has no format; `portmm superoptimize --save` writes one")
    try:
        if data["format"] != FORMAT:
            raise CertificateError(f"a certificate of format {data['format']}; this portmm reads {FORMAT}")
        if "parts" in data:
            return [y._replace(what=f"part {i}: {y.what}") for i, x in enumerate(data["parts"], 1) for y in repeat(x)]
        _need(data, _FIELDS, "the certificate")
        _need(data["check"], _OF_CHECK, "its check")
        for i, x in enumerate(data["kernels"]):
            _need(x, _OF_KERNEL, f"kernel {i}")
            _need(x["check"], _OF_CHECK, f"the check of kernel {i}")
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
        outcomes.append(_compared(stability.errors, data["errors"]))
        for x in data["kernels"]:
            outcomes += _repeated(x)
    except ScheduleError as error:
        raise CertificateError(f"the certificate is damaged: {error}; or search again") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CertificateError(f"the certificate is damaged: {error!r}; search again") from error
    return outcomes


def _need(data: Any, kinds: Mapping[str, type], where: str) -> None:
    """Check the fields of a part of a certificate.

    Raises:
        CertificateError: one is absent, or of another kind.
    """
    for name, kind in kinds.items():
        value = data.get(name) if isinstance(data, dict) else None
        if type(value) is not kind:
            what = "none" if value is None else f"{str(value)[:60]!r}"
            raise CertificateError(f"{where} needs a field {name!r}, a {kind.__name__}, and has {what}: search again")


def _compared(errors: Sequence[Sequence[float]], stated: Sequence[Sequence[float]]) -> Outcome:
    """Whether errors are those that are stated, but for the rounding of another machine's functions."""
    same = len(errors) == len(stated) and all(
        len(x) == len(y) and all(map(_as_large, x, y)) for x, y in zip(errors, stated, strict=True)
    )
    worst = max((float(y) for _, y in errors), default=0.0)
    detail = f"at most {worst:.1e} in float32, as stated" if same else f"found {errors}, where {stated} is stated"
    return Outcome("numerical errors", same, detail)


def _as_large(x: float, y: float) -> bool:
    """Whether an error is another one within `ROUNDING`; those below an ulp are equal, and not finite ones alike."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.isfinite(x) == math.isfinite(y)
    small, large = sorted((max(abs(x), EPS), max(abs(y), EPS)))
    return x >= 0 and y >= 0 and large <= ROUNDING * small


def _repeated(data: Mapping[str, Any]) -> list[Outcome]:
    """The checks of a kernel."""
    program, schedule = program_from_json(data["record"]), parse(data["schedule"])
    unit, other = data.get("unit", ""), schedule.program in ("rows", "columns", "attention")
    own = schedule if unit or not other else None
    x = lowered(program, load_target(data["target"]), own, data["rows"], unit)
    emitted, by = source(x.kernel), data["emitted"]["by"]
    same_text = digest(emitted) == data["digest"]
    seed, compiled = int(data["check"]["seed"]), emitted if by == COMPILED else ""
    verdict = x.check(program, seed=seed, text=compiled)
    name = f"{data['name']}, {data['target']}"
    text = "as it was certified" if same_text else "another text than was certified: this portmm emits another kernel"
    holds = bool(verdict) and _numbers(verdict) == data["check"]
    return [Outcome(f"text of {name}", same_text, text), Outcome(f"{by} kernel of {name}", holds, str(verdict))]


def on_device(data: Mapping[str, Any], name: str) -> list[Outcome]:
    """The kernels of a certificate on a device: their texts, in its language, compute their records.

    Raises:
        CertificateError: the device has no description, or the certificate is damaged.
    """
    if name not in names_of("device"):
        raise CertificateError(f"no device {name!r} is described; known are {', '.join(names_of('device'))}")
    try:
        every = [y for x in data.get("parts", [data]) for y in x["kernels"]]
        kernels = [(f"{x['name']}, {name}", program_from_json(x["record"])) for x in every]
    except (KeyError, TypeError, ValueError, ScheduleError) as error:
        raise CertificateError(f"the certificate is damaged: {error!r}; search again") from error
    outcomes = []
    for what, program in kernels:
        try:
            kernels_of = every_on_device(program, load_target(name))
        except ScheduleError as error:
            outcomes.append(Outcome(f"not checked: {what}", True, str(error)))
            continue
        for x in kernels_of:
            verdict = x.check(program)
            which = f"{what} ({x.what})" if x.what else what
            passed_by = _unsupported(verdict)
            name_of = f"not checked: {which}" if passed_by else f"compiled text of {which}"
            outcomes.append(Outcome(name_of, passed_by or bool(verdict), str(verdict)))
    return outcomes
