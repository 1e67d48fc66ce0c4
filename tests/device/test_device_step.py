"""A device's step: staging, launches, capture and binding, on a device that is none."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph import stages
from stepgraph.pipeline.device import DeviceExecutable, DeviceStep, Launch
from stepgraph.pipeline.staging import StagingRing
from tests.device.host_device import HostCuda, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs g++ to run CUDA C++ on the host")

ROWS = 8
CAPACITY = {"B": 8, "T": 32}


def hybrid(count: int) -> list[sg.Group]:
    """`count` groups, every fifth attention, the others recurrent."""
    return [
        sg.Group(f"attn{i}", block_size=4, max_blocks=16)
        if i % 5 == 0
        else sg.Group(f"mamba{i}", "recurrent", 16, 4, cache_mode="align")
        for i in range(count)
    ]


def build(device: Any, count: int = 3, **how: Any) -> tuple[DeviceStep, dict[str, Any]]:
    groups = hybrid(count)
    step = sg.compile(
        sg.trace(stages.full_step(ROWS), groups), CAPACITY, target="cuda", device=device, **how
    )
    assert isinstance(step, DeviceStep)
    rng = np.random.default_rng(count)
    tables = {
        "block_table": {
            g.name: rng.integers(1, 99, (ROWS, g.max_blocks), np.int32) for g in groups
        },
        "num_blocks": {g.name: np.full(ROWS, g.max_blocks, np.int32) for g in groups},
    }
    for name, arrays in tables.items():
        step.bind(name, arrays)
    return step, tables


def batch(rng: np.random.Generator) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    b = int(rng.integers(1, 9))
    scheduled = rng.integers(1, 4, b).astype(np.int32)
    inputs = {
        "rows": rng.permutation(ROWS)[:b].astype(np.int32),
        "num_computed_tokens": rng.integers(0, 60, b).astype(np.int32),
        "num_scheduled_tokens": scheduled,
        "num_prompt_tokens": rng.integers(0, 60, b).astype(np.int32),
    }
    return {"B": b, "T": int(scheduled.sum())}, inputs


def copied(out: sg.Outputs) -> dict[Any, np.ndarray]:
    return {key: array.copy() for key, array in out.items()}


def differ(step: sg.Compiled, tables: Any, extents: Any, inputs: Any, got: Any) -> list[Any]:
    """The device outputs that are not the oracle's."""
    want = sg.evaluate(step.source_graph, {**inputs, **tables}, extents, step.bucket(**extents))
    host = {out.name for out in step.graph.outputs if out.host}
    return [k for k in want if k not in host and not np.array_equal(got[k], want[k])]


# -- the host runs ahead


def run_ahead(steps: int) -> tuple[int, int]:
    """How many steps of a late device were wrong, and how many the host was ahead at most."""
    device = HostCuda(late=True)
    step, tables = build(device)
    rng = np.random.default_rng(0)
    given, seen, ahead = [], [], 0
    for _ in range(steps):
        extents, inputs = batch(rng)
        out = step(**extents, **inputs)
        device.stream.add(lambda out=out: seen.append(copied(out)))
        given.append((extents, inputs))
        ahead = max(ahead, len(given) - len(seen))
    device.stream.run()
    assert len(seen) == steps
    wrong = [differ(step, tables, *g, got) for g, got in zip(given, seen, strict=True)]
    return sum(map(bool, wrong)), ahead


def test_no_step_reads_the_inputs_of_another() -> None:
    wrong, ahead = run_ahead(20)
    assert wrong == 0
    assert ahead >= 3  # else nothing was tested


def test_without_the_guard_steps_read_the_inputs_of_others(monkeypatch: Any) -> None:
    def unguarded(self: StagingRing[Any]) -> Any:
        return self._buffers[self._at]

    monkeypatch.setattr(StagingRing, "buffer", property(unguarded))
    wrong, _ = run_ahead(20)
    assert wrong > 5


def test_host_outputs_do_not_wait_for_the_device() -> None:
    device = HostCuda(late=True)
    step, _ = build(device)
    step.executable(B=4, T=4)  # captured, its context copied
    before = device.stream.done
    ones = np.ones(3, np.int32)
    out = step(
        B=3,
        T=3,
        rows=[0, 1, 2],
        num_computed_tokens=[9, 4, 5],
        num_scheduled_tokens=ones,
        num_prompt_tokens=[1, 1, 9],
    )
    assert device.stream.done == before
    assert (out.host("max_seq_len"), out.host("num_decodes"), out.host("num_prefills")) == (
        10,
        2,
        1,
    )


def test_inputs_that_do_not_change_need_not_be_given_again() -> None:
    step, tables = build(HostCuda())
    extents, inputs = batch(np.random.default_rng(3))
    for _ in range(8):  # more steps than staging buffers
        inputs["num_computed_tokens"] = inputs["num_computed_tokens"] + 1
        changed = {"num_computed_tokens": inputs["num_computed_tokens"]}
        args = inputs if step.stats.replays == 0 else changed
        got = step(**extents, **args)
        assert differ(step, tables, extents, inputs, got) == []


# -- launches


@pytest.mark.parametrize("count", [1, 10, 46])
def test_launches_and_text_do_not_grow_with_groups(count: int) -> None:
    device = HostCuda()
    step, tables = build(device, count)
    executable = step.executable(B=8, T=8)
    assert isinstance(executable, DeviceExecutable)
    assert len(executable.launches) <= 2
    if count > 1:
        assert step.source.text.count("\n") == build(HostCuda(), 11)[0].source.text.count("\n")
    extents, inputs = batch(np.random.default_rng(count))
    assert differ(step, tables, extents, inputs, step(**extents, **inputs)) == []


def test_much_work_is_spread_over_blocks() -> None:
    """Small levels share one block; a level with many elements has a launch of its own."""
    groups = [sg.Group("attn", block_size=4, max_blocks=256)]
    graph = sg.trace(stages.full_step(512), groups)
    device = HostCuda()
    step = sg.compile(graph, {"B": 512, "T": 1024}, target="cuda", device=device)
    rng = np.random.default_rng(0)
    table = rng.integers(1, 999, (512, 256), np.int32)
    step.bind("block_table", {"attn": table})
    step.bind("num_blocks", {"attn": np.full(512, 256, np.int32)})
    small, large = step.executable(B=8, T=8), step.executable(B=512, T=1024)
    assert isinstance(small, DeviceExecutable)
    assert isinstance(large, DeviceExecutable)
    depth = len(step.source.levels)  # type: ignore[attr-defined]
    assert small.launches == [Launch(0, depth - 1, 1)]
    assert large.launches == [Launch(0, depth - 2, 1), Launch(depth - 1, depth - 1, 256)]
    b = 500
    scheduled = rng.integers(1, 3, b).astype(np.int32)
    extents = {"B": b, "T": int(scheduled.sum())}
    inputs = {
        "rows": rng.permutation(512)[:b].astype(np.int32),
        "num_computed_tokens": rng.integers(0, 900, b).astype(np.int32),
        "num_scheduled_tokens": scheduled,
        "num_prompt_tokens": rng.integers(0, 900, b).astype(np.int32),
    }
    tables = {"block_table": {"attn": table}, "num_blocks": {"attn": np.full(512, 256, np.int32)}}
    assert differ(step, tables, extents, inputs, step(**extents, **inputs)) == []


@pytest.mark.parametrize("offsets", ["rising", "any"])
@pytest.mark.parametrize("b", [5000, 4096, 700])
def test_more_requests_than_a_block_has_threads(b: int, offsets: str) -> None:
    """Scans go on in chunks; beyond 4096 segments the search leaves shared memory."""

    def step(s: sg.Step) -> None:
        lengths = s.input("lengths", (s.dim("B"),))
        s.output("sums", sg.cumsum(lengths), pad=0)
        s.output("total", sg.reduce_sum(lengths), pad=0)
        s.output("least", sg.reduce_min(lengths), pad=0)
        s.output("owner", sg.segment_ids(sg.cumsum(lengths, "offsets"), s.dim("T")), pad=-1)
        s.output("found", sg.compact(lengths > 1, -1), pad=-1)

    graph = sg.trace(step)
    compiled = sg.compile(graph, {"B": 5000, "T": 6000}, target="cuda", device=HostCuda())
    low = 0 if offsets == "rising" else -2
    lengths = np.random.default_rng(b).integers(low, 3, b).astype(np.int32)
    extents = {"B": b, "T": 5500}
    got = compiled(**extents, lengths=lengths)
    want = sg.evaluate(graph, {"lengths": lengths}, extents, compiled.bucket(**extents))
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=str(key))


# -- capture and binding


def test_an_engine_may_capture_the_step_with_its_own() -> None:
    device = HostCuda()
    step, tables = build(device)
    executable = step.executable(B=8, T=32)
    assert isinstance(executable, DeviceExecutable)
    whole = device.capture(executable.enqueue)
    rng = np.random.default_rng(5)
    for _ in range(3):
        extents, inputs = batch(rng)
        for name, array in inputs.items():
            step.inputs[name][: array.size] = array
        executable.stage(extents["B"], extents["T"])
        whole()
        want = sg.evaluate(step.source_graph, {**inputs, **tables}, extents, {"B": 8, "T": 32})
        for key, array in want.items():
            np.testing.assert_array_equal(executable.outputs[key], array, err_msg=str(key))


def test_replay_and_preparation_do_not_belong_in_a_capture() -> None:
    device = HostCuda()
    step, _ = build(device)
    executable = step.executable(B=8, T=32)
    for work in (lambda: executable.replay(0, 0), lambda: step.executable(B=4, T=4)):
        with pytest.raises(sg.CaptureError, match=r"enqueue\(\) there|before the capture begins"):
            device.capture(work)
        device.recording = None


def test_binding_anew_asks_for_a_new_capture() -> None:
    step, tables = build(HostCuda())
    extents, inputs = batch(np.random.default_rng(1))
    step(**extents, **inputs)
    old = step.executable(**step.bucket(**extents))
    moved = {k: v.copy() + 1 for k, v in tables["block_table"].items()}
    step.bind("block_table", moved)
    with pytest.raises(sg.CaptureError, match="bound to another array"):
        old.replay(0, 0)
    got = step(**extents, **inputs)
    assert differ(step, {**tables, "block_table": moved}, extents, inputs, got) == []
    assert step.stats.rebinds == 1
    step.bind("block_table", tables["block_table"])
    assert step.executable(**step.bucket(**extents)) is old


def test_executables_that_are_dropped_are_freed() -> None:
    step, _ = build(HostCuda(), max_executables=2)
    freed = weakref.ref(step.executable(B=1, T=1))
    for b in (2, 4, 8):
        step.executable(B=b, T=8)
    gc.collect()
    assert freed() is None
    assert step.stats.evictions == 2


def test_updates_and_step_in_one_launch() -> None:
    """The tables are updated before the step that reads them, level by level."""
    device = HostCuda()
    groups = hybrid(6)

    def both(s: sg.Step) -> None:
        tables = stages.update_tables(s, ROWS)
        fields = stages.batch(s)
        for g in s.groups:
            if g.kind == "recurrent":
                g.output("state_indices", stages.state_indices(tables[g.name], fields))
                g.skip("slot_mapping")
            else:
                g.output("slot_mapping", stages.slot_mapping(tables[g.name], fields))
                g.skip("state_indices")

    graph = sg.trace(both, groups)
    step = sg.compile(graph, {**CAPACITY, "U": 32, "N": 64}, target="cuda", device=device)
    tables = sg.BlockTables(groups, ROWS, target="cuda", device=HostCuda())
    tables.bind(step)
    tables.add_row(3, {g.name: [7] for g in groups})
    out = tables.run(
        step,
        B=1,
        T=1,
        rows=[3],
        num_computed_tokens=[2],
        num_scheduled_tokens=[1],
    )
    assert step.executable(**step.bucket(B=1, T=1, U=32, N=64)).launches == [
        Launch(0, len(step.source.levels) - 1, 1)
    ]
    assert out["slot_mapping", "attn0"].tolist() == [7 * 4 + 2]
    assert out["state_indices", "mamba1"].tolist() == [[7]]


def test_block_tables_on_a_device() -> None:
    groups = hybrid(3)
    tables = sg.BlockTables(groups, ROWS, target="cuda", device=HostCuda())
    tables.add_row(2, {g.name: [5] for g in groups})
    tables.append(2, {"attn0": [6, 8]})
    tables.move_row(2, 7)
    tables.commit()
    assert tables.block_table["attn0"][7].tolist() == [5, 6, 8] + [0] * 13
    assert tables.block_table["attn0"][2].tolist() == [0] * 16
    assert tables.num_blocks["attn0"].tolist() == [0] * 7 + [3]
