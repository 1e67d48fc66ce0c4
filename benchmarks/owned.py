"""Owned mode: time of one step of `stages.full_step` with the block tables in stepgraph, for 1, 10
and 46 KV-cache groups, against eager NumPy that builds every group's metadata in full.

    python benchmarks/owned.py [--json]

Granite-shaped: of ten groups nine are recurrent (cache mode "align") and one is attention. A decode
step of 8 requests whose rows are scattered over the tables. Both are checked against the oracle
first; then they run in turn, in rotating order, in one process.

replay: `executable.replay(B, T)` alone. step: the four host inputs are staged first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import machine
import numpy as np

import stepgraph as sg
from stepgraph import stages
from stepgraph.demo_peers import Eager, Fields
from stepgraph.replay import Layout, StepInputs, differences

GROUPS = (1, 10, 46)
BATCH, MAX_REQS, MAX_TOKENS = 8, 64, 512
BLOCK_SIZE, MAX_BLOCKS = 128, 64


def granite_groups(count: int) -> list[sg.Group]:
    """`count` groups; the tenth, twentieth, ... is attention, the others are recurrent."""
    return [
        sg.Group(f"attention {i}", block_size=BLOCK_SIZE, max_blocks=MAX_BLOCKS)
        if i % 10 == 9
        else sg.Group(f"recurrent {i}", "recurrent", BLOCK_SIZE, MAX_BLOCKS, cache_mode="align")
        for i in range(count)
    ]


class OwnedEager(Eager):
    """The eager build for tables by request row: `rows` says where each batch slot's row is."""

    def __init__(self, layout: Layout, tables: sg.BlockTables, rows: np.ndarray) -> None:
        super().__init__(layout, tables.block_table)
        self.rows, self.num_blocks = rows, tables.num_blocks
        self.columns = {g.name: np.arange(g.max_blocks) for g in layout.groups}
        self.block_tables = {
            g.name: np.zeros((layout.max_reqs, g.max_blocks), np.int32) for g in layout.groups
        }

    def _group(self, g: sg.Group, inputs: StepInputs, padded: Any) -> Fields:
        b, bp, rows, table = inputs.num_reqs, padded["B"], self.rows, self.tables[g.name]
        if g.kind == "recurrent":
            states = self.states[g.name]
            first = np.maximum(self.seq_lens[:b] - 1, 0) // g.block_size
            columns = first[:, None] + np.arange(1 + g.num_spec_tokens)
            states[:b] = table[rows[:, None], columns]
            states[b:bp] = 0
            return {("state_indices", g.name): states[:bp]}
        t, tp, slots = inputs.num_tokens, padded["T"], self.slots[g.name]
        columns, offsets = np.divmod(self.positions[:t], g.block_size)
        blocks = table[rows[self.token_to_request[:t]], columns]
        np.add(blocks.astype(np.int64) * g.block_size, offsets, out=slots[:t])
        slots[t:tp] = -1
        gathered = self.block_tables[g.name]
        used = self.columns[g.name] < self.num_blocks[g.name][rows][:, None]
        np.multiply(table[rows], used, out=gathered[:b])
        gathered[b:bp] = 0
        return {("slot_mapping", g.name): slots[:tp], ("block_table", g.name): gathered[:bp]}


class Case:
    """One number of groups: the compiled step and the eager build of the same inputs."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(count)
        groups = granite_groups(count)
        graph = sg.trace(stages.full_step(MAX_REQS), groups)
        self.step = sg.compile(graph, {"B": MAX_REQS, "T": MAX_TOKENS})
        self.tables = sg.BlockTables(groups, MAX_REQS)
        rows = rng.permutation(MAX_REQS)[:BATCH].astype(np.int32)
        computed = rng.integers(1, BLOCK_SIZE * MAX_BLOCKS - 1, BATCH).astype(np.int32)
        ids = iter(rng.permutation(1 << 20).tolist())
        for row, length in zip(rows.tolist(), computed.tolist(), strict=True):
            blocks = -(-(length + 1) // BLOCK_SIZE)
            self.tables.add_row(
                row, {g.name: [next(ids) + 1 for _ in range(blocks)] for g in groups}
            )
        self.tables.commit()
        self.tables.bind(self.step)
        ones = np.ones(BATCH, np.int32)
        self.inputs = StepInputs(BATCH, BATCH, computed, ones, computed.copy(), {})
        self.host = {
            "rows": rows,
            "num_computed_tokens": computed,
            "num_scheduled_tokens": ones,
            "num_prompt_tokens": self.inputs.num_prompt_tokens,
        }
        extents = {"B": BATCH, "T": BATCH}
        self.executable = self.step.executable(**extents)
        self.staged = [(self.step.inputs[k], v) for k, v in self.host.items()]
        self.eager = OwnedEager(
            Layout(tuple(groups), MAX_REQS, MAX_TOKENS, "benchmark"), self.tables, rows
        )
        values: dict[Any, Any] = {**self.host}
        for g in groups:
            values["block_table", g.name] = self.tables.block_table[g.name]
            values["num_blocks", g.name] = self.tables.num_blocks[g.name]
        want = sg.evaluate(graph, values, extents)
        for got in (self.compiled_step(), self.build_eagerly()):
            if found := differences(got, want):
                raise SystemExit(f"{count} groups: " + "; ".join(found))

    def compiled_step(self) -> Any:
        for place, value in self.staged:
            place[:BATCH] = value
        return self.executable.replay(BATCH, BATCH)

    def replay(self) -> Any:
        return self.executable.replay(BATCH, BATCH)

    def build_eagerly(self) -> Any:
        return self.eager.rebuild(self.inputs, self.executable.padded)


def measure(rounds: int, calls: int) -> dict[str, Any]:
    cases = {count: Case(count) for count in GROUPS}
    ways: list[tuple[int, str, Callable[[], Any], int]] = []
    for count, case in cases.items():
        ways.append((count, "replay", case.replay, calls))
        ways.append((count, "step", case.compiled_step, calls))
        ways.append((count, "eager", case.build_eagerly, max(calls // 10, 1)))
    samples: dict[tuple[int, str], list[int]] = {(count, name): [] for count, name, *_ in ways}
    clock = time.perf_counter_ns
    for _ in range(rounds):
        for count, name, way, times in ways:
            add = samples[count, name].append
            way()
            for _ in range(times):
                start = clock()
                way()
                add(clock() - start)
        ways.append(ways.pop(0))
    rows = []
    for count in GROUPS:
        row: dict[str, Any] = {"groups": count}
        row |= {name: machine.summary(samples[count, name]) for name in ("replay", "step", "eager")}
        row["eager_over_step"] = round(row["eager"]["median_us"] / row["step"]["median_us"], 1)
        rows.append(row)
    first, last = rows[0], rows[-1]
    per_group = {
        f"{name}_us_per_extra_group": round(
            (last[name]["median_us"] - first[name]["median_us"]) / (GROUPS[-1] - GROUPS[0]), 4
        )
        for name in ("replay", "step", "eager")
    }
    return {"batch": BATCH, "rows": rows, **per_group, "machine": machine.describe()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--rounds", type=int, default=300, help="rounds in rotating order (300)")
    parser.add_argument("--calls", type=int, default=30, help="timed calls each round (30)")
    args = parser.parse_args()
    result = measure(args.rounds, args.calls)
    if args.json:
        print(json.dumps(result))
        return
    print(f"owned mode, decode step of {BATCH} requests, us (median / p99)")
    print(f"{'groups':>6}  {'replay':>15}  {'step':>15}  {'eager NumPy':>17}  eager / step")
    for row in result["rows"]:
        cells = [
            f"{row[name]['median_us']:.2f} / {row[name]['p99_us']:.2f}"
            for name in ("replay", "step", "eager")
        ]
        print(
            f"{row['groups']:>6}  {cells[0]:>15}  {cells[1]:>15}  {cells[2]:>17}  "
            f"{row['eager_over_step']:>10.1f}x"
        )
    print(
        f"each extra group: replay {result['replay_us_per_extra_group']:.3f} us, "
        f"step {result['step_us_per_extra_group']:.3f} us, "
        f"eager {result['eager_us_per_extra_group']:.2f} us"
    )
    print(machine.line(result["machine"]))


if __name__ == "__main__":
    main()
