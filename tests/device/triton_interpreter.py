"""Triton's interpreter as a device. Needs TRITON_INTERPRET=1 before Triton is imported."""

from __future__ import annotations

from typing import Any

from stepgraph.pipeline.lower.source import Source
from tests.device.host_device import HostDevice


class TritonInterpreter(HostDevice):
    def load(self, source: Source) -> Any:
        from stepgraph.pipeline.cuda.triton import function

        return function(source)

    def run(self, kernel: Any, context: int, first: int, last: int, blocks: int) -> None:
        kernel[(min(blocks, 3),)](context, first, last)
