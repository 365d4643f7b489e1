"""The error of a program whose functions of NumPy have changed.

Owns `ChangedError`, which the first call of a fused function needs before anything that makes programs is loaded.
"""


class ChangedError(Exception):
    """Raised when a call of NumPy between kernels returns another shape or type than before."""
