"""`compile`: a graph becomes a `Compiled` step; per batch shape it captures an `Executable`, which
replays in one native call.

All batch shapes share the persistent outputs (one address per output, for life), the staging buffer
and the code; an executable adds a context: the padded extents and the addresses bound at capture.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import passes
from .errors import BindError, CaptureError, CompileError
from .executable import Binding, Executable, InputKey, Outputs, Stats
from .ir import DTYPES, Graph, extent_of
from .lower import cpu, native, source
from .oracle import Key
from .passes.buffers import Buffer, assign_buffers, member_bytes
from .passes.coverage import check_coverage
from .passes.fusion import fusion
from .passes.placement import placement

log = logging.getLogger("stepgraph")


class Compiled:
    """A compiled step. Call it once a step: `out = step(B=5, T=5, num_computed_tokens=...)`.

    inputs: {name or (name, group): array} views of the staging buffer at full capacity; write them
        and call `executable(...)`.replay(...)` for the least host time.
    """

    def __init__(
        self,
        graph: Graph,
        capacity: Mapping[str, int],
        buckets: Mapping[str, Sequence[int]] | None = None,
        max_executables: int = 256,
        on_pass: Any = None,
    ) -> None:
        _check_capacity(graph, capacity)
        self.source_graph = graph
        self.graph = passes.run(graph, on_pass)
        self.capacity = {d: int(capacity[d]) for d in self.graph.dims}
        self.buckets = {d: _ladder(d, self.capacity[d], buckets) for d in self.graph.dims}
        self.schedule = fusion(self.graph)
        self.plan = assign_buffers(self.schedule, self.capacity)
        check_coverage(self.plan)
        self.placement = placement(self.plan.schedule.graph, self.capacity)
        self.source = cpu.generate(self.plan)
        self.stats = Stats()
        self._lock = threading.RLock()
        self._native = native.load(self.source)
        self.stats.compiles = int(self._native.origin == "compiled")
        self.stats.disk_hits = int(self._native.origin == "disk")
        self.stats.compile_seconds = self._native.seconds
        self.max_executables = max_executables
        self._executables: OrderedDict[Any, Executable] = OrderedDict()
        self._staging = _aligned(self.placement.nbytes)
        self._header = memoryview(self._staging.data)[: 8 * len(self.graph.dims)].cast("q")
        self.inputs: dict[Key, np.ndarray] = {}
        for slot in self.placement.slots:
            shape = tuple(extent_of(d, self.capacity, slot.member) for d in slot.node.aval.shape)
            raw = self._staging[slot.offset : slot.offset + slot.nbytes]
            groups = slot.node.param("groups")
            name = slot.node.param("name")
            key: Key = name if groups is None else (name, groups[slot.member])
            self.inputs[key] = raw.view(DTYPES[slot.node.aval.dtype]).reshape(shape)
        self._memory: dict[Buffer, list[np.ndarray]] = {}
        self._allocate()
        self._wanted: dict[InputKey, tuple[Any, int]] = {
            (node.param("name"), groups[m] if (groups := node.param("groups")) else None): (node, m)
            for node in self.graph.inputs
            if node.param("kind") != "host"
            for m in range(node.n or 1)
        }
        self._bound = Binding({})

    # -- memory

    def _allocate(self) -> None:
        persistent = [b for b in self.plan.buffers if b.kind == "output"]
        sizes = [member_bytes(b, self.capacity, m) for b in persistent for m in range(b.n or 1)]
        self.output_bytes = sum(sizes)
        arena = _aligned(self.output_bytes)
        scratch = _aligned(self.plan.scratch_bytes)
        offset = 0
        for buffer in self.plan.buffers:
            if buffer.kind == "input":
                continue
            place, memory = (offset, arena) if buffer.kind == "output" else (buffer.offset, scratch)
            views = []
            for m in range(buffer.n or 1):
                shape = tuple(extent_of(d, self.capacity, m) for d in buffer.aval.shape)
                dtype = DTYPES[buffer.aval.dtype]
                count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                views.append(memory[place : place + count].view(dtype).reshape(shape))
                place += member_bytes(buffer, self.capacity, m)
            if buffer.kind == "output":
                offset = place
            self._memory[buffer] = views

    @property
    def total_bytes(self) -> int:
        """Persistent, scratch and staging memory."""
        return self.output_bytes + self.plan.scratch_bytes + self.placement.nbytes

    def _views(self, padded: Mapping[str, int]) -> dict[Key, np.ndarray]:
        views: dict[Key, np.ndarray] = {}
        for out, buffer in self.plan.outputs:
            for m, array in enumerate(self._memory[buffer]):
                cut: Any = [slice(0, extent_of(d, padded, m)) for d in buffer.aval.shape]
                key: Key = out.name if out.groups is None else (out.name, out.groups[m])
                views[key] = array[(*cut, ...)]
        return views

    # -- binding

    def bind(self, name: str, arrays: Any) -> None:
        """Bind a device or state input by address, without a copy: an array, or {group: array}.

        An array is NumPy or anything with DLPack on the CPU; it is kept alive. Binding other
        addresses makes executables captured before unusable (they say so); executables for
        addresses seen before are found again.
        Raises BindError for a wrong name, group, dtype, shape, strides or device.
        """
        given = arrays if isinstance(arrays, Mapping) else {None: arrays}
        new = dict(self._bound.arrays)
        for group, array in given.items():
            key = (name, group)
            if key not in self._wanted:
                known = sorted(n if g is None else f"{n}[{g}]" for n, g in self._wanted)
                raise BindError(f"no device or state input {_label(key)!r}; there are {known}")
            new[key] = self._checked(key, array)
        binding = Binding(new)
        with self._lock:
            if binding.addresses() != self._bound.addresses():
                if self._executables and name in {n for n, _ in self._bound.arrays}:
                    self.stats.rebinds += 1
                    log.info("stepgraph: input %r was bound to other addresses", name)
                known_binding = next(
                    (
                        e._bound
                        for e in self._executables.values()
                        if e._bound.addresses() == binding.addresses()
                    ),
                    None,
                )
                self._bound = known_binding or binding

    def _checked(self, key: InputKey, array: Any) -> np.ndarray:
        node, m = self._wanted[key]
        aval, label = node.aval, _label(key)
        try:
            view = array if isinstance(array, np.ndarray) else np.from_dlpack(array)
        except Exception as err:
            raise BindError(
                f"input {label!r}: {type(array).__name__} has no CPU memory to bind: {err}"
            ) from None
        shape = tuple(extent_of(d, self.capacity, m) for d in aval.shape)
        if view.dtype != DTYPES[aval.dtype]:
            raise BindError(f"input {label!r} is {view.dtype}, the graph wants {aval.dtype}")
        if view.ndim != len(shape) or any(h < w for h, w in zip(view.shape, shape, strict=True)):
            raise BindError(f"input {label!r} has shape {view.shape}, the step reads up to {shape}")
        item = view.dtype.itemsize
        # the stride of a dim of extent 1 says nothing
        gaps = view.ndim and view.shape[-1] > 1 and view.strides[-1] != item
        if view.size and (gaps or (view.ndim and view.strides[0] % item)):
            raise BindError(f"input {label!r}: rows must be contiguous, strides are {view.strides}")
        if node.param("kind") == "state" and not view.flags.writeable:
            raise BindError(f"input {label!r} is updated in place, but the array is read-only")
        return view

    # -- executables

    def executable(self, **padded: int) -> Executable:
        """The executable of a batch shape given by its padded extents, captured if need be.

        Raises CaptureError for an extent above the capacity, BindError for an input never bound.
        """
        shape = []
        for dim in self.graph.dims:
            if dim not in padded:
                raise CaptureError(f"the padded extent of {dim} is missing")
            if not 0 <= padded[dim] <= self.capacity[dim]:
                raise CaptureError(
                    f"{dim}={padded[dim]} is outside the capacity 0..{self.capacity[dim]}; compile "
                    "with a larger capacity"
                )
            shape.append(int(padded[dim]))
        key = (tuple(shape), id(self._bound))
        with self._lock:
            found = self._executables.get(key)
            if found is not None:
                self._executables.move_to_end(key)
                return found
            if missing := [_label(k) for k in self._wanted if k not in self._bound.arrays]:
                raise BindError(f"inputs never bound: {', '.join(sorted(missing))}; use bind()")
            found = Executable(self, tuple(shape), self._bound)
            self._executables[key] = found
            self.stats.captures += 1
            while len(self._executables) > self.max_executables:
                self._executables.popitem(last=False)
                self.stats.evictions += 1
            return found

    def bucket(self, **extents: int) -> dict[str, int]:
        """The padded extents that a step of these actual extents runs with."""
        out = {}
        for dim in self.graph.dims:
            ladder, actual = self.buckets[dim], extents[dim]
            at = bisect_left(ladder, actual)
            if at == len(ladder):
                raise CaptureError(
                    f"{dim}={actual} is above the capacity {self.capacity[dim]}; compile with a "
                    "larger capacity"
                )
            out[dim] = ladder[at]
        return out

    def __call__(self, **args: Any) -> Outputs:
        """One step: copy the host inputs to staging, pick the bucket, replay.

        args: the actual extent of each symbolic dim, and each host input by name (a group's own as
        {name: {group: array}}). Inputs left out keep the values staged before.
        """
        with self._lock:
            extents = []
            for dim in self.graph.dims:
                if dim not in args:
                    raise CaptureError(f"the actual extent of {dim} is missing: step({dim}=...)")
                extents.append(int(args.pop(dim)))
            actual = dict(zip(self.graph.dims, extents, strict=True))
            exe = self.executable(**self.bucket(**actual))
            for name, value in args.items():
                if isinstance(value, Mapping):
                    for group, array in value.items():
                        self._stage((name, group), array, actual)
                else:
                    self._stage(name, value, actual)
            return exe.replay(*extents)

    def _stage(self, key: Key, value: Any, actual: Mapping[str, int]) -> None:
        staged = self.inputs.get(key)
        if staged is None:
            raise BindError(f"no host input {key!r}; there are {sorted(self.inputs, key=str)}")
        array = np.asarray(value)
        if array.ndim != staged.ndim or any(
            h > w for h, w in zip(array.shape, staged.shape, strict=True)
        ):
            raise BindError(f"input {key!r} has shape {array.shape}, staging holds {staged.shape}")
        if array.dtype != staged.dtype and array.size:
            info = np.iinfo(staged.dtype) if staged.dtype != np.bool_ else None
            exact = np.can_cast(array.dtype, staged.dtype) or (
                info is not None
                and array.dtype.kind in "iu"
                and info.min <= array.min()
                and array.max() <= info.max
            )
            if not exact:
                raise BindError(f"input {key!r} is {array.dtype}, the graph wants {staged.dtype}")
        staged[tuple(slice(0, n) for n in array.shape)] = array

    # -- capture

    def _context(
        self, padded: Mapping[str, int], bound: Binding
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """The context that the native function reads: see lower/source.py."""
        tables: list[np.ndarray] = []

        def table(rows: Any) -> int:
            array = np.asarray(rows, np.int64)
            tables.append(array)
            return int(array.ctypes.data)

        words = []
        for slot in self.source.slots:
            if isinstance(slot, source.Staging):
                words.append(self._staging.ctypes.data)
            elif isinstance(slot, source.Padded):
                words.append(padded[slot.dim])
            elif isinstance(slot, source.Count):
                words.append(slot.n)
            elif isinstance(slot, source.Ints):
                words.append(table([list(row) or [0] for row in slot.rows]))
            else:
                arrays = [self._array(slot.buffer, m, bound) for m in slot.members]
                words.append(table([(a.ctypes.data, _row_stride(a)) for a in arrays]))
        return np.asarray(words, np.int64), tables

    def _array(self, buffer: Buffer, m: int, bound: Binding) -> np.ndarray:
        if buffer.kind != "input":
            return self._memory[buffer][m]
        group = None if buffer.groups is None else buffer.groups[m]
        key: Key = buffer.name if group is None else (buffer.name, group)
        return self.inputs[key] if key in self.inputs else bound.arrays[buffer.name, group]

    def __str__(self) -> str:
        return f"{self.plan}\n{self.placement}"

    def __repr__(self) -> str:
        return f"<Compiled step: {len(self.schedule.nests)} nests, {self.stats}>"


def compile(
    graph: Graph,
    capacity: Mapping[str, int],
    *,
    target: str = "cpu",
    buckets: Mapping[str, Sequence[int]] | None = None,
    max_executables: int = 256,
    on_pass: Any = None,
) -> Compiled:
    """Compile `graph` for extents up to `capacity`, e.g. {"B": 256, "T": 8192}.

    buckets: per dim the padded extents that steps are rounded up to (default: powers of two up to
        the capacity). max_executables: batch shapes kept captured (least recently used go first).
    on_pass(name, graph): called with the graph after each pass.
    Raises CompileError, naming stage and line, for a graph that cannot run safely.
    """
    if target != "cpu":
        raise CompileError(f"no target {target!r}; there is 'cpu'")
    return Compiled(graph, capacity, buckets, max_executables, on_pass)


def _check_capacity(graph: Graph, capacity: Mapping[str, int]) -> None:
    if missing := [d for d in graph.dims if d not in capacity]:
        raise CompileError(
            f"the capacity of {missing} is missing, e.g. capacity={{'{missing[0]}': 256}}"
        )
    if unknown := [d for d in capacity if d not in graph.dims]:
        raise CompileError(f"capacity names {unknown}; the graph's dims are {list(graph.dims)}")
    for dim in graph.dims:
        if not 1 <= capacity[dim] < 2**31 - 1:
            raise CompileError(f"the capacity of {dim} must be 1..2^31-2, got {capacity[dim]}")


def _ladder(dim: str, capacity: int, buckets: Mapping[str, Sequence[int]] | None) -> list[int]:
    if buckets is not None and dim in buckets:
        ladder = sorted(set(buckets[dim]))
        if not ladder or ladder[0] < 1 or ladder[-1] > capacity:
            raise CompileError(f"buckets of {dim} must be 1..{capacity}, got {buckets[dim]}")
        return ladder
    ladder = [1]
    while ladder[-1] < capacity:
        ladder.append(min(2 * ladder[-1], capacity))
    return ladder


def _aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes that start at a cache line."""
    raw = np.zeros(max(nbytes, 1) + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + max(nbytes, 1)]


def _row_stride(array: np.ndarray) -> int:
    return array.strides[0] // array.itemsize if array.ndim == 2 else 0


def _label(key: InputKey) -> str:
    return key[0] if key[1] is None else f"{key[0]}[{key[1]}]"
