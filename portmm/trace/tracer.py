"""A function of arrays becomes expressions.

Owns `Traced`: what a function, called with values of a tile in place of arrays,
came to; what of its surroundings it read; and the memory of that, so that a
function is traced once for each kind of surroundings. Imports `spec.expr`, `arrays.interop`, `spec.epilogue`,
`errors`.

A traced function sees the arrays that it captures (closures, globals,
defaults, attributes of captured objects) as `Tensor`, which can be indexed by
axes. Captured floats become numbers that each call gives, so that a new value
compiles nothing; where Python must know them (an if, math.sqrt), they are
constants, and each value is a kernel of its own.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.interop import adopt, on_device, standin
from portmm.errors import TraceError
from portmm.spec.elementwise import Typed
from portmm.spec.epilogue import AXES, PRODUCT, Operand, index, load, number
from portmm.spec.expr import Expr, apply, real
from portmm.trace.closures import PLAIN, filled, fixed, global_names, ours
from portmm.trace.numpy_names import CHANGES
from portmm.util.array_subclasses import refuse_class
from portmm.util.user_warnings import caller, is_users

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
_KNOWN = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
    "int8": "s8", "uint8": "u8", "int32": "s32",
}  # fmt: skip
_AS_OTHERS = {"float64": np.float32, "int16": np.int32, "uint16": np.int32, "int64": np.int32}


class Indices:
    """Where an element of the result is along each axis: of a product, in row m, column n, item b of a batch."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = tuple(names.items())
        for name, axis in names.items():
            setattr(self, name, index(axis))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = ", ".join(f"i.{x}" for x, _ in self._names)
        raise TraceError(f"there is no index {name!r} here; there are {known}")

    @property
    def kind(self) -> tuple[Any, ...]:
        """What it calls which axis."""
        return self._names


@dataclass(frozen=True, slots=True)
class Source:
    """Where an operand comes from, and how it is read.

    Attributes:
        key: how to find the array again: steps from the function.
        array: as it was when it was traced.
        view: the axis of the result for each of the array's, an integer for one place along it, or "" for
            one that is broadcast.
        exact: its axes are as long as the result's; else they are no shorter.
        device: where the array lies, if that is a device: `array` stands for it, and must not be read.
        there: the array that it stands for, if only this call can find it.
    """

    key: tuple[Any, ...]
    array: Array
    view: tuple[str | int, ...]
    exact: bool = False
    device: tuple[Any, ...] = ()
    there: Any = None


class Tracer:
    """What is found while one function runs."""

    def __init__(self, *, by_value: bool, rank: int) -> None:
        self.by_value = by_value
        self.rank = rank
        self.sources: list[Source] = []
        self.operands: list[Operand] = []
        self.numbers: list[tuple[Any, ...]] = []
        self.values: dict[tuple[Any, ...], float] = {}
        self.standins: dict[int, Array] = {}
        self.there: dict[int, tuple[Array, Any, tuple[Any, ...]]] = {}  # by what stands for it
        self.kept: list[Any] = []  # objects that keys name by identity
        self.lasting = True

    def operand(self, key: tuple[Any, ...], array: Array, view: tuple[str | int, ...], *, exact: bool = False) -> Expr:
        """The element of an array."""
        for i, x in enumerate(self.sources):
            if x.key == key and x.view == view and x.array is array:
                return self.seen(i, array)
        if not element(array.dtype)[0]:
            raise TraceError(f"an array has dtype {array.dtype}; expressions read {', '.join((*_KNOWN, *_AS_OTHERS))}")
        there, device = self.there[id(array)][1:] if id(array) in self.there else (None, ())
        self.sources.append(Source(key, array, view, exact, device, there))
        self.operands.append(described(array, view))
        return self.seen(len(self.sources) - 1, array)

    def seen(self, i: int, array: Array) -> Expr:
        """The element of the i-th operand."""
        value = load(i, self.operands[i].dtype)
        return apply("ne", value, 0) if array.dtype.kind == "b" else value

    def standin(self, value: Any) -> Array:
        """What a function is traced with in place of an array on a device: one for each."""
        found = self.standins.get(id(value))
        if found is None:
            there = adopt(value)
            assert there is not None  # noqa: S101 - it is on a device
            self.kept.append(value)
            found = self.standins[id(value)] = standin(there)
            self.there[id(found)] = (found, value, there.device)
        return found

    def look(self, array: Array, view: Array, function: Callable[[Any], Any]) -> Array:
        """A view of an array that a function makes; of one that stands for another, so does its view."""
        if id(array) in self.there:
            _, value, device = self.there[id(array)]
            self.there[id(view)] = (view, function(value), device)
        return view

    def number(self, key: tuple[Any, ...]) -> Expr:
        """The number that a call finds at the end of these steps."""
        if key not in self.numbers:
            self.numbers.append(key)
        return number(self.numbers.index(key))

    def wrapped(  # noqa: C901, PLR0911 - a kind each
        self, value: Any, key: tuple[Any, ...], seen: dict[int, Any]
    ) -> Any:
        """What a traced function finds in place of what it captured."""
        if isinstance(value, np.ndarray):
            refuse_class(value, "a captured array", matrix=False)
            self.lasting &= value.ndim > 0
            return Tensor(self, value, key) if value.ndim else value
        if isinstance(value, (float, np.floating)) and not self.by_value:
            if key[0] == "object":
                self.values[key] = float(value)
            return self.number(key)
        if isinstance(value, types.FunctionType) and not ours(value):
            if id(value) not in seen:
                seen[id(value)] = value
                seen[id(value)] = self.rebound(value, key, seen)
            return seen[id(value)]
        if isinstance(value, (tuple, list)):
            made = [self.wrapped(x, (*key, i), seen) for i, x in enumerate(value)]
            return type(value)(made) if type(value) in (tuple, list) else value
        if isinstance(value, dict):
            return {k: self.wrapped(x, (*key, k), seen) for k, x in value.items()}
        if isinstance(value, (*PLAIN, float, np.floating)) or fixed(value):
            return value
        if on_device(value):
            return Tensor(self, self.standin(value), key)
        if isinstance(value, (types.ModuleType, type)):
            return _Space(self, value, key)
        self.lasting = False
        through = isinstance(value, (types.MethodType, partial))
        return self.callable(value, key, seen) if through else _Object(self, value)

    def callable(self, value: Any, key: tuple[Any, ...], seen: dict[int, Any]) -> Any:
        """A method, a partial, or an object that can be called, with what it holds seen through."""
        if isinstance(value, types.FunctionType):
            return value if ours(value) else self.rebound(value, key, seen)
        if isinstance(value, partial):
            given = [self.wrapped(x, (*key, i), seen) for i, x in enumerate(value.args)]
            named = {k: self.wrapped(x, (*key, k), seen) for k, x in value.keywords.items()}
            return partial(self.callable(value.func, (*key, "func"), seen), *given, **named)
        owner, function = (value.__self__, value.__func__) if isinstance(value, types.MethodType) else (value, None)
        calls = next((vars(t)["__call__"] for t in type(value).__mro__ if "__call__" in vars(t)), None)
        function = function or calls
        if not isinstance(function, types.FunctionType) or ours(function):
            return value
        return types.MethodType(self.rebound(function, (*key, "func"), seen), _Object(self, owner))

    def rebound(self, function: types.FunctionType, key: tuple[Any, ...], seen: dict[int, Any]) -> types.FunctionType:
        """The function, with tensors in place of what it captures."""
        code = function.__code__
        names = [n for n in global_names(code) if n in function.__globals__]
        spaces = dict(function.__globals__)
        for name in names:
            spaces[name] = self.wrapped(spaces[name], (*key, ("global", name)), seen)
        cells = tuple(
            types.CellType(self.wrapped(cell.cell_contents, (*key, ("closure", i)), seen)) if filled(cell) else cell
            for i, cell in enumerate(function.__closure__ or ())
        )
        defaults = function.__defaults__ and tuple(
            self.wrapped(x, (*key, ("default", i)), seen) for i, x in enumerate(function.__defaults__)
        )
        made = types.FunctionType(code, spaces, function.__name__, defaults, cells)
        if function.__kwdefaults__:
            made.__kwdefaults__ = {
                n: self.wrapped(x, (*key, ("keyword", n)), seen) for n, x in function.__kwdefaults__.items()
            }
        return made


_LAID = frozenset(("shape", "ndim", "dtype", "size", "strides", "itemsize", "nbytes"))
"""What an array says of itself without a look at its values."""
_VIEWS = frozenset(("T", "mT", "transpose", "swapaxes", "squeeze"))
"""What gives another look at the same elements."""
_SOUGHT = frozenset(("record_", "call_", "along_"))
"""What words look for, and other values of traced functions have."""


class Tensor:
    """An array that a traced function captured: index it by axes, or let it broadcast as in NumPy."""

    def __init__(self, tracer: Tracer, array: Array, key: tuple[Any, ...]) -> None:
        self._tracer, self._array, self._key = tracer, array, key

    def __getattr__(self, name: str) -> Any:
        if name in CHANGES:
            raise TraceError(f"{name}() changes an array in place, once, while the function is traced")
        if name in _SOUGHT:
            raise AttributeError(name)
        self._seen(name, name in (*_LAID, *_VIEWS))
        found = getattr(self._array, name)
        if isinstance(found, np.ndarray):
            found = self._tracer.look(self._array, found, lambda x: getattr(x, name))
            return Tensor(self._tracer, found, (*self._key, ("attribute", name)))
        self._tracer.lasting &= name in _LAID  # else its values are being looked at
        return partial(self._called, name, found) if isinstance(found, types.BuiltinMethodType) else found

    def _seen(self, what: str, known: bool = False) -> None:
        """Refuse what looks at elements that are on a device."""
        if not known and id(self._array) in self._tracer.there:
            raise TraceError(f"{what} of an array on a device; make it before, and let the function capture it")

    def _called(self, name: str, method: Any, *values: Any, **options: Any) -> Any:
        """What a method gives now: an array of it is an operand as others are."""
        found = method(*values, **options)
        if not isinstance(found, np.ndarray) or not found.ndim:
            return found
        found = self._tracer.look(self._array, found, lambda x: getattr(x, name)(*values, **options))
        return Tensor(self._tracer, found, (*self._key, ("called", name, repr((values, options)))))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TraceError("[...] = changes an array in place, once, while the function is traced")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        self._seen("the values")
        self._tracer.lasting = False  # its values are being looked at
        return np.asarray(self._array, dtype)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> Any:
        words = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(x, Expr) for x in words):
            whole = [x for x in words if isinstance(x, (int, np.integer)) and not isinstance(x, bool)]
            basic = all(x is None or x is ... or isinstance(x, (slice, int, np.integer)) for x in words)
            self._seen(f"[{key!r}]", basic and len(whole) < self._array.ndim)
            found = self._array[key]
            where = (*self._key, ("item", repr(key)))
            if isinstance(found, np.ndarray) and found.ndim:
                self._tracer.lasting = False
                return Tensor(self._tracer, self._tracer.look(self._array, found, lambda x: x[key]), where)
            self._tracer.lasting = False
            return found
        if len(words) != self._array.ndim:
            raise TraceError(f"an array of {self._array.ndim} dimensions is indexed by {len(words)}; give one for each")
        return self._tracer.operand(self._key, self._array, tuple(self._word(x) for x in words))

    def _word(self, x: Any) -> str | int:
        if isinstance(x, Expr) and x.op == "index":
            return str(x.args[0])
        if isinstance(x, (int, np.integer)):
            return int(x)
        raise TraceError(f"an array is indexed by {x!r}; use an index as it is (i.m, i.n), or an integer")

    def broadcast_(self) -> Expr:
        """The array as an operand of NumPy's rules: its last axes are the result's."""
        shape = self._array.shape
        if len(shape) > self._tracer.rank:
            raise TraceError(f"an array of shape {shape} has more dimensions than the result")
        axes = ("bhmn" if self._tracer.rank == 4 else PRODUCT)[-len(shape) :]
        view = tuple("" if n == 1 else x for n, x in zip(shape, axes, strict=True))
        return self._tracer.operand(self._key, self._array, view, exact=True)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _by_numpy(ufunc, method, inputs, options)


def _operator(name: str) -> Any:
    def method(self: Tensor, *others: Any) -> Any:
        mine = self.broadcast_()
        given = [x.broadcast_() if isinstance(x, Tensor) else x for x in others]
        return getattr(mine, name)(*given)

    return method


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv neg abs lt le gt ge eq ne and rand or ror xor rxor invert pow".split()  # noqa: SIM905
):
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


def _by_numpy(ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    given = tuple(y.broadcast_() if isinstance(y, Tensor) else y for y in inputs)
    expressions = [y for y in given if isinstance(y, Expr)]
    return expressions[0].__array_ufunc__(ufunc, method, *given, **options)


class _Space:
    """A captured module or class, whose arrays are seen as tensors, and numbers as given by each call."""

    def __init__(self, tracer: Tracer, value: Any, key: tuple[Any, ...]) -> None:
        self.__tracer, self.__value, self.__key = tracer, value, key

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__value, name)
        return self.__tracer.wrapped(found, (*self.__key, ("attribute", name)), {})

    def __call__(self, *values: Any, **options: Any) -> Any:
        return self.__value(*values, **options)

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, self.__value)


class _Object:
    """A captured object, whose arrays are seen as tensors."""

    def __init__(self, tracer: Tracer, value: Any) -> None:
        self.__tracer, self.__value = tracer, value
        tracer.kept.append(value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__value, name)
        return self.__tracer.wrapped(found, ("object", id(self.__value), name), {})

    def __getitem__(self, key: Any) -> Any:
        return self.__tracer.wrapped(self.__value[key], ("object", id(self.__value), repr(key)), {})

    def __call__(self, *values: Any, **options: Any) -> Any:
        return self.__tracer.callable(self.__value, ("object", id(self.__value)), {})(*values, **options)


@lru_cache(maxsize=256)
def element(dtype: np.dtype[Any]) -> tuple[str, bool]:
    """The type that elements of arrays of a type are read as, "" for none, and whether they are so where they lie."""
    if dtype.kind == "b":
        return "u8", True
    known = _KNOWN.get(dtype.name, "")
    if known:
        return known, dtype.isnative
    other = _AS_OTHERS.get(dtype.name)
    return ("" if other is None else "f32" if other is np.float32 else "s32"), False


def described(array: Array, view: tuple[str | int, ...]) -> Operand:
    """How an array is read by a view of its axes."""
    kind = element(array.dtype)[0]
    axes = "".join([x for x in AXES if x in view])
    if "n" not in axes:
        return Operand(kind, axes)
    last = view[-1] == "n" and view.count("n") == 1
    if not lies(array):  # a copy is read
        return Operand(kind, axes, last)
    step = sum([s for x, s in zip(view, array.strides, strict=True) if x == "n"])
    return Operand(kind, axes, step == array.itemsize or (last and array.shape[-1] == 1))


def lies(array: Array) -> bool:
    """Kernels can read an array where it lies."""
    as_it_is = element(array.dtype)[1]
    return as_it_is and array.flags.aligned and not any([s % array.itemsize for s in array.strides])  # noqa: C419 - faster


@dataclass(frozen=True, slots=True)
class Traced:
    """What a function came to.

    Attributes:
        results: an expression for each value that it returned, and the NumPy type that was asked for, or None.
        several: it returned a tuple.
        operands: what it reads.
        sources: where that is.
        numbers: where the numbers of a call come from.
        values: of numbers that objects hold, as they were when the function was traced.
    """

    results: tuple[tuple[Expr, Any], ...]
    several: bool
    operands: tuple[Operand, ...]
    sources: tuple[Source, ...]
    numbers: tuple[tuple[Any, ...], ...]
    values: tuple[tuple[tuple[Any, ...], float], ...] = ()


def trace(
    function: Callable[..., Any], values: tuple[Any, ...], *, by_value: bool, rank: int = 2
) -> tuple[Traced, bool]:
    """Run a function on values of a tile; also whether the same may be said of the next call.

    Raises:
        TraceError: it does what cannot be traced; the message names its line.
    """
    tracer = Tracer(by_value=by_value, rank=rank)
    try:
        if not callable(function):
            raise TypeError(f"{function!r} is no function")
        found = tracer.callable(function, (), {})(*values[: arity(function, len(values))])
        results = tuple(_result(x, tracer) for x in _values_of(found))
    except TraceError as error:
        raise _located(error, function) from error.__cause__
    lasting = tracer.lasting and isinstance(function, types.FunctionType)
    several, values_ = isinstance(found, tuple), tuple(tracer.values.items())
    # What is remembered must not keep arrays alive, and finds them again.
    sources = tuple(replace(x, there=None) if lasting else x for x in tracer.sources)
    reads = (tuple(tracer.operands), sources, tuple(tracer.numbers), values_)
    return Traced(results, several, *reads), lasting


def _values_of(found: Any) -> tuple[Any, ...]:
    """What a function gives, one value or several."""
    if isinstance(found, tuple) and not found:
        raise TraceError("an empty tuple is no result")
    return found if isinstance(found, tuple) else (found,)


def arity(function: Any, most: int) -> int:
    """How many of the values a function takes: those of its parameters that have no defaults."""
    function = getattr(function, "__wrapped__", function)
    if isinstance(function, np.ufunc):
        return min(most, function.nin)
    if isinstance(function, partial):
        return arity(function.func, most + len(function.args)) - len(function.args)
    code: types.CodeType | None = getattr(function, "__code__", None)
    method = isinstance(function, types.MethodType)
    if code is None:
        code, method = getattr(type(function).__call__, "__code__", None), True
    if code is None or code.co_flags & 0x04:  # *args
        return most
    names = code.co_argcount - method
    return min(most, names - len(getattr(function, "__defaults__", None) or ()) or names)


def _result(x: Any, tracer: Tracer) -> tuple[Expr, Any]:
    if isinstance(x, Typed):
        value, _ = _result(x.value, tracer)
        return value, x.dtype
    if isinstance(x, Tensor):
        x = x.broadcast_()
    if not isinstance(x, Expr):
        x = real(x)
    return x, None


def _located(error: TraceError, function: Any) -> TraceError:
    """The error, with the line of the user's function where it arose."""
    if getattr(error, "located", False):
        return error
    line, name = 0, ""
    step = error.__traceback__
    while step is not None:
        if is_users(step.tb_frame.f_globals):
            line, name = step.tb_lineno, step.tb_frame.f_code.co_filename
        step = step.tb_next
    own: types.CodeType | None = getattr(function, "__code__", None)
    if not line and own is not None and is_users(function.__globals__):
        line, name = own.co_firstlineno, own.co_filename
    if not line and (frame := caller()) is not None:
        line, name = frame.f_lineno, frame.f_code.co_filename
    made = TraceError(f"{name}, line {line}: {error}" if name else str(error))
    made.located = True  # type: ignore[attr-defined]
    return made
