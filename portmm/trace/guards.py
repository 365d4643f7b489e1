"""Guards on what a traced function captures, and the results of traces that they select.

Owns `Guards`, a Python function that looks captured values up and compares them with those of the trace, `Way`, the
result of a trace with its guards, and `find`, which returns the result whose guards hold.
"""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.libraries import on_device
from portmm.trace.closures import constant_key, filled, is_constant
from portmm.util.array_subclasses import refuse_class
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.util.memo import Memory

MOST_WAYS = 16
"""Results of one kind of call, which differ in what the function captures."""
_FAILS = "Exception"
"""Errors of a look-up: the captured value is no longer there, or a property or method of the user raises."""


def place(function: str, *, cell: int = -1, name: str = "") -> str:
    """The text by which guards look up a variable of a closure, or a global, of a function."""
    return f"{function}.__globals__[{name!r}]" if name else f"{function}.__closure__[{cell}].cell_contents"


def _no_array(x: Any) -> bool:
    """Whether an object that is no plain array is no array at all; arrays of other classes may be refused."""
    refuse_class(x, "a captured array", matrix=False)
    return not isinstance(x, np.ndarray)


def lay(x: Any) -> tuple[Any, ...]:
    """The properties of an array on a device that kernels depend on."""
    from portmm.arrays import interop  # by the first such array

    return interop.lay(x)


def as_numpy(x: Any) -> np.ndarray[Any, Any]:
    """A view of a tensor as an array of NumPy's."""
    from portmm.arrays import interop  # by the first tensor

    return interop.as_numpy(x)


def _other_device_array(x: Any, layout: Any) -> bool:
    return not on_device(x) or lay(x) != layout


def _other_constant(x: Any, key: Any) -> bool:
    return not is_constant(x) or constant_key(x) != key


def _bits(x: Iterable[Any]) -> bytes:
    values = [*x]
    return struct.pack(f"{len(values)}d", *values)


class Guards:
    """The guards of one trace, as the text of a Python function: compiled when a call is first compared with it.

    Args:
        named: captured arrays and numbers are returned as a dict, else as a list.

    Attributes:
        values: returns what a function captures now, None if a guard fails.
    """

    def __init__(self, *, named: bool) -> None:
        self.named = named
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "ndarray": np.ndarray, "_no_array": _no_array, "_filled": filled,
            "_other_device_array": _other_device_array, "_other_constant": _other_constant,
            "_bits": _bits, "_as_numpy": as_numpy,
        }  # fmt: skip
        self.returned: list[str] = []
        self.numbers: dict[int, tuple[str, str]] = {}  # lines that guard values -> those of types, and what is returned
        self.looked = 0
        self.values: Callable[[Any], Any] = self._compile

    def constant(self, x: Any) -> str:
        """The name of an object in the text, which keeps it alive."""
        for_type = getattr(x, "__name__", "") if isinstance(x, type) else ""
        if for_type and vars(builtins).get(for_type) is x:
            return str(for_type)
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name

    def look(self, text: str) -> str:
        """The name of a value that is looked up."""
        self.looked += 1
        self.lines.append(f"v{self.looked} = {text}")
        return f"v{self.looked}"

    def refuse(self, condition: str) -> None:
        """Add a guard: the condition under which it fails."""
        self.lines.append(f"if {condition}: return None")

    def array(self, v: str, x: Any) -> None:
        """Guard the layout of an array."""
        plain = f"{v}.shape != {x.shape!r} or {v}.strides != {x.strides!r} or {v}.dtype != {self.constant(x.dtype)}"
        aligned = f"{v}.flags.aligned" if not x.flags.aligned else f"not {v}.flags.aligned"
        self.refuse(f"type({v}) is not ndarray and _no_array({v}) or {plain} or {aligned}")

    def same(self, v: str, x: Any) -> None:
        """Guard the identity of an object."""
        self.refuse(f"{v} is not {self.constant(x)}")

    def equal(self, v: str, x: Any) -> None:
        """Guard the type and the value of a plain value."""
        if x is None or isinstance(x, bool):
            self.refuse(f"{v} is not {x!r}")
            return
        different = f"{v} != {self.constant(x)}" if x == x else f"{v} == {v}"  # noqa: PLR0124 - a NaN equals nothing
        text = f"type({v}) is not {self.constant(type(x))} or {different}"
        if isinstance(x, (float, np.floating)):  # 0.0 and -0.0 are equal
            text += f" or repr({v}) != {repr(x)!r}"
        self.refuse(text)

    def typed(self, v: str, kind: type) -> None:
        """Guard the type of an object."""
        self.refuse(f"type({v}) is not {self.constant(kind)}")

    def layout(self, v: str, x: Any) -> None:
        """Guard the layout of an array on a device."""
        self.refuse(f"_other_device_array({v}, {self.constant(lay(x))})")

    def alike(self, v: str, x: Any) -> None:
        """Guard the value of a constant."""
        self.refuse(f"_other_constant({v}, {self.constant(constant_key(x))})")

    def keys(self, v: str, x: Iterable[Any]) -> None:
        """Guard the keys of a dict, and their order."""
        keys = [*x]
        if all(type(key) is str for key in keys):
            self.refuse(f"[*{v}] != {keys!r}")
        else:  # 1, 1.0 and True are equal
            self.refuse(f"[*map(repr, {v})] != {list(map(repr, keys))!r}")

    def number(self, v: str, x: Any, key: Any) -> None:
        """Guard the value of a number that the function's control flow may depend on."""
        self.numbers[len(self.lines)] = f"if type({v}) is not {self.constant(type(x))}: return None", self._item(v, key)
        self.equal(v, x)

    def values_of(self, v: str, x: Iterable[Any], keys: list[Any], *, by_value: bool) -> None:
        """Guard the types of many plain values and floats, and the values of the former; see `returns` for keys.

        Floats are returned; with `by_value` their values are guarded as those of a `number`.
        """
        items = [*x]
        self.refuse(f"[*map(type, {v})] != {self.constant([*map(type, items)])}")
        if plain := [y for y in items if not isinstance(y, float)]:
            some = f"y for y in {v} if not isinstance(y, float)" if keys else f"*{v}"
            self.refuse(f"[{some}] != {self.constant(plain)}")
            v = self.look(f"[y for y in {v} if isinstance(y, float)]") if keys else v
        if not keys:
            return
        returned = f"**dict(zip({self.constant(keys)}, {v}))" if self.named else f"*map(float, {v})"
        if by_value:
            self.numbers[len(self.lines)] = "", returned
            self.refuse(f"_bits({v}) != {_bits([y for y in items if isinstance(y, float)])!r}")
        else:
            self.returned.append(returned)

    def without_values(self) -> Guards:
        """The same guards for any values of such numbers, which are returned."""
        other = Guards(named=self.named)
        other.names = self.names
        other.lines = [self.numbers[i][0] if i in self.numbers else x for i, x in enumerate(self.lines)]
        other.returned = [x for _, x in self.numbers.values()]
        return other

    def distinct(self, names: list[str]) -> None:
        """Guard that no two objects are the same."""
        self.refuse(f"len({{{', '.join(f'id({v})' for v in names)}}}) != {len(names)}")

    def returns(self, v: str, key: Any, text: str = "{}") -> None:
        """Return a value that was looked up, under a key."""
        self.returned.append(self._item(text.format(v), key))

    def _item(self, text: str, key: Any) -> str:
        return f"{key!r}: {text}" if self.named else text

    def _compile(self, function: Any) -> Any:
        result = f"{{{', '.join(self.returned)}}}" if self.named else f"[{', '.join(self.returned)}]"
        body = "".join(f"  {x}\n" for x in (*self.lines, f"return {result}"))
        text = f"def captured(f):\n try:\n{body} except {_FAILS}: return None\n"
        namespace = dict(self.names)
        exec(compile(text, "<portmm.guards>", "exec"), namespace)  # noqa: S102 - the text above, of literals and our names
        self.values = namespace["captured"]
        return self.values(function)


@dataclass(frozen=True, slots=True)
class Way:
    """The result of a trace, for calls whose captured values pass its guards.

    Attributes:
        guards: on captured values.
        result: a kernel.
        by_value: there is no result: control flow depends on numbers, and each value of them has a result of its own.
    """

    guards: Guards
    result: Any = None
    by_value: bool = False


def find(ways: Mapping[Any, Any], key: Any, function: Any, numbers: Iterable[Any] = ()) -> tuple[Any, Any]:
    """The result for a call of some kind, or None, and what its function captures now.

    Where there is no result, but such functions depend on values of numbers, these are returned.

    Args:
        ways: the results by kind of call.
        key: the kind.
        function: the function.
        numbers: arguments of the call that may be numbers.
    """
    for way in ways.get(key, ()):
        captured = way.guards.values(function)
        if captured is not None:
            if not way.by_value:
                return way, captured
            result, now = find(ways, by_value_key(key, numbers, captured), function)
            return result, captured if result is None else now
    return None, None


def by_value_key(key: Any, numbers: Iterable[Any], captured: Any) -> Any:
    """The kind of a call whose numbers are constants."""
    values = [*numbers, *(captured.values() if isinstance(captured, dict) else captured)]
    # As text: 0.0 and -0.0 are equal.
    return key, tuple([float(x).hex() for x in values if isinstance(x, (float, np.floating))])


def remember(ways: Memory, key: Any, way: Any, function: Any, numbers: Iterable[Any] = (), *, by_value: bool) -> None:
    """Remember a result, the first to be compared with the next call; see `find` for the arguments.

    With `by_value` it is that of the numbers of this call.
    """
    if by_value:
        now = (x.guards.values(function) for x in ways.get(key, ()) if x.by_value)
        captured = next((x for x in now if x is not None), None)
        if captured is None:
            of_kind = Way(way.guards.without_values(), by_value=True)
            captured = of_kind.guards.values(function)
            if captured is None:  # it has changed meanwhile
                return
            _keep(ways, key, of_kind)
        key = by_value_key(key, numbers, captured)
    _keep(ways, key, way)


def _keep(ways: Memory, key: Any, way: Any) -> None:
    ways.keep(key, [way, *ways.get(key, ())[: MOST_WAYS - 1]])
