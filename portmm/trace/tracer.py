"""Tracing of a function: it runs on values of a tile, and its operations become expressions.

Owns `Traced`, the expressions of a function with the operands and numbers that it captured, and `trace`, whose
results are remembered for each kind of closure, so that a function is traced once for each.

A traced function sees the arrays that it captures (closures, globals,
defaults, attributes of captured objects) as `Tensor`, which can be indexed by
axes. Captured floats become numbers that each call passes, so that a new value
compiles nothing; where Python must know them (an if, math.sqrt), they are
constants, and each value has a kernel of its own.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.device_array import standin
from portmm.arrays.interop import adopt
from portmm.arrays.libraries import on_device
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
    """Indices of an element of the result along each axis: of a product, row m, column n, item b of a batch."""

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
        """The names of the indices, with their axes."""
        return self._names


@dataclass(frozen=True, slots=True)
class Source:
    """The array of an operand, and the view of it that is read.

    Attributes:
        key: the steps from the function to the array.
        array: as it was when it was traced.
        view: the axis of the result for each of the array's, an integer for one index along it, or "" for
            one that is broadcast.
        exact: its axes are as long as the result's; else they are no shorter.
        device: the array's device, if it is not the host: `array` is a stand-in, and must not be read.
        there: the device's array, if only this call can find it.
    """

    key: tuple[Any, ...]
    array: Array
    view: tuple[str | int, ...]
    exact: bool = False
    device: tuple[Any, ...] = ()
    there: Any = None


class Tracer:
    """The record of one trace: operands and numbers that the function reads."""

    def __init__(self, *, by_value: bool, rank: int) -> None:
        self.by_value = by_value
        self.rank = rank
        self.sources: list[Source] = []
        self.operands: list[Operand] = []
        self.numbers: list[tuple[Any, ...]] = []
        self.values: dict[tuple[Any, ...], float] = {}
        self.standins: dict[int, Array] = {}
        self.there: dict[int, tuple[Array, Any, tuple[Any, ...]]] = {}  # by the identity of the stand-in
        self.kept: list[Any] = []  # objects that keys name by identity
        self.lasting = True
        self.by_extents = False

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
        """The stand-in for an array on a device, the same each time."""
        stand_in = self.standins.get(id(value))
        if stand_in is None:
            there = adopt(value)
            assert there is not None  # noqa: S101 - it is on a device
            self.kept.append(value)
            stand_in = self.standins[id(value)] = standin(there)
            self.there[id(stand_in)] = (stand_in, value, there.device)
        return stand_in

    def look(self, array: Array, view: Array, function: Callable[[Any], Any]) -> Array:
        """A view of an array; the view of a stand-in is a stand-in for the same view of the device's array."""
        if id(array) in self.there:
            _, value, device = self.there[id(array)]
            self.there[id(view)] = (view, function(value), device)
        return view

    def number(self, key: tuple[Any, ...]) -> Expr:
        """The number that each call reads by this key."""
        if key not in self.numbers:
            self.numbers.append(key)
        return number(self.numbers.index(key))

    def wrapped(  # noqa: PLR0911 - one branch for each kind
        self, value: Any, key: tuple[Any, ...], seen: dict[int, Any]
    ) -> Any:
        """The value that replaces a captured one in a traced function."""
        if isinstance(value, np.ndarray):
            refuse_class(value, "a captured array", matrix=False)
            self.lasting &= value.ndim > 0
            return Tensor(self, value, key) if value.ndim else value
        if isinstance(value, (float, np.floating)) and not self.by_value:
            self.values[key] = float(value)
            return self.number(key)
        if isinstance(value, types.FunctionType) and not ours(value):
            if id(value) not in seen:
                seen[id(value)] = value
                seen[id(value)] = self.rebound(value, key, seen)
            return seen[id(value)]
        if isinstance(value, (tuple, list)):
            items = [self.wrapped(x, (*key, i), seen) for i, x in enumerate(value)]
            return type(value)(items) if type(value) in (tuple, list) else value
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
        """A method, a partial, or a callable object whose captured values are replaced."""
        if isinstance(value, types.FunctionType):
            return value if ours(value) else self.rebound(value, key, seen)
        if isinstance(value, partial):
            args = [self.wrapped(x, (*key, i), seen) for i, x in enumerate(value.args)]
            named = {k: self.wrapped(x, (*key, k), seen) for k, x in value.keywords.items()}
            return partial(self.callable(value.func, (*key, "func"), seen), *args, **named)
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
        namespace = dict(function.__globals__)
        for name in names:
            namespace[name] = self.wrapped(namespace[name], (*key, ("global", name)), seen)
        cells = tuple(
            types.CellType(self.wrapped(cell.cell_contents, (*key, ("closure", i)), seen)) if filled(cell) else cell
            for i, cell in enumerate(function.__closure__ or ())
        )
        defaults = function.__defaults__ and tuple(
            self.wrapped(x, (*key, ("default", i)), seen) for i, x in enumerate(function.__defaults__)
        )
        function_ = types.FunctionType(code, namespace, function.__name__, defaults, cells)
        if function.__kwdefaults__:
            function_.__kwdefaults__ = {
                n: self.wrapped(x, (*key, ("keyword", n)), seen) for n, x in function.__kwdefaults__.items()
            }
        return function_


_LAID = frozenset(("shape", "ndim", "dtype", "size", "strides", "itemsize", "nbytes"))
"""Attributes that do not depend on values."""
_EXTENTS = frozenset(("shape", "size", "strides", "nbytes"))
"""Attributes that depend on extents."""
_VIEWS = frozenset(("T", "mT", "transpose", "swapaxes", "squeeze"))
"""Attributes and methods that return views."""
_SOUGHT = frozenset(("record_", "call_", "along_"))
"""Attributes that portmm's functions look for on other traced values."""


class Tensor:
    """An array that a traced function captured: indexed by axes, or broadcast as in NumPy."""

    def __init__(self, tracer: Tracer, array: Array, key: tuple[Any, ...]) -> None:
        self._tracer, self._array, self._key = tracer, array, key

    def __getattr__(self, name: str) -> Any:
        if name in CHANGES:
            raise TraceError(f"{name}() changes an array in place, once, while the function is traced")
        if name in _SOUGHT:
            raise AttributeError(name)
        self._seen(name, name in (*_LAID, *_VIEWS))
        self._tracer.by_extents |= name in _EXTENTS
        attribute = getattr(self._array, name)
        if isinstance(attribute, np.ndarray):
            attribute = self._tracer.look(self._array, attribute, lambda x: getattr(x, name))
            return Tensor(self._tracer, attribute, (*self._key, ("attribute", name)))
        self._tracer.lasting &= name in _LAID  # else the result depends on its values
        return partial(self._called, name, attribute) if isinstance(attribute, types.BuiltinMethodType) else attribute

    def _seen(self, what: str, known: bool = False) -> None:
        """Refuse operations on the elements of an array on a device."""
        if not known and id(self._array) in self._tracer.there:
            raise TraceError(f"{what} of an array on a device; compute it before, and let the function capture it")

    def _called(self, name: str, method: Any, *values: Any, **options: Any) -> Any:
        """The result of a method; an array becomes an operand."""
        result = method(*values, **options)
        if not isinstance(result, np.ndarray) or not result.ndim:
            return result
        result = self._tracer.look(self._array, result, lambda x: getattr(x, name)(*values, **options))
        return Tensor(self._tracer, result, (*self._key, ("called", name, repr((values, options)))))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TraceError("[...] = changes an array in place, once, while the function is traced")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        self._seen("the values")
        self._tracer.lasting = False  # the result depends on its values
        return np.asarray(self._array, dtype)

    def __len__(self) -> int:
        self._tracer.by_extents = True
        return len(self._array)

    def __getitem__(self, key: Any) -> Any:
        indices = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(x, Expr) for x in indices):
            integers = [x for x in indices if isinstance(x, (int, np.integer)) and not isinstance(x, bool)]
            basic = all(x is None or x is ... or isinstance(x, (slice, int, np.integer)) for x in indices)
            self._seen(f"[{key!r}]", basic and len(integers) < self._array.ndim)
            item = self._array[key]
            where = (*self._key, ("item", repr(key)))
            if isinstance(item, np.ndarray) and item.ndim:
                self._tracer.lasting = False
                return Tensor(self._tracer, self._tracer.look(self._array, item, lambda x: x[key]), where)
            self._tracer.lasting = False
            return item
        if len(indices) != self._array.ndim:
            raise TraceError(
                f"an array of {self._array.ndim} dimensions is indexed by {len(indices)}; give one for each"
            )
        return self._tracer.operand(self._key, self._array, tuple(self._word(x) for x in indices))

    def _word(self, x: Any) -> str | int:
        if isinstance(x, Expr) and x.op == "index":
            return str(x.args[0])
        if isinstance(x, (int, np.integer)):
            return int(x)
        raise TraceError(f"an array is indexed by {x!r}; use an index as it is (i.m, i.n), or an integer")

    def broadcast_(self) -> Expr:
        """The array as an operand that broadcasts as in NumPy: its last axes are the result's."""
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
        own = self.broadcast_()
        args = [x.broadcast_() if isinstance(x, Tensor) else x for x in others]
        return getattr(own, name)(*args)

    return method


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv neg abs lt le gt ge eq ne and rand or ror xor rxor invert pow".split()  # noqa: SIM905
):
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


def _by_numpy(ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    args = tuple(y.broadcast_() if isinstance(y, Tensor) else y for y in inputs)
    expressions = [y for y in args if isinstance(y, Expr)]
    return expressions[0].__array_ufunc__(ufunc, method, *args, **options)


class _Space:
    """A captured module or class, whose arrays are seen as tensors, and numbers as arguments of each call."""

    def __init__(self, tracer: Tracer, value: Any, key: tuple[Any, ...]) -> None:
        self.__tracer, self.__value, self.__key = tracer, value, key

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.__value, name)
        return self.__tracer.wrapped(attribute, (*self.__key, ("attribute", name)), {})

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
        attribute = getattr(self.__value, name)
        return self.__tracer.wrapped(attribute, ("object", id(self.__value), name), {})

    def __getitem__(self, key: Any) -> Any:
        return self.__tracer.wrapped(self.__value[key], ("object", id(self.__value), repr(key)), {})

    def __call__(self, *values: Any, **options: Any) -> Any:
        return self.__tracer.callable(self.__value, ("object", id(self.__value)), {})(*values, **options)


@lru_cache(maxsize=256)
def element(dtype: np.dtype[Any]) -> tuple[str, bool]:
    """The type that kernels read elements of a dtype as, "" for none, and whether that needs no conversion."""
    if dtype.kind == "b":
        return "u8", True
    known = _KNOWN.get(dtype.name, "")
    if known:
        return known, dtype.isnative
    other = _AS_OTHERS.get(dtype.name)
    return ("" if other is None else "f32" if other is np.float32 else "s32"), False


def described(array: Array, view: tuple[str | int, ...]) -> Operand:
    """The operand that a view of an array is."""
    kind = element(array.dtype)[0]
    axes = "".join([x for x in AXES if x in view])
    if "n" not in axes:
        return Operand(kind, axes)
    last = view[-1] == "n" and view.count("n") == 1
    if not readable_in_place(array):  # a copy is read
        return Operand(kind, axes, last)
    step = sum([s for x, s in zip(view, array.strides, strict=True) if x == "n"])
    return Operand(kind, axes, step == array.itemsize or (last and array.shape[-1] == 1))


def readable_in_place(array: Array) -> bool:
    """Whether kernels can read an array in place."""
    same_type = element(array.dtype)[1]
    return same_type and array.flags.aligned and not any([s % array.itemsize for s in array.strides])  # noqa: C419 - faster


@dataclass(frozen=True, slots=True)
class Traced:
    """The expressions of a function, with the operands and numbers that it reads.

    Attributes:
        results: an expression for each value that it returned, and the NumPy type of a `cast`, or None.
        several: it returned a tuple.
        operands: the arrays that it reads.
        sources: the views of captured arrays that these are.
        numbers: keys of the numbers of a call.
        values: of numbers that objects hold, as they were when the function was traced.
        by_extents: the function asked for extents of arrays that it captures: they may be constants in the results.
    """

    results: tuple[tuple[Expr, Any], ...]
    several: bool
    operands: tuple[Operand, ...]
    sources: tuple[Source, ...]
    numbers: tuple[tuple[Any, ...], ...]
    values: tuple[tuple[tuple[Any, ...], float], ...] = ()
    by_extents: bool = False


def trace(
    function: Callable[..., Any], values: tuple[Any, ...], *, by_value: bool, rank: int = 2
) -> tuple[Traced, bool]:
    """Run a function on values of a tile; also whether the result holds for the next call.

    Raises:
        TraceError: the function cannot be traced; the message names the line.
    """
    tracer = Tracer(by_value=by_value, rank=rank)
    try:
        if not callable(function):
            raise TypeError(f"{function!r} is no function")
        result = tracer.callable(function, (), {})(*values[: arity(function, len(values))])
        results = tuple(_result(x, tracer) for x in _values_of(result))
    except TraceError as error:
        raise _located(error, function) from error.__cause__
    lasting = tracer.lasting and isinstance(function, types.FunctionType)
    # A later call looks numbers up by their keys, but for those of objects.
    several = isinstance(result, tuple)
    values_ = tuple((key, x) for key, x in tracer.values.items() if not lasting or key[0] == "object")
    # The memo must not keep arrays alive; calls look them up by their keys.
    sources = tuple(replace(x, there=None) if lasting else x for x in tracer.sources)
    reads = (tuple(tracer.operands), sources, tuple(tracer.numbers), values_)
    return Traced(results, several, *reads, tracer.by_extents), lasting


def _values_of(result: Any) -> tuple[Any, ...]:
    """The results of a function as a tuple."""
    if isinstance(result, tuple) and not result:
        raise TraceError("the function returns an empty tuple; return a value")
    return result if isinstance(result, tuple) else (result,)


def arity(function: Any, most: int) -> int:
    """The number of values that a function takes: its parameters without defaults, at most `most`."""
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
    """The error, with the line of the user's function that raised it."""
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
    located = TraceError(f"{name}, line {line}: {error}" if name else str(error))
    located.located = True  # type: ignore[attr-defined]
    return located
