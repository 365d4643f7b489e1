"""Packages of portmm that need another library: their names import it at their first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from portmm.errors import PortmmError


def attribute(package: str, name: str, modules: Mapping[str, str], module: str, library: str) -> object:
    """The public attribute of a package.

    Args:
        package: of portmm, and the extra that installs the library: "torch".
        name: of the attribute.
        modules: public names, and the modules of the package that define them.
        module: of the library.
        library: its name in messages.

    Raises:
        AttributeError: the package has no such name.
        PortmmError: the library cannot be imported.
    """
    if name not in modules:
        raise AttributeError(f"module 'portmm.{package}' has no attribute {name!r}")
    try:
        import_module(module)
    except ImportError as error:
        needed = f"needs {library}: {error}; `pip install 'portmm[{package}]'`"
        raise PortmmError(f"portmm.{package}.{name} {needed}") from error
    return getattr(import_module(f"portmm.{package}.{modules[name]}"), name)
