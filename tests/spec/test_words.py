"""Names and first sentences use the terms of the field."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import portmm

_RETIRED = (
    "abreast anew around asked beside book capable chosen coded dequant fed feeding fold folded folds foreign found "
    "given heights held joining lies lookahead made orders pose posed quick recall relaid resident said settle shares "
    "somebody steady surrounded surroundings team told turned twin unfold vecmath vocabulary weave whoever woven"
)
RETIRED = frozenset(_RETIRED.split())
"""Private words that names had; each has a term of the field in its place."""
STORED = frozenset(("heights",))
"""Fields of `Schedule` with the words of its spelling, which stored schedules have."""
OPENINGS = ("What ", "Which ", "Whose ", "Who", "Somebody ", "How far ", "How much ", "How many ", "How ", "That ")
"""Of first sentences that do not name their object."""
PHRASES = ("comes to", "is had", "anew", "in turns", "leave to", "nobody", "somebody")

ROOT = Path(portmm.__file__).parent
PACKAGES = sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists())


def trees(package):
    """Modules of a package as syntax trees, by path."""
    folder = ROOT / package if package else ROOT
    for path in sorted(folder.rglob("*.py") if package else folder.glob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def names(tree):
    """Names that a module defines, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words_of(name):
    """The words of a name, in lower case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


def first_sentences(tree):
    """First lines of docstrings, with the lines of what they describe."""
    kinds = ast.Module | ast.FunctionDef | ast.ClassDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text.splitlines()[0], getattr(node, "lineno", 1)


@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_names_hold_no_retired_word(package):
    faults = {
        f"{path}:{line} {name}"
        for path, tree in trees(package)
        for name, line in [(path.stem, 1), *names(tree)]
        if RETIRED & set(words_of(name)) and name not in STORED
    }
    assert not faults, "\n".join(sorted(faults))


@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_first_sentences_name_their_object(package):
    faults = [
        f"{path}:{line} {text}"
        for path, tree in trees(package)
        for text, line in first_sentences(tree)
        if text.startswith(OPENINGS) or any(re.search(rf"\b{p}\b", text, re.IGNORECASE) for p in PHRASES)
    ]
    assert not faults, "\n".join(faults)
