"""Workers of other libraries that run functions for a search: of Dask, Ray and joblib.

Owns `connect`, which makes an executor of a text, and the three executors. Each lists the workers that are alive, runs
a function on one of them, and tells a worker that died (`LostWorkerError`) from a function that failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from portmm.errors import PortmmError
from portmm.tuning.journal import Machine, identify

KINDS = "dask://HOST:PORT, ray, or joblib:N"


class LostWorkerError(PortmmError):
    """A worker died while it ran a function."""


class Executor(Protocol):
    """Workers that run functions, one at a time each."""

    def workers(self) -> dict[str, Machine]:
        """The workers that are alive, and their machines."""

    def submit(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """Start a function on a worker; return its future."""

    def done(self, future: Any) -> bool:
        """Whether `result` returns, or raises, at once."""

    def result(self, future: Any) -> Any:
        """The result of a future, or its exception.

        Raises:
            LostWorkerError: the worker died.
        """

    def cancel(self, future: Any) -> None:
        """Give a future up."""

    def close(self) -> None:
        """Release what belongs to this process; workers of others stay."""


class DaskExecutor:
    """The workers of a cluster of Dask's."""

    def __init__(self, client: Any) -> None:
        self._client, self._machines = client, dict[str, Machine]()

    def workers(self) -> dict[str, Machine]:
        """See `Executor`."""
        alive = set(self._client.nthreads())  # `scheduler_info` lists none where the client renews it meanwhile
        fresh = [x for x in alive if x not in self._machines]
        if fresh:
            self._machines |= self._client.run(identify, workers=fresh, on_error="ignore")
        return {x: m for x, m in self._machines.items() if x in alive}

    def submit(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """See `Executor`."""
        return self._client.submit(function, *args, workers=[worker], allow_other_workers=False, pure=False)

    def done(self, future: Any) -> bool:
        """See `Executor`."""
        return bool(future.done())

    def result(self, future: Any) -> Any:
        """See `Executor`."""
        from distributed.scheduler import KilledWorker

        try:
            return future.result()
        except KilledWorker as killed:
            raise LostWorkerError(str(killed)) from killed

    def cancel(self, future: Any) -> None:
        """See `Executor`."""
        future.cancel()

    def close(self) -> None:
        """See `Executor`."""
        self._client.close()


class JoblibExecutor:
    """Processes of joblib's on this machine; after the death of one all of them are started again."""

    def __init__(self, processes: int) -> None:
        self._count, self._machine = processes, identify()
        self._pool: Any = None

    def workers(self) -> dict[str, Machine]:
        """See `Executor`."""
        return dict.fromkeys(map(str, range(self._count)), self._machine)

    def submit(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """See `Executor`."""
        from joblib.externals.loky.process_executor import ProcessPoolExecutor

        del worker
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._count)
        return self._pool.submit(function, *args)

    def done(self, future: Any) -> bool:
        """See `Executor`."""
        return bool(future.done())

    def result(self, future: Any) -> Any:
        """See `Executor`."""
        from concurrent.futures.process import BrokenProcessPool

        try:
            return future.result()
        except BrokenProcessPool as broken:
            self._pool = None
            raise LostWorkerError(str(broken)) from broken

    def cancel(self, future: Any) -> None:
        """See `Executor`."""
        future.cancel()

    def close(self) -> None:
        """See `Executor`."""
        if self._pool is not None:
            self._pool.shutdown(kill_workers=True)


class RayExecutor:
    """The nodes of a cluster of Ray's, one function at a time each."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._machines = ray, dict[str, Machine]()
        self._nodes, self._dead = dict[Any, str](), set[str]()

    def workers(self) -> dict[str, Machine]:
        """See `Executor`."""
        # A node that died is said to be alive until it has missed some heartbeats.
        alive = {x["NodeID"] for x in self._ray.nodes() if x["Alive"]} - self._dead
        for node in alive - set(self._machines):
            try:
                self._machines[node] = self.result(self.submit(node, identify))
            except LostWorkerError:
                continue
        return {x: m for x, m in self._machines.items() if x in alive}

    def submit(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """See `Executor`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(worker, soft=False)
        future = self._ray.remote(max_retries=0, scheduling_strategy=where)(function).remote(*args)
        self._nodes[future] = worker
        return future

    def done(self, future: Any) -> bool:
        """See `Executor`."""
        return bool(self._ray.wait([future], timeout=0)[0])

    def result(self, future: Any) -> Any:
        """See `Executor`."""
        errors, node = self._ray.exceptions, self._nodes.pop(future)
        try:
            return self._ray.get(future)
        except errors.RayTaskError as failed:
            raise failed.cause from failed
        except errors.RayError as lost:
            if isinstance(lost, (errors.NodeDiedError, errors.TaskUnschedulableError)):
                self._dead.add(node)
            raise LostWorkerError(str(lost)) from lost

    def cancel(self, future: Any) -> None:
        """See `Executor`."""
        self._nodes.pop(future, None)
        self._ray.cancel(future, force=True)

    def close(self) -> None:
        """See `Executor`."""
        self._ray.shutdown()


@contextmanager
def connect(text: str) -> Iterator[Executor]:
    """The executor that a text names; closed at the end.

    Raises:
        PortmmError: the text names none, or its library is missing.
    """
    kind, _, rest = text.partition(":")
    try:
        executor = _connected(kind, rest)
    except ImportError as error:
        raise PortmmError(f"the executor {text} needs a package: {error}; `pip install 'portmm[{kind}]'`") from error
    except (OSError, ConnectionError) as error:
        raise PortmmError(f"the executor {text} cannot be reached: {error}") from error
    if executor is None:
        raise PortmmError(f"executor is {text!r}; use {KINDS}")
    try:
        yield executor
    finally:
        executor.close()


def _connected(kind: str, rest: str) -> Executor | None:
    if kind == "dask" and rest.startswith("//"):
        from distributed import Client

        return DaskExecutor(Client(f"tcp:{rest}"))
    if kind == "joblib" and rest.isdigit() and 0 < int(rest) <= 4 * (os.cpu_count() or 1):
        import joblib  # noqa: F401 - its absence is an error now

        return JoblibExecutor(int(rest))
    if kind == "ray" and not rest:
        import ray

        if not ray.is_initialized():
            ray.init()
        return RayExecutor(ray)
    return None
