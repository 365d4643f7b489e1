"""Wheels of bundles: a bundle with its files of weights as a package that pip installs.

Owns the package, whose `use` makes portmm look into the bundle, and the wheel's files. The same contents give the same
bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from portmm.errors import BundleError
from portmm.version import VERSION

NAME = re.compile(r"([a-z][a-z0-9_]*)-(\d[a-z0-9.]*)-py3-none-any\.whl")
EXAMPLE = "layers-1.0-py3-none-any.whl"
BUNDLE = "kernels.bundle"
PACKAGE = f'''"""Kernels for portmm, made by `portmm bundle`."""

from pathlib import Path

BUNDLE = Path(__file__).with_name("{BUNDLE}")


def use():
    """Look into the bundle of this package first, in this process from now on."""
    import portmm

    portmm.use_bundle(BUNDLE)
'''
OLDEST = (1980, 1, 1, 0, 0, 0)
"""The time of all files, the first that the format has."""


def is_wheel(path: Path) -> bool:
    """Whether a path is to be a wheel.

    Raises:
        BundleError: it ends as one, and is no name that pip takes.
    """
    if path.suffix != ".whl":
        return False
    if not NAME.fullmatch(path.name):
        raise BundleError(f"{path.name} is no name of a wheel for all platforms; write it as {EXAMPLE}")
    return True


def write(path: Path, files: Sequence[Path]) -> None:
    """Write a wheel of a bundle, named `BUNDLE`, and its files of weights, with `NAME` of the path as package.

    Raises:
        BundleError: it cannot be written.
    """
    name, version = NAME.fullmatch(path.name).groups()  # type: ignore[union-attr]
    about = f"{name}-{version}.dist-info"
    texts: dict[str, str | Path] = {
        f"{name}/__init__.py": PACKAGE,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: portmm\n"
        "Summary: Kernels for portmm\n",
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: portmm {VERSION}\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{about}/RECORD"
    lines = []
    try:
        with zipfile.ZipFile(path, "w") as wheel:
            for place, source in (texts | {f"{name}/{x.name}": x for x in sorted(files)}).items():
                data = source.encode() if isinstance(source, str) else source.read_bytes()
                sha = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
                lines.append(f"{place},sha256={sha},{len(data)}\n")
                wheel.writestr(_entry(place), data)
            wheel.writestr(_entry(record), "".join(lines) + f"{record},,\n")
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error}") from error


def _entry(place: str) -> zipfile.ZipInfo:
    """The entry of a file that everyone may read; what it has is compressed already, or maps into memory."""
    entry = zipfile.ZipInfo(place, OLDEST)
    entry.external_attr = 0o100644 << 16
    return entry


@contextmanager
def place(path: Path) -> Iterator[Path]:
    """Where to write a bundle: the path itself, or for a wheel a file in a directory of its own for a block.

    Raises:
        BundleError: the path ends as a wheel, and is no name that pip takes.
    """
    if not is_wheel(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="portmm-wheel-") as folder:
        yield Path(folder, BUNDLE)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The bundle of a path: itself, or that of a wheel, in a directory of its own for the time of a block.

    Raises:
        BundleError: a wheel cannot be read, or has no bundle.
    """
    with place(path) as bundle:
        if bundle == path:
            yield path
            return
        folder = bundle.parent
        try:
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(folder)
            (member,) = folder.glob(f"*/{BUNDLE}")
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise BundleError(f"{path} is no wheel of a bundle: {error}") from error
        yield member
