"""Picture of a convolution's transforms, as SVG.

Owns `drawn`: a box for memory and each transform of it on the left, from the images to the matrix; on the right what is
left of them after simplification, and the program that reads it.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from portmm.util.svg import document

LINE, PAD, GAP, LETTER, TOP = 18, 10, 22, 7.3, 66
STYLE = (
    ".k{fill:#eef4fb;stroke:#31688e}.r{fill:#f1f8ec;stroke:#35794a}.t{font:bold 13px sans-serif}.o{font:12px monospace}"
)


def drawn(title: str, matrix: str, transforms: tuple[str, ...], others: list[tuple[str, ...]]) -> str:
    """The picture of a convolution.

    Args:
        title: above it.
        matrix: what the transforms result in.
        transforms: memory, and each transform.
        others: lines of boxes: the simplified transforms, and the program.
    """
    parts = [f'<text x="{PAD}" y="26" class="t">{escape(title)}</text>']
    left = _column("as written", matrix, [(y,) for y in transforms], (PAD, "k"), parts)
    right = _column("simplified", "", others, (left[0] + 3 * GAP, "r"), parts)
    y = TOP + PAD + LINE // 2
    parts.append(f'<path d="M{left[0]},{y} H{left[0] + 3 * GAP - 4}" class="a"/>')
    return document(right[0] + PAD, max(left[1], right[1]) + PAD, STYLE, parts, arrows=True)


def _column(
    title: str, last: str, boxes: list[tuple[str, ...]], at: tuple[int, str], parts: list[str]
) -> tuple[int, int]:
    """Boxes below each other, with arrows and a line below the last; the right and the lower edge of them."""
    (left, kind), y = at, TOP
    width = int(max(len(line) for lines in boxes for line in (*lines, last, title)) * LETTER) + 2 * PAD
    parts.append(f'<text x="{left}" y="{TOP - 12}" class="t">{title}</text>')
    for i, lines in enumerate(boxes):
        height = LINE * len(lines) + 2 * PAD - 4
        if i:
            parts.append(f'<path d="M{left + width // 2},{y - GAP} V{y - 4}" class="a"/>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>')
        for j, line in enumerate(lines):
            parts.append(f'<text x="{left + PAD}" y="{y + PAD + 11 + j * LINE}" class="o">{escape(line)}</text>')
        y += height + GAP
    if last:
        parts.append(f'<text x="{left}" y="{y - GAP + LINE}" class="o">{escape(last)}</text>')
    return left + width, y - GAP + LINE * bool(last)
