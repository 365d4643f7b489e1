"""Kernels for CUDA wait for the grid before theirs before they access memory, in their texts and in machine code."""

from __future__ import annotations

import re
from dataclasses import replace

import disassembly
import manifest_devices
import pytest
from opencl_cpu import missing

from portmm.build.nvrtc import compile_cuda, find_nvrtc
from portmm.codegen.cuda import TRIGGER, WAIT, source, waiting
from portmm.codegen.lower import grid_atom, lower_grid
from portmm.errors import NoCompilerError
from portmm.ir.grid_kernel import Argument
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, LetPtr, Move, Scratch
from portmm.ir.thread_nodes import Barrier, Do, Get, Leave, Shared
from portmm.schedule.candidates import candidates
from portmm.schedule.gpu_cost import cost
from portmm.spec.problem import Problem
from portmm.target.target import load_target

FAMILIES = [x for x in manifest_devices.FAMILIES if x.endswith("cuda")]
HINTS = re.compile(r"tma_prefetch\(&\w+_map\);")
"""Calls that neither read nor write what they name."""
POINTER = re.compile(r"[\w ]+\*(?:const )?(\w+) = (?:\([\w ]+\*\))?\(?\w+(?: \+ (?:(?!\*\(|\[).)*)?;")
"""A declaration of a pointer, by an address and an offset that reads nothing."""
MEMORY = ("LDG", "LD", "STG", "ST", "LDGSTS", "UTMALDG", "UTMASTG", "ATOM", "ATOMG", "RED", "REDG")
"""Kinds of machine instructions that access global memory."""


def early(text):
    """Lines that access global memory, or end a block, before the wait; or that not all threads wait."""
    head, _, body = text.partition('extern "C" __global__')[2].partition(") {\n")
    outside = re.findall(r"(?:\*(?:__restrict__ )?|TensorMap )(\w+)(?:,|$)", head, re.MULTILINE)
    body = re.sub(r"Idx\.\w", "Idx", body.partition("\n}\n")[0])
    before, found, after = body.partition(f"\n  {WAIT}();\n  {TRIGGER}();\n")
    if not found or WAIT in before + after or TRIGGER in before + after:
        return [f"no {WAIT} of all threads"]
    wrong = []
    for line in before.splitlines():
        if "return" in line:
            wrong.append(line)
        if not any(re.search(rf"\b{x}\b", line) for x in outside) or HINTS.fullmatch(line.strip()):
            continue
        pointer = POINTER.fullmatch(line.strip())
        if pointer:
            outside.append(pointer[1])
        else:
            wrong.append(line)
    return wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_all_kinds_wait_first(family):
    texts = [
        'extern "C" __global__' + part
        for case in manifest_devices.cases(family)
        for part in case.body.split('extern "C" __global__')[1:]
    ]
    assert len(texts) > 20
    found = {x: early(x) for x in texts if WAIT in x or TRIGGER in x}
    assert not [x for x in found.items() if x[1]][:1]


def test_persistent_blocks_do_not_overlap():
    isa, target = load_target("h200").isa("wgmma"), load_target("h200")
    every = [x for x in candidates(Problem(64, 4096, 4096, "bf16", b="col"), target, (8, 8, 8)) if x.isa == "wgmma"]
    assert {bool(x.parallel.persistent) for x in every} == {False, True}
    for s in every:
        assert (WAIT in source(lower_grid(s, isa)[0])) == (not s.parallel.persistent)


def test_the_search_finds_accesses():
    text = 'extern "C" __global__ void f(\n    const float *a,\n    const __grid_constant__ TensorMap b_map) {\n'
    wait = f"  {WAIT}();\n  {TRIGGER}();\n"
    assert not early(f"{text}  const float *x = a + n * 4;\n  tma_prefetch(&b_map);\n{wait}  y = *x;\n}}")
    for line in ("y = *x;", "f(x);", "y = a[1];", "tma_load(t, &b_map, full, 0, 0, 0);", "if (n) return;"):
        assert early(f"{text}  const float *x = a + n * 4;\n  {line}\n{wait}}}") == [f"  {line}"]
    assert early(f"{text}  if (n) {{\n  {wait}  }}\n}}")
    assert early(f"{text}}}")


@pytest.mark.parametrize(
    "access",
    [
        Move(Ptr("s"), Ptr("x")), Leave(var("n")), Do("tma_load", (Ptr("tile"), Ptr("b_map"))),
        Get("y", "next_tile", (Ptr("c"),)), If(var("n"), (Move(Ptr("x"), Ptr("s")),)),
        For("i", const(0), var("n"), const(1), (Do("f", (Ptr("x"),)),)),
    ],
)  # fmt: skip
def test_the_wait_is_before_the_first_statement_that_may_access_memory(access):
    isa = load_target("h200").isa("wgmma")
    s = next(x for x in candidates(Problem(64, 64, 64, "bf16"), load_target("h200"), (8, 8, 8)) if x.isa == "wgmma")
    kernel = lower_grid(s, isa)[0]
    before = (
        Shared("tile", 8, "f32"), Scratch("s", 1, "f32"), Let("m1", var("m") + 1), LetPtr("x", Ptr("c"), "bf16"),
        If(var("thread").eq(0), (Do("tma_prefetch", (Ptr("b_map"),)), Do("mbarrier_init", (Ptr("tile"), const(1))))),
        Barrier(),
    )  # fmt: skip
    arguments = Argument("n", "int"), Argument("c", "pointer", "bf16"), Argument("b_map", "map")
    body = waiting(replace(kernel, arguments=arguments, body=(*before, access, *before), overlaps=True)).body
    assert body == (*before, Do(WAIT), Do(TRIGGER), access, *before)


@pytest.mark.rest("NVIDIA's disassembler")
@pytest.mark.parametrize(
    ("chip", "p", "vectors"),
    [
        ("h200", Problem(4, 4096, 4096, "bf16", b="col"), (8, 8, 2)),
        ("h200", Problem(256, 4096, 4096, "bf16", b="col"), (8, 8, 2)),
        ("h200", Problem(1, 4096, 4096, "f32"), (4, 4, 4)),
        ("rtx_pro_6000", Problem(64, 1024, 1024, "f16", b="col"), (8, 8, 8)),
    ],
)
def test_compilers_move_no_access_before_the_wait(chip, p, vectors):
    """Memory that is only read may be read at any time, as far as a compiler knows."""
    disassembly.required()
    try:
        find_nvrtc()
    except NoCompilerError as error:
        missing(str(error))
    target = load_target(chip)
    every = [(s, grid_atom(target.isa(s.isa), s)) for s in candidates(p, target, vectors)]
    kinds = {}
    for s, _ in sorted(every, key=lambda x: cost(p, *x, target).seconds):
        kinds.setdefault((s.program, s.isa, s.parallel.split > 1, s.parallel.cluster > 1), s)
    checked = set()
    for s in kinds.values():
        for kernel in lower_grid(s, target.isa(s.isa)):
            made = compile_cuda(source(kernel), kernel.name, target.device.architecture)
            names = [x.partition(".")[0] for x in disassembly.code_of(made.code).names]
            assert (names.count("ACQBULK"), names.count("PREEXIT")) == (kernel.overlaps, kernel.overlaps), s
            if kernel.overlaps:
                assert not set(names[: names.index("ACQBULK")]) & set(MEMORY), s
                checked.add(kernel.name)
    assert checked


def test_older_devices_have_no_such_instruction():
    try:
        find_nvrtc()
    except NoCompilerError as error:
        missing(str(error))
    target, p = load_target("a100"), Problem(64, 1024, 1024, "f16", b="col")
    s = candidates(p, target, (8, 8, 8))[0]
    kernel = lower_grid(s, target.isa(s.isa))[0]
    made = compile_cuda(source(kernel), kernel.name, target.device.architecture)
    disassembly.required()
    assert disassembly.code_of(made.code).count("ACQBULK", "PREEXIT") == 0
