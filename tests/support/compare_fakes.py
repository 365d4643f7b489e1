"""Contenders that misbehave, for test_compare."""

import os
import signal
import sys
import time

import numpy as np

import portmm as pm
from portmm.comparison import fused, native
from portmm.comparison.data import Arrays
from portmm.comparison.peers import Library, MissingError, UnsupportedError, repeat, returning
from portmm.errors import BuildError


def _matmul(data):
    return repeat(lambda: np.matmul(data.a, data.b, out=data.c))


def right(_setup):
    return Library("right 1", lambda _case, data: {"matmul": _matmul(data)})


def slow(_setup):
    def prepare(_case, data):
        def call():
            time.sleep(0.005)
            np.matmul(data.a, data.b, out=data.c)

        return {"matmul": repeat(call)}

    return Library("slow 1", prepare)


def wrong(_setup):
    def prepare(_case, data):
        def call():
            np.matmul(data.a, data.b, out=data.c)
            data.c[..., -1, -1] += 0.01

        return {"matmul": repeat(call)}

    return Library("wrong 1", prepare)


def unfinished(_setup):
    return Library("unfinished 1", lambda _case, data: {"matmul": repeat(lambda: np.copyto(data.c[:-1], 0))})


def half_wrong(_setup):
    return Library("half 1", lambda _case, data: {"bad": repeat(lambda: None), "good": _matmul(data)})


def racy(_setup):
    """Right at first, wrong once it was called often."""

    def prepare(_case, data):
        calls = [0]

        def call():
            calls[0] += 1
            np.matmul(data.a, data.b, out=data.c)
            if calls[0] > 10:
                data.c[0] = 0

        return {"matmul": repeat(call)}

    return Library("racy 1", prepare)


def crashing(_setup):
    def prepare(case, data):
        if case.m == 8:
            os.kill(os.getpid(), signal.SIGSEGV)
        return {"matmul": _matmul(data)}

    return Library("crashing 1", prepare)


def raising(_setup):
    raise RuntimeError("no licence file")


def hanging(_setup):
    return Library("hanging 1", lambda _case, _data: {"matmul": lambda _count: time.sleep(1000)})


def picky(_setup):
    def prepare(_case, _data):
        raise UnsupportedError("only on Sundays")

    return Library("picky 1", prepare)


def absent(_setup):
    raise MissingError("no libabsent.so")


def noisy(_setup):
    """Prints where a library should not."""

    def prepare(_case, data):
        os.write(1, b"a library says hello\n")
        sys.stderr.write("and grumbles\n")
        return {"matmul": _matmul(data)}

    return Library("noisy 1", prepare)


def seen(_setup):
    """Tells its environment."""
    names = ("OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS", "PORTMM_TARGET", "OPENBLAS_NUM_THREADS")
    return Library(" ".join(f"{n}={os.environ.get(n)}" for n in names), lambda _case, data: {"matmul": _matmul(data)})


def _exact(case, data):
    """The product of a narrow case in float64, or whole numbers."""
    wide = np.int64 if case.whole else np.float64
    a, b = data.a.astype(wide), data.b.astype(wide)
    if case.block:
        b = (b - 8) * np.repeat(data.columns.astype(wide), case.block, axis=0)[: case.k]
    if case.scaled and not case.whole:
        b *= data.columns
    product = a @ b
    return product * data.rows.astype(float)[:, None] * data.columns if case.scaled and case.whole else product


def narrow(_setup):
    """Exact in every type."""

    def prepare(case, data):
        return {"matmul": repeat(lambda: np.copyto(data.c, _exact(case, data), casting="unsafe"))}

    return Library("narrow 1", prepare, dtypes=None)


def rough(_setup):
    """Rounds activations to 8 bits, and says so."""

    def prepare(case, data):
        codes = Arrays(np.rint(data.a.astype(float) * 127) / 127, data.b, data.c, data.rows, data.columns)
        return {"matmul": repeat(lambda: np.copyto(data.c, _exact(case, codes), casting="unsafe"))}

    return Library("rough 1", prepare, dtypes=None, precision="approximate")


def elsewhere(_setup):
    """Returns its results."""

    def prepare(case, data):
        return {
            "matmul": returning(lambda: _exact(case, data), lambda result: np.copyto(data.c, result, casting="unsafe"))
        }

    return Library("elsewhere 1", prepare, dtypes=None)


def forgetful(_setup):
    """Right on the first operands that it is given, wrong on all others."""
    first = []

    def prepare(_case, data):
        def call():
            np.matmul(data.a, data.b, out=data.c)
            if data is not first[0]:
                data.c[0] = 0

        first.append(data)
        return {"matmul": repeat(call)}

    return Library("forgetful 1", prepare)


def _finishing(data, case, before=lambda: None):
    finish = fused.in_place(case.fused, data.c, data.added, None)

    def call():
        before()
        np.matmul(data.a, data.b, out=data.c)
        finish()

    return {"ufuncs": repeat(call)}


def finishing(_setup):
    """Does what follows a product."""
    return Library("finishing 1", lambda case, data: _finishing(data, case), fused=True)


def slow_finishing(_setup):
    """The same, late."""
    return Library("slow 1", lambda case, data: _finishing(data, case, lambda: time.sleep(0.005)), fused=True)


def merely(_setup):
    """Claims to fuse, and multiplies."""
    return Library("merely 1", lambda _case, data: {"matmul": _matmul(data)}, fused=True)


def crashing_fused(_setup):
    """Dies of what follows."""

    def prepare(_case, _data):
        os.kill(os.getpid(), signal.SIGSEGV)

    return Library("crashing 1", prepare, fused=True)


def unbuildable(_setup):
    """Its kernels do not link."""

    def prepare(_case, _data):
        raise BuildError("cc did not build a kernel; its output:\n  /usr/bin/ld: cannot find -lnosuch\nsource: /x.c")

    return Library("unbuildable 1", prepare)


def unlinked(_setup):
    """There is no library to link with."""
    native.compile_driver(["-lnosuchlibrary"])


def unmade(_setup):
    """A library's own compiler fails, in an exception of many lines."""

    def prepare(_case, _data):
        raise RuntimeError("CppCompileError: C++ compile error\n\nCommand:\ng++ x.cpp\n/usr/bin/ld: cannot find -lx")

    return Library("unmade 1", prepare)


def tuned(_setup):
    """Tells whose choice a schedule is for portmm's calls in this process."""
    return Library(pm.explain((8, 16), (16, 12)).choice.origin, lambda _case, data: {"matmul": _matmul(data)})
