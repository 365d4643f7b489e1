"""Descriptions: their schema, and that every row of every atom does what its field says."""

from __future__ import annotations

import copy
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import crossing
import pytest
from places import MACHINES

from portmm.errors import TargetError
from portmm.host import detect
from portmm.spec.dtype import BY_NAME
from portmm.target import target
from portmm.target.reported_device import device_target
from portmm.target.toml_schema import of_length

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

ATOMS = [(isa, x.name) for isa in target.names_of("cpu", "isa") for x in target.load_isa(isa).atoms if x.m == 1]
"""Those of one row; for tiles see test_amx.py, for two rows test_two_rows.py."""
TINY = MACHINES / "tiny.toml"
FLAGS = ["-O2", "-ffp-contract=fast", "-Wall", "-Werror"]

# One page of data ends where an inaccessible page starts, so that a masked
# load or store that touches a lane it should not is a fault, not luck.
DRIVER = """
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>
{preamble}
typedef {t} T;
typedef {u} U;
#define APART __attribute__((noinline)) static
/* The upper half of a unit of two f16. */
static inline __attribute__((unused)) float f16(float x) {{
  union {{ float f; unsigned u; }} v = {{x}};
  v.u = (v.u - 0x38000000) << 3 & 0xffff0000;
  return v.f;
}}
APART void test_zero(T *c) {{ {acc} d; {zero} {store_d} }}
APART void test_mac(const T *pa, const U *pb, T *c) {{
  {a} a; {b} b; {acc} d;
  {load_c} {load_a} {load_b} {mac} {store_d}
}}
{masked}
{reduced}
static char *page(void) {{
  size_t size = (size_t)sysconf(_SC_PAGESIZE);
  char *p = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED || mprotect(p + size, size, PROT_NONE)) _exit(99);
  return p + size;
}}
int main(void) {{
  const int n = {n};
  U *b = (U *)page() - n * {wide}; /* a unit may be wider than a sum */
  T *c = (T *)page() - n, a[{wide}] = {{{a3}}};
  for (int i = 0; i < n; i++) {{ b[i * {wide}] = {bi}; c[i] = 100 * i; }}
  test_mac(a, b, c);
  for (int i = 0; i < n; i++) if (c[i] != 100 * i + 3 * (i + 1)) return 1;
  test_zero(c);
  for (int i = 0; i < n; i++) if (c[i] != 0) return 2;
  {main}
  return 0;
}}
"""
MASKED = """
APART void test_mask(const T *pb, T *pc, int count) {{
  {mask_type} m; {acc} d;
  {mask} {load_mask} {store_mask}
}}
APART void test_load(const T *pb, T *c, int count) {{
  {mask_type} m; {acc} d;
  {mask} {load_mask} {store_d}
}}
"""
MASKED_MAIN = """
  for (int count = 0; count <= n; count++) {
    T *e = (T *)page() - count, *f = (T *)page() - count;
    for (int i = 0; i < count; i++) { e[i] = 7 + i; f[i] = -1; }
    test_mask(e, f, count);
    for (int i = 0; i < count; i++) if (f[i] != 7 + i) return 3;
    for (int i = 0; i < n; i++) c[i] = -5;
    test_mask(b, c, count);
    for (int i = 0; i < n; i++) if (c[i] != (i < count ? b[i] : -5)) return 4;
    test_load(b, c, count);
    for (int i = 0; i < n; i++) if (c[i] != (i < count ? b[i] : 0)) return 5;
  }
"""
REDUCED = "APART T test_reduce(const T *c) {{ {acc} d; T s; {load_c} {reduce} return s; }}"
REDUCED_MAIN = "if (test_reduce(b) != n * (n + 1) / 2) return 6;"


def driver(isa: Isa, atom: Atom) -> str:
    """A C program made of the atom's rows only; exits with 0 if all of them are right."""
    rows = {
        "acc": atom.acc_type,
        "zero": atom.zero.format(d="d"),
        "load_c": atom.load_c.format(d="d", p="c"),
        "store_d": atom.store.format(d="d", p="c"),
        "load_a": atom.load_a.format(d="a", p=f"((const {BY_NAME[atom.left].c} *)pa)"),
        "load_b": atom.load_b.format(d="b", p="pb"),
        "mac": atom.mac.format(d="d", a="a", b="b"),
        "mask_type": atom.mask_type,
        "mask": atom.mask.format(d="m", count="count"),
        "load_mask": atom.load_mask.format(d="d", p="pb", mask="m"),
        "store_mask": atom.store_mask.format(d="d", p="pc", mask="m"),
        "reduce": atom.reduce.format(s="s", d="d"),
    }
    narrow = BY_NAME[atom.right].bytes < BY_NAME[atom.acc].bytes
    masks = atom.mask and not narrow  # else what is loaded is no sum
    return DRIVER.format(
        **rows,
        preamble=isa.preamble,
        t=BY_NAME[atom.acc].c,
        u=BY_NAME[atom.right if narrow else atom.acc].c,
        a=atom.a_type,
        b=atom.b_type,
        n=atom.n,
        wide=max(1, BY_NAME[atom.right].bytes // BY_NAME[atom.acc].bytes),
        masked=MASKED.format(**rows) if masks else "",
        reduced=REDUCED.format(**rows) if atom.reduce else "",
        a3="f16(3)" if atom.a == "f16" else "3",
        bi="f16(i + 1)" if atom.b == "f16" else "i + 1",
        main=(MASKED_MAIN if masks else "") + (REDUCED_MAIN if atom.reduce else ""),
    )


@pytest.mark.thin(2)
@pytest.mark.parametrize("family", ["gcc", "clang"])
@pytest.mark.parametrize(("name", "row"), ATOMS)
def test_rows_do_what_they_say(name: str, row: str, family: str, tmp_path: Path) -> None:
    isa = target.load_isa(name)
    atom = next(x for x in isa.atoms if x.name == row)
    if family == "clang" and not shutil.which("clang"):
        pytest.skip("clang is not installed")
    command = crossing.kernel_compiler(isa, family)
    elsewhere = isa.arch in crossing.EMULATED
    source, program = tmp_path / "atom.c", tmp_path / "atom"
    source.write_text(driver(isa, atom))
    flags = [*FLAGS, *isa.flags, *(["-static"] if elsewhere else [])]
    subprocess.run([*command, *flags, str(source), "-o", str(program)], check=True)
    if elsewhere or set(isa.features) <= detect.host_features():
        emulator = crossing.emulator(isa, libraries=False) if elsewhere else []
        assert subprocess.run([*emulator, str(program)], check=False).returncode == 0


def tiny() -> dict:
    return tomllib.loads(TINY.read_text())


@pytest.mark.parametrize("name", target.names_of("cpu"))
def test_chips_are_well_formed_and_sourced(name: str) -> None:
    chip = target.load_target(name)
    assert chip.name == name
    assert chip.source
    assert chip.match
    assert chip.isas[-1].name == "scalar"
    assert all(level.source for level in chip.levels)
    widest = {isa.atom(dtype).name for isa in chip.isas for dtype in ("f32", "f64") if isa.atom(dtype)}
    assert widest <= set(chip.rates)


@pytest.mark.parametrize("name", target.names_of("device"))
def test_devices_are_well_formed_and_sourced(name: str) -> None:
    chip = target.load_target(name)
    device = chip.device
    assert device is not None
    assert chip.name == name
    assert chip.source
    assert chip.match or name in target.GENERIC_DEVICES
    assert all(m.names or m.capability for m in chip.match)
    assert not any(m.vendor or m.implementer or m.features for m in chip.match)
    assert chip.isas[-1].name == "simt"
    assert all(level.source for level in chip.levels)
    assert "simt_f32" in chip.rates
    assert not chip.cores
    assert (device.language == "cuda") == bool(device.architecture) == (chip.vendor == "NVIDIA")
    assert 0 < device.shared_bytes <= device.processor_shared_bytes
    assert device.block_threads % device.warp == device.threads % device.warp == 0
    assert device.registers % 1024 == 0
    if chip.vendor == "NVIDIA" and chip.match:
        f32 = 2e9 * chip.rates["simt_f32"] * device.processors * chip.frequency_ghz
        assert 8e12 < f32 < 130e12
        assert device.memory_gbs > 250
        assert device.memory_bytes >= 16e9


def test_no_two_devices_have_one_name() -> None:
    words = [w.lower() for name in target.names_of("device") for m in target.load_target(name).match for w in m.names]
    assert len(words) == len(set(words))


REPORTED = [
    ("NVIDIA H200", "9.0", "gpu", "h200"),
    ("NVIDIA H100 80GB HBM3", "9.0", "gpu", "h100"),
    ("NVIDIA GH200 480GB", "9.0", "gpu", "h100"),
    ("Tesla T4", "7.5", "gpu", "t4"),
    ("NVIDIA T400 4GB", "7.5", "gpu", "t4"),
    ("Tesla V100-SXM2-16GB", "7.0", "gpu", "v100"),
    ("NVIDIA A10G", "8.6", "gpu", "a10g"),
    ("NVIDIA L4", "8.9", "gpu", "l4"),
    ("NVIDIA L40S", "8.9", "gpu", "l40s"),
    ("NVIDIA A100-SXM4-40GB", "8.0", "gpu", "a100"),
    ("NVIDIA A100-SXM4-80GB", "8.0", "gpu", "a100_80gb"),
    ("NVIDIA A100 80GB PCIe", "8.0", "gpu", "a100_80gb"),
    ("NVIDIA RTX A1000", "8.6", "gpu", "a10g"),
    ("NVIDIA B200", "10.0", "gpu", "b200"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", "gpu", "rtx_pro_6000"),
    ("NVIDIA H200", "", "gpu", "h200"),
    ("gfx942:sramecc+:xnack-", "", "gpu", "mi300x"),
    ("gfx90a:sramecc+:xnack-", "", "gpu", "mi250"),
    ("gfx1100", "", "gpu", "opencl_gpu"),
    ("Intel(R) Arc(TM) A770 Graphics", "", "gpu", "arc_a770"),
    ("Intel(R) Data Center GPU Max 1550", "", "gpu", "max_1550"),
    ("Intel(R) UHD Graphics 770", "", "gpu", "opencl_gpu"),
    ("Mali-G710 r0p0", "", "gpu", "mali_g710"),
    ("QUALCOMM Adreno(TM) 740", "", "gpu", "adreno_740"),
    ("Intel(R) Xeon(R) Processor", "", "cpu", "opencl_cpu"),
    ("NVIDIA of tomorrow", "8.6", "gpu", "a10g"),
    ("NVIDIA B300 SXM6 AC", "10.3", "gpu", "b200"),
    ("NVIDIA GB10", "12.1", "gpu", "rtx_pro_6000"),
    ("NVIDIA of tomorrow", "99.0", "gpu", "cuda_gpu"),
    ("NVIDIA of tomorrow", "nonsense", "gpu", "cuda_gpu"),
    ("", "", "accelerator", "opencl_gpu"),
]


@pytest.mark.parametrize(("name", "capability", "kind", "chip"), REPORTED)
def test_a_device_is_recognised_as_its_driver_spells_it(name: str, capability: str, kind: str, chip: str) -> None:
    assert device_target(name, capability, kind).name == chip


def test_an_unknown_capability_is_what_is_compiled_for() -> None:
    found = device_target("NVIDIA of tomorrow", "13.3")
    assert found.device is not None
    assert found.device.architecture == "133"
    assert found.isas[0].name == "simt_dot4"
    old = device_target("Tesla P100-PCIE-16GB", "6.0")
    assert [isa.name for isa in old.isas] == ["simt"]


def test_the_kinds_are_all_there_is() -> None:
    for folder in ("isa", "chip"):
        cpus, devices = target.names_of("cpu", folder), target.names_of("device", folder)
        assert not set(cpus) & set(devices)
        assert set(cpus) | set(devices) == set(target.names(folder))
    assert target.described("simt").name == "opencl_gpu"
    assert target.described("simt_dot4").name == "cuda_gpu"
    assert not any(target.load_target(name).device for name in target.names_of("cpu"))


@pytest.mark.parametrize("name", target.names("isa"))
def test_isas_are_well_formed_and_sourced(name: str) -> None:
    isa = target.load_isa(name)
    assert isa.name == name
    assert isa.source
    assert isa.base is None or isa.flags[: len(isa.base.flags)] == isa.base.flags
    for dtype, size in (("f32", 4), ("f64", 8)) if isa.base is None else ():
        atom = isa.atom(dtype)
        assert atom is not None
        assert atom.name == f"{name}_{dtype}"
        assert atom.n == (1 if name in ("scalar", "simt") else isa.vector_bytes // size)
    assert not any("-march=native" in flag or "-mcpu" in flag for flag in isa.flags)


def test_no_two_chips_claim_one_host() -> None:
    claims = [
        (m.vendor, m.family, model, step)
        for name in target.names("chip")
        for m in target.load_target(name).match
        if m.vendor
        for first, last in m.models
        for model in range(first, last + 1)
        for low, high in m.steppings or ((0, 15),)
        for step in range(low, high + 1)
    ]
    claims += [
        (m.implementer, part)
        for name in target.names("chip")
        for m in target.load_target(name).match
        for part in m.parts
    ]
    assert len(claims) == len(set(claims))


def test_a_dash_reads_as_an_underscore() -> None:
    assert target.load_target("Neoverse-N1") is target.load_target("neoverse_n1")


def test_a_file_of_several_lengths_is_an_isa_for_each() -> None:
    assert {"sve128", "sve256", "sve512"} <= set(target.names_of("cpu", "isa"))
    assert "sve" not in target.names("isa")
    for bits in (128, 256, 512):
        isa = target.load_isa(f"sve{bits}")
        assert (isa.title, isa.vector_bytes) == (f"SVE, {bits}-bit vectors", bits // 8)
        lanes = {f"sve{bits}_f32": bits // 32, f"sve{bits}_f64": bits // 64, f"sve{bits}_s32": bits // 32}
        assert {x.name: x.n for x in isa.atoms} == lanes
        assert {x.n for x in (*isa.transfers, *isa.words)} == {bits // 32}
    with pytest.raises(TargetError, match=r"no isa called 'sve1024'; did you mean sve"):
        target.load_isa("sve1024")


def test_an_atom_like_another_has_its_fields() -> None:
    table = tiny()
    rows = table["define"][0]["atom"]
    rows.append({"name": "twin", "like": rows[0]["name"], "latency": 9})
    first, *_, twin = target.parse_target(table, "alike.toml").isas[0].atoms
    assert twin == replace(first, name="twin", latency=9)
    rows[-1]["like"] = "nobody"
    with pytest.raises(TargetError, match=r"alike\.toml.*no atom before twin is called 'nobody'"):
        target.parse_target(table, "alike.toml")


@pytest.mark.parametrize(("value", "found"), [("{VL}/32", 8), ("x{VL}", "x256"), ("0x{VL}/32", "0x256/32"), (7, 7)])
def test_what_depends_on_the_length(value: object, found: object) -> None:
    table = {"isa": {"vl": [256]}, "atom": [{"n": value}]}
    assert of_length(table, 256) == {"isa": {}, "atom": [{"n": found}]}


@pytest.mark.parametrize("name", target.names("isa"))
def test_every_isa_has_a_described_machine(name: str) -> None:
    assert target.described(name).isas[0].name == name


@pytest.mark.parametrize("name", ["zen6", "avx3", "missing.toml", ""])
def test_unknown_descriptions_are_named(name: str) -> None:
    with pytest.raises(TargetError, match=name or "no target"):
        target.described(name)


def test_tiny_is_tiny() -> None:
    chip = target.load_target(str(TINY))
    assert [level.bytes for level in chip.levels] == [512, 2048]
    assert chip.isas[0].registers == 6


WRONG = [
    (("chip", "colour"), "red", "unknown field 'colour'"),
    (("chip", "cores"), "two", "'cores' must be int"),
    (("chip", "cores"), True, "'cores' must be int"),
    (("chip", "arch"), "mips", "arch 'mips' is unknown"),
    (("chip", "isas"), [], "isas is empty"),
    (("chip", "isas"), ["avx3"], "no isa called 'avx3'"),
    (("chip", "isas"), ["tiny_scalar", 3], "no isa called 3"),
    (("chip", "rates"), {"avx3_f32": 1}, "none of its ISAs has"),
    (("chip", "rates"), {"tiny_f32": 0}, "must be positive"),
    (("chip", "rates"), {"tiny_f32": "fast"}, "'rates' must be"),
    (("chip", "level", 0, "bytes"), 0, "bytes must be positive"),
    (("chip", "level", 0, "bytes"), 512.5, "'bytes' must be int"),
    (("chip", "level", 0, "bytes"), 4096, "levels must grow"),
    (("chip", "level", 0, "line"), 48, "no power of two"),
    (("chip", "level", 0, "ways"), 0, "ways must be positive"),
    (("chip", "level", 0), "L1", "expected a table"),
    (("define", 0, "isa", "registers"), 0, "must be positive"),
    (("define", 0, "isa", "arch"), "aarch128", "is unknown"),
    (("define", 0, "atom", 0, "m"), 0, "m must be positive"),
    (("define", 0, "atom", 0, "a"), "f8", "element type 'f8'"),
    (("define", 0, "atom", 0, "mac"), "{d} += {x};", "mentions"),
    (("define", 0, "atom", 0, "zero"), "{d} = {0};", "mentions"),
    (("define", 0, "atom", 0, "zero"), "{d} = {;", "braces"),
    (("define", 0, "atom", 0, "mask_type"), "int", "come together"),
]


WRONG_DEVICE = [
    ("language", "metal", "language 'metal' is unknown"),
    ("architecture", "90a", "only a device for CUDA"),
    ("processors", 0, "processors must be positive"),
    ("processors", "many", "'processors' must be int"),
    ("warp", 48, "no multiple of warp 48"),
    ("threads", 512, "block_threads 1024 is more than threads 512"),
    ("threads", -1, "must not be negative"),
    ("shared_bytes", 70000, "more than processor_shared_bytes"),
    ("thread_registers", 200000, "more than registers"),
    ("colour", "red", "unknown field 'colour'"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_DEVICE)
def test_a_wrong_device_is_refused(name: str, value: object, message: str) -> None:
    table = tomllib.loads((Path(target._root()) / "chip" / "mi300x.toml").read_text())
    table["chip"]["device"][name] = value
    with pytest.raises(TargetError, match=message):
        target.parse_target(table, "wrong.toml")


def test_a_device_and_its_table_come_together() -> None:
    table = tomllib.loads((Path(target._root()) / "chip" / "mi300x.toml").read_text())
    del table["chip"]["device"]
    with pytest.raises(TargetError, match=r"chip\.device"):
        target.parse_target(table, "wrong.toml")
    table = tiny()
    table["chip"]["device"] = {"language": "opencl", "processors": 1, "warp": 1, "block_threads": 1, "shared_bytes": 1}
    with pytest.raises(TargetError, match=r"chip\.device"):
        target.parse_target(table, "wrong.toml")


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_a_wrong_description_is_refused(path: tuple, value: object, message: str) -> None:
    table = copy.deepcopy(tiny())
    *outer, last = path
    place = table
    for key in outer:
        place = place[key]
    place[last] = value
    with pytest.raises(TargetError, match=message):
        target.parse_target(table, "wrong.toml")


@pytest.mark.parametrize("path", [("chip", "name"), ("define", 0, "atom", 0, "mac"), ("define", 0, "isa"), ("chip",)])
def test_an_incomplete_description_is_refused(path: tuple) -> None:
    table = copy.deepcopy(tiny())
    *outer, last = path
    place = table
    for key in outer:
        place = place[key]
    del place[last]
    with pytest.raises(TargetError, match=r"wrong\.toml"):
        target.parse_target(table, "wrong.toml")


def test_text_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[chip")
    with pytest.raises(TargetError, match=r"broken\.toml"):
        target.load_target(str(path))


def test_cloud_families_are_sourced_and_unique() -> None:
    families = target.clouds()
    assert all(family.source and family.chips for family in families)
    assert len({(family.cloud, family.name) for family in families}) == len(families)
    assert {"c6g", "t2a", "Dpsv5"} <= {x.name for x in target.clouds() if "neoverse_n1" in x.chips}
