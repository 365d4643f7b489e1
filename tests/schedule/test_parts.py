"""Parts of schedules, and the flat text that databases, results and headers of kernels hold them in."""

import pytest

from portmm.codegen.lower import lower
from portmm.errors import ScheduleError
from portmm.schedule.cpu_attention import attention_schedule
from portmm.schedule.parts import ASYNC, LOAD, PACK, PREFETCH, TMA, AtomUse, OperandPlan, Staging
from portmm.schedule.text import flat, parse, spell, varied
from portmm.spec.dequantization import IDENTITY, Dequantization
from portmm.target.target import load_isa

CPU = (
    "gemm:avx512:f32:14x32x1/14x32x256/140x64x256/140x640x256:7-14:"
    "a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,pack_a,pack_b,once,ahead"
)
INSIDE = CPU.replace("pack_a,pack_b,once,ahead", "pack_b,inside")
STREAM = "gemm:avx2:f32:4x16x1/4x16x32/0x16x32/0x0x32:4-4:a=row,b=row,panels=1,over=k,lanes=8,prefetch=12,swap"
THIN = "gemm:avx2:f32:1x16x1/1x16x0/0x16x0/0x0x0:1-1:a=row,b=packed,panels=4,over=tiles,lanes=0,prefetch=0,pack_a"
ATTENTION = (
    "attention:avx512:f32:6x64x1/6x64x0/0x64x0/0x0x0:6-6:a=row,b=col,panels=1,over=batch,lanes=0,prefetch=0,pack_b,"
    "pack_v,cell=8x32,v=row"
)
GPU = (
    "mma:mma_sm80:bf16:8x16x16/64x64x16/128x128x32/1024x0x0:8-8:a=row,b=col,panels=1,over=tiles,lanes=0,prefetch=0,"
    "copies,joined,stages=4,split=3,vectors=8x8x2,cell=1x1,resident=2,static=0x4096x4096"
)
HOPPER = (
    "wgmma:wgmma:bf16:2x64x16/64x256x16/128x256x64/1024x0x0:2-2:a=row,b=col,panels=1,over=tiles,lanes=0,prefetch=0,"
    "stages=4,split=1,vectors=8x8x8,cell=1x1,groups=2,cluster=2,persistent=132"
)


@pytest.mark.parametrize("packs", [False, True])
def test_schedules_of_attention_on_cpus_are_read_back(packs):
    isa = load_isa("avx512")
    s = attention_schedule(isa, isa.atom("f32"), packs=packs)
    assert parse(spell(s)) == s
    with pytest.raises(ScheduleError, match="says how a block program is computed, not which"):
        lower(s, isa)


def test_packing_and_filling_stages_are_one_record():
    assert parse(CPU).a == OperandPlan("row", (Staging("L2", PACK),))
    assert parse(CPU).b == OperandPlan("row", (Staging("memory", PACK),))
    assert parse(INSIDE).b == OperandPlan("row", (Staging("L1", PACK),))
    assert parse(CPU).c.by(PREFETCH) == Staging("L1", PREFETCH)
    assert parse(GPU).a == OperandPlan("row", (Staging("shared", ASYNC, 4, 8),))
    assert parse(HOPPER).b.at("shared") == Staging("shared", TMA, 4, 8)
    assert parse(THIN).b.at("registers") == Staging("registers", LOAD, 4)
    assert parse(STREAM).b.stagings == (Staging("L1", PREFETCH, 12),)


def test_numbers_of_parts():
    s, device = parse(STREAM), parse(GPU)
    assert (s.atom, s.parallel.over, s.heights, s.on_device, s.stages) == (AtomUse(8, 1, True), "k", (4,), False, 0)
    assert parse(CPU).heights == tuple(range(7, 15))
    assert parse(CPU).tile("L2").m == 140
    assert (device.stages, device.parallel.split, device.slices, device.vectors) == (4, 3, False, (8, 8, 2))
    assert varied(device, joined=False).slices
    with pytest.raises(KeyError):
        device.tile("L1")


@pytest.mark.parametrize("text", [CPU, INSIDE, STREAM, THIN, ATTENTION, GPU, HOPPER])
def test_stored_text_is_read_back(text):
    s = parse(text)
    assert spell(s) == text
    assert varied(s) == s
    for name, value in (
        {"prefetch": 3, "panels": 2, "over": "batch"}.items() if not s.on_device else {"split": 7}.items()
    ):
        other = varied(s, **{name: value})
        assert flat(other) == flat(s) | {name: value}
        assert parse(spell(other)) == other


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("7-14:", "7-13:", "7 to 13 rows, and 14"),
        ("7-14:", "0-14:", "0 to 14 rows"),
        ("pack_b,", "", "does not pack B"),
        ("lanes=0,", "", "lanes"),
        ("14x32x1/", "", "shorter"),
        ("gemm:", "", "it has 5 of 6 fields"),
    ],
)
def test_damaged_text_is_refused(old, new, why):
    with pytest.raises(ValueError, match=f"is not a schedule.*{why}"):
        parse(CPU.replace(old, new))


SCALED = (
    "gemm:avx512vnni:u8-s8-f32:12x32x1/12x32x64/120x64x64/120x640x64:12-12:"
    "a=row,b=packed,panels=1,over=tiles,lanes=0,prefetch=0,kr=4,"
)


def test_epilogues_of_older_text_become_expressions():
    for words, how in (
        ("scale", Dequantization()),
        ("scale+azero+bzero+bias", Dequantization(a_zero=True, b_zero=True, bias=True)),
    ):
        assert parse(f"{SCALED}post={words},pack_a").epilogue == how.text
        assert parse(spell(parse(f"{SCALED}post={words},pack_a"))).epilogue == how.text
    dynamic = parse(SCALED.replace("u8-", "s8-") + "post=scale,source=f32,pack_a")
    assert dynamic.epilogue == Dequantization(dynamic=True).text
    assert parse(f"{SCALED}post=scale,fused={IDENTITY},pack_a").epilogue == IDENTITY
    for wrong in ("post=bias", "post=scale+nothing", f"post=scale+bias,fused={IDENTITY}"):
        with pytest.raises(ValueError, match=r"post is .*tune or emit the schedule again"):
            parse(f"{SCALED}{wrong},pack_a")


@pytest.mark.parametrize("vectors", ["", "8x8"])
def test_text_with_vectors_left_out_is_refused(vectors):
    with pytest.raises(ValueError, match="is not a schedule"):
        parse(GPU.replace("vectors=8x8x2", f"vectors={vectors}"))
