"""Tiles of AMX are used only where the processor, its state and Linux allow them, and asking ends no process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from places import HOSTS
from recorded_hosts import recorded

from portmm.host import amx_permission, detect
from portmm.host import host_probe as snapshot_module

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.calls

X86 = platform.machine() == "x86_64"


def with_tiles(shot: detect.Snapshot, *, tiles: bool = True, xcr0: int = 0x600E7) -> detect.Snapshot:
    """A recorded host whose cpuinfo and cpuid say that it has AMX."""
    cpuid = {"7.0": (0, 0xFFFFFFFF, 0, 1 << 22 | 1 << 24 | 1 << 25), "1.0": (0, 0, 0xFFFFFFFF, 0xFFFFFFFF)}
    cpuinfo = shot.cpuinfo.replace("avx512_vnni", "avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16")
    return replace(shot, cpuinfo=cpuinfo, cpuid=cpuid, xcr0=xcr0, tiles=tiles)


@pytest.mark.parametrize(
    ("more", "usable"),
    [({}, True), ({"tiles": False}, False), ({"xcr0": 0xE7}, False), ({"xcr0": 0x200E7}, False)],
)
def test_tiles_need_leave_and_state(more: dict, *, usable: bool) -> None:
    shot, _ = recorded(HOSTS / "sapphire_rapids_quota.json")
    found = detect.features(with_tiles(shot, **more))
    assert ("amx_int8" in found) == usable
    spoken = replace(with_tiles(shot, **more), cpuid={}, xcr0=0)
    assert ("amx_tile" in detect.features(spoken)) == more.get("tiles", True)
    isas = [isa.name for isa in detect.identify(spoken).isas]
    assert ("amx_bf16" in isas) == ("amx_int8" in isas) == more.get("tiles", True)


def test_a_chip_that_nobody_has_described_has_tiles() -> None:
    """Each extension comes before what it adds to, and after nothing that it is better than."""
    shot, _ = recorded(HOSTS / "sapphire_rapids_quota.json")
    named = replace(with_tiles(shot), cpuid={}, xcr0=0)
    found = detect.identify(replace(named, cpuinfo=named.cpuinfo.replace("GenuineIntel", "SomebodyElse")))
    order = [isa.name for isa in found.isas]
    assert found.name.startswith("x86_64")
    for isa in found.isas:
        assert [order.index(x.name) for x in isa.below] == sorted(order.index(x.name) for x in isa.below)
        assert all(order.index(isa.name) < order.index(x.name) for x in isa.below)
    assert {"amx_int8", "amx_bf16", "avx512vnni", "avx512bf16"} <= set(order[: order.index("avx512")])


def test_leave_is_asked_for_only_where_tiles_are(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(amx_permission, "tiles", lambda: asked.append(1) or True)
    monkeypatch.setattr(snapshot_module, "first_processor", lambda: "flags : avx512f amx_bf16")
    assert not snapshot_module.snapshot().tiles
    assert not asked
    monkeypatch.setattr(snapshot_module, "first_processor", lambda: "flags : avx512f amx_tile")
    assert snapshot_module.snapshot().tiles == X86 == bool(asked)


@pytest.mark.skipif(not X86, reason="asks for state of x86")
@pytest.mark.parametrize("trial", ["raise SystemExit(0)", "raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)"])
def test_a_trial_may_end_in_any_way_and_is_made_once(monkeypatch, tmp_path: Path, trial: str) -> None:
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path))
    monkeypatch.setattr(amx_permission, "_TRIAL", trial)
    monkeypatch.setattr(amx_permission, "_child_succeeds", lambda: None)
    monkeypatch.setattr(amx_permission.atexit, "register", lambda function, *words: function(*words))
    assert amx_permission._trial_succeeds([]) == ("(0)" in trial)
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_more: pytest.fail("tried again"))
    assert amx_permission._trial_succeeds(["TracerPid:\t9"]) == ("(0)" in trial)


@pytest.mark.skipif(not X86, reason="asks for state of x86")
@pytest.mark.parametrize(
    ("lines", "tried"),
    [
        (["TracerPid:\t0", "NoNewPrivs:\t0", "Seccomp:\t0", "Seccomp_filters:\t0"], False),
        (["TracerPid:\t0", "NoNewPrivs:\t1", "Seccomp:\t2", "Seccomp_filters:\t1"], True),
        (["TracerPid:\t7", "Seccomp:\t0"], True),
        (["TracerPid:\t0"], True),
        ([], True),
    ],
)
def test_tiles_are_tried_first_where_a_system_call_may_kill(monkeypatch, lines: list[str], tried: bool) -> None:
    asked = []
    monkeypatch.setattr(amx_permission, "_restrictions", lambda: lines)
    monkeypatch.setattr(amx_permission, "_trial_succeeds", lambda _: bool(asked.append(1)))
    amx_permission.tiles.cache_clear()
    found = amx_permission.tiles()
    amx_permission.tiles.cache_clear()
    assert bool(asked) == tried
    assert not (found and tried)


@pytest.mark.skipif(not X86, reason="machine code of x86")
@pytest.mark.parametrize("ended", ["refused", "by a signal", "without a result"])
def test_a_child_of_machine_code_may_end_in_any_way(monkeypatch, ended: str) -> None:
    request, leave = bytes.fromhex("be12000000"), bytes.fromhex("b89e000000 0f05 89c7 85c0 751b")
    instead = {
        "refused": (request, bytes.fromhex("be7f000000")),  # a state that does not exist
        "by a signal": (request, bytes.fromhex("0f0b000000")),  # ud2
        "without a result": (leave, bytes.fromhex("31ff eb24") + bytes(9)),  # exit_group(0)
    }[ended]
    code = amx_permission._CHILD.replace(*instead)
    assert len(code) == len(amx_permission._CHILD)
    assert code != amx_permission._CHILD
    monkeypatch.setattr(amx_permission, "_CHILD", code)
    before = [amx_permission._child_succeeds() for _ in range(2)]
    assert before == [None if ended == "without a result" else False] * 2


@pytest.mark.skipif(not X86, reason="asks for state of x86")
def test_leave_agrees_with_what_this_host_shows(monkeypatch, tmp_path: Path) -> None:
    """The real trial: where the kernel names no AMX, it is refused, and this process lives on."""
    if os.environ.get("TESTS_HOST"):
        pytest.skip("a lesser host hides what Linux grants")
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path))
    amx_permission.tiles.cache_clear()
    found = amx_permission.tiles()
    amx_permission.tiles.cache_clear()
    assert not found or "amx_tile" in detect.snapshot().cpuinfo


FILTERED = """
import ctypes, struct, sys
from portmm.host import amx_permission
action = int(sys.argv[1])
# Classic BPF: the number of the call, and the low half of its first argument: arch_prctl(ARCH_REQ_XCOMP_PERM).
steps = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023), (6, 0, 0, action)]
steps.append((6, 0, 0, 0x7FFF0000))
code = b"".join(struct.pack("<HBBI", *x) for x in steps)
words = ctypes.create_string_buffer(code, len(code))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(words)), 16)
prctl = ctypes.CDLL(None).prctl
prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.addressof(program), 0, 0):
    raise SystemExit("no filter")
print(amx_permission.tiles())
"""


@pytest.mark.skipif(not X86, reason="asks for state of x86")
@pytest.mark.parametrize("action", [0x80000000, 0, 0x30000, 0x50001], ids=["kill", "kill a thread", "trap", "refuse"])
def test_a_filter_that_forbids_tiles_ends_no_process(tmp_path: Path, action: int) -> None:
    environment = os.environ | {"PORTMM_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FILTERED, str(action)], capture_output=True, text=True, check=False, env=environment
    )
    if "no filter" in done.stderr:
        pytest.skip("this process may not install filters")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
