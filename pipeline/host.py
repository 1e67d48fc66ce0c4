"""The CPU target's step: one native call a replay, with every address baked into its context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .compiled import Compiled
from .errors import CaptureError
from .executable import REBOUND, Binding, Executable, Outputs, wrong_extents
from .ir import Graph
from .lower import cpu, native
from .memory import HostMemory
from .oracle import Key
from .passes.buffers import Plan, assign_buffers
from .passes.coverage import check_coverage
from .passes.fusion import fusion
from .program import Program


class HostStep(Compiled):
    """See `Compiled`. plan, source: what the native function was made from."""

    target = "cpu"

    def __init__(
        self,
        graph: Graph,
        capacity: Mapping[str, int],
        buckets: Mapping[str, Sequence[int]] | None,
        max_executables: int,
        on_pass: Any,
    ) -> None:
        super().__init__(graph, capacity, buckets, max_executables, on_pass)
        self.memory = HostMemory()
        self.plan: Plan = assign_buffers(fusion(self.graph), self.capacity)
        check_coverage(self.plan)
        self.schedule = self.plan.schedule
        self.source = cpu.generate(self.plan)
        self._native = native.load(self.source)
        self.stats.compiles = int(self._native.origin == "compiled")
        self.stats.disk_hits = int(self._native.origin == "disk")
        self.stats.compile_seconds = self._native.seconds
        self._program = Program(self.plan, self.source, self.memory, self.capacity)
        self._staging = self.memory.zeros(self.placement.nbytes)
        self._header = memoryview(self._staging.data)[: 8 * len(self.graph.dims)].cast("q")
        self.inputs: dict[Key, np.ndarray] = self._staging_views(self._staging)

    @property
    def output_bytes(self) -> int:
        return self._program.output_bytes

    @property
    def total_bytes(self) -> int:
        return self.output_bytes + self._program.scratch_bytes + self.placement.nbytes

    def _capture(self, padded: tuple[int, ...], bound: Binding) -> Executable:
        return HostExecutable(self, padded, bound)

    def __str__(self) -> str:
        return f"{self.plan}\n{self.placement}"

    def __repr__(self) -> str:
        return f"<Compiled step: {len(self.schedule.nests)} nests, {self.stats}>"


class HostExecutable(Executable):
    """One batch shape: a context, and the call of the native function on it."""

    def __init__(self, step: HostStep, padded: tuple[int, ...], bound: Binding) -> None:
        self.padded = dict(zip(step.graph.dims, padded, strict=True))
        self.bound = bound
        self._step = step
        self._limits = padded
        self._context = host_context(step, step._program, self.padded, bound, step._staging)
        self._address = self._context.ctypes.data
        self._call = step._native.call
        self._header = step._header
        self.outputs = Outputs(step._program.views(self.padded))

    def replay(self, *extents: int) -> Outputs:
        step = self._step
        if step._bound is not self.bound:
            raise CaptureError(REBOUND)
        header, limits = self._header, self._limits
        if len(extents) != len(limits):
            raise wrong_extents(step.graph.dims, limits, extents)
        try:
            for k, limit in enumerate(limits):
                if not 0 <= extents[k] <= limit:
                    raise wrong_extents(step.graph.dims, limits, extents)
                header[k] = extents[k]
        except TypeError:
            raise wrong_extents(step.graph.dims, limits, extents) from None
        self._call(self._address)
        step.stats.replays += 1
        return self.outputs


def host_context(
    step: Compiled,
    program: Program,
    padded: Mapping[str, int],
    bound: Binding,
    staging: np.ndarray,
) -> np.ndarray:
    """A context in host memory."""
    address = int(staging.ctypes.data)
    room = np.zeros(program.context_words, np.int64)
    place = step._placed(bound, address)
    room[:] = program.context(padded, address, place, int(room.ctypes.data))
    return room
