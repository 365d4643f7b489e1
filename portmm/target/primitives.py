"""Primitives in a language: what kernels of a device can call there.

Owns the questions that schedules ask of an instruction set for the language of a device. Pure.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.device import Device
    from portmm.target.isa import Isa


@cache
def has_primitive(isa: Isa, name: str, language: str) -> bool:
    """Whether an instruction set has a primitive in a language."""
    return any(x.name == name and getattr(x, language) for x in isa.functions)


def multiplies(isa: Isa, atom: Atom, device: Device) -> bool:
    """Whether kernels of a device can use an atom: lanes that multiply together have its warp and its primitive."""
    if not atom.unit:
        return True
    return isa.warp == device.warp and has_primitive(isa, atom.mac.partition("(")[0], device.language)
