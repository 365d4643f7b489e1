"""Pictures as SVG: the document around their parts.

Owns `document`, and `ARROW`, the class of lines that end in an arrow.
"""

from __future__ import annotations

from collections.abc import Sequence

ARROW = "a"
_STYLE = f".{ARROW}{{fill:none;stroke:#888;marker-end:url(#m)}}"
_MARKER = (
    '<defs><marker id="m" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#888"/></marker></defs>'
)


def document(width: int, height: int, style: str, parts: Sequence[str], *, arrows: bool = False) -> str:
    """The text of a picture.

    Args:
        width: of its view box.
        height: of its view box.
        style: rules of its classes.
        parts: its elements.
        arrows: some of them are of the class `ARROW`.
    """
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    rules = f"<style>{style}{_STYLE if arrows else ''}</style>"
    return "\n".join([head, rules, *([_MARKER] if arrows else []), *parts, "</svg>\n"])
