"""Validation of ELF shared objects before they are mapped.

Owns the check of headers, sections and symbols against the size of a file: the dynamic loader does not check them,
and a segment that extends past the end of its file ends the process with SIGBUS. Structures and constants are those of
the System V ABI, chapters 4 and 5, for objects of 64 bits.
"""

from __future__ import annotations

from struct import Struct

_MACH_O = b"\xcf\xfa\xed\xfe"  # of 64 bits: see `build.macho`
_MAGIC, _CLASS_64, _SHARED = b"\x7fELF", 2, 3
_TYPE_AT = 16  # e_type, then e_machine
_HEADER_BYTES, _SEGMENT_BYTES, _SECTION_BYTES, _SYMBOL_BYTES = 64, 56, 64, 24
# Fields of the header: e_phoff, e_shoff; then e_phentsize, e_phnum, e_shentsize, e_shnum.
_OFFSETS_AT, _COUNTS_AT = 32, 54
# Fields of a segment: type, (flags), offset, (virtual, physical address), bytes in the file, in memory, (alignment).
_SEGMENT, _LOAD, _DYNAMIC = "I4xQ16xQQ8x", 1, 2
# Fields of a section: (name), type, (flags, address), offset, bytes, link, (info, alignment, bytes of an entry).
_SECTION, _NO_BITS, _SYMBOLS = "4xI16xQQI20x", 8, 11
# Fields of a symbol: name, (info, other), section, (value, size).
_SYMBOL, _UNDEFINED = "I2xH16x", 0


def fault(code: bytes, machine: int = 0, symbols: tuple[str, ...] = ()) -> str:
    """The reason why `code` cannot be loaded as a shared object, or "" if it can.

    Args:
        code: all bytes of the file.
        machine: the expected e_machine, or cputype of macOS's files; 0 for any.
        symbols: functions that it must define.
    """
    if code[:4] == _MACH_O:
        from portmm.build import macho

        return macho.fault(code, machine, symbols)
    reason = _header_fault(code, machine)
    if reason:
        return reason
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
    """Byte order of an object, as `struct` spells it."""
    return ">" if code[5] == 2 else "<"  # EI_DATA


def _header_fault(code: bytes, machine: int) -> str:
    """Reason why a header is not that of a shared object for a machine, or ""."""
    if code[:4] != _MAGIC or len(code) < _TYPE_AT + 4:
        return "the output is not an ELF file"
    kind, of_machine = Struct(f"{_order(code)}2H").unpack_from(code, _TYPE_AT)
    if machine and of_machine != machine:
        return f"the output is for ELF machine {of_machine}, not for {machine}"
    if len(code) < _HEADER_BYTES:
        return f"the output is cut short: it has {len(code)} bytes, and an ELF header has {_HEADER_BYTES}"
    if code[4] != _CLASS_64 or kind != _SHARED:
        return f"the output is no shared object of 64 bits: ELF class {code[4]}, type {kind}"
    return ""


def _extent_fault(size: int, segments: list[tuple[int, ...]], sections: list[tuple[int, ...]]) -> str:
    """Description of a segment or section that extends past the end of the file, or ""."""
    kinds = [x[0] for x in segments]
    if _LOAD not in kinds or _DYNAMIC not in kinds:
        return "the output has no segment to load, or none for the dynamic loader"
    for kind, offset, in_file, in_memory in segments:
        if offset + in_file > size:
            return f"the output is cut short: it has {size} bytes, and a segment ends at {offset + in_file}"
        if kind == _LOAD and in_file > in_memory:
            return f"the output has a segment of {in_file} bytes for {in_memory} bytes of memory"
    for kind, offset, in_file, _ in sections:
        if kind != _NO_BITS and offset + in_file > size:
            return f"the output is cut short: it has {size} bytes, and a section ends at {offset + in_file}"
    return ""


def _symbol_fault(code: bytes, order: str, sections: list[tuple[int, ...]], symbols: tuple[str, ...]) -> str:
    """Message that names the functions which the dynamic symbol table does not define, or ""."""
    if not symbols:
        return ""
    defined: set[bytes] = set()
    for kind, offset, length, link in sections:
        if kind != _SYMBOLS or link >= len(sections):
            continue
        _, names_at, names_length, _ = sections[link]
        names = code[names_at : names_at + names_length]
        table = code[offset : offset + length - length % _SYMBOL_BYTES]
        for name, section in Struct(order + _SYMBOL).iter_unpack(table):
            if section != _UNDEFINED:
                defined.add(names[name : names.find(b"\0", name)])
    missing = [x for x in symbols if x.encode() not in defined]
    return f"the output does not define {', '.join(missing)}" if missing else ""
