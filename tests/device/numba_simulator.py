"""Numba-CUDA's simulator as a device. Needs NUMBA_ENABLE_CUDASIM=1 before Numba is imported."""

from __future__ import annotations

from typing import Any

from stepgraph.pipeline.lower.source import Source
from tests.device.host_device import HostDevice


class NumbaSimulator(HostDevice):
    """Threads are Python threads, so few of them and few blocks."""

    def __init__(self, late: bool = False, threads: int = 4) -> None:
        super().__init__(late, threads)

    def load(self, source: Source) -> Any:
        from numba import cuda

        from stepgraph.pipeline.cuda.numba_cuda import function

        return cuda.jit(function(source))

    def run(self, kernel: Any, context: int, first: int, last: int, blocks: int) -> None:
        kernel[min(blocks, 2), self.threads](context, first, last)
