"""ELF shared objects, checked before they are mapped.

Owns the check of headers, sections and symbols against the size of a file: the dynamic loader believes what it reads,
and a segment that reaches past the end of its file ends the process with SIGBUS. Imports nothing of portmm. Structures
and constants are those of the System V ABI, chapters 4 and 5, for objects of 64 bits.
"""

from __future__ import annotations

from struct import Struct

_MAGIC, _CLASS_64, _SHARED = b"\x7fELF", 2, 3
_TYPE_AT = 16  # e_type, then e_machine
_HEADER_BYTES, _SEGMENT_BYTES, _SECTION_BYTES, _SYMBOL_BYTES = 64, 56, 64, 24
# Of the header: e_phoff, e_shoff; then e_phentsize, e_phnum, e_shentsize, e_shnum.
_OFFSETS_AT, _COUNTS_AT = 32, 54
# Of a segment: type, (flags), offset, (virtual, physical address), bytes in the file, bytes in memory, (alignment).
_SEGMENT, _LOAD, _DYNAMIC = "I4xQ16xQQ8x", 1, 2
# Of a section: (name), type, (flags, address), offset, bytes, link, (info, alignment, bytes of an entry).
_SECTION, _NO_BITS, _SYMBOLS = "4xI16xQQI20x", 8, 11
# Of a symbol: name, (info, other), section, (value, size).
_SYMBOL, _UNDEFINED = "I2xH16x", 0


def fault(code: bytes, machine: int = 0, symbols: tuple[str, ...] = ()) -> str:
    """The reason why `code` cannot be loaded as a shared object, or "" where none is found.

    Args:
        code: the whole file.
        machine: the wanted e_machine; 0 for any.
        symbols: functions that it must define.
    """
    said = _header_fault(code, machine)
    if said:
        return said
    order = _order(code)
    segments_at, sections_at = Struct(f"{order}QQ").unpack_from(code, _OFFSETS_AT)
    each, count, section_each, section_count = Struct(f"{order}4H").unpack_from(code, _COUNTS_AT)
    if each != _SEGMENT_BYTES or (section_count and section_each != _SECTION_BYTES):
        return f"the output has ELF table entries of {each} and {section_each} bytes"
    ends = (segments_at + count * each, sections_at + section_count * section_each)
    if max(ends) > len(code):
        return f"the output is cut short: it has {len(code)} bytes, and its ELF tables end at {max(ends)}"
    segments = list(Struct(order + _SEGMENT).iter_unpack(code[segments_at : ends[0]]))
    sections = list(Struct(order + _SECTION).iter_unpack(code[sections_at : ends[1]]))
    return _extent_fault(len(code), segments, sections) or _symbol_fault(code, order, sections, symbols)


def _order(code: bytes) -> str:
    """The byte order of an object, as `struct` spells it."""
    return ">" if code[5] == 2 else "<"  # EI_DATA


def _header_fault(code: bytes, machine: int) -> str:
    """A header that is not that of a shared object for a machine."""
    if code[:4] != _MAGIC or len(code) < _TYPE_AT + 4:
        return "the output is not an ELF file"
    kind, found = Struct(f"{_order(code)}2H").unpack_from(code, _TYPE_AT)
    if machine and found != machine:
        return f"the output is for ELF machine {found}, not for {machine}"
    if len(code) < _HEADER_BYTES:
        return f"the output is cut short: it has {len(code)} bytes, and an ELF header {_HEADER_BYTES}"
    if code[4] != _CLASS_64 or kind != _SHARED:
        return f"the output is no shared object of 64 bits: ELF class {code[4]}, type {kind}"
    return ""


def _extent_fault(size: int, segments: list[tuple[int, ...]], sections: list[tuple[int, ...]]) -> str:
    """A segment or section that the file does not hold."""
    kinds = [x[0] for x in segments]
    if _LOAD not in kinds or _DYNAMIC not in kinds:
        return "the output has no segment to load, or none for the dynamic loader"
    for kind, offset, held, wide in segments:
        if offset + held > size:
            return f"the output is cut short: it has {size} bytes, and a segment ends at {offset + held}"
        if kind == _LOAD and held > wide:
            return f"the output has a segment of {held} bytes for {wide} bytes of memory"
    for kind, offset, held, _ in sections:
        if kind != _NO_BITS and offset + held > size:
            return f"the output is cut short: it has {size} bytes, and a section ends at {offset + held}"
    return ""


def _symbol_fault(code: bytes, order: str, sections: list[tuple[int, ...]], symbols: tuple[str, ...]) -> str:
    """A wanted function that the dynamic symbol table does not define."""
    if not symbols:
        return ""
    defined: set[bytes] = set()
    for kind, offset, held, link in sections:
        if kind != _SYMBOLS or link >= len(sections):
            continue
        _, names_at, names_held, _ = sections[link]
        names = code[names_at : names_at + names_held]
        table = code[offset : offset + held - held % _SYMBOL_BYTES]
        for name, section in Struct(order + _SYMBOL).iter_unpack(table):
            if section != _UNDEFINED:
                defined.add(names[name : names.find(b"\0", name)])
    missing = [x for x in symbols if x.encode() not in defined]
    return f"the output does not define {', '.join(missing)}" if missing else ""
