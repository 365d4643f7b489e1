"""Weights of four bits on Hopper's tensor cores: pipelines on the shim, what is chosen, and as NVRTC compiles it."""

from __future__ import annotations

import grid_cases
import opencl_cpu
import pytest
from grid_cases import compiled, in_shim, kernels_of
from places import MACHINES
from test_device_codes import check, posed
from test_mma_codes import posed_call

from portmm.build import nvrtc
from portmm.codegen import cuda
from portmm.codegen.lower import lower_grid
from portmm.errors import NoCompilerError
from portmm.schedule.candidates import candidates
from portmm.schedule.gpu_wgmma import STRIP
from portmm.schedule.legality import shared_bytes
from portmm.schedule.parts import ALL, Tile
from portmm.schedule.text import of_flat, parse, spell
from portmm.target.target import load_target

HOPPER = load_target(str(MACHINES / "tiny_hopper.toml"))
H100 = load_target("h100")


def schedule(dtype, rows, columns, depth, group, **more):
    """A schedule for tiles of rows, by warpgroups, strips of each, and how many take turns at a tile."""
    groups, strips, turns = (*columns, 1)[:3]
    part = (rows, strips * STRIP)
    tiles = (
        Tile("registers", rows // 4, 2 * strips, 16), Tile("warp", *part, 16),
        Tile("shared", rows, groups // turns * part[1], depth), Tile("L2", 8 * rows, ALL, ALL),
    )  # fmt: skip
    given = {"stages": 3, "persistent": 0 if more.get("split", 1) > 1 else 4, "vectors": (8, 32, 8)} | more
    return of_flat(
        "wgmma_int4", "wgmma", dtype, tiles, a="row", b="codes", swap=True, groups=groups, group=group, resident=1,
        **given,
    )  # fmt: skip


VARIANTS = {
    "a step of two lines": (schedule("bf16-u4-bf16", 16, (1, 1), 128, 128), [(13, 70, 800), (3, 64, 32)]),
    "short groups": (schedule("f16-u4-f16", 8, (2, 1), 128, 32), [(5, 130, 200), (20, 40, 65 * 8)]),
    "two strips": (schedule("bf16-u4-bf16", 24, (1, 2), 128, 64), [(50, 150, 660)]),
    "groups within a step": (schedule("bf16-u4-bf16", 8, (1, 1), 256, 96), [(8, 70, 1400)]),
    "one group": (schedule("f16-u4-f16", 32, (2, 2), 128, 0, persistent=2), [(70, 300, 264)]),
    "joined": (
        schedule("bf16-u4-bf16", 16, (1, 1), 128, 128, split=3, joined=True, stages=2), [(13, 70, 128 * 9 + 8)],
    ),
    "turns": (
        schedule("bf16-u4-bf16", 16, (2, 1, 2), 128, 128, persistent=2, stages=4), [(30, 100, 128 * 9), (4, 64, 40)],
    ),
    "three turns": (schedule("f16-u4-f16", 8, (3, 1, 3), 128, 64, persistent=2, stages=6), [(8, 100, 128 * 10 + 8)]),
    "turns, joined": (
        schedule("bf16-u4-bf16", 8, (2, 1, 2), 128, 64, split=2, joined=True, stages=4), [(7, 70, 128 * 7)],
    ),
    "turns in a cluster": (
        schedule("bf16-u4-bf16", 8, (4, 1, 4), 128, 64, cluster=2, persistent=0, stages=8), [(7, 64, 128 * 19)],
    ),
    "a cluster": (schedule("bf16-u4-bf16", 16, (2, 1), 128, 64, cluster=3, persistent=0), [(13, 200, 128 * 7 + 8)]),
    "slices": (schedule("f16-u4-f16", 8, (1, 1), 128, 64, split=2, vectors=(8, 32, 2)), [(5, 40, 128 * 5)]),
    "columns one by one": (schedule("f16-u4-f16", 8, (1, 1), 128, 64, vectors=(8, 32, 1)), [(5, 37, 400)]),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels(name):
    s, sizes = VARIANTS[name]
    assert parse(spell(s)) == s
    kernels = kernels_of(s, HOPPER)
    for i, (m, n, k) in enumerate(sizes):
        p = posed(s.dtype, m, n, k, s.b.group)
        c, case, w = posed_call(kernels, s, p, i, s.b.group)
        if not grid_cases.same_as_before(c, "cuda"):
            check(case, w, in_shim(c, compiled(kernels, "cuda"), grid_cases.ORDERS[:2])[0])


POSED = (
    (1, 4096, 4096, 128, "bf16-u4-bf16"), (16, 4096, 14336, 128, "bf16-u4-bf16"), (48, 4096, 4096, 32, "f16-u4-f16"),
    (128, 4096, 4096, 64, "bf16-u4-bf16"), (512, 4096, 4096, 128, "f16-u4-f16"),
)  # fmt: skip


@pytest.mark.rest("NVRTC")
@pytest.mark.parametrize("what", POSED, ids=lambda x: f"{x[0]}-{x[3]}")
def test_products_stay_asynchronous(what):
    """No register is spilled, and the assembler finds nothing that makes it wait for each product."""
    m, n, k, group, dtype = what
    found = [s for s in candidates(posed(dtype, m, n, k, group), H100, (8, 32, 8)) if s.program == "wgmma_int4"]
    of_each = {(s.block, s.parallel.split > 1, s.parallel.cluster > 1): s for s in found}
    for s in list(of_each.values())[:: max(1, len(of_each) // 4)]:
        kernel = lower_grid(s, H100.isa(s.isa))[0]
        assert kernel.shared_bytes == shared_bytes(s)
        try:
            made = nvrtc.compile_cuda(cuda.source(kernel), kernel.name, "90a")
        except NoCompilerError as error:
            opencl_cpu.missing(str(error))
        assert not made.spills
        assert "serialized" not in made.log
