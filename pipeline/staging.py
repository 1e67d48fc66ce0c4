"""The ring of staging buffers: the host may run ahead of the device without overwriting what a copy
in flight still reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np


class Event(Protocol):
    """A point in a stream that the host can wait for."""

    def wait(self) -> None: ...


class HostBuffer(Protocol):
    """Host memory that the device copies from; `array`: its bytes, uint8."""

    array: np.ndarray


Buffer = TypeVar("Buffer", bound=HostBuffer)


class StagingRing(Generic[Buffer]):
    """`depth` staging buffers, used in turn. `buffer` is the one that the host may write now.

    A buffer is given out again only when the event recorded behind its last copy has passed; each
    starts with the contents of the one before it, so inputs that do not change stay.
    """

    def __init__(self, allocate: Callable[[], Buffer], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"a staging ring needs at least one buffer, got {depth}")
        self._buffers = [allocate() for _ in range(depth)]
        self._events: list[Event | None] = [None] * depth
        self._at = 0
        self._fresh = True

    @property
    def index(self) -> int:
        """Which buffer `buffer` is."""
        return self._at

    @property
    def buffer(self) -> Buffer:
        """The buffer to write; waits for a copy that still reads it."""
        if not self._fresh:
            event = self._events[self._at]
            if event is not None:
                event.wait()
                self._events[self._at] = None
            now, before = self._buffers[self._at], self._buffers[self._at - 1]
            if now is not before:
                now.array[:] = before.array
            self._fresh = True
        return self._buffers[self._at]

    def sent(self, event: Event) -> None:
        """The buffer's copy was enqueued before `event`; go on to the next buffer."""
        self._events[self._at] = event
        self._at = (self._at + 1) % len(self._buffers)
        self._fresh = False

    def all_buffers(self) -> list[Any]:
        return list(self._buffers)
