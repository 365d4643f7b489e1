"""Repeated calls on a device: from arrays of known kinds to launches, without describing them again.

Owns `RepeatedCall`, what a call of one kind needs beside the addresses of its arrays, and the memos of products and of
functions. All checks that depend on kinds alone were made by the first call; others, whether a result overlaps what is
read, are made again, and a call that fails one of them takes the long way, which says why or copies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from portmm.arrays.device_kinds import NewArray, kind, kinds, streams_of
from portmm.arrays.libraries import library_of
from portmm.arrays.numpy_arrays import span_of
from portmm.dispatch import config
from portmm.spec.dtype import BY_NAME
from portmm.trace.bind import UserFunction, code_of
from portmm.trace.closures import resolve
from portmm.trace.guards import Way, find, remember
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.arrays.operand import Operand
    from portmm.ops.kernel_call import Closure, KernelCall

MOST_KINDS = 1024
"""Kinds of calls remembered before a memo is emptied."""
LIBRARIES = ("torch", "cupy")
"""Libraries whose arrays have kinds."""


class RepeatedCall:
    """A call of one kind, of operands whose addresses alone vary.

    Args:
        ready: its kernels.
        operands: of the first call, by the names of kernels' parameters; the first one's library, device and stream
            are those of the results.
        out: the array that the first result was written to, or None for a new one.
        read: the arrays that the call's function captured.

    Attributes:
        settings: of portmm when the call was made.
        on: the machine.
        device: its number.
        stream: gives the library's current stream of a device.
        launches: with the operands that each moves.
        names: of the parameters that are operands.
        spans: bytes of the operands, from their addresses.
        own: the same of `out`, or None.
        to: the parameter that is the first result.
        new: parameters that are new results, and what makes these.
        several: the call returns a tuple.
        work: makes the scratch, or None.
        read: parameters that are captured arrays, their keys, bytes before the first element, and spans.
        floats: parameters that are captured numbers, and their keys.
    """

    __slots__ = (
        "device", "floats", "launches", "names", "new", "on", "own", "read", "settings", "several", "spans", "stream",
        "to", "work",
    )  # fmt: skip

    def __init__(
        self, ready: KernelCall, operands: dict[str, Operand], out: Operand | None, read: Sequence[Operand] = ()
    ) -> None:
        like = next(iter(operands.values()))
        self.settings, self.on, self.launches, self.several = config.current(), ready.on, ready.launches, ready.several
        self.stream = streams_of(sys.modules[library_of(like.source)])
        self.device = int(like.device[1])  # type: ignore[call-overload]
        exchanged = {"a": "b", "b": "a"} if ready.swapped else {}
        self.names = tuple([exchanged.get(x, x) for x in operands])
        self.spans = [_span(x) for x in operands.values()]
        self.own = None if out is None else _span(out)
        self.to = ready.results[0][0]
        self.new = [(name, NewArray(like, shape, dtype)) for name, shape, dtype in ready.results[out is not None :]]
        captures = ready.captures
        self.read = [(name, x.key, at, _span(y)) for (name, x, at), y in zip(captures.sources, read, strict=True)]
        self.floats = [(f"number_{i}", key) for i, key in enumerate(captures.numbers)]
        self.work = NewArray(like, ready.workspace[:1], ready.workspace[1]) if ready.workspace[0] else None

    def run(
        self, addresses: Sequence[int], out: Any = None, at: int = 0, closure: Closure | None = None, **numbers: int
    ) -> Any:
        """The result, or the results; NotImplemented where an array of these overlaps `out`.

        Args:
            addresses: of the operands, and perhaps, after them, of the result.
            out: the array of the first result, if this call has one, and
            at: its address.
            closure: what the call's function captures.
            numbers: further arguments of kernels.
        """
        values: dict[str, Any] = dict(zip(self.names, addresses), **numbers)  # noqa: B905 - where there is an out, too
        own, first, end = self.own, 0, 0
        if own is not None:
            first, end = at + own[0], at + own[1]
            for there, (low, high) in zip(addresses, self.spans):  # noqa: B905 - there is one for each
                if there + low < end and first < there + high:
                    return NotImplemented
            values[self.to] = at
        if closure is not None and not self._captured(values, closure, first, end):
            return NotImplemented
        results = [] if self.own is None else [out]
        for name, make in self.new:
            result, values[name] = make()
            results.append(result)
        queue, scratch = self.stream(self.device), None
        if self.work is not None:
            scratch, values["work"] = self.work()
        for launch, moves in self.launches:
            here = values
            if moves:
                here = values | {name: values[name] + elements * size for name, elements, size in moves}
            if launch.counters or launch.prepared is None:
                launch.run(self.on, here, queue)
            else:
                launch.prepared(here, queue)
        del scratch  # its library frees it when the stream is done with it
        return tuple(results) if self.several else results[0]

    def _captured(self, values: dict[str, Any], closure: Closure, first: int, end: int) -> bool:
        """Add what a function captures; whether no array of it is within the bytes from `first` to `end`."""
        for name, key, begin, (low, high) in self.read:
            there = kind(closure[key] if key in closure else resolve(key, closure))[1]  # type: ignore[index]
            if there + low < end and first < there + high:
                return False
            values[name] = there + begin
        for name, key in self.floats:
            values[name] = float(closure[key] if key in closure else resolve(key, closure))
        return True

    @property
    def current(self) -> bool:
        """Whether it was made under the settings of now."""
        now = config.current()
        return now is self.settings or now == self.settings


def _span(x: Operand) -> tuple[int, int]:
    """The bytes of an array, from its address."""
    return span_of(x.shape, x.strides, BY_NAME[x.dtype].bytes) if x.size else (0, 0)


_calls = Memory(MOST_KINDS)
"""Kinds of arrays, and what the call is -> calls without functions."""
_ways = Memory(MOST_KINDS)
"""The same and the function's code -> calls, by what the function captures."""


def product(a: Any, b: Any, out: Any = None, dtype: Any = None, epilogue: Any = None) -> Any:
    """The product of arrays like those of an earlier call; NotImplemented if there was none: see `grid_product`."""
    return again((a, b) if out is None else (a, b, out), (dtype,), epilogue, out)


def again(arrays: tuple[Any, ...], form: tuple[Any, ...], function: Any, out: Any, **numbers: int) -> Any:
    """The result of a call that is like an earlier one but for addresses; NotImplemented if there was none.

    Args:
        arrays: the operands, and `out` if there is one.
        form: the properties of the call besides the kinds of its arrays.
        function: its epilogue or function of scores, or None.
        out: the array of the first result, or None for a new one.
        numbers: further arguments of kernels.
    """
    now = kinds(arrays)
    if now is None:
        return NotImplemented
    key, closure = (now[0], *form), None
    if function is None:
        call = _calls.get(key)
    else:
        way, closure = find(_ways, (key, code_of(function)), function)
        call = None if way is None else way.result
    if call is None or not call.current:
        return NotImplemented
    return call.run(now[1], out, now[1][-1], closure, **numbers)


def keep(  # noqa: PLR0917 - a call, and its function
    arrays: tuple[Any, ...], form: tuple[Any, ...], ready: KernelCall, operands: dict[str, Operand],
    out: Operand | None = None, function: UserFunction | None = None, read: Sequence[Operand] = (),
) -> None:  # fmt: skip
    """Keep a call, if further ones of its kind need no more than addresses; see `RepeatedCall` and `again`.

    Arrays that a function captures may be of libraries whose addresses are not asked for here.
    """
    now = kinds(arrays)
    if now is None or not repeats(ready, next(iter(operands.values()))) or any(kind(x.source) is None for x in read):
        return
    key = (now[0], *form)
    if function is None:
        _calls.keep(key, RepeatedCall(ready, operands, out))
    elif function.way is not None:
        way = Way(function.way.guards, RepeatedCall(ready, operands, out, read))
        remember(_ways, (key, code_of(function.function)), way, function.function, by_value=False)


def repeats(ready: KernelCall, like: Operand) -> bool:
    """Whether a further call needs no more than addresses: nothing is converted or copied."""
    return not (ready.converts or ready.copies) and library_of(like.source) in LIBRARIES
