"""Reading of serialised graphs and block programs, as `mugraph.to_json` and `program_to_json` write them.

Owns `from_json` and `program_from_json`. What is damaged, or made by hand and wrong, is refused with its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from portmm.errors import PortmmError, ScheduleError
from portmm.ir.block_program import BlockProgram, Pass, TileGemm, TileMap, TileReduce, TileTransfer
from portmm.ir.mugraph import Binding, MuGraph, Step, Tensor, Threads
from portmm.ir.program_types import TAKES, check_types
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import Operand, column_reduction, contraction, extent, index, number, reduction
from portmm.spec.expr import Expr, const, node
from portmm.spec.expr_ops import NUMPY, OPS

_OPERATORS: dict[str, Any] = {x.__name__: x for x in (TileMap, TileReduce, TileGemm, TileTransfer)}
_LEVELS = ("L1", "registers")
MOST = 64
"""More than the dimensions of a tensor, and than the scalar arguments of a call."""
_LEAVES: dict[str, tuple[int, Callable[..., Expr]]] = {
    "const": (1, lambda dtype, x: const(x, dtype)),
    "load": (1, lambda dtype, i: node("load", (i,), dtype)),
    "index": (1, lambda _, x: index(x)),
    "extent": (1, lambda _, x: extent(x)),
    "number": (1, lambda _, i: number(i)),
    "reduce": (2, lambda _, kind, x: reduction(kind, x)),
    "fold": (2, lambda _, kind, x: column_reduction(kind, x)),
    "contract": (3, lambda dtype, along, x, y: contraction(x, y, along, dtype)),
}
"""Operation -> number of its arguments, and what makes it."""


def _need(fits: bool, where: str, x: Any, what: str) -> None:
    """Refuse what is wrong in a serialised form.

    Raises:
        ScheduleError: it is.
    """
    if not fits:
        raise ScheduleError(f"{where} is {_short(x)}, where {what} is needed; write the graph again by to_json")


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 80 else f"{text[:76]} ..."


def field(data: Any, name: str, kind: type, where: str) -> Any:
    """A field of a serialised record, of a kind.

    Raises:
        ScheduleError: it is absent, or of another kind.
    """
    _need(isinstance(data, Mapping), where, data, "a record")
    if name not in data:
        raise ScheduleError(f"{where} has no {name!r}; write the graph again by to_json")
    _need(type(data[name]) is kind, f"{name} of {where}", data[name], f"a {kind.__name__}")
    return data[name]


def _row(x: Any, least: int, most: int, where: str) -> list[Any]:
    """A list of some length."""
    length = str(most) if least == most else f"{least} to {most}"
    _need(isinstance(x, (list, tuple)) and least <= len(x) <= most, where, x, f"a list of {length}")
    return list(x)


def _numbers(x: Any, below: int, where: str) -> tuple[int, ...]:
    """A list of numbers below a bound."""
    fits = isinstance(x, (list, tuple)) and all(type(y) is int and 0 <= y < below for y in x)
    _need(fits, where, x, f"a list of numbers from 0 to {below - 1}")
    return tuple(x)


def from_json(data: Mapping[str, Any]) -> MuGraph:
    """The graph of `to_json`.

    Raises:
        ScheduleError: it is none.
    """
    tensors = []
    for i, x in enumerate(field(data, "tensors", list, "the graph")):
        row = _row(x, 3, 3, f"tensor {i}")
        _need(all(isinstance(y, str) for y in row) and row[2] in BY_NAME, f"tensor {i}", x, "a name, labels and a type")
        tensors.append(Tensor(*row))
    joined = []
    for i, x in enumerate(field(data, "joined", list, "the graph")):
        label, parts = _row(x, 2, 2, f"concatenation {i}")
        _need(isinstance(label, str) and isinstance(parts, str), f"concatenation {i}", x, "a label and those of parts")
        joined.append((label, parts))
    steps = []
    for i, x in enumerate(field(data, "steps", list, "the graph")):
        operands = field(x, "operands", list, f"step {i}")
        at = tuple(_binding(y, f"operand {j} of step {i}") for j, y in enumerate(operands))
        steps.append(Step(program_from_json(x, f"step {i}"), at, _threads(x, f"step {i}")))
    inputs, results = (_numbers(field(data, x, list, "the graph"), len(tensors), x) for x in ("inputs", "results"))
    return MuGraph(tuple(tensors), tuple(steps), inputs, results, tuple(joined))


def _binding(x: Any, where: str) -> Binding:
    tensor, dims, part = _row(x, 3, 3, where)
    _need(type(tensor) is int, where, x, "a number of a tensor first")
    if dims is not None:
        _need(isinstance(dims, (list, tuple)), f"second of {where}", dims, "a list of dimensions, or null,")
        dims = tuple(_numbers(y, MOST, f"dimensions of {where}") for y in dims)
    if part is not None:
        dim, before, own = _row(part, 3, 3, f"part of {where}")
        fits = type(dim) is int and isinstance(before, str) and isinstance(own, str) and len(own) == 1
        _need(fits, f"part of {where}", part, "a dimension, labels and a label")
        part = (dim, before, own)
    return Binding(tensor, dims, part)


def _threads(data: Mapping[str, Any], where: str) -> Threads | None:
    if "threads" not in data:
        return None
    row = _row(data["threads"], 5, 6, f"threads of {where}")
    fits = all(type(x) is y for x, y in zip(row, (str, int, int, int, str, int), strict=False))
    _need(fits, f"threads of {where}", row, "a unit, three numbers, labels and a number")
    return Threads(*row)


def program_from_json(data: Mapping[str, Any], where: str = "the program") -> BlockProgram:
    """The block program of `program_to_json`.

    Args:
        data: the program.
        where: it is, for messages.

    Raises:
        ScheduleError: it is none, or an expression of it is ill-typed.
    """
    grid, loop = (field(data, x, str, where) for x in ("grid", "loop"))
    _need(len(loop) == 1, f"loop of {where}", loop, "a label")
    operands = []
    for i, x in enumerate(field(data, "arrays", list, where)):
        dtype, axes, dense = _row(x, 3, 3, f"array {i} of {where}")
        fits = isinstance(dtype, str) and dtype in BY_NAME and isinstance(axes, str) and isinstance(dense, bool)
        _need(fits and len({*axes}) == len(axes), f"array {i} of {where}", x, "a type, different labels and a bool")
        operands.append(Operand(dtype, axes, dense))
    values: list[Expr] = []
    for i, x in enumerate(field(data, "values", list, where)):
        values.append(_value(x, values, len(operands), f"value {i} of {where}"))
    passes: list[Pass] = []
    for i, one in enumerate(field(data, "passes", list, where)):
        _need(isinstance(one, list), f"pass {i} of {where}", one, "a list")
        passes.append(tuple(_operator(x, values, f"operator {j} in pass {i} of {where}") for j, x in enumerate(one)))
    try:
        program = BlockProgram(grid, loop, tuple(operands), tuple(passes))
        check_types(program)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from error
    return program


def _value(x: Any, values: list[Expr], operands: int, where: str) -> Expr:
    """An expression of those before it, and of elements of some operands."""
    op, dtype, args = _row(x, 3, 3, where)
    _need(isinstance(op, str) and (op in OPS or op in _LEAVES), f"operation of {where}", op, "a known one")
    _need(isinstance(dtype, str) and dtype in NUMPY, f"type of {where}", dtype, f"one of {', '.join(NUMPY)}")
    _need(isinstance(args, list), f"arguments of {where}", args, "a list")
    filled = tuple(_argument(y, values, where) for y in args)
    if op in OPS:
        fits = len(filled) == len(TAKES[op]) and all(isinstance(y, Expr) for y in filled)
        _need(fits, f"arguments of {where}", args, f"a list of {len(TAKES[op])} values, as in '%0',")
        return node(op, filled, dtype)
    count, build = _LEAVES[op]
    _need(len(filled) == count, f"arguments of {where}", args, f"a list of {count}")
    if op in ("load", "number"):
        _numbers(filled, operands if op == "load" else MOST, f"arguments of {where}")
    elif op != "const":
        _need(isinstance(filled[0], str), f"argument of {where}", filled[0], "a word")
        _need(all(isinstance(y, Expr) for y in filled[1:]), f"arguments of {where}", args, "a value, as in '%0',")
    try:
        return build(dtype, *filled)
    except (PortmmError, TypeError, ValueError) as error:  # of a literal
        raise ScheduleError(f"literal of {where}: {error}; write the graph again by to_json") from error


def _argument(x: Any, values: list[Expr], where: str) -> Any:
    if not isinstance(x, str) or not x.startswith("%"):
        _need(isinstance(x, (str, int, float)), f"argument of {where}", x, "a value, a number or a word")
        return x
    known = x[1:].isascii() and x[1:].isdigit() and int(x[1:]) < len(values)
    _need(known, f"argument of {where}", x, f"a value before it, below %{len(values)},")
    return values[int(x[1:])]


def _operator(x: Any, values: list[Expr], where: str) -> Any:
    """An operator of a pass."""
    name, fields = _row(x, 2, 2, where)
    _need(isinstance(name, str) and name in _OPERATORS, where, name, f"one of {', '.join(_OPERATORS)}")
    kind = _OPERATORS[name]
    _need(
        isinstance(fields, dict) and {*fields} == {*kind._fields}, where, fields, f"{', '.join(kind._fields)} by name"
    )
    known = dict(fields)
    for k in ("value", "rescaled"):
        if k in known and not (k == "rescaled" and known[k] is None):
            fits = type(known[k]) is int and 0 <= known[k] < len(values)
            _need(fits, f"{k} of {where}", known[k], f"a number below {len(values)}")
            known[k] = values[known[k]]
    _need(known.get("level", "L1") in _LEVELS, f"level of {where}", known.get("level"), f"one of {', '.join(_LEVELS)}")
    _need(type(known.get("operand", 0)) is int, f"operand of {where}", known.get("operand"), "a number")
    return kind(**known)
