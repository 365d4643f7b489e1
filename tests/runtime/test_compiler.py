"""Finding a compiler, and what it may do wrong."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from build_compilers import SOURCE, answer, fake_compiler

from portmm.build import compiler
from portmm.build import shared_object as build_module
from portmm.build.cache_contents import cache_entries
from portmm.build.compiler import find_compiler
from portmm.build.shared_object import build
from portmm.errors import BuildError, NoCompilerError

pytestmark = pytest.mark.usefixtures("empty_cache")


def test_bad_source(fake):
    bad = "int answer(void) { return forty_two; }\n"
    with pytest.raises(BuildError, match="forty_two") as caught:
        build(bad, flags=(), name="gemm")
    message = str(caught.value)
    assert "gemm.c" in message
    kept = next(line.removeprefix("source: ") for line in message.splitlines() if line.startswith("source: "))
    assert Path(kept).read_text() == bad
    assert cache_entries() == []
    assert len(fake.runs()) == 1


def test_a_long_complaint_is_shortened(monkeypatch, tmp_path):
    program = tmp_path / "cc"
    program.write_text("#!/bin/sh\nif [ $# = 1 ]; then echo gcc 1; exit; fi\nseq 1 100; exit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("CC", str(program))
    with pytest.raises(BuildError, match="and 88 more lines"):
        build(SOURCE, flags=())


FAULTS = {
    "nothing made": ("exit 0", "not an ELF"),
    "not a library": ("echo text > kernel.so", "not an ELF"),
    "silent failure": ("exit 3", "exit status 3"),
    "another machine": (r"printf '\177ELF............\0\0\1\0\0\0' > kernel.so", "ELF machine 1"),
}


@pytest.mark.parametrize(("body", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_a_compiler_that_lies(monkeypatch, tmp_path, body, words):
    program = tmp_path / "cc"
    program.write_text(f"#!/bin/sh\nif [ $# = 1 ]; then echo gcc 1; exit; fi\n{body}\n")
    program.chmod(0o700)
    monkeypatch.setenv("CC", str(program))
    with pytest.raises(BuildError, match=words):
        build(SOURCE, flags=())
    assert cache_entries() == []


def test_a_compiler_that_hangs(fake, monkeypatch):
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.2)
    fake.stall.touch()
    with pytest.raises(BuildError, match="no answer"):
        build(SOURCE, flags=())


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No compiler anywhere; returns a folder that is all of PATH."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(compiler, "_ziglang", lambda: None)
    return folder


def stub(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize("arch", [None, "aarch64", "x86_64", "riscv64"])
@pytest.mark.usefixtures("bare")
def test_no_compiler(arch):
    with pytest.raises(NoCompilerError, match="pip install ziglang") as caught:
        build(SOURCE, flags=(), arch=arch)
    assert (arch or os.uname().machine) in str(caught.value)
    assert isinstance(caught.value, BuildError)


def test_the_order_of_compilers(bare, monkeypatch):
    monkeypatch.setattr(compiler, "_ziglang", lambda: str(bare / "ziglang" / "__init__.py"))
    monkeypatch.setattr(
        compiler, "_query_version", lambda argv: "0.1" if "ziglang" in argv else Path(argv[0]).name + " 1"
    )
    found = [find_compiler()]
    for name in ("clang", "cc", "gcc"):
        stub(bare, name, name)
        compiler._find.cache_clear()
        found.append(find_compiler())
    assert [c.kind for c in found] == ["zig", "clang", "gcc", "gcc"]
    assert [Path(c.argv[0]).name for c in found[1:]] == ["clang", "cc", "gcc"]
    assert found[0].argv == (sys.executable, "-m", "ziglang", "cc")


def test_a_broken_compiler_on_the_path_is_passed_over(bare):
    (bare / "gcc").write_text("#!/bin/sh\nexit 1\n")
    (bare / "gcc").chmod(0o700)
    (bare / "cc").write_text("not executable")
    stub(bare, "clang", "clang version 14")
    assert find_compiler().kind == "clang"


@pytest.mark.parametrize("cc", ["/nonexistent/cc", "nonexistent-cc -O1", "'unbalanced", "false"])
def test_a_wrong_cc_is_an_error_not_a_hint(monkeypatch, cc):
    monkeypatch.setenv("CC", cc)
    with pytest.raises(NoCompilerError, match="CC="):
        find_compiler()


@pytest.mark.parametrize("cc", ["", "  "])
def test_an_empty_cc_is_no_cc(bare, monkeypatch, cc):
    stub(bare, "gcc", "gcc 1")
    monkeypatch.setenv("CC", cc)
    assert find_compiler().kind == "gcc"


def test_cc_with_arguments(fake, monkeypatch):
    monkeypatch.setenv("CC", f"{shlex.quote(str(fake.path))} -DANSWER=7 '-DTWO=1 + 1'")
    artifact = build("int answer(void) { return ANSWER * (TWO); }\n", flags=())
    assert answer(artifact) == 14
    assert artifact.command[:3] == (str(fake.path), "-DANSWER=7", "-DTWO=1 + 1")


def test_paths_with_spaces_and_unicode(tmp_path, monkeypatch, real):
    odd = tmp_path / "a b" / "größe Ω 行列"
    fake = fake_compiler(odd / "bin", real, name="my cc")
    headers = odd / "in clude"
    headers.mkdir()
    (headers / "answer.h").write_text("#define ANSWER 42\n")
    (odd / "tmp").mkdir()
    monkeypatch.setenv("CC", shlex.quote(str(fake.path)))
    monkeypatch.setenv("PORTMM_CACHE", str(odd / "cache dir"))
    monkeypatch.setenv("TMPDIR", str(odd / "tmp"))
    source = '#include "answer.h"\nint answer(void) { return ANSWER; }\n'
    artifact = build(source, flags=(), include=(headers,), name="größe/../x y")
    assert answer(artifact) == 42
    assert build(source, flags=(), include=(headers,), name="größe/../x y").cached
    assert artifact.path.parent == odd / "cache dir"
    assert cache_entries()[0].name == "gr__e____x_y"


def test_a_relative_cc(tmp_path, fake, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", f"bin/{fake.path.name}")
    assert answer(build(SOURCE, flags=())) == 42


def test_the_host_cpu_is_never_assumed(real):
    artifact = build(SOURCE, flags=())
    assert not any("native" in word for word in artifact.command)
    assert len(real) <= len(artifact.command)


ZIG = compiler.Compiler(("zig", "cc"), "zig", "0.13.0", "aarch64")


@pytest.mark.parametrize(
    ("flag", "zig"),
    [
        ("-march=armv8-a", "-mcpu=generic+v8a"),
        ("-march=armv8.0-a+simd", "-mcpu=generic+v8a+neon"),
        ("-march=armv8.2-a+sve+fp16", "-mcpu=generic+v8_2a+sve+fullfp16"),
        ("-march=armv9-a+sve2", "-mcpu=generic+v9a+sve2"),
        ("-msve-vector-bits=512", "-msve-vector-bits=512"),
        ("-mavx2", "-mavx2"),
    ],
)
def test_flags_for_zig(flag, zig):
    words = compiler.command(ZIG, (flag,), (), "k")
    assert zig in words
    assert words[words.index("-target") + 1] == "aarch64-linux-gnu.2.28"


def test_a_zig_with_a_target_keeps_it():
    chosen = compiler.Compiler(("zig", "cc", "-target", "x86_64-linux-musl"), "zig", "0.13.0", "x86_64")
    assert compiler.command(chosen, (), (), "k").count("-target") == 1


@pytest.mark.parametrize("kind", ["gcc", "clang", "zig"])
def test_every_compiler_builds(monkeypatch, kind):
    """The flags of each row of the table, where that compiler is installed."""
    path = os.environ["PATH"]
    argv = (sys.executable, "-m", "ziglang", "cc") if kind == "zig" else (compiler._which(kind, path) or "",)
    if not argv[0] or (kind == "zig" and compiler._ziglang() is None):
        pytest.skip(f"no {kind} here")
    monkeypatch.setenv("CC", shlex.join(argv))
    if find_compiler().kind != kind:
        pytest.skip(f"{kind} is another compiler here")
    artifact = build(SOURCE, flags=("-Wall", "-Wextra", "-Werror"))
    assert answer(artifact) == 42


@pytest.mark.parametrize("arch", ["aarch64", "riscv64", "x86_64"])
def test_cross_compilation(arch):
    try:
        artifact = build(SOURCE, flags=(), arch=arch)
    except NoCompilerError as error:
        pytest.skip(str(error))
    assert int.from_bytes(artifact.path.read_bytes()[18:20], "little") == build_module._MACHINES[arch]


def test_foreign_compilers(bare):
    other = "aarch64" if os.uname().machine == "x86_64" else "x86_64"
    stub(bare, "gcc", "gcc 1")
    stub(bare, "clang", "clang version 1")
    with pytest.raises(NoCompilerError, match=f"gcc-{other.replace('_', '-')}-linux-gnu"):
        find_compiler(other)
    stub(bare, "ld.lld", "lld")
    assert find_compiler(other).argv[1:] == (f"--target={other}-linux-gnu", "-fuse-ld=lld")
    compiler._find.cache_clear()
    cross = stub(bare, f"{other}-linux-gnu-gcc", "gcc 1")
    assert find_compiler(other).argv == (cross,)


def test_a_variable_names_the_compiler_of_another_machine(bare, monkeypatch):
    other = "aarch64" if os.uname().machine == "x86_64" else "x86_64"
    stub(bare, f"{other}-linux-gnu-gcc", "gcc 1")
    mine = stub(bare, "mine", "clang version 1")
    monkeypatch.setenv(f"CC_{other}", "mine --target=there")
    assert find_compiler(other).argv == (mine, "--target=there")
    assert find_compiler(other).kind == "clang"
    with pytest.raises(NoCompilerError, match="searched for \\$CC, "):
        find_compiler()
    monkeypatch.setenv(f"CC_{other}", "missing")
    with pytest.raises(NoCompilerError, match=f"^CC_{other}='missing' names no executable program"):
        find_compiler(other)
