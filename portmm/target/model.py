"""Constants of the cost models: the rows of `targets/model/`, each with where it was measured.

Owns `Model`. Its file is read when the first constant is. A chip may have a file of its own, of constants that an
exhaustive search on it found to be others.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from portmm.target.toml_schema import parse, require

FIELDS = {"name", "value", "measured"}


class Model:
    """Constants of a cost model, as attributes.

    Args:
        name: of its file.
        chip: the chip whose file has constants that take the place of these; none if empty.
    """

    def __init__(self, name: str, chip: str = "") -> None:
        self.name, self.chip = name, chip

    def of(self, chip: str) -> Model:
        """The model of a chip: this one, if the chip has no constants of its own."""
        own = self.__dict__.setdefault("own", {})
        if chip not in own:
            own[chip] = Model(self.name, chip) if _path(chip).is_file() else self
        return own[chip]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        values = self.__dict__
        chip = values["chip"]
        known = _constants(values["name"]) | (_constants(chip) if chip else {})
        values |= {key: x for key, x in known.items() if key not in values}
        if name not in values:
            raise AttributeError(f"targets/model/{self.name}.toml has no constant {name!r}")
        return values[name]


def _constants(name: str) -> dict[str, Any]:
    """The constants of a file.

    Raises:
        TargetError: a row has no number, or numbers, or does not say where it was measured.
    """
    table, where = parse(_path(name).read_text(), f"model/{name}.toml")
    rows = table["constant"]
    for row in rows:
        complete = set(row) == FIELDS and isinstance(row["value"], int | float | list) and row["measured"]
        require(bool(complete), where, f"a constant needs {', '.join(sorted(FIELDS))}: {row}")
    return {row["name"]: tuple(x) if isinstance(x := row["value"], list) else x for row in rows}


def _path(name: str) -> Path:
    return Path(import_module("portmm.targets").__path__[0]) / "model" / f"{name}.toml"


CPU = Model("cpu")
DEVICE = Model("device")
