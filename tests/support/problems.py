"""Products that tests of kernels pose: types, layouts, sizes, and the schedules that differ in their code."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from portmm.schedule.candidates import candidates
from portmm.spec.dequantization import IDENTITY, of_words
from portmm.spec.dtype import CODES_KR, accumulator, types
from portmm.spec.problem import LAYOUTS_A, LAYOUTS_B, LAYOUTS_C, Family, Problem, family

NUMPY = {"f32": np.float32, "f64": np.float64}

NARROW = (
    "bf16", "f16", "bf16-bf16-f32", "f16-f16-f32", "f32-bf16-f32",
    "f32-s8-f32", "bf16-s8-bf16", "s8-s8-s32", "u8-s8-s32",
)  # fmt: skip
"""Products of narrow types: floats summed in f32, integers in s32."""

LAYOUTS = [
    (a, b, c) for a in LAYOUTS_A for b in LAYOUTS_B for c in LAYOUTS_C if b != "codes" and (b, c) != ("packed", "col")
]
"""A packed B is always on the right, so that C runs by rows."""


def ended(dtype: str, more: dict[str, Any]) -> dict[str, Any]:
    """Fields of a problem: `post`, the words of a quantised product as in "scale+azero", are an epilogue."""
    more = dict(more)
    post, text = more.pop("post", ""), more.get("fused", "")
    a, b, c = types(dtype)
    if post and not text:
        more["fused"] = of_words(post, "", dynamic=bool(more.get("source")))
    elif not text and accumulator(a, b) == "s32" != c:
        more["fused"] = IDENTITY
    return more


POSTS = ["+".join(("scale", *x)) for i in range(4) for x in combinations(("azero", "bzero", "bias"), i)]


def post_of(p: Problem) -> str:
    """The words of a problem's epilogue, if it is that of a quantised product."""
    words = (x for x in POSTS if p.fused == of_words(x, "", dynamic=bool(p.source)))
    return next(words, "")


def packed_families(target: Any, dtype: str, post: str = "") -> list[str]:
    """The panel widths that a machine's own schedules would pack."""
    more = ended(dtype, {"post": post.replace("+azero", "")})
    return sorted(
        {s.family for s in candidates(Problem(64, 64, 64, dtype, **more), target)}, key=lambda name: family(name).nr
    )


def pose(size: tuple[int, int, int], layouts: tuple[str, str, str], target: Any, **more: Any) -> list[Problem]:
    """The problem of a size and layouts, once for each packed family if B is packed."""
    a, b, c = layouts
    dtype, post = more.get("dtype", "f32"), more.get("post", "")
    families = packed_families(target, dtype, post) if b == "packed" else [""]
    return [Problem(*size, a=a, b=b, c=c, family=f, **ended(dtype, more)) for f in families]


def coded(
    size: tuple[int, int, int], word: str, nr: int, group: int, a: str = "row", *, symmetric: bool = False,
    e2m1: bool = False, half: bool = False, **more: Any,
) -> Problem:  # fmt: skip
    """A product with a weight of four bits."""
    kept = Family("u4", nr, CODES_KR, group=group, symmetric=symmetric, e2m1=e2m1, half=half)
    return Problem(*size, word, a=a, b="codes", family=str(kept), **ended(word, more))


def shape_of(s):
    """The key of a schedule by the code it becomes, sizes aside."""
    a, b = ((x.layout, x.packed) for x in (s.a, s.b))
    kind = (s.program, a, b, s.atom.swap, s.parallel.over, s.atom.lanes, s.b.panels > 1, s.static is not None)
    return (*kind, s.nr) if s.b.layout == "packed" else kind


def selection(target, dtype, lanes):
    """Problems of all layouts and kinds, each with the candidates whose like has not come yet."""
    posed = []
    for i, layouts in enumerate(LAYOUTS):
        if layouts[2] == "col" and dtype.startswith("u8"):
            continue
        size = ((17, 2 * lanes + 1, 13), (3, 4 * lanes, 2 * lanes + 3))[i % 2]
        posed += pose(size, layouts, target, dtype=dtype)
        posed += pose((9, lanes + 3, 6), layouts, target, dtype=dtype, batch=7) if i % 4 == 0 else []
    for layouts in LAYOUTS[::3]:
        if {"any", "packed"}.isdisjoint(layouts) and (layouts[2] == "row" or not dtype.startswith("u8")):
            posed += pose((7, lanes + 2, 5), layouts, target, dtype=dtype, batch=3, static=True)
    seen = set()
    for p in posed:
        fresh = {shape_of(s): s for s in reversed(candidates(p, target))}
        fresh = {x: s for x, s in fresh.items() if x not in seen}
        seen |= fresh.keys()
        yield p, list(fresh.values())
