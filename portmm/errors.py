"""Exceptions of portmm.

Owns every exception class. Each message describes the fault, the value that
caused it, and the remedy.
"""

from contextvars import ContextVar

refusals: "ContextVar[list[TraceError] | None]" = ContextVar("refusals", default=None)
"""The errors that were raised in the trace that is running: it fails even if the traced function catches them."""


class PortmmError(Exception):
    """Base class of all errors that portmm raises on purpose."""


class TargetError(PortmmError):
    """Error for a target or ISA that is unknown, malformed, or cannot run on this host."""


class ScheduleError(PortmmError):
    """Error for a problem without a legal schedule on a target."""


class BuildError(PortmmError):
    """Error of a compiler that failed, or whose output cannot be loaded.

    Attributes:
        retry_at: earliest time of a retry, in seconds of `time.monotonic`; infinite if there is none in this process.
    """

    retry_at: float = float("inf")

    def again(self) -> "BuildError":
        """A copy to store or raise, without a traceback, whose frames would keep a call's operands alive."""
        copy = type(self)(*self.args)
        copy.retry_at = self.retry_at
        return copy


class NoCompilerError(BuildError):
    """Error for a machine without a usable compiler, for C or for CUDA."""


class BundleError(PortmmError):
    """Error for a bundle of kernels that is damaged, of another version, or cannot be read or made."""


class DeviceError(PortmmError):
    """Error of a device or its driver."""


class NoDeviceError(DeviceError):
    """Error for a missing device, or a missing package for it."""


class PackError(PortmmError):
    """Error for a packed weight that does not match the call."""


class CheckpointError(PackError, ValueError):
    """Error for a model's file that is damaged, or that has layers in a form that is not read."""


class ConvolutionError(PortmmError, ValueError):
    """Error for operands or options of a convolution that do not fit together."""


class TraceError(PortmmError):
    """Error for a function that cannot be traced into a kernel; `matmul` and `fuse` name its line."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        raised = refusals.get()
        if raised is not None:
            raised.append(self)


class DatabaseError(PortmmError):
    """Error of a tuning database that is damaged, of another version, or cannot be written."""


class ChangedError(Exception):
    """Raised when a call of NumPy between kernels returns another shape or type than before; callers trace again."""
