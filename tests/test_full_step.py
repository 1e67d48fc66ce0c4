"""A whole step of many groups: the compiled step, the oracle, and the fields' definitions written
out request by request and token by token."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stepgraph as sg
from stepgraph import stages

ROWS, BATCH, TOKENS = 6, 5, 24
INT_MAX = 2**31 - 1

SETS: dict[str, list[sg.Group]] = {
    "one attention group": [sg.Group("a", block_size=4, max_blocks=4)],
    "one recurrent group": [sg.Group("r", "recurrent", 4, 4, cache_mode="align")],
    "block size 1": [
        sg.Group("a", block_size=1, max_blocks=9),
        sg.Group("r", "recurrent", 1, 9, cache_mode="align"),
        sg.Group("one block", block_size=1, max_blocks=1),
    ],
    "ten as granite": [sg.Group("a", block_size=16, max_blocks=3)]
    + [sg.Group(f"r{i}", "recurrent", 16, 3, cache_mode="align") for i in range(9)],
    "46 of all kinds": [
        (
            sg.Group(f"{i}", "recurrent", 2 + i % 3, 3 + i % 4, cache_mode="align"),
            sg.Group(f"{i}", "recurrent", 4, 2, cache_mode="none"),
            sg.Group(f"{i}", "recurrent", 4, 5, cache_mode="all", num_spec_tokens=i % 3),
            sg.Group(f"{i}", block_size=1 << (i % 5), max_blocks=4),
            sg.Group(f"{i}", block_size=8, max_blocks=3, kernel_block_size=2),
            sg.Group(f"{i}", block_size=2, max_blocks=8, window=3 + i % 2),
            sg.Group(f"{i}", block_size=4, max_blocks=2, ring=True),
        )[i % 7]
        for i in range(46)
    ],
}


@st.composite
def group(draw: st.DrawFn, name: str) -> sg.Group:
    blocks = draw(st.integers(1, 6))
    if draw(st.booleans()):
        return sg.Group(
            name,
            "recurrent",
            draw(st.sampled_from([1, 3, 8])),
            blocks,
            cache_mode=draw(st.sampled_from(["none", "align", "all"])),
            num_spec_tokens=draw(st.integers(0, 2)),
        )
    kernel = draw(st.sampled_from([1, 3, 8]))
    ratio = draw(st.sampled_from([1, 1, 2, 4]))
    return sg.Group(
        name,
        block_size=kernel * ratio,
        max_blocks=blocks,
        kernel_block_size=None if ratio == 1 else kernel,
        window=draw(st.sampled_from([None, None, 1, 5])),
        ring=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Rows in any order, empty batches, rows without tokens, lengths near the int32 limit."""
    rows = draw(st.permutations(range(ROWS)))[: draw(st.integers(0, BATCH))]
    scheduled: list[int] = []
    for _ in rows:
        scheduled.append(min(draw(st.sampled_from([0, 1, 1, 1, 2, 7])), TOKENS - sum(scheduled)))
    lengths = st.one_of(st.integers(0, 40), st.sampled_from([0, INT_MAX - 7]))
    computed = [draw(lengths) for _ in rows]
    prompts = [draw(st.sampled_from([0, c, c + n, 12])) for c, n in zip(computed, scheduled)]  # noqa: B905
    return {
        "rows": list(rows),
        "num_scheduled_tokens": scheduled,
        "num_computed_tokens": computed,
        "num_prompt_tokens": [min(p, INT_MAX) for p in prompts],
        "seed": draw(st.integers(0, 2**16)),  # of the tables: every entry is set, stale ones too
    }


@functools.cache
def compiled(name: str) -> tuple[sg.Graph, sg.Compiled]:
    return compile_step(SETS[name])


def compile_step(groups: list[sg.Group]) -> tuple[sg.Graph, sg.Compiled]:
    graph = sg.trace(stages.full_step(ROWS), groups)
    return graph, sg.compile(graph, {"B": BATCH, "T": TOKENS})


def tables(groups: list[sg.Group], seed: int) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    made: dict[str, dict[str, np.ndarray]] = {"block_table": {}, "num_blocks": {}}
    for g in groups:
        top = INT_MAX // (g.block_size // (g.kernel_block_size or g.block_size))
        ids = rng.choice([0, 1, 2, 77, top], size=(ROWS, g.max_blocks))
        made["block_table"][g.name] = ids.astype(np.int32)
        made["num_blocks"][g.name] = rng.integers(0, g.max_blocks + 1, ROWS).astype(np.int32)
    return made


# -- the definitions


def expected(
    groups: list[sg.Group], batch: dict[str, Any], bound: Any, padded: dict[str, int]
) -> dict[Any, Any]:
    rows, computed = batch["rows"], batch["num_computed_tokens"]
    scheduled, prompts = batch["num_scheduled_tokens"], batch["num_prompt_tokens"]
    total, pb, pt = sum(scheduled), padded["B"], padded["T"]
    lens = [c + n for c, n in zip(computed, scheduled, strict=True)]
    owners = [b for b, n in enumerate(scheduled) for _ in range(n)]
    positions = [c + i for c, n in zip(computed, scheduled, strict=True) for i in range(n)]
    decoding = [c >= p for c, p in zip(computed, prompts, strict=True)]
    decodes = [n for n, d in zip(scheduled, decoding, strict=True) if d]
    prefills = [n for n, d in zip(scheduled, decoding, strict=True) if not d and n]

    def pad(values: list[Any], size: int, value: Any) -> list[Any]:
        return values + [value] * (size - len(values))

    want: dict[Any, Any] = {
        "query_start_loc": pad([sum(scheduled[:b]) for b in range(len(rows) + 1)], pb + 1, total),
        "seq_lens": pad(lens, pb, 0),
        "token_to_request": pad(owners, pt, 0),
        "positions": pad(positions, pt, 0),
        "is_padding": pad([False] * total, pt, True),
        "is_prefilling": pad([not d for d in decoding], pb, False),
        "num_decodes": len(decodes),
        "num_prefills": len(prefills),
        "num_decode_tokens": sum(decodes),
        "num_prefill_tokens": sum(prefills),
        "max_query_len": max(scheduled, default=0),
        "max_seq_len": max(lens, default=0),
    }
    for g in groups:
        blocks, counts = bound["block_table"][g.name], bound["num_blocks"][g.name]
        width, size = g.max_blocks, g.block_size
        if g.kind == "recurrent":
            first = [0 if g.cache_mode == "none" else max(n - 1, 0) // size for n in lens]
            states = range(1 + g.num_spec_tokens)
            want["state_indices", g.name] = pad(
                [
                    [int(blocks[r, f + k]) if f + k < width else 0 for k in states]
                    for r, f in zip(rows, first, strict=True)
                ],
                pb,
                [0 for _ in states],
            )
            if g.cache_mode == "all":
                want["last_scheduled_block", g.name] = pad(first, pb, 0)
                last = [max(c - 1, 0) // size for c in computed]
                want["last_computed_block", g.name] = pad(last, pb, 0)
            continue
        slots = []
        for b, position in zip(owners, positions, strict=True):
            column = position // size % width if g.ring else position // size
            slots.append(
                int(blocks[rows[b], column]) * size + position % size if column < width else -1
            )
        want["slot_mapping", g.name] = pad(slots, pt, -1)
        table = []
        for r, c in zip(rows, computed, strict=True):
            dead = 0 if g.window is None else max(c - g.window + 1, 0) // size
            table.append([int(x) if dead <= k < counts[r] else 0 for k, x in enumerate(blocks[r])])
        want["block_table", g.name] = pad(table, pb, [0] * width)
        if g.kernel_block_size:
            ratio = size // g.kernel_block_size
            want["kernel_block_table", g.name] = [
                [x * ratio + k for x in row for k in range(ratio)]
                if b < len(rows)
                else [0] * (width * ratio)
                for b, row in enumerate(want["block_table", g.name])
            ]
    return want


def check(
    groups: list[sg.Group], graph: sg.Graph, step: sg.Compiled, batch: dict[str, Any]
) -> None:
    bound = tables(groups, batch["seed"])
    for name, arrays in bound.items():
        step.bind(name, arrays)
    inputs = {k: np.array(v, np.int32) for k, v in batch.items() if k != "seed"}
    extents = {"B": len(batch["rows"]), "T": sum(batch["num_scheduled_tokens"])}
    padded = step.bucket(**extents)
    out = step(**extents, **inputs)
    oracle = sg.evaluate(graph, {**inputs, **bound}, extents, padded)
    want = expected(groups, batch, bound, padded)
    assert out.keys() == oracle.keys() == want.keys()
    for key, value in want.items():
        assert out[key].dtype == oracle[key].dtype
        np.testing.assert_array_equal(out[key], oracle[key], err_msg=str(key))
        np.testing.assert_array_equal(out[key], value, err_msg=str(key))


@pytest.mark.parametrize("name", SETS)
@settings(deadline=None, max_examples=30)
@given(batch=batches())
def test_a_step_is_as_defined(name: str, batch: dict[str, Any]) -> None:
    check(SETS[name], *compiled(name), batch)


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_groups(data: st.DataObject) -> None:
    groups = [data.draw(group(f"g{i}")) for i in range(data.draw(st.integers(1, 46)))]
    graph, step = compile_step(groups)
    for _ in range(3):
        check(groups, graph, step, data.draw(batches()))
