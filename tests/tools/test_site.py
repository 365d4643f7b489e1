"""The documentation as a site: every page and every public name is on it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
from places import ROOT

import portmm as pm


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "tools" / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_listed_once_and_what_it_links_to_is_there(site, tmp_path):
    names = site.staged(tmp_path)
    listed = re.findall(r"^(?:docs/(\S+))$", site.index(names), re.MULTILINE)
    pages = {x.relative_to(ROOT / "docs").with_suffix("").as_posix() for x in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(names) == sorted(pages)
    assert {x for words in site.SECTIONS.values() for x in words.split()} <= pages
    for page in tmp_path.rglob("*.md"):
        for link in site.LINK.findall(page.read_text()):
            assert "://" in link or (page.parent / link).exists(), (page, link)


def test_every_public_name_is_in_the_reference(site):
    listed = re.findall(r"^\.\. auto\w+:: portmm\.(\w+)$", site.reference(), re.MULTILINE)
    assert sorted(listed) == sorted(x for x in pm.__all__ if not x.startswith("__"))
    assert {x for words in site.REFERENCE.values() for x in words.split()} <= set(listed)


@pytest.mark.rest("runs Sphinx")
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="Sphinx is not installed: the site is not built")
    command = [sys.executable, str(ROOT / "tools" / "build_site.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)
    reference = (tmp_path / "reference.html").read_text()
    assert 'id="portmm.matmul"' in reference
    assert (tmp_path / "docs" / "coming-from.html").exists()
    assert "epilogue" in (tmp_path / "searchindex.js").read_text()
