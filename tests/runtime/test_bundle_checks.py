"""Bundles by the lines of a file: which shapes and machines lines mean, and kernels that are run, on small operands."""

import sys

import pytest

from portmm.build.bundle import open_bundle, packed
from portmm.cli.main import app
from portmm.errors import BundleError
from portmm.host.detect import host, missing
from portmm.ops import bundle_attention, bundle_build, bundle_check, bundle_shapes
from portmm.target.target import load_isa, load_target


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no shapes"),
        ("1 2", "line 1"),
        ("\n0 1 1", "line 2"),
        ("3-2 1 1", "from 1 to"),
        ("3 0 1", "N and K are positive"),
        ("3,x 1 1", "not as 7"),
        ("1 1 1 f32 diagonal", "layout"),
        ("1 1 1 f31", "line 1"),
        ("1 1 64 f32 packed group=32", "four bits alone"),
        ("1 1 64 f32-u4-f32 packed group=12", "no multiple of 8"),
        ("1 1 64 f32-u4-f32 packed group=32 group=64", "several groups"),
    ],
)
def test_lines_that_are_no_shapes(text, words):
    with pytest.raises(BundleError, match=words):
        bundle_shapes.shapes_of(text)


def test_ranges_have_each_class_once():
    (other,) = bundle_shapes.shapes_of("1 8 64 f32-u4-f32 packed group=32")
    assert (other.group, str(other)) == (32, "1x8x64 f32-u4-f32 packed group=32")
    (shape,) = bundle_shapes.shapes_of("1-40,100 8 9 bf16 packed # a layer\n")
    assert shape.rows == (*range(1, 33), 34, 36, 38, 40, 100)
    assert str(shape) == "1..100x8x9 bf16 packed"
    (shape,) = bundle_shapes.attention_of("attention 1-36,100 8 9 bf16\n", "shapes")
    assert shape.queries == (*range(1, 33), 34, 36, 100)


def test_cloud_instances_are_all_their_chips():
    assert [x.name for x in bundle_shapes.targets_of(["c5", "m7a.large", "c5.xlarge"])[0]] == [
        "skylake_sp", "cascade_lake", "zen4",
    ]  # fmt: skip
    assert [x.name for x in bundle_shapes.targets_of(["zen4", "h100"])[1]] == ["h100"]
    chips, levels = (dict.fromkeys(x.name for x in bundle_shapes.targets_of([y])[0]) for y in ("chips", "levels"))
    assert {"x86_64_v2", "x86_64_v3"} <= chips.keys() & levels.keys()
    assert "armv8a" in levels.keys() - chips.keys()
    assert {"zen4", "neoverse_n1", "x86_64_v1", "rv64gcv"} & {*chips} == {"zen4", "neoverse_n1"}
    assert {"zen4", "neoverse_n1", "x86_64_v1", "rv64gcv"} & {*levels} == {"x86_64_v1"}
    assert not bundle_shapes.targets_of(["chips", "levels"])[1]


@pytest.mark.emulated
def test_the_command_makes_and_checks_kernels_of_other_machines(tmp_path, capsys):
    from crossing import program_compiler

    program_compiler("aarch64")
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("1,70 24 40\n5 24 40 s8-s8-s32 packed\nattention 3,40 50 8 f32 heads=4 kv_heads=2 causal\n")
    path = tmp_path / "arm.bundle"
    words = ["bundle", str(path), "--shapes", str(shapes), "--for", "c6g,c7g", "--threads", "1", "--check"]
    app(words, standalone_mode=False)
    out = capsys.readouterr().out
    assert "neoverse_n1" in out
    assert "neoverse_v1" in out
    assert "kernels correct" in out
    bundle = open_bundle(path)
    counts = bundle_check.check(bundle)
    # Two layouts of a weight on each chip, and two forms of attention, whose kernels are those of both.
    assert counts.pop(bundle_check.RAN_TOO) == 6
    assert counts == {bundle_check.RAN: len(bundle.answer(bundle_build.SCHEDULES))}


def test_kernels_of_tiles_are_run(tmp_path):
    """The driver asks Linux for the state of AMX, as the run time does."""
    if missing(load_isa("amx_bf16")) or missing(load_isa("amx_int8")):
        pytest.skip("this machine has no AMX")
    path = tmp_path / "tiles.bundle"
    shapes = bundle_shapes.shapes_of("1,40 64 96 bf16 packed\n40 64 96 s8-s8-s32 packed\n")
    data, built = bundle_build.make(shapes, [load_target("sapphire_rapids")], counts=(1,))
    path.write_bytes(data)
    bundle = open_bundle(path)
    assert any("amx" in x.kernel for x in built)
    counts = bundle_check.check(bundle)
    assert counts.pop(bundle_check.RAN_TOO)
    assert counts == {bundle_check.RAN: len(bundle.answer(bundle_build.SCHEDULES))}


def _of_packing_and_attention(lines, path):
    """A bundle for this machine with shapes, on one thread, and the texts by which kernels are run."""
    maker = bundle_build.Maker()
    bundle_build.add_shapes(maker, bundle_shapes.shapes_of(lines, empty=True), [host()], (1,))
    bundle_attention.add_attention(maker, bundle_shapes.attention_of(lines, ""), [host()], (1,))
    path.write_bytes(maker.pack((1,), lambda *_: None))
    bundle = open_bundle(path)
    number = int(bundle.answer(bundle_build.RUNS)[0])
    return bundle, [bundle.answer(f"{bundle_build.RUN}{i}") for i in range(number)]


def test_kernels_that_pack_are_run(tmp_path):
    lines = "3 40 60 f32 packed\n3 40 60 bf16 packed\n3 40 60 s8-s8-s32 packed\n3 40 256 f32-u4-f32 packed\n"
    bundle, runs = _of_packing_and_attention(lines, tmp_path / "packing.bundle")
    assert {tuple(text.split()[2::2]) for *_, text in runs} >= {("f32", "row"), ("bf16", "col"), ("f32-u4-f32", "row")}
    ends = {text.split()[3].partition("g")[2] for *_, text in runs if "u4" in text}
    assert ends == {"128", "128c", "128ch"}  # with offsets, and without: scales of 32 and of 16 bits
    counts = bundle_check.check(bundle)
    assert counts[bundle_check.RAN_TOO] == len({number for number, *_ in runs}) == len(runs)
    assert bundle_check.OTHERS not in counts


def test_kernels_of_attention_are_run(tmp_path):
    lines = "attention 1,40 300 24 f32 heads=4 kv_heads=2\nattention 1,40 300 24 f32 causal lse\n"
    lines += "attention 7 90 33 bf16 window dv=21\n"
    bundle, runs = _of_packing_and_attention(lines, tmp_path / "attention.bundle")
    counts = bundle_check.check(bundle)
    assert counts[bundle_check.RAN_TOO] == len({number for number, *_ in runs}) >= 3
    assert bundle_check.OTHERS not in counts


@pytest.mark.parametrize("change", [("row", "col"), (" 40 24 24 2 0 ", " 40 24 24 2 1 "), ("pack ", "fold ")])
def test_wrong_kernels_of_packing_and_attention_are_noticed(tmp_path, change):
    """A kernel that packs columns is taken for one of rows, one of attention for a causal one, and none for one."""
    lines = "3 40 60 f32 packed\nattention 40 300 24 f32 heads=4 kv_heads=2\n"
    bundle, runs = _of_packing_and_attention(lines, tmp_path / "right.bundle")
    (number, symbol, text), *_ = [x for x in runs if change[0] in x[-1]]
    lie = bundle.load(int(number))[1], (symbol, text.replace(*change))
    path = tmp_path / "wrong.bundle"
    path.write_bytes(packed({f"{bundle_build.RUN}0": lie, bundle_build.RUNS: (None, ("1",))}))
    with pytest.raises(BundleError, match="damaged" if "fold " in change else "another result"):
        bundle_check.check(open_bundle(path))


def test_a_wrong_kernel_is_noticed(tmp_path):
    bundle, _ = _of_packing_and_attention("1-64 80 96 f32 packed\n", tmp_path / "right.bundle")
    texts = bundle.answer(bundle_build.SCHEDULES)
    counts = bundle_check.check(bundle)
    assert counts.pop(bundle_check.RAN_TOO) == 2  # they pack the weight
    assert sum(counts.values()) == len(texts)
    fields = {x: bundle.answer(f"code {x}") for x in texts}
    tall = max(texts, key=lambda x: int(x.split(":")[3].split("x")[0]))
    other = min(texts, key=lambda x: int(x.split(":")[3].split("x")[0]))
    code = bundle.load(int(fields[other][0]))[1]
    answers = {bundle_build.SCHEDULES: (None, (tall,)), f"code {tall}": (code, tuple(fields[other][1:]))}
    path = tmp_path / "wrong.bundle"
    path.write_bytes(packed(answers))
    if tall != other:
        bundle_check.check(open_bundle(path))  # another register tile gives the same product
    lying = tuple(x.replace("portmm_gemm", "portmm_germ") for x in fields[tall][1:])
    path.write_bytes(packed({**answers, f"code {tall}": (code, lying)}))
    with pytest.raises(BundleError, match="did not run"):
        bundle_check.check(open_bundle(path))


def test_attention_of_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    shapes = bundle_shapes.attention_of("attention 1 64 32 bf16\n", "shapes")
    with pytest.raises(BundleError, match="pip install ml_dtypes"):
        bundle_attention.add_attention(bundle_build.Maker(), shapes, [load_target("zen4")], (1,))
