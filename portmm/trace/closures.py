"""Closures: the arrays and numbers that a function captures, by closure, globals, defaults and attributes of objects.

Owns `closure_of`, which returns the kind of a function's closure, by which its kernels are remembered, and the arrays
and numbers in it.
"""

from __future__ import annotations

import copy
import dis
import sys
import types
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from portmm.arrays.interop import lay
from portmm.arrays.libraries import on_device
from portmm.util.array_subclasses import refuse_class

F = TypeVar("F", bound=Callable[..., Any])
PLAIN = (int, str, bytes, bool, type(None), np.integer, np.bool_, np.dtype)
"""Types of values that are part of a function's kind."""
DEEPEST = 12
"""Steps from a function to a captured value, at most: modules refer to each other."""


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


@lru_cache(maxsize=256)
def _is_plain_enumeration(kind: type) -> bool:
    """Whether members of an enumeration have plain values, and no methods, which may capture something."""
    owners = [vars(t) for t in kind.__mro__ if not _lasts(t.__module__)]
    members = {**getattr(kind, "__members__", {})}
    functions = (types.FunctionType, property, classmethod, staticmethod)
    methods = [x for names in owners for n, x in names.items() if isinstance(x, functions) and n not in _OF_ENUM]
    return not methods and all(isinstance(x.value, (*PLAIN, float, tuple)) for x in members.values())


def captures_nothing(kind: type) -> bool:
    """Whether the methods of a class capture no arrays and numbers: its instances are alike in each call."""
    for owner in kind.__mro__:
        if not _lasts(owner.__module__):
            for name, x in vars(owner).items():
                function = getattr(x, "__func__", getattr(x, "fget", x))
                if isinstance(function, types.FunctionType):
                    if not _lasts(function.__globals__.get("__name__", "")) and not _alone(function):
                        return False
                elif not name.startswith("_") and not isinstance(x, _FIELDS):
                    return False  # an attribute that instances share
    return True


class _Pair(NamedTuple):
    first: Any


_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType, type(vars(_Pair)["first"]))
"""Descriptors of the fields of instances."""


def _alone(function: types.FunctionType) -> bool:
    """Whether a function captures nothing but other such functions and what means the same in every call."""
    kind, captured, known = closure_of(function)
    return known and not captured and all(isinstance(x, types.CodeType) or fixed(x) for x in kind)


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
    for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
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


def closure_of(function: Any) -> tuple[tuple[Any, ...], dict[tuple[Any, ...], Any], bool]:
    """The closure of a function: its kind, arrays and numbers by their keys, and whether all of it is known."""
    kind: list[Any] = []
    captured: dict[tuple[Any, ...], Any] = {}
    known = isinstance(function, types.FunctionType) and _collect(function, (), kind, captured, set(), ())
    return tuple(kind), captured, known


def _collect(  # noqa: C901, PLR0911, PLR0912, PLR0917 - one branch for each kind
    value: Any,
    key: tuple[Any, ...],
    kind: list[Any],
    captured: dict[tuple[Any, ...], Any],
    seen: set[int],
    names: tuple[str, ...],
) -> bool:
    """Collect what `Tracer.wrapped` replaces; False if some value is unknown. Of modules and classes, only `names`."""
    if isinstance(value, np.ndarray) and value.ndim:
        if type(value) is not np.ndarray:  # checked here, as every call passes
            refuse_class(value, "a captured array", matrix=False)
        kind.append((value.shape, value.strides, value.dtype, value.flags.aligned))
        captured[key] = value
        return True
    if is_float(value):
        kind.append(type(value))
        captured[key] = value
        return True
    if isinstance(value, types.FunctionType):
        if ours(value):
            kind.append(value)  # other functions may share its code
            return True
        kind.append(value.__code__)
        if id(value) in seen:
            return True
        seen.add(id(value))
        if looks_names_up(value.__code__):
            return False
        names = attribute_names(value.__code__)
        kind.append(tuple(vars(value)))
        return min(
            [_collect(x, (*key, step), kind, captured, seen, names) for step, x in _captured(value)], default=True
        )
    if isinstance(value, (tuple, list, dict)) and not holds_only_items(value):
        return False
    if isinstance(value, (tuple, list)):
        kind.append((type(value), len(value)))
        return min([_collect(x, (*key, i), kind, captured, seen, names) for i, x in enumerate(value)], default=True)
    if isinstance(value, dict):
        kind.append((type(value), *map(repr, value)))
        return min([_collect(x, (*key, k), kind, captured, seen, names) for k, x in value.items()], default=True)
    if is_plain(value):
        kind.append((type(value), value))
        return True
    if is_constant(value):
        kind.append(constant_key(value))
        return True
    if fixed(value):
        kind.append(value)
        return True
    if on_device(value):
        kind.append(lay(value))
        captured[key] = value
        return True
    if isinstance(value, (types.ModuleType, type)) and len(key) < DEEPEST:
        kind.append(value)
        inner = [(n, getattr(value, n)) for n in names if hasattr(value, n)]
        return min([_collect(x, (*key, ("attribute", n)), kind, captured, seen, names) for n, x in inner], default=True)
    return False


def _captured(function: types.FunctionType) -> list[tuple[tuple[str, Any], Any]]:
    """The values that a function captures, by the step that leads to each."""
    namespace = function.__globals__
    names = [n for n in global_names(function.__code__) if n in namespace]
    values: list[tuple[tuple[str, Any], Any]] = [(("global", n), function.__globals__[n]) for n in names]
    cells = enumerate(function.__closure__ or ())
    values += [(("closure", i), cell.cell_contents) for i, cell in cells if filled(cell)]
    values += [(("default", i), x) for i, x in enumerate(function.__defaults__ or ())]
    values += [(("keyword", n), x) for n, x in (function.__kwdefaults__ or {}).items()]
    return values + [(("attribute", n), x) for n, x in vars(function).items()]


@lru_cache(maxsize=1024)
def looks_names_up(code: types.CodeType) -> bool:
    """Whether code finds values by names that it makes, or in modules that it imports: no later call compares these."""
    imports = [x.argval for x in dis.get_instructions(code) if x.opname == "IMPORT_NAME"]
    if not _LOOK_UP.isdisjoint(code.co_names) or not all(_lasts(x) for x in imports):
        return True
    return any(looks_names_up(x) for x in code.co_consts if isinstance(x, types.CodeType))


_LOOK_UP = frozenset(("globals", "eval", "exec", "__import__", "import_module", "__globals__", "__builtins__"))


@lru_cache(maxsize=1024)
def attribute_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that code may look up in modules and classes that it captures, in order."""
    inner = [attribute_names(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return tuple(sorted(set(code.co_names).union(*inner)))


@lru_cache(maxsize=1024)
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
