"""Bundles: their bytes, what is refused, and processes that have nothing else."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from places import HOSTS

import portmm as pm
from portmm.build import kernel_store, stored_objects
from portmm.build.bundle import HEADER, check, key_of, open_bundle, packed
from portmm.build.cache import digest
from portmm.build.compiler import find_compiler
from portmm.build.stored_objects import SOURCE
from portmm.dispatch import config, stored_kernels
from portmm.dispatch.stored_kernels import CODE, THREADS, count
from portmm.errors import BundleError, NoCompilerError, PortmmError
from portmm.host import chip_match, detect
from portmm.host.detect import host
from portmm.ops import bundle_attention, bundle_build, bundle_shapes
from portmm.runtime.cpu import processor_words, runtime
from portmm.target.target import load_target
from portmm.version import VERSION

SMALL = {"one": (b"\x7fELF" + bytes(4000), ("x", "y")), "two": (None, ("text", "")), "three": (b"code" * 9, ())}

CALLS = """
import json, sys, warnings
import numpy as np
sys.modules["ziglang"] = None
from portmm.runtime import cpu
cpu.python_headers = lambda: None
import portmm as pm
if len(sys.argv) > 1:
    pm.use_bundle(sys.argv[1])
r = np.random.default_rng(0)
wrong = []
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    for m in (1, 7, 40, 63):
        a, b = r.integers(-3, 3, (m, 96)).astype(np.float32), r.integers(-3, 3, (96, 80)).astype(np.float32)
        wrong.append(not np.array_equal(pm.matmul(a, pm.pack(b)), a @ b))
print(json.dumps([wrong, [str(x.message) for x in heard], "portmm.dispatch.cpu_routes" in sys.modules]))
"""


def test_a_machine_may_have_instruction_sets_that_no_kernel_uses(tmp_path):
    chip = load_target("zen4")
    lesser = replace(chip, isas=tuple(x for x in chip.isas if x.name != "avx512bf16"))
    other = replace(load_target("haswell"), name="other")
    served = []
    for i, used in enumerate(({"avx2"}, {"avx2", "avx512bf16"})):
        maker = bundle_build.Maker()
        for x in (chip, load_target("haswell")):
            maker.add_machine(x)
        maker.isas |= used
        path = tmp_path / f"{i}.bundle"
        path.write_bytes(maker.pack((1,), lambda *_: None))
        served += [stored_kernels.machine_of(open_bundle(path), x) for x in (chip, lesser, other)]
    assert served == ["zen4", "zen4", "haswell", "zen4", "haswell", "haswell"]


def test_programs_are_planned_for_the_machine_of_a_bundle(tmp_path):
    maker, least = bundle_build.Maker(), load_target("x86_64_v2" if host().arch == "x86_64" else "armv8a")
    maker.add_machine(least)
    path = tmp_path / "some.bundle"
    path.write_bytes(maker.pack((1,), lambda *_: None))
    here = config.target()
    try:
        pm.use_bundle(path)
        assert config.target().name == least.name
        assert {x.name for x in config.target().isas} <= {x.name for x in here.isas}
        with config.described(here):
            assert config.target() is here
    finally:
        kernel_store.forget()
        pm.forget()
    assert config.target().name == here.name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A bundle for this machine, and what it has."""
    try:
        find_compiler()
    except NoCompilerError:
        pytest.skip("no compiler")
    shapes = bundle_shapes.shapes_of("1-64 80 96 f32 packed\n")
    data, built = bundle_build.make(shapes, [host()], counts=(1, 2))
    path = tmp_path_factory.mktemp("bundle") / "some.bundle"
    path.write_bytes(data)
    return path, built, shapes


@pytest.fixture(autouse=True)
def _only_here():
    yield
    kernel_store.forget()


def run(tmp_path, *arguments, calls=CALLS, **environment):
    (tmp_path / "empty").mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if k != "CC"}
    changed = {"PATH": str(tmp_path / "empty"), "PORTMM_CACHE": str(tmp_path / "cache"), "PORTMM_BASE": "off"}
    return subprocess.run(
        [sys.executable, "-c", calls, *arguments], capture_output=True, text=True, check=False,
        env=kept | changed | environment,
    )  # fmt: skip


def test_bytes_are_reproducible_and_checked(tmp_path):
    data = packed(SMALL)
    assert packed(dict(reversed(SMALL.items()))) == data
    path = tmp_path / "small.bundle"
    path.write_bytes(data)
    bundle = open_bundle(path)
    assert bundle.answer("two") == ["text", ""]
    assert bundle.answer("four") is None
    number, *fields = bundle.answer("one")
    assert (bundle.load(int(number))[1], tuple(fields)) == SMALL["one"]
    check(bundle)
    with pytest.raises(BundleError, match="no number 2"):
        bundle.load(2)


def test_phrases_are_abbreviated(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    import base_set

    answers = {f"q{i}": (None, (f"gemm:avx2:{i},over=tiles,lanes=0", f"+ * {i} / m", "")) for i in range(90)}
    answers |= {"none": (None, ()), "code": (b"code", ("over=tiles,lanes=0",))}
    texts = ["\t".join(fields) for _, fields in answers.values()]
    phrases = base_set.phrases(texts)
    assert phrases == base_set.phrases(texts)
    assert any("over=tiles,lanes=0" in x for x in phrases)
    data = packed(answers, phrases)
    assert len(data) < len(packed(answers)) - 1000
    path = tmp_path / "short.bundle"
    path.write_bytes(data)
    bundle = open_bundle(path)
    assert {x: tuple(bundle.answer(x)) for x in answers} == {
        x: fields if code is None else ("0", *fields) for x, (code, fields) in answers.items()
    } | {"none": ("",)}
    check(bundle)
    assert base_set.joined(["a", "a", "a", "b", "a", "b"], ("a", "b")) == ["a", "a", "ab", "ab"]
    with pytest.raises(ValueError, match="ASCII"):
        packed({"one": (None, ("\x80",))}, phrases)


def test_questions_with_one_key_are_refused(monkeypatch):
    texts = ["a", "a\0", "\0a", *(f"code {i}" for i in range(300))]
    assert len({key_of(x) for x in texts}) == len(texts)
    monkeypatch.setattr("portmm.build.bundle.MODULUS", 251)
    with pytest.raises(ValueError, match="one key"):
        packed(dict.fromkeys(texts, (None, ())))


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"x", "no bundle"),
        (8, b"\x09", "make it again"),
        (12, b"\x09", "make it again"),
        (16, b"\x02", "another checksum"),  # rows
        (24, b"\x0c", "another checksum"),  # where the text begins
        (HEADER.size + 3, b"\xff", "another checksum"),
        (-2, b"\xff\xff", "damaged"),
        (slice(50, None), b"", "no bundle"),
        (slice(HEADER.size + 9, None), b"", "damaged"),
    ],
)
def test_damage_is_noticed(tmp_path, at, value, words):
    data = bytearray(packed(SMALL))
    data[at if isinstance(at, slice) else slice(at, at + len(value) or None)] = value
    path = tmp_path / "damaged.bundle"
    path.write_bytes(data)
    with pytest.raises(BundleError, match=words):
        check(open_bundle(path))


def test_contents_with_a_checksum_of_their_own_are_refused(tmp_path):
    """A header with damaged answers is refused by the same error where its checksum agrees."""
    texts = (b"\xff\xfe", b"many", b"", b"0\tx", b"x\t\t\t\t\t1", b"0\tf\t0\t4\t/ m - n 1\t1", b"-1", b"9")
    raised = []
    for i, text in enumerate(texts):
        data = bytearray(packed({x: (b"code", ("#" * len(text),)) for x in (THREADS, CODE + "s", SOURCE + "n")}))
        _, _, _, rows, objects, start, code, *_ = HEADER.unpack_from(data)
        data[start:code] = text.ljust(code - start, b"\t")
        index = bytes(data[HEADER.size : code])
        fields = (*HEADER.unpack_from(data)[:7], crc32(index), bytes.fromhex(digest(index)), VERSION.encode())
        data[: HEADER.size] = HEADER.pack(*fields)
        assert (rows, objects) == (3, 1)
        path = tmp_path / f"forged{i}.bundle"
        path.write_bytes(data)
        kernel_store.use(open_bundle(path))
        for ask in (
            lambda: count(open_bundle(path), 1),  # noqa: B023 - called in this turn
            lambda: stored_kernels.code("s"),
            lambda: stored_objects.find("n"),
        ):
            try:
                ask()
            except PortmmError as error:
                raised.append(str(error))
    assert len(raised) > 2 * len(texts)
    assert sum("damaged" in x for x in raised) >= 2 * len(texts)


def test_files_of_others_are_not_used(tmp_path):
    path = tmp_path / "open.bundle"
    with pytest.raises(BundleError, match="cannot be read"):
        pm.use_bundle(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PORTMM_BUNDLE", str(path))
        for _ in range(2):  # whoever asks first, the next one hears of it too
            with pytest.raises(BundleError, match="cannot be read"):
                kernel_store.bundles()
    path.write_bytes(packed(SMALL))
    path.chmod(0o666)
    with pytest.raises(BundleError, match="other users may write"):
        pm.use_bundle(path)


def test_a_process_needs_nothing_but_the_bundle(made, tmp_path):
    path, _, shapes = made
    assert bundle_build.make(shapes, [host()], counts=(1, 2))[0] == path.read_bytes()
    for done in (run(tmp_path, str(path)), run(tmp_path, PORTMM_BUNDLE=str(path))):
        assert done.returncode == 0, done.stderr
        wrong, heard, _ = json.loads(done.stdout)
        assert wrong == [False] * 4
        assert heard == []
    assert not list((tmp_path / "cache").glob("*.so"))
    wrong, heard, _ = json.loads(run(tmp_path).stdout)
    assert wrong == [False] * 4
    assert len(heard) == 1
    assert "computes with NumPy" in heard[0]


SLOW = """
import sys
import numpy as np
import portmm as pm
slow = "codegen.lower", "dispatch.schedule_choice", "host.detect", "target.target"
"""
FIRST = """
print(pm.matmul(np.ones((9, 96), np.float32), np.ones((96, 80), np.float32)).min())
print([x for x in slow if f"portmm.{x}" in sys.modules], pm.get_num_threads())
"""
BY_PACKED = """
w = np.ones((96, 80), np.float32)
print([float(pm.matmul(np.ones((9, 96), np.float32), pm.pack(x)).min()) for x in (w, np.asfortranarray(w))])
for group in (32, 96):
    q = pm.quantize(w, bits=4, group=group, symmetric=True)
    print(round(float(pm.matmul(np.ones((9, 96), np.float32), pm.pack(q)).min()), 3))
print([x for x in slow if f"portmm.{x}" in sys.modules])
"""


@pytest.mark.usefixtures("made")
def test_a_first_product_selects_and_builds_nothing(tmp_path):
    path = tmp_path / "first.bundle"
    path.write_bytes(bundle_build.make(bundle_shapes.shapes_of("9 80 96\n"), [host()], counts=(1, 2, 64))[0])
    done = run(tmp_path, calls=SLOW + FIRST, PORTMM_BUNDLE=str(path), PATH=os.environ["PATH"])
    assert done.stdout.split("\n")[:2] == ["96.0", f"[] {config.get_num_threads()}"], done.stderr
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.usefixtures("made")
def test_a_first_weight_is_packed_without_a_description_of_the_machine(tmp_path):
    path = tmp_path / "packed.bundle"
    lines = "9 80 96 f32 packed\n9 80 96 f32-u4-f32 packed group=32\n9 80 96 f32-u4-f32 packed\n"
    path.write_bytes(bundle_build.make(bundle_shapes.shapes_of(lines), [host()], counts=(1, 2, 64))[0])
    done = run(tmp_path, calls=SLOW + BY_PACKED, PORTMM_BUNDLE=str(path))
    assert done.stdout.split("\n")[:4] == ["[96.0, 96.0]", "96.0", "96.0", "[]"], done.stderr


ATTENTION = """
import warnings
import ml_dtypes
warnings.simplefilter("error")  # as where NumPy computes
r = np.random.default_rng(0)
for m, n, d, heads, few, of in CASES:
    q, k, v = (r.standard_normal((1, *x, d)).astype(of) for x in ((heads, m), (few, n), (few, n)))
    left, (right, values) = q.astype(float), (np.repeat(x.astype(float), heads // few, 1) for x in (k, v))
    weights = np.exp(left @ right.swapaxes(-1, -2) / np.sqrt(d))
    want = weights / weights.sum(-1, keepdims=True) @ values
    print(abs(pm.attention(q, k, v).astype(float) - want).max() < (1e-5 if of == "f4" else 2e-2), end=" ")
print([x for x in slow if f"portmm.{x}" in sys.modules])
"""
CASES = [(33, 40, 16, 4, 4, "f4"), (16, 40, 80, 4, 4, "bfloat16"), (1, 600, 64, 32, 2, "bfloat16")]


@pytest.mark.usefixtures("made")
def test_a_first_attention_is_found_whatever_the_heads(tmp_path):
    """Heads of no whole steps of tiles, and heads that share keys as rows of one."""
    path = tmp_path / "attention.bundle"
    lines = (
        "attention 33 40 16 f32 heads=4\nattention 16 40 80 bf16 heads=4\nattention 1 600 64 bf16 heads=32 kv_heads=2\n"
    )
    maker = bundle_build.Maker()
    bundle_build.add_shapes(maker, [], [host()], (1, 64))
    bundle_attention.add_attention(maker, bundle_shapes.attention_of(lines, ""), [host()], (1, 64))
    path.write_bytes(maker.pack((1, 64), lambda *_: None))
    cases = f"CASES = {CASES}\nslow = slow[:2]\n"
    done = run(tmp_path, calls=SLOW + cases + ATTENTION, PORTMM_BUNDLE=str(path))
    assert done.stdout.splitlines() == ["True True True []"], done.stderr


def test_threads_are_those_of_this_machine_whichever_serves_it(tmp_path):
    maker, least = bundle_build.Maker(), load_target("x86_64_v2" if host().arch == "x86_64" else "armv8a")
    maker.add_machine(least)
    path = tmp_path / "some.bundle"
    path.write_bytes(maker.pack((1,), lambda *_: None))
    before = config.get_num_threads(), host().cores
    try:
        pm.use_bundle(path)
        assert (config.get_num_threads(), config.target().cores) == before
        assert config.get_num_threads() == before[0]
    finally:
        kernel_store.forget()
        pm.forget()


@pytest.mark.parametrize("path", sorted(HOSTS.glob("*.json")), ids=lambda x: x.stem)
def test_a_bundle_identifies_machines_as_their_descriptions_do(path, tmp_path, monkeypatch):
    data = json.loads(path.read_text())["snapshot"]
    shot = detect.Snapshot(**(data | {"affinity": tuple(data["affinity"])}))
    maker = bundle_build.Maker()
    maker.add_machine(load_target({"x86_64": "x86_64_v2", "aarch64": "armv8a", "riscv64": "rv64gcv"}[shot.machine]))
    (tmp_path / "some.bundle").write_bytes(maker.pack((1,), lambda *_: None))
    monkeypatch.setattr(chip_match, "snapshot", lambda **_: shot)
    monkeypatch.setattr(chip_match.system, "machine", lambda: shot.machine)
    chip_match.forget()
    here, found = chip_match.here(open_bundle(tmp_path / "some.bundle")), detect.identify(shot)
    chip_match.forget()
    if found.name == "unknown":
        assert here is None
    else:
        assert (here.name, here.isas, here.cores) == (found.name, {x.name for x in found.isas}, found.cores)


def test_the_run_time_tells_a_bundle_the_machine_that_a_snapshot_does(made):
    bundle, asked = open_bundle(made[0]), []
    runtime()

    def other() -> frozenset[str]:
        asked.append(1)
        return frozenset({"vendor=Another", "family=1", "avx512f"})

    found = []
    for words in (frozenset, processor_words, other):
        chip_match.forget()
        found.append(chip_match.here(bundle, words))
    chip_match.forget()
    assert found[1:] == found[:1] * 2
    assert bool(asked) == (host().arch == "x86_64")


def test_another_chip_takes_what_it_can_run(made):
    bundle = open_bundle(made[0])
    from dataclasses import replace

    from portmm.dispatch.stored_kernels import count, machine_of

    here = host()
    assert machine_of(bundle, here) == here.name
    assert machine_of(bundle, replace(here, name="another")) == here.name
    assert not machine_of(bundle, replace(here, name="lesser", isas=here.isas[-1:])) or len(here.isas) == 1
    assert [count(bundle, n) for n in (1, 2, 3, 64)] == [1, 2, 2, 2]


def test_what_the_cache_has(made, tmp_path, monkeypatch):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path / "own"))
    pm.forget()
    a = np.ones((9, 11), np.float32)
    pm.matmul(a, a.T)
    maker = bundle_build.Maker()
    bundle_build.add_cache(maker)
    path = tmp_path / "cache.bundle"
    path.write_bytes(maker.pack((1,), lambda *_: None))
    check(open_bundle(path))
    assert open_bundle(path).objects >= 1
    pm.forget()
    assert made
