"""Build of the wheel: sources and tables without comments and strings that nothing can read, a tenth of its size."""

import ast
import io
import os
import re
import tokenize
import tomllib
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

OWN = ("arrays", "build", "dispatch", "fusion", "host", "kernels", "runtime", "trace", "util", "verification")
"""Packages for the package's own use: nobody asks for help on what `portmm/__init__.py` does not export of them."""
OPENINGS = ('"""', "'''")
C_TOKENS = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|/\*.*?\*/|//[^\n]*""", re.DOTALL)
"""Literals and comments of C."""
ENDS_OF_LINES = re.compile(r"\\?\n")
"""Ends of lines, in macros with their backslash."""


def unread_strings(tree: ast.Module, *, own: bool) -> list[ast.stmt]:
    """Docstrings of modules without `__all__`, of private functions and classes, and of attributes; taken out.

    Of a module for the package's `own` use, all of them are. One that is all of a body stays.
    """
    taken: list[ast.stmt] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            continue
        name = getattr(node, "name", "")
        private = own or (name.startswith("_") and not name.endswith("__"))
        if isinstance(node, ast.Module):
            targets = (x for one in node.body if isinstance(one, ast.Assign) for x in one.targets)
            private = not any(isinstance(x, ast.Name) and x.id == "__all__" for x in targets)
        private = private and len(node.body) > 1
        strings = [x for x in node.body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
        unread = [x for x in strings if isinstance(x.value.value, str) and (private or x is not node.body[0])]
        node.body = [x for x in node.body if x not in unread]
        taken += unread
    return taken


def bare_python(text: str, *, own: bool = False) -> str:
    """Python without unread strings, and comments but those for type checkers; lines keep their numbers."""
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    for docstring in unread_strings(tree, own=own):
        for number in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1):
            lines[number - 1] = "\n"
    text = "".join(lines)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# type:"):
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column].rstrip() + "\n"
    bare = "".join(lines)
    assert ast.dump(ast.parse(bare)) == ast.dump(tree)  # noqa: S101 - nothing else has changed
    return bare


def bare_toml(text: str) -> str:
    """A table without comments on lines of their own; a # in a string of several lines is none."""
    kept: list[str] = []
    inside = ""
    for line in text.splitlines(keepends=True):
        if not inside and line.lstrip()[:1] in ("", "#"):
            continue
        for quotes in OPENINGS:
            if inside in ("", quotes) and line.count(quotes) % 2:
                inside = "" if inside else quotes
        kept.append(line)
    bare = "".join(kept)
    return bare if tomllib.loads(bare) == tomllib.loads(text) else text


def bare_c(text: str) -> str:
    """C without comments; lines keep their numbers."""

    def bare(found: re.Match[str]) -> str:
        token = found[0]
        return token if token[0] in "\"'" else " " + "".join(ENDS_OF_LINES.findall(token))

    return re.sub(r"[ \t]+$", "", C_TOKENS.sub(bare, text), flags=re.MULTILINE)


BARE = {".py": bare_python, ".toml": bare_toml, ".c": bare_c}


def is_own(path: Path) -> bool:
    """Whether a module is for the package's own use: in a package that is, and not named by `portmm/__init__.py`."""
    _, *words = path.parts[len(path.parts) - path.parts[::-1].index("portmm") - 1 :]
    if words[0] not in OWN:
        return False
    exports = ast.parse(Path(__file__).parent.joinpath("portmm/__init__.py").read_text(encoding="utf-8"))
    exported = {x.module for x in ast.walk(exports) if isinstance(x, ast.ImportFrom)}
    return ".".join(("portmm", *words)).removesuffix(".py") not in exported


class Build(build_py):
    """`build_py` that copies sources and tables without comments."""

    def build_module(self, module: Any, module_file: Any, package: Any) -> Any:
        """Copy a module."""
        return self._bared(super().build_module(module, module_file, package))

    def build_package_data(self) -> None:
        """Copy the files of packages that are no modules."""
        super().build_package_data()
        for _, _, folder, names in self.data_files:
            for name in names:
                self._bared((str(Path(folder, name)), True))

    def _bared(self, copied: Any) -> Any:
        path = Path(copied[0])
        if path.suffix in BARE and not self.editable_mode:
            text = path.read_text(encoding="utf-8")
            bare = bare_python(text, own=is_own(path)) if path.suffix == ".py" else BARE[path.suffix](text)
            path.write_text(bare, encoding="utf-8")
        return copied


class WithBase(Distribution):
    """A distribution that is for one platform where the tree has a base set of kernels."""

    def has_ext_modules(self) -> bool:
        """Whether its files belong to a platform."""
        return bool(base_sets()) or super().has_ext_modules()


class Wheel(bdist_wheel):
    """`bdist_wheel` for one platform, and any version of Python, where the tree has a base set of kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        """The wheel's tag."""
        if not base_sets():
            return super().get_tag()  # type: ignore[no-any-return]
        (path,) = base_sets()
        return "py3", "none", os.environ.get("PORTMM_WHEEL_PLATFORM", f"linux_{path.stem}")


def base_sets() -> list[Path]:
    """The base sets of kernels in the tree: see tools/base_set.py."""
    return sorted(Path(__file__).parent.glob("portmm/base/*.bundle"))


setup(distclass=WithBase, cmdclass={"bdist_wheel": Wheel, "build_py": Build})
