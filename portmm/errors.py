"""The exceptions portmm raises.

Owns every exception class. Imports nothing. Each message says what was wrong,
with which value, and what to do about it.
"""


class PortmmError(Exception):
    """Base of every error that portmm raises on purpose."""


class TargetError(PortmmError):
    """A target or ISA description is unknown, malformed, or cannot run on this host."""


class ScheduleError(PortmmError):
    """No legal schedule exists for a problem on a target."""


class BuildError(PortmmError):
    """A compiler failed, or produced something that cannot be loaded.

    Attributes:
        retry_at: when it is worth trying again, in seconds of `time.monotonic`; infinite if not in this process.
    """

    retry_at: float = float("inf")

    def again(self) -> "BuildError":
        """The same failure, for keeping or raising again: without a traceback, whose frames hold a call's operands."""
        made = type(self)(*self.args)
        made.retry_at = self.retry_at
        return made


class NoCompilerError(BuildError):
    """No usable compiler was found, for C or for CUDA."""


class DeviceError(PortmmError):
    """A device or its driver refused a kernel."""


class NoDeviceError(DeviceError):
    """There is no device to run on, or no package that reaches it."""


class PackError(PortmmError):
    """A packed weight does not fit the call it is used in."""


class TraceError(PortmmError):
    """A function cannot be turned into a kernel; `matmul` and `fuse` name its line."""


class DatabaseError(PortmmError):
    """A database of tuned schedules is damaged, of another version, or cannot be written."""
