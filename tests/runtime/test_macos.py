"""Code for macOS is made by zig, kernels compute there what they compute here, and hosts with macOS are recognised."""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import macho_image
import pytest
from build_compilers import SOURCE

from portmm.build import compiler, elf
from portmm.build.bundle import open_bundle
from portmm.build.shared_object import build
from portmm.host import macos_probe
from portmm.host.detect import identify
from portmm.host.features import features
from portmm.host.host_probe import Snapshot
from portmm.ops.bundle_check import RAN, check
from portmm.runtime import cpu as cpu_runtime
from portmm.util import system

TOOLS = str(Path(__file__).parents[2] / "tools")
PLATFORM = "aarch64-macos"

needs_zig = pytest.mark.skipif(compiler._ziglang() is None, reason="needs the package ziglang")


@pytest.fixture(scope="module")
def code():
    """A small library for macOS."""
    return build(SOURCE, flags=(), arch=PLATFORM, symbols=("answer",)).code


@needs_zig
def test_a_library_is_looked_at_before_it_is_loaded(code):
    assert elf.fault(code) == elf.fault(code, symbols=("answer",)) == ""
    assert "does not define question" in elf.fault(code, symbols=("answer", "question"))
    assert "machine" in elf.fault(code, machine=183)
    assert all(elf.fault(code[:n]) for n in range(0, len(code), 61))
    rng = random.Random(3)  # noqa: S311
    for _ in range(1000):
        spoilt = bytearray(code)
        for _ in range(rng.randint(1, 8)):
            spoilt[rng.randrange(512 if rng.random() < 0.5 else len(code))] = rng.randrange(256)
        elf.fault(bytes(spoilt), symbols=("answer",))


@needs_zig
@pytest.mark.rest("zig compiles")
def test_the_run_time_is_made_for_macos(monkeypatch):
    """Linux's headers of Python serve, as in tools/build_wheels.py."""
    folder = cpu_runtime.python_headers()
    if folder is None:
        pytest.skip("Python's headers are not installed")
    monkeypatch.delenv("CC_aarch64_macos", raising=False)
    source, flags = cpu_runtime.source(python=True, platform=PLATFORM), cpu_runtime.flags(PLATFORM)
    symbols, interface = (f"PyInit_{cpu_runtime.MODULE}",), cpu_runtime.interface(PLATFORM)
    assert interface == ".cpython-{}{}{}-darwin.so".format(*sys.version_info[:2], sys.abiflags)
    made = build(source, flags=flags, arch=PLATFORM, include=(folder,), symbols=symbols, interface=interface)
    assert "/usr/lib/libSystem.B.dylib" in made.code.decode("latin1")


@needs_zig
@pytest.mark.emulated
@pytest.mark.rest("zig compiles")
def test_kernels_of_a_base_set_compute_products(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import base_products
    import base_set

    monkeypatch.setattr(base_set, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(base_set, "run_time", lambda *_: None)
    monkeypatch.setattr(base_set, "OVER_ROWS", ())
    monkeypatch.setattr(base_set, "add_attention", lambda *_: None)
    for axis, values in (("MS", (1, 64)), ("NS", (63,)), ("NS_OF_WIDE", (63,)), ("KS", (63,))):
        monkeypatch.setattr(base_products, axis, values)
    levels = {"i8mm": base_set.LEVELS[PLATFORM]["i8mm"]}
    kinds = [base_products.Kind("f32"), base_products.Kind("s8-s8-s32", "row", "packed")]
    maker = base_set.make(tmp_path, PLATFORM, "gnu", levels, kinds)
    bundle = open_bundle(tmp_path / f"{PLATFORM}.bundle")
    try:
        macho_image.as_elf(bundle.library.read_bytes(), tmp_path / "linux.so").replace(bundle.library)
    except compiler.NoCompilerError as error:
        pytest.skip(str(error))
    counts = check(bundle)
    if not counts.get(RAN):
        pytest.skip(f"no emulator: {counts}")
    assert counts == {RAN: len(maker.codes)}


def test_platforms_have_names(monkeypatch):
    assert system.of(system.platform())[0] == system.machine()
    assert system.of(PLATFORM) == ("aarch64", system.MACOS)
    assert {system.named(*system.of(x)) for x in (PLATFORM, "x86_64")} == {PLATFORM, "x86_64"}
    assert compiler.variable_of(PLATFORM) == "CC_aarch64_macos"
    assert compiler.zig_target(PLATFORM) == "aarch64-macos.11.0"
    assert system.processors()
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert system.processors()


def test_a_host_with_macos_is_recognised(monkeypatch):
    answers = {"machdep.cpu.brand_string": b"Apple M2 Pro\0", "hw.perflevel0.physicalcpu": b"\6\0\0\0"}
    answers |= dict.fromkeys(macos_probe.FEATURES.values(), b"\1\0\0\0")
    monkeypatch.setattr(macos_probe, "_value", lambda name: answers.get(name, b""))
    shot = Snapshot("aarch64", macos_probe.cpuinfo(), {}, tuple(range(8)))
    assert features(shot) == {*macos_probe.ALWAYS, *macos_probe.FEATURES}
    found = identify(shot)
    assert (found.name, found.cores) == ("apple_m2", 6)
    assert found.isas[0].name == "neon_bfmmla"
    answers.clear()  # macOS before 12
    shot = Snapshot("aarch64", macos_probe.cpuinfo(), {}, (0, 1))
    assert features(shot) == set(macos_probe.ALWAYS)
    assert identify(shot).name == "armv8a"
