"""Pictures of graphs of kernels, as SVG.

Owns `svg`: a box for each kernel with its grid, its loop and its operators by pass, and arrows for tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from portmm.ir.operator_text import operator_lines
from portmm.util.svg import document

if TYPE_CHECKING:
    from portmm.ir.mugraph import MuGraph, Step

LINE, PAD, GAP = 18, 10, 34
LETTER = 7.7
"""Width of a letter, of wide fonts whose letters are rounded to whole pixels."""


def svg(*graphs: tuple[str, MuGraph]) -> str:
    """The picture of a graph below its caption, or of several, one below the other."""
    parts: list[str] = []
    y, width = PAD, 0
    for caption, graph in graphs:
        if caption:
            parts.append(f'<text x="{PAD}" y="{y + 13}" class="o">{escape(caption)}</text>')
            y += LINE + PAD
        y, own = _graph(graph, y, parts)
        width = max(width, own, int(len(caption) * LETTER) + 2 * PAD)
    style = (
        ".k{fill:#eef4fb;stroke:#31688e}.t{font:bold 13px sans-serif}.o{font:12px monospace}"
        ".i{font:12px monospace;fill:#31688e}"
    )
    return document(width, y, style, parts, arrows=True)


def _graph(graph: MuGraph, y: int, parts: list[str]) -> tuple[int, int]:
    """Add a graph from a height on; the height below it, and its width."""
    boxes = [_lines(graph, step, i) for i, step in enumerate(graph.steps)]
    left = PAD if len(boxes) < 2 else 130
    width = int(max(len(line) for lines in boxes for line in lines) * LETTER) + 2 * PAD
    for i in graph.inputs:
        y = _tensor(graph, i, (left, y), parts)
    places: dict[int, int] = {}
    y += GAP // 2
    for lines, step in zip(boxes, graph.steps, strict=True):
        height = LINE * len(lines) + 2 * PAD
        parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{height}" rx="6" class="k"/>')
        for j, line in enumerate(lines):
            kind = "t" if j == 0 else "o"
            parts.append(f'<text x="{left + PAD}" y="{y + PAD + 13 + j * LINE}" class="{kind}">{_spaced(line)}</text>')
        written = {step.operands[j].tensor for j, _ in step.program.fused.results}
        for at in step.operands:
            if at.tensor in places and at.tensor not in written:
                x = left - 12 - 9 * (at.tensor % 12)
                start = places[at.tensor]
                parts.append(f'<path d="M{left},{start} H{x} V{y + height // 2} H{left}" class="a"/>')
        for i in written:
            places[i] = y + height // 2 + 4
        y += height + GAP
    for i in graph.results:
        y = _tensor(graph, i, (left, y - GAP // 2), parts) + GAP // 2
    return y, left + width + PAD


def _spaced(line: str) -> str:
    """Text whose spaces at the start are kept."""
    start = len(line) - len(line.lstrip())
    return "\u00a0" * start + escape(line[start:])


def _tensor(graph: MuGraph, i: int, at: tuple[int, int], parts: list[str]) -> int:
    (left, y), x = at, graph.tensors[i]
    kind = "in " if i in graph.inputs else "out"
    parts.append(f'<text x="{left}" y="{y + 13}" class="i">{kind} {escape(x.name)}[{escape(x.axes)}]</text>')
    return y + LINE


def _lines(graph: MuGraph, step: Step, number: int) -> list[str]:
    """The text of a kernel's box."""
    p = step.program
    names = [graph.tensors[x.tensor] for x in step.operands]
    written = {i for i, _ in p.fused.results}
    reads = ", ".join(f"{x.name}[{p.operands[j].axes}]" for j, x in enumerate(names) if j not in written)
    lines = [f"kernel {number}: grid {p.grid or '1'}, loop {p.loop}", f"reads {reads}"]
    for i, (first, *rest) in enumerate(operator_lines(p, [x.name for x in names])):
        lines += [f"pass {i}: {first}", *(f"        {x}" for x in rest)]
    return lines + ([f"thread: {step.threads}"] if step.threads is not None else [])
