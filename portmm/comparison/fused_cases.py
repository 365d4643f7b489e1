"""Layers with epilogues.

Owns the cases of the suite "fused" and those of "fused-quick".
The layers are those of `comparison.suite`: BERT-base, ViT-B/16, Llama-3-8B, DLRM.
Weights are packed, as in a model that is served.

The group "fused" is of float32, "fused-bf16" of bfloat16, "fused-int8" of quantised values.
"""

from __future__ import annotations

from portmm.comparison.case import BLOCK, Case

BERT = (("q", 768, 768, "bias"), ("up", 3072, 768, "bias+gelu"), ("down", 768, 3072, "bias+residual"))
"""Name, columns and rows of a weight, and the epilogue; ViT's are the same."""
LLAMA = (("gate", 14336, 4096, "silu"), ("o", 4096, 4096, "residual"), ("down", 4096, 14336, "residual"))
DLRM = ((1024, 479), (512, 1024), (256, 512))

SHORT = (
    "fused-bert-q-m128",
    "fused-bert-up-m128",
    "fused-bert-down-m128",
    "fused-bert-up-m384",
    "fused-vit-up-tanh",
    "fused-dlrm-256x512",
    "fused-llama-gate-m1",
    "fused-bf16-bert-up-m128",
    "fused-bf16-llama-gate-m16",
    "fused-int8-bert-up-m128",
    "fused-int8-bert-down-m128",
)
"""Cases of the suite "fused-quick": one of each kind, for a run of a few minutes."""


def fused_cases() -> list[Case]:
    """All cases of the suite."""
    return [*_f32(), *_bf16(), *_int8()]


def _layer(prefix: str, group: str, m: int, layer: tuple[str, int, int, str], dtype: str = "f32") -> Case:
    name, n, k, words = layer
    return Case(f"{prefix}-{name}-m{m}", group, m, n, k, packed=True, dtype=dtype, fused=words)


def _f32() -> list[Case]:
    bert = [_layer("fused-bert", "fused", m, layer) for m in (128, 384) for layer in BERT]
    vit = [
        Case(f"fused-vit-{name}", "fused", 197, n, k, packed=True, fused=words)
        for name, n, k, words in (
            ("qkv", 2304, 768, "bias"),
            ("up", 3072, 768, "bias+gelu"),
            ("up-tanh", 3072, 768, "bias+gelu_tanh"),
            ("down", 768, 3072, "bias+residual"),
        )
    ]
    dlrm = [Case(f"fused-dlrm-{n}x{k}", "fused", 2048, n, k, packed=True, fused="bias+relu") for n, k in DLRM]
    llama = [_layer("fused-llama", "fused", m, layer) for m in (1, 16, 128) for layer in LLAMA]
    cube = [Case(f"fused-cube-1024-{x}", "fused", 1024, 1024, 1024, fused=x) for x in ("bias+gelu", "residual")]
    return [*bert, *vit, *dlrm, *llama, *cube]


def _bf16() -> list[Case]:
    bert = [_layer("fused-bf16-bert", "fused-bf16", m, layer, "bf16") for m in (128, 384) for layer in BERT]
    llama = [_layer("fused-bf16-llama", "fused-bf16", m, layer, "bf16") for m in (1, 16, 128) for layer in LLAMA]
    return [*bert, *llama]


def _int8() -> list[Case]:
    layers = (*BERT, ("relu", 3072, 768, "bias+relu"))
    int8 = [_layer("fused-int8-bert", "fused-int8", m, layer, "u8-s8-f32") for m in (128, 384) for layer in layers]
    weights = [_layer("fused-w8-llama", "fused-int8", m, layer, "f32-s8-f32") for m in (1, 16) for layer in LLAMA]
    four = [
        Case(f"fused-u4-llama-gate-m{m}", "fused-int8", m, 14336, 4096, packed=True, dtype="f32-u4-f32", block=BLOCK,
             fused="silu")
        for m in (1, 16)
    ]  # fmt: skip
    return [*int8, *weights, *four]
