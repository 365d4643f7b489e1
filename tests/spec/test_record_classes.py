"""Records are dataclasses: what the standard library's do, they do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any, ClassVar

import pytest

from portmm.util import records


def classes(dataclass, **options):
    """Records of some forms, by a decorator."""

    @dataclass(**options)
    class Point:
        """Fields with and without defaults."""

        kind: ClassVar[str] = "point"
        x: int
        y: Any = 2
        z: list[int] = dataclasses.field(default_factory=list)
        shown: int = dataclasses.field(default=3, repr=False, compare=False, kw_only=True)

        def __post_init__(self):
            if self.x == 99:
                raise ValueError("x is 99")

    @dataclass(**options)
    class Farther(Point):
        """Inherited fields, and one that is not passed."""

        more: int = dataclasses.field(init=False, default=7)
        name: str = dataclasses.field(default="", hash=False)

        def __repr__(self):
            return "farther"

    return Point, Farther


OPTIONS = [
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"eq": False, "slots": True},
    {"frozen": True, "slots": True, "eq": False},
]


def outcome(act):
    """The value that a function returns, records as tuples, or the type of the error that it raises."""
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - it is compared
        return type(error)
    return dataclasses.astuple(result) if dataclasses.is_dataclass(result) else result


def behaviour(cls):
    """Results of a class's methods and attributes, comparable between classes of both decorators."""
    return [
        outcome(lambda: cls(1)),
        outcome(lambda: cls(1, y=5, z=[4], shown=8)),
        outcome(lambda: cls(1, 2, [3], 4, 5, 6)),
        outcome(cls),
        outcome(lambda: cls(99)),
        outcome(lambda: cls(1, other=2)),
        repr(cls(1, 3)),
        cls(1) == cls(1),
        cls(1, shown=4) == cls(1),
        cls(1) == cls(2),
        cls(1) == (1, 2, []),
        outcome(lambda: hash(cls(1, 2, ())) == hash(cls(1, 2, ()))),
        outcome(lambda: setattr(cls(1), "x", 2)),
        outcome(lambda: setattr(cls(1), "other", 2)) is None,
        outcome(lambda: delattr(cls(1), "x")),
        outcome(lambda: dataclasses.replace(cls(1), x=4)),
        outcome(lambda: records.replace(cls(1, shown=9), x=4)),
        outcome(lambda: records.replace(cls(1), other=4)),
        outcome(lambda: copy.copy(cls(1, 2, [3]))),
        outcome(lambda: copy.deepcopy(cls(1, 2, [3]))),
        [(x.name, x.type, x.init, x.kw_only) for x in dataclasses.fields(cls)],
        cls.__match_args__,
        [(x.name, x.kind, x.annotation) for x in inspect.signature(cls).parameters.values()],
        hasattr(cls(1), "__dict__"),
        cls(1).z is cls(1).z,
    ]


@pytest.mark.parametrize("options", OPTIONS)
def test_records_are_as_those_of_the_standard_library(options):
    ours, theirs = (classes(x, **options) for x in (records.dataclass, dataclasses.dataclass))
    for one, other in zip(ours, theirs, strict=True):
        assert behaviour(one) == behaviour(other)


@records.dataclass(frozen=True, slots=True)
class Pair:
    """A record that pickle finds."""

    first: int
    second: tuple[int, ...] = ()


def test_records_are_pickled():
    pair = Pair(1, (2, 3))
    assert pickle.loads(pickle.dumps(pair)) == pair  # noqa: S301 - of this process
    assert {pair: 1}[Pair(1, (2, 3))] == 1
