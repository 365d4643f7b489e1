"""Suites of shapes for devices.

Owns their cases. On GPUs half of the types use tensor cores, and a product fills the device
at sizes of a thousand or more; layers are those of Llama-3-8B (hidden 4096, feed-forward 14336), whose
weights are column-major, as in x @ w.T.
"""

from __future__ import annotations

from portmm.comparison.case import Case

LAYERS = (("qkv", 6144, 4096), ("up", 14336, 4096), ("down", 4096, 14336))
BYTES = {"s8": "s8-s8-s32", "e4m3": "e4m3-e4m3-bf16"}
"""Types of eight bits -> types of A, B and C of their products."""

DEFAULT, SMOKE = "device-quick", "device-smoke"
INSTEAD = {"quick": DEFAULT, "smoke": SMOKE}
"""Suites that replace those of the processor on a device; "quick" only on one that is no processor."""


def suite_of(suite: str, kind: str) -> str:
    """Name of the suite for a device of a kind, "gpu", "cpu" or "accelerator"."""
    return suite if suite == "quick" and kind == "cpu" else INSTEAD.get(suite, suite)


def _cube(name: str, size: int) -> Case:
    b = "row" if name == "f32" else "col"
    return Case(f"gpu-{name}-cube-{size}", f"gpu-{name}", size, size, size, b=b, dtype=BYTES.get(name, name))


def _layers(group: str, name: str, rows: tuple[int, ...]) -> list[Case]:
    return [
        Case(f"gpu-{name}-{layer}-m{m}", group, m, n, k, b="col", dtype=BYTES.get(name, name))
        for layer, n, k in LAYERS
        for m in rows
    ]


def _default() -> list[Case]:
    sizes = {
        "f32": (1024, 2048, 4096), "bf16": (1024, 2048, 4096, 8192), "f16": (1024, 4096), "s8": (1024, 4096, 8192),
        "e4m3": (4096,),
    }  # fmt: skip
    return [
        *(_cube(name, size) for name, some in sizes.items() for size in some),
        *_layers("gpu-decode", "bf16", (1, 16)),
        *_layers("gpu-decode-s8", "s8", (1, 16)),
        *_layers("gpu-prefill", "bf16", (512,)),
    ]


def _smoke() -> list[Case]:
    group = "gpu-smoke"
    return [
        Case("gpu-smoke-f32", group, 64, 64, 64),
        Case("gpu-smoke-odd", group, 65, 63, 67),
        Case("gpu-smoke-tt", group, 48, 40, 56, a="col", b="col", c="col"),
        Case("gpu-smoke-batch", group, 16, 16, 16, batch=10),
        Case("gpu-smoke-row", group, 1, 256, 128, b="col"),
        *(Case(f"gpu-smoke-{x}", group, 64, 64, 64, b="col", dtype=BYTES.get(x, x)) for x in ("f16", "bf16", "s8")),
    ]


def named() -> dict[str, list[Case]]:
    """Cases by suite."""
    return {DEFAULT: _default(), SMOKE: _smoke()}
