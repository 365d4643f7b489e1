"""Templates of this folder, filled in by Jinja.

Owns their environment. Lines of a template are joined without the space around them, so that markup can be indented;
values are escaped unless a template calls them safe; numbers with a fraction show one digit of it, None shows nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined


def resource(name: str) -> str:
    """Text of a file of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def render(name: str, **values: Any) -> str:
    """Text of a template with these values."""
    return _environment().get_template(name).render(values)


@cache
def _environment() -> Environment:
    loader = FunctionLoader(lambda name: "".join(map(str.strip, resource(name).splitlines())))
    return Environment(loader=loader, autoescape=True, finalize=_shown, undefined=StrictUndefined)


def _shown(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return "" if value is None else value
