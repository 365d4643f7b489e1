"""Wheels with the run time and the base set of kernels, for Linux on x86-64 and AArch64, and macOS on AArch64.

    python tools/build_wheels.py dist --pythons /usr/include/python3.11:/opt/python3.14/include/python3.14t

One wheel of an architecture serves all versions of Python whose headers are named: the run time for each lies beside
the kernels in `portmm/base`. Headers of a free-threaded build that are not there, as `.../python3.14t`, are those of
`.../python3.14` with `Py_GIL_DISABLED`, in which the two differ. Kernels are compiled by gcc where there is one for the
architecture, and else by zig; the run time by zig against the oldest C library. `--base` takes kernels that were made
before, for either C library, and makes the run time for the versions that are named, and that for others, through cffi.
`--audit` has auditwheel look at all shared objects of a wheel, and `--repair` has it write the wheel again (it needs
patchelf), under the platforms that it finds. For macOS all is compiled by zig, against Linux's headers of Python
without what only Linux has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = {"gnu": "manylinux_2_17_{0}.manylinux2014_{0}", "musl": "musllinux_1_2_{0}"}
MACOS, MACOS_TAG = "aarch64-macos", "macosx_11_0_arm64"
CHANGES = {"t": "#define Py_GIL_DISABLED 1", MACOS: "#undef HAVE_CRYPT_H"}
"""Lines of pyconfig.h: of builds of Python without the lock; of macOS."""
COPIED = ("LICENSE", "README.md", "kernels", "portmm", "pyproject.toml", "setup.py", "targets")


def build(arch: str, libc: str, output: Path, pythons: str, made: Path | None) -> Path:
    """The wheel for an architecture and a C library, with a base set that was made before, or is made now."""
    with tempfile.TemporaryDirectory(prefix="portmm-wheel-") as folder:
        tree = Path(folder, "tree")
        tree.mkdir()
        for name in COPIED:
            path = ROOT / name
            copy = shutil.copytree if path.is_dir() else shutil.copy
            ignored = (
                {"symlinks": True, "ignore": shutil.ignore_patterns("__pycache__", "base")} if path.is_dir() else {}
            )
            copy(path, tree / name, **ignored)
        base = tree / "portmm" / "base"
        words = [sys.executable, str(ROOT / "tools" / "base_set.py"), arch, str(base), "--libc", libc]
        if made:
            base.mkdir()
            kept = [made / f"{arch}.{x}" for x in ("bundle", "so")]
            if missing := next((x.name for x in kept if not x.is_file()), ""):
                sys.exit(f"--base: {made} has no {missing}; `python tools/base_set.py {arch} {made}` makes it")
            for path in kept:
                shutil.copy(path, base)
            words.append("--run-time")
        every = [Path(x) for x in pythons.split(os.pathsep) if x]
        headers = os.pathsep.join(str(headers_of(x, Path(folder), arch)) for x in every)
        environment = os.environ | {"PORTMM_PYTHONS": headers, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run(words, env=environment, check=True)
        platform = {"PORTMM_WHEEL_PLATFORM": MACOS_TAG if arch == MACOS else PLATFORMS[libc].format(arch)}
        wheels = Path(folder, "wheels")
        words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(tree)]
        subprocess.run(words, env=os.environ | platform, check=True)
        (wheel,) = wheels.glob("*.whl")
        output.mkdir(exist_ok=True)
        return Path(shutil.copy(wheel, output))


def headers_of(named: Path, folder: Path, arch: str = "") -> Path:
    """The headers of a version of Python: a directory, or that of the build with the lock, changed, in a folder.

    Raises:
        SystemExit: neither has headers.
    """
    usual = named.with_name(named.name.removesuffix("t"))
    there = next((x for x in (named, usual) if (x / "Python.h").is_file()), None)
    if there is None:
        sys.exit(
            f"--pythons: no Python.h in {' or '.join(map(str, dict.fromkeys((named, usual))))}; name directories of "
            "headers of Python for any Linux of 64 bits, as of python3-dev packages, with pyconfig.h among them"
        )
    changes = [CHANGES[x] for x, needed in (("t", there != named), (MACOS, arch == MACOS)) if needed]
    if not changes:
        return named
    made = folder / "headers" / named.name
    shutil.copytree(there, made)
    path = made / "pyconfig.h"
    path.write_text("\n".join((path.read_text(encoding="utf-8"), *changes, "")), encoding="utf-8")
    return made


def audit(wheel: Path) -> None:
    """Show what auditwheel says of all shared objects of a wheel, which lie in its bundle: it sees them as files."""
    sys.path.insert(0, str(ROOT))
    from portmm.build.bundle import open_bundle

    with tempfile.TemporaryDirectory(prefix="portmm-audit-") as folder:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
        (path,) = Path(folder, "portmm", "base").glob("*.bundle")
        bundle = open_bundle(path)
        for number in range(bundle.objects):
            entry, code = bundle.load(number)
            path.with_name(f"{entry.key}.so").write_bytes(code)
        shown = Path(folder, wheel.name)
        with zipfile.ZipFile(shown, "w") as again:
            names = sorted(str(x.relative_to(folder)) for x in Path(folder).rglob("*") if x.is_file() and x != shown)
            for name in names:
                if name.endswith(".dist-info/RECORD"):
                    again.writestr(name, "".join(f"{x},,\n" for x in names))
                else:
                    again.write(Path(folder, name), name)
        print(f"{bundle.objects} objects")
        subprocess.run([sys.executable, "-m", "auditwheel", "show", str(shown)], check=True)


def repaired(wheel: Path) -> Path:
    """The wheel that `auditwheel repair` makes, in its place.

    Raises:
        subprocess.CalledProcessError: it refers to libraries that its platforms do not have.
    """
    with tempfile.TemporaryDirectory(prefix="portmm-repair-") as folder:
        words = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, str(wheel)]
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # patchelf of a package
        subprocess.run(words, env=os.environ | {"PATH": path}, check=True)
        (made,) = Path(folder).glob("*.whl")
        wheel.unlink()
        return Path(shutil.copy(made, wheel.parent))


def main() -> None:
    """Build wheels, and show what is in them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--arch", action="append", choices=("x86_64", "aarch64", MACOS))
    parser.add_argument("--libc", choices=PLATFORMS, default="gnu")
    parser.add_argument("--pythons", default="", help="directories of headers, with colons between; this Python's")
    parser.add_argument("--base", type=Path, help="directory of base sets, as ARCH.bundle, that were made before")
    parser.add_argument("--audit", action="store_true")
    parser.add_argument("--repair", action="store_true")
    options = parser.parse_args()
    if MACOS in (options.arch or ()) and (options.audit or options.repair):
        parser.error("auditwheel looks at wheels for Linux alone")
    if options.repair and options.libc == "musl":
        parser.error("--repair is for gnu: zig links libc.so, which musl takes for its own, and auditwheel does not")
    for arch in options.arch or ("x86_64", "aarch64"):
        wheel = build(arch, options.libc, options.output, options.pythons, options.base)
        with zipfile.ZipFile(wheel) as packed:
            installed = sum(x.file_size for x in packed.infolist())
        print(f"{wheel}: {wheel.stat().st_size} bytes, installed {installed}")
        if options.audit:
            audit(wheel)
        if options.repair:
            print(repaired(wheel))


if __name__ == "__main__":
    main()
