"""A device's step: host inputs are staged and copied in one piece, then one captured graph replays
the kernel's launches. Outputs marked `host` are computed by the CPU from the same staged inputs, at
once.

What is particular to a kind of device is a `Device`: memory, kernels, streams, capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from .compiled import Compiled
from .errors import CaptureError
from .executable import REBOUND, Binding, Executable, Outputs, wrong_extents
from .host import host_context
from .ir import Extent, Graph, Sizes, extent_of
from .lower import cpu, native
from .lower.simt import THREADS
from .lower.source import Source
from .memory import HostMemory, Memory
from .oracle import Key
from .passes.buffers import Plan, assign_buffers
from .passes.coverage import check_coverage
from .passes.fusion import fusion
from .passes.levels import Item
from .program import Program
from .staging import Event, HostBuffer, StagingRing

RING = 3  # staging buffers: the host may be this many steps ahead
ONE_BLOCK = 8192  # elements that one block does in less time than a launch takes
MOST_BLOCKS = 512


class Device(Protocol):
    """What a kind of device does. Work goes to the caller's current stream."""

    memory: Memory

    def load(self, source: Source) -> Any:
        """The kernel of a source. Raises CompileError."""

    def launch(self, kernel: Any, context: int, first: int, last: int, blocks: int) -> None:
        """Run levels first..last (none if first > last)."""

    def host_buffer(self, nbytes: int) -> HostBuffer:
        """Zeroed host memory that copies read."""

    def upload(self, target: Any, source: HostBuffer) -> None:
        """Copy to device bytes, in stream order; the host does not wait."""

    def event(self) -> Event:
        """An event recorded now."""

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Capture what `enqueue` launches; the replay."""

    def order(self) -> None:
        """Let the current stream wait for the one that the last step ran on."""

    def capturing(self) -> bool:
        """Is the current stream being captured?"""


@dataclass(frozen=True)
class Launch:
    """Levels first..last in one launch of `blocks` blocks; more than one level only in one."""

    first: int
    last: int
    blocks: int


class DeviceStep(Compiled):
    """See `Compiled`. source: the device's text; host_source: that of the outputs on the host."""

    def __init__(
        self,
        graph: Graph,
        capacity: Mapping[str, int],
        buckets: Mapping[str, Sequence[int]] | None,
        max_executables: int,
        on_pass: Any,
        target: str,
        generate: Callable[[Plan], Source],
        device: Device,
        ring: int = RING,
    ) -> None:
        super().__init__(graph, capacity, buckets, max_executables, on_pass)
        self.target, self.device, self.memory = target, device, device.memory
        self.plan = assign_buffers(fusion(self._part(host=False), device=True), self.capacity)
        check_coverage(self.plan)
        self.schedule = self.plan.schedule
        self.source = generate(self.plan)
        self.kernel = device.load(self.source)
        self.stats.compiles = 1
        self.program = Program(self.plan, self.source, self.memory, self.capacity)
        self.host_program: Program | None = None
        if any(out.host for out in self.graph.outputs):
            plan = assign_buffers(fusion(self._part(host=True)), self.capacity)
            check_coverage(plan)
            source = cpu.generate(plan)
            self.native = native.load(source)
            self.host_program = Program(plan, source, HostMemory(), self.capacity)
        nbytes = self.placement.nbytes
        self.staging = self.memory.zeros(nbytes)
        self.ring: StagingRing[HostBuffer] = StagingRing(lambda: device.host_buffer(nbytes), ring)
        self.ring_views = [self._staging_views(b.array) for b in self.ring.all_buffers()]

    def _part(self, host: bool) -> Graph:
        """The nodes and outputs of one side; both read the same staging buffer."""
        mine = self.placement.host if host else self.placement.device
        nodes = [n for n in self.graph.nodes if n.prim == "input" or n in mine]
        outputs = [out for out in self.graph.outputs if out.host == host]
        return replace(self.graph, nodes=nodes, outputs=outputs)

    @property
    def inputs(self) -> Mapping[Key, np.ndarray]:  # type: ignore[override]
        """The host inputs of the step to come; waits if the device still reads them."""
        with self._lock:
            assert self.ring.buffer is not None
            return self.ring_views[self.ring.index]

    @property
    def output_bytes(self) -> int:
        """Persistent outputs on the device."""
        return self.program.output_bytes

    @property
    def total_bytes(self) -> int:
        """Persistent, scratch and staging memory on the device."""
        return self.output_bytes + self.program.scratch_bytes + self.placement.nbytes

    def _capture(self, padded: tuple[int, ...], bound: Binding) -> Executable:
        return DeviceExecutable(self, padded, bound)

    def __str__(self) -> str:
        lines = [f"level {k}: {item}" for k, row in enumerate(self.source.levels) for item in row]
        return "\n".join([*lines, str(self.placement)])

    def __repr__(self) -> str:
        return f"<Compiled step for {self.target}: {self.stats}>"


class DeviceExecutable(Executable):
    """One batch shape. `replay` is `stage`, then the captured launches.

    An engine that captures its own whole step calls `enqueue` inside its capture, and `stage`
    before each of its replays.
    launches: what a replay launches.
    """

    def __init__(self, step: DeviceStep, padded: tuple[int, ...], bound: Binding) -> None:
        device, program = step.device, step.program
        if device.capturing():
            raise CaptureError(
                "a batch shape cannot be prepared while the stream is being captured: call "
                "executable() for it before the capture begins"
            )
        self.padded = dict(zip(step.graph.dims, padded, strict=True))
        self.bound = bound
        self._step, self._limits = step, padded
        self.launches = plan_launches(step.source.levels, self.padded)
        self._context = step.memory.zeros(8 * program.context_words)
        self._address = step.memory.address(self._context)
        place = step._placed(bound, step.memory.address(step.staging))
        words = program.context(
            self.padded, step.memory.address(step.staging), place, self._address
        )
        first = device.host_buffer(words.nbytes)
        first.array[:] = words.view(np.uint8)
        device.upload(self._context, first)
        device.event().wait()
        views: dict[Key, Any] = program.views(self.padded)
        self._host_contexts: list[np.ndarray] = []
        if step.host_program is not None:
            self._host_contexts = [
                host_context(step, step.host_program, self.padded, bound, buffer.array)
                for buffer in step.ring.all_buffers()
            ]
            views.update(step.host_program.views(self.padded))
        self.outputs = Outputs(views)
        # Once outside the capture, which may not load a module: no level, so nothing is written.
        device.launch(step.kernel, self._address, 1, 0, 1)
        self._replay = device.capture(self.enqueue)

    def replay(self, *extents: int) -> Outputs:
        step = self._step
        if step.device.capturing():
            raise CaptureError(
                "replay() inside a capture would bake this step's inputs in: call enqueue() there, "
                "and stage() before each replay of your graph"
            )
        with step._lock:
            step.device.order()
            self._stage(extents)
            self._replay()
            step.stats.replays += 1
        return self.outputs

    def stage(self, *extents: int) -> Outputs:
        """Compute the host outputs and copy the staged inputs to the device."""
        with self._step._lock:
            self._step.device.order()
            self._stage(extents)
        return self.outputs

    def enqueue(self) -> None:
        """Launch the kernels on the current stream, for the inputs staged last. Allocates nothing
        and copies nothing, so it may be captured."""
        step = self._step
        for launch in self.launches:
            step.device.launch(step.kernel, self._address, launch.first, launch.last, launch.blocks)

    def _stage(self, extents: Sequence[int]) -> None:
        step, limits = self._step, self._limits
        if step._bound is not self.bound:
            raise CaptureError(REBOUND)
        if len(extents) != len(limits) or any(
            not 0 <= n <= limit for n, limit in zip(extents, limits, strict=True)
        ):
            raise wrong_extents(step.graph.dims, limits, extents)
        buffer = step.ring.buffer
        buffer.array[: 8 * len(extents)].view(np.int64)[:] = extents
        if self._host_contexts:
            step.native.call(self._host_contexts[step.ring.index].ctypes.data)
        step.device.upload(step.staging, buffer)
        step.ring.sent(step.device.event())


def plan_launches(levels: list[list[Item]], padded: Mapping[str, int]) -> list[Launch]:
    """Neighbouring levels with little work share a launch of one block; a level with much work has
    one of its own. Raises CaptureError for more elements than a kernel counts."""
    out: list[Launch] = []
    for k, level in enumerate(levels):
        work = max(_work(item, padded) for item in level)
        if work >= 2**31:
            raise CaptureError(f"level {k} has {work} elements; the limit is 2^31 - 1")
        if work > ONE_BLOCK:
            out.append(Launch(k, k, min(-(-work // THREADS), MOST_BLOCKS)))
        elif out and out[-1].blocks == 1:
            out[-1] = Launch(out[-1].first, k, 1)
        else:
            out.append(Launch(k, k, 1))
    return out


def _work(item: Item, padded: Mapping[str, int]) -> int:
    """Elements that an item's threads go over."""
    if item.fill is not None:
        return _elements(item.fill.buffer.n, item.fill.buffer.aval.shape, padded)
    nest = item.nest
    if not nest.opaque:
        return _elements(nest.n, nest.shape, padded)
    (node,) = nest.nodes
    if node.prim == "custom_call" and node.param("kernel").in_place:
        return (node.n or 1) * THREADS  # a block for each member
    return sum(_elements(node.n, aval.shape, padded) for aval in node.avals)


def _elements(n: int | None, shape: Sequence[Extent], padded: Mapping[str, int]) -> int:
    count = n or 1
    for dim in shape:
        count *= max(dim.values) if isinstance(dim, Sizes) else extent_of(dim, padded)
    return count
