"""Target machine: instruction sets, memory levels, rates.

Owns the records that describe a machine, their checks, and the loader that reads
them from TOML. Pure: it never queries the host; `host.detect` does.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from portmm.errors import TargetError
from portmm.target.atom import Atom, check_atom
from portmm.target.cache_levels import MemoryLevel, check_level
from portmm.target.clouds import CloudFamily, family_of
from portmm.target.clouds import read as read_clouds
from portmm.target.device import Device, check_device
from portmm.target.fragment import Fragment, check_shapes, fragments_of, resolved
from portmm.target.isa import Isa, Primitive, Transfer, check_transfer
from portmm.target.match import Match
from portmm.target.toml_schema import nearest, of_length, parse, record, require
from portmm.target.vector_ops import lanes_of
from portmm.util.records import dataclass

ARCHS = ("x86_64", "aarch64", "riscv64", "device", "any")

GENERIC_DEVICES = ("opencl_gpu", "cuda_gpu", "opencl_cpu")
"""Targets for devices that have no description of their own."""


@dataclass(frozen=True, slots=True)
class Target:
    """A target machine.

    Attributes:
        name: the chip file's stem.
        title: full name, for messages.
        arch: "x86_64", "aarch64", "device" for a machine that runs kernels over a grid of
            blocks of threads, or "any" for an invented machine.
        vendor: maker of the chip.
        isas: its instruction sets, best first.
        levels: memory levels, nearest first.
        rates: atom name -> mac instructions that one core starts per cycle; of a
            device, those that all threads of one processor start.
        cores: cores that may be used, 0 if unknown.
        frequency_ghz: sustained clock, of a device its boost clock; 0 if unknown.
        rows_ahead: useful prefetch distance, in rows of a matrix that is streamed in place,
            0 where software prefetches only disturb the hardware's.
        tile_prefetch: whether the next tile's operands are worth a software prefetch where they are not panels of a B
            packed once, which come from an outer cache.
        source: manual with the facts.
        measured: measured rates that replace derived ones: "<atom>" in GFLOP/s
            and "<level>" or "memory" in GB/s, one core each.
        searches: exhaustive searches of this chip that are stored in `bench/results`, which selections of
            the model are compared with; without any, see `schedule.cpu_textbook` and `counted`.
        match: identifications, any of which suffices.
        device: the limits of a device, None for a CPU.
    """

    name: str
    title: str
    arch: str
    vendor: str
    isas: tuple[Isa, ...]
    levels: tuple[MemoryLevel, ...]
    rates: dict[str, float] = field(default_factory=dict)
    cores: int = 0
    frequency_ghz: float = 0.0
    rows_ahead: int = 0
    tile_prefetch: bool = True
    source: str = ""
    measured: dict[str, float] = field(default_factory=dict)
    searches: tuple[str, ...] = ()
    match: tuple[Match, ...] = ()
    device: Device | None = None

    def level(self, name: str) -> MemoryLevel | None:
        """The memory level called `name`, or None."""
        return next((x for x in self.levels if x.name == name), None)

    def counted(self, name: str) -> int:
        """Bytes of a memory level that schedules for one core may use, 0 if there is no such level.

        The load of other cores is unknown, so it is an equal part of a level that cores share; on a chip with stored
        searches it is all of the level, as in these searches.
        """
        level = self.level(name)
        return 0 if level is None else level.bytes if self.searches else level.share

    @property
    def largest(self) -> int:
        """Bytes of the largest memory level, also where cores share it; 0 without levels."""
        return max((x.bytes for x in self.levels), default=0)

    def isa(self, name: str) -> Isa | None:
        """The ISA called `name` if this machine has it."""
        return next((x for x in self.isas if x.name == name), None)

    def atom(self, isa: str, dtype: str, lanes: int) -> Atom | None:
        """The atom of an ISA for a product of these types, with that many lanes, or 0; None if there is none."""
        own = self.isa(isa)
        return own.atom(dtype, lanes) if own else None

    def limited_to(self, isa: str) -> Target:
        """This machine with `isa` as its best instruction set.

        Raises:
            TargetError: the machine does not have that ISA.
        """
        names = [x.name for x in self.isas]
        if isa not in names:
            raise TargetError(f"target {self.name} has no ISA {isa!r}; it has {', '.join(names)}")
        return replace(self, isas=self.isas[names.index(isa) :])


def _check_target(target: Target, where: str) -> Target:
    require(target.arch in ARCHS, where, f"arch {target.arch!r} is unknown; use one of {', '.join(ARCHS)}")
    require(bool(target.isas), where, 'isas is empty; plain C is "scalar"')
    described = (target.arch == "device") == (target.device is not None)
    require(described, where, 'a chip of arch "device", and no other, has a [chip.device] table')
    for isa in target.isas:
        require(isa.arch in ("any", target.arch), where, f"ISA {isa.name} is for {isa.arch}, the chip is {target.arch}")
    sizes = [level.bytes for level in target.levels]
    require(sizes == sorted(set(sizes)), where, f"levels must grow from the nearest to the farthest, got {sizes} bytes")
    require(target.rows_ahead >= 0, where, f"rows_ahead must not be negative, got {target.rows_ahead}")
    atoms = {atom.name for isa in target.isas for atom in isa.atoms}
    for name, rate in target.rates.items():
        require(name in atoms, where, f"rates names atom {name!r}, which none of its ISAs has")
        require(rate > 0, where, f"the rate of {name} must be positive, got {rate}")
    return target


def _root() -> Path:
    # Not importlib.resources: it costs 4 ms to import, and the wheel is never run from a zip.
    return Path(import_module("portmm.targets").__path__[0])


def _read(folder: str, name: str) -> tuple[dict[str, Any], str]:
    if name not in names(folder):
        raise TargetError(f"no {folder} called {name!r}{nearest(name, names(folder))}")
    path, bits = _files(folder)[name]
    table, where = parse(path.read_text(), f"{folder}/{path.name}")
    return of_length(table, bits) if bits else table, where


@cache
def _files(folder: str) -> dict[str, tuple[Path, int]]:
    """Name of each shipped description -> its file, and its vector length in bits if the file is for several."""
    files: dict[str, tuple[Path, int]] = {}
    for path in (_root() / folder).glob("*.toml"):
        text = path.read_bytes() if folder == "isa" else b""  # parsing them all would take milliseconds
        lengths = [int(bits) for bits in text.partition(b"\nvl = [")[2].partition(b"]")[0].split(b",") if bits]
        files.update({f"{path.stem}{bits or ''}": (path, bits) for bits in lengths or [0]})
    return files


@cache
def names(folder: str) -> tuple[str, ...]:
    """Names of all shipped descriptions in `folder`, "isa" or "chip"."""
    return tuple(sorted(_files(folder)))


@cache
def names_of(kind: str, folder: str = "chip") -> tuple[str, ...]:
    """Names of the shipped descriptions in `folder` that are of one kind.

    Args:
        kind: "cpu" or "device".
        folder: "isa" or "chip".
    """
    load = load_isa if folder == "isa" else load_target
    return tuple(name for name in names(folder) if (load(name).arch == "device") == (kind == "device"))


def parse_isa(table: dict[str, Any], where: str) -> Isa:
    """The `Isa` of a parsed TOML file; `where` names the file in errors."""
    if "isa" not in table or "atom" not in table:
        raise TargetError(f"{where}: needs an [isa] table and at least one [[atom]]")
    base = load_isa(table["isa"]["base"]) if "base" in table["isa"] else None
    fragments = {**(base.fragments if base else {}), **fragments_of(table.get("fragment", {}), where)}
    atoms = tuple(_atom(row, fragments, f"{where}: atom") for row in _completed(table["atom"], f"{where}: atom"))
    moves = tuple(
        check_transfer(record(Transfer, row, f"{where}: transfer"), f"{where}: transfer")
        for row in table.get("transfer", [])
    )
    inherited = [base.lanes(row["n"]) if base and "n" in row else None for row in table.get("lanes", [])]
    words = tuple(
        lanes_of((x.words if x else {}) | row, f"{where}: lanes")
        for x, row in zip(inherited, table.get("lanes", []), strict=True)
    )
    calls = tuple(record(Primitive, row, f"{where}: primitive") for row in table.get("primitive", []))
    isa = replace(_on_base(table["isa"], base, atoms, moves, where), words=words, primitives=calls, fragments=fragments)
    require(isa.arch in ARCHS, where, f"arch {isa.arch!r} is unknown; use one of {', '.join(ARCHS)}")
    require(isa.registers > 0 and isa.vector_bytes > 0, where, "registers and vector_bytes must be positive")
    for atom in atoms:
        operands, shape = (atom.a_fragment, atom.b_fragment, atom.acc_fragment), (atom.m, atom.n, atom.k)
        check_shapes(operands, shape, isa.warp, f"{where}: atom {atom.name}", alone=atom.unit == "warp")
    return isa


def _completed(rows: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Rows of atoms; one that is `like` an atom before it has that atom's fields where it has none of its own."""
    completed: list[dict[str, Any]] = []
    for row in rows:
        if isinstance(row, dict) and "like" in row:
            like = next((x for x in completed if x.get("name") == row["like"]), None)
            require(like is not None, where, f"no atom before {row.get('name')} is called {row['like']!r}")
            completed.append({name: value for name, value in {**(like or {}), **row}.items() if name != "like"})
        else:
            completed.append(row)
    return completed


def _atom(row: dict[str, Any], fragments: dict[str, Fragment], where: str) -> Atom:
    return check_atom(record(Atom, resolved(row, fragments, where), where), where)


def _on_base(
    row: dict[str, Any], base: Isa | None, atoms: tuple[Atom, ...], transfers: tuple[Transfer, ...], where: str
) -> Isa:
    """The ISA with the fields that it inherits from its base."""
    fields = {name: value for name, value in row.items() if name != "base"}
    if base is not None:
        inherited = {x: getattr(base, x) for x in ("arch", "registers", "vector_bytes", "shuffles", "warp")}
        fields = {"preamble": "", **inherited, **fields}
        fields["flags"] = [*base.flags, *fields.get("flags", [])]
        fields["features"] = [*base.features, *fields.get("features", [])]
        fields["preamble"] = f"{base.preamble.strip()}\n{fields['preamble'].strip()}\n"
    isa: Isa = record(Isa, {**fields, "atoms": atoms, "transfers": transfers}, where)
    return replace(isa, base=base)


@cache
def load_isa(name: str) -> Isa:
    """The shipped ISA called `name`.

    Raises:
        TargetError: there is none, or its file is malformed.
    """
    return parse_isa(*_read("isa", name))


def parse_target(table: dict[str, Any], where: str) -> Target:
    """The `Target` of a parsed TOML file; `where` names the file in errors.

    Raises:
        TargetError: a field is missing, unknown, of the wrong type, or out of range.
    """
    if not isinstance(table.get("chip"), dict):
        raise TargetError(f"{where}: needs a [chip] table")
    chip = dict(table["chip"])
    levels = tuple(
        check_level(record(MemoryLevel, row, f"{where}: level"), f"{where}: level") for row in chip.pop("level", [])
    )
    matches = tuple(_match(row, f"{where}: match") for row in chip.pop("match", []))
    own = {isa.name: isa for isa in (parse_isa(t, f"{where}: [[define]]") for t in table.get("define", []))}
    isas = tuple(own.get(name) or load_isa(name) for name in chip.pop("isas", []))
    fields = {**chip, "isas": isas, "levels": levels, "match": matches}
    if "device" in chip:
        fields["device"] = check_device(record(Device, chip["device"], f"{where}: device"), f"{where}: device")
    return _check_target(record(Target, fields, where), where)


def _match(row: dict[str, Any], where: str) -> Match:
    # A single model or stepping is a range of one.
    ranges = {k: [x if isinstance(x, list) else [x, x] for x in row[k]] for k in ("models", "steppings") if k in row}
    return record(Match, {**row, **ranges}, where)


@cache
def _shipped(name: str) -> Target:
    return parse_target(*_read("chip", name))


def load_target(name: str) -> Target:
    """The shipped chip called `name` ("-" reads as "_"), or the description in a file `*.toml`.

    Raises:
        TargetError: there is none, or its file is malformed.
    """
    if not name.endswith(".toml"):
        return _shipped(_spelled(name))
    try:
        text = Path(name).read_text()
    except OSError as error:
        raise TargetError(f"cannot read {name}: {error}; use a chip's name or a .toml file") from error
    return parse_target(*parse(text, name))


def chips_mentioning(text: str) -> list[Target]:
    """The shipped chips whose file contains `text`: parsing all files would take milliseconds."""
    return [_shipped(path.stem) for path in sorted((_root() / "chip").glob("*.toml")) if text in path.read_text()]


def described(name: str) -> Target:
    """The target of a name, which need not run on this machine: a chip, a `*.toml` file, an ISA, or a cloud instance.

    An ISA's name selects the smallest shipped machine that has it, a cloud instance's the likeliest of its chips.

    Raises:
        TargetError: `name` is none of these, or its file is malformed.
    """
    if name in names("isa"):
        return _smallest(load_isa(name))
    if name.endswith(".toml") or _spelled(name) in names("chip"):
        return load_target(name)
    if (family := instance(name)) is not None:
        return _shipped(family.likeliest)
    families = [x.name for x in clouds()]
    raise TargetError(f"no target called {name!r}{nearest(name, (*names('chip'), *names('isa'), *families))}")


def _spelled(name: str) -> str:
    """A chip's name as in its file name."""
    return name.lower().replace("-", "_")


def devices() -> list[Target]:
    """The described devices, the smallest first."""
    every = (_shipped(name) for name in names_of("device"))
    return sorted(every, key=lambda x: (x.device.processors, x.device.memory_gbs) if x.device else (0, 0))


def _smallest(isa: Isa) -> Target:
    """The smallest shipped machine that has an ISA, limited to it."""
    if isa.arch == "device":
        generic = [_shipped(name) for name in GENERIC_DEVICES]
        having = next((chip for chip in (*generic, *devices()) if chip.isa(isa.name)), None)
        return having.limited_to(isa.name) if having else _generic_device(isa)
    chips = [_shipped(name) for name in names("chip")]
    generic = [chip for chip in chips if any(m.features for m in chip.match) and isa.arch in ("any", chip.arch)]
    generic.sort(key=lambda chip: (chip.arch != "x86_64", sum(len(m.features) for m in chip.match)))
    having = next((chip for chip in generic if chip.isa(isa.name)), None)
    if having:
        return having.limited_to(isa.name)
    # No generic level has it (SVE has none): the highest level, with this ISA added.
    return replace(generic[-1], isas=(isa, *generic[-1].isas))


def _generic_device(isa: Isa) -> Target:
    """The generic device of OpenCL with an ISA that no shipped chip lists, and the warps that this needs."""
    chip = _shipped("opencl_gpu")
    device = replace(chip.device, warp=isa.warp) if chip.device and isa.warp else chip.device
    return replace(chip, isas=(isa, *chip.isas), device=device)


@cache
def clouds() -> tuple[CloudFamily, ...]:
    """All cloud families, in the order of `clouds.toml`.

    Raises:
        TargetError: the table is malformed, or names a chip that does not exist.
    """
    where = "clouds.toml"
    return read_clouds((_root() / where).read_text(), where, names("chip"))


def instance(name: str) -> CloudFamily | None:
    """The family of a cloud instance, by the instance's name or its own; None for any other name of a target.

    Raises:
        TargetError: families of several clouds have this name.
    """
    if name in names("isa") or name.endswith(".toml") or _spelled(name) in names("chip"):
        return None
    return family_of(name, clouds())
