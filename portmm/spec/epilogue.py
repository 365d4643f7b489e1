"""Epilogue expression of a product, as a string: operands, expressions, results.

Owns `Fused`, the part of a `Problem` that defines the computation on sums before they
are stored, and on rows of numbers that are no product. As a string that can be parsed, it is
compared, cached and printed:

    f32.n f32.mn s8.mn | acc; load 0; add 0 1; load 1; add 2 3 | C 4; 2 4

is C = acc + x0[n] + x1[m, n], written to the operand x2 as s8 too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from portmm.spec.dtype import BY_NAME
from portmm.spec.expr import Expr, const, node, ordered
from portmm.spec.expr_ops import OPS
from portmm.spec.problem import AXES
from portmm.util.memo import Memory
from portmm.util.records import dataclass

PRODUCT = "bmn"
"""The axes of a product."""
C = -1
"""The number of the product's own result."""
INNER = {"column_sum": "n", "row_scale": "m"}
"""Vectors that a product's kernel computes itself -> the axis along which they vary."""
SEEN = {"s32": "s32"}
"""Element type -> the type that its elements are read as, where that is not f32."""
REDUCTIONS = {"add": 0.0, "max": float("-inf")}
"""Reductions of a row -> the result for no elements."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that expressions read, or that a result is written to.

    Attributes:
        dtype: type of its elements.
        axes: along which it varies, a subsequence of `AXES`, and of a block program any labels in any order; it is
            broadcast along others. A capital letter is a label in equal blocks: all of a block share an element.
        dense: n is contiguous in memory.
    """

    dtype: str
    axes: str
    dense: bool = True

    @property
    def whole(self) -> bool:
        """Whether it has an element for each row and column of C."""
        return {"m", "n"} <= set(self.axes)

    def __str__(self) -> str:
        return f"{self.dtype}.{self.axes}{'' if self.dense else '~'}"


@dataclass(frozen=True)
class Fused:
    """Epilogue expressions with their operands and results.

    Attributes:
        operands: arrays, those that are read and those that are written.
        results: number of an operand, or `C`, and the expression that is written to it.
    """

    operands: tuple[Operand, ...]
    results: tuple[tuple[int, Expr], ...]

    @property
    def steps(self) -> list[Expr]:
        """Every expression, operands first."""
        known = self.__dict__  # functools.cached_property has a lock, which may be locked in a forked child
        if "steps" not in known:
            known["steps"] = ordered(tuple(x for _, x in self.results))
        return known["steps"]

    @property
    def reductions(self) -> list[Expr]:
        """Sums and maxima over rows."""
        return [x for x in self.steps if x.op == "reduce"]

    @property
    def column_reductions(self) -> list[Expr]:
        """Sums and maxima down columns."""
        return [x for x in self.steps if x.op == "fold"]

    @property
    def numbers(self) -> int:
        """Number of scalar arguments of each call."""
        return max((x.args[0] + 1 for x in self.steps if x.op == "number"), default=0)

    def __str__(self) -> str:
        numbers = {x: i for i, x in enumerate(self.steps)}
        steps = "; ".join(_spelled(x, numbers) for x in self.steps)
        results = "; ".join(f"{'C' if i == C else i} {numbers[x]}" for i, x in self.results)
        return f"{' '.join(map(str, self.operands))} | {steps} | {results}"


def shortest(value: float) -> str:
    """The shortest decimal spelling of an f32."""
    return str(np.float32(value))


def _spelled(x: Expr, numbers: dict[Expr, int]) -> str:
    if x.op == "acc" and x.dtype != "f32":
        return f"acc {x.dtype}"
    if x.op == "const":
        value = x.args[0]
        return f"const {x.dtype} {shortest(value) if isinstance(value, float) else int(value)}"
    words = (str(numbers[y]) if isinstance(y, Expr) else str(y) for y in x.args)
    return " ".join((x.op, *words))


_parsed = Memory(1024, "kernels")


def spelled(fused: Fused) -> str:
    """`str` of a `Fused`, which `parse` then needs not read."""
    text = str(fused)
    _parsed.keep(text, fused)
    return text


def parse(text: str) -> Fused:
    """The `Fused` of a string that `str` of one returned.

    Raises:
        ValueError: `text` is not such a string.
    """
    known: Fused | None = _parsed.get(text)
    return known or _parsed.keep(text, _read_all(text))


def _read_all(text: str) -> Fused:
    try:
        operand_text, step_text, result_text = (x.strip() for x in text.split("|"))
        operands = tuple(_operand(x) for x in operand_text.split())
        steps: list[Expr] = []
        for step in step_text.split(";"):
            steps.append(_read(step.split(), steps, operands))
        results = []
        for result in result_text.split(";"):
            to, value = result.split()
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
        "column_sum": column_sum,
        "extent": extent,
        "fold": lambda kind, i: column_reduction(kind, steps[int(i)]),
        "index": index,
        "number": lambda i: number(int(i)),
        "load": lambda i: load(int(i), operands[int(i)].dtype),
        "reduce": lambda kind, i: reduction(kind, steps[int(i)]),
        "row_scale": row_scale,
    }
    if op in leaves:
        return leaves[op](*rest)
    args = tuple(steps[int(x)] for x in rest)
    result = OPS[op].result
    kinds = {"same": args[0].dtype, "second": args[-1].dtype}
    return node(op, args, kinds.get(result, result))


def acc(dtype: str = "f32") -> Expr:
    """The accumulator: the sum of the product, as f32 or, where it is an integer, as s32."""
    return node("acc", (), dtype)


def column_sum() -> Expr:
    """The sum of the column of B, of integers that are packed."""
    return node("column_sum", (), "s32")


def row_scale() -> Expr:
    """The scale of the row of A, where the kernel quantizes it."""
    return node("row_scale", (), "f32")


def load(operand: int, dtype: str) -> Expr:
    """The element of an operand of a type."""
    return node("load", (operand,), SEEN.get(dtype, "f32"))


def argument(i: int, dtype: str) -> Expr:
    """The i-th argument of a function, before its operand is known."""
    return node("given", (i,), SEEN.get(dtype, "f32"))


def number(i: int) -> Expr:
    """The i-th scalar argument of a call."""
    return node("number", (i,), "f32")


def index(axis: str) -> Expr:
    """The index of the element along an axis."""
    return node("index", (axis,), "s32")


def extent(axis: str) -> Expr:
    """The extent of an axis: "n", the columns of a row, or "m", the rows of a column."""
    return node("extent", (axis,), "s32")


def reduction(kind: str, x: Expr) -> Expr:
    """The sum ("add") or the maximum ("max") of a row of values."""
    return node("reduce", (kind, x), "f32")


def column_reduction(kind: str, x: Expr) -> Expr:
    """The sum ("add") or the maximum ("max") of a column of values."""
    return node("fold", (kind, x), "f32")


def contraction(left: Expr, right: Expr, along: str, dtype: str = "f32") -> Expr:
    """The sum of products of two values along a label, added up as f32 or s32."""
    return node("contract", (along, left, right), dtype)


def summed(x: Expr) -> str:
    """The label along which an expression reduces, or an empty string."""
    return x.args[0] if x.op == "contract" else {"reduce": "n", "fold": "m"}.get(x.op, "")


def varies(steps: list[Expr], operands: tuple[Operand, ...]) -> dict[Expr, frozenset[str]]:
    """The axes along which each expression varies."""
    axes: dict[Expr, frozenset[str]] = {}
    for x in steps:
        if x.op in ("acc", "given"):
            axes[x] = frozenset(AXES)
        elif x.op == "load":
            axes[x] = frozenset(operands[x.args[0]].axes.lower())
        elif x.op in INNER:
            axes[x] = frozenset(INNER[x.op])
        elif x.op == "index":
            axes[x] = frozenset(x.args)
        else:
            inner = (axes[y] for y in x.inner)
            axes[x] = frozenset().union(*inner) - frozenset(summed(x))
    return axes


def operand_types(fused: Fused | None) -> tuple[tuple[str, bool], ...]:
    """The type of each operand of expressions, if there are any, and whether it is written."""
    if fused is None:
        return ()
    written = dict(fused.results)
    return tuple((x.dtype, i in written) for i, x in enumerate(fused.operands))
