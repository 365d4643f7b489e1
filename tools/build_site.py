"""The documentation as a site of static files: every page of docs/, and a reference made from docstrings.

    python tools/build_site.py OUT

Needs Sphinx, MyST and furo (`pip install 'portmm[docs]'`). Pages are copied to a folder of their own, beside one that
lists them and those of the reference; a warning is an error.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = Path(__file__).with_name("site_config")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
SECTIONS = {
    "Use": "guide gallery coming-from fuse convolution superoptimiser onnx onnx-operators pytorch jax clusters",
    "Machines": "devices deployment tuning performance measuring",
    "Extend": "add-a-chip add-an-isa add-a-program hand-tune-a-kernel architecture",
}
"""Pages of docs/ by caption; others come last."""
REFERENCE = {
    "Products": "matmul linear einsum grouped_matmul attention launch plan",
    "Convolutions": "conv conv_transpose conv_input_gradient conv_filter_gradient pack_conv",
    "Weights": "pack quantize dequantize Quantized save_packed load_packed save_quantized load_quantized",
    "Weights of others": "from_gptq from_awq from_gguf from_int4 open_gguf dequantize_gguf open_checkpoint "
    "pack_checkpoint",
    "Functions of arrays": "fuse",
    "Settings": "config set_num_threads get_num_threads warmup use_bundle forget",
    "Measurement and explanation": "explain explain_conv Explanation compare tune",
}
"""Public names by heading; errors, functions of elements and others follow."""


def staged(folder: Path) -> list[str]:
    """Copy the pages, and the files that they show or link to; return the names of those in docs/."""
    docs = ROOT / "docs"
    pages = [*(ROOT / f"{n}.md" for n in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(docs.rglob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        links = [page.parent / x for x in LINK.findall(text) if "://" not in x and not x.endswith(".md")]
        for file in (page, *links):
            if file.is_file():
                to = folder / file.resolve().relative_to(ROOT)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, to)
    return [x.relative_to(docs).with_suffix("").as_posix() for x in pages if x.is_relative_to(docs)]


def toctree(caption: str, names: list[str]) -> str:
    """A list of pages with a caption."""
    return "\n".join(["```{toctree}", f":caption: {caption}", ":maxdepth: 1", "", *names, "```", ""])


def index(names: list[str]) -> str:
    """The first page."""
    known = {x for words in SECTIONS.values() for x in words.split()}
    parts = [toctree(title, [f"docs/{x}" for x in words.split() if x in names]) for title, words in SECTIONS.items()]
    others = [f"docs/{x}" for x in names if x not in known]
    parts += [toctree("Reference", ["reference"]), toctree("Project", [*others, "CONTRIBUTING", "CHANGELOG"])]
    return "```{include} README.md\n```\n\n" + "\n".join(parts)


def reference() -> str:
    """The page of public names."""
    import portmm as pm

    left = [x for x in pm.__all__ if not x.startswith("__")]
    sections: dict[str, list[str]] = {}
    for title, words in REFERENCE.items():
        sections[title] = [x for x in words.split() if x in left]
        left = [x for x in left if x not in sections[title]]
    errors = [x for x in left if x.endswith("Error")]
    elements = [x for x in left if getattr(pm, x).__module__.startswith("portmm.spec")]
    sections["Functions of elements and rows"] = elements
    sections["Others"] = [x for x in left if x not in errors and x not in elements]
    sections["Errors"] = errors
    lines = ["# Reference", "", "The public names of `portmm`.", ""]
    for title, names in sections.items():
        lines += [f"## {title}", "", "```{eval-rst}"] if names else []
        for name in names:
            directive = "autoclass" if isinstance(getattr(pm, name), type) else "autofunction"
            lines += [f".. {directive}:: portmm.{name}", ""]
        lines += ["```", ""] if names else []
    return "\n".join(lines)


def main() -> int:
    """Build the site; the status is Sphinx's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the static files")
    out = parser.parse_args().out
    try:
        from sphinx.cmd.build import build_main
    except ImportError as error:
        parser.error(f"{error}; pip install 'portmm[docs]'")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = staged(folder)
        (folder / "index.md").write_text(index(names), encoding="utf-8")
        (folder / "reference.md").write_text(reference(), encoding="utf-8")
        doctrees = folder / ".doctrees"
        options = ["-q", "-W", "--keep-going", "-j", "auto", "-d", str(doctrees), "-c", str(CONFIGURATION)]
        return int(build_main([*options, str(folder), str(out)]))


if __name__ == "__main__":
    sys.exit(main())
