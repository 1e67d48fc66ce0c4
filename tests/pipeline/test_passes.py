"""What the passes find and promise: sharing, batching over groups, and text that does not grow."""

from __future__ import annotations

import re

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.pipeline import passes
from stepgraph.pipeline.ir import Consts, Graph


def mamba(n: int, sizes: tuple[int, ...] = (16,)) -> list[sg.Group]:
    return [
        sg.Group(f"m{i}", "recurrent", sizes[i % len(sizes)], 20 + i, cache_mode="align")
        for i in range(n)
    ]


def naive(s: sg.Step) -> None:
    """Per group, everything computed again: what the compiler must share."""
    b = s.dim("B")
    for g in s.groups:
        lens = s_input(s, "computed") + s_input(s, "scheduled")
        column = sg.maximum(lens - 1, 0) // g.block_size
        table = g.input("block_table", (64, g.max_blocks), kind="device")
        g.output("state_indices", sg.gather(table, s.iota(b), column))


def s_input(s: sg.Step, name: str) -> sg.Value:
    memo = s.__dict__.setdefault("memo", {})
    if name not in memo:
        memo[name] = s.input(name, (s.dim("B"),))
    return memo[name]


def counts(graph: Graph) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in graph.nodes:
        found[node.prim] = found.get(node.prim, 0) + 1
    return found


def test_groups_share_all_that_does_not_depend_on_their_table() -> None:
    traced = sg.trace(naive, mamba(9))
    assert counts(traced)["floordiv"] == 9
    optimised = passes.run(traced)
    assert {k: v for k, v in counts(optimised).items() if k != "input"} == {
        "add": 1,
        "sub": 1,
        "max": 1,
        "floordiv": 1,
        "iota": 1,
        "gather": 1,
    }
    gather = next(n for n in optimised.nodes if n.prim == "gather")
    assert gather.n == 9
    assert next(n for n in optimised.nodes if n.prim == "floordiv").n is None


def test_two_block_sizes_need_two_columns_not_one_per_group() -> None:
    optimised = passes.run(sg.trace(naive, mamba(10, (16, 32))))
    column = next(n for n in optimised.nodes if n.prim == "floordiv")
    assert column.n == 2
    assert column.operands[1] == Consts((16, 32), "int32")
    gather = next(n for n in optimised.nodes if n.prim == "gather")
    assert gather.n == 10
    assert gather.operands[-1].pick == (0, 1) * 5  # type: ignore[union-attr]


def test_values_of_one_group_are_not_merged_with_each_other() -> None:
    def step(s: sg.Step) -> None:
        for g in s.groups:
            x = g.input("x", (s.dim("B"),))
            g.output("one", (x + 1) * (x + 2), pad=0)

    optimised = passes.run(sg.trace(step, mamba(3)))
    assert [n.n for n in optimised.nodes if n.prim == "add"] == [3, 3]


def test_different_computations_are_not_merged() -> None:
    def step(s: sg.Step) -> None:
        for i, g in enumerate(s.groups):
            x = g.input("x", (s.dim("B"),))
            g.output("out", x + 1 if i % 2 else x * 3, pad=0)

    optimised = passes.run(sg.trace(step, mamba(4)))
    assert sorted((n.prim, n.n) for n in optimised.nodes if n.prim in ("add", "mul")) == [
        ("add", 2),
        ("mul", 2),
    ]
    assert len(optimised.outputs) == 2


def test_nodes_nests_and_text_do_not_grow_with_the_number_of_groups() -> None:
    few, many = (sg.compile(sg.trace(naive, mamba(n, (16, 32))), {"B": 64}) for n in (4, 46))
    assert len(few.graph.nodes) == len(many.graph.nodes)
    assert len(few.schedule.nests) == len(many.schedule.nests)

    def text(c: sg.Compiled) -> str:
        return re.sub(r"# .*", "", c.source.text)

    assert text(few) == text(many)


@pytest.mark.parametrize("n", [1, 2, 10, 46])
def test_every_pass_keeps_the_meaning(n: int) -> None:
    rng = np.random.default_rng(n)
    groups = mamba(n, (1, 16, 32))
    graphs: list[tuple[str, Graph]] = []
    passes.run(sg.trace(naive, groups), lambda name, g: graphs.append((name, g)))
    inputs = {
        "computed": rng.integers(0, 300, 64).astype(np.int32),
        "scheduled": rng.integers(0, 9, 64).astype(np.int32),
        "block_table": {
            g.name: rng.integers(1, 99, (64, g.max_blocks)).astype(np.int32) for g in groups
        },
    }
    want = sg.evaluate(graphs[0][1], inputs, {"B": 50}, {"B": 64})
    assert [name for name, _ in graphs][:5] == ["trace", "verify", "simplify", "cse", "dce"]
    for name, graph in graphs[1:]:
        got = sg.evaluate(graph, inputs, {"B": 50}, {"B": 64})
        assert got.keys() == want.keys(), name
        for key in want:
            np.testing.assert_array_equal(got[key], want[key], err_msg=f"{name} {key}")


def test_constants_fold_and_identities_vanish() -> None:
    def step(s: sg.Step) -> None:
        x = s.input("x", (s.dim("B"),))
        seven = s.constant(3) + 4
        same = (x + 0) * 1 // 1 - 0
        s.output("out", sg.select(s.constant(1, "bool"), same + seven, x), pad=0)

    assert counts(passes.run(sg.trace(step))) == {"input": 1, "add": 1}


def test_an_unused_value_is_dropped_and_an_unused_input_kept() -> None:
    def step(s: sg.Step) -> None:
        x, y = (s.input(name, (s.dim("B"),)) for name in ("x", "y"))
        _ = y * 5
        s.output("out", x, pad=0)

    assert counts(passes.run(sg.trace(step))) == {"input": 2}


def test_a_constant_output_is_written() -> None:
    def step(s: sg.Step) -> None:
        s.output("out", s.constant(5) + 2, pad=0)
        s.output("flag", s.input("x", (s.dim("B"),)) * 0, pad=9)

    c = sg.compile(sg.trace(step), {"B": 2})
    out = c(B=1, x=[3])
    assert out["out"].item() == 7
    assert c(B=1, x=[3])["flag"].tolist() == [0]


def test_tables_one_block_wide_are_batched_with_wider_ones() -> None:
    """A recurrent group keeps one state block per request, an attention group many."""

    def step(s: sg.Step) -> None:
        for g in s.groups:
            table = g.input("block_table", (4, g.max_blocks), kind="device")
            g.output("first", sg.gather(table, s.iota(s.dim("B")), s.constant(0)), pad=0)

    groups = [sg.Group("a", max_blocks=7), sg.Group("m", max_blocks=1)]
    optimised = passes.run(sg.trace(step, groups))
    assert [n.n for n in optimised.nodes if n.prim == "gather"] == [2]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("plus", [(1, 2, 3), (0, 2, 3), (0, 2, 0), (0, 0, 0)])
def test_state_updates_that_differ_between_groups(
    order: tuple[int, ...], plus: tuple[int, ...]
) -> None:
    """Whatever differs between the groups' updates, and in whatever order they are written."""
    groups = mamba(3)

    def step(s: sg.Step) -> None:
        x = s.input("x", (s.dim("B"),))
        states = [g.input("state", (4,), kind="state") for g in s.groups]
        for i in order:
            value = x + plus[i] if plus[i] else x
            s.update(states[i], sg.scatter(states[i], value, s.iota(s.dim("B"))))

    compiled = sg.compile(sg.trace(step, groups), {"B": 2})
    states = {g.name: np.zeros(4, np.int32) for g in groups}
    compiled.bind("state", states)
    compiled(B=2, x=[5, 6])
    for g, more in zip(groups, plus, strict=True):
        assert states[g.name].tolist() == [5 + more, 6 + more, 0, 0]
