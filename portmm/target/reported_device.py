"""Description of a device that a driver reports."""

from __future__ import annotations

import re
from dataclasses import replace

from portmm.target.target import Target, devices, load_target

DOT4_SINCE = (6, 1)
"""PTX ISA, dp4a: the first capability with it."""


def device_target(name: str, capability: str = "", kind: str = "gpu") -> Target:
    """The description of a device that a driver reports.

    By its name; else the smallest of those with its capability; else a generic
    one. The caller replaces its counts with those that the driver reports for the
    device itself.

    Args:
        name: as the driver spells it.
        capability: of a device for CUDA, as in "9.0"; empty for OpenCL.
        kind: type that OpenCL reports: "gpu", "cpu" or "accelerator".
    """
    if kind == "cpu":
        return load_target("opencl_cpu")
    chips = devices()
    named = [
        (len(word), chip) for chip in chips for m in chip.match for word in m.names if word and _mentions(name, word)
    ]
    if named:
        return max(named, key=lambda x: x[0])[1]
    if not capability:
        return load_target("opencl_gpu")
    alike = next((chip for chip in chips if any(m.capability == capability for m in chip.match)), None)
    return alike or _generic_cuda(capability)


def _generic_cuda(capability: str) -> Target:
    chip = load_target("cuda_gpu")
    version = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if version is None or chip.device is None:
        return chip
    target = replace(chip, device=replace(chip.device, architecture="".join(version.groups())))
    return target if (int(version[1]), int(version[2])) >= DOT4_SINCE else target.limited_to("simt")


def _mentions(text: str, name: str) -> bool:
    """Whether the name of a device contains a word of a `Match`."""
    end = r"(?![0-9a-z])" if name[-1:].isdigit() else ""
    return re.search(rf"(?<![0-9a-z]){re.escape(name.lower())}{end}", text.lower()) is not None
