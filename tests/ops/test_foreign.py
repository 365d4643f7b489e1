"""Arrays of other libraries: where their elements are, and new ones of the same kind."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cuda_fakes import FakeCupy, FakeTorch, Tensor, install, ndarray
from opencl_cpu import opencl_device

from portmm.arrays import operand
from portmm.arrays.interop import adopt, empty_like
from portmm.arrays.operand import address, same_device
from portmm.errors import NoDeviceError
from portmm.runtime import opencl


@pytest.fixture
def cupy(monkeypatch):
    return install(monkeypatch, FakeCupy())


@pytest.fixture
def torch(monkeypatch):
    return install(monkeypatch, FakeTorch())


@pytest.fixture
def cl():
    opencl_device()
    import pyopencl.array

    return pyopencl


@pytest.fixture
def queue():
    return opencl_device()[1]


# -- what is not adopted -----------------------------------------------------------------


class OnHost:
    """As NumPy-like arrays of other libraries."""

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self):
        raise AssertionError


class Subclass(np.ndarray):
    pass


NOT = [np.zeros(3), np.zeros(3).view(Subclass), np.float32(1), 1, 1.5, [1], (1,), "x", None, object(), OnHost()]


@pytest.mark.parametrize("x", NOT, ids=[f"{i}-{type(x).__name__}" for i, x in enumerate(NOT)])
def test_what_is_in_the_hosts_memory(x):
    assert adopt(x) is None


def test_nothing_is_imported_for_it():
    script = """
import sys
import numpy
from portmm.arrays.interop import adopt
assert adopt(numpy.zeros(3)) is None
assert adopt(object()) is None
assert not {"cupy", "torch", "pyopencl", "ctypes.util", "numba"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- CuPy --------------------------------------------------------------------------------


def test_cupy(cupy):
    cupy.streams[1] = 55
    x = ndarray((3, 4), "f4", at=4096, strides=(-16, 4), device=1)
    found = adopt(x)
    assert found.source is x
    assert (found.language, found.device, found.pointer, found.queue) == ("cuda", ("cuda", 1), 4096, 55)
    assert (found.shape, found.strides, found.dtype, found.readonly) == ((3, 4), (-16, 4), "f32", False)
    assert address(found) == 4096


TYPES = [
    ("float32", "f32"), ("float64", "f64"), ("float16", "f16"), (ml_dtypes.bfloat16, "bf16"),
    (ml_dtypes.float8_e4m3fn, "e4m3"), (ml_dtypes.float8_e5m2, "e5m2"),
    ("int8", "s8"), ("uint8", "u8"), ("int16", "s16"), ("int32", "s32"),
]  # fmt: skip


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize(("dtype", "name"), TYPES)
def test_types(dtype, name):
    assert adopt(ndarray((2,), dtype)).dtype == name


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("dtype", ["complex64", "int64", "bool", ml_dtypes.float8_e4m3b11fnuz])
def test_types_that_there_are_not(dtype):
    with pytest.raises(TypeError, match=f"elements of type {np.dtype(dtype).name}; portmm takes float32"):
        adopt(ndarray((2,), dtype))


@pytest.mark.usefixtures("cupy")
def test_the_other_byte_order():
    with pytest.raises(TypeError, match="float32 of the other byte order"):
        adopt(ndarray((2,), ">f4"))


def test_shapes_of_any_kind(cupy):
    for shape, strides in (((0, 4), (16, 4)), ((), ()), ((5, 3), (0, 4)), ((4,), (-4,))):
        found = adopt(ndarray(shape, "f4", strides=strides, at=0 if 0 in shape else 4096))
        assert (found.shape, found.strides) == (shape, strides)
        assert found.size == np.prod(shape)
    assert not cupy.log


def test_a_new_array_of_cupy(cupy):
    cupy.streams[1] = 9
    like = adopt(ndarray((3, 4), "f4", device=1))
    found = empty_like(like, (2, 5), "bf16")
    made = found.source
    assert found == adopt(made)
    assert (found.shape, found.strides, found.dtype, found.device) == ((2, 5), (10, 2), "bf16", ("cuda", 1))
    assert found.queue == 9
    assert cupy.log == [("empty", 1, 9)]
    assert cupy.current == 0


def test_bfloat16_of_an_older_cupy(cupy, monkeypatch):
    def refuse(*_a, **_k):
        raise TypeError("unsupported dtype")

    monkeypatch.setattr(cupy, "empty", refuse)
    like = adopt(ndarray((3,), "f4"))
    with pytest.raises(TypeError, match="cannot allocate an array of bfloat16"):
        empty_like(like, (3,), "bf16")


# -- the CUDA array interface, and DLPack ------------------------------------------------


class Interface:
    """As numba's arrays."""

    def __init__(self, **more):
        interface = {"shape": (3, 4), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None}
        self.__cuda_array_interface__ = {**interface, **more}


def test_an_interface(cupy):
    cupy.addresses[4096], cupy.streams[1] = 1, 7
    x = Interface()
    found = adopt(x)
    assert found.source is x
    assert (found.device, found.pointer, found.queue, found.dtype) == (("cuda", 1), 4096, 7, "f32")
    assert (found.shape, found.strides, found.readonly) == ((3, 4), (16, 4), False)
    assert adopt(Interface(stream=2)).queue == 2
    assert adopt(Interface(data=(4096, True))).readonly
    assert adopt(Interface(strides=(4, -12))).strides == (4, -12)
    empty = adopt(Interface(shape=(0, 4), data=(0, False)))
    assert (empty.pointer, empty.size, empty.device) == (0, 0, ("cuda", 0))


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"typestr": "<c8"}, "elements of type complex64"),
        ({"typestr": ">f4"}, "of the other byte order"),
        ({"typestr": "<V2"}, "elements of type void16"),
        ({"mask": object()}, "has a mask"),
    ],
)
def test_interfaces_that_are_refused(more, message):
    with pytest.raises(TypeError, match=f"type Interface.*{message}"):
        adopt(Interface(**more))


def test_an_interface_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NoDeviceError, match=r"type Interface needs CuPy.*pip install cupy"):
        adopt(Interface())


def test_a_new_array_for_an_interface_is_cupys(cupy):
    """Its memory is taken for the stream that will write it."""
    cupy.addresses[4096] = 1
    like = adopt(Interface(stream=33))
    found = empty_like(like, (2,), "f32")
    made = found.source
    assert type(made) is ndarray
    assert found.device == ("cuda", 1)
    assert cupy.log == [("empty", 1, 33)]
    assert cupy.streams[1] == 0


def test_dlpack(cupy):
    x = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (2, 0))
    found = adopt(x)
    assert cupy.log == [("from_dlpack", x)]
    assert (found.device, found.pointer, found.shape) == (("cuda", 0), 64, (2,))
    assert type(found.source) is ndarray


# -- PyTorch -----------------------------------------------------------------------------


class Parameter(Tensor):
    """As torch.nn's, and users' own."""


def test_torch(torch):
    x = Tensor((3, 4), torch.float64, at=8192, strides=(1, 3), device=1)
    found = adopt(x)
    assert found.source is x
    assert (found.language, found.device, found.pointer, found.queue) == ("cuda", ("cuda", 1), 8192, 101)
    assert (found.shape, found.strides, found.dtype, found.readonly) == ((3, 4), (8, 24), "f64", False)
    assert adopt(Parameter((2,), torch.bfloat16)).dtype == "bf16"
    assert adopt(Tensor((2,), torch.float32, cuda=False)) is None


def test_tensors_that_are_refused(torch):
    with pytest.raises(TypeError, match="elements of type complex64"):
        adopt(Tensor((2,), torch.complex64))
    with pytest.raises(TypeError, match=r"layout sparse.*to_dense"):
        adopt(Tensor((2,), torch.float32, layout="sparse"))
    with pytest.raises(TypeError, match="resolve_neg"):
        adopt(Tensor((2,), torch.float32, neg=True))


def test_a_new_tensor(torch):
    found = empty_like(adopt(Tensor((3, 4), torch.float32, device=1)), (2, 5), "bf16")
    made = found.source
    assert type(made) is Tensor
    assert made.dtype is torch.bfloat16
    assert (found.shape, found.strides, found.dtype) == ((2, 5), (10, 2), "bf16")
    assert (found.device, found.queue) == (("cuda", 1), 101)


# -- PyOpenCL ----------------------------------------------------------------------------


def test_pyopencl(cl, queue):
    x = cl.array.to_device(queue, np.arange(12, dtype=np.float32).reshape(3, 4))
    found = adopt(x)
    assert found.source is x
    assert found.language == "opencl"
    assert found.device == ("opencl", queue.context.int_ptr, queue.device.int_ptr)
    assert found.pointer == (x.base_data, 0)
    assert (found.shape, found.strides, found.dtype, found.readonly) == ((3, 4), (16, 4), "f32", False)
    assert found.queue is queue


def test_slices_of_pyopencl(cl, queue):
    x = cl.array.to_device(queue, np.arange(60, dtype=np.float32).reshape(6, 10))
    view = x[2:, 1::3]
    found = adopt(view)
    assert found.pointer == (x.base_data, 84)
    assert (found.shape, found.strides) == ((4, 3), (40, 12))
    assert address(found) == (x.base_data, 21)
    assert adopt(x.T).strides == (4, 40)
    assert adopt(x[::-1]).pointer == (x.base_data, 200)
    assert adopt(x[::-1]).strides == (-40, 4)


@pytest.mark.parametrize(("dtype", "name"), TYPES)
def test_types_of_pyopencl(cl, queue, dtype, name):
    assert adopt(cl.array.empty(queue, (3,), dtype)).dtype == name


def test_a_type_that_pyopencl_has_and_portmm_not(cl, queue):
    with pytest.raises(TypeError, match="a PyOpenCL array has elements of type uint32"):
        adopt(cl.array.empty(queue, (3,), np.uint32))


def test_pyopencl_without_elements(cl, queue):
    found = adopt(cl.array.empty(queue, (0, 4), np.float32))
    assert (found.pointer, found.size) == ((None, 0), 0)


def test_pyopencl_without_a_queue(cl, queue):
    x = cl.array.Array(queue.context, (3,), np.float32)
    found = adopt(x)
    assert found.queue is opencl.default_queue(queue.context)
    assert found.device == adopt(cl.array.empty(queue, (3,), np.float32)).device


def test_a_buffer_for_reading_only(cl, queue):
    data = cl.Buffer(queue.context, cl.mem_flags.READ_ONLY, 64)
    assert adopt(cl.array.Array(queue, (4,), np.float32, data=data)).readonly


def test_svm(cl, queue):
    allocator = cl.tools.SVMAllocator(queue.context, flags=cl.svm_mem_flags.READ_WRITE, queue=queue)
    x = cl.array.to_device(queue, np.arange(8, dtype=np.float32), allocator=allocator)
    found = adopt(x[2:])
    assert found.pointer == (x.base_data, 8)
    assert not found.readonly
    new = empty_like(found, (4,), "f32")
    made = new.source
    assert isinstance(made.base_data, cl.SVMPointer)
    queue.finish()


def test_a_new_array_of_pyopencl(cl, queue):
    taken = []

    def allocator(size):
        taken.append(size)
        return cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, size)

    like = adopt(cl.array.empty(queue, (3, 4), np.float32, allocator=allocator)[1:])
    found = empty_like(like, (2, 5), "bf16")
    made = found.source
    assert isinstance(made, cl.array.Array)
    assert (found.shape, found.strides, found.dtype, found.pointer) == ((2, 5), (10, 2), "bf16", (made.base_data, 0))
    assert (made.queue, found.device) == (queue, like.device)
    assert taken == [48, 20]


def test_a_kernel_between_adopted_arrays(cl, queue):
    source = """
__kernel void copy(__global const float *a, long ao, __global float *b, long bo, long row, long col)
{
    long i = get_global_id(0), j = get_global_id(1);
    b[bo + i * get_global_size(1) + j] = a[ao + i * row + j * col];
}
"""
    kernel = opencl.load(opencl.compile_opencl(source, "copy", queue.context), "copy")
    host = np.arange(60, dtype=np.float32).reshape(6, 10)
    x = adopt(cl.array.to_device(queue, host)[::-2, 1::3])
    out = empty_like(x, x.shape, x.dtype)
    made = out.source
    row, col = (s // 4 for s in x.strides)
    opencl.launch(
        kernel,
        x.shape,
        (1, 1),
        [("pointer", address(x)), ("pointer", address(out)), ("long", row), ("long", col)],
        out.queue,
    )
    assert np.array_equal(made.get(), host[::-2, 1::3])


# -- several arrays ----------------------------------------------------------------------


@pytest.mark.usefixtures("cupy", "torch")
def test_one_device(cl, queue, torch):
    ours = [adopt(ndarray((2,), "f4")), adopt(Tensor((2,), torch.float32))]
    assert same_device(ours) == ("cuda", 0)
    with pytest.raises(ValueError, match="array 0 is on cuda:0 and array 2 on cuda:1; copy"):
        same_device([*ours, adopt(ndarray((2,), "f4", device=1))])
    theirs = adopt(cl.array.empty(queue, (2,), np.float32))
    with pytest.raises(ValueError, match=r"array 0 is on OpenCL device 0x.* and array 1 on cuda:0"):
        same_device([theirs, *ours])
    context = cl.Context([queue.device])  # which Intel's queues do not keep
    other = adopt(cl.array.empty(cl.CommandQueue(context), (2,), np.float32))
    with pytest.raises(ValueError, match="of context 0x"):
        same_device([theirs, other])


def test_elements_that_are_not_aligned(cl, queue, cupy):
    buffer = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 64)
    with pytest.raises(ValueError, match="begins 2 bytes past a multiple of 4"):
        address(adopt(cl.array.Array(queue, (4,), np.float32, data=buffer, offset=6)))
    with pytest.raises(ValueError, match="begins 1 bytes past a multiple of 4"):
        address(adopt(ndarray((4,), "f4", at=4097)))
    assert not cupy.log


@pytest.mark.parametrize(("shape", "size"), [((3, 4, 5), 4), ((0, 4), 2), ((), 8), ((7,), 1)])
def test_strides_in_order(shape, size):
    if 0 in shape:
        assert operand.contiguous(shape, size) == (8, 2)
    else:
        assert operand.contiguous(shape, size) == np.empty(shape, f"V{size}").strides


@pytest.mark.device
def test_on_a_real_device():
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.Device(0).use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(str(error))
    x = cupy.arange(24, dtype=cupy.float32).reshape(4, 6)[::-1, 1:]
    found = adopt(x)
    assert (found.pointer, found.strides, found.device) == (x.data.ptr, (-24, 4), ("cuda", 0))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert adopt(x).queue == stream.ptr
    out = empty_like(found, (2, 3), "bf16")
    made = out.source
    assert made.dtype == ml_dtypes.bfloat16
    assert adopt(SimpleNamespace(__cuda_array_interface__=x.__cuda_array_interface__)).device == found.device
    assert same_device([found, out]) == ("cuda", 0)


def test_a_tensor_that_requires_gradients_is_refused(torch):
    x = Tensor((2, 3), torch.float32)
    x.requires_grad, torch.is_grad_enabled = True, lambda: True
    with pytest.raises(TypeError, match="detach"):
        adopt(x)
    torch.is_grad_enabled = lambda: False
    assert adopt(x) is not None
