"""Text and pictures of graphs: each operator with the formula that it computes."""

import xml.etree.ElementTree as ET

import graphs_of as g
import numpy as np
import pytest

import portmm as pm
from portmm.fusion.mugraph_svg import svg
from portmm.ir.operator_text import MOST, operator_lines, spelled
from portmm.spec.elementwise import exp, silu
from portmm.spec.epilogue import index, load
from portmm.spec.expr_functions import select

A, B, C = (load(i, "f32") for i in range(3))


@pytest.mark.parametrize(
    ("x", "text"),
    [
        ((A + B) * C, "(a + b) * c"),
        (A - (B - C), "a - (b - c)"),
        (A - B - C, "a - b - c"),
        (A / (B / C), "a / (b / c)"),
        (-(A + B) * 2.0, "-(a + b) * 2.0"),
        (exp(A * 0.5) + silu(B), "exp(a * 0.5) + silu(b)"),
        (select(index("n") <= index("m") + 1, A, float("-inf")), "where(i.n <= i.m + 1, a, -inf)"),
        ((A > 0) & (B <= C), "(0.0 < a) & (b <= c)"),
        (pm.maximum(A, B), "maximum(a, b)"),
    ],
)
def test_formulas(x, text):
    assert spelled(x, ["a", "b", "c"], {}) == text


def test_operators_name_what_others_read():
    (step,) = g.lora_kernel().steps
    assert operator_lines(step.program, ["x", "w", "a", "b", "y"]) == [
        ["t0 = gemm along k: x, w", "t1 = gemm along k: x, a"],
        ["t2 = gemm along r: t1, b", "transfer to y[mn]: t0 + t2"],
    ]
    flash = str(g.flash())
    assert "t2 = sum along n: exp(t0 * 0.25 - t1), rescaled by exp(-t1)" in flash
    assert "pass 1: transfer to y[hme]: t3 / t2" in flash


def test_no_line_is_longer_than_its_box():
    lines = [y for x in g.flash(causal=True).steps for one in operator_lines(x.program, "qkvy") for y in one]
    assert max(map(len, lines)) <= MOST
    root = ET.fromstring(svg(("what it is", g.flash(causal=True))))  # noqa: S314 - our own
    box = next(x for x in root.iter() if x.tag.endswith("rect"))
    texts = [x.text for x in root.iter() if x.tag.endswith("text")]
    assert texts[0] == "what it is"
    assert max(len(x) for x in texts) * 7.6 < float(box.get("width"))


def test_a_picture_says_whether_its_kernels_run(monkeypatch):
    monkeypatch.setenv("PORTMM_TUNED", "off")
    a, b = np.ones((8, 16), np.float32), np.ones((16, 8), np.float32)
    fused = pm.fuse(lambda a, b: a @ b, search=2)
    fused(a, b)
    (what, _), *rest = fused.explain(a, b).finding.graphs
    assert not rest
    assert what in fused.explain(a, b).graph()
