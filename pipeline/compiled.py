"""`Compiled`: what every target's compiled step does in the same way: bind arrays, pick the bucket
of a step, keep the executables of batch shapes. And `compile`, which picks the target."""

from __future__ import annotations

import logging
import operator
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import passes
from .errors import BindError, CaptureError, CompileError
from .executable import Binding, Executable, InputKey, Outputs, Stats, as_integer
from .ir import DTYPES, Aval, Graph, extent_of
from .memory import Memory
from .oracle import Key
from .passes.buffers import Buffer
from .passes.placement import placement
from .program import row_stride

log = logging.getLogger("stepgraph")


class Compiled:
    """A compiled step. Call it once a step: `out = step(B=5, T=5, num_computed_tokens=...)`.

    inputs: {name or (name, group): array} views of the staging buffer at full capacity; write them
        and call `executable(...)`.replay(...)` for the least host time. On a device ask for
        `inputs` again each step: the host then writes to a ring of staging buffers.
    """

    target: str
    memory: Memory
    inputs: Mapping[Key, np.ndarray]

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
        if unknown := sorted(set(buckets or ()) - set(self.graph.dims)):
            raise CompileError(f"buckets name {unknown}; the dims are {list(self.graph.dims)}")
        if max_executables < 1:
            raise CompileError(f"max_executables must be at least 1, got {max_executables}")
        self.buckets = {d: _ladder(d, self.capacity[d], buckets) for d in self.graph.dims}
        self.placement = placement(self.graph, self.capacity)
        self.stats = Stats()
        self.max_executables = max_executables
        self._lock = threading.RLock()
        self._executables: OrderedDict[Any, Executable] = OrderedDict()
        self._wanted: dict[InputKey, tuple[Any, int]] = {
            (node.param("name"), groups[m] if (groups := node.param("groups")) else None): (node, m)
            for node in self.graph.inputs
            if node.param("kind") != "host"
            for m in range(node.n or 1)
        }
        self._host_avals = self._host_inputs()
        self._bound = Binding({}, ())

    # -- what a target adds

    def _capture(self, padded: tuple[int, ...], bound: Binding) -> Executable:
        raise NotImplementedError

    @property
    def total_bytes(self) -> int:
        """Persistent, scratch and staging memory."""
        raise NotImplementedError

    def _staging_views(self, raw: np.ndarray) -> dict[Key, np.ndarray]:
        """The host inputs in a staging buffer."""
        views: dict[Key, np.ndarray] = {}
        for slot in self.placement.slots:
            shape = tuple(extent_of(d, self.capacity, slot.member) for d in slot.node.aval.shape)
            part = raw[slot.offset : slot.offset + slot.nbytes]
            groups, name = slot.node.param("groups"), slot.node.param("name")
            key: Key = name if groups is None else (name, groups[slot.member])
            views[key] = part.view(DTYPES[slot.node.aval.dtype]).reshape(shape)
        return views

    def _host_inputs(self) -> dict[Key, tuple[Aval, int]]:
        found: dict[Key, tuple[Aval, int]] = {}
        for slot in self.placement.slots:
            groups, name = slot.node.param("groups"), slot.node.param("name")
            key: Key = name if groups is None else (name, groups[slot.member])
            found[key] = (slot.node.aval, slot.member)
        return found

    def _addresses(self, arrays: Mapping[InputKey, Any]) -> tuple[Any, ...]:
        return tuple(
            (key, self.memory.address(a), self.memory.layout(a).strides)
            for key, a in sorted(arrays.items(), key=str)
        )

    def _placed(self, bound: Binding, staging: int) -> Callable[[Buffer, int], tuple[int, int]]:
        """Where inputs are: (address, row stride) of a buffer's member."""
        offsets = {(slot.node.param("name"), slot.member): slot for slot in self.placement.slots}

        def place(buffer: Buffer, m: int) -> tuple[int, int]:
            slot = offsets.get((buffer.name, m))
            if slot is not None:
                shape = slot.node.aval.shape
                width = extent_of(shape[1], self.capacity, m) if len(shape) == 2 else 0
                return staging + slot.offset, width
            group = None if buffer.groups is None else buffer.groups[m]
            array = bound.arrays[buffer.name, group]
            return self.memory.address(array), row_stride(self.memory, array)

        return place

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
        binding = Binding(new, self._addresses(new))
        with self._lock:
            if binding.addresses != self._bound.addresses:
                if self._executables and name in {n for n, _ in self._bound.arrays}:
                    self.stats.rebinds += 1
                    log.info("stepgraph: input %r was bound to other addresses", name)
                known_binding = next(
                    (
                        e.bound
                        for e in self._executables.values()
                        if e.bound.addresses == binding.addresses
                    ),
                    None,
                )
                self._bound = known_binding or binding

    def _checked(self, key: InputKey, array: Any) -> Any:
        node, m = self._wanted[key]
        aval, label = node.aval, _label(key)
        try:
            view = self.memory.adopt(array)
        except BindError as err:
            raise BindError(f"input {label!r}: {err}") from None
        have = self.memory.layout(view)
        shape = tuple(extent_of(d, self.capacity, m) for d in aval.shape)
        if have.dtype != aval.dtype:
            raise BindError(f"input {label!r} is {have.dtype}, the graph wants {aval.dtype}")
        fits = len(have.shape) == len(shape) and all(map(operator.ge, have.shape, shape))
        if not fits:
            raise BindError(f"input {label!r} has shape {have.shape}, the step reads up to {shape}")
        # the stride of a dim of extent 1 says nothing
        gaps = have.shape and have.shape[-1] > 1 and have.strides[-1] != 1
        if 0 not in have.shape and (gaps or -1 in have.strides[:1]):
            raise BindError(
                f"input {label!r}: rows must be contiguous, strides are {have.strides} elements"
            )
        if node.param("kind") == "state" and not have.writeable:
            raise BindError(f"input {label!r} is updated in place, but the array is read-only")
        return view

    # -- executables

    def executable(self, **padded: int) -> Executable:
        """The executable of a batch shape given by its padded extents, captured if need be.

        Raises CaptureError for an extent above the capacity, BindError for an input never bound.
        """
        self._check_dims(padded)
        shape = []
        for dim in self.graph.dims:
            size = _integer(dim, padded[dim])
            if not 0 <= size <= self.capacity[dim]:
                raise CaptureError(
                    f"{dim}={size} is outside the capacity 0..{self.capacity[dim]}; compile with a "
                    "larger capacity"
                )
            shape.append(size)
        key = (tuple(shape), id(self._bound))
        with self._lock:
            found = self._executables.get(key)
            if found is not None:
                self._executables.move_to_end(key)
                return found
            if missing := [_label(k) for k in self._wanted if k not in self._bound.arrays]:
                raise BindError(f"inputs never bound: {', '.join(sorted(missing))}; use bind()")
            found = self._capture(tuple(shape), self._bound)
            self._executables[key] = found
            self.stats.captures += 1
            while len(self._executables) > self.max_executables:
                self._executables.popitem(last=False)
                self.stats.evictions += 1
            return found

    def bucket(self, **extents: int) -> dict[str, int]:
        """The padded extents that a step of these actual extents runs with."""
        self._check_dims(extents)
        out = {}
        for dim in self.graph.dims:
            ladder, actual = self.buckets[dim], extents[dim]
            at = bisect_left(ladder, actual)
            if at == len(ladder):
                what = "capacity" if ladder[-1] == self.capacity[dim] else "greatest bucket"
                raise CaptureError(
                    f"{dim}={actual} is above the {what} {ladder[-1]}; compile with a larger one"
                )
            out[dim] = ladder[at]
        return out

    def _check_dims(self, extents: Mapping[str, Any]) -> None:
        if extents.keys() != self.buckets.keys():
            raise CaptureError(
                f"the dims are {', '.join(self.graph.dims)}, got {', '.join(extents) or 'none'}"
            )

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
                extents.append(_integer(dim, args.pop(dim)))
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
        try:
            array = np.asarray(value)
        except ValueError as err:
            raise BindError(f"input {key!r} is no array: {err}") from None
        aval, m = self._host_avals[key]
        least = tuple(extent_of(d, actual, m) for d in aval.shape)
        if array.ndim != staged.ndim or not all(
            low <= have <= high
            for low, have, high in zip(least, array.shape, staged.shape, strict=True)
        ):
            raise BindError(
                f"input {key!r} has shape {array.shape}, this step reads {least} of it, staging "
                f"holds {staged.shape}"
            )
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


def compile(
    graph: Graph,
    capacity: Mapping[str, int],
    *,
    target: str = "cpu",
    device: Any = None,
    buckets: Mapping[str, Sequence[int]] | None = None,
    max_executables: int = 256,
    on_pass: Any = None,
) -> Compiled:
    """Compile `graph` for extents up to `capacity`, e.g. {"B": 256, "T": 8192}.

    target: "cpu"; or "cuda" (CUDA C++, needs CuPy), "numba-cuda", "triton": on a CUDA device, with
        torch. device: the CUDA device, as torch names it (default: the current one).
    buckets: per dim the padded extents that steps are rounded up to (default: powers of two up to
        the capacity). max_executables: batch shapes kept captured (least recently used go first).
    on_pass(name, graph): called with the graph after each pass.
    Raises CompileError, naming stage and line, for a graph that cannot run safely.
    """
    if target == "cpu":
        from .host import HostStep

        return HostStep(graph, capacity, buckets, max_executables, on_pass)
    from .device import DeviceStep
    from .targets import target_of

    found = target_of(target)
    if device is None or isinstance(device, (int, str)) or not hasattr(device, "launch"):
        from .cuda.device import CudaDevice

        device = CudaDevice(target, device)
    return DeviceStep(
        graph, capacity, buckets, max_executables, on_pass, target, found.generate(), device
    )


def _check_capacity(graph: Graph, capacity: Mapping[str, int]) -> None:
    if missing := [d for d in graph.dims if d not in capacity]:
        raise CompileError(
            f"the capacity of {missing} is missing, e.g. capacity={{'{missing[0]}': 256}}"
        )
    if unknown := [d for d in capacity if d not in graph.dims]:
        raise CompileError(f"capacity names {unknown}; the graph's dims are {list(graph.dims)}")
    for dim in graph.dims:
        size = as_integer(capacity[dim])
        if size is None or not 1 <= size < 2**31 - 1:
            raise CompileError(f"the capacity of {dim} must be 1..2^31-2, got {capacity[dim]!r}")


def _ladder(dim: str, capacity: int, buckets: Mapping[str, Sequence[int]] | None) -> list[int]:
    if buckets is not None and dim in buckets:
        sizes = {as_integer(size) for size in buckets[dim]}
        ladder = sorted(size for size in sizes if size is not None)
        if len(ladder) < len(sizes) or not ladder or ladder[0] < 1 or ladder[-1] > capacity:
            raise CompileError(f"buckets of {dim} must be 1..{capacity}, got {buckets[dim]}")
        return ladder
    ladder = [1]
    while ladder[-1] < capacity:
        ladder.append(min(2 * ladder[-1], capacity))
    return ladder


def _label(key: InputKey) -> str:
    return key[0] if key[1] is None else f"{key[0]}[{key[1]}]"


def _integer(dim: str, value: Any) -> int:
    number = as_integer(value)
    if number is None:
        raise CaptureError(f"{dim} must be an integer, got {value!r}")
    return number
