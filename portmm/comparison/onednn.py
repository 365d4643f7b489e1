"""oneDNN, through its C interface.

Owns one contender: the sgemm call, and the matmul primitive with plain and
with opaque ("any") weight formats, and with post-ops for epilogues. The numbers are those
of oneDNN's C headers, version 3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char, c_float, c_int, c_int64, c_long, c_void_p
from dataclasses import dataclass
from typing import Any

from portmm.comparison import fused, native
from portmm.comparison.case import Case
from portmm.comparison.data import INPUTS, Arrays
from portmm.comparison.peers import Library, MissingError, Run, Setup, UnsupportedError

CPU = 1
IN_ORDER = 1
TYPES = {"f16": 1, "bf16": 2, "f32": 3, "s32": 4, "s8": 5, "u8": 6, "f64": 7}
TAG_ANY = 1
QUERY_WEIGHTS = 131
SOURCE, WEIGHTS, BIAS, DESTINATION = 1, 33, 41, 17
OPERAND, POST_OP = 2, 32768
ADD, MULTIPLY = 0x1FFF0, 0x1FFF1
ELTWISE = {"relu": 0x20, "gelu_tanh": 0x2B, "silu": 0x2C, "gelu": 0x31}
SCALES = 4096
BY_COLUMN = 2


class _Version(ctypes.Structure):
    _fields_ = (("major", c_int), ("minor", c_int), ("patch", c_int))


class _Argument(ctypes.Structure):
    _fields_ = (("index", c_int), ("memory", c_void_p))


@dataclass(frozen=True, slots=True)
class _Opened:
    library: Any
    engine: c_void_p
    stream: c_void_p
    threads: int

    def memory(self, described: c_void_p, array: Any) -> c_void_p:
        """A memory object over an array."""
        return _created(self.library.dnnl_memory_create, described, self.engine, native.pointer(array))


def open_onednn(setup: Setup) -> Library:
    """Open oneDNN: its sgemm and matmul primitive, with a loop after it for scales by row."""
    packages = ["onednn-cpu-gomp", "onednn-cpu-iomp", "onednn"]
    library = native.loaded(["libdnnl.so*"], packages=packages, system=["dnnl"])
    native.driver()
    library.dnnl_version.restype = ctypes.POINTER(_Version)
    version = library.dnnl_version().contents
    if version.major != 3:
        raise MissingError(f"oneDNN {version.major}.{version.minor} has another C interface than 3")
    engine = _created(library.dnnl_engine_create, CPU, ctypes.c_size_t(0))
    opened = _Opened(library, engine, _created(library.dnnl_stream_create, engine, IN_ORDER), setup.threads)

    def prepare(case: Case, data: Arrays) -> dict[str, Run]:
        native.only(not case.block and (case.whole or not case.scaled), "no float-by-integer products in this version")
        methods = {}
        if case.dtype == "f32" and case.batch == 1 and not case.fused:
            methods["sgemm"] = _sgemm(library, case, data)
        for name, any_weights in (("matmul", False), ("matmul, any weights", True)):
            if any_weights and not case.packed:
                continue
            try:
                methods[name] = _matmul(opened, case, data, any_weights)
            except UnsupportedError:
                if not methods:
                    raise
        return methods

    name = f"oneDNN {version.major}.{version.minor}.{version.patch}"
    return Library(name, prepare, dtypes=None, precision=INPUTS, fused=True)


def _created(function: Any, *arguments: Any) -> c_void_p:
    """Call one of oneDNN's constructors, whose first argument receives the object."""
    handle = c_void_p()
    status = function(byref(handle), *arguments)
    if status:
        raise UnsupportedError(f"{function.__name__} returned {status}")
    return handle


def _sgemm(library: Any, case: Case, data: Arrays) -> Run:
    order, ta, tb, lda, ldb, ldc = native.flags(case)
    marks = {native.NORMAL: b"N", native.TRANSPOSED: b"T"}
    left = (marks[ta], case.m, data.a, lda)
    right = (marks[tb], case.n, data.b, ldb)
    if order == native.COLUMN:
        # sgemm is row-major: C^T = B^T . A^T.
        left, right = right, left
    after: list[Any] = [c_char(left[0]), c_char(right[0]), *map(c_int64, (left[1], right[1], case.k))]
    for array, lead in ((left[2], left[3]), (right[2], right[3]), (data.c, ldc)):
        after += [native.pointer(array), c_int64(lead)]
    return native.counted(native.driver().loop_dnnl_sgemm, [native.address(library.dnnl_sgemm)], after, data)


def _described(library: Any, array: Any, dtype: int, any_format: bool = False) -> c_void_p:
    dims = (c_int64 * array.ndim)(*array.shape)
    if any_format:
        return _created(library.dnnl_memory_desc_create_with_tag, array.ndim, dims, dtype, TAG_ANY)
    strides = (c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
    return _created(library.dnnl_memory_desc_create_with_strides, array.ndim, dims, dtype, strides)


def _matmul(opened: _Opened, case: Case, data: Arrays, any_weights: bool) -> Run:
    library, engine = opened.library, opened.engine
    types = [TYPES[x] for x in case.types]
    a, b, c = (_described(library, x, t) for x, t in zip((data.a, data.b, data.c), types, strict=True))
    wanted = _described(library, data.b, types[1], any_format=True) if any_weights else b
    attributes, more = _attributes(opened, case, data)
    # With scales by row the bias is a post-op, since it is added after them.
    first = case.fused.startswith("bias") and not case.scaled
    bias = _described(library, data.bias.reshape(1, -1), types[2]) if first else None
    description = _created(library.dnnl_matmul_primitive_desc_create, engine, a, wanted, bias, c, attributes)
    primitive = _created(library.dnnl_primitive_create, description)
    memories = [opened.memory(a, data.a), opened.memory(c, data.c)]
    plain = opened.memory(b, data.b)
    weights = _reordered(opened, description, plain, b) if any_weights else plain
    if bias is not None:
        more.append((BIAS, opened.memory(bias, data.bias)))
    arguments = _arguments([(SOURCE, memories[0]), (WEIGHTS, weights), (DESTINATION, memories[1]), *more])
    before = [native.address(library.dnnl_primitive_execute), native.address(library.dnnl_stream_wait)]
    after = [primitive, opened.stream, len(arguments), byref(arguments)]
    if case.scaled and not case.fused:
        # Scales of the source have no rows in this version, and its own primitive for them runs at a tenth of this.
        sizes = [c_long(case.m), c_long(case.n), native.pointer(data.rows), native.pointer(data.c)]
        loop = native.driver(opened.threads).loop_dnnl_scaled
        return native.counted(loop, before, [*after, *sizes], (data, arguments))
    return native.counted(native.driver().loop_dnnl_execute, before, after, (data, arguments))


def _attributes(opened: _Opened, case: Case, data: Arrays) -> tuple[c_void_p, list[tuple[int, c_void_p]]]:
    """Attributes for scales of the weights by column and for the epilogue, and their arguments."""
    library = opened.library
    arguments: list[tuple[int, c_void_p]] = []
    attributes = _created(library.dnnl_primitive_attr_create)
    if case.scaled:
        described = _described(library, data.columns, TYPES["f32"])
        memory = opened.memory(described, data.columns)
        status = library.dnnl_primitive_attr_set_scales_mask(attributes, WEIGHTS, BY_COLUMN)
        native.only(status == 0, f"scales by column returned {status}")
        arguments.append((SCALES | WEIGHTS, memory))
    chain = _created(library.dnnl_post_ops_create)
    for i, (kind, array, dtype) in enumerate(_post_ops(case, data)):
        if array is None:
            # Alpha is the factor of negative numbers of relu, and that of the exponent of silu.
            alpha = c_float(kind != ELTWISE["relu"])
            status = library.dnnl_post_ops_append_eltwise(chain, kind, alpha, c_float(0))
        else:
            described = _described(library, array, TYPES[dtype])
            status = library.dnnl_post_ops_append_binary(chain, kind, described)
            memory = opened.memory(described, array)
            arguments.append((POST_OP * (i + 1) | OPERAND, memory))
        native.only(status == 0, f"a post-op returned {status}")
    status = library.dnnl_primitive_attr_set_post_ops(attributes, chain)
    native.only(status == 0, f"post-ops returned {status}")
    return attributes, arguments


def _post_ops(case: Case, data: Arrays) -> list[tuple[int, Any, str]]:
    """Post-ops of a fused case: kinds, with an array and its type where they have one."""
    words = fused.steps(case.fused)
    operations: list[tuple[int, Any, str]] = []
    if words and case.scaled:
        operations.append((MULTIPLY, data.rows.reshape(-1, 1), "f32"))
    elif words and words[0] == "bias":
        words = words[1:]
    for word in words:
        if word in fused.ADDED:
            array = data.added[word]
            operations.append((ADD, array.reshape(-1, case.n), case.types[2]))
        else:
            operations.append((ELTWISE[word], None, ""))
    return operations


def _reordered(opened: _Opened, description: c_void_p, plain: c_void_p, described: c_void_p) -> c_void_p:
    library, engine, stream = opened.library, opened.engine, opened.stream
    query = library.dnnl_primitive_desc_query_md
    query.restype = c_void_p
    wanted = c_void_p(query(description, QUERY_WEIGHTS, 0))
    weights = _created(library.dnnl_memory_create, wanted, engine, c_void_p(-1))
    reorder = _created(library.dnnl_reorder_primitive_desc_create, described, engine, wanted, engine, None)
    primitive = _created(library.dnnl_primitive_create, reorder)
    arguments = _arguments(((SOURCE, plain), (DESTINATION, weights)))
    library.dnnl_primitive_execute(primitive, stream, 2, byref(arguments))
    library.dnnl_stream_wait(stream)
    return weights


def _arguments(pairs: Sequence[tuple[int, c_void_p]]) -> Any:
    return (_Argument * len(pairs))(*(_Argument(index, memory) for index, memory in pairs))
