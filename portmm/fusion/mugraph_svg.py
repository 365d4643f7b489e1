"""Pictures of graphs of kernels, as SVG.

Owns `svg`: a box for each kernel with its grid, its loop and its operators by pass, and arrows for tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from portmm.ir.block_program import TileTransfer

if TYPE_CHECKING:
    from portmm.ir.mugraph import MuGraph, Step

WIDTH, LINE, PAD, GAP, LEFT = 460, 18, 10, 34, 150


def svg(graph: MuGraph) -> str:
    """The picture of a graph."""
    parts: list[str] = []
    y = PAD
    for i in graph.inputs:
        y = _tensor(graph, i, y, parts)
    places: dict[int, int] = {}
    y += GAP // 2
    for number, step in enumerate(graph.steps):
        lines = _lines(graph, step, number)
        height = LINE * len(lines) + 2 * PAD
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{height}" rx="6" class="k"/>')
        for j, line in enumerate(lines):
            kind = "t" if j == 0 else "o"
            parts.append(f'<text x="{LEFT + PAD}" y="{y + PAD + 13 + j * LINE}" class="{kind}">{escape(line)}</text>')
        written = {step.operands[j].tensor for j, _ in step.program.fused.results}
        for at in step.operands:
            if at.tensor in places and at.tensor not in written:
                x = LEFT - 12 - 9 * (at.tensor % 12)
                start = places[at.tensor]
                parts.append(f'<path d="M{LEFT},{start} H{x} V{y + height // 2} H{LEFT}" class="a"/>')
        for i in written:
            places[i] = y + height // 2 + 4
        y += height + GAP
    for i in graph.results:
        y = _tensor(graph, i, y - GAP // 2, parts) + GAP // 2
    style = (
        ".k{fill:#eef4fb;stroke:#31688e}.t{font:bold 13px sans-serif}.o{font:12px monospace}"
        ".i{font:12px monospace;fill:#31688e}.a{fill:none;stroke:#888;marker-end:url(#m)}"
    )
    marker = '<marker id="m" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + PAD} {y}" role="img">'
    arrow = f'<defs>{marker}<path d="M0,0 L8,4 L0,8 z" fill="#888"/></marker></defs>'
    return "\n".join([head, f"<style>{style}</style>", arrow, *parts, "</svg>\n"])


def _tensor(graph: MuGraph, i: int, y: int, parts: list[str]) -> int:
    x = graph.tensors[i]
    kind = "in " if i in graph.inputs else "out"
    parts.append(f'<text x="{LEFT}" y="{y + 13}" class="i">{kind} {escape(x.name)}[{escape(x.axes)}]</text>')
    return y + LINE


def _lines(graph: MuGraph, step: Step, number: int) -> list[str]:
    """The text of a kernel's box."""
    p = step.program
    names = [graph.tensors[x.tensor] for x in step.operands]
    written = {i for i, _ in p.fused.results}
    reads = ", ".join(f"{x.name}[{p.operands[j].axes}]" for j, x in enumerate(names) if j not in written)
    lines = [f"kernel {number}: grid {p.grid or '1'}, loop {p.loop}", f"reads {reads}"]
    for i, one in enumerate(p.passes):
        words = []
        for x in one:
            kind = type(x).__name__.removeprefix("Tile").lower()
            along = f" along {x.value.args[0]}" if x.value.op == "contract" and not isinstance(x, TileTransfer) else ""
            if isinstance(x, TileTransfer):
                along = f" to {names[x.operand].name}[{p.operands[x.operand].axes}]"
            words.append(kind + along + (", rescaled" if getattr(x, "rescaled", None) is not None else ""))
        lines.append(f"pass {i}: {'; '.join(words)}")
    return lines
