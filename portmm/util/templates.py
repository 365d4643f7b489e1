"""Templates of packages, filled in by Jinja.

Owns their environments. Of a template of HTML lines are joined without the space around them, so that markup can be
indented; values are escaped unless it calls them safe; numbers with a fraction show one digit of it. Other templates
are text as it stands, without the lines that have only a statement. None shows nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, FunctionLoader, StrictUndefined


def resource(place: str, name: str) -> str:
    """Text of a file beside the module whose file is `place`."""
    return Path(place).with_name(name).read_text(encoding="utf-8")


def render(place: str, name: str, /, **values: Any) -> str:
    """Text of a template beside a module, with these values."""
    of = _html if name.endswith(".html") else _text
    return of(place).get_template(name).render(values)


def macros(place: str, name: str, /, **values: Any) -> Any:
    """Macros of a template of text as attributes, which return text; they know the values."""
    return _text(place).get_template(name).make_module(values)


@cache
def _html(place: str) -> Environment:
    loader = FunctionLoader(lambda name: "".join(map(str.strip, resource(place, name).splitlines())))
    return Environment(loader=loader, autoescape=True, finalize=_short, undefined=StrictUndefined)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return "" if value is None else value


@cache
def _text(place: str) -> Environment:
    return Environment(  # noqa: S701 - it is no HTML
        loader=FileSystemLoader(Path(place).parent), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
        finalize=lambda x: "" if x is None else x,
    )  # fmt: skip
