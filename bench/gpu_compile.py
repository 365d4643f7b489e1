"""Compiles the kernels of cases before they are timed, in many processes, none of which opens the device.

Each makes a case as the measuring process does, of arrays that have shapes and addresses but no memory, and runs
portmm's call on them: the driver is told of no kernel, and none is launched, but all that the call needs lies
in the cache afterwards. In place of CuPy is a module with the few names that portmm asks it for.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, replace
from functools import partial
from types import ModuleType, SimpleNamespace

import gpu_cases
import gpu_families
import gpu_measure
import gpu_schedules
import numpy as np
from gpu_peers import NoPeers
from gpu_run import END, closed, ended, say, started

from portmm.arrays import operand
from portmm.arrays.numpy_arrays import numpy_of
from portmm.build import nvrtc
from portmm.build.nvrtc import Cubin
from portmm.errors import PortmmError
from portmm.ops import int4_words
from portmm.runtime import cuda, tensor_map
from portmm.runtime.backends import Facts
from portmm.spec.dtype import CODES_KR
from portmm.weights.quantized import Quantized

ALIGNED = 512
"""Bytes that PyTorch's and CuPy's allocators align arrays to: kernels depend on it."""
BEYOND = 1 << 40
"""An address that nothing lies at."""
NO_TIME = 1e-5


class ndarray:  # noqa: N801 - CuPy's name
    """An array of CuPy without memory: `at` is its address."""

    def __init__(self, shape, dtype, at, strides=None):
        self.dtype, self.shape, self.ndim = np.dtype(dtype), tuple(shape), len(shape)
        self.strides = strides or operand.contiguous(self.shape, self.dtype.itemsize)
        self.data, self.device = SimpleNamespace(ptr=at), SimpleNamespace(id=0)

    @property
    def T(self):  # noqa: N802 - CuPy's name
        return ndarray(self.shape[::-1], self.dtype, self.data.ptr, self.strides[::-1])

    def reshape(self, *shape):
        return ndarray(
            shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, self.dtype, self.data.ptr
        )

    def set(self, _):
        """Nothing is copied."""

    def __setitem__(self, _key, _value):
        """Nothing is written."""


ndarray.__module__ = "cupy"


class Described:
    """Arrays of a device that is described: see `gpu_arrays`."""

    name = "cuda"
    xp = np

    def __init__(self):
        self.next = BEYOND

    def empty(self, shape, dtype):
        return self.made(shape, numpy_of(dtype))

    def made(self, shape, dtype):
        found = ndarray(shape, dtype, self.next)
        size = int(np.prod(found.shape, dtype=np.int64)) * found.dtype.itemsize
        self.next += -(-max(size, 1) // ALIGNED) * ALIGNED
        return found

    def random(self, shape, dtype, _seed):
        return self.empty(shape, dtype)

    def array(self, x, dtype):
        return self.empty(np.shape(x), dtype)

    def copy(self, x):
        return self.made(x.shape, x.dtype)

    def wait(self):
        """Nothing runs."""

    def seconds(self, calls):
        for call in calls:
            call()
        return NO_TIME

    def replayed(self, calls):
        self.seconds(calls)
        return lambda: NO_TIME

    def move(self, x, to):
        """Nothing is copied."""

    def wide(self, x):
        """There are no values."""

    def free(self):
        """There is no memory."""


def installed(facts, on):
    """Stand in for CuPy, CUDA's driver and the device of facts, in this process."""
    module = ModuleType("cupy")
    module.__version__, module.ndarray, module.empty = "0", ndarray, on.made
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, getDevice=lambda: 0)
    module.cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda _: contextlib.nullcontext(),
        get_current_stream=lambda _device=-1: SimpleNamespace(ptr=0),
    )
    sys.modules["cupy"] = module
    known = Facts(**{**facts, "extensions": tuple(facts.get("extensions", ()))})
    cuda.facts = cuda.facts_of = lambda _device=None: known
    cuda.load = lambda cubin, name, device=None, **_: cuda.Function(None, name, device or 0, cubin)
    cuda.prepared = lambda *_, **__: lambda *_: None
    cuda.counters = lambda *_: BEYOND
    tensor_map.tensor_map = lambda *_: np.zeros(1, "V128")
    # The values of a weight do not matter, and quantising and packing a large one takes seconds.
    gpu_families._quantized = _quantized  # noqa: SLF001
    int4_words._words = _words  # noqa: SLF001


H100 = {
    "language": "cuda", "name": "NVIDIA H100 80GB HBM3", "vendor": "NVIDIA", "kind": "gpu", "processors": 132,
    "warp": 32, "block_threads": 1024, "shared_bytes": 49152, "registers": 65536, "l2_bytes": 52428800,
    "memory_bytes": 85 << 30, "clock_ghz": 1.98, "bandwidth_gbs": 3352.0, "architecture": "90a", "extensions": (),
    "driver": "13.0", "shared_most": 232448,
}  # fmt: skip
"""Facts of a device from its driver."""


def rehearsing():
    """Arrays of a device that computes nothing and takes no time: a run in this process does all but its kernels.

    Kernels are written, and not compiled; results are taken to be right.
    """
    on = Described()
    installed(H100, on)

    def compiled(source, name, architecture):
        return Cubin(b"", "", 0, 0, 0, 0.0, False, (0,), architecture, f"{name} {hash(source)}")

    nvrtc.compile_cuda = compiled
    for name, made in gpu_families.FAMILIES.items():
        gpu_families.FAMILIES[name] = partial(_right, made)
    gpu_measure.SUSTAINED = 0.01
    return on


def _right(made, *given):
    return replace(made(*given), share=lambda *_: 0.0)


def _quantized(n, k):
    groups = np.zeros((-(-k // gpu_families.GROUP), n), np.float32)
    return Quantized(np.zeros((k, n), np.uint8), groups, groups, 4, gpu_families.GROUP), np.zeros((k, n), np.uint8)


def _words(codes):
    """As `device_codes` has them, empty."""
    k, n = codes.shape
    return np.empty((n, max(1, -(-k // (CODES_KR * int4_words.TOGETHER))) * int4_words.TOGETHER), np.int32)


def device_facts():
    """The driver's facts of the device, for processes that do not open it."""
    return asdict(cuda.facts())


def compiled(on, job, given):
    """Compile what a job needs."""
    if job["do"] == "note":
        gpu_measure.overhead(on, 1)
        return
    case = gpu_cases.Case(**job["case"])
    if job["do"] == "measure":
        work = gpu_families.made(on, NoPeers(), case, 1)
        work.ours(work.sets[0])
        return
    turns = 0 if job["do"] == "check" else 1
    part = tuple(job.get("part", (0, 1)))
    gpu_schedules.survey(on, case, l2=1, most=given.most, turns=turns, threads=1, part=part, compile_only=True)


def work(facts, jobs, given):
    """Compile for all jobs, and say how long each took."""
    os.nice(10)  # what is timed meanwhile comes first
    on = rehearsing() if given.device == "described" else Described()
    if given.device != "described":
        installed(facts, on)
    for job in jobs:
        start = time.monotonic()
        found = {"name": job["name"]}
        try:
            compiled(on, job, given)
        except (PortmmError, gpu_families.RefusedError, TypeError, ValueError, NotImplementedError) as error:
            found["refused"] = f"{type(error).__name__}: {error}"[:300]
        except Exception as error:  # noqa: BLE001 - one case must not end the others; it fails again, and is reported
            found["failed"] = f"{type(error).__name__}: {error} {traceback.format_exc()[-600:]}"
        say("compiled", found | {"seconds": round(time.monotonic() - start, 2)})


# -- many processes ------------------------------------------------------------------------


SPLIT = 4
"""Parts that a survey is compiled in: it has some ten times the kernels of a case."""


def split(jobs):
    """Jobs, the surveys in parts."""
    for job in jobs:
        if job["do"] == "survey":
            yield from ({**job, "name": f"{job['name']} part {i}", "part": (i, SPLIT)} for i in range(SPLIT))
        else:
            yield job


class Compilers:
    """Processes that compile jobs, which are begun in their order, until all is done or time is over.

    Args:
        command: begins a process, which is given facts and then jobs, one line each.
        facts: of the device.
        jobs: what is to be compiled.
        count: processes.
        seconds: after which they are killed.
    """

    def __init__(self, command, facts, jobs, *, count, seconds):
        self.left, self.found, self.lock = list(split(jobs)), [], threading.Lock()
        self.awaited = {x["name"] for x in self.left if x["do"] != "survey"}
        self.began, self.ends, self.count = time.monotonic(), time.monotonic() + seconds, count
        self.threads = [
            threading.Thread(target=self._feed, args=(command, facts), daemon=True)
            for _ in range(min(count, len(self.left)))
        ]
        for x in self.threads:
            x.start()

    def _next(self):
        with self.lock:
            return self.left.pop(0) if self.left and time.monotonic() < self.ends else None

    def _feed(self, command, facts):
        """Give one process jobs, the next when it is done with one; a process that dies is not begun again."""
        process = started(command)
        killer = threading.Timer(max(0.0, self.ends - time.monotonic()), ended, (process,))
        killer.daemon = True
        killer.start()
        try:
            process.stdin.write(json.dumps(facts) + "\n")
            while (job := self._next()) is not None:
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
                if not self._answer(process, job):
                    break
        except OSError:
            pass  # it died; others go on, and what it left is compiled when it is needed
        finally:
            killer.cancel()
            ended(process)
            closed(process)

    def _answer(self, process, job):
        for line in process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and found.get("kind") == "compiled":
                self.found.append(found["value"])
                return True
        self.found.append({"name": job["name"], "failed": "its process ended"})
        return False

    def early(self, seconds):
        """Wait, no longer than that, until all but surveys is compiled."""
        ends = min(self.ends, time.monotonic() + seconds)
        while time.monotonic() < ends and self.awaited - {x["name"] for x in list(self.found)}:
            time.sleep(0.02)

    def wait(self):
        """Wait until all is compiled, or time is over; what came of it."""
        last = self.ends + 2 * END
        for x in self.threads:
            x.join(max(0.0, last - time.monotonic()))
        failed = [x for x in self.found if "failed" in x]
        slow = sorted(self.found, key=lambda x: -x.get("seconds", 0.0))[:5]
        return {
            "jobs": len(self.found), "not compiled": [x["name"] for x in self.left], "processes": self.count,
            "seconds": round(time.monotonic() - self.began, 1), "failed": failed,
            "refused": [x for x in self.found if "refused" in x], "slowest": slow,
        }  # fmt: skip
