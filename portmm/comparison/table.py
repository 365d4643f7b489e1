"""Tables of text cells as Markdown, for a terminal and as HTML.

Owns `Table` and its three forms, which escape what the form would take for its own marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from portmm.util import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        head: names of the columns.
        rows: the cells of each row.
        left: number of leading columns that are words, aligned left.
        words: further columns that are aligned left, by name.
        title: what it shows; Markdown has none.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    words: Sequence[str] = ()
    title: str = ""

    def markdown(self) -> str:
        """The table in Markdown."""
        rule = ["---" if i < self.left or x in self.words else "--:" for i, x in enumerate(self.head)]
        # Names come from users' files.
        lines = ([" ".join(x.replace("|", "\\|").split()) for x in row] for row in (self.head, rule, *self.rows))
        return "\n".join("| " + " | ".join(row) + " |" for row in lines)

    def terminal(self) -> RichTable:
        """The table for a terminal."""
        return console.table(self.title, self.head, self.rows, words=(*self.head[: self.left], *self.words))

    def html(self) -> str:
        """The table without a style, for notebooks."""
        head = "".join(f"<th>{escape(x)}</th>" for x in self.head)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(x)}</td>' for x in row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
