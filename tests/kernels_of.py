"""Statements of the loop language, run one by one."""

from __future__ import annotations

import numpy as np
from portmm.kernels.packing import transpose


def transposed(lines: np.ndarray) -> np.ndarray:
    """What the packer's shuffles make of the lines of a square block."""
    registers = {f"t0_{j}": line for j, line in enumerate(lines)}
    body, last = transpose(len(lines))
    for s in body:
        registers[s.d] = np.concatenate([registers[s.a], registers[s.b]])[list(s.pick)]
    return np.array([registers[name] for name in last])
