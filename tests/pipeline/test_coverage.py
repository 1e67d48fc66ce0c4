"""The coverage check: a plan that would leave an output stale does not compile.

Each test takes a sound plan, breaks it as a faulty pass might, and sees it refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import stepgraph as sg
from stepgraph.pipeline import passes
from stepgraph.pipeline.passes.buffers import Plan, Store, assign_buffers
from stepgraph.pipeline.passes.coverage import check_coverage
from stepgraph.pipeline.passes.fusion import fusion


@pytest.fixture
def plan() -> Plan:
    """Three recurrent groups as in vLLM PR 34874, with a field that they share by value."""
    groups = [sg.Group(f"m{i}", "recurrent", 4, 8, cache_mode="all") for i in range(3)]

    def step(s: sg.Step) -> None:
        lens = s.input("seq_lens", (s.dim("B"),))
        s.output("seq_lens", lens)
        for g in s.groups:
            table = g.input("block_table", (16, 8), kind="device")
            column = sg.maximum(lens - 1, 0) // g.block_size
            g.output("state_indices", sg.gather(table, s.iota(s.dim("B")), column))
            g.output("last_scheduled_block", column)

    plan = assign_buffers(fusion(passes.run(sg.trace(step, groups))), {"B": 16})
    check_coverage(plan)
    return plan


def test_a_field_shared_by_value_still_has_a_buffer_per_group(plan: Plan) -> None:
    (buffer,) = [b for out, b in plan.outputs if out.name == "last_scheduled_block"]
    assert buffer.n == 3


def test_a_lost_store_is_refused(plan: Plan) -> None:
    for stores in plan.stores:
        stores[:] = [s for s in stores if s.buffer.name != "last_scheduled_block"]
    with pytest.raises(
        sg.CompileError, match=r"'last_scheduled_block' of groups m0, m1, m2 is not written"
    ):
        check_coverage(plan)


def test_a_lost_pad_is_refused(plan: Plan) -> None:
    for fills in plan.fills:
        fills[:] = [f for f in fills if f.buffer.name != "seq_lens"]
    with pytest.raises(sg.CompileError, match="'seq_lens' of the step is not written past"):
        check_coverage(plan)


def test_one_buffer_for_all_groups_is_refused(plan: Plan) -> None:
    for _, buffer in plan.outputs:
        if buffer.name == "last_scheduled_block":
            buffer.n = 1
    with pytest.raises(sg.CompileError, match="each group needs its own"):
        check_coverage(plan)


def test_two_outputs_in_one_buffer_are_refused(plan: Plan) -> None:
    by_name = {out.name: buffer for out, buffer in plan.outputs}
    plan.outputs = [
        (out, by_name["state_indices"] if out.name == "last_scheduled_block" else buffer)
        for out, buffer in plan.outputs
    ]
    with pytest.raises(sg.CompileError, match="share one buffer"):
        check_coverage(plan)


def test_a_store_of_only_some_members_is_refused(plan: Plan) -> None:
    for stores in plan.stores:
        for i, store in enumerate(stores):
            if store.buffer.name == "state_indices":
                stores[i] = Store(replace(store.use, pick=(0, 0, 0)), store.buffer)
    with pytest.raises(sg.CompileError, match="'state_indices' of groups m0, m1, m2"):
        check_coverage(plan)


def test_a_store_over_another_extent_is_refused(plan: Plan) -> None:
    for _, buffer in plan.outputs:
        if buffer.name == "seq_lens":
            buffer.aval = replace(buffer.aval, shape=(buffer.aval.shape[0] + 1,))  # type: ignore[operator]
    with pytest.raises(sg.CompileError, match="'seq_lens'"):
        check_coverage(plan)


def test_an_output_that_got_no_buffer_is_refused(plan: Plan) -> None:
    plan.outputs = plan.outputs[1:]
    with pytest.raises(sg.CompileError, match="outputs without a buffer"):
        check_coverage(plan)
