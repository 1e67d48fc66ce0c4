"""A device that is none: kernels run on the CPU, in memory of the host.

`HostDevice` is the base: memory, and a stream whose copies and launches happen only when something
waits for them (as late as a device may). What runs a kernel is up to the subclass.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stepgraph.pipeline.lower.source import Source
from stepgraph.pipeline.memory import HostMemory

HERE = Path(__file__).parent


class HostBuffer:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array


class LateEvent:
    """Passes when the host waits for it; only then does the stream do what came before it."""

    def __init__(self, stream: LateStream, behind: int) -> None:
        self.stream, self.behind = stream, behind

    def wait(self) -> None:
        self.stream.run(self.behind)


class LateStream:
    """Work in order, done as late as possible."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def event(self) -> LateEvent:
        return LateEvent(self, len(self.work))

    def run(self, until: int | None = None) -> None:
        until = len(self.work) if until is None else until
        while self.done < until:
            self.work[self.done]()
            self.done += 1


class HostDevice:
    """late: work waits for `stream.run()` or an event; otherwise it is done at once."""

    def __init__(self, late: bool = False, threads: int = 32) -> None:
        self.memory = HostMemory()
        self.stream = LateStream()
        self.late, self.threads = late, threads
        self.launches = 0
        self.recording: list[Callable[[], None]] | None = None

    def run(self, kernel: Any, context: int, first: int, last: int, blocks: int) -> None:
        raise NotImplementedError

    def load(self, source: Source) -> Any:
        raise NotImplementedError

    def _add(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
            return
        self.stream.add(work)
        if not self.late:
            self.stream.run()

    def launch(self, kernel: Any, context: int, first: int, last: int, blocks: int) -> None:
        self.launches += 1
        self._add(functools.partial(self.run, kernel, context, first, last, blocks))

    def host_buffer(self, nbytes: int) -> HostBuffer:
        return HostBuffer(self.memory.zeros(nbytes))

    def upload(self, target: np.ndarray, source: HostBuffer) -> None:
        def copy() -> None:
            target[: source.array.size] = source.array

        self._add(copy)

    def event(self) -> LateEvent:
        return self.stream.event()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        self.recording = captured = []
        enqueue()
        self.recording = None

        def replay() -> None:
            for work in captured:
                self._add(work)

        return replay

    def order(self) -> None: ...

    def capturing(self) -> bool:
        return self.recording is not None


class HostCuda(HostDevice):
    """CUDA C++ compiled by g++, unchanged; see simt.h. seed: the order of threads."""

    seed = 0

    def load(self, source: Source) -> Any:
        return compile_cuda(source.text)

    def run(self, kernel: Any, context: int, first: int, last: int, blocks: int) -> None:
        self.seed += 1
        status = kernel(context, first, last, min(blocks, 3), self.threads, self.seed)
        assert status == 0, "only some threads of a block reached a barrier"


def has_compiler() -> bool:
    return shutil.which("g++") is not None


@functools.cache
def compile_cuda(text: str) -> Any:
    """The kernel as a host function (context, first, last, blocks, threads, seed) -> status."""
    folder = Path(tempfile.mkdtemp(prefix="stepgraph-simt-"))
    try:
        (folder / "step.cpp").write_text('#include "simt.h"\n' + text)
        command = ["g++", "-std=c++17", "-O1", "-g1", "-fPIC", "-shared", f"-I{HERE}"]
        # An overflow or a shift that C++ leaves undefined ends the test.
        command += ["-fsanitize=signed-integer-overflow", "-fno-sanitize-recover=all"]
        command += ["step.cpp", "-o", "step.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        library = ctypes.CDLL(str(folder / "step.so"))
    finally:
        shutil.rmtree(folder)
    launch = library.simt_launch
    launch.argtypes = [ctypes.c_int64, *[ctypes.c_int] * 5]
    return launch
