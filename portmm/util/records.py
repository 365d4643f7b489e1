"""Dataclasses whose definition takes a twentieth of the standard library's time: first calls define some hundred.

Owns `dataclass` and `replace`, with the meaning of the standard library's, which compiles six methods from source for
each class.
Here records share functions, and `__init__` is compiled for classes with many. What functions of the standard library
read of a class is made when they do.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass, replace

    Fields = tuple[dataclasses.Field[Any], ...]
else:

    def dataclass(cls: Any = None, /, *, frozen: bool = False, slots: bool = False, eq: bool = True) -> Any:
        """As `dataclasses.dataclass`, for the options that records have."""
        if cls is None:
            return lambda x: dataclass(x, frozen=frozen, slots=slots, eq=eq)
        here = _annotated(cls)
        inherited = {x.name: x for base in cls.__mro__[:0:-1] for x in vars(base).get(FIELDS, ())}
        fields = tuple((inherited | here).values())
        defined: list[Any] = []
        methods = {name: _Description(name) for name in DESCRIPTION}
        methods |= {FIELDS: fields, "__match_args__": tuple([x.name for x in fields if x.init and not x.kw_only])}
        methods |= {"__init__": _first_init(defined, fields, frozen=frozen), "__repr__": _repr(fields)}
        if eq:
            methods["__eq__"], digest = _comparison(fields)
            methods["__hash__"] = digest if frozen else None
        if frozen:
            methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
        if frozen and slots:
            methods["__getstate__"], methods["__setstate__"] = _state(fields)
        methods["__signature__"] = _SIGNATURE
        own = {name: value for name, value in vars(cls).items() if name != "__hash__" or value is not None}
        record = _class(cls, here, methods | own, slots=slots)
        defined.append(record)
        return record

    def replace(record: Any, /, **changes: Any) -> Any:
        """As `dataclasses.replace`, without a description of the class."""
        fields = getattr(record, FIELDS, None)
        if fields is None:
            return dataclasses.replace(record, **changes)
        kept = {x.name: getattr(record, x.name) for x in fields if x.init and x.name not in changes}
        return type(record)(**kept, **changes)


__all__ = ["dataclass", "replace"]

FIELDS = "__record_fields__"
"""The attribute of a record with its fields."""
DESCRIPTION = ("__dataclass_fields__", "__dataclass_params__")
"""Attributes that functions of the standard library read."""
FIRST = 12
"""Records of a class that are made without a compiled `__init__`: compiling it takes as long."""


class _Field:
    """A field that has nothing but a default: as `dataclasses.Field`, which takes five times as long to make."""

    __slots__ = ("default", "name", "type")
    init, repr, compare, hash, kw_only, default_factory = True, True, True, None, False, dataclasses.MISSING

    def __init__(self, name: str, kind: Any, default: Any) -> None:
        self.name, self.type, self.default = name, kind, default


class _Description:
    """An attribute of a record that is made when it is read, as it takes longer than all the rest."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, _: Any, cls: Any) -> Any:
        fields = [(x, dataclasses.field(default=x.default) if type(x) is _Field else x) for x in getattr(cls, FIELDS)]
        every = [(x.name, x.type, field) for x, field in fields]
        like = dataclasses.make_dataclass("Like", every, init=False, repr=False, eq=False)
        for name in DESCRIPTION:
            setattr(cls, name, getattr(like, name))
        return getattr(cls, self.name)


class _Signature:
    """The signature of a record, which `inspect`, `help` and editors read: `__init__` has none until it is compiled."""

    def __get__(self, _: Any, cls: Any) -> Any:
        from inspect import Parameter, Signature

        if "__signature__" not in vars(cls):  # a subclass may have an `__init__` of its own
            raise AttributeError("__signature__")
        unset, parameters = dataclasses.MISSING, []
        for x in getattr(cls, FIELDS):
            usual = x.default if x.default_factory is unset else x.default_factory
            kind = Parameter.KEYWORD_ONLY if x.kw_only else Parameter.POSITIONAL_OR_KEYWORD
            default = Parameter.empty if usual is unset else usual
            parameters += [Parameter(x.name, kind, default=default, annotation=x.type)] if x.init else []
        return Signature(sorted(parameters, key=lambda x: x.kind), return_annotation=None)


_SIGNATURE = _Signature()


def _annotated(cls: Any) -> dict[str, Any]:
    """The fields that a class adds, by their names."""
    fields: dict[str, Any] = {}
    own, unset = vars(cls), dataclasses.MISSING
    for name, text in cls.__annotations__.items():
        if not str(text).startswith("ClassVar"):
            fields[name] = x = own.get(name, unset)
            if isinstance(x, dataclasses.Field):
                x.name, x.type, x.kw_only = name, text, x.kw_only is True
            else:
                fields[name] = _Field(name, text, x)
    return fields


def _class(cls: Any, fields: dict[str, Any], members: dict[str, Any], *, slots: bool) -> Any:
    """The class with members, and with defaults as attributes, or another one with slots in their place."""
    if not slots:
        for name, x in fields.items():
            if x.default is not dataclasses.MISSING:
                setattr(cls, name, x.default)
            elif name in vars(cls):
                delattr(cls, name)
        for name, value in members.items():
            if name not in fields and vars(cls).get(name, fields) is not value:
                setattr(cls, name, value)
        return cls
    inherited = {x for base in cls.__mro__[1:] for x in vars(base).get("__slots__", ())}
    for name in (*fields, "__dict__", "__weakref__"):
        members.pop(name, None)
    members["__slots__"] = tuple([x for x in fields if x not in inherited])
    members["__qualname__"] = cls.__qualname__
    return type(cls)(cls.__name__, cls.__bases__, members)


def _first_init(defined: list[Any], fields: Fields, *, frozen: bool) -> Callable[..., None]:
    """An `__init__` for the first records, which puts a compiled one in its place, in the class that is in a list."""
    by_place = [x.name for x in fields if x.init and not x.kw_only]
    left = FIRST

    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807 - it is one
        nonlocal left
        left -= 1
        values = dict(zip(by_place, args, strict=False)) | options
        (cls,) = defined
        if left < 0 or len(values) < len(args) + len(options) or not _assigned(self, fields, values):
            cls.__init__ = compiled = _init(cls, fields, frozen=frozen)
            compiled(self, *args, **options)  # which raises where arguments are wrong
        elif hasattr(cls, "__post_init__"):
            self.__post_init__()

    return __init__


def _assigned(record: Any, fields: Fields, values: dict[str, Any]) -> bool:
    """Assign the fields of a record, if values for all that need one were passed, and no others."""
    unset, passed = dataclasses.MISSING, 0
    for x in fields:
        if x.init and x.name in values:
            value, passed = values[x.name], passed + 1
        elif x.default_factory is not unset:
            value = x.default_factory()
        elif x.default is not unset:
            value = x.default
        elif x.init:
            return False
        else:
            continue
        object.__setattr__(record, x.name, value)
    return passed == len(values)


def _init(cls: Any, fields: Fields, *, frozen: bool) -> Any:
    """An `__init__` with the fields as parameters."""
    unset = dataclasses.MISSING
    names: dict[str, Any] = {"_assign": object.__setattr__, "_unset": unset}
    by_place, by_name, body = ["self"], ["*"], []
    for x in fields:
        value = usual = ""
        if x.default_factory is not unset:
            names[f"_new_{x.name}"] = x.default_factory
            value, usual = f"_new_{x.name}()", "=_unset"
        elif x.default is not unset:
            names[f"_usual_{x.name}"] = x.default
            value, usual = f"_usual_{x.name}", f"=_usual_{x.name}"
        if x.init:
            (by_name if x.kw_only else by_place).append(x.name + usual)
            value = f"{value} if {x.name} is _unset else {x.name}" if usual == "=_unset" else x.name
        if value:
            body.append(f"_assign(self, {x.name!r}, {value})" if frozen else f"self.{x.name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    head = ", ".join(by_place + by_name[len(by_name) == 1 :])
    exec(f"def __init__({head}):\n " + "\n ".join(body or ["pass"]), names)  # noqa: S102 - of names of fields only
    names["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    return names["__init__"]


def _repr(fields: Fields) -> Callable[[Any], str]:
    names = [x.name for x in fields if x.repr]

    def __repr__(self: Any) -> str:  # noqa: N807 - it is one
        return f"{type(self).__qualname__}({', '.join([f'{x}={getattr(self, x)!r}' for x in names])})"

    return __repr__


def _comparison(fields: Fields) -> tuple[Callable[[Any, Any], Any], Callable[[Any], int]]:
    """The methods `__eq__` and `__hash__`."""
    values = _getter([x.name for x in fields if x.compare])
    hashed = _getter([x.name for x in fields if (x.compare if x.hash is None else x.hash)])

    def __eq__(self: Any, other: Any) -> Any:  # noqa: N807 - it is one
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:  # noqa: N807 - as above
        return hash(hashed(self))

    return __eq__, __hash__


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the values of attributes."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda x: tuple([getattr(x, name) for name in names])


def _state(fields: Fields) -> tuple[Callable[[Any], list[Any]], Callable[[Any, list[Any]], None]]:
    """The methods `__getstate__` and `__setstate__`, since nothing can be assigned."""
    names = [x.name for x in fields]

    def __getstate__(self: Any) -> list[Any]:  # noqa: N807 - it is one
        return [getattr(self, name) for name in names]

    def __setstate__(self: Any, state: list[Any]) -> None:  # noqa: N807 - as above
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    return __getstate__, __setstate__


def _refuse_to_set(self: Any, name: str, _: Any) -> NoReturn:  # noqa: ARG001 - a method
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> NoReturn:  # noqa: ARG001 - as above
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
