"""Addressing: which block size, which rank, which kind of id, which width. Faults seen in public,
each with its input and right value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph import stages

from .steps import Under, rows_of


def slots_of(
    group: sg.Group, row: list[int], computed: int, scheduled: int, **parallel: int
) -> list[int]:
    """The slots of `scheduled` tokens of a request with this block-table row."""

    def step(s: sg.Step) -> None:
        batch, (g,) = stages.batch(s), s.groups
        table = stages.table_input(g, 1)
        g.output("slot_mapping", stages.slot_mapping(table, batch, **parallel))

    width = group.max_blocks
    bound = {
        "block_table": rows_of({group.name: [row]}, width),
        "num_blocks": {group.name: np.array([len(row)], np.int32)},
    }
    run = Under(step, [group], capacity={"B": 1, "T": max(scheduled, 1)}, bound=bound)
    out = run(
        B=1,
        T=scheduled,
        rows=[0],
        num_computed_tokens=[computed],
        num_scheduled_tokens=[scheduled],
    )
    return out["slot_mapping", group.name][:scheduled]


def test_both_block_sizes_give_one_slot() -> None:
    """vLLM-Gaudi PR 1327: prefill used the allocator's block size, decode the kernel's."""
    group = sg.Group("a", block_size=8, max_blocks=2, kernel_block_size=4)
    bound = {
        "block_table": rows_of({"a": [[3, 5]]}, 2),
        "num_blocks": {"a": np.array([2], np.int32)},
    }
    run = Under(stages.full_step(1), [group], capacity={"B": 1, "T": 1}, bound=bound)
    out = run(
        B=1,
        T=1,
        rows=[0],
        num_computed_tokens=[9],
        num_scheduled_tokens=[1],
        num_prompt_tokens=[9],
    )
    (row,) = out["kernel_block_table", "a"]
    assert row == [6, 7, 10, 11]
    assert out["slot_mapping", "a"] == [41]
    for position in range(16):
        by_kernel_block = row[position // 4] * 4 + position % 4
        assert slots_of(group, [3, 5], position, 1) == [by_kernel_block]


def test_pages_count_in_kernel_blocks() -> None:
    """vLLM PRs 27547, 27753: the builder was given the manager's block size."""

    def step(s: sg.Step) -> None:
        lens = s.input("lens", (s.dim("B"),))
        for g in s.groups:
            size = g.kernel_block_size
            g.output("page_indptr", stages.page_indptr(stages.page_counts(lens, size)))
            g.output("last_page_len", stages.last_page_len(lens, size))

    group = sg.Group("a", block_size=16, kernel_block_size=4)
    out = Under(step, [group], capacity={"B": 1})(B=1, lens=[18])
    assert out["page_indptr", "a"] == [0, 5]
    assert out["last_page_len", "a"] == [2]


def test_page_counts_of_the_longest_sequences() -> None:
    """seq_len + page_size - 1 does not fit int32 there."""

    def step(s: sg.Step) -> None:
        s.output("pages", stages.page_counts(s.input("lens", (s.dim("B"),)), 16), pad=0)

    out = Under(step, capacity={"B": 4})(B=4, lens=[2**31 - 1, 2**31 - 16, 16, 0])
    assert out["pages"] == [2**27, 2**27 - 1, 1, 0]


def local(lengths: list[int], computed: list[int], scheduled: list[int], **parallel: int) -> Any:
    def step(s: sg.Step) -> None:
        batch = stages.batch(s, rows=s.iota(s.dim("B")))
        s.output("local_seq_lens", stages.local_seq_lens(batch.seq_lens, **parallel))
        s.output("local_token_bounds", stages.local_token_bounds(batch, **parallel))

    run = Under(step, capacity={"B": 4, "T": 16})
    out = run(
        B=len(lengths),
        T=sum(scheduled),
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
    )
    assert [c + n for c, n in zip(computed, scheduled, strict=True)] == lengths
    return out["local_seq_lens"][: len(lengths)], out["local_token_bounds"][: sum(scheduled)]


def test_tokens_are_expanded_first_and_localised_second() -> None:
    """vLLM PR 46076: the length was localised first, and the tokens' bounds derived from it by
    subtraction, which gave [0, 1, 2, 3]."""
    lens, bounds = local([11], [7], [4], cp_size=4, cp_rank=2)
    assert lens == [3]
    assert bounds == [2, 2, 2, 3]
    for rank, want in enumerate([7, 4]):
        lens, _ = local([11], [10], [1], cp_size=2, cp_rank=rank, cp_interleave=4)
        assert lens == [want]


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (3, 2), (4, 4)])
def test_local_bounds_count_the_ranks_slots(size: int, interleave: int) -> None:
    """A token's local bound is the number of slots that the rank has up to it."""
    group = sg.Group("a", block_size=4, max_blocks=16)
    for rank in range(size):
        parallel = {"cp_size": size, "cp_rank": rank, "cp_interleave": interleave}
        slots = slots_of(group, list(range(1, 17)), 0, 16, **parallel)
        held = np.cumsum([slot >= 0 for slot in slots]).tolist()
        _, bounds = local([16], [0], [16], **parallel)
        assert bounds == held


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(sg.TraceError, match="rank 2 of 2 context-parallel ranks"):
        local([1], [0], [1], cp_size=2, cp_rank=2)


def test_a_table_narrower_than_the_sequence() -> None:
    """vLLM issue 53982, PR 54296: a one-block ring's row was read past its end. A declared ring
    takes its columns in turn; in any other group there is no slot past the row."""
    ring = sg.Group("r", block_size=4, max_blocks=1, ring=True)
    assert slots_of(ring, [6], 0, 7) == [24, 25, 26, 27, 24, 25, 26]
    narrow = sg.Group("n", block_size=4, max_blocks=1)
    assert slots_of(narrow, [6], 0, 7) == [24, 25, 26, 27, -1, -1, -1]


def test_a_later_chunk_goes_on_where_the_earlier_ended() -> None:
    """vLLM PR 36580: slots of later chunks of a prompt; counted from the chunk they would be
    32, 33, 34, 35, 12."""
    group = sg.Group("a", block_size=4, max_blocks=3)
    assert slots_of(group, [8, 3, 5], 6, 5) == [14, 15, 20, 21, 22]
    whole = slots_of(group, [8, 3, 5], 0, 11)
    for cut in range(12):
        first = slots_of(group, [8, 3, 5], 0, cut)
        assert first + slots_of(group, [8, 3, 5], cut, 11 - cut) == whole


def test_slots_do_not_end_at_32_bits() -> None:
    """vLLM issue 1486, PRs 50427 and 50483: 32-bit offsets, a crash or silently wrong output."""
    assert slots_of(sg.Group("a", block_size=2176), [1_500_000], 5, 1) == [3_264_000_005]
    assert slots_of(sg.Group("a", block_size=16), [134_217_728], 0, 1) == [2_147_483_648]
    last = 2**31 - 1
    assert slots_of(sg.Group("a", block_size=16), [last], 15, 1) == [last * 16 + 15]


def test_a_block_id_past_its_kernel_blocks_range_is_refused() -> None:
    """The kernel's table is int32: the pool's limit is named instead."""
    group = sg.Group("a", block_size=64, kernel_block_size=16)
    tables = sg.BlockTables([group], 1)
    with pytest.raises(sg.BlockTableError, match=r"block id 536870912 is outside 1\.\.536870911"):
        tables.add_row(0, {"a": [2**29]})


def test_request_rows_are_not_states() -> None:
    """SGLang PR 23975: the request-pool index was passed where the state-pool index was meant."""

    def step(s: sg.Step) -> None:
        (g,) = s.groups
        g.output("state_indices", stages.state_indices(stages.table_input(g, 5), stages.batch(s)))

    group = sg.Group("m", "recurrent", max_blocks=1)
    tables = {"m": np.array([[0], [7], [0], [0], [2]], np.int32)}
    bound = {"block_table": tables, "num_blocks": {"m": np.ones(5, np.int32)}}
    run = Under(step, [group], capacity={"B": 2, "T": 2}, bound=bound)
    out = run(B=2, T=2, rows=[1, 4], num_computed_tokens=[3, 3], num_scheduled_tokens=[1, 1])
    assert out["state_indices", "m"] == [[7], [2]]

    def mixed(s: sg.Step) -> None:
        batch = stages.batch(s)
        states = s.input("conv_states", (8,), kind="device", axes=("block",))
        s.output("conv", sg.gather(states, batch.rows), pad=0)

    with pytest.raises(sg.TraceError, match="index counts rows, the operand's axis blocks"):
        sg.trace(mixed, [group])


def test_states_are_not_request_rows_either() -> None:
    def mixed(s: sg.Step) -> None:
        (g,) = s.groups
        table = stages.table_input(g, 5)
        states = s.input("states", (s.dim("B"),), unit="block")
        g.output("block_table", stages.block_table(table, states))

    with pytest.raises(sg.TraceError, match="rows must count rows, they count blocks"):
        sg.trace(mixed, [sg.Group("m", "recurrent", max_blocks=1)])


def translate(s: sg.Step) -> None:
    pages = s.input("pages", (s.dim("P"),), unit="block")
    token_map = s.input("token_map", (32,), kind="device", unit="token", axes=("token",))
    s.output("window_pages", stages.translate_pages(pages, token_map, 4), pad=0)


def test_pages_are_translated_as_tokens() -> None:
    """SGLang PRs 38187, 32902: page ids went through a token-granular map and were never divided;
    hidden at page size 1."""
    token_map = np.zeros(32, np.int32)
    token_map[8:12], token_map[20:24] = range(4, 8), range(12, 16)
    token_map[0:4] = range(16, 20)
    run = Under(translate, capacity={"P": 4}, bound={"token_map": token_map})
    assert run(P=2, pages=[2, 5])["window_pages"] == [1, 3]
    # a page outside the map is none, also where its first token, 2^32, would wrap around to 0
    assert run(P=4, pages=[0, 8, -1, 2**30])["window_pages"] == [4, 0, 0, 0]

    def mixed(s: sg.Step) -> None:
        pages = s.input("pages", (s.dim("P"),), unit="block")
        token_map = s.input("token_map", (32,), kind="device", unit="token", axes=("token",))
        s.output("window_pages", sg.gather(token_map, pages), pad=0)

    with pytest.raises(sg.TraceError, match="index counts blocks, the operand's axis tokens"):
        sg.trace(mixed)


def local_rows(computed: list[int], scheduled: list[int], chunk: int, block_size: int) -> Any:
    def step(s: sg.Step) -> None:
        (g,) = s.groups
        rows = stages.chunked_local_rows(stages.table_input(g, 2), stages.batch(s), s.dim("V"))
        s.output("query_lens", rows.query_lens)
        s.output("seq_lens", rows.seq_lens)
        s.output("block_table", rows.block_table)

    group = sg.Group("c", block_size=block_size, max_blocks=4, chunk=chunk)
    bound = {
        "block_table": {"c": np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)},
        "num_blocks": {"c": np.array([4, 4], np.int32)},
    }
    run = Under(step, [group], capacity={"B": 2, "T": 16, "V": 8}, bound=bound)
    n = stages.num_local_rows(computed, scheduled, chunk)
    out = run(
        B=len(computed),
        T=sum(scheduled),
        V=n,
        rows=list(range(len(computed))),
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
    )
    return tuple(out[name][:n] for name in ("query_lens", "seq_lens", "block_table"))


def test_a_position_at_a_multiple_of_the_chunk_starts_a_chunk() -> None:
    """vLLM issue 21694 asks whether one token at position 4 of chunks of 4 sees 4 tokens. It sees
    itself: position 4 begins the second chunk."""
    assert local_rows([4], [1], 4, 2) == ([1], [1], [[3, 4]])


def test_a_chunked_prefill_is_cut_at_the_chunks() -> None:
    queries, keys, tables = local_rows([2, 0], [7, 3], 4, 2)
    assert queries == [2, 4, 1, 3]
    assert keys == [4, 4, 1, 3]
    assert tables == [[1, 2], [3, 4], [0, 0], [5, 6]]


def test_the_last_chunk_below_the_int32_limit() -> None:
    assert local_rows([2**31 - 2], [1], 2**20, 2**20)[:2] == ([1], [2**20 - 1])


def test_new_blocks_are_added_and_groups_stay_apart() -> None:
    """DingoCache PR 354, tpu-inference PR 32: this step's new blocks were taken for the whole row,
    and the groups' lists were run together."""
    groups = [sg.Group("a", max_blocks=4), sg.Group("m", "recurrent", max_blocks=1)]
    tables = sg.BlockTables(groups, 1)
    tables.add_row(0, {"a": [4, 9], "m": [7]})
    tables.append(0, {"a": [2]})
    tables.commit()
    assert tables.block_table["a"].tolist() == [[4, 9, 2, 0]]
    assert tables.block_table["m"].tolist() == [[7]]
    with pytest.raises(sg.BlockTableError, match=r"wants \{group name: ...\}, got tuple"):
        tables.append(0, ([2], [7]))  # type: ignore[arg-type]


def test_plans_of_two_geometries_do_not_mix() -> None:
    """vLLM issue 41037: prefill and decode instances of different tensor-parallel sizes had kernel
    blocks 32 in 4192 and 64 in 2112."""
    one = [sg.Group("a", block_size=4192, max_blocks=2, kernel_block_size=32)]
    two = [sg.Group("a", block_size=2112, max_blocks=2, kernel_block_size=64)]
    steps = [sg.compile(sg.trace(stages.full_step(1), g), {"B": 1, "T": 1}) for g in (one, two)]
    tables = [sg.BlockTables(g, 1) for g in (one, two)]
    for mine, step in zip(tables, steps, strict=True):
        mine.bind(step)
    with pytest.raises(sg.BindError) as refused:
        tables[0].bind(steps[1])
    said = str(refused.value)
    assert "block_size 2112/4192" in said
    assert "kernel_block_size 64/32" in said
    assert "a 2 x 4192 (kernel 32)" in repr(tables[0])
    assert "a 2 x 2112 (kernel 64)" in repr(tables[1])
