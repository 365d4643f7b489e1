"""Shapes and machines of a bundle, as a file and a command line name them.

Owns `Shape` and `AttentionShape`, the files that list shapes, and the problems of calls with dense arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portmm.arrays.call import problem
from portmm.errors import BundleError
from portmm.spec.dtype import CODES_KR, USUAL_GROUP, types, word_of
from portmm.spec.row_classes import last_of_class
from portmm.spec.row_classes import rows as rows_of
from portmm.target.reported_device import device_target
from portmm.target.target import Target, clouds, described, instance, load_target, names

if TYPE_CHECKING:
    from portmm.spec.problem import Problem

LAYOUTS = ("row", "col", "packed")
MOST_ROWS = 1 << 16
"""Largest M of a range."""
ATTENTION = "attention"
"""The word that begins a line of attention."""
ATTENTION_EXAMPLE = "attention 1,128 512 64 f32 heads=32 kv_heads=8 causal"
"""Such a line: queries, keys, elements of a head."""
ATTENTION_FLAGS, ATTENTION_SIZES = ("causal", "window", "lse"), ("items", "heads", "kv_heads", "dv")
ATTENTION_TYPES = ("f32", "bf16", "f16")
GROUP = "group="
"""The beginning of a word of a line."""
EXAMPLE = "1-512 768 3072 f32 packed"
"""A line of a file."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of products.

    Attributes:
        rows: the values of M, one for each class.
        n, k: columns of B, and its rows.
        dtype: element types of A, B and C, as in a `Problem`.
        b: layout of B: "row", "col" or "packed".
        group: rows of a B of four bits that share a scale; 0 if all do.
    """

    rows: tuple[int, ...]
    n: int
    k: int
    dtype: str
    b: str
    group: int = USUAL_GROUP

    def __str__(self) -> str:
        m = str(self.rows[0]) if len(self.rows) == 1 else f"{self.rows[0]}..{self.rows[-1]}"
        group = "" if self.group == USUAL_GROUP else f" {GROUP}{self.group}"
        return f"{m}x{self.n}x{self.k} {self.dtype} {self.b}{group}"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of attention.

    Attributes:
        queries: their numbers, one for each class.
        keys: number of keys.
        d, dv: elements of heads of K, and of V.
        dtype: of the operands.
        items, heads, kv_heads: of a batch, and heads of an item.
        causal, window, lse: which keys are seen, and whether logarithms of sums are returned.
    """

    queries: tuple[int, ...]
    keys: int
    d: int
    dv: int
    dtype: str
    items: int = 1
    heads: int = 8
    kv_heads: int = 8
    causal: bool = False
    window: bool = False
    lse: bool = False


def shapes_of(text: str, where: str = "shapes", *, empty: bool = False) -> list[Shape]:
    """The shapes of a file: a line each, `M N K [types] [layout of B]`; M may be a range as 1-512, or a list as 1,16.

    A packed B of four bits may have another group, as `group=32`: rows that share a scale; of 0 all do.
    Lines of attention are those of `bundle_attention`.

    Args:
        text: of the file.
        where: its name.
        empty: there may be none.

    Raises:
        BundleError: a line is none.
    """
    shapes: list[Shape] = _lines(text, where, _shape, "shape", EXAMPLE)
    if not shapes and not empty:
        raise BundleError(f"{where} has no shapes; write lines as: {EXAMPLE}")
    return shapes


def _shape(*every: str) -> Shape:
    words, groups = ([x for x in every if x.startswith(GROUP) == of] for of in (False, True))
    if len(groups) > 1:
        raise ValueError(f"{' '.join(groups)} are several groups")
    if not 3 <= len(words) <= 5:
        raise ValueError(f"a line has 3 to 5 words, this one {len(words)}")
    m, columns, rows, *rest = words
    if not (columns.isdecimal() and rows.isdecimal()):
        raise ValueError(f"N and K are {columns!r} and {rows!r}, not numbers")
    n, k = int(columns), int(rows)
    dtype, b = (*rest, *("f32", "row")[len(rest) :])
    if b not in LAYOUTS:
        raise ValueError(f"the layout of B is {b!r}, not {', '.join(LAYOUTS)}")
    word = word_of(dtype)
    if min(n, k) < 1:
        raise ValueError("N and K are positive")
    values = _rows(m, lambda at: rows_of(problem_of((at, n, k), word, "row", ""))[1])
    return Shape(values, n, k, word, b, *(_group(x, word, b) for x in groups))


def _group(text: str, dtype: str, b: str) -> int:
    """The group of a weight of four bits."""
    number = text.removeprefix(GROUP)
    if types(dtype)[1] != "u4" or b != "packed":
        raise ValueError(f"{text} is of a packed B of four bits alone")
    if not number.isdecimal() or int(number) % CODES_KR:
        raise ValueError(f"{text} is no multiple of {CODES_KR} rows")
    return int(number)


def _rows(text: str, last_of: Callable[[int], int]) -> tuple[int, ...]:
    """A value for each class of the numbers that a text as 7, 1-512 or 1,16 has; `last_of` is the last of a class."""
    values: dict[int, None] = {}
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"the number of rows is {text!r}, not as 7, 1-512 or 1,16")
        at, end = int(first), int(last or first)
        if not 0 < at <= end <= MOST_ROWS:
            raise ValueError(f"numbers of rows are from 1 to {MOST_ROWS}")
        while at <= end:
            top = last_of(at)
            values[min(top, end)] = None
            at = top + 1
    return tuple(values)


def attention_of(text: str, where: str) -> list[AttentionShape]:
    """The sizes of attention that a file lists, as `ATTENTION_EXAMPLE` is a line of it.

    Raises:
        BundleError: a line is none.
    """
    return _lines(text, where, _attention, ATTENTION, ATTENTION_EXAMPLE)


def _lines(text: str, where: str, make: Callable[..., Any], kind: str, example: str) -> list[Any]:
    """Records of the lines of one kind, of attention or of other shapes."""
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words or (words[0] == ATTENTION) != (kind == ATTENTION):
            continue
        try:
            records.append(make(*words))
        except (KeyError, ValueError) as error:
            raise BundleError(
                f"{where}, line {number}: {line.strip()!r} is no {kind} ({error}); write as: {example}"
            ) from error
    return records


def _attention(_: str, *words: str) -> AttentionShape:
    plain = [x for x in words if "=" not in x and x not in ATTENTION_FLAGS]
    sizes = dict(x.split("=", 1) for x in words if "=" in x)
    if not 3 <= len(plain) <= 4:
        raise ValueError("it takes the numbers of queries and keys, elements of a head, and the type")
    if unknown := set(sizes) - set(ATTENTION_SIZES):
        raise ValueError(f"{min(unknown)}= is none of {', '.join(ATTENTION_SIZES)}")
    queries, (keys, d) = _rows(plain[0], last_of_class), map(int, plain[1:3])
    dtype, number = (*plain, "f32")[3], {name: int(x) for name, x in sizes.items()}
    heads = number.get("heads", 8)
    kv_heads, dv = number.get("kv_heads", heads), number.get("dv", d)
    if min(keys, d, dv, heads, kv_heads, number.get("items", 1)) < 1 or heads % kv_heads:
        raise ValueError("sizes are positive, and heads a multiple of kv_heads")
    if dtype not in ATTENTION_TYPES:
        raise ValueError(f"the type is {dtype}, not f32, bf16 or f16")
    flags = {x: x in words for x in ATTENTION_FLAGS}
    return AttentionShape(queries, keys, d, dv, dtype, number.get("items", 1), heads, kv_heads, **flags)


def targets_of(words: Iterable[str]) -> tuple[list[Target], list[Target]]:
    """The described processors that words name, and the devices for CUDA: also by capability, as sm_90.

    "chips" names the processors of all cloud instances, "levels" the plain ones of their architectures, as x86_64_v3.

    Raises:
        TargetError: a word names no target.
        BundleError: it names a device whose driver alone compiles for it.
    """
    targets: dict[str, Target] = {}
    for word in (x for several in words for x in _several(several)):
        capability = re.fullmatch(r"sm_(\d+)(\d)[af]?", word)
        family = None if capability else instance(word)
        if capability:
            chips = [device_target("", ".".join(capability.groups()))]
        else:
            chips = [load_target(x) for x in family.chips] if family else [described(word)]
        for chip in chips:
            if chip.device is not None and (chip.device.language != "cuda" or not chip.device.architecture):
                raise BundleError(
                    f"{word} is {chip.name}, a device whose driver compiles its kernels: bundles have none"
                )
            targets.setdefault(chip.name, chip)
    every = list(targets.values())
    return [x for x in every if x.device is None], [x for x in every if x.device is not None]


def _several(word: str) -> list[str]:
    """The chips that a word for several names, or the word."""
    chips = [load_target(x) for x in dict.fromkeys(chip for family in clouds() for chip in family.chips)]
    processors = [x for x in chips if x.device is None]
    if word == "chips":
        return [x.name for x in processors]
    if word != "levels":
        return [word]
    every = [load_target(x) for x in names("chip")]
    plain = [x for x in every if any(match.generic and match.features for match in x.match)]
    return [x.name for x in plain if x.arch in {chip.arch for chip in processors}]


def problem_of(size: tuple[int, int, int], dtype: str, b: str, family: str, a: str = "row") -> Problem:
    """The problem that a call with dense arrays has."""
    layout = "codes" if family.startswith("u4") else b
    p = problem(dtype, size, (a, layout, "row"), family, dense=True)
    return replace(p, deterministic=False)
