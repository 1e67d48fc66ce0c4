"""Stale rows, stale tails and padding: faults seen in public, each with its input and right value.

Not here: a hidden wait for the device in padding code (gLLM PR 174). On a CPU there is nothing to
wait for; all that a replay reads is staged by the host before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph import stages

from .steps import Under, rows_of


def batch_tables(max_reqs: int) -> Any:
    """Each group's rows in batch order."""

    def step(s: sg.Step) -> None:
        rows = s.input("rows", (s.dim("B"),), unit="row")
        for g in s.groups:
            g.output("block_table", stages.block_table(stages.table_input(g, max_reqs), rows))

    return step


def table_step(s: sg.Step) -> None:
    batch_tables(4)(s)


def starts_step(s: sg.Step) -> None:
    scheduled = s.input("num_scheduled_tokens", (s.dim("B"),))
    s.output("query_start_loc", stages.query_start_loc(scheduled))


def pages_step(page_size: int) -> Any:
    def step(s: sg.Step) -> None:
        lens = s.input("lens", (s.dim("B"),))
        counts = stages.page_counts(lens, page_size)
        s.output("page_indptr", stages.page_indptr(counts))
        s.output("last_page_len", stages.last_page_len(lens, page_size))

    return step


def test_a_narrower_table_leaves_no_older_columns() -> None:
    """nano-vllm PR 258: the graph's table was overwritten only up to the step's width."""
    tables = sg.BlockTables([sg.Group("a", max_blocks=4)], 4)
    step = sg.compile(sg.trace(table_step, tables.groups), {"B": 2})
    tables.bind(step)
    tables.add_row(0, {"a": [1, 2, 3, 4]})
    tables.add_row(1, {"a": [5, 6, 7, 8]})
    tables.commit()
    assert step(B=2, rows=[0, 1])["block_table", "a"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    tables.set_row(0, {"a": [9, 10]})
    tables.set_row(1, {"a": [11, 12]})
    tables.commit()
    assert step(B=2, rows=[0, 1])["block_table", "a"].tolist() == [[9, 10, 0, 0], [11, 12, 0, 0]]


@pytest.mark.parametrize(("columns", "slot"), [(17, 17 * 256), (16, -1)])
def test_the_longest_prompt_needs_a_column_for_its_first_token(columns: int, slot: int) -> None:
    """nano-vllm PR 258: a 4096-token prompt and one decoded token need 17 blocks of 256, not 16;
    a table of 16 has no slot for it, and no 17th block gets in."""
    group = sg.Group("a", block_size=256, max_blocks=columns)
    tables = sg.BlockTables([group], 1)
    tables.add_row(0, {"a": range(1, 17)})
    if columns == 16:
        with pytest.raises(sg.BlockTableError, match=r"16 \+ 1 blocks are more than max_blocks 16"):
            tables.append(0, {"a": [17]})
    else:
        tables.append(0, {"a": [17]})
    step = sg.compile(sg.trace(stages.full_step(1), [group]), {"B": 1, "T": 1})
    tables.bind(step)
    tables.commit()
    out = step(
        B=1,
        T=1,
        rows=[0],
        num_computed_tokens=[4096],
        num_scheduled_tokens=[1],
        num_prompt_tokens=[4096],
    )
    assert out["slot_mapping", "a"].tolist() == [slot]


def test_a_batch_above_the_captured_size_is_refused_before_it_runs() -> None:
    """nano-vllm PR 258: the engine may fall back; nothing crashes and nothing is overwritten."""
    step = Under(starts_step, capacity={"B": 2})
    assert step(B=2, num_scheduled_tokens=[3, 1])["query_start_loc"] == [0, 3, 4]
    with pytest.raises(sg.CaptureError, match="B=3 is above the capacity 2"):
        step.compiled(B=3, num_scheduled_tokens=[1, 1, 1])
    assert step.compiled(B=2)["query_start_loc"].tolist() == [0, 3, 4]


def test_a_scheduled_row_of_length_zero_is_not_padding() -> None:
    """vllm-plugin-FL PR 442: padding was recognised by a sequence length of 0."""
    groups = [sg.Group("a", block_size=4, max_blocks=1)]
    tables = {"a": np.array([[1], [2], [3], [9]], np.int32)}
    step = Under(
        stages.full_step(4),
        groups,
        capacity={"B": 4, "T": 4},
        bound={"block_table": tables, "num_blocks": {"a": np.ones(4, np.int32)}},
    )
    out = step(
        B=3,
        T=3,
        rows=[0, 1, 2],
        num_computed_tokens=[11, -1, 6],
        num_scheduled_tokens=[1, 1, 1],
        num_prompt_tokens=[5, 5, 5],
    )
    assert out["seq_lens"] == [12, 0, 7, 0]
    assert out["query_start_loc"] == [0, 1, 2, 3, 3]
    assert out["block_table", "a"] == [[1], [2], [3], [0]]
    # not clamped: the engine's -1 stays what it is, and position -1 has no slot
    assert out["positions"] == [11, -1, 6, 0]
    assert out["slot_mapping", "a"] == [-1, -1, -1, -1]


def test_padded_sequences_are_empty_in_every_array() -> None:
    """xLLM PR 1939: 100 requests in a 112-row graph, metadata for the real rows only."""

    def step(s: sg.Step) -> None:
        pages_step(2)(s)
        g = s.groups[0]
        table = stages.table_input(g, 5)
        g.output("slot_mapping", stages.slot_mapping(table, stages.batch(s)))

    groups = [sg.Group("a", block_size=2, max_blocks=3)]
    tables = rows_of({"a": [[1, 2], [3], [4, 5], [6], [7, 8, 9]]}, 3)
    counts = {"a": np.array([2, 1, 2, 1, 3], np.int32)}
    run = Under(
        step,
        groups,
        capacity={"B": 8, "T": 8},
        buckets={"B": [8], "T": [8]},
        bound={"block_table": tables, "num_blocks": counts},
    )
    lens = [3, 1, 4, 1, 5]
    out = run(
        B=5,
        T=5,
        lens=lens,
        rows=[0, 1, 2, 3, 4],
        num_computed_tokens=[n - 1 for n in lens],
        num_scheduled_tokens=[1] * 5,
    )
    assert out["page_indptr"] == [0, 2, 3, 5, 6, 9, 9, 9, 9]
    assert out["last_page_len"] == [1, 1, 2, 1, 1, 1, 1, 1]
    assert out["slot_mapping", "a"] == [4, 6, 11, 12, 18, -1, -1, -1]


def test_a_real_empty_sequence_has_pages_like_a_padded_one() -> None:
    out = Under(pages_step(2), capacity={"B": 4})(B=3, lens=[2, 0, 3])
    assert out == {"page_indptr": [0, 1, 1, 3, 3], "last_page_len": [2, 1, 1, 1]}


def test_replays_write_to_one_address() -> None:
    """SGLang PRs 26019, 27664: replay wrote fresh tensors, the graph read the captured ones."""
    step = Under(pages_step(1), capacity={"B": 2}).compiled
    exe = step.executable(B=2)
    captured = exe.outputs["page_indptr"]
    step.inputs["lens"][:] = [5, 6]
    address = exe.replay(2)["page_indptr"].ctypes.data
    garbage = [np.zeros(3, np.int32) for _ in range(100)]
    step.inputs["lens"][:] = [6, 7]
    assert exe.replay(2)["page_indptr"].ctypes.data == address == captured.ctypes.data
    assert captured.tolist() == [0, 6, 13]
    assert not any(g.any() for g in garbage)


def test_each_group_has_its_own_fields_after_every_step() -> None:
    """vLLM issue 34865, PR 34874: groups 2 and 3 kept step 1's values in two fields, because only
    the state index was copied to their own buffers."""
    groups = [
        sg.Group(f"m{i}", "recurrent", block_size=4, max_blocks=4, cache_mode="all")
        for i in range(3)
    ]
    tables = {f"m{i}": np.arange(10 * i + 1, 10 * i + 5, dtype=np.int32)[None] for i in range(3)}
    counts = {g.name: np.full(1, 4, np.int32) for g in groups}
    run = Under(
        stages.full_step(1),
        groups,
        capacity={"B": 1, "T": 4},
        bound={"block_table": tables, "num_blocks": counts},
    )
    held = run.compiled.executable(B=1, T=1).outputs
    names = ("last_scheduled_block", "last_computed_block", "state_indices")
    addresses = {held[field, g.name].ctypes.data for field in names for g in groups}
    assert len(addresses) == 9
    steps = [(9, ([2], [2])), (12, ([3], [2]))]
    at_block_edges = [(0, ([0], [0])), (7, ([1], [1])), (8, ([2], [1]))]
    for computed, want in steps + at_block_edges:
        run(
            B=1,
            T=1,
            rows=[0],
            num_computed_tokens=[computed],
            num_scheduled_tokens=[1],
            num_prompt_tokens=[4],
        )
        for i, g in enumerate(groups):
            assert held["last_scheduled_block", g.name].tolist() == want[0]
            assert held["last_computed_block", g.name].tolist() == want[1]
            assert held["state_indices", g.name].tolist() == [[10 * i + want[0][0] + 1]]


def test_tables_of_another_layout_are_refused() -> None:
    """vLLM PR 54044: the layout of the profiling run, three groups, was kept when four arrived."""

    def layout(n: int) -> list[sg.Group]:
        return [sg.Group(f"g{i}", block_size=4, max_blocks=2) for i in range(n)]

    step3 = sg.compile(sg.trace(table_step, layout(3)), {"B": 4})
    step4 = sg.compile(sg.trace(table_step, layout(4)), {"B": 4})
    tables = sg.BlockTables(layout(4), 4)
    with pytest.raises(sg.BindError, match=r"\['g0', 'g1', 'g2'\].*\['g0', 'g1', 'g2', 'g3'\]"):
        tables.bind(step3)
    tables.bind(step4)
    tables.add_row(0, {f"g{i}": [i + 1] for i in range(4)})
    tables.commit()
    out = step4(B=1, rows=[0])
    assert [out["block_table", f"g{i}"].tolist() for i in range(4)] == [
        [[i + 1, 0]] for i in range(4)
    ]


def test_a_second_program_captured_at_a_large_size_is_described_at_that_size() -> None:
    """vLLM PR 48261: buffers shared by all sizes described the smallest when it was captured."""
    first = Under(starts_step, capacity={"B": 4})
    for size in (4, 2, 1):
        first(B=size, num_scheduled_tokens=[1] * size)
    second = Under(starts_step, capacity={"B": 4})
    assert second(B=4, num_scheduled_tokens=[1] * 4)["query_start_loc"] == [0, 1, 2, 3, 4]
    assert first(B=4, num_scheduled_tokens=[1] * 4)["query_start_loc"] == [0, 1, 2, 3, 4]


def test_an_output_nobody_reads_yet_is_fresh() -> None:
    """SGLang PR 37975: replay rebuilt kv_indptr in the eager buffer, not in the captured one."""
    step = Under(pages_step(1), capacity={"B": 2})
    bound = step.compiled.executable(B=2).outputs["page_indptr"]
    step(B=2, lens=[4, 4])
    assert bound.tolist() == [0, 4, 8]
    step(B=2, lens=[7, 2])
    assert bound.tolist() == [0, 7, 9]


def test_a_padded_slot_is_not_the_last_slot() -> None:
    """vLLM issue 43810: -1 as an index is the last element; the last real slot was overwritten."""

    def write(s: sg.Step) -> None:
        slots = s.input("slots", (s.dim("T"),), "int64")
        cache = s.input("cache", (8,), kind="state")
        s.update(cache, sg.scatter(cache, 7, slots))

    cache = np.zeros(8, np.int32)
    run = Under(write, capacity={"T": 4}, bound={"cache": cache})
    slots = np.array([0, 5, -1, -1])
    run(T=4, slots=slots)
    assert cache.tolist() == [7, 0, 0, 0, 0, 7, 0, 0]

    def read(s: sg.Step) -> None:
        slots = s.input("slots", (s.dim("T"),), "int64")
        s.output("read", sg.gather(s.input("cache", (8,), kind="device"), slots), pad=0)

    full = np.arange(1, 9, dtype=np.int32)
    assert Under(read, capacity={"T": 4}, bound={"cache": full})(T=4, slots=slots)["read"] == [
        1,
        6,
        0,
        0,
    ]
    # a NumPy consumer masks, as docs/padding.md says
    consumer = np.zeros(8, np.int32)
    consumer[slots[slots >= 0]] = 7
    assert consumer.tolist() == cache.tolist()


def test_padded_rows_share_one_sentinel_that_no_request_has() -> None:
    """TensorRT-LLM PRs 9873, 13151, 13278: padding picked a live or parked request's state; reader
    and writer used two arrays."""

    def step(s: sg.Step) -> None:
        table = stages.table_input(s.groups[0], 3)
        indices = stages.state_indices(table, stages.batch(s))
        s.groups[0].output("state_indices", indices)

    group = sg.Group("m", "recurrent", max_blocks=1)
    tables = sg.BlockTables([group], 3, pool_blocks=6)
    for row, block in enumerate([2, 4, 5]):
        tables.add_row(row, {"m": [block]})
    tables.commit()
    with pytest.raises(sg.BlockTableError, match="0 is the null block"):
        tables.set_row(0, {"m": [0]})
    run = sg.compile(sg.trace(step, [group]), {"B": 4, "T": 4})
    tables.bind(run)
    out = run(B=2, T=2, rows=[0, 1], num_computed_tokens=[3, 3], num_scheduled_tokens=[1, 1])
    run(B=0, T=0)  # an empty step in between leaves nothing behind
    out = run.executable(B=4, T=4).replay(2, 2)
    assert out["state_indices", "m"].tolist() == [[2], [4], [0], [0]]
    states = np.array([0, 10, 20, 30, 40, 50])
    states[out["state_indices", "m"][:, 0]] += 1
    assert states[1:].tolist() == [10, 21, 30, 41, 50]


@pytest.mark.parametrize(
    ("padded", "actual", "starts", "slots"),
    [
        # full graph: requests and tokens padded
        ((8, 8), (5, 5), [0, 1, 2, 3, 4, 5, 5, 5, 5], [4, 5, 6, 7, 8, -1, -1, -1]),
        # piecewise graphs: tokens padded, requests exact
        ((5, 8), (5, 5), [0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, -1, -1, -1]),
        # one request with one token where three drafts would fit: full pads both
        ((4, 4), (1, 1), [0, 1, 1, 1, 1], [4, -1, -1, -1]),
        ((1, 4), (1, 1), [0, 1], [4, -1, -1, -1]),
    ],
)
def test_requests_and_tokens_are_padded_by_one_rule(
    padded: tuple[int, int], actual: tuple[int, int], starts: list[int], slots: list[int]
) -> None:
    """vLLM PRs 34903, 36626, 49302: one padding rule for two graph modes. Here the caller asks for
    a padded extent of each; query_start_loc always closes at the real tokens."""
    group = sg.Group("a", block_size=1, max_blocks=1)
    tables = {"a": np.arange(4, 12, dtype=np.int32)[:, None]}
    step = sg.compile(sg.trace(stages.full_step(8), [group]), {"B": 8, "T": 8})
    step.bind("block_table", tables)
    step.bind("num_blocks", {"a": np.ones(8, np.int32)})
    n, tokens = actual
    for name, values in (
        ("rows", range(8)),
        ("num_computed_tokens", [0] * n),
        ("num_scheduled_tokens", [1] * n),
        ("num_prompt_tokens", [1] * n),
    ):
        step.inputs[name][: len(values)] = values
    out = step.executable(B=padded[0], T=padded[1]).replay(n, tokens)
    assert out["query_start_loc"].tolist() == starts
    assert out["slot_mapping", "a"].tolist() == slots
    assert out["seq_lens"].tolist() == [1] * n + [0] * (padded[0] - n)
    assert out["is_padding"].tolist() == [False] * tokens + [True] * (padded[1] - tokens)


def test_every_padded_field_follows_the_contract() -> None:
    """vLLM PRs 16072, 21196, SGLang PRs 1094, 1469: pads were filled before the padded size was
    known, and no contract said with what. A full step first, then one with a padded row."""
    groups = [
        sg.Group("a", block_size=4, max_blocks=2, kernel_block_size=2),
        sg.Group("m", "recurrent", block_size=4, max_blocks=2, cache_mode="all"),
    ]
    bound = {
        "block_table": rows_of({"a": [[1, 2]] * 4, "m": [[3, 4]] * 4}, 2),
        "num_blocks": {n: np.full(4, 2, np.int32) for n in "am"},
    }
    run = Under(
        stages.full_step(4),
        groups,
        capacity={"B": 4, "T": 4},
        bound=bound,
        buckets={"B": [4], "T": [4]},
    )
    for n in (4, 3):
        out = run(
            B=n,
            T=n,
            rows=[0, 1, 2, 3][:n],
            num_computed_tokens=[5] * n,
            num_scheduled_tokens=[1] * n,
            num_prompt_tokens=[9] * n,
        )
    assert out["query_start_loc"] == [0, 1, 2, 3, 3]
    assert out["seq_lens"] == [6, 6, 6, 0]
    assert out["positions"] == [5, 5, 5, 0]
    assert out["token_to_request"] == [0, 1, 2, 0]
    assert out["is_padding"] == [False, False, False, True]
    assert out["is_prefilling"] == [True, True, True, False]
    assert out["slot_mapping", "a"] == [9, 9, 9, -1]
    assert out["block_table", "a"] == [[1, 2]] * 3 + [[0, 0]]
    assert out["kernel_block_table", "a"] == [[2, 3, 4, 5]] * 3 + [[0] * 4]
    assert out["state_indices", "m"] == [[4], [4], [4], [0]]
    assert out["last_scheduled_block", "m"] == [1, 1, 1, 0]
    assert out["last_computed_block", "m"] == [1, 1, 1, 0]
