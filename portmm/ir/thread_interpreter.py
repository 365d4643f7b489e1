"""Interpreter of kernels over a grid: the meaning of nodes for threads of a device.

Owns `run_grid`. Threads of a block are threads of this process that meet at barriers; blocks run one after another. As
in `ir.interpreter`, accesses are checked, and shared memory that was never written is NaN. What the lanes of a warp
multiply together, or load as matrices, follows from the rows of fragments alone: `ir.warp_values`. Barriers, copies of
boxes and products of warpgroups: `ir.warpgroup_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from threading import Barrier as Meeting
from threading import BrokenBarrierError, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.ir import warp_values, warpgroup_values
from portmm.ir.index import Ptr
from portmm.ir.interpreter import UNWRITTEN, Address, _Frame, _Machine, _view, evaluate
from portmm.ir.register_values import numpy_type
from portmm.spec.dtype import BY_NAME, base
from portmm.target.device import CUDA_WARP

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel, MapOf
    from portmm.ir.nodes import LetPtr, Mac
    from portmm.ir.thread_nodes import (
        Barrier,
        Clear,
        CopyAsync,
        CopyCommit,
        CopyWait,
        Do,
        Exchange,
        Get,
        Shared,
        Vector,
    )

PATIENCE = 60.0
"""Seconds that threads wait for others at a barrier, which then will not come."""


def run_grid(
    kernel: GridKernel,
    numbers: Mapping[str, Any],
    arrays: Mapping[str, Address],
    machine: Callable[..., _Thread] | None = None,
) -> None:
    """Execute a kernel of a device on NumPy arrays.

    Args:
        kernel: the kernel.
        numbers: its integers and floats by name.
        arrays: pointers by name -> (1-D array, offset of element zero).
        machine: makes another thread, whose registers hold other numbers.

    Raises:
        IndexError: an access leaves its array.
        KeyError: a register or name is read before it is written.
        RuntimeError: not all threads of a block reach a barrier.
    """
    pointers = {x.name: _view(*arrays[x.name], x.dtype) for x in kernel.arguments if x.kind == "pointer"}
    whole = {x.name: int(numbers[x.name]) for x in kernel.arguments if x.kind in ("int", "long")}
    real = {x.name: np.full(1, numbers[x.name], np.float32) for x in kernel.arguments if x.kind == "float"}
    blocks, slices = (range(evaluate(x, numbers)) for x in kernel.grid)
    word: Any = cache(kernel.isa.word)
    meanings: dict[int, Any] = {}
    for part, block in product(slices, blocks):
        meet = _Block(kernel, numbers, arrays)
        at = [whole | {"block": block, "slice": part, "thread": i} for i in range(kernel.threads)]
        make = _Thread if machine is None else machine
        each = [make(kernel, word, x, pointers, None, meanings=meanings, meet=meet) for x in at]
        threads = [Thread(target=x.run, args=(real,)) for x in each]
        for x in threads:
            x.start()
        for x in threads:
            x.join()
        if errors := sorted((x.error for x in each if x.error), key=lambda e: isinstance(e, BrokenBarrierError)):
            lost = isinstance(errors[0], BrokenBarrierError)
            raise RuntimeError(f"{kernel.name}: some threads do not reach a barrier") if lost else errors[0]


class _Block:
    """The threads of a block, with their shared memory, and the tensors that its copies read."""

    def __init__(self, kernel: GridKernel, numbers: Mapping[str, Any], arrays: Mapping[str, Address]) -> None:
        threads, warp = kernel.threads, kernel.isa.warp or CUDA_WARP
        self.all = Meeting(threads, timeout=PATIENCE)
        self.warp = warp
        sizes = [min(warp, threads - i) for i in range(0, threads, warp)]
        self.warps = [Meeting(x, timeout=PATIENCE) for x in sizes]
        self.exchanged: list[Any] = [None] * threads
        self.layout = {x.name: at for x, at in kernel.layout.items()}
        self.shared = np.full(kernel.shared_bytes, UNWRITTEN, np.uint8)
        self.mbarriers: dict[int, warpgroup_values.Mbarrier] = {}
        self.tensors = {x.name: (x.map, _tensor(x.map, numbers, arrays)) for x in kernel.arguments if x.map}

    def abort(self) -> None:
        """Release all threads that wait."""
        for meeting in (self.all, *self.warps):
            meeting.abort()
        for barrier in tuple(self.mbarriers.values()):
            barrier.abort()


def _tensor(of: MapOf, numbers: Mapping[str, Any], arrays: Mapping[str, Address]) -> np.ndarray:
    """The array (items, rows, elements) of a tensor map."""
    array, at, _ = _view(*arrays[of.pointer], of.dtype)
    shape, strides = ([evaluate(x, numbers) for x in reversed(y)] for y in (of.sizes, of.strides))
    return np.lib.stride_tricks.as_strided(array[at:], shape, [x * array.itemsize for x in (*strides, 1)])


@dataclass(slots=True)
class _Thread(_Machine):
    """One thread of a block."""

    meet: _Block = field(kw_only=True)
    error: BaseException | None = None
    copies: list[list[Any]] = field(default_factory=lambda: [[]])
    """Groups of asynchronous copies, the last of which is open: what they write is visible after a wait only."""

    def run(self, registers: Mapping[str, np.ndarray]) -> None:
        """Execute the body, and keep the error that ends it."""
        try:
            self.body(
                self.kernel.body, _Frame(self.kernel.atom, dict(self.block), dict(self.pointers), dict(registers))
            )
        except BaseException as error:  # noqa: BLE001 - raised by the caller, in its thread
            self.error = error
            self.meet.abort()

    def do_shared(self, s: Shared, f: _Frame) -> None:
        at = self.meet.layout[s.name]
        f.ptrs[s.name] = _view(self.meet.shared[at : at + s.elements * BY_NAME[s.dtype].bytes], 0, s.dtype)

    def do_letptr(self, s: LetPtr, f: _Frame) -> None:
        array, at, name = self.at(s.value, f, 0)
        if np.may_share_memory(array, self.meet.shared):  # results reuse the memory of all tiles, which are neighbours
            first = array.__array_interface__["data"][0] - self.meet.shared.__array_interface__["data"][0]
            array = _view(self.meet.shared[first:], 0, name)[0]
        f.ptrs[s.name] = _view(array, at, s.dtype)

    def do_barrier(self, _: Barrier, __: _Frame) -> None:
        self.meet.all.wait()

    @property
    def lane(self) -> int:
        """Number of this thread in its warp."""
        return self.block["thread"] % self.meet.warp

    def shared_by_warp(self, own: Any) -> list[Any]:
        """Values of all lanes of this thread's warp, which meet here."""
        me, size = self.block["thread"], self.meet.warp
        warp = self.meet.warps[me // size]
        self.meet.exchanged[me] = own
        warp.wait()
        first = me // size * size
        every = self.meet.exchanged[first : first + size]
        warp.wait()
        return every

    def do_exchange(self, s: Exchange, f: _Frame) -> None:
        every = self.shared_by_warp(f.regs[s.x])
        f.regs[s.d] = every[self.lane ^ s.mask]

    def elements_at(self, p: Ptr, f: _Frame, count: int, dtype: np.dtype) -> np.ndarray:
        """The first `count` elements of a type in the registers at an address, which they share."""
        name = f.ptrs[p.name][2]
        array, at, _ = self.at(p, f, -(-count * dtype.itemsize // BY_NAME[name].bytes))
        return array[at:].view(np.uint8)[: count * dtype.itemsize].view(dtype)

    def do_mac(self, s: Mac, f: _Frame) -> None:
        atom = self.kernel.atom
        if atom.unit != "warp":
            _Machine.do_mac(self, s, f)
            return
        left, right, sums = warp_values.fragments(atom)
        a = self.elements_at(s.a, f, left.elements, numpy_type(base(atom.a)))
        b = self.elements_at(s.b, f, right.elements, numpy_type(base(atom.b)))
        every = self.shared_by_warp((a.copy(), b.copy()))
        d = self.elements_at(s.d, f, sums.elements, numpy_type(atom.acc))
        d += warp_values.multiplied(atom, every)[warp_values.places(sums)[self.lane]].astype(d.dtype)

    def shared_at(self, p: Ptr, f: _Frame) -> int:
        """The offset in bytes of an address in shared memory."""
        array, at, _ = self.at(p, f, 0)
        return array.ctypes.data - self.meet.shared.ctypes.data + at * array.itemsize

    def do_get(self, s: Get, f: _Frame) -> None:
        numbers = [self.value(x, f) for x in s.args if not isinstance(x, Ptr)]
        at = [self.shared_at(x, f) for x in s.args if isinstance(x, Ptr)]
        if s.primitive == "matrix_descriptor":
            f.ints[s.name] = warpgroup_values.descriptor(*at, *numbers)
        elif s.primitive == "shuffle_idx_s32":  # of a number that all lanes have
            f.ints[s.name] = numbers[0]
        else:
            warp_values.primitive(s.primitive)

    def of_warpgroup(self, s: Do, f: _Frame) -> bool:
        """Do what warpgroups do; False where it is something else."""
        pointers = [x for x in s.args if isinstance(x, Ptr)]
        numbers = [self.value(x, f) for x in s.args if not isinstance(x, Ptr)]
        if s.name in ("mbarrier_init", "mbarrier_expect", "mbarrier_arrive", "mbarrier_wait"):
            self.at_barrier(s.name, self.shared_at(pointers[0], f), *numbers)
        elif s.name == "tma_load":
            to, tensor, barrier = pointers
            lines = warpgroup_values.box(*self.meet.tensors[tensor.name], numbers)
            warpgroup_values.land(self.meet.shared, self.shared_at(to, f), lines)
            self.meet.mbarriers[self.shared_at(barrier, f)].add(0, -lines.size)
        elif form := warpgroup_values.PRODUCT.fullmatch(s.name):
            atom, (*sides, keep) = self.kernel.atom, numbers
            types = [numpy_type(base(x)) for x in (atom.a, atom.b)]
            whole = warpgroup_values.product(form, self.meet.shared, sides, types)
            own = warpgroup_values.of_lane(whole, atom.acc_fragment, self.block["thread"] % atom.acc_fragment.lanes)
            d = self.elements_at(pointers[0], f, len(own), numpy_type(atom.acc))
            d[:] = d + own.astype(d.dtype) if keep else own
        else:
            return s.name.startswith(warpgroup_values.SILENT)
        return True

    def at_barrier(self, name: str, at: int, number: int = 0) -> None:
        """Make a barrier for some arrivals, wait for the end of a phase, or arrive, and expect some bytes."""
        if name == "mbarrier_init":
            self.meet.mbarriers[at] = warpgroup_values.Mbarrier(number)
        elif name == "mbarrier_wait":
            self.meet.mbarriers[at].wait(number, PATIENCE)
        else:
            self.meet.mbarriers[at].add(1, number)

    def do_do(self, s: Do, f: _Frame) -> None:
        if self.of_warpgroup(s, f):
            return
        fragment, pointers = self.kernel.isa.fragments.get(s.name), [x for x in s.args if isinstance(x, Ptr)]
        if fragment is None:
            warp_values.primitive(s.name)(*(self.elements_at(p, f, 1, np.dtype(np.uint32)) for p in pointers))
            return
        to, src = pointers
        array, at, _ = self.at(src, f, warp_values.ROW_BYTES // BY_NAME[f.ptrs[src.name][2]].bytes)
        rows = warp_values.loaded(fragment, self.shared_by_warp((array, at)))
        own = rows[warp_values.places(fragment)[self.lane]]
        self.elements_at(to, f, fragment.elements, own.dtype)[:] = own

    def do_vector(self, s: Vector, f: _Frame) -> None:
        count = s.bytes // BY_NAME[f.ptrs[s.to.name][2]].bytes
        (to, i, _), (src, j, _) = self.at(s.to, f, count), self.at(s.src, f, count)
        to[i : i + count] = src[j : j + count]

    def do_clear(self, s: Clear, f: _Frame) -> None:
        array, at, _ = f.ptrs[s.name]
        array[at : at + s.count] = 0

    def do_copyasync(self, s: CopyAsync, f: _Frame) -> None:
        count = s.bytes // BY_NAME[f.ptrs[s.to.name][2]].bytes
        to, i, _ = self.at(s.to, f, count)
        values: Any = 0
        if self.value(s.there, f):
            src, j, _ = self.at(s.src, f, count)
            values = src[j : j + count].copy()
        self.copies[-1].append((to, slice(i, i + count), values))

    def do_copycommit(self, _: CopyCommit, __: _Frame) -> None:
        self.copies.append([])

    def do_copywait(self, s: CopyWait, _: _Frame) -> None:
        first = max(len(self.copies) - 1 - s.pending, 0)
        for to, at, values in (x for group in self.copies[:first] for x in group):
            to[at] = values
        del self.copies[:first]
