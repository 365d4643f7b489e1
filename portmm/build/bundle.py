"""Bundles: many compiled kernels in one file, with an index that is read through mmap.

Owns the format. A file has four parts, all little-endian:

- a header: magic, version of the format, `abi.VERSION`, number of rows and of objects, where the text and the code
  begin, CRC-32 of the index, and its SHA-256;
- the index: rows, sorted by the key of a question, of 16 bytes, each with where its answer is, and a table of the
  objects: where each is, its sizes packed and unpacked, and its SHA-256;
- the text of answers, each once, in which characters from U+0080 on are phrases of many answers, which a row has;
- the objects, compressed by zlib.

An answer is fields separated by tabs, of which the first may be the number of an object. The same contents give the
same bytes. The index is checked when a file is opened, an object when it is read. A file that another user could have
written is not opened.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from portmm.build.cache import Entry, digest
from portmm.build.trusted_files import file_fault
from portmm.errors import BundleError
from portmm.ir import abi
from portmm.util.records import dataclass
from portmm.version import VERSION

MAGIC, FORMAT = b"portmm\0\1", 3
HEADER = struct.Struct("<8sIIIIQQI4x32s16s")
ROW = struct.Struct("<16sII")
OBJECT = struct.Struct("<QII32s")
KEY_BYTES = 16
PHRASES, FIRST_PHRASE = "phrases", 0x80
"""The question for the phrases that are abbreviated, with a line for each, and the character of the first."""
MODULUS = 0xA43F6A8885A308D313198A2E03707299
"""A prime of 128 bits (those of pi, nearly), so that no two questions share a remainder: see `key_of`."""


def key_of(question: str) -> bytes:
    """The key of a question in a row: the remainder of its bytes as a number.

    Python's integers have it at once, where SHA-256 is a module to load: a tenth of what a first call takes.
    """
    return (int.from_bytes(question.encode() + b"\1", "little") % MODULUS).to_bytes(KEY_BYTES, "big")


@dataclass(frozen=True, slots=True)
class Bundle:
    """An open bundle.

    Attributes:
        path: of the file.
        data: its bytes.
        rows: number of questions.
        objects: number of objects.
        text: offset of the text.
        code: offset of the objects.
        signature: SHA-256 of the index, which has those of all objects.
        version: portmm's that wrote it.
        phrases: by the character that abbreviates each.
    """

    path: Path
    data: Any
    rows: int
    objects: int
    text: int
    code: int
    signature: str
    version: str
    phrases: dict[str, str]

    @property
    def library(self) -> Path:
        """A shared object beside the file, which has the kernels that have no object in it."""
        return self.path.with_suffix(".so")

    def answer(self, question: str) -> list[str] | None:
        """The fields of the answer to a question; None if it has none.

        Raises:
            BundleError: the answer is damaged.
        """
        text = self.text_of(question)
        if text is None:
            return None
        expanded = map(self.phrases.get, text, text)  # a third of the time of str.translate
        return "".join(expanded).split("\t")

    def text_of(self, question: str) -> str | None:
        """The answer to a question as it is written; None if it has none.

        Raises:
            BundleError: it is damaged.
        """
        key = key_of(question)
        low, high = 0, self.rows
        while low < high:
            middle = (low + high) // 2
            at = HEADER.size + middle * ROW.size
            if self.data[at : at + KEY_BYTES] < key:
                low = middle + 1
            else:
                high = middle
        if low == self.rows:
            return None
        same, start, size = ROW.unpack_from(self.data, HEADER.size + low * ROW.size)
        start += self.text
        try:
            return self.data[start : start + size].decode() if same == key else None
        except UnicodeDecodeError as error:
            raise self.damaged(f"an answer is no text: {error}") from error

    def damaged(self, why: str) -> BundleError:
        """The error for contents that `packed` does not write."""
        return BundleError(f"{self.path} is damaged: {why}; copy or make it again")

    def load(self, number: int) -> tuple[Entry, bytes]:
        """The entry of an object and its bytes, checked against their SHA-256.

        Raises:
            BundleError: there is no such object, or it is damaged.
        """
        import zlib

        if not 0 <= number < self.objects:
            raise BundleError(f"{self.path} has {self.objects} objects, and no number {number}: make it again")
        table = HEADER.size + self.rows * ROW.size
        start, packed, size, sha = OBJECT.unpack_from(self.data, table + number * OBJECT.size)
        start += self.code
        try:
            code = zlib.decompressobj().decompress(self.data[start : start + packed], max(size, 1))
        except zlib.error as error:
            raise self.damaged(f"object {number}: {error}") from error
        if digest(code) != sha.hex():
            raise self.damaged(f"object {number} has another SHA-256")
        key = str(sha.hex())
        return Entry(key, self.path.with_name(f"{key}.so"), key[:12], size, 0.0, "", f"of bundle {self.path}"), code


def open_bundle(path: str | os.PathLike[str], *, verify: bool = True) -> Bundle:
    """Open a bundle.

    Args:
        path: of the file.
        verify: whether to check the index, as of a file that no installer has checked.

    Raises:
        BundleError: it cannot be read, other users can write to it, it is damaged, or for another version of portmm.
    """
    at = path if isinstance(path, Path) and path.is_absolute() else Path(path).absolute()
    try:
        fd = os.open(at, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            reason = file_fault(str(at), os.fstat(fd))
            if reason:
                raise BundleError(f"bundle {at} is not used: {reason}; give it to this user or to root, for them alone")
            data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise BundleError(f"bundle {at} cannot be read: {error}") from error
    return _opened(at, data, verify=verify)


def _opened(at: Path, data: Any, *, verify: bool) -> Bundle:
    if len(data) < HEADER.size:
        raise BundleError(f"{at} is no bundle of portmm: it has {len(data)} bytes")
    magic, version, interface, rows, objects, text, code, crc, sha, release = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise BundleError(f"{at} is no bundle of portmm: it begins with {magic!r}")
    if (version, interface) != (FORMAT, abi.VERSION):
        raise BundleError(
            f"bundle {at} has format {version} and kernels of interface {interface}; this portmm {VERSION} takes "
            f"{FORMAT} and {abi.VERSION}: make it again by `portmm bundle`"
        )
    tables = HEADER.size + rows * ROW.size + objects * OBJECT.size  # the checksum is not of the header
    if not tables == text <= code <= len(data) or (verify and _checksum(data[HEADER.size : code]) != crc):
        raise BundleError(f"{at} is damaged: its index has another checksum; copy or make it again")
    by = release.rstrip(b"\0").decode("ascii", "replace")
    bundle = Bundle(at, data, rows, objects, text, code, sha.hex(), by, {})
    if (phrases := bundle.text_of(PHRASES)) is not None:
        bundle.phrases.update({chr(i): x for i, x in enumerate(phrases.split("\n"), FIRST_PHRASE)})
    return bundle


def _checksum(data: bytes) -> int:
    from zlib import crc32  # a tenth of a millisecond

    return crc32(data)


def check(bundle: Bundle) -> None:
    """Check all contents against their SHA-256.

    Raises:
        BundleError: some are damaged.
    """
    if digest(bundle.data[HEADER.size : bundle.code]) != bundle.signature:
        raise bundle.damaged("its index has another SHA-256")
    for number in range(bundle.objects):
        bundle.load(number)


def packed(answers: Mapping[str, tuple[bytes | None, tuple[str, ...]]], phrases: Sequence[str] = ()) -> bytes:
    """The bytes of a bundle; the same for the same contents.

    Args:
        answers: by question the object that the answer's first field is to name, or None, and the other fields.
        phrases: to abbreviate, in lines of their own, in this order.
    """
    import zlib

    codes = sorted({code for code, _ in answers.values() if code is not None}, key=digest)
    numbers = {code: i for i, code in enumerate(codes)}
    texts = {x: "\t".join(y if code is None else (str(numbers[code]), *y)) for x, (code, y) in answers.items()}
    if not all(map(str.isascii, texts.values())):
        raise ValueError("an answer has other characters than those of ASCII, which stand for phrases")
    for i, phrase in enumerate(phrases, FIRST_PHRASE):
        texts = {x: y.replace(phrase, chr(i)) for x, y in texts.items()}
    if phrases:
        texts[PHRASES] = "\n".join(phrases)
    if len({key_of(x) for x in texts}) < len(texts):
        raise ValueError("two questions have one key: take another modulus")
    text, rows, blob, table = bytearray(), [], bytearray(), bytearray()
    places: dict[bytes, int] = {}
    for key, question in sorted((key_of(x), x) for x in texts):
        answer = texts[question].encode()
        if answer not in places:
            places[answer] = len(text)
            text += answer
        rows.append(ROW.pack(key, places[answer], len(answer)))
    for code in codes:
        small = zlib.compress(code, 9)
        table += OBJECT.pack(len(blob), len(small), len(code), bytes.fromhex(digest(code)))
        blob += small
    index = b"".join(rows) + bytes(table)
    start = HEADER.size + len(index)
    index += bytes(text)
    header = HEADER.pack(
        MAGIC, FORMAT, abi.VERSION, len(rows), len(codes), start, HEADER.size + len(index), _checksum(index),
        bytes.fromhex(digest(index)), VERSION.encode(),
    )  # fmt: skip
    return header + index + bytes(blob)
