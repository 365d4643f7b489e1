"""Validation of Mach-O libraries, the shared objects of macOS: see `build.elf`.

Owns the check of the header, the load commands and the symbols against the size of a file. Structures and constants are
those of Apple's <mach-o/loader.h> and <mach-o/nlist.h>, for libraries of 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any

_LIBRARIES = (6, 8)  # MH_DYLIB, MH_BUNDLE
# magic, cputype, cpusubtype, filetype, ncmds, sizeofcmds, flags, reserved; and of each command: cmd, cmdsize.
_HEADER, _COMMAND = Struct("<8I"), Struct("<2I")
# After a command's head: segname, vmaddr, vmsize, fileoff, filesize; or symoff, nsyms, stroff, strsize.
_SEGMENT, _SYMBOLS = 0x19, 2  # LC_SEGMENT_64, LC_SYMTAB
_FORMS = {_SEGMENT: Struct("<16s4Q"), _SYMBOLS: Struct("<4I")}
# n_strx, n_type, n_sect, n_desc, n_value; the bits of n_type that say where it is defined.
_SYMBOL, _TYPE, _UNDEFINED = Struct("<I2BHQ"), 0x0E, 0


def fault(code: bytes, machine: int = 0, symbols: tuple[str, ...] = ()) -> str:
    """The reason why `code` cannot be loaded as a library, or "" if it can.

    Args:
        code: all bytes of the file.
        machine: the expected cputype; 0 for any.
        symbols: functions that it must define.
    """
    if len(code) < _HEADER.size:
        return f"the output is cut short: it has {len(code)} bytes, and a Mach-O header has {_HEADER.size}"
    _, of_machine, _, kind, count, size, *_ = _HEADER.unpack_from(code)
    if machine and of_machine != machine:
        return f"the output is for Mach-O machine {of_machine:#x}, not for {machine:#x}"
    if kind not in _LIBRARIES:
        return f"the output is no library: Mach-O type {kind}"
    commands = list(_commands(code[: _HEADER.size + size], count))
    tables = [body for command, body in commands if command == _SYMBOLS]
    ends = [
        _HEADER.size + size,
        *(offset + length for command, body in commands for offset, length in _parts(command, body)),
    ]
    if len(ends) == 1 or max(ends) > len(code):
        return f"the output is cut short: it has {len(code)} bytes, and its Mach-O parts end at {max(ends)}"
    defined = {x for body in tables for x in _defined(code, *body)}
    missing = [x for x in symbols if b"_" + x.encode() not in defined]
    return f"the output does not define {', '.join(missing)}" if missing else ""


def _commands(code: bytes, count: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The load commands that are looked at, with their fields; they end where one is malformed."""
    at = _HEADER.size
    for _ in range(count):
        if at + _COMMAND.size > len(code):
            return
        command, length = _COMMAND.unpack_from(code, at)
        form = _FORMS.get(command)
        if length < _COMMAND.size + (form.size if form else 0) or at + length > len(code):
            return
        if form:
            yield command, form.unpack_from(code, at + _COMMAND.size)
        at += length


def _parts(command: int, body: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
    """Offsets and bytes of the parts of a file that a load command names."""
    if command == _SEGMENT:
        return (body[3:],)
    at, count, names_at, names_bytes = body
    return (at, count * _SYMBOL.size), (names_at, names_bytes)


def _defined(code: bytes, at: int, count: int, names_at: int, names_bytes: int) -> set[bytes]:
    """Names of the symbols that a table defines."""
    names = code[names_at : names_at + names_bytes]
    every = _SYMBOL.iter_unpack(code[at : at + count * _SYMBOL.size])
    return {names[x : names.find(b"\0", x)] for x, kind, *_ in every if kind & _TYPE != _UNDEFINED}
