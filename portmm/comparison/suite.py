"""Suites of shapes.

Owns the suites. Their shapes are those of real programs: layers of published networks, sizes at which
libraries change strategy, and sizes without small divisors.

Sources of the layers: BERT-base (hidden 768, feed-forward 3072), ViT-B/16 at
224 pixels (197 tokens), ResNet-50 (each convolution as the product of its
im2col matrix, one image), Llama-3-8B (hidden 4096, 8 key-value heads of 128,
feed-forward 14336), DLRM (the MLPs of its MLPerf configuration).

Products of narrow types are suites of their own: "bf16", "f16", "int8", "int4",
and "narrow" for all of them. They are cubes, and the layers of BERT and Llama
for one row, the few rows of a batch of decoding, and the rows of a prompt.
Layers with epilogues are suites of their own, too: "fused".
"""

from __future__ import annotations

from portmm.comparison import device_suite, fused_cases
from portmm.comparison.case import BLOCK, PLAIN, Case

__all__ = ["BLOCK", "PLAIN", "SUITES", "Case", "cases"]

SUITES = ("smoke", "quick", "full", "narrow-quick", "narrow", "fused-quick", "fused")


def _cubes() -> list[Case]:
    sizes = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    return [Case(f"cube-{s}", "cube", s, s, s) for s in sizes]


def _layers() -> list[Case]:
    bert = [
        Case(f"bert-{seq}-{n}x{k}", "bert", seq, n, k)
        for seq in (128, 384)
        for n, k in ((768, 768), (3072, 768), (768, 3072))
    ]
    vit = [Case(f"vit-{n}x{k}", "vit", 197, n, k) for n, k in ((768, 768), (2304, 768), (3072, 768), (768, 3072))]
    llama = [
        Case(f"llama-m{m}-{name}", "llama", m, n, k)
        for m in (1, 4, 16, 64, 512)
        for name, n, k in (("q", 4096, 4096), ("kv", 1024, 4096), ("up", 14336, 4096), ("down", 4096, 14336))
    ]
    return bert + vit + llama


def _resnet() -> list[Case]:
    # (pixels, output channels, input channels x window) of the stem and of
    # each stage's 1x1, 3x3 and expanding 1x1 convolution.
    shapes = (
        (12544, 64, 147),
        (3136, 64, 64),
        (3136, 64, 576),
        (3136, 256, 64),
        (784, 128, 512),
        (784, 128, 1152),
        (784, 512, 128),
        (196, 256, 1024),
        (196, 256, 2304),
        (196, 1024, 256),
        (49, 512, 2048),
        (49, 512, 4608),
        (49, 2048, 512),
    )
    return [Case(f"resnet-{m}x{n}x{k}", "resnet", m, n, k) for m, n, k in shapes]


def _dlrm() -> list[Case]:
    widths = ((512, 13), (256, 512), (128, 256), (1024, 479), (1024, 1024), (512, 1024), (256, 512), (1, 256))
    unique = dict.fromkeys(widths)
    return [Case(f"dlrm-{n}x{k}", "dlrm", 2048, n, k) for n, k in unique]


def _skinny() -> list[Case]:
    shapes = (
        (65536, 32, 32),
        (32768, 64, 64),
        (16384, 8, 512),
        (16384, 128, 16),
        (32, 65536, 32),
        (64, 32768, 64),
        (8, 16384, 512),
        (128, 16384, 16),
        (16, 16, 131072),
        (64, 64, 65536),
        (100, 100, 20000),
        (4096, 1, 4096),
    )
    return [Case(f"skinny-{m}x{n}x{k}", "skinny", m, n, k) for m, n, k in shapes]


def _odd() -> list[Case]:
    shapes = (
        (65, 65, 65),
        (97, 89, 83),
        (127, 131, 137),
        (251, 257, 263),
        (255, 255, 255),
        (509, 521, 523),
        (1000, 1000, 1000),
        (1009, 1013, 1019),
        (17, 1021, 333),
        (333, 17, 1021),
        (2039, 61, 509),
    )
    return [Case(f"odd-{m}x{n}x{k}", "odd", m, n, k) for m, n, k in shapes]


def _transposes() -> list[Case]:
    name = {"row": "n", "col": "t"}
    both = [(a, b) for a in ("row", "col") for b in ("row", "col")]
    wide = [Case(f"trans-{name[a]}{name[b]}", "transpose", 384, 640, 896, a=a, b=b) for a, b in both]
    cube = [Case(f"trans-1024-{name[a]}{name[b]}", "transpose", 1024, 1024, 1024, a=a, b=b) for a, b in both]
    return [*wide, *cube, Case("trans-nn-ccol", "transpose", 384, 640, 896, c="col")]


def _tiny() -> list[Case]:
    return [Case(f"tiny-{s}", "tiny", s, s, s, batch=1000) for s in (4, 5, 6, 8, 11, 12, 16, 20, 24, 32, 48, 64)]


def _packed() -> list[Case]:
    square = [Case(f"packed-m{m}", "packed", m, 4096, 4096, packed=True) for m in range(1, 17)]
    kv = [Case(f"packed-m{m}-kv", "packed", m, 1024, 4096, packed=True) for m in (1, 4, 16)]
    small = [Case(f"packed-m{m}-768", "packed", m, 768, 768, packed=True) for m in (1, 4, 16)]
    return square + kv + small


NARROW_CUBES = (256, 384, 512, 1024, 1536, 2048)
NARROW_ROWS = (1, 4, 16, 64, 128, 512)
NARROW_LAYERS = (
    ("bert-q", 768, 768),
    ("bert-up", 3072, 768),
    ("bert-down", 768, 3072),
    ("llama-q", 4096, 4096),
    ("llama-kv", 1024, 4096),
    ("llama-up", 14336, 4096),
    ("llama-down", 4096, 14336),
)


def _narrow_cubes(name: str, group: str, dtype: str) -> list[Case]:
    return [Case(f"{name}-cube-{s}", group, s, s, s, dtype=dtype) for s in NARROW_CUBES]


def _narrow_layers(name: str, group: str, dtype: str, *, packed: bool, dynamic: bool = False) -> list[Case]:
    mark = "-packed" if packed else ""
    return [
        Case(f"{name}-{layer}-m{m}{mark}", group, m, n, k, packed=packed, dtype=dtype, dynamic=dynamic)
        for layer, n, k in NARROW_LAYERS
        for m in NARROW_ROWS
    ]


def _bf16() -> list[Case]:
    wide = [Case(f"bf16-f32-cube-{s}", "bf16", s, s, s, dtype="bf16-bf16-f32") for s in (256, 1024, 2048)]
    plain = _narrow_layers("bf16", "bf16", "bf16", packed=False)
    return [
        *_narrow_cubes("bf16", "bf16", "bf16"),
        *wide,
        *plain,
        *_narrow_layers("bf16", "bf16-packed", "bf16", packed=True),
    ]


def _f16() -> list[Case]:
    return _narrow_cubes("f16", "f16", "f16")


def _int8() -> list[Case]:
    cubes = [*_narrow_cubes("s8", "int8", "s8-s8-s32"), *_narrow_cubes("u8", "int8", "u8-s8-s32")]
    plain = _narrow_layers("s8", "int8", "s8-s8-s32", packed=False)
    packed = [
        *_narrow_layers("s8", "int8-packed", "s8-s8-s32", packed=True),
        *_narrow_layers("u8", "int8-packed", "u8-s8-s32", packed=True),
    ]
    linear = _narrow_layers("linear", "int8-linear", "u8-s8-f32", packed=True)
    weight = _narrow_layers("w8", "int8-weight", "f32-s8-f32", packed=True)
    dynamic = _narrow_layers("w8a8", "int8-dynamic", "f32-s8-f32", packed=True, dynamic=True)
    return [*cubes, *plain, *packed, *linear, *weight, *dynamic]


def _int4() -> list[Case]:
    return [
        Case(f"{name}-{layer}-m{m}", group, m, n, k, packed=True, dtype=dtype, block=BLOCK, dynamic=name == "w4a8")
        for name, group, dtype in (
            ("u4", "int4", "f32-u4-f32"),
            ("u4-bf16", "int4-bf16", "bf16-u4-bf16"),
            ("w4a8", "int4-dynamic", "f32-u4-f32"),
        )
        for layer, n, k in NARROW_LAYERS
        for m in (1, 16, 64, 512)
    ]


NARROW_GROUPS = {
    "bf16": ("bf16", "bf16-packed"),
    "f16": ("f16",),
    "int8": ("int8", "int8-packed", "int8-linear", "int8-weight", "int8-dynamic"),
    "int4": ("int4", "int4-bf16", "int4-dynamic"),
}
"""Suite -> its groups: "int8" includes products of packed weights, with a mean of their own."""

SHORT = (
    "cube-64",
    "cube-128",
    "cube-256",
    "cube-512",
    "cube-1024",
    "cube-2048",
    "bert-128-768x768",
    "bert-384-3072x768",
    "vit-768x3072",
    "resnet-3136x64x576",
    "resnet-784x128x1152",
    "resnet-196x1024x256",
    "llama-m1-q",
    "llama-m4-kv",
    "llama-m16-q",
    "llama-m64-kv",
    "dlrm-1024x479",
    "dlrm-256x512",
    "skinny-65536x32x32",
    "skinny-8x16384x512",
    "skinny-64x64x65536",
    "odd-127x131x137",
    "odd-1009x1013x1019",
    "trans-nt",
    "trans-tn",
    "tiny-4",
    "tiny-8",
    "tiny-16",
    "tiny-32",
    "packed-m1",
    "packed-m4",
    "packed-m16",
)

SMOKE = (
    "cube-64",
    "odd-65x65x65",
    "trans-tt",
    "tiny-8",
    "packed-m4-768",
)


NARROW_SHORT = (
    "bf16-cube-1024",
    "bf16-bert-up-m128",
    "bf16-llama-kv-m1-packed",
    "bf16-llama-kv-m64-packed",
    "f16-cube-512",
    "s8-cube-1024",
    "u8-llama-kv-m1-packed",
    "s8-bert-up-m128-packed",
    "linear-llama-kv-m16-packed",
    "w8-llama-kv-m16-packed",
    "u4-llama-kv-m1",
    "u4-llama-kv-m64",
    "u4-bf16-llama-kv-m16",
    "w8a8-llama-kv-m16-packed",
    "w4a8-llama-kv-m1",
    "w4a8-llama-kv-m64",
)


def _full() -> list[Case]:
    makers = (_cubes, _layers, _resnet, _dlrm, _skinny, _odd, _transposes, _tiny, _packed)
    return [case for maker in makers for case in maker()]


def _narrow() -> list[Case]:
    return [case for maker in (_bf16, _f16, _int8, _int4) for case in maker()]


def cases(suite: str = "quick") -> tuple[Case, ...]:
    """Cases of a suite, one of `SUITES`, or of a group, or the case of that name.

    "device-quick" and "device-smoke" are for devices.
    "full" has one type, float32; "narrow" has all the others. "bf16", "int8" and
    "int4" are all groups of that type. "fused" has layers with epilogues.
    Several names may be joined with commas.

    Raises:
        ValueError: a name is unknown.
    """
    full, narrow, fused, devices = _full(), _narrow(), fused_cases.fused_cases(), device_suite.named()
    known = [*full, *narrow, *fused, *(case for some in devices.values() for case in some)]
    named = {case.name: case for case in known}
    suites = {
        "full": tuple(case.name for case in full),
        "quick": SHORT,
        "smoke": SMOKE,
        "narrow": tuple(case.name for case in narrow),
        "narrow-quick": NARROW_SHORT,
        **{name: tuple(case.name for case in some) for name, some in devices.items()},
        "fused": tuple(case.name for case in fused),
        "fused-quick": fused_cases.SHORT,
    }
    picked: dict[str, Case] = {}
    for word in suite.split(","):
        groups = NARROW_GROUPS.get(word, (word,))
        names = suites.get(word) or tuple(x.name for x in known if x.group in groups or x.name == word)
        if not names:
            all_groups = ", ".join(dict.fromkeys(case.group for case in known))
            raise ValueError(
                f"no suite, group or case called {word!r}; suites are {', '.join(suites)}; groups: {all_groups}"
            )
        picked.update((name, named[name]) for name in names)
    return tuple(picked.values())
