"""Instruction sets: their transfers and primitives, and the text that spells a verb.

Owns `Isa`, `Transfer`, `Primitive`, and the checks of transfers; atoms are in `atom`.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from portmm.errors import TargetError
from portmm.spec.dtype import BY_NAME, accumulator, types, unit
from portmm.target.toml_schema import placeholders, require
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.fragment import Fragment
    from portmm.target.vector_ops import Lanes

TRANSFERS = {
    "load": {"d", "p"},
    "broadcast": {"d", "p"},
    "load_mask": {"d", "p", "mask"},
    "store": {"d", "p"},
    "store_mask": {"d", "p", "mask"},
    "rows": {"d", "p", "step"},
}
"""Field of a transfer -> placeholders that its text may have."""
_BY_TRANSFER = {
    "load_a": "broadcast", "load_b": "load", "load_c": "load", "load_mask": "load_mask",
    "store": "store", "store_mask": "store_mask", "load_rows": "rows",
}  # fmt: skip
"""Verb -> the field of a transfer that spells it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Conversion of elements of a type in memory to those of another in a register, and back.

    Rounding is to nearest even. Floats are converted to integers with saturation. An s8 is
    converted to a u8 by adding 128, which the program compensates. Operations whose
    statement is empty are not supported.

    Attributes:
        memory: the type, or unit, in memory.
        register: the type, or unit, in a register.
        n: lanes of the register.
        load: {d} = n of them.
        broadcast: {d} = a left fragment of one of them.
        load_mask: load the kept lanes, zero the others, touch no other byte.
        store: n of them from {d}.
        store_mask: store the kept lanes, touch no other byte.
        rows: {d} = n units, each of elements of one column, with rows at a stride of {step};
            for int4 values in bytes: words of eight, at the bits of `dtype.CODES_AT`.
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


def check_transfer(transfer: Transfer, where: str) -> Transfer:
    """The transfer itself, after its checks.

    Raises:
        TargetError: it is malformed; `where` names the file.
    """
    where = f"{where} {transfer.memory} to {transfer.register}"
    for name in (transfer.memory, transfer.register):
        require(name in BY_NAME, where, f"element type {name!r} is unknown")
    require(transfer.n > 0, where, f"n must be positive, got {transfer.n}")
    for row, allowed in TRANSFERS.items():
        unknown = sorted(placeholders(getattr(transfer, row), f"{where}: {row}") - allowed)
        require(not unknown, where, f"row {row!r} mentions {unknown}; it may mention {sorted(allowed)}")
    return transfer


@dataclass(frozen=True, slots=True)
class Primitive:
    """A function that verbs call, in each language of devices; emitted where it is called.

    Attributes:
        name: of the function.
        cuda: its definition in CUDA C++.
        opencl: its definition in OpenCL C 1.2; empty if that cannot express it.
        hardware: it is an instruction, for which an emulator of CUDA has its own definition.
    """

    name: str
    cuda: str
    opencl: str = ""
    hardware: bool = False


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set: required features, compiler flags and atoms.

    Attributes:
        name: unique name, the file's stem.
        title: full name, for messages.
        arch: "x86_64", "aarch64", or "any".
        features: names, as the host's detector spells them, that must all be present.
        flags: compiler flags, one per feature, never a CPU model.
        registers: vector registers for a micro-kernel's operands and sums (scalar FP registers for scalar C).
        vector_bytes: width of a register.
        shuffles: vectors are GNU C vectors, so `__builtin_shuffle` applies.
        preamble: C declarations that the verbs use.
        source: manual with the facts.
        atoms: its multiply-accumulate instructions.
        transfers: its conversions between memory and registers.
        base: the ISA that it extends: flags, features and preamble include those of the base.
        words: vector operations that are not spelled as on any GNU vector.
        primitives: functions that the verbs of a device call.
        warp: lanes of a warp that its atoms are for; 0 for any number.
        fragments: layouts of operands and sums in the registers of a warp, by name, those of its base too.
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
    warp: int = 0
    fragments: dict[str, Fragment] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)  # used in every first call; two ISAs of one name are rare

    def lanes(self, n: int) -> Lanes | None:
        """The spellings of operations on `n` lanes of f32."""
        own = next((x for x in self.words if x.n == n), None)
        return own or (self.base.lanes(n) if self.base else None)

    @property
    def functions(self) -> tuple[Primitive, ...]:
        """All primitives: those of its base ISAs that it does not redefine, then its own."""
        own = {x.name for x in self.primitives}
        inherited = self.base.functions if self.base else ()
        return (*(x for x in inherited if x.name not in own), *self.primitives)

    @property
    def below(self) -> tuple[Isa, ...]:
        """The base ISAs, nearest first."""
        return (self.base, *self.base.below) if self.base else ()

    def word(self, name: str) -> Atom:
        """The atom called `name`, of this ISA or of a base."""
        own = next((t for t in self.atoms if t.name == name), None)
        if own is None and self.base is None:
            raise TargetError(f"{self.name} has no atom called {name!r}")
        return own or self.base.word(name)  # type: ignore[union-attr]

    def transfer(self, memory: str, register: str, n: int) -> Transfer | None:
        """The conversion between a type in memory and one in registers of `n` lanes."""
        own = next((t for t in self.transfers if (t.memory, t.register, t.n) == (memory, register, n)), None)
        return own or (self.base.transfer(memory, register, n) if self.base else None)

    def spelling(self, atom: Atom, verb: str, memory: str = "", register: str = "") -> str:
        """The text of a verb for a type in memory; empty if this ISA does not support it.

        Args:
            atom: the atom.
            verb: name of its verb.
            memory: the type of the elements in memory; "" for the type that the verb expects.
            register: the type of the register; "" for the type that the verb expects.
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
        conversion = self.transfer(memory, register, atom.n)
        return str(getattr(conversion, row)) if conversion else ""

    def _serves(self, atom: Atom, dtype: str) -> bool:
        """Whether an atom has the accumulator of products of these types, and transfers of their elements."""
        a, b, c = types(dtype)
        if accumulator(a, b) != atom.acc:
            return False
        if a == b == c == atom.a == atom.b and atom.m == 1:
            return True
        if atom.m > 1:
            by_rows = self.sum_row_atom(atom)
            quantized = b == "u4" and atom.tiled and (self._repacks(atom, a) or self.decodes_tiles(atom, a))
            fits = (a, b) == (atom.a, atom.b) or quantized
            return fits and by_rows is not None and self._stores(by_rows, c)
        kr = atom.k_pack
        if b == "u4":
            return self._decodes(atom, a) and self._stores(atom, c)
        if not {unit(a, kr), unit(b, kr)} <= BY_NAME.keys():
            return False
        return (
            bool(self.spelling(atom, "load_b", unit(b, kr)))
            and bool(self.spelling(atom, "load_b", unit(a, kr), atom.left))
            and self._stores(atom, c)
        )

    def _repacks(self, atom: Atom, a: str) -> bool:
        """Whether int4 values can be repacked to panels of floats, which tiles multiply by elements of `a`."""
        by_rows, real = self.row_atom(atom), self.vector("f32", atom.n)
        if a != atom.a or atom.acc != "f32" or by_rows is None or real is None or not real.code:
            return False
        return bool(self.spelling(real, "store", atom.b) and self.spelling(by_rows, "load_rows", atom.b, atom.right))

    def decodes_tiles(self, atom: Atom, a: str) -> bool:
        """Whether int4 values can be converted to tiles of B, without scales, for an A of `a`, perhaps in parts."""
        by_rows, words, real = self.code_atom(atom), self.vector("s32", atom.n), self.vector("f32", atom.n)
        if self.row_atom(atom) is None or by_rows is None or words is None or real is None:
            return False
        if atom.acc == "s32":
            return bool(a == atom.a and real.real)
        # Parts are cut at the bits of bf16.
        return bool(
            atom.b == "bf16"
            and BY_NAME[a].eps
            and self.spelling(real, "load_b", a)
            and self.spelling(real, "store", "bf16")
        )

    def code_atom(self, atom: Atom) -> Atom | None:
        """The atom of one row that converts int4 values to rows of this one's right operand, of this ISA or a base."""
        kind = (1, atom.acc, atom.n, atom.k_pack)
        alike = (t for t in self.atoms if (t.m, t.acc, t.n, t.k_pack) == kind and t.e2m1)
        own = (t for t in alike if (t.code and t.b == "u4" if t.acc == "s32" else t.centred and t.b == atom.b))
        return next(own, None) or (self.base.code_atom(atom) if self.base else None)

    def _decodes(self, atom: Atom, a: str) -> bool:
        """Whether an atom supports words of int4 values, multiplied by elements of `a`."""
        words, real = self.vector("s32", atom.n), self.vector("f32", atom.n)
        if not ((atom.code or atom.centred) and words and real and real.real):
            return False
        left = unit(a, atom.k_pack)
        return left in BY_NAME and bool(self.spelling(atom, "load_b", left, atom.left))

    def _stores(self, atom: Atom, c: str) -> bool:
        """Whether sums of this atom can be stored as `c`."""
        return self._scales(atom.n, c) if atom.acc == "s32" != c else bool(self.spelling(atom, "store", c))

    def row_atom(self, atom: Atom) -> Atom | None:
        """The atom of one row whose registers are a row of this one's right operand, of this ISA or a base."""
        if atom.m == 1:
            return atom
        kind = (1, atom.b, atom.acc, atom.n, atom.k_pack)
        alike = (t for t in self.atoms if (t.m, t.b, t.acc, t.n, t.k_pack) == kind)
        return next(alike, None) or (self.base.row_atom(atom) if self.base else None)

    def sum_row_atom(self, atom: Atom) -> Atom | None:
        """The atom of one row whose registers are a row of this one's sums."""
        by_rows = self.row_atom(atom)
        whole = self.vector_bytes // BY_NAME[atom.acc].bytes
        return by_rows if by_rows is None or atom.m == 1 or by_rows.n == whole else self.vector(atom.acc, whole)

    def columns(self, atom: Atom) -> int:
        """Columns of a vector of sums, which the widths of panels are multiples of."""
        by_rows = self.sum_row_atom(atom)
        return by_rows.n if by_rows else atom.n

    def vector(self, dtype: str, n: int) -> Atom | None:
        """The atom that multiplies `n` lanes of a type by lanes of that type."""
        own = (t for t in self.atoms if t.a == t.b == t.acc == dtype and t.n == n and t.k_pack == 1)
        return next(own, None) or (self.base.vector(dtype, n) if self.base else None)

    def quantises(self, atom: Atom, source: str) -> Atom | None:
        """The atom of f32 that quantises rows of `source` for an atom of integers, or None."""
        real = self.vector("f32", self.columns(atom))
        if real is None or not real.amax or not self.spelling(real, "load_b", source):
            return None
        return real if self.spelling(real, "store", "s8") else None

    def _scales(self, n: int, c: str) -> bool:
        """Whether integer sums can be scaled in vectors of `n` lanes and stored as `c`."""
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
    """Whether bits are loaded and stored without conversion: one type, or a unit in a lane of the accumulator's."""
    m, r = BY_NAME[memory], BY_NAME[register]
    return memory == register or (m.bytes == r.bytes and (m.pack > 1) != (r.pack > 1))
