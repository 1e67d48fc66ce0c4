"""BlockTables: against lists in Python, with every kind of update that must be refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import stepgraph as sg
from stepgraph import stages

ROWS, POOL = 4, 10
GROUPS = [
    sg.Group("attn", block_size=4, max_blocks=4),
    sg.Group("wide", block_size=16, max_blocks=3, kernel_block_size=4),
    sg.Group("window", block_size=4, max_blocks=6, window=8),
    sg.Group("ring", block_size=4, max_blocks=2, ring=True),
    sg.Group("mamba", "recurrent", block_size=4, max_blocks=1),
    sg.Group("align", "recurrent", block_size=4, max_blocks=5, cache_mode="align"),
]
NAMES = [g.name for g in GROUPS]
DROPS = {"window", "align"}  # groups whose rows may hold the null block in a place


def ids(**some: Any) -> dict[str, Any]:
    return {**{name: [] for name in NAMES}, **some}


def engine_step(s: sg.Step) -> None:
    """A step that takes the updates itself, then reads the tables."""
    tables = stages.update_tables(s, ROWS)
    batch = stages.batch(s)
    for g in s.groups:
        table = tables[g.name]
        g.output("block_table", stages.block_table(table, batch.rows))
        if g.kind == "attention":
            g.output("slot_mapping", stages.slot_mapping(table, batch))


def compiled_engine_step(updates: int = 16, block_ids: int = 16) -> sg.Compiled:
    capacity = {"U": updates, "N": block_ids, "B": ROWS, "T": 32}
    return sg.compile(
        sg.trace(engine_step, GROUPS), capacity, buckets={"U": [updates], "N": [block_ids]}
    )


# -- against a model


def sound(name: str, given: Any) -> bool:
    least = 0 if name in DROPS else 1
    return all(isinstance(i, int) and least <= i < POOL for i in given)


an_id = st.integers(1, POOL - 1)
any_id = st.one_of(an_id, st.sampled_from([0, -1, POOL, 2**31, -(2**40), 1.0, "4", None]))
some_ids = st.one_of(st.lists(an_id, max_size=3), st.lists(any_id, max_size=2))
all_groups = st.fixed_dictionaries({name: st.lists(an_id, max_size=1) for name in NAMES})
few_groups = st.dictionaries(st.sampled_from([*NAMES, "other"]), some_ids, max_size=3)
a_few = st.dictionaries(st.sampled_from(NAMES), st.lists(an_id, max_size=2), max_size=2)
any_ids = st.one_of(
    all_groups, all_groups, st.builds(lambda a, b: {**a, **b}, all_groups, few_groups)
)
any_row = st.sampled_from([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, ROWS, -1])  # few rows meet often


class Model(RuleBasedStateMachine):
    """Rows as lists, changed only by what the model itself finds possible."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = sg.BlockTables(GROUPS, ROWS, pool_blocks=POOL)
        self.step = self.compiled()
        self.tables.bind(self.step)
        self.rows: dict[int, dict[str, list[int]]] = {}
        self.written: dict[int, dict[str, list[int]]] = {}

    @staticmethod
    @functools.cache
    def compiled() -> sg.Compiled:
        return compiled_engine_step()

    def attempt(self, possible: bool, update: Any, *args: Any) -> bool:
        if possible:
            update(*args)
        else:
            with pytest.raises(sg.BlockTableError):
                update(*args)
        return possible

    def whole(self, given: dict[str, Any]) -> bool:
        return set(given) == set(NAMES) and all(
            sound(g.name, given[g.name]) and len(given[g.name]) <= g.max_blocks for g in GROUPS
        )

    @rule(row=any_row, given=any_ids)
    def add_row(self, row: int, given: Any) -> None:
        possible = row in range(ROWS) and row not in self.rows and self.whole(given)
        if self.attempt(possible, self.tables.add_row, row, given):
            self.rows[row] = {name: list(new) for name, new in given.items()}

    @rule(row=any_row, given=any_ids)
    def set_row(self, row: int, given: Any) -> None:
        if self.attempt(row in self.rows and self.whole(given), self.tables.set_row, row, given):
            self.rows[row] = {name: list(new) for name, new in given.items()}

    @rule(row=any_row, given=st.one_of(a_few, a_few, few_groups))
    def append(self, row: int, given: Any) -> None:
        width = {g.name: g.max_blocks for g in GROUPS}
        possible = row in self.rows and all(
            name in width
            and sound(name, new)
            and len(self.rows[row][name]) + len(new) <= width[name]
            for name, new in given.items()
        )
        if self.attempt(possible, self.tables.append, row, given):
            for name, new in given.items():
                self.rows[row][name] += new

    @rule(row=any_row, to=any_row)
    def move_row(self, row: int, to: int) -> None:
        possible = row in self.rows and to in range(ROWS) and to not in self.rows
        if self.attempt(possible, self.tables.move_row, row, to):
            self.rows[to] = self.rows.pop(row)

    @rule(row=any_row, other=any_row)
    def swap_rows(self, row: int, other: int) -> None:
        possible = row in range(ROWS) and other in range(ROWS)
        if self.attempt(possible, self.tables.swap_rows, row, other):
            mine, theirs = self.rows.pop(row, None), self.rows.pop(other, None)
            if row == other:
                theirs = mine
            self.rows |= {r: v for r, v in ((row, theirs), (other, mine)) if v is not None}

    @rule(row=any_row)
    def clear_row(self, row: int) -> None:
        if self.attempt(row in self.rows, self.tables.clear_row, row):
            del self.rows[row]

    @rule()
    def commit(self) -> None:
        self.tables.commit()
        self.written = copy.deepcopy(self.rows)

    @rule(rows=st.lists(any_row, max_size=ROWS))
    def run(self, rows: list[int]) -> None:
        n = len(rows)
        out = self.tables.run(
            self.step,
            B=n,
            T=n,
            rows=rows,
            num_computed_tokens=[0] * n,
            num_scheduled_tokens=[1] * n,
        )
        self.written = copy.deepcopy(self.rows)
        for g in GROUPS:
            want = [self.full(self.rows, row, g) for row in rows]
            assert out["block_table", g.name][:n].tolist() == want

    @staticmethod
    def full(rows: dict[int, dict[str, list[int]]], row: int, g: sg.Group) -> list[int]:
        own = rows.get(row, {}).get(g.name, [])
        return own + [0] * (g.max_blocks - len(own))

    @invariant()
    def tables_hold_what_was_committed(self) -> None:
        for g in GROUPS:
            want = [self.full(self.written, row, g) for row in range(ROWS)]
            assert self.tables.block_table[g.name].tolist() == want
            counts = [len(self.written.get(row, {}).get(g.name, [])) for row in range(ROWS)]
            assert self.tables.num_blocks[g.name].tolist() == counts

    @invariant()
    def the_host_knows_what_is_queued(self) -> None:
        for row in range(ROWS):
            own = self.rows.get(row, {})
            assert self.tables.row_blocks(row) == {n: len(own.get(n, [])) for n in NAMES}


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# -- what is refused, and how it is said


@pytest.fixture
def tables() -> sg.BlockTables:
    """Row 0 in use with two blocks of "attn" and "mamba" full; row 1 queued, not yet written."""
    made = sg.BlockTables(GROUPS, ROWS, pool_blocks={**dict.fromkeys(NAMES, 100), "attn": 9})
    made.add_row(0, ids(attn=[4, 5], mamba=[7]))
    made.commit()
    made.add_row(1, ids(attn=[6], window=[0, 3]))
    return made


def everything(tables: sg.BlockTables) -> Any:
    return (
        [tables.row_blocks(row) for row in range(ROWS)],
        {n: t.tolist() for n, t in tables.block_table.items()},
        {n: t.tolist() for n, t in tables.num_blocks.items()},
    )


REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("add_row", (ROWS, ids()), r"add_row: row 4 is not one of 0\.\.3"),
    ("add_row", (-1, ids()), r"row -1 is not one of 0\.\.3"),
    ("add_row", (True, ids()), "row True is not one of"),
    ("add_row", (2.0, ids()), "row 2.0 is not one of"),
    ("add_row", (0, ids()), "add_row: row 0 is in use"),
    ("add_row", (1, ids()), "add_row: row 1 is in use"),
    ("add_row", (2, {"attn": [1]}), "add_row: group 'wide' is missing"),
    ("add_row", (2, ids(mmaba=[1])), "no group 'mmaba'; there are"),
    ("add_row", (2, [1, 2]), r"wants \{group name: ...\}, got list"),
    ("add_row", (2, ids(wide=[1], attn=3)), "group 'attn', row 2: expected a sequence"),
    ("add_row", (2, ids(wide=[1], attn=[3, None])), "row 2: None is not a block id"),
    ("add_row", (2, ids(wide=[1], attn=[3, True])), "True is not a block id"),
    ("add_row", (2, ids(wide=[1], attn=[[3], [4]])), r"\[3\] is not a block id"),
    ("add_row", (2, ids(wide=[1], attn=[0])), r"block id 0 is outside 1\.\.8 \(0 is the null"),
    ("add_row", (2, ids(wide=[1], attn=[3, -2])), r"block id -2 is outside 1\.\.8"),
    ("add_row", (2, ids(wide=[1], attn=[9])), r"'attn', row 2: block id 9 is outside 1\.\.8"),
    ("add_row", (2, ids(wide=[1], attn=[2**40])), r"block id 1099511627776 is outside"),
    ("add_row", (2, ids(align=[-1])), r"'align', row 2: block id -1 is outside 0\.\.99"),
    ("add_row", (2, ids(mamba=[0])), r"'mamba', row 2: block id 0 is outside 1\.\.99"),
    (
        "add_row",
        (2, ids(wide=[1], attn=np.array([1.5]))),
        "block ids are integers, not float64",
    ),
    ("add_row", (2, ids(attn=np.array([True]))), "block ids are integers, not bool"),
    (
        "add_row",
        (2, ids(wide=[1], attn=[1] * 5)),
        r"'attn', row 2: 0 \+ 5 blocks are more than max_blocks 4",
    ),
    ("append", (2, {"attn": [1]}), "append: row 2 is free"),
    ("append", (0, {"wide": [1], "mamba": [1]}), r"'mamba', row 0: 1 \+ 1 blocks are more than"),
    ("append", (0, {"wide": [1], "attn": [1, 2, 3]}), r"'attn', row 0: 2 \+ 3 blocks are more"),
    ("append", (0, {"wide": [1], "lora": [1]}), "no group 'lora'"),
    ("append", (0, {"wide": [1], "attn": [0]}), "block id 0"),
    ("set_row", (2, ids()), "set_row: row 2 is free"),
    ("set_row", (0, {"attn": [1]}), "set_row: group 'wide' is missing"),
    ("set_row", (0, ids(wide=[1], ring=[1, 2, 3])), r"'ring', row 0: 0 \+ 3 blocks are more than"),
    ("move_row", (2, 3), "move_row: row 2 is free"),
    ("move_row", (0, 1), "move_row: row 1 is in use"),
    ("move_row", (0, 0), "move_row: row 0 is in use"),
    ("move_row", (0, 4), "row 4 is not one of"),
    ("swap_rows", (0, 4), "swap_rows: row 4 is not one of"),
    ("swap_rows", (-1, 0), "row -1 is not one of"),
    ("clear_row", (2,), "clear_row: row 2 is free"),
    ("clear_row", ("0",), "row '0' is not one of"),
]


@pytest.mark.parametrize(("update", "args", "says"), REFUSED)
def test_a_refused_update_changes_nothing(
    tables: sg.BlockTables, update: str, args: tuple[Any, ...], says: str
) -> None:
    before = everything(tables)
    with pytest.raises(sg.BlockTableError, match=says):
        getattr(tables, update)(*args)
    assert everything(tables) == before
    tables.commit()
    assert tables.block_table["attn"].tolist() == [[4, 5, 0, 0], [6, 0, 0, 0], [0] * 4, [0] * 4]
    assert tables.block_table["wide"].tolist() == [[0] * 3] * 4
    assert tables.block_table["window"][1].tolist() == [0, 3, 0, 0, 0, 0]


def test_a_refused_update_is_also_a_value_error(tables: sg.BlockTables) -> None:
    with pytest.raises(ValueError, match="row 9"):
        tables.clear_row(9)


@pytest.mark.parametrize(
    "given", [[4, 2], (4, 2), np.array([4, 2], np.int64), np.array([4, 2], np.uint8), range(4, 6)]
)
def test_ids_of_any_integer_type(tables: sg.BlockTables, given: Any) -> None:
    tables.append(1, {"attn": given})
    tables.append(1, {"attn": [np.int32(8)]})
    tables.commit()
    assert tables.block_table["attn"][1].tolist() == [6, *map(int, given), 8]


def test_no_groups_and_no_rows_are_refused() -> None:
    with pytest.raises(sg.BlockTableError, match="0 groups"):
        sg.BlockTables([], 4)
    with pytest.raises(sg.BlockTableError, match="max_reqs=0"):
        sg.BlockTables(GROUPS, 0)
    with pytest.raises(sg.BlockTableError, match="pool_blocks: group 'wide' is missing"):
        sg.BlockTables(GROUPS, 4, pool_blocks={"attn": 3})


def test_an_id_must_fit_the_kernel_blocks_too() -> None:
    """Block b of 16 tokens is kernel blocks 4b .. 4b + 3, which are int32."""
    group = sg.Group("a", block_size=16, max_blocks=2, kernel_block_size=4)
    tables = sg.BlockTables([group], 1)
    with pytest.raises(sg.BlockTableError, match="block id 536870912 is outside"):
        tables.add_row(0, {"a": [2**29]})
    tables.add_row(0, {"a": [2**29 - 1]})
    tables.commit()
    assert tables.block_table["a"].tolist() == [[2**29 - 1, 0]]


# -- writing


def test_groups_may_come_from_a_generator() -> None:
    tables = sg.BlockTables((g for g in GROUPS), 2)
    assert list(tables.block_table) == NAMES


def test_a_reused_row_reads_the_null_block_past_its_own(tables: sg.BlockTables) -> None:
    tables.append(0, {"attn": [6, 7]})
    tables.commit()
    tables.clear_row(0)
    tables.add_row(0, ids(attn=[8]))
    tables.commit()
    assert tables.block_table["attn"][0].tolist() == [8, 0, 0, 0]
    assert tables.block_table["mamba"][0].tolist() == [0]
    assert tables.num_blocks["attn"][0] == 1


def test_update_lists_longer_than_the_staging_buffer() -> None:
    group = sg.Group("a", max_blocks=3000)
    tables = sg.BlockTables([group, sg.Group("b", max_blocks=2)], 5)
    for row in range(5):
        tables.add_row(row, {"a": range(row + 1, row + 3001), "b": [row + 1]})
    for i in range(3001):
        tables.swap_rows(i % 4, i % 4 + 1)
    order = list(range(5))
    for i in range(3001):
        order[i % 4], order[i % 4 + 1] = order[i % 4 + 1], order[i % 4]
    tables.commit()
    assert tables.block_table["b"][:, 0].tolist() == [r + 1 for r in order]
    for row, first in enumerate(order):
        assert tables.block_table["a"][row].tolist() == list(range(first + 1, first + 3001))


def test_a_step_with_less_room_than_the_update_list(tables: sg.BlockTables) -> None:
    """The rest is written before the step, in the order it was queued."""
    step = compiled_engine_step(updates=1, block_ids=1)
    tables.bind(step)
    for i in range(3):
        tables.append(1, {"attn": [i + 1]})
    tables.swap_rows(0, 1)
    out = tables.run(step, B=1, T=0, rows=[0], num_computed_tokens=[0], num_scheduled_tokens=[0])
    assert out["block_table", "attn"].tolist() == [[6, 1, 2, 3]]
    tables.swap_rows(0, 1)
    assert tables.run(step, B=1, T=0)["block_table", "attn"].tolist() == [[4, 5, 0, 0]]


def test_a_failed_step_keeps_the_updates(tables: sg.BlockTables) -> None:
    step = compiled_engine_step()
    tables.bind(step)
    with pytest.raises(sg.CaptureError, match="B=5 is above the capacity 4"):
        tables.run(step, B=5, T=0)
    tables.commit()
    assert tables.block_table["attn"][1].tolist() == [6, 0, 0, 0]


def test_a_step_without_updates_is_not_run_by_run(tables: sg.BlockTables) -> None:
    step = sg.compile(sg.trace(stages.full_step(ROWS), GROUPS), {"B": 4, "T": 8})
    tables.bind(step)
    with pytest.raises(sg.BindError, match=r"no stages.update_tables: use commit\(\)"):
        tables.run(step, B=0, T=0)


# -- binding


def reader(max_reqs: int = ROWS, batch_order: bool = False) -> Any:
    return stages.full_step(max_reqs, batch_order)


def changed(**fields: Any) -> list[sg.Group]:
    return [sg.Group(**{**GROUPS[0].to_dict(), **fields}), *GROUPS[1:]]


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (changed(block_size=8), "group 'attn', step/block tables: block_size 8/4"),
        (changed(max_blocks=5), "group 'attn', step/block tables: max_blocks 5/4"),
        (changed(kernel_block_size=2), "kernel_block_size 2/None"),
        (changed(name="other"), r"the step is for the groups \['other', 'wide'"),
        (GROUPS[:-1], "the step is for the groups"),
        ([GROUPS[1], GROUPS[0], *GROUPS[2:]], "the step is for the groups"),
    ],
)
def test_a_step_of_another_geometry_is_refused(
    tables: sg.BlockTables, groups: list[sg.Group], says: str
) -> None:
    step = sg.compile(sg.trace(reader(), groups), {"B": 4, "T": 8})
    with pytest.raises(sg.BindError, match=says):
        tables.bind(step)


def test_a_step_for_other_rows_is_refused(tables: sg.BlockTables) -> None:
    step = sg.compile(sg.trace(reader(max_reqs=3), GROUPS), {"B": 3, "T": 8})
    with pytest.raises(sg.BindError, match=r"block_table\[attn\], step/block tables: 3/4 rows"):
        tables.bind(step)


def test_a_step_in_batch_order_reads_rows_as_they_are(tables: sg.BlockTables) -> None:
    step = sg.compile(sg.trace(reader(batch_order=True), GROUPS), {"B": 4, "T": 8})
    tables.bind(step)
    tables.commit()
    out = step(
        B=2,
        T=2,
        num_computed_tokens=[5, 2],
        num_scheduled_tokens=[1, 1],
        num_prompt_tokens=[5, 2],
    )
    assert out["slot_mapping", "attn"].tolist() == [5 * 4 + 1, 6 * 4 + 2]


def test_the_geometry_is_shown(tables: sg.BlockTables) -> None:
    assert "4 rows; attn 4 x 4, wide 3 x 16 (kernel 4), window 6 x 4" in repr(tables)
