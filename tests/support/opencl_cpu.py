"""An OpenCL device on every x86-64 machine: Intel's driver for processors, from PyPI."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import numpy as np
import pytest


def missing(what):
    """Skip, or fail where CI promises what is missing."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what)


def driver():
    """The shared object of the driver; the .icd file that it comes with holds the path of its builder's machine."""
    try:
        paths = [Path(f.locate()).resolve() for f in files("intel-opencl-rt") or ()]
    except PackageNotFoundError:
        paths = []
    return next((p for p in paths if p.name == "libintelocl.so"), None)


def announce():
    """Have PyOpenCL find the driver: both variables are read when it is imported. The folder made, or nothing."""
    found = driver()
    if found is None:
        return ""
    folder = tempfile.mkdtemp(prefix="portmm-icd-")
    Path(folder, "intel.icd").write_text(f"{found}\n")
    os.environ["OCL_ICD_VENDORS"] = folder
    os.environ["PYOPENCL_NO_CACHE"] = "1"
    return folder


@cache
def opencl_device():
    """A context of one device and a queue, `(context, queue)`."""
    found = driver()
    if found is None:
        missing("intel-opencl-rt is not installed")
    try:
        import pyopencl as cl
    except ImportError:
        missing("pyopencl is not installed")
    try:
        device = cl.get_platforms()[0].get_devices()[0]
    except cl.Error as error:
        missing(f"the driver {found} does not work; is intel-cmplr-lib-rt installed? {error}")
    context = cl.Context([device])
    return context, cl.CommandQueue(context)


@cache
def version():
    """The driver, and the device that it shows."""
    device = opencl_device()[0].devices[0]
    return f"{device.platform.version} {device.driver_version} {device.version} {device.name}"


class OpenCl:
    """Arrays of PyOpenCL on that device."""

    def __init__(self):
        opencl_device()
        import pyopencl.array

        self.module, self.queue = pyopencl.array, opencl_device()[1]

    def array(self, x):
        return self.module.to_device(self.queue, np.ascontiguousarray(x))
