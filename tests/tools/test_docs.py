"""The documentation holds: its code runs, and its links lead somewhere.

Of a page, `python` blocks run as one program, and each line of a `console`
block runs as a command. Comments in front of a block say what differs:

    <!-- file: NAME -->                        the block is a file that the page's code finds
    <!-- instead of "portmm X": portmm Y -->   what to run for a line that would take long
    <!-- not run: REASON -->                   an exception
    <!-- ci: NAME -->                          run by .ci/run
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.rest("runs the documentation")

PAGES = [*(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "console", "toml", "sh", "text")
COMMENT = re.compile(r"<!-- (file|not run|ci|instead of \"[^\"]*\"): (.+?) -->")
SECONDS = 120


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the comments in front of it, its lines and where they begin."""

    language: str
    notes: dict[str, str]
    lines: tuple[str, ...]
    first: int


def blocks(text):
    found, notes, inside, language, first = [], {}, None, "", 0
    for number, line in enumerate(text.splitlines()):
        if line.startswith("```"):
            if inside is None:
                inside, language, first = [], line.removeprefix("```").strip(), number + 1
            else:
                found.append(Block(language, notes, tuple(inside), first))
                notes, inside = {}, None
        elif inside is not None:
            inside.append(line)
        else:
            notes |= dict(COMMENT.findall(line))
    assert inside is None, "a block does not end"
    return found


def identify(path):
    return path.relative_to(ROOT).as_posix()


def write_files(page, folder):
    for block in blocks(page.read_text()):
        if "file" in block.notes:
            (folder / block.notes["file"]).write_text("\n".join(block.lines) + "\n")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A cache of the pages' own: a page may measure the machine, and choices rest on what was measured."""
    return {**os.environ, "PORTMM_CACHE": str(tmp_path_factory.mktemp("cache"))}


def run(command, folder, env):
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def program(page):
    """The page with all but its Python blanked, so that line numbers are those of the page."""
    text = page.read_text()
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python" and not {"not run", "file"} & set(block.notes):
            lines[block.first : block.first + len(block.lines)] = block.lines
    return "\n".join(lines)


def commands(page):
    for block in blocks(page.read_text()):
        if block.language != "console" or "not run" in block.notes:
            continue
        others = {k.split('"')[1]: v for k, v in block.notes.items() if k.startswith("instead")}
        for line in filter(None, "\n".join(block.lines).replace("\\\n", " ").splitlines()):
            yield others.get(line, line)


CODE = [page for page in PAGES if page.exists() and program(page).strip()]
COMMANDS = [(page, line) for page in PAGES if page.exists() for line in commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_each_block_says_what_it_is(page):
    for block in blocks(page.read_text()):
        where = f"line {block.first} of {identify(page)}"
        assert block.language in LANGUAGES, where
        if block.language in ("toml", "sh"):
            assert {"file", "not run", "ci"} & set(block.notes), f"{where}: say whether it is a file, or who runs it"


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not link.startswith("https://"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", CODE, ids=identify)
def test_python_runs(page, tmp_path, environment):
    write_files(page, tmp_path)
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program(page))
    run([sys.executable, "-W", "error", str(script)], tmp_path, environment)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{identify(p)}: {line[:60]}" for p, line in COMMANDS])
def test_commands_run(page, line, tmp_path, environment):
    write_files(page, tmp_path)
    words = shlex.split(line)
    assert words[0] == "portmm", f"{line!r} is no command of portmm; mark it <!-- not run: why -->"
    run([str(Path(sys.executable).with_name("portmm")), *words[1:]], tmp_path, environment)
