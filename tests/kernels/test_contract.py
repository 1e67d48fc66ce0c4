"""One contract for every implementation of the block-table kernels: plain Python lists say what is
right, whatever the update lists, rows, counts and positions hold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import stepgraph as sg
from stepgraph.kernels import KERNELS
from stepgraph.kernels.reference import Op
from tests.device.available import STANDS

from .implementations import IMPLEMENTATIONS, Implementation

GUARD = 7_777_777
INT_MAX = 2**31 - 1
# An interpreter or simulator that was switched on takes its time.
SWITCHED_ON = any(stand.switch in os.environ for stand in STANDS.values())
EXAMPLES = 20 if SWITCHED_ON else 60
SETTINGS = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request: pytest.FixtureRequest) -> Implementation:
    stand = STANDS.get(request.param)
    if stand is not None and stand.missing:
        pytest.skip(f"{stand.target}: {stand.missing}")
    if request.param == "jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    return IMPLEMENTATIONS[request.param]


def guarded(values: Any, spare: int) -> tuple[np.ndarray, np.ndarray]:
    """A view of `values`, and the larger array around it: rows have a stride, and what a kernel
    writes beside the view is seen."""
    array = np.array(values, np.int32)
    around = np.full([n + 2 * spare for n in array.shape], GUARD, np.int32)
    view = around[tuple(slice(spare, spare + n) for n in array.shape)]
    view[...] = array
    return view, around


def intact(view: np.ndarray, around: np.ndarray) -> bool:
    copy = around.copy()
    spare = (around.shape[0] - view.shape[0]) // 2
    copy[tuple(slice(spare, spare + n) for n in view.shape)] = GUARD
    return bool((copy == GUARD).all())


def one(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


# -- updates

any_int = st.one_of(st.integers(-3, 12), st.sampled_from([INT_MAX, -INT_MAX - 1, 2**30]))
an_op = st.tuples(
    st.one_of(st.integers(0, 4), any_int), st.integers(-1, 5), st.integers(-1, 5), any_int, any_int
)
a_sound_op = st.tuples(
    st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)
)


@st.composite
def updates(draw: Any) -> Any:
    """Tables with any content, counts and offsets that may be garbage, ops mostly possible."""
    n = draw(st.integers(1, 3))
    rows = draw(st.integers(1, 4))
    tables, counts = [], []
    for _ in range(n):
        width = draw(st.integers(1, 5))
        ids = st.integers(0, 99)
        tables.append(
            draw(
                st.lists(
                    st.lists(ids, min_size=width, max_size=width), min_size=rows, max_size=rows
                )
            )
        )
        counts.append(
            draw(st.lists(st.one_of(st.integers(0, width), any_int), min_size=rows, max_size=rows))
        )
    ops = draw(st.lists(st.one_of(a_sound_op, a_sound_op, an_op), max_size=12))
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, len(ops)), min_size=n - 1, max_size=n - 1)))
        offsets = [0, *cuts, len(ops)]
    else:
        offsets = draw(st.lists(any_int, min_size=n + 1, max_size=n + 1))
    ids = draw(st.lists(st.one_of(st.integers(0, 99), any_int), max_size=8))
    return tables, counts, ops, offsets, ids


def expected_update(
    table: list[list[int]], counts: list[int], ops: Any, ids: list[int]
) -> tuple[list[list[int]], list[int]]:
    table, counts = [list(row) for row in table], list(counts)
    width = len(table[0])
    inside = range(len(table))
    for kind, row, other, start, length in ops:
        if row not in inside:
            continue
        if kind in (Op.APPEND, Op.SET):
            if start < 0 or length < 0 or start + length > len(ids):
                continue
            kept = table[row][: min(max(counts[row], 0), width)] if kind == Op.APPEND else []
            new = kept + [max(i, 0) for i in ids[start : start + length]]
            if len(new) <= width:
                table[row], counts[row] = new + [0] * (width - len(new)), len(new)
        elif kind == Op.CLEAR:
            table[row], counts[row] = [0] * width, 0
        elif other in inside and other != row:
            if kind == Op.MOVE:
                table[other], counts[other] = table[row], counts[row]
                table[row], counts[row] = [0] * width, 0
            elif kind == Op.SWAP:
                table[row], table[other] = table[other], table[row]
                counts[row], counts[other] = counts[other], counts[row]
    return table, counts


def check_update(kernels: Implementation, case: Any) -> tuple[list[Any], list[Any]]:
    tables, counts, ops, offsets, ids = case
    held = [guarded(t, spare=2) for t in tables]
    held_counts = [guarded(c, spare=2) for c in counts]
    kernels.update(
        [view for view, _ in held],
        [view for view, _ in held_counts],
        one(ops).reshape(-1, 5),
        one(offsets),
        one(ids),
    )
    for i, (table, count) in enumerate(zip(tables, counts, strict=True)):
        first, last = (min(max(o, 0), len(ops)) for o in offsets[i : i + 2])
        want = expected_update(table, count, ops[first:last], ids)
        assert (held[i][0].tolist(), held_counts[i][0].tolist()) == want, f"group {i}"
    assert all(intact(*pair) for pair in (*held, *held_counts))
    return [view.tolist() for view, _ in held], [view.tolist() for view, _ in held_counts]


@SETTINGS
@given(case=updates())
@example(case=([[[1, 2]]], [[2]], [(Op.CLEAR, 0, 0, 0, 0)] * 2, [0, -1], []))
def test_any_update_list(kernels: Implementation, case: Any) -> None:
    check_update(kernels, case)


@pytest.mark.parametrize(
    ("ops", "rows", "counts"),
    [
        ([(Op.APPEND, 0, 0, 0, 2)], [[1, 2, 5, 6], [3, 0, 0, 0], [0] * 4], [4, 1, 0]),
        ([(Op.SET, 0, 0, 0, 1)], [[5, 0, 0, 0], [3, 0, 0, 0], [0] * 4], [1, 1, 0]),
        ([(Op.MOVE, 0, 2, 0, 0)], [[0] * 4, [3, 0, 0, 0], [1, 2, 0, 0]], [0, 1, 2]),
        ([(Op.MOVE, 0, 1, 0, 0)], [[0] * 4, [1, 2, 0, 0], [0] * 4], [0, 2, 0]),
        ([(Op.SWAP, 0, 1, 0, 0)], [[3, 0, 0, 0], [1, 2, 0, 0], [0] * 4], [1, 2, 0]),
        ([(Op.CLEAR, 0, 0, 0, 0)], [[0] * 4, [3, 0, 0, 0], [0] * 4], [0, 1, 0]),
        # a chain: each update sees what the one before it left
        (
            [(Op.MOVE, 0, 2, 0, 0), (Op.SWAP, 2, 1, 0, 0), (Op.APPEND, 1, 0, 2, 1)],
            [[0] * 4, [1, 2, 7, 0], [3, 0, 0, 0]],
            [0, 3, 1],
        ),
        # refused whole: too many blocks, rows and ids that are not there, a row onto itself
        ([(Op.APPEND, 0, 0, 0, 3)], None, None),
        ([(Op.SET, 3, 0, 0, 1)], None, None),
        ([(Op.SET, -1, 0, 0, 1)], None, None),
        ([(Op.SET, 0, 0, 2, 2)], None, None),
        ([(Op.SET, 0, 0, -1, 1)], None, None),
        ([(Op.MOVE, 0, 3, 0, 0)], None, None),
        ([(Op.MOVE, 0, 0, 0, 0)], None, None),
        ([(Op.SWAP, 1, -1, 0, 0)], None, None),
        ([(9, 0, 0, 0, 1)], None, None),
    ],
)
def test_each_update(kernels: Implementation, ops: Any, rows: Any, counts: Any) -> None:
    before = [[1, 2, 0, 0], [3, 0, 0, 0], [0] * 4], [2, 1, 0]
    case = [before[0]], [before[1]], ops, [0, len(ops)], [5, 6, 7]
    after = check_update(kernels, case)
    assert after == (([rows], [counts]) if rows is not None else ([before[0]], [before[1]]))


def test_a_shorter_request_never_shows_the_longer_one(kernels: Implementation) -> None:
    ops = [(Op.SET, 0, 0, 0, 4), (Op.CLEAR, 0, 0, 0, 0), (Op.SET, 0, 0, 4, 1)]
    tables, counts = check_update(kernels, ([[[0] * 4]], [[0]], ops, [0, 3], [5, 6, 7, 8, 9]))
    assert tables == [[[9, 0, 0, 0]]]
    assert counts == [[1]]


# -- rows to batch order


@st.composite
def gathers(draw: Any) -> Any:
    n, rows = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    tables, counts = [], []
    for _ in range(n):
        width = draw(st.integers(1, 5))
        row = st.lists(st.one_of(st.integers(0, 99), any_int), min_size=width, max_size=width)
        tables.append(draw(st.lists(row, min_size=rows, max_size=rows)))
        counts.append(draw(st.lists(any_int, min_size=rows, max_size=rows)))
    wanted = draw(st.lists(st.one_of(st.integers(-2, rows + 1), any_int), max_size=7))
    return tables, counts, wanted


@SETTINGS
@given(case=gathers())
def test_any_rows_are_gathered(kernels: Implementation, case: Any) -> None:
    tables, counts, wanted = case
    given_tables = [guarded(t, spare=3)[0] for t in tables]
    got = kernels.gather(given_tables, [one(c) for c in counts], one(wanted))
    for table, count, out in zip(tables, counts, got, strict=True):
        width, want = len(table[0]), []
        for row in wanted:
            inside = 0 <= row < len(table)
            kept = table[row][: min(max(count[row], 0), width)] if inside else []
            want.append(kept + [0] * (width - len(kept)))
        assert out.dtype == np.int32
        assert out.tolist() == want


# -- slots


@dataclass
class Tokens:
    rows: list[int]
    positions: list[int]


@st.composite
def slot_cases(draw: Any) -> Any:
    n, rows = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    tables, params = [], []
    for _ in range(n):
        width = draw(st.integers(1, 5))
        block = st.one_of(st.integers(-1, 20), st.integers(INT_MAX - 9, INT_MAX))
        row = st.lists(block, min_size=width, max_size=width)
        tables.append(draw(st.lists(row, min_size=rows, max_size=rows)))
        interleave = draw(st.sampled_from([1, 1, 2, 4]))
        size = draw(st.sampled_from([1, 1, 2, 3, 8]))
        params.append(
            {
                "block_size": interleave * draw(st.sampled_from([1, 2, 4, 544])),
                "cp_size": size,
                "cp_rank": draw(st.integers(0, size - 1)),
                "cp_interleave": interleave,
                "ring": draw(st.booleans()),
            }
        )
    token = st.tuples(
        st.integers(-1, rows),
        st.one_of(
            st.integers(-2, 60),
            st.integers(0, 20_000),
            st.integers(2**31 - 3, 2**31 + 3),
            st.integers(2**40, 2**40 + 9),
            st.sampled_from([2**63 - 1, -(2**63), -1]),
        ),
    )
    tokens = draw(st.lists(token, max_size=9))
    return tables, tokens, params


def expected_slot(table: list[list[int]], row: int, position: int, p: dict[str, Any]) -> int:
    if not 0 <= row < len(table) or position < 0:
        return -1
    size, interleave = p["cp_size"], p["cp_interleave"]
    column, offset = divmod(position, p["block_size"] * size)
    if p["ring"]:
        column %= len(table[row])
    if column >= len(table[row]) or table[row][column] < 0:
        return -1
    # the ranks take turns, `interleave` tokens each; a rank's tokens lie one after another
    turns = [o for o in range(offset + 1) if o // interleave % size == p["cp_rank"]]
    if not turns or turns[-1] != offset:
        return -1
    return table[row][column] * p["block_size"] + len(turns) - 1


@SETTINGS
@given(case=slot_cases())
def test_any_slot(kernels: Implementation, case: Any) -> None:
    tables, tokens, params = case
    given_tables = [guarded(t, spare=2)[0] for t in tables]
    rows, positions = one([r for r, _ in tokens]), np.array([p for _, p in tokens], np.int64)
    got = kernels.slots(given_tables, rows, positions, params)
    for table, own, out in zip(tables, params, got, strict=True):
        assert out.dtype == np.int64
        assert out.tolist() == [expected_slot(table, r, p, own) for r, p in tokens]


def slots(kernels: Implementation, row: list[int], positions: list[int], **params: Any) -> Any:
    own = {"cp_size": 1, "cp_rank": 0, "cp_interleave": 1, "ring": False, **params}
    rows = np.zeros(len(positions), np.int32)
    (out,) = kernels.slots([one([row])], rows, np.array(positions, np.int64), [own])
    return out.tolist()


def test_slots_past_32_bits(kernels: Implementation) -> None:
    assert slots(kernels, [1_500_000], [5], block_size=2176) == [3_264_000_005]
    assert slots(kernels, [134_217_728], [0, 15], block_size=16) == [2**31, 2**31 + 15]
    assert slots(kernels, [INT_MAX], [2**20 - 1], block_size=2**20) == [2**51 - 1]
    # positions past 32 bits, in a table that reaches that far
    assert slots(kernels, [3, 9], [2**31 + 1], block_size=2**30, ring=True) == [3 * 2**30 + 1]
    assert slots(kernels, [3, 9], [2**31 - 1], block_size=2**30) == [10 * 2**30 - 1]


def test_ranks_share_every_token_once(kernels: Implementation) -> None:
    """All ranks together hold every position, each at slots of its own without a gap."""
    per_rank = [
        slots(kernels, [2], list(range(32)), block_size=8, cp_size=4, cp_rank=r, cp_interleave=2)
        for r in range(4)
    ]
    for rank, own in enumerate(per_rank):
        assert [p for p, s in enumerate(own) if s >= 0] == [
            p for p in range(32) if p // 2 % 4 == rank
        ]
        assert [s for s in own if s >= 0] == list(range(16, 24))


# -- what a graph may hand to a kernel


def wrong(**changes: Any) -> None:
    shapes = {"table": ((4, 3), "int32"), "rows": ((5,), "int32"), "positions": ((5,), "int64")}
    params = {"block_size": 4, "cp_size": 1, "cp_rank": 0, "cp_interleave": 1, "ring": False}

    def step(s: sg.Step) -> None:
        given = {n: changes.get(n, spec) for n, spec in shapes.items()}
        values = [s.input(n, shape, dtype) for n, (shape, dtype) in given.items()]
        own = {n: changes.get(n, value) for n, value in params.items()}
        s.output("slots", sg.custom_call(KERNELS["slot_mapping"], *values, **own), pad=-1)

    sg.trace(step)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"table": ((4, 3), "int64")}, "not a block table"),
        ({"table": ((4,), "int32")}, "not a block table"),
        ({"rows": ((5,), "int64")}, "rows must be int32"),
        ({"rows": ((6,), "int32")}, "rows for"),
        ({"positions": ((5,), "int32")}, "positions must be int64"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"cp_size": 2, "cp_rank": 2}, "rank 2 of 2"),
        ({"cp_interleave": 3}, "cp_interleave 3 must divide block_size 4"),
        ({"block_size": 2**30, "cp_size": 2}, "2147483648 tokens"),
    ],
)
def test_operands_that_no_kernel_takes(change: dict[str, Any], says: str) -> None:
    with pytest.raises(sg.TraceError, match=says):
        wrong(**change)


def test_sound_operands_are_taken() -> None:
    wrong()
