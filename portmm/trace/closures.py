"""Rules for what a traced function captures: which values last, are compared as a whole, or are followed.

Owns these rules, the names that code reads, and `resolve`, which computes an array or a number of a call from what was
captured.
"""

from __future__ import annotations

import copy
import dis
import sys
import types
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from portmm.util.memo import cached

F = TypeVar("F", bound=Callable[..., Any])
PLAIN = (int, str, bytes, bool, type(None), np.integer, np.bool_, np.dtype)
"""Types of values that are part of a function's kind."""


def _names(code: types.CodeType) -> set[str]:
    """Names that code, and the functions inside it, may read from globals."""
    inner = (_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return {x.argval for x in dis.get_instructions(code) if x.opname in {"LOAD_GLOBAL", "LOAD_NAME"}}.union(*inner)


def traced_through(function: F) -> F:
    """Mark a function of portmm's that wraps the user's: tracing follows what it captures."""
    function.portmm_traced_through = True  # type: ignore[attr-defined]
    return function


def ours(function: types.FunctionType) -> bool:
    """Whether a function is portmm's or NumPy's, and captures nothing of the user's."""
    if hasattr(function, "portmm_traced_through"):
        return False
    return (function.__module__ or "").partition(".")[0] in ("portmm", "numpy")


def fixed(value: Any) -> bool:
    """Whether a value means the same in every call: functions of portmm, NumPy and C; their classes and modules."""
    if isinstance(value, types.FunctionType):
        return ours(value)
    if isinstance(value, types.ModuleType):
        return _lasts(value.__name__)
    if isinstance(value, type):
        return _lasts(value.__module__) or issubclass(value, BaseException)
    return isinstance(value, (np.ufunc, types.BuiltinFunctionType))


def is_plain(value: Any) -> bool:
    """Whether a value is compared by type and value from call to call, and has no attributes or methods of a user's."""
    return isinstance(value, PLAIN) and not _is_of_user(type(value))


def is_float(value: Any) -> bool:
    """Whether a value is a float whose arithmetic is that of Python or NumPy."""
    return isinstance(value, (float, np.floating)) and not _is_of_user(type(value))


def _is_of_user(kind: type) -> bool:
    """Whether a class is the user's, but no enumeration of plain values."""
    return not _lasts(kind.__module__) and not (issubclass(kind, Enum) and _is_plain_enumeration(kind))


def is_constant(value: Any) -> bool:
    """Whether a value is compared as a whole from call to call: members of enumerations, and sets of plain values."""
    if isinstance(value, Enum):
        return _is_plain_enumeration(type(value))
    if type(value) in (set, frozenset):
        return all([isinstance(x, (*PLAIN, float, Enum)) for x in value])  # noqa: C419 - faster
    return type(value) in (complex, range, slice, type(...), type(NotImplemented))


def constant_key(value: Any) -> tuple[Any, ...]:
    """The key that tells a constant from others of its type."""
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset([(type(x), x if isinstance(x, Enum) else repr(x)) for x in value]))
    return (type(value), value if isinstance(value, Enum) else repr(value))


_OF_ENUM = frozenset(("__new__", "_generate_next_value_", "_new_member_"))
"""Functions that each enumeration has."""


@cached("calls", 256)
def _is_plain_enumeration(kind: type) -> bool:
    """Whether members of an enumeration have plain values, and no methods, which may capture something."""
    owners = [vars(t) for t in kind.__mro__ if not _lasts(t.__module__)]
    members = {**getattr(kind, "__members__", {})}
    functions = (types.FunctionType, property, classmethod, staticmethod)
    methods = [x for names in owners for n, x in names.items() if isinstance(x, functions) and n not in _OF_ENUM]
    return not methods and all(isinstance(x.value, (*PLAIN, float, tuple)) for x in members.values())


def captures_nothing(kind: type) -> bool:
    """Whether a class has no methods and attributes of a user's: its instances are alike in each call."""
    for owner in kind.__mro__:
        if not _lasts(owner.__module__):
            for name, x in vars(owner).items():
                function = getattr(x, "__func__", getattr(x, "fget", x))
                if name in _OF_CLASS or (name.startswith("__") and not isinstance(function, types.FunctionType)):
                    continue
                if isinstance(function, types.FunctionType):
                    if not _lasts(function.__globals__.get("__name__", "")):
                        return False
                elif not isinstance(x, _FIELDS):
                    return False  # an attribute that instances share
    return True


class _Pair(NamedTuple):
    first: Any


_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType, type(vars(_Pair)["first"]))
"""Descriptors of the fields of instances."""
_OF_CLASS = frozenset(("_fields", "_field_defaults", "_abc_impl", "__annotate__", "__annotate_func__"))
"""Attributes that `NamedTuple`, `ABCMeta` and annotations add to classes."""


def holds_only_items(container: Any) -> bool:
    """Whether a tuple, list or dict depends on nothing but its items: it has no default, and methods as usual."""
    kind = type(container)
    if isinstance(container, dict) and not all([is_plain(x) or is_constant(x) or is_float(x) for x in container]):  # noqa: C419 - faster
        return False
    if kind in (tuple, list, dict):
        return True
    return getattr(container, "default_factory", None) is None and captures_nothing(kind)


def named_as(function: types.FunctionType, like: types.FunctionType) -> None:
    """Give a function what another one says of itself."""
    # From Python 3.14 on, reading annotations evaluates them.
    annotations = "__annotations__" if getattr(like, "__annotate__", None) is None else "__annotate__"
    for name in ("__qualname__", "__module__", "__doc__", annotations):
        setattr(function, name, getattr(like, name))


def same_container(like: Any, items: list[Any], replaced: Callable[[Any], Any]) -> Any:
    """A tuple, list or dict of the class of `like`, with other items; keys that are functions are replaced, too."""
    if isinstance(like, dict):
        changed = like.copy() if type(like) is dict else copy.copy(like)
        if any([isinstance(key, types.FunctionType) for key in like]):  # noqa: C419 - faster
            dict.clear(changed)
        for key, x in zip(like, items, strict=True):
            dict.__setitem__(changed, replaced(key) if isinstance(key, types.FunctionType) else key, x)
        return changed
    if type(like) in (tuple, list):
        return type(like)(items)
    if isinstance(like, tuple):
        return tuple.__new__(type(like), items)
    changed_list: list[Any] = copy.copy(like)
    list.__setitem__(changed_list, slice(None), items)
    return changed_list


@lru_cache(maxsize=1024)
def _lasts(module: str) -> bool:
    """Whether the attributes of a module are constant: it is portmm's, NumPy's or Python's."""
    return module.partition(".")[0] in _LASTING


_LASTING = frozenset(("portmm", "numpy", "ml_dtypes", *sys.stdlib_module_names)) - {"__main__"}


def filled(cell: Any) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        return cell.cell_contents is not None or True
    except ValueError:
        return False


@cached("calls", 1024)
def looks_names_up(code: types.CodeType) -> bool:
    """Whether code finds values by names that it makes, or in modules that it imports: no later call compares these."""
    imports = [x.argval for x in dis.get_instructions(code) if x.opname == "IMPORT_NAME"]
    if not _LOOK_UP.isdisjoint(code.co_names) or not all(_lasts(x) for x in imports):
        return True
    return any(looks_names_up(x) for x in code.co_consts if isinstance(x, types.CodeType))


@cached("calls", 1024)
def compares_identities(code: types.CodeType) -> bool:
    """Whether code may ask whether two of the arrays or functions that it captures are the same object."""
    steps = [*dis.get_instructions(code)]
    compared = any(y.opname == "IS_OP" and x.opname != "LOAD_CONST" for x, y in pairwise(steps))
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return compared or "is_" in code.co_names or any(compares_identities(x) for x in inner)


_LOOK_UP = frozenset(("globals", "eval", "exec", "__import__", "import_module", "__globals__", "__builtins__"))


@cached("calls", 1024)
def attribute_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that code may look up in modules and classes that it captures, in order."""
    inner = [attribute_names(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return tuple(sorted(set(code.co_names).union(*inner)))


@cached("calls", 1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that code may read from globals, in order."""
    return tuple(sorted(_names(code)))


COMPUTED = "computed"
"""The first step of the key of a number that is computed from others: a function, and its operands."""


def numbers_of(key: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    """The keys of the captured numbers that a number is, or is computed from."""
    if key and key[0] == COMPUTED:
        return {base for is_key, x, *_ in key[2] if is_key for base in numbers_of(x)}
    return {key}


def resolve(key: tuple[Any, ...], captured: dict[tuple[Any, ...], Any]) -> Any:
    """The array or number of a key.

    Raises:
        KeyError: the key is not among those that were collected.
    """
    if key and key[0] == COMPUTED:
        return key[1](*(resolve(x, captured) if is_key else x for is_key, x, *_ in key[2]))
    more = 0
    while key[: len(key) - more] not in captured:
        if more > len(key):
            raise KeyError(key)
        more += 1
    value = captured[key[: len(key) - more]]
    for step in key[len(key) - more :]:
        value = getattr(value, step[1])
    return value
