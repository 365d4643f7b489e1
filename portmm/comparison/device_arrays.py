"""Device arrays of contenders: CuPy's, PyTorch's or PyOpenCL's.

Owns `parsed`, and one class for the arrays of each library, which copies a case's arrays to the
device, without a change of layout, and results back; synchronizes; and captures calls as a graph. A
library is imported when its arrays are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from portmm.arrays.interop import as_numpy, as_tensor
from portmm.arrays.numpy_arrays import numpy_of
from portmm.comparison.peers import MissingError, UnsupportedError
from portmm.errors import PortmmError
from portmm.runtime import cuda, opencl
from portmm.spec.dtype import BY_NAME
from portmm.target.device import LANGUAGES


def parsed(device: str) -> tuple[str, int | None]:
    """Language of a device's kernels, and the device's number or None.

    Raises:
        ValueError: the device is unknown.
    """
    language, colon, number = device.partition(":")
    if language not in LANGUAGES or (colon and not (language == "cuda" and number.isdecimal())):
        raise ValueError(f"device {device!r} is unknown; give cuda, cuda:1 or opencl")
    return language, int(number) if colon else None


class Arrays:
    """Arrays of one library on one device; its subclasses open a library, and raise `MissingError` without it.

    Attributes:
        version: of the library.
    """

    version: str

    def holds(self, names: Collection[str]) -> bool:
        """Whether it has elements of all these types."""
        raise NotImplementedError

    def put(self, x: Any) -> Any:
        """A copy on the device of a contiguous row-major array."""
        raise NotImplementedError

    def store(self, to: Any, x: Any) -> None:
        """Copy an array into one that `put` returned."""
        raise NotImplementedError

    def transposed(self, x: Any) -> Any:
        """A view with the last two axes swapped."""
        return x.transpose((*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2))

    def host(self, x: Any) -> Any:
        """A copy in the host's memory, as a NumPy array."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the device has finished all calls."""
        raise NotImplementedError

    def address(self, x: Any) -> int:
        """Address of element zero; in OpenCL the handle of the buffer, at whose beginning every array starts."""
        raise NotImplementedError

    def stream(self) -> int:
        """Handle of the current stream or queue, as drivers know it."""
        raise NotImplementedError

    def working(self) -> AbstractContextManager[Any]:
        """Context in which calls go to this device."""
        return nullcontext()

    def graph(self, calls: Sequence[Callable[[], Any]]) -> tuple[Callable[[], object], Any]:
        """Function that launches calls as one graph, and the result of the last.

        Raises:
            UnsupportedError: there are no graphs.
        """
        raise UnsupportedError(f"{self.version} has no graphs, for {len(calls)} calls or any")


def of_cuda(number: int | None) -> Arrays:
    """PyTorch's arrays, which have all types, or else CuPy's.

    Raises:
        MissingError: there is neither, or no such device.
    """
    try:
        return TorchArrays(number)
    except MissingError as missing:
        try:
            return CupyArrays(number)
        except MissingError as error:
            raise MissingError(f"{missing}; {error}") from error


class CupyArrays(Arrays):
    """Arrays of CuPy."""

    def __init__(self, number: int | None = None) -> None:
        try:
            self._number = cuda.current(number)
        except PortmmError as error:
            raise MissingError(str(error)) from error
        self._cupy: Any = import_module("cupy")
        self.version = f"cupy {self._cupy.__version__}"

    def holds(self, names: Collection[str]) -> bool:
        with self.working():
            try:
                for name in names:
                    self._cupy.empty((1,), numpy_of(name))
            except (TypeError, ValueError, KeyError):
                return False
        return True

    def put(self, x: Any) -> Any:
        with self.working():
            copy = self._cupy.empty(x.shape, x.dtype)
            copy.set(x)
        return copy

    def store(self, to: Any, x: Any) -> None:
        with self.working():
            to.set(x)

    def host(self, x: Any) -> Any:
        return x.get()

    def wait(self) -> None:
        with self.working():
            self._cupy.cuda.runtime.deviceSynchronize()

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def stream(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def working(self) -> AbstractContextManager[Any]:
        return self._cupy.cuda.Device(self._number)

    def graph(self, calls: Sequence[Callable[[], Any]]) -> tuple[Callable[[], object], Any]:
        with self.working():
            stream = self._cupy.cuda.Stream(non_blocking=True)
            with stream:
                # A first call allocates its buffers in the memory pool of this stream before the capture.
                calls[0]()
                stream.synchronize()
                stream.begin_capture()
                try:
                    results = [call() for call in calls]
                finally:
                    graph = stream.end_capture()
        return _replay(lambda: graph.launch(stream), results)


class TorchArrays(Arrays):
    """Arrays of PyTorch on CUDA; on another device than "cuda" only in tests."""

    def __init__(self, number: int | None = None, where: str = "cuda") -> None:
        try:
            self.torch: Any = import_module("torch")
        except ImportError as error:
            raise MissingError(str(error)) from error
        torch = self.torch
        self.version = f"torch {torch.__version__}"
        if where == "cuda":
            if not torch.cuda.is_available():
                raise MissingError(f"{self.version} finds no CUDA device, or was built without CUDA")
            if number is not None and number >= torch.cuda.device_count():
                raise MissingError(f"there is no CUDA device {number}; there are {torch.cuda.device_count()}")
            self._number = torch.cuda.current_device() if number is None else number
            where = f"cuda:{self._number}"
        self._where = where
        torch.set_grad_enabled(False)
        torch.backends.cuda.matmul.allow_tf32 = False

    def holds(self, names: Collection[str]) -> bool:
        return all(hasattr(self.torch, BY_NAME[name].numpy) for name in names)

    def put(self, x: Any) -> Any:
        return as_tensor(x).to(self._where, copy=True)

    def store(self, to: Any, x: Any) -> None:
        to.copy_(as_tensor(x))

    def transposed(self, x: Any) -> Any:
        return x.transpose(-1, -2)

    def host(self, x: Any) -> Any:
        return as_numpy(x.cpu())

    def wait(self) -> None:
        self.torch.cuda.synchronize()

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def working(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = nullcontext()
        return context if self._where == "cpu" else self.torch.cuda.device(self._number)

    def graph(self, calls: Sequence[Callable[[], Any]]) -> tuple[Callable[[], object], Any]:
        with self.working():
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                results = [call() for call in calls]
        return _replay(graph.replay, results)


def _replay(launch: Callable[[], object], results: list[Any]) -> tuple[Callable[[], object], Any]:
    """A graph's launch, which keeps the results of its calls, and the last of them."""

    def replay(_kept: Any = results) -> None:
        launch()

    return replay, results[-1]


class OpenClArrays(Arrays):
    """Arrays of PyOpenCL, on the first GPU or else the first device; it has all types, which are bytes to it."""

    def __init__(self) -> None:
        try:
            device = opencl.default_device()
        except PortmmError as error:
            raise MissingError(str(error)) from error
        module: Any = import_module("pyopencl")
        self._array: Any = import_module("pyopencl.array")
        self.version = f"pyopencl {module.VERSION_TEXT}"
        # Intel's queues hold no reference to their context.
        self._context: Any = module.Context([device])
        self.queue: Any = module.CommandQueue(self._context)

    def holds(self, names: Collection[str]) -> bool:
        return bool(names)

    def put(self, x: Any) -> Any:
        return self._array.to_device(self.queue, x)

    def store(self, to: Any, x: Any) -> None:
        to.set(x, self.queue)

    def host(self, x: Any) -> Any:
        return x.get(self.queue) if x.flags.c_contiguous else self.transposed(x).get(self.queue).swapaxes(-1, -2)

    def wait(self) -> None:
        self.queue.finish()

    def address(self, x: Any) -> int:
        return int(x.data.int_ptr)

    def stream(self) -> int:
        return int(self.queue.int_ptr)
