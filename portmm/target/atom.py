"""Atom: one multiply-accumulate instruction of an instruction set, its shape and its spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.spec.dtype import BY_NAME, unit
from portmm.target.toml_schema import placeholders, require
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.target.fragment import Fragment

PLACEHOLDERS = {
    "zero": {"d"},
    "load_a": {"d", "p", "step"},
    "load_b": {"d", "p", "step"},
    "mac": {"d", "a", "b"},
    "stream": {"d", "p", "step"},
    "load_c": {"d", "p", "step"},
    "store": {"d", "p", "step"},
    "mask": {"d", "count"},
    "load_mask": {"d", "p", "mask"},
    "store_mask": {"d", "p", "mask"},
    "reduce": {"d", "s"},
    "ones": {"d"},
    "unshift": {"d", "b"},
    "code": {"d", "a", "count"},
    "centred": {"d", "a", "count"},
    "below": {"d", "a", "count"},
    "e2m1": {"d", "a", "count"},
    "amax": {"d", "a"},
    "real": {"d", "a"},
    "add": {"d", "a"},
    "hold": {"d"},
    "configure": {"rows"},
    "shape": {"rows", "bytes"},
    "release": set(),
}
"""Field of an atom -> placeholders that its text may have."""


@dataclass(frozen=True, slots=True)
class Atom:
    """One multiply-accumulate instruction: its shape and its spelling.

    The *verbs* are C statements with placeholders: {d} the
    destination, {a} {b} operands, {p} an element pointer, {mask} a mask
    register, {count} a number of lanes. An empty string means that the ISA has
    no such instruction and the generator uses none.

    For an atom of more than one row, a left fragment has a unit of each row, and
    an accumulator its columns of each; {step} is the stride of rows in memory, in
    elements or units. With `configure`, it multiplies *tiles*, whose registers are
    not C variables: their types are empty, and {d}, {a} and {b} are numbers.

    Attributes:
        name: unique name, ISA then types.
        a: element type of the left operand.
        b: element type of the right operand.
        acc: element type of the accumulator.
        m: rows of the accumulator tile.
        n: columns of the accumulator tile.
        k: depth of one step.
        k_pack: adjacent elements of k in a fragment (KR).
        latency: cycles from one mac to the next dependent one.
        a_type: C type of a left fragment.
        b_type: C type of a right fragment.
        acc_type: C type of an accumulator.
        mask_type: C type of a lane mask, empty without masks.
        zero: clear an accumulator.
        load_a: load a left fragment (a broadcast for vector units).
        load_b: load a right fragment.
        stream: load a left or right fragment that is not read again from L1, and takes no room there.
        mac: {d} += {a} . {b}.
        load_c: load an accumulator.
        store: store an accumulator.
        mask: make a mask that keeps the first {count} lanes.
        load_mask: load the kept lanes, zero the others, touch no other byte.
        store_mask: store the kept lanes, touch no other byte.
        mask_free: a masked access takes no longer than an unmasked one.
        reduce: {s} = sum of the lanes of {d}; empty: through memory.
        ones: {d} = a fragment of ones, left or right, which sums the other operand.
        ones_type: its C type; empty for that of a left fragment.
        unshift: subtract 128 times the sums {b} of the columns of B from {d}: the
            contribution of the shift of an A of the other signedness to this atom's.
        amax: {d} = the larger of {d} and the magnitude of {a}, lane by lane; a NaN stays.
        code: {d} = the int4 value that begins at bit {count} of each 32-bit lane of {a}, as a
            number; in units, with those that begin 8 bits further each.
        centred: {d} = the same minus 8, of floats, where that takes no more instructions.
        below: {d} = the same minus 16, of other floats.
        e2m1: {d} = twice the e2m1 floats of the complements of these bits: as numbers, or of integers with 12 added.
        real: {d} = the s32 lanes of {a} as numbers of f32.
        add: {d} += {a}, both accumulators; as it is spelled for numbers and GNU vectors.
        hold: keep a right fragment {d} in its register: compilers may load it again for each use.
        configure: set the rows of the tiles to {rows}, a number for each of them, and clear them.
        shape: the same, and the bytes of their rows to {bytes}.
        release: release all tiles.
        unit: of a device, the scope of the instruction: "warp" or "warpgroup", whose lanes have the fragments;
            empty: each thread alone.
        rounds: of a unit of lanes, operands are rounded to fewer bits than their type has.
        a_fragment: of a unit of lanes, the elements of the left operand that each lane holds.
        b_fragment: likewise of the right operand.
        acc_fragment: likewise of the sums.
    """

    name: str
    a: str
    b: str
    acc: str
    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    acc_type: str
    zero: str
    load_a: str
    load_b: str
    mac: str
    load_c: str
    store: str
    k_pack: int = 1
    latency: int = 4
    mask_type: str = ""
    mask: str = ""
    load_mask: str = ""
    store_mask: str = ""
    mask_free: bool = False
    reduce: str = ""
    ones: str = ""
    ones_type: str = ""
    unshift: str = ""
    code: str = ""
    centred: str = ""
    below: str = ""
    e2m1: str = ""
    amax: str = ""
    real: str = ""
    add: str = "{d} += {a};"
    hold: str = ""
    stream: str = ""
    configure: str = ""
    shape: str = ""
    release: str = ""
    unit: str = ""
    rounds: bool = False
    a_fragment: Fragment | None = None
    b_fragment: Fragment | None = None
    acc_fragment: Fragment | None = None

    @property
    def tiled(self) -> bool:
        """Whether it multiplies tiles."""
        return bool(self.configure)

    def strips(self, rows: int) -> int:
        """Number of left fragments, or of accumulators along m, for a number of rows."""
        return -(-rows // self.m)

    @property
    def takes_int4(self) -> bool:
        """Whether int4 values are multiplied without repacking for any number of rows: a group takes few steps."""
        return self.acc == "s32" or self.k_pack > 1

    @property
    def deep(self) -> int:
        """Units of k in one step."""
        return self.k // self.k_pack

    @property
    def left(self) -> str:
        """Type of a left fragment: an element, or a unit of `k_pack` of them."""
        return unit(self.a, self.k_pack)

    @property
    def right(self) -> str:
        """Type of a right fragment, likewise."""
        return unit(self.b, self.k_pack)


def check_atom(atom: Atom, where: str) -> Atom:
    """The atom itself, after its checks.

    Raises:
        TargetError: it is malformed; `where` names the file.
    """
    where = f"{where} {atom.name}"
    for name in (atom.a, atom.b, atom.acc):
        require(name in BY_NAME, where, f"element type {name!r} is unknown; use one of {', '.join(BY_NAME)}")
    for name in ("m", "n", "k", "k_pack", "latency"):
        require(getattr(atom, name) > 0, where, f"{name} must be positive, got {getattr(atom, name)}")
    for row, allowed in PLACEHOLDERS.items():
        unknown = sorted(placeholders(getattr(atom, row), f"{where}: {row}") - allowed)
        require(not unknown, where, f"row {row!r} mentions {unknown}; it may mention {sorted(allowed)}")
    masks = {bool(x) for x in (atom.mask_type, atom.mask, atom.load_mask, atom.store_mask)}
    require(len(masks) == 1, where, "mask_type, mask, load_mask and store_mask come together or not at all")
    require(atom.tiled == bool(atom.release), where, "configure and release come together or not at all")
    require(atom.m > 1 or not atom.tiled, where, "tiles have an m above 1")
    if atom.m > 1 and not atom.tiled and not atom.unit:
        # A remaining row takes both rows of a fragment.
        require(atom.m == 2, where, f"without configure, m is 1 or 2, got {atom.m}")
        require(atom.deep == 1 and not atom.mask, where, "two rows have a k of k_pack, and no masks")
    return atom
