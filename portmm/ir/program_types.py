"""Types of the expressions of block programs.

Owns `TAKES`, and `check_types`, which refuses a program of which an operation has operands of types that it does not
take, or a leaf parameters that are none of the program's: what runs or verifies programs relies on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.errors import ScheduleError
from portmm.spec.epilogue import REDUCTIONS, SEEN
from portmm.spec.expr import Expr, ordered
from portmm.spec.expr_ops import OPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.block_program import BlockProgram

TAKES: dict[str, str] = {
    **dict.fromkeys(("add", "sub", "mul", "min", "max", "lt", "le", "eq", "ne"), "nn"),
    **dict.fromkeys(("and", "or", "xor"), "bb"),
    **dict.fromkeys(("div", "greater"), "ff"),
    **dict.fromkeys(("sqrt", "exp2", "bits", "int"), "f"),
    **dict.fromkeys(("from_bits", "float"), "i"),
    **dict.fromkeys(("shl", "shr"), "ii"),
    "neg": "n", "abs": "n", "not": "b", "fma": "fff", "select": "maa",
}  # fmt: skip
"""Operation -> the types of its operands, a letter each; operands of one letter have one type."""
_TYPES = {"n": ("f32", "s32"), "b": ("s32", "mask"), "a": ("f32", "s32", "mask"), "f": ("f32",), "i": ("s32",),
          "m": ("mask",)}  # fmt: skip
_REDUCES = f"no kind of {', '.join(REDUCTIONS)} and a value of f32"
_CONSTANTS: dict[str, tuple[type, ...]] = {"f32": (float, int), "s32": (int,), "mask": (bool,)}


def check_types(program: BlockProgram) -> None:
    """Check the types of all expressions of a program.

    Raises:
        ScheduleError: an expression is ill-typed.
    """
    passes = [y for one in program.passes for y in one]
    rescaled = (getattr(x, "rescaled", None) for x in passes)
    every = ordered((*(x.value for x in passes), *(x for x in rescaled if x is not None)))
    labels = {*program.grid, program.loop, *(y for x in program.operands for y in x.axes)}
    for i, x in enumerate(every):
        why = _leaf(x, program, labels) if x.op not in OPS else _operation(x)
        if why:
            raise ScheduleError(f"value {i}, {x.op} of type {x.dtype}: {why}; make it by portmm.spec.epilogue and expr")


def _operation(x: Expr) -> str:
    """The error of an operation, or an empty string."""
    takes, types = TAKES[x.op], [y.dtype if isinstance(y, Expr) else repr(y) for y in x.args]
    known: dict[str, str] = {}
    if len(types) != len(takes) or any(
        y not in _TYPES[letter] or known.setdefault(letter, y) != y for letter, y in zip(takes, types, strict=True)
    ):
        return f"its operands are {', '.join(types) or 'none'}, where it takes {_spelled(takes)}"
    result = {"same": types[0], "second": types[-1]}.get(OPS[x.op].result, OPS[x.op].result)
    return "" if x.dtype == result else f"its result is of type {result}"


def _spelled(takes: str) -> str:
    return f"{', '.join(' or '.join(_TYPES[x]) for x in takes)}{', of one type' if len({*takes}) < len(takes) else ''}"


def _leaf(x: Expr, program: BlockProgram, labels: set[str]) -> str:
    """The error of a leaf or a reduction, or an empty string."""
    args, along = x.args, "".join(sorted(labels))
    if x.op == "load":
        return _load(x, program)
    right: dict[str, tuple[Callable[[], bool], str]] = {
        "const": (lambda: type(args[0]) in _CONSTANTS[x.dtype], "no literal of that type"),
        "index": (lambda: x.dtype == "s32" and args[0] in labels, f"no label of {along}"),
        "extent": (lambda: x.dtype == "s32" and args[0] in labels, f"no label of {along}"),
        "number": (lambda: x.dtype == "f32" and _is_number(args[0]), "no scalar argument"),
        "reduce": (lambda: x.dtype == "f32" and _reduces(x), _REDUCES),
        "fold": (lambda: x.dtype == "f32" and _reduces(x), _REDUCES),
        "contract": (lambda: args[0] in labels and _contracts(x), f"no label of {along} and two values of f32 or s32"),
    }
    fits, what = right.get(x.op, (lambda: False, "a program has no such operation"))
    return "" if fits() else f"{args!r}: {what}"


def _reduces(x: Expr) -> bool:
    kind, of = x.args
    return kind in REDUCTIONS and isinstance(of, Expr) and of.dtype == "f32"


def _contracts(x: Expr) -> bool:
    types = [y.dtype if isinstance(y, Expr) else "" for y in x.args[1:]]
    return len(types) == 2 and {x.dtype, *types} <= {"f32", "s32"}


def _load(x: Expr, program: BlockProgram) -> str:
    i = x.args[0]
    if not _is_number(i) or i >= len(program.operands):
        return f"{i!r} is no operand of {len(program.operands)}"
    of = program.operands[i].dtype
    return "" if x.dtype == SEEN.get(of, "f32") else f"elements of operand {i}, of type {of}, are {SEEN.get(of, 'f32')}"


def _is_number(x: Any) -> bool:
    return type(x) is int and x >= 0
