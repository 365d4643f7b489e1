"""Support of an instruction set: for epilogue expressions, and for primitives in a language of devices. Pure."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portmm.spec.epilogue import Fused
    from portmm.target.atom import Atom
    from portmm.target.device import Device
    from portmm.target.isa import Isa


def lacks(isa: Isa, real: Atom, fused: Fused) -> str:
    """The first operation of an epilogue that an instruction set lacks in lanes of `real`, or an empty string."""
    for i, x in enumerate(fused.operands):
        whole = isa.vector("s32", real.n)
        written = i in dict(fused.results)
        atom = whole if x.dtype == "s32" else real
        if atom is None or not isa.spelling(atom, "store" if written else "load_b", x.dtype):
            return f"{'store' if written else 'load'} of {x.dtype}"
    own = isa.lanes(real.n)
    if any(x.op == "sqrt" for x in fused.steps) and not (own and "sqrt" in own.words):
        return "square root"
    return ""


@cache
def has_primitive(isa: Isa, name: str, language: str) -> bool:
    """Whether an instruction set has a primitive in a language."""
    return any(x.name == name and getattr(x, language) for x in isa.functions)


def multiplies(isa: Isa, atom: Atom, device: Device) -> bool:
    """Whether kernels of a device can use an atom: lanes that multiply together have its warp and its primitive."""
    if not atom.unit:
        return True
    return isa.warp == device.warp and has_primitive(isa, atom.mac.partition("(")[0], device.language)
