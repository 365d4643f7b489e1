"""Hosts recorded elsewhere are recognised, and this one names only what it can run."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from places import HOSTS, MACHINES
from recorded_hosts import recorded

from portmm.errors import TargetError
from portmm.host import chip_match, detect
from portmm.host import host_probe as snapshot_module
from portmm.host.features import UNLISTED
from portmm.host.host_probe import cgroup_folders, parse_list
from portmm.target import target

pytestmark = pytest.mark.calls

RECORDED = sorted(HOSTS.glob("*.json"))
TINY = str(MACHINES / "tiny.toml")
X86 = platform.machine() == "x86_64"


@pytest.fixture
def elsewhere(monkeypatch):
    """Pretend to be a recorded host."""

    def pretend(name: str) -> None:
        shot, _ = recorded(HOSTS / f"{name}.json")
        monkeypatch.setattr(detect, "snapshot", lambda: shot)
        detect.host.cache_clear()
        detect.host_features.cache_clear()

    yield pretend
    detect.host.cache_clear()
    detect.host_features.cache_clear()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_host(path: Path) -> None:
    shot, expect = recorded(path)
    found = detect.identify(shot)
    assert found.name == expect["name"]
    assert [isa.name for isa in found.isas] == expect["isas"]
    assert found.cores == expect["cores"]
    assert {level.name: level.bytes for level in found.levels} == expect["levels"]
    if "shared" in expect:
        assert [level.name for level in found.levels if level.shared] == expect["shared"]
    assert all(level.line and level.ways for level in found.levels)
    assert set(found.rates) <= {atom.name for isa in found.isas for atom in isa.atoms}


def test_this_host_is_what_it_says() -> None:
    here = detect.host()
    assert here is detect.host()
    assert here.isas[-1].name == "scalar"
    assert not [isa.name for isa in here.isas if detect.missing(isa)]
    assert 1 <= here.cores <= len(os.sched_getaffinity(0))
    assert here.level("L1") is not None


@pytest.mark.skipif(not X86, reason="cpuid is an x86 instruction")
def test_cpuid_and_the_kernel_agree() -> None:
    shot = detect.snapshot()
    if not (shot.cpuid and shot.cpuinfo):
        pytest.skip("this host hides one of the two")
    assert detect.features(replace(shot, cpuinfo="")) - UNLISTED <= detect.features(replace(shot, cpuid={}))
    assert chip_match.signature(shot) == chip_match.signature(replace(shot, cpuid={}))


def test_ranges_of_processors() -> None:
    assert parse_list("0-2,8") == {0, 1, 2, 8}
    assert parse_list("") == set()


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("0::/a/b", "/sys/fs/cgroup/a/b"),
        ("0::/", "/sys/fs/cgroup"),
        ("0::/../outside", "/sys/fs/cgroup"),
        ("3:cpuset:/x\n4:cpu,cpuacct:/y", "/sys/fs/cgroup/cpu/y"),
    ],
)
def test_cgroup_folders(text: str, first: str) -> None:
    assert next(cgroup_folders(text)) == first


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "5:cpu"])
def test_cgroup_text_of_any_shape_is_survived(text: str) -> None:
    assert all(folder.startswith("/sys/fs/cgroup") for folder in cgroup_folders(text))


@pytest.mark.parametrize("quota", ["max 100000", "-1 100000", "100000 0", "junk", ""])
def test_no_quota_means_all_cores(quota: str) -> None:
    files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": quota}
    assert detect.identify(detect.Snapshot("x86_64", "", files, (0, 1, 2))).cores == 3


def test_an_unknown_architecture_gets_plain_c() -> None:
    found = detect.identify(detect.Snapshot("riscv64", "", {}, (0,)))
    assert (found.arch, [isa.name for isa in found.isas]) == ("riscv64", ["scalar"])


def test_nothing_asked_for_is_this_host() -> None:
    assert detect.resolve(None) is detect.host()
    assert detect.resolve("") is detect.host()


def test_an_isa_limits_this_host(elsewhere) -> None:
    elsewhere("sapphire_rapids_quota")
    limited = detect.resolve("avx2")
    assert (limited.name, [isa.name for isa in limited.isas]) == ("sapphire_rapids", ["avx2", "sse2", "scalar"])
    assert [isa.name for isa in detect.resolve("scalar").isas] == ["scalar"]


def test_a_forced_chip_keeps_its_facts_and_the_cores_of_this_host(elsewhere) -> None:
    elsewhere("sapphire_rapids_quota")
    forced = detect.resolve("cascade-lake")
    assert forced.levels == target.load_target("cascade_lake").levels
    assert forced.rates == target.load_target("cascade_lake").rates
    assert forced.cores == detect.host().cores


def test_a_file_is_a_target(elsewhere) -> None:
    elsewhere("hidden_everything")
    forced = detect.resolve(TINY)
    assert (forced.name, forced.cores) == ("tiny", 1)


@pytest.mark.parametrize("name", ["avx512", "skylake-sp", "zen4"])
def test_missing_features_are_named(elsewhere, name: str) -> None:
    elsewhere("haswell_quota_v1")
    with pytest.raises(TargetError, match=r"avx512f.*avx512dq.*it runs avx2, sse2, scalar"):
        detect.resolve(name)


def test_the_vector_length_is_a_feature(elsewhere) -> None:
    elsewhere("graviton3_short_vectors")
    with pytest.raises(TargetError, match="sve_vl256"):
        detect.resolve("sve256")
    assert [isa.name for isa in detect.resolve("sve128").isas] == ["sve128", "scalar"]


def test_another_architecture_is_refused(elsewhere) -> None:
    elsewhere("graviton2")
    with pytest.raises(TargetError, match="x86_64"):
        detect.resolve("zen4")
    with pytest.raises(TargetError, match="x86_64"):
        detect.resolve("avx2")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(TargetError, match=r"'pentium'; `portmm targets` lists chips"):
        detect.resolve("pentium")
    with pytest.raises(TargetError, match=r"'zen33'; did you mean zen3 or zen"):
        detect.resolve("zen33")


@pytest.fixture
def package(monkeypatch):
    """Replace py-cpuinfo by facts of one's choice; None for a package that fails."""

    def install(facts: dict | None) -> None:
        module = type(sys)("cpuinfo")
        module.get_cpu_info = (lambda: facts) if facts is not None else (lambda: 1 / 0)
        monkeypatch.setitem(sys.modules, "cpuinfo", module)

    snapshot_module.substitute_cpuinfo.cache_clear()
    yield install
    snapshot_module.substitute_cpuinfo.cache_clear()


def agreeing() -> dict:
    """Facts of py-cpuinfo that agree with this host."""
    shot = detect.snapshot()
    name = snapshot_module.processors(shot.cpuinfo)[0].get("model name", "")
    vendor = chip_match.signature(shot)[0] if X86 else ""
    return {"vendor_id_raw": vendor, "brand_raw": name, "flags": sorted(detect.host_features())}


def test_cross_check_agrees_with_this_host(package) -> None:
    package(agreeing())
    assert detect.cross_check() == []


def test_cross_check_ignores_caches(package) -> None:
    """py-cpuinfo takes the "cache size" of /proc/cpuinfo, on AMD the L2 of a core, for an L3."""
    package(agreeing() | {"l1_data_cache_size": 1, "l2_cache_size": 3, "l3_cache_size": 5})
    assert detect.cross_check() == []


@pytest.mark.skipif(not X86, reason="only x86 has a vendor and a name in /proc/cpuinfo")
@pytest.mark.parametrize(
    ("fact", "text"),
    [
        ({"vendor_id_raw": "SomebodyElse"}, "py-cpuinfo reports 'SomebodyElse'"),
        ({"brand_raw": "Some Processor"}, "py-cpuinfo reports 'Some Processor'"),
        ({"flags": ["fpu"]}, "sse2 is used, but py-cpuinfo does not report sse2"),
    ],
)
def test_cross_check_compares_vendor_name_and_flags(package, fact: dict, text: str) -> None:
    package(agreeing() | fact)
    differences = detect.cross_check()
    assert any(text in line for line in differences)
    assert len(differences) == 1 or "flags" in fact


def test_cross_check_survives_missing_facts(package) -> None:
    package({})
    assert detect.cross_check() == []


@pytest.mark.skipif(not X86, reason="features of Arm come from the auxiliary vector")
def test_py_cpuinfo_replaces_proc_cpuinfo(package, monkeypatch) -> None:
    """With the flags that it reads by cpuid, which it spells in its own way."""
    package(
        {
            "vendor_id_raw": "SomeVendor",
            "brand_raw": "Some Processor",
            "family": 6,
            "model": 0,
            "flags": ["sse2", "avx512vbmi2", "avx512f"],
        }
    )
    monkeypatch.setattr(snapshot_module, "CPUINFO", "/nosuch/cpuinfo")
    monkeypatch.setattr(snapshot_module, "_cpuid", lambda: ({"7.0": (0, 0, 0, 0)}, 7))
    shot = detect.snapshot()
    fields = snapshot_module.processors(shot.cpuinfo)[0]
    assert fields == {
        "vendor_id": "SomeVendor",
        "cpu family": "6",
        "model": "0",
        "model name": "Some Processor",
        "flags": "avx512_vbmi2 avx512f sse2",
    }
    assert "avx512_vbmi2" in detect.features(shot)
    assert "avx512f" not in detect.features(shot), "cpuid does not confirm it"


@pytest.mark.skipif(not X86, reason="features of Arm come from the auxiliary vector")
def test_flags_of_py_cpuinfo_need_xcr0(package, monkeypatch) -> None:
    package({"vendor_id_raw": "SomeVendor", "flags": ["sse2", "avx2", "fma", "f16c"]})
    monkeypatch.setattr(snapshot_module, "CPUINFO", "/nosuch/cpuinfo")
    monkeypatch.setattr(snapshot_module, "_cpuid", lambda: ({}, 0))
    shot = detect.snapshot()
    assert "SomeVendor" in shot.cpuinfo
    assert "flags" not in shot.cpuinfo
    assert [isa.name for isa in detect.identify(shot).isas] == ["sse2", "scalar"]


def test_a_host_without_proc_cpuinfo_and_py_cpuinfo_is_detected(package, monkeypatch) -> None:
    package(None)
    monkeypatch.setattr(snapshot_module, "CPUINFO", "/nosuch/cpuinfo")
    shot = detect.snapshot()
    assert shot.cpuinfo == ""
    assert detect.identify(shot).isas


@pytest.mark.skipif(not X86, reason="features of Arm come from the auxiliary vector")
def test_py_cpuinfo_itself_replaces_proc_cpuinfo(monkeypatch) -> None:
    pytest.importorskip("cpuinfo")
    monkeypatch.setattr(snapshot_module, "CPUINFO", "/nosuch/cpuinfo")
    snapshot_module.substitute_cpuinfo.cache_clear()
    substitute = detect.identify(detect.snapshot())
    assert substitute.name == detect.host().name
    assert {isa.name for isa in substitute.isas} <= {isa.name for isa in detect.host().isas}
    assert substitute.isas[0].vector_bytes == detect.host().isas[0].vector_bytes
    snapshot_module.substitute_cpuinfo.cache_clear()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="py-cpuinfo is needed without /proc/cpuinfo")
def test_a_call_does_not_load_py_cpuinfo() -> None:
    code = (
        "import sys, numpy, portmm\n"
        "a = numpy.ones((8, 8), numpy.float32)\n"
        "portmm.matmul(a, a)\n"
        "from portmm.host import detect\n"
        "detect.host()\n"
        "assert 'cpuinfo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.emulated
@pytest.mark.skipif(not X86, reason="emulates lesser machines of the host's own architecture")
@pytest.mark.parametrize(("cpu", "best"), [("Nehalem", "sse2"), ("Haswell", "avx2")])
def test_a_lesser_machine_is_seen_through_the_kernels_flags(cpu: str, best: str) -> None:
    code = "from portmm.host import detect; print(detect.host().isas[0].name)"
    emulator = shutil.which("qemu-x86_64")
    if not emulator:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("qemu-x86_64 is not installed")
    command = [emulator, "-cpu", cpu, sys.executable, "-c", code]
    # NumPy's OpenBLAS asks the emulated cpuid itself and may pick what the model lacks.
    environment = {**os.environ, "OPENBLAS_CORETYPE": cpu}
    environment.pop("TESTS_HOST", None)  # the emulator alone decides what is there
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [best]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_no_host_is_taken_for_a_device(path: Path) -> None:
    found = detect.identify(recorded(path)[0])
    assert found.device is None
    assert not [isa.name for isa in found.isas if isa.arch == "device"]


@pytest.mark.parametrize("name", ["h200", "simt", "opencl_cpu"])
def test_a_device_is_no_target_of_this_host(name: str) -> None:
    with pytest.raises(TargetError, match="device"):
        detect.resolve(name)
