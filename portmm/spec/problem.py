"""Matrix product to compute.

Owns `Problem`, the description of one matrix product, independent of any machine.
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from portmm.errors import ScheduleError
from portmm.spec.dtype import BY_NAME, DType, accumulator, spell, types
from portmm.util.records import dataclass, replace

if TYPE_CHECKING:
    from portmm.spec.layout import Layout

AXES = "bmnh"
"""A batch, rows, columns, and heads, in this order: the axes along which operands of an epilogue vary."""

LAYOUTS_A = ("row", "col", "any")
LAYOUTS_B = ("row", "col", "any", "packed", "codes")
LAYOUTS_C = ("row", "col")


@dataclass(frozen=True, slots=True)
class Family:
    """Packed layout of B, with a name such as "f32x32" or "s8x32k4s".

    Attributes:
        dtype: type of its elements.
        nr: columns of a panel.
        kr: adjacent elements of k, a unit.
        sums: each panel is followed by the sums of its columns, in s32.
        group: for int4 values, rows that share a scale, a multiple of KR; 0 for all. Each group
            is a row of scales, a row of offsets if there are any, both f32, and its units.
        symmetric: offsets of int4 values are -8 times scales, and have no rows.
        e2m1: in the place of int4 values, floats of four bits; scales are half of theirs, and there are no offsets.
        half: scales are f16, where there are no offsets.
    """

    dtype: str
    nr: int
    kr: int
    sums: bool = False
    group: int = 0
    symmetric: bool = False
    e2m1: bool = False
    half: bool = False

    def __str__(self) -> str:
        kr, group = f"k{self.kr}" if self.kr > 1 else "", f"g{self.group}" if self.dtype == "u4" else ""
        heads = ("e" if self.e2m1 else "c" if self.symmetric else "") + ("h" if self.half else "")
        return f"{self.dtype}x{self.nr}{kr}{group}{heads}{'s' if self.sums else ''}"

    @property
    def heads(self) -> int:
        """Rows of a group of int4 values before its units: of scales, and of offsets."""
        return 1 if self.symmetric or self.e2m1 else 2

    @property
    def head_type(self) -> str:
        """Type of scales and offsets."""
        return "f16" if self.half else "f32"

    @property
    def head_words(self) -> int:
        """Words of a group of int4 values before its units."""
        return self.heads * self.nr * BY_NAME[self.head_type].bytes // BY_NAME["s32"].bytes

    @property
    def saved(self) -> int:
        """Words that these are less than rows of words."""
        return self.heads * self.nr - self.head_words

    def layout(self, k: int, n: int, items: int = 0) -> Layout:
        """Layout of a packed weight, of no int4 values."""
        from portmm.spec.layouts import panels

        return panels(k, n, self.nr, self.kr, self.panel(k) * self.kr, items=items)

    def parts(self, k: int, n: int) -> tuple[Layout, ...]:
        """Layouts of the scales (group, n), the offsets if any, and the words (k / 8, n), of int4 values.

        Offsets of elements are in words, those of scales and offsets in elements of their type.
        """
        from portmm.spec.layout import Layout

        groups, words = self.groups(k), _ceil(k, self.kr)
        of_group = self.group // self.kr or words
        step, many = self.head_words + of_group * self.nr, -(-n // self.nr)

        def rows(begin: int, count: int, each: int) -> Layout:
            """Rows of a group, `each` elements to a word."""
            whole = Layout((many, groups, step * each), (self.panel(k) * each, step * each, 1))
            some = whole.embed(2, (count, self.nr), (self.nr, 1), begin).permute(1, 2, 0, 3)
            return some.merge(2, 2).slice(2, 0, n)

        units = rows(self.head_words, of_group, 1).merge(0, 2).slice(0, 0, words)
        each = BY_NAME["s32"].bytes // BY_NAME[self.head_type].bytes
        return (*(rows(i * self.nr, 1, each).freeze(1, 0) for i in range(self.heads)), units)

    def groups(self, k: Any) -> Any:
        """Number of groups in k rows of int4 values, a number or an expression."""
        return _ceil(k, self.group) if self.group else k * 0 + 1

    def units(self, k: int, n: int) -> int:
        """Units of all panels; 0 for a weight without rows, whatever its number of columns."""
        return -(-n // self.nr) * int(self.panel(k)) if k else 0

    def panel(self, k: Any) -> Any:
        """Units of one panel of k rows, likewise, with its sums, or its scales and offsets."""
        units = _ceil(k, self.kr)
        if self.dtype == "u4":
            return (self.groups(k) * self.heads + units) * self.nr - self.groups(k) * self.saved
        size = BY_NAME[self.dtype].bytes * self.kr
        each = max(1, BY_NAME["s32"].bytes // size)
        tail = self.nr * BY_NAME["s32"].bytes // size
        return _ceil(units * self.nr, each) * each + tail if self.sums else units * self.nr


def _ceil(x: Any, y: int) -> Any:
    """Quotient rounded up, of numbers or of expressions."""
    return (x + (y - 1)) // y


@cache
def family(name: str) -> Family:
    """The packed layout of a name.

    Raises:
        ValueError: `name` is no packed layout.
    """
    dtype, _, rest = name.partition("x")
    before, _, of_groups = rest.removesuffix("s").partition("g")
    nr, _, kr = before.partition("k")
    group = of_groups.rstrip("ceh")
    heads = of_groups.removeprefix(group)
    columns, adjacent, rows = (int(x) if x.isdecimal() else y for x, y in ((nr, 0), (kr, 1), (group, 0)))
    layout = Family(dtype, columns, adjacent, rest.endswith("s"), rows, "c" in heads, "e" in heads, "h" in heads)
    if dtype not in BY_NAME or 0 in (columns, adjacent) or str(layout) != name:  # the name's own spelling
        raise ValueError(f"{name!r} is no family of packed weights; one is called f32x32 or s8x32k4s")
    if layout.half and layout.heads == 2:
        raise ValueError(f"{name!r} has offsets beside scales of 16 bits; these are without")
    return layout


@dataclass(frozen=True, slots=True)
class Problem:
    """C[batch, m, n] = A[batch, m, k] . B[batch, k, n].

    Attributes:
        m: rows of A and C.
        n: columns of B and C.
        k: the summed dimension.
        dtype: the element types of A, B and C as `dtype.spell` writes them: "f32", "u8-s8-s32".
        batch: number of independent products that share one call.
        a: layout of A: "row" (k contiguous), "col" (m contiguous) or "any".
        b: layout of B: "row" (n contiguous), "col" (k contiguous), "any",
            "packed" (panels made by `portmm.pack`), or "codes" (panels of int4
            values with the scales of their groups, likewise).
        c: layout of C: "row" (n contiguous) or "col" (m contiguous).
        family: for a B that is packed or of int4 values, its packed layout.
        deterministic: the additions of every element of C have one order, independent of m, the
            thread count and the blocking: runs of k, as in `summation`, one after the other.
        static: m, n and k (and dense strides) are compiled in as constants.
        source: a float type of A, whose rows are quantised to s8 first.
        fused: C and other results as expressions of the sums, a string of `epilogue.Fused`; empty: C is the sums.
            Where these are integers and C is not, there is one (see `dequantization`).
        grouped: the rows of A and C are partitioned among the items of B, by row offsets that only the kernel
            reads: each item has m of them on average.
        tf32: elements of A and B, which are f32, may be rounded to tf32.
    """

    m: int
    n: int
    k: int
    dtype: str = "f32"
    batch: int = 1
    a: str = "row"
    b: str = "row"
    c: str = "row"
    family: str = ""
    deterministic: bool = False
    static: bool = False
    source: str = ""
    fused: str = ""
    grouped: bool = False
    tf32: bool = False

    def __post_init__(self) -> None:
        self._check_epilogue()
        for name, value, allowed in (("a", self.a, LAYOUTS_A), ("b", self.b, LAYOUTS_B), ("c", self.c, LAYOUTS_C)):
            if value not in allowed:
                raise ValueError(f"layout of {name} is {value!r}; use one of {', '.join(allowed)}")
        if self.source and (self.source not in ("f32", "bf16", "f16") or self.types[0] != "s8" or self.a != "row"):
            raise ValueError(f"source is {self.source!r}: rows of f32, bf16 or f16 can be quantised to s8, by rows")
        if self.tf32 and self.types[:2] != ("f32", "f32"):
            raise ValueError(f"only f32 may be rounded to tf32, and {self.dtype} are multiplied")
        if min(self.m, self.n, self.k, self.batch) < 0:
            raise ValueError(f"negative dimension in {self.m}x{self.n}x{self.k}, batch {self.batch}")

    def _check_epilogue(self) -> None:
        """Check of the epilogue against the types and the layout of B."""
        (_, b, c), whole, text = types(self.dtype), self.acc == "s32", self.fused
        if whole and b == "u4" and c == "s32":
            raise ValueError(f"{self.dtype} has groups with scales: its result is f32, f16 or bf16, or int8 values")
        if whole and c != "s32" and not text:
            raise ValueError(f"sums in {self.acc} become {c} by an epilogue: set `fused`, as in `dequantization`")
        if not whole and ("acc s32" in text or "column_sum" in text):
            raise ValueError(f"{text!r} reads integer sums, and {self.dtype} has none: only integers have zero points")
        if "column_sum" in text and self.b != "packed":
            raise ValueError("a zero point of A needs the sums of B's columns, which a packed B has: pack B")
        if "row_scale" in text and not self.source:
            raise ValueError(f"{text!r} reads scales of rows, which are quantized if `source` is set")

    @property
    def types(self) -> tuple[str, str, str]:
        """Names of the element types of A, B and C."""
        return types(self.dtype)

    @property
    def storage(self) -> str:
        """The storage types of the operands' arrays, as one string: int4 values are in words of 32 bits."""
        a, b, c = self.types
        return spell(self.source or a, "s32" if self.b == "codes" else b, c)

    @property
    def elements(self) -> tuple[DType, DType, DType]:
        """The element types of A, B and C."""
        a, b, c = self.types
        return BY_NAME[a], BY_NAME[b], BY_NAME[c]

    @property
    def acc(self) -> str:
        """Name of the accumulator type."""
        a, b, _ = self.types
        return accumulator(a, b)

    @property
    def unit(self) -> int:
        """Elements of B that its strides count as one: those of a unit, where B is packed in units."""
        # Int4 values are in an array of units.
        return family(self.family).kr if self.b == "packed" else 1

    @property
    def group(self) -> int:
        """Rows of a B of int4 or int8 values that share a scale, 0 for all."""
        return family(self.family).group if self.b == "codes" else 0

    @property
    def symmetric(self) -> bool:
        """Whether a B of int4 values has scales without offsets."""
        return self.b == "codes" and family(self.family).symmetric

    @property
    def e2m1(self) -> bool:
        """Whether B has floats of four bits."""
        return self.b == "codes" and family(self.family).e2m1

    @property
    def half(self) -> bool:
        """Whether a B of four bits has scales of 16 bits."""
        return self.b == "codes" and family(self.family).half

    @property
    def flops(self) -> int:
        """Multiplications plus additions: 2 * batch * m * n * k."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Compulsory traffic: A, B and C once each, in bytes."""
        a, b, c = self.elements
        return self.batch * (self.m * self.k * a.bytes + self.k * self.n * b.bytes + self.m * self.n * c.bytes)

    @property
    def but_rows(self) -> tuple[object, ...]:
        """All fields but M, as a key for values that many M share."""
        return _but_rows(self)

    def transposed(self) -> Problem:
        """The same product written as C^T = B^T . A^T.

        Raises:
            ScheduleError: B is packed, and there is no layout of a packed A; or
                the types are supported in this order only.
        """
        if self.b in ("packed", "codes"):
            raise ScheduleError(f"{self}: a packed B cannot be transposed; use a C by rows, or unpack B")
        flip = {"row": "col", "col": "row", "any": "any"}
        if self.fused:
            raise ScheduleError(f"{self} cannot be transposed: its epilogue is by rows and columns; use a C by rows")
        a, b, c = self.types
        try:
            accumulator(b, a)
        except ValueError as error:
            raise ScheduleError(f"{self} cannot be transposed: {error}; use a C by rows") from error
        dtype = spell(b, a, c)
        return replace(self, m=self.n, n=self.m, a=flip[self.b], b=flip[self.a], c=flip[self.c], dtype=dtype)

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch != 1 else ""
        marks = [f"A {self.a}", f"B {self.b}", f"C {self.c}"]
        marks += ["deterministic"] if self.deterministic else []
        marks += ["static"] if self.static else []
        marks += ["rounded to tf32"] if self.tf32 else []
        marks += ["fused"] if self.fused else []
        marks += ["rows in groups"] if self.grouped else []
        marks += [f"A quantised from {self.source}"] if self.source else []
        return f"{batch}{self.m} x {self.n} x {self.k} {self.dtype} ({', '.join(marks)})"


_but_rows = attrgetter(*[x for x in Problem.__match_args__ if x != "m"])
