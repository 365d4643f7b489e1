"""Compilers and processes that misbehave on demand, for test_build.py and test_compiler.py."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 60.0  # seconds; far above what any wait here takes

SOURCE = "int answer(void) { return 42; }\n"


def answer(artifact):
    return ctypes.CDLL(str(artifact.path)).answer()


WORKER = """
import sys, time
from pathlib import Path
import portmm.build.shared_object
source, ready, go = sys.argv[1:4]
Path(ready).touch()
while not Path(go).exists():
    time.sleep(0.001)
artifact = portmm.build.shared_object.build(source, flags=())
print(artifact.path, artifact.cached)
"""


@dataclass(frozen=True)
class FakeCompiler:
    """A script that writes down each compilation, then runs the real compiler."""

    path: Path
    log: Path
    stall: Path

    def runs(self) -> list[str]:
        """One line per compilation so far: process id, then arguments."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_for_runs(self, count: int) -> None:
        wait_until(lambda: len(self.runs()) >= count)

    def release(self) -> None:
        """End the compilations that stall."""
        self.stall.unlink()
        for line in self.runs():
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the other process did not get there"
        time.sleep(0.005)


def fake_compiler(folder: Path, real: tuple[str, ...], *, slow: bool = False, name: str = "fakecc") -> FakeCompiler:
    """A counting compiler; while the file `stall` exists it never finishes."""
    folder.mkdir(parents=True, exist_ok=True)
    fake = FakeCompiler(folder / name, folder / "log", folder / "stall")
    pause = "sleep 0.5\n" if slow else ""
    fake.path.write_text(
        f"""#!/bin/sh
case "$*" in
*-shared*)
  echo "$$ $*" >> {shlex.quote(str(fake.log))}
  if [ -e {shlex.quote(str(fake.stall))} ]; then exec sleep 600; fi
  {pause};;
esac
exec {shlex.join(real)} "$@"
""".replace("  ;;", "  :;;")
    )
    fake.path.chmod(0o700)
    return fake


def start_worker(source: str, folder: Path, number: int) -> subprocess.Popen[str]:
    """A process that builds `source` as soon as `folder/go` exists."""
    command = [sys.executable, "-c", WORKER, source, str(folder / f"ready{number}"), str(folder / "go")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
