"""Contenders of a device that misbehave, for test_compare_device."""

import os
import signal

import numpy as np

from portmm.comparison.device import runs
from portmm.comparison.device_arrays import OpenClArrays
from portmm.comparison.peers import Library, MissingError


def wrong(_setup):
    """Right but for the last element."""
    on = OpenClArrays()

    def prepare(case, data):
        wide = np.int64 if case.whole else np.float64
        product = (data.a.astype(wide) @ data.b.astype(wide)).astype(data.c.dtype)
        product[-1, -1] += 1
        made = on.put(np.ascontiguousarray(product))
        return runs(on, case, data, lambda _x: {"matmul": lambda: made})

    return Library("wrong 1", prepare, dtypes=None)


def crashing(_setup):
    on = OpenClArrays()

    def prepare(case, data):
        def call():
            os.kill(os.getpid(), signal.SIGSEGV)

        return runs(on, case, data, lambda _x: {"matmul": call})

    return Library("crashing 1", prepare, dtypes=None)


def absent(_setup):
    raise MissingError("no libabsent.so")
