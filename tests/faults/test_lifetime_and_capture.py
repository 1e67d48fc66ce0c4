"""Faults of running ahead, of lifetimes and of capture: what a step reads is what it was given."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.pipeline.cuda.device import Unordered
from tests.device.host_device import HostCuda, has_compiler

GROUPS = [sg.Group("attn", block_size=4, max_blocks=8), sg.Group("other", "recurrent", 16, 2)]


def lookup(s: sg.Step) -> None:
    b = s.dim("B")
    lens = s.input("seq_lens", (b,))
    s.output("seq_lens", lens, pad=0)
    for g in s.groups:
        table = g.input("table", (4, g.max_blocks), kind="device")
        g.output("first", sg.gather(table, s.iota(b), 0), pad=0)


def tables(start: int) -> dict[str, np.ndarray]:
    return {
        g.name: (start + np.arange(4 * g.max_blocks, dtype=np.int32)).reshape(4, -1) for g in GROUPS
    }


@pytest.fixture(params=["cpu", "cuda"])
def build(request: pytest.FixtureRequest) -> Callable[[], sg.Compiled]:
    if request.param == "cuda" and not has_compiler():
        pytest.skip("needs g++ to run CUDA C++ on the host")
    device = HostCuda() if request.param == "cuda" else None
    return lambda: sg.compile(
        sg.trace(lookup, GROUPS), {"B": 4}, target=request.param, device=device
    )


@pytest.mark.skipif(not has_compiler(), reason="needs g++ to run CUDA C++ on the host")
@pytest.mark.parametrize("ahead", [2, 3])
def test_a_step_has_the_inputs_it_was_submitted_with(ahead: int) -> None:
    """The device does nothing until `ahead` steps are submitted, 200 times over."""
    device = HostCuda(late=True)
    step = sg.compile(sg.trace(lookup, GROUPS), {"B": 4}, target="cuda", device=device)
    step.bind("table", tables(1))
    seen: list[list[int]] = []
    given = []
    for k in range(200):
        lens = [5 + k, 6 + k] if k % 2 else [50 + k, 60 + k]
        out = step(B=2, seq_lens=np.array(lens, np.int32))
        device.stream.add(lambda out=out: seen.append(out["seq_lens"].tolist()))
        given.append(lens)
        if k % ahead == ahead - 1:
            assert len(given) - len(seen) >= ahead
            device.stream.run()
    device.stream.run()
    assert seen == given


@pytest.mark.skipif(not has_compiler(), reason="needs g++ to run CUDA C++ on the host")
def test_what_the_device_writes_late_is_read_after_it_landed() -> None:
    """A value on the device, such as accepted counts, is read in stream order, not by the host."""
    device = HostCuda(late=True)
    step = sg.compile(sg.trace(lookup, GROUPS), {"B": 4}, target="cuda", device=device)
    bound = tables(0)
    step.bind("table", bound)
    step.executable(B=2)

    def land() -> None:
        bound["attn"][:2, 0] = 3

    device.stream.add(land)
    out = step(B=2, seq_lens=np.array([1, 1], np.int32))
    assert bound["attn"][1, 0] != 3  # the host did not wait
    device.stream.run()
    assert out["first", "attn"].tolist()[:2] == [3, 3]


def test_what_was_bound_lives_as_long_as_the_step(build: Callable[[], sg.Compiled]) -> None:
    step = build()
    step.bind("table", tables(100))  # nobody else has a name for them
    executable = step.executable(B=4)
    garbage = []
    for _ in range(200):
        gc.collect(0)
        garbage.append(np.full((4, 8), -7, np.int32))
    step.inputs["seq_lens"][:] = 1
    out = executable.replay(4)
    assert np.asarray(out["first", "attn"]).tolist() == [100, 108, 116, 124]
    assert np.asarray(out["first", "other"]).tolist() == [100, 102, 104, 106]


def test_integers_that_change_compile_nothing(build: Callable[[], sg.Compiled]) -> None:
    """Counts, lengths and strides vary, 1 and multiples of 16 among them: nothing is compiled
    again, and there is one capture for each batch shape."""
    step = build()
    compiles = step.stats.compiles
    wide = np.arange(4 * 64, dtype=np.int32).reshape(4, 64)
    step.bind("table", {"attn": wide[:, :8], "other": tables(0)["other"]})
    for k in range(500):
        b = k % 5
        lens = np.array([1, 16, 32, 48 + k][:b], np.int32)
        assert step(B=b, seq_lens=lens)["seq_lens"].tolist()[:b] == lens.tolist()
    assert step.stats.compiles == compiles
    assert step.stats.captures == 3  # 1, 2 and 4 requests


def test_buffers_that_alternate_are_captured_twice(build: Callable[[], sg.Compiled]) -> None:
    step = build()
    compiles = step.stats.compiles
    buffers = [tables(0), tables(1000)]
    for k in range(1000):
        step.bind("table", buffers[k % 2])
        out = step(B=1, seq_lens=np.array([1], np.int32))
        assert out["first", "attn"].tolist() == [1000 * (k % 2)]
    assert step.stats.captures == 2
    assert step.stats.compiles == compiles


class Producer:
    """Notes with which stream its memory is asked for."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.streams = array, []  # type: ignore[var-annotated]

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(**options)


def test_an_exchange_waits_for_no_stream() -> None:
    """A consumer that asks for the order of a stream (1: the legacy default) would synchronize,
    which ends a capture."""
    producer = Producer(np.arange(3))
    for stream in (1, 2, 12345):
        Unordered(producer).__dlpack__(stream=stream, max_version=(1, 0))
    assert producer.streams == [-1, -1, -1]
    view = np.from_dlpack(Unordered(producer))
    assert producer.streams[-1] is None
    assert view.ctypes.data == producer.array.ctypes.data
