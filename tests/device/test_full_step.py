"""A whole hybrid step, and the block tables' updates, on each device target that runs here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph import stages
from tests.device.available import STANDS, Stand

ROWS = 8
GROUPS = [
    sg.Group("attn", block_size=4, max_blocks=12),
    sg.Group("window", block_size=8, max_blocks=6, window=16, kernel_block_size=4),
    sg.Group("mamba", "recurrent", 16, 5, cache_mode="align"),
    sg.Group("spec", "recurrent", 16, 5, cache_mode="none", num_spec_tokens=2),
    sg.Group("every", "recurrent", 4, 12, cache_mode="all"),
]


@pytest.fixture(params=STANDS)
def stand(request: pytest.FixtureRequest) -> Stand:
    found = STANDS[request.param]
    if found.missing:
        pytest.skip(f"{found.target}: {found.missing}")
    return found


def test_a_hybrid_step(stand: Stand) -> None:
    graph = sg.trace(stages.full_step(ROWS), GROUPS)
    step = sg.compile(graph, {"B": 8, "T": 32}, target=stand.target, device=stand.device())
    rng = np.random.default_rng(7)
    tables: dict[str, Any] = {
        "block_table": {
            g.name: rng.integers(0, 99, (ROWS, g.max_blocks), np.int32) for g in GROUPS
        },
        "num_blocks": {g.name: rng.integers(0, 13, ROWS, np.int32) for g in GROUPS},
    }
    for name, arrays in tables.items():
        step.bind(name, arrays)
    for b in (3, 8, 1, 0, 5):
        scheduled = rng.integers(0, 5, b).astype(np.int32)
        extents = {"B": b, "T": int(scheduled.sum())}
        inputs = {
            "rows": rng.permutation(ROWS)[:b].astype(np.int32),
            "num_computed_tokens": rng.integers(0, 60, b).astype(np.int32),
            "num_scheduled_tokens": scheduled,
            "num_prompt_tokens": rng.integers(0, 60, b).astype(np.int32),
        }
        out = step(**extents, **inputs)
        want = sg.evaluate(graph, {**inputs, **tables}, extents, step.bucket(**extents))
        assert out.keys() == want.keys()
        for key, array in want.items():
            assert out[key].dtype == array.dtype
            np.testing.assert_array_equal(out[key], array, err_msg=f"{key} at {extents}")


def test_block_tables(stand: Stand) -> None:
    tables = sg.BlockTables(GROUPS, ROWS, target=stand.target, device=stand.device())
    ids = {g.name: [5] for g in GROUPS}
    tables.add_row(2, ids)
    tables.append(2, {"attn": [6, 8]})
    tables.add_row(0, ids)
    tables.swap_rows(0, 2)
    tables.move_row(0, 7)
    tables.clear_row(2)
    tables.commit()
    assert tables.block_table["attn"][7].tolist() == [5, 6, 8] + [0] * 9
    assert not tables.block_table["attn"][:7].any()
    assert tables.num_blocks["attn"].tolist() == [0] * 7 + [3]


def test_scatter_and_scans_by_row(stand: Stand) -> None:
    """Of several updates to one element the last one wins; rows are scanned each on its own."""

    def step(s: sg.Step) -> None:
        b = s.dim("B")
        state = s.input("state", (6,), kind="state")
        s.update(state, sg.scatter(state, s.input("new", (b,)), s.input("at", (b,))))
        table = s.input("table", (b, 5))
        s.output("sums", sg.cumsum(table, "exclusive"), pad=-1)
        s.output("least", sg.reduce_min(table), pad=-1)
        s.output("total", sg.reduce_sum(table), pad=-1)

    graph = sg.trace(step)
    compiled = sg.compile(graph, {"B": 8}, target=stand.target, device=stand.device())
    state = np.arange(6, dtype=np.int32)
    compiled.bind("state", state)
    inputs = {
        "new": np.arange(10, 17, dtype=np.int32),
        "at": np.array([1, 4, 1, -1, 6, 4, 1], np.int32),
        "table": np.random.default_rng(0).integers(-(2**31), 2**31, (7, 5)).astype(np.int32),
    }
    want = sg.evaluate(graph, {**inputs, "state": state.copy()}, {"B": 7}, {"B": 8})
    out = compiled(B=7, **inputs)
    assert state.tolist() == [0, 16, 2, 3, 15, 5]
    for key in ("sums", "least", "total"):
        np.testing.assert_array_equal(out[key], want[key], err_msg=key)
