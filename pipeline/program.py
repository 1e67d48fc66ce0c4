"""`Program`: generated text with its memory. All batch shapes share the persistent outputs (one
address per output, for life) and the scratch; a batch shape adds a context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .ir import extent_of
from .lower.source import Count, Ints, Padded, Source, Staging
from .memory import Memory
from .oracle import Key
from .passes.buffers import Buffer, Plan, member_bytes

WORD = 8


class Program:
    """output_bytes, scratch_bytes: the plan's buffers at full capacity. arrays: each buffer's
    members. context_words: int64 words of a context."""

    def __init__(
        self, plan: Plan, source: Source, memory: Memory, capacity: Mapping[str, int]
    ) -> None:
        self.plan, self.source, self.memory = plan, source, memory
        self.output_bytes = sum(
            member_bytes(b, capacity, m)
            for b in plan.buffers
            if b.kind == "output"
            for m in range(b.n or 1)
        )
        self.scratch_bytes = plan.scratch_bytes
        outputs, scratch = memory.zeros(self.output_bytes), memory.zeros(self.scratch_bytes)
        self.arrays: dict[Buffer, list[Any]] = {}
        behind = 0
        for buffer in plan.buffers:
            if buffer.kind == "input":
                continue
            is_output = buffer.kind == "output"
            raw, place = (outputs, behind) if is_output else (scratch, buffer.offset)
            self.arrays[buffer] = []
            for m in range(buffer.n or 1):
                shape = tuple(extent_of(d, capacity, m) for d in buffer.aval.shape)
                self.arrays[buffer].append(memory.view(raw, place, buffer.aval.dtype, shape))
                place += member_bytes(buffer, capacity, m)
            behind = place if is_output else behind
        none = dict.fromkeys(plan.schedule.graph.dims, 0)
        self.context_words = len(self.context(none, 0, lambda buffer, m: (0, 0), 0))

    def views(self, padded: Mapping[str, int]) -> dict[Key, Any]:
        """The outputs over the padded extents of a batch shape."""
        views: dict[Key, Any] = {}
        for out, buffer in self.plan.outputs:
            for m, array in enumerate(self.arrays[buffer]):
                cut: Any = [slice(0, extent_of(d, padded, m)) for d in buffer.aval.shape]
                key: Key = out.name if out.groups is None else (out.name, out.groups[m])
                views[key] = array[(*cut, ...)]
        return views

    def context(
        self,
        padded: Mapping[str, int],
        staging: int,
        place: Callable[[Buffer, int], tuple[int, int]],
        base: int,
    ) -> np.ndarray:
        """The context of a batch shape, int64, for memory that starts at address `base`: a word per
        slot of the source, then the tables that slots point to (lower/source.py).

        staging: address of the staging buffer. place(buffer, member): (address, row stride) of an
        input.
        """
        slots = self.source.slots
        words, tables = [0] * len(slots), []
        behind = len(slots)
        for k, slot in enumerate(slots):
            if isinstance(slot, Staging):
                words[k] = staging
            elif isinstance(slot, Padded):
                words[k] = padded[slot.dim]
            elif isinstance(slot, Count):
                words[k] = slot.n
            else:
                rows = (
                    [row or (0,) for row in slot.rows]
                    if isinstance(slot, Ints)
                    else [self._place(slot.buffer, m, place) for m in slot.members]
                )
                flat = [x for row in rows for x in row]
                words[k] = base + WORD * behind
                behind += len(flat)
                tables += flat
        return np.asarray(words + tables, np.int64)

    def _place(
        self, buffer: Buffer, m: int, place: Callable[[Buffer, int], tuple[int, int]]
    ) -> tuple[int, int]:
        if buffer.kind == "input":
            return place(buffer, m)
        array = self.arrays[buffer][m]
        return self.memory.address(array), row_stride(self.memory, array)


def row_stride(memory: Memory, array: Any) -> int:
    """Elements from one row to the next; 0 for what has no rows."""
    strides = memory.layout(array).strides
    return strides[0] if len(strides) == 2 else 0
