"""What instructions do: atoms, transfers, instruction sets.

Owns the records, what makes one well-formed, and the choice of the text that a
verb is spelled with. May import `spec.dtype`, `errors`, `target.vector_ops`, `target.toml_schema`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portmm.errors import TargetError
from portmm.spec.dtype import BY_NAME, accumulator, types, unit
from portmm.target.toml_schema import placeholders, require

if TYPE_CHECKING:
    from portmm.target.vector_ops import Lanes

# What each row of the vocabulary may mention.
PLACEHOLDERS = {
    "zero": {"d"},
    "load_a": {"d", "p", "step"},
    "load_b": {"d", "p", "step"},
    "mac": {"d", "a", "b"},
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
    "amax": {"d", "a"},
    "real": {"d", "a"},
    "add": {"d", "a"},
    "configure": {"rows"},
    "release": set(),
}
TRANSFERS = {
    "load": {"d", "p"},
    "broadcast": {"d", "p"},
    "load_mask": {"d", "p", "mask"},
    "store": {"d", "p"},
    "store_mask": {"d", "p", "mask"},
    "rows": {"d", "p", "step"},
}
# Verb -> the row of a transfer that spells it.
_BY_TRANSFER = {
    "load_a": "broadcast", "load_b": "load", "load_c": "load", "load_mask": "load_mask",
    "store": "store", "store_mask": "store_mask", "load_rows": "rows",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Atom:
    """One multiply-accumulate instruction: its shape and its spelling.

    The *vocabulary* fields are C statements with placeholders: {d} the
    destination, {a} {b} operands, {p} an element pointer, {mask} a mask
    register, {count} a number of lanes. An empty string means that the ISA has
    no such instruction and the generator does without.

    Of an atom of more than one row, a left fragment holds a unit of each row, and
    an accumulator its columns of each; {step} is how many elements, or units, lie
    between rows in memory. Where it has `configure`, it multiplies *tiles*, whose
    registers are no variables of C: their types are empty, and {d}, {a} and {b}
    are numbers.

    Attributes:
        name: unique name, ISA then types.
        a: element type of the left operand.
        b: element type of the right operand.
        acc: element type of the accumulator.
        m: rows of the accumulator tile.
        n: columns of the accumulator tile.
        k: depth of one step.
        k_pack: elements of k that sit side by side in a fragment (KR).
        latency: cycles from one mac to the next that depends on it.
        a_type: C type of a left fragment.
        b_type: C type of a right fragment.
        acc_type: C type of an accumulator.
        mask_type: C type of a lane mask, empty without masks.
        zero: clear an accumulator.
        load_a: load a left fragment (a broadcast for vector units).
        load_b: load a right fragment.
        mac: {d} += {a} . {b}.
        load_c: load an accumulator.
        store: store an accumulator.
        mask: make a mask that keeps the first {count} lanes.
        load_mask: load the kept lanes, zero the others, touch no other byte.
        store_mask: store the kept lanes, touch no other byte.
        mask_free: a masked access costs no more than a whole one.
        reduce: {s} = sum of the lanes of {d}; empty: through memory.
        ones: {d} = a fragment of ones, left or right: what the other operand is summed with.
        unshift: take the sums {b} of the columns of B from {d}, 128 times: what
            an A of the other signedness, shifted to this atom's, has added.
        amax: {d} = the larger of {d} and the magnitude of {a}, lane by lane; a NaN stays.
        code: {d} = the code of four bits that begins at bit {count} of each 32-bit lane of {a}, as a
            number; in units, with those that begin 8 bits further each.
        centred: {d} = the same less 8, of floats, where that takes no more instructions.
        below: {d} = the same less 16, of other floats.
        real: {d} = the s32 lanes of {a} as numbers of f32.
        add: {d} += {a}, both accumulators; as it is spelled for numbers and GNU vectors.
        configure: give the tiles {rows} rows, a number for each of them, and clear them.
        release: give all tiles up.
        unit: of a device, who multiplies together: "warp" or "warpgroup", whose lanes hold fragments; empty:
            each thread alone.
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
    unshift: str = ""
    code: str = ""
    centred: str = ""
    below: str = ""
    amax: str = ""
    real: str = ""
    add: str = "{d} += {a};"
    configure: str = ""
    release: str = ""
    unit: str = ""

    @property
    def tiled(self) -> bool:
        """It multiplies tiles."""
        return bool(self.configure)

    def strips(self, rows: int) -> int:
        """Left fragments, or accumulators one below the other, that hold so many rows."""
        return -(-rows // self.m)

    @property
    def takes_codes(self) -> bool:
        """Codes of four bits are multiplied as they lie for any number of rows: a group takes few steps."""
        return self.acc == "s32" or self.k_pack > 1

    @property
    def deep(self) -> int:
        """Units of k in one step."""
        return self.k // self.k_pack

    @property
    def left(self) -> str:
        """What a left fragment holds: elements, or units of `k_pack` of them."""
        return unit(self.a, self.k_pack)

    @property
    def right(self) -> str:
        """What a right fragment holds."""
        return unit(self.b, self.k_pack)


@dataclass(frozen=True, slots=True)
class Transfer:
    """How elements of one type in memory come to be elements of another in a register, and back.

    Rounding is to nearest even. Floats become integers saturated. An s8 becomes
    a u8 by adding 128, which the program makes good for. Of the statements below
    those that are absent cannot be done.

    Attributes:
        memory: the type, or unit, in memory.
        register: the type, or unit, in a register.
        n: lanes of the register.
        load: {d} = n of them.
        broadcast: {d} = a left fragment of one of them.
        load_mask: load the kept lanes, zero the others, touch no other byte.
        store: n of them from {d}.
        store_mask: store the kept lanes, touch no other byte.
        rows: {d} = n units, each of elements that lie {step} apart, one below the other;
            of codes of four bits that have a byte each: words of eight, at the bits of `dtype.CODES_AT`.
    """

    memory: str
    register: str
    n: int
    load: str = ""
    broadcast: str = ""
    load_mask: str = ""
    store: str = ""
    store_mask: str = ""
    rows: str = ""


@dataclass(frozen=True, slots=True)
class Primitive:
    """A function that words call, in each language of devices; emitted where it is called.

    Attributes:
        name: of the function.
        cuda: its definition in CUDA C++.
        opencl: its definition in OpenCL C 1.2; empty if that has no such thing.
        hardware: it is an instruction, so that an emulator of CUDA brings a definition of its own.
    """

    name: str
    cuda: str
    opencl: str = ""
    hardware: bool = False


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set: what it needs, how to ask a compiler for it, its atoms.

    Attributes:
        name: unique name, the file's stem.
        title: for people.
        arch: "x86_64", "aarch64", or "any".
        features: names, as the host's detector spells them, that must all be present.
        flags: compiler flags, one per feature, never a CPU model.
        registers: vector registers for a micro-kernel's operands and sums (scalar FP registers for scalar C).
        vector_bytes: width of a register.
        shuffles: vectors are GNU C vectors, so `__builtin_shuffle` applies.
        preamble: C declarations that the vocabulary uses.
        source: manual the facts come from.
        atoms: its multiply-accumulate instructions.
        transfers: its conversions between memory and registers.
        base: the ISA that it adds to: flags, features and preamble are both their own.
        words: operations on lanes that are not spelled as on any GNU vector.
        primitives: functions that the vocabulary of a device calls.
    """

    name: str
    title: str
    arch: str
    features: tuple[str, ...]
    flags: tuple[str, ...]
    registers: int
    vector_bytes: int
    shuffles: bool
    preamble: str
    source: str
    atoms: tuple[Atom, ...]
    transfers: tuple[Transfer, ...] = ()
    base: Isa | None = None
    words: tuple[Lanes, ...] = field(default=(), hash=False)
    primitives: tuple[Primitive, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)  # asked for in every first call; those of one name are nearly always one

    def lanes(self, n: int) -> Lanes | None:
        """The words for operations on `n` lanes of f32."""
        own = next((x for x in self.words if x.n == n), None)
        return own or (self.base.lanes(n) if self.base else None)

    @property
    def functions(self) -> tuple[Primitive, ...]:
        """Its primitives, after those of the ISAs that it adds to and does not spell anew."""
        own = {x.name for x in self.primitives}
        below = self.base.functions if self.base else ()
        return (*(x for x in below if x.name not in own), *self.primitives)

    @property
    def below(self) -> tuple[Isa, ...]:
        """The ISAs that it adds to, nearest first."""
        return (self.base, *self.base.below) if self.base else ()

    def word(self, name: str) -> Atom:
        """The atom called `name`, of this ISA or of one that it adds to."""
        own = next((t for t in self.atoms if t.name == name), None)
        if own is None and self.base is None:
            raise TargetError(f"{self.name} has no atom called {name!r}")
        return own or self.base.word(name)  # type: ignore[union-attr]

    def transfer(self, memory: str, register: str, n: int) -> Transfer | None:
        """The conversion between a type in memory and one in registers of `n` lanes."""
        own = next((t for t in self.transfers if (t.memory, t.register, t.n) == (memory, register, n)), None)
        return own or (self.base.transfer(memory, register, n) if self.base else None)

    def spelling(self, atom: Atom, verb: str, memory: str = "", register: str = "") -> str:
        """The text of a verb for a type in memory; empty if this ISA cannot do it.

        Args:
            atom: whose vocabulary.
            verb: its word.
            memory: the type of what lies at the address; "" for what the verb expects.
            register: the type of the register; "" for what the verb expects.
        """
        text: str = getattr(atom, verb, "")
        row = _BY_TRANSFER.get(verb)
        if row is None or not memory:
            return text
        expected = {"load_a": atom.left, "load_b": atom.right, "load_mask": atom.right, "load_rows": atom.right}
        usual = expected.get(verb, atom.acc)
        register = register or usual
        if text and _raw(memory, register) and BY_NAME[register].bytes == BY_NAME[usual].bytes:
            return text
        found = self.transfer(memory, register, atom.n)
        return str(getattr(found, row)) if found else ""

    def _serves(self, atom: Atom, dtype: str) -> bool:
        """The atom sums what products of these types are summed in, and can be given them."""
        a, b, c = types(dtype)
        if accumulator(a, b) != atom.acc:
            return False
        if a == b == c == atom.a == atom.b and atom.m == 1:
            return True
        if atom.m > 1:
            lines = self.sums_by_lines(atom)
            fits = (a, b) == (atom.a, atom.b) or (b == "u4" and atom.tiled and self._unfolds(atom, a))
            return fits and lines is not None and self._becomes(lines, c)
        kr = atom.k_pack
        if b == "u4":
            return self._decodes(atom, a) and self._becomes(atom, c)
        if not {unit(a, kr), unit(b, kr)} <= BY_NAME.keys():
            return False
        return (
            bool(self.spelling(atom, "load_b", unit(b, kr)))
            and bool(self.spelling(atom, "load_b", unit(a, kr), atom.left))
            and self._becomes(atom, c)
        )

    def _unfolds(self, atom: Atom, a: str) -> bool:
        """Codes can be unfolded into panels of what tiles multiply elements of `a` by: floats."""
        lines, real = self.by_lines(atom), self.vector("f32", atom.n)
        if a != atom.a or atom.acc != "f32" or lines is None or real is None or not real.code:
            return False
        return bool(self.spelling(real, "store", atom.b) and self.spelling(lines, "load_rows", atom.b, atom.right))

    def _decodes(self, atom: Atom, a: str) -> bool:
        """The atom can be given words of codes, beside elements of `a`."""
        words, real = self.vector("s32", atom.n), self.vector("f32", atom.n)
        if not ((atom.code or atom.centred) and words and real and real.real):
            return False
        given = unit(a, atom.k_pack)
        return given in BY_NAME and bool(self.spelling(atom, "load_b", given, atom.left))

    def _becomes(self, atom: Atom, c: str) -> bool:
        """Sums of this atom can be stored as `c`."""
        return self._scales(atom.n, c) if atom.acc == "s32" != c else bool(self.spelling(atom, "store", c))

    def by_lines(self, atom: Atom) -> Atom | None:
        """The atom of one row whose registers hold a line of this one's right operand, of this ISA or one below."""
        if atom.m == 1:
            return atom
        kind = (1, atom.b, atom.acc, atom.n, atom.k_pack)
        alike = (t for t in self.atoms if (t.m, t.b, t.acc, t.n, t.k_pack) == kind)
        return next(alike, None) or (self.base.by_lines(atom) if self.base else None)

    def sums_by_lines(self, atom: Atom) -> Atom | None:
        """The atom of one row whose registers hold a line of this one's sums."""
        lines = self.by_lines(atom)
        whole = self.vector_bytes // BY_NAME[atom.acc].bytes
        return lines if lines is None or atom.m == 1 or lines.n == whole else self.vector(atom.acc, whole)

    def columns(self, atom: Atom) -> int:
        """What the widths of panels are multiples of: a line of sums."""
        lines = self.sums_by_lines(atom)
        return lines.n if lines else atom.n

    def vector(self, dtype: str, n: int) -> Atom | None:
        """The atom that multiplies `n` lanes of a type by lanes of that type."""
        own = (t for t in self.atoms if t.a == t.b == t.acc == dtype and t.n == n and t.k_pack == 1)
        return next(own, None) or (self.base.vector(dtype, n) if self.base else None)

    def quantises(self, atom: Atom, source: str) -> Atom | None:
        """What turns rows of `source` into codes beside an atom for integers, or None."""
        real = self.vector("f32", self.columns(atom))
        if real is None or not real.amax or not self.spelling(real, "load_b", source):
            return None
        return real if self.spelling(real, "store", "s8") else None

    def _scales(self, n: int, c: str) -> bool:
        """Integer sums can be scaled in vectors of `n` lanes and stored as `c`."""
        whole, real = self.vector("s32", n), self.vector("f32", n)
        return bool(whole and real and self.spelling(real, "load_c", "s32") and self.spelling(real, "store", c))

    def atom(self, dtype: str, lanes: int = 0) -> Atom | None:
        """The atom for a product of these types: the first, or the one with that many lanes."""
        return next((t for t in self.atoms if lanes in (0, t.n) and self._serves(t, dtype)), None)

    def narrower(self, dtype: str, n: int) -> Atom | None:
        """The narrowest atom that covers `n` columns at once, if it is not the first."""
        first = self.atom(dtype)
        fits = [t for t in self.atoms if n <= t.n and self._serves(t, dtype)]
        best = min(fits, key=lambda t: t.n, default=None)
        return None if best is first else best


def _raw(memory: str, register: str) -> bool:
    """Bits go to and fro as they are: one type, or a unit in a lane of the accumulator's."""
    m, r = BY_NAME[memory], BY_NAME[register]
    return memory == register or (m.bytes == r.bytes and (m.pack > 1) != (r.pack > 1))


def check_atom(atom: Atom, where: str) -> Atom:
    """`atom`, if it is well-formed.

    Raises:
        TargetError: it is not; `where` says in which file.
    """
    where = f"{where} {atom.name}"
    for name in (atom.a, atom.b, atom.acc):
        require(name in BY_NAME, where, f"element type {name!r} is unknown; use one of {', '.join(BY_NAME)}")
    for name in ("m", "n", "k", "k_pack", "latency"):
        require(getattr(atom, name) > 0, where, f"{name} must be positive, got {getattr(atom, name)}")
    for row, allowed in PLACEHOLDERS.items():
        strange = sorted(placeholders(getattr(atom, row), f"{where}: {row}") - allowed)
        require(not strange, where, f"row {row!r} mentions {strange}; it may mention {sorted(allowed)}")
    masks = {bool(x) for x in (atom.mask_type, atom.mask, atom.load_mask, atom.store_mask)}
    require(len(masks) == 1, where, "mask_type, mask, load_mask and store_mask come together or not at all")
    require(atom.tiled == bool(atom.release), where, "configure and release come together or not at all")
    require(atom.m > 1 or not atom.tiled, where, "tiles have an m above 1")
    if atom.m > 1 and not atom.tiled and not atom.unit:
        # A row that is left over takes both places of a fragment.
        require(atom.m == 2, where, f"without configure, m is 1 or 2, got {atom.m}")
        require(atom.deep == 1 and not atom.mask, where, "two rows have a k of k_pack, and no masks")
    return atom


def check_transfer(transfer: Transfer, where: str) -> Transfer:
    """`transfer`, if it is well-formed.

    Raises:
        TargetError: it is not; `where` says in which file.
    """
    where = f"{where} {transfer.memory} to {transfer.register}"
    for name in (transfer.memory, transfer.register):
        require(name in BY_NAME, where, f"element type {name!r} is unknown")
    require(transfer.n > 0, where, f"n must be positive, got {transfer.n}")
    for row, allowed in TRANSFERS.items():
        strange = sorted(placeholders(getattr(transfer, row), f"{where}: {row}") - allowed)
        require(not strange, where, f"row {row!r} mentions {strange}; it may mention {sorted(allowed)}")
    return transfer
