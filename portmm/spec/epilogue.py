"""What surrounds a product, as a word: operands, expressions, results.

Owns `Fused`, the part of a `Problem` that says what becomes of sums on their
way to memory, and of a row of numbers that is no product at all. Imports `spec.dtype`,
`spec.expr`. Written as text and read back, it can be compared, remembered and printed:

    f32.n f32.mn s8.mn | acc; load 0; add 0 1; load 1; add 2 3 | C 4; 2 4

is C = acc + x0[n] + x1[m, n], written to the operand x2 as s8 too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from portmm.spec.dtype import BY_NAME
from portmm.spec.expr import OPS, Expr, const, node, ordered

if TYPE_CHECKING:
    from collections.abc import Callable

AXES = "bmnh"
"""A batch, rows, columns, and heads, in this order."""
PRODUCT = "bmn"
"""The axes of a product."""
C = -1
"""The number of the product's own result."""
SEEN = {"s32": "s32"}
"""The type that elements of a type are read as, where it is not f32."""
REDUCTIONS = {"add": 0.0, "max": float("-inf")}
"""What a row can be reduced by -> what that is of no elements."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that expressions read, or that a result is written to.

    Attributes:
        dtype: type of its elements.
        axes: along which it varies, a subsequence of `AXES`; along others it is the same everywhere.
        dense: neighbours along n are neighbours in memory.
    """

    dtype: str
    axes: str
    dense: bool = True

    def __str__(self) -> str:
        return f"{self.dtype}.{self.axes}{'' if self.dense else '~'}"


@dataclass(frozen=True)
class Fused:
    """Expressions and what they read and write.

    Attributes:
        operands: arrays, those that are read and those that are written.
        results: number of an operand, or `C`, and what is written there.
    """

    operands: tuple[Operand, ...]
    results: tuple[tuple[int, Expr], ...]

    @property
    def steps(self) -> list[Expr]:
        """Every expression, operands first."""
        known = self.__dict__  # functools.cached_property has a lock, which a forked child may find held
        if "steps" not in known:
            known["steps"] = ordered(tuple(x for _, x in self.results))
        found: list[Expr] = known["steps"]
        return found

    @property
    def reductions(self) -> list[Expr]:
        """Sums and maxima over rows."""
        return [x for x in self.steps if x.op == "reduce"]

    @property
    def folds(self) -> list[Expr]:
        """Sums and maxima down columns."""
        return [x for x in self.steps if x.op == "fold"]

    @property
    def numbers(self) -> int:
        """How many numbers each call gives."""
        return max((x.args[0] + 1 for x in self.steps if x.op == "number"), default=0)

    def __str__(self) -> str:
        place = {x: i for i, x in enumerate(self.steps)}
        said = "; ".join(_said(x, place) for x in self.steps)
        results = "; ".join(f"{'C' if i == C else i} {place[x]}" for i, x in self.results)
        return f"{' '.join(map(str, self.operands))} | {said} | {results}"


def shortest(value: float) -> str:
    """The fewest digits that say which f32 a number is."""
    return str(np.float32(value))


def _said(x: Expr, place: dict[Expr, int]) -> str:
    if x.op == "const":
        value = x.args[0]
        return f"const {x.dtype} {shortest(value) if isinstance(value, float) else int(value)}"
    words = (str(place[y]) if isinstance(y, Expr) else str(y) for y in x.args)
    return " ".join((x.op, *words))


@lru_cache(maxsize=1024)
def parse(text: str) -> Fused:
    """What `str` of a `Fused` wrote.

    Raises:
        ValueError: `text` is no such word.
    """
    try:
        given, said, written = (x.strip() for x in text.split("|"))
        operands = tuple(_operand(x) for x in given.split())
        steps: list[Expr] = []
        for line in said.split(";"):
            steps.append(_read(line.split(), steps, operands))
        results = []
        for line in written.split(";"):
            to, value = line.split()
            results.append((C if to == "C" else int(to), steps[int(value)]))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{text!r} is no fused expression ({error})") from error
    return Fused(operands, tuple(results))


def _operand(text: str) -> Operand:
    dtype, _, axes = text.partition(".")
    plain = axes.removesuffix("~")
    if dtype not in BY_NAME or list(plain) != [x for x in AXES if x in plain]:
        raise ValueError(f"operand {text!r}")
    return Operand(dtype, plain, plain == axes)


def _read(words: list[str], steps: list[Expr], operands: tuple[Operand, ...]) -> Expr:
    op, *rest = words
    leaves: dict[str, Callable[..., Expr]] = {
        "const": lambda kind, value: const(float(value) if kind == "f32" else int(value), kind),
        "acc": acc,
        "extent": extent,
        "fold": lambda kind, i: fold(kind, steps[int(i)]),
        "index": index,
        "number": lambda i: number(int(i)),
        "load": lambda i: load(int(i), operands[int(i)].dtype),
        "reduce": lambda kind, i: reduction(kind, steps[int(i)]),
    }
    if op in leaves:
        return leaves[op](*rest)
    args = tuple(steps[int(x)] for x in rest)
    result = OPS[op][0]
    kinds = {"same": args[0].dtype, "second": args[-1].dtype}
    return node(op, args, kinds.get(result, result))


def acc() -> Expr:
    """The sum of the product."""
    return node("acc", (), "f32")


def load(operand: int, dtype: str) -> Expr:
    """The element of an operand, whose type is given."""
    return node("load", (operand,), SEEN.get(dtype, "f32"))


def given(i: int, dtype: str) -> Expr:
    """The i-th value that a function is given, of whatever it will be an element."""
    return node("given", (i,), SEEN.get(dtype, "f32"))


def number(i: int) -> Expr:
    """The i-th number that a call gives."""
    return node("number", (i,), "f32")


def index(axis: str) -> Expr:
    """Where the element is along an axis."""
    return node("index", (axis,), "s32")


def extent(axis: str) -> Expr:
    """How long an axis is: "n", the columns of a row, or "m", the rows of a column."""
    return node("extent", (axis,), "s32")


def reduction(kind: str, x: Expr) -> Expr:
    """The sum ("add") or the largest ("max") of a row of values."""
    return node("reduce", (kind, x), "f32")


def fold(kind: str, x: Expr) -> Expr:
    """The sum ("add") or the largest ("max") of a column of values."""
    return node("fold", (kind, x), "f32")


def varies(steps: list[Expr], operands: tuple[Operand, ...]) -> dict[Expr, frozenset[str]]:
    """The axes along which each expression varies."""
    found: dict[Expr, frozenset[str]] = {}
    for x in steps:
        if x.op in ("acc", "given"):
            found[x] = frozenset(AXES)
        elif x.op == "load":
            found[x] = frozenset(operands[x.args[0]].axes)
        elif x.op == "index":
            found[x] = frozenset(x.args)
        else:
            inner = (found[y] for y in x.inner)
            found[x] = frozenset().union(*inner) - frozenset({"reduce": "n", "fold": "m"}.get(x.op, ""))
    return found


def operand_types(text: str) -> tuple[tuple[str, bool], ...]:
    """The type of each operand of a fused expression, and whether it is written."""
    if not text:
        return ()
    fused = parse(text)
    written = dict(fused.results)
    return tuple((x.dtype, i in written) for i, x in enumerate(fused.operands))
