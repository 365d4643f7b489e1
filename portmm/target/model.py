"""Constants of the cost models: the rows of `targets/model/`, each with where it was measured.

Owns `Model`. Its file is read when the first constant is.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from portmm.target.toml_schema import parse, require

FIELDS = {"name", "value", "measured"}


class Model:
    """Constants of a cost model, as attributes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        values = self.__dict__
        values |= {key: x for key, x in _constants(values["name"]).items() if key not in values}
        if name not in values:
            raise AttributeError(f"targets/model/{self.name}.toml has no constant {name!r}")
        return values[name]


def _constants(name: str) -> dict[str, Any]:
    """The constants of a file.

    Raises:
        TargetError: a row has no number, or numbers, or does not say where it was measured.
    """
    path = Path(import_module("portmm.targets").__path__[0]) / "model" / f"{name}.toml"
    table, where = parse(path.read_text(), f"model/{name}.toml")
    rows = table["constant"]
    for row in rows:
        complete = set(row) == FIELDS and isinstance(row["value"], int | float | list) and row["measured"]
        require(bool(complete), where, f"a constant needs {', '.join(sorted(FIELDS))}: {row}")
    return {row["name"]: tuple(x) if isinstance(x := row["value"], list) else x for row in rows}


CPU = Model("cpu")
DEVICE = Model("device")
