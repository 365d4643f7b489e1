"""Kernels of a library for macOS as a shared object for Linux, so that an emulator can run them.

Kernels call nothing and have no addresses in their data, so that their segments work wherever they are mapped.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from portmm.build import macho
from portmm.build.compiler import find_compiler

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 1 << 14


def segments_and_symbols(code: bytes) -> tuple[dict[bytes, tuple[int, bytes]], dict[str, int]]:
    """Addresses and contents of segments, without that of the linker, and addresses of functions, by their names."""
    *_, count, size, _, _ = macho._HEADER.unpack_from(code)
    segments, symbols = {}, {}
    for command, body in macho._commands(code[: macho._HEADER.size + size], count):
        if command == macho._SEGMENT:
            name, address, _, offset, length = body
            segments[name.rstrip(b"\0")] = address, code[offset : offset + length]
        else:
            at, number, names_at, names_bytes = body
            names = code[names_at : names_at + names_bytes]
            for name, kind, _, _, value in macho._SYMBOL.iter_unpack(code[at : at + number * macho._SYMBOL.size]):
                if kind & macho._TYPE != macho._UNDEFINED:
                    symbols[names[name : names.find(b"\0", name)].decode().removeprefix("_")] = value
    segments.pop(b"__LINKEDIT")
    return segments, symbols


def as_elf(code: bytes, output: Path) -> Path:
    """Write a shared object for Linux on AArch64 with the code and functions of a library for macOS."""
    segments, symbols = segments_and_symbols(code)
    image = bytearray(max(address + len(data) for address, data in segments.values()))
    for address, data in segments.values():
        image[address : address + len(data)] = data
    flat = output.with_suffix(".image")
    flat.write_bytes(image)
    lines = [".text", f".balign {PAGE}", "image:", f'.incbin "{flat}"']
    for name, address in symbols.items():
        lines += [f".globl {name}", f".type {name}, %function", f".set {name}, image + {address}"]
    text = output.with_suffix(".s")
    text.write_text("\n".join((*lines, "")))
    words = [*find_compiler("aarch64").argv, "-shared", "-nostdlib", str(text), "-o", str(output)]
    subprocess.run(words, check=True)
    return output
