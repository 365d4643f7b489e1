"""threadpoolctl: its limits hold for the threads of calls."""

from __future__ import annotations

from functools import cache

from portmm.dispatch import config
from portmm.errors import PortmmError


@cache
def register_threadpoolctl() -> None:
    """Let threadpoolctl show and limit the threads of calls, as the library "portmm" of its kind "blas".

    The first call of portmm does so where threadpoolctl was imported before.

    Raises:
        PortmmError: threadpoolctl is missing, or older than 3.2.
    """
    try:
        from threadpoolctl import LibController, register
    except ImportError as error:
        raise PortmmError(f"threadpoolctl cannot be used: {error}; `pip install 'threadpoolctl>=3.2'`") from error

    class Controller(LibController):  # type: ignore[misc]  # Any, as mypy does not follow it
        """The threads of portmm's calls, as threadpoolctl reads and sets them."""

        user_api, internal_api = "blas", "portmm"
        # It looks for loaded files. The run time is none, as it is loaded from memory; NumPy is always there.
        filename_prefixes = ("_multiarray_umath", "portmm")

        def set_additional_attributes(self) -> None:
            self.prefix, self.filepath = "portmm", __file__

        def get_num_threads(self) -> int:
            return config.get_num_threads()

        def set_num_threads(self, num_threads: int) -> None:
            config.set_num_threads(0)  # the end of a limit leaves no number where there was none
            if config.get_num_threads() != num_threads:
                config.set_num_threads(max(1, min(num_threads, config.MOST_THREADS)))

        def get_version(self) -> str:
            from portmm.version import VERSION

            return VERSION

    register(Controller)
