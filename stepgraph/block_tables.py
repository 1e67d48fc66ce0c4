"""`BlockTables`: owned mode. The engine keeps the block tables of all KV-cache groups here.

    tables = sg.BlockTables(groups, max_reqs=256, pool_blocks=4096)
    tables.bind(step)
    tables.add_row(0, {"attn": [4, 9], "mamba": [7]})
    tables.append(0, {"attn": [2]})
    tables.commit()

An update is checked on the host, for all groups, before any of it is queued; `commit` writes what
is queued to the tables in one kernel call. Nothing is read back from the tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np

from stepgraph import stages
from stepgraph.kernels.reference import NULL_BLOCK, Op
from stepgraph.pipeline.compiled import Compiled, compile
from stepgraph.pipeline.errors import BindError, BlockTableError
from stepgraph.pipeline.executable import Outputs, as_integer
from stepgraph.pipeline.groups import Group
from stepgraph.pipeline.trace import trace

BlockIds: TypeAlias = "Mapping[str, Iterable[int]]"
# Longer update lists are committed in several calls: sizes of the staging buffer, not limits.
MAX_UPDATES = 1024
MAX_IDS = 8192


class BlockTables:
    """The block tables of all KV-cache groups, by request row.

    groups: as given to `trace`. max_reqs: rows. pool_blocks: blocks that each group's allocator
        has (one number, or {group name: number}); a block id is then below it.
    target, device: where the tables live, as for `compile`.
    block_table: {group name: int32 (max_reqs, max_blocks)}; num_blocks: {group name: int32
        (max_reqs,)}: the arrays that steps read. Past a row's own blocks the table holds block 0.

    Every update raises BlockTableError, naming group, row, value and limit, for a row out of range,
    a row that is in use or free where the other is needed, more blocks than the group's table is
    wide, an id that is no integer or outside the pool, a group that is not there; then no group has
    changed. Block ids start at 1: the null block 0 stands only for blocks that were dropped, in a
    group with a window, a chunk, or a recurrent cache mode other than "none".
    """

    def __init__(
        self,
        groups: Iterable[Group],
        max_reqs: int,
        *,
        pool_blocks: int | Mapping[str, int] | None = None,
        target: str = "cpu",
        device: Any = None,
    ) -> None:
        self.groups = tuple(groups)
        self.max_reqs = max_reqs
        if not self.groups or max_reqs < 1:
            raise BlockTableError(f"{len(self.groups)} groups, max_reqs={max_reqs}: at least 1")
        self._index = {g.name: i for i, g in enumerate(self.groups)}
        if not isinstance(pool_blocks, Mapping):
            pool_blocks = dict.fromkeys(self._index, 2**31 if pool_blocks is None else pool_blocks)
        self._check_names("pool_blocks", pool_blocks, all_groups=True)
        # An id in kernel blocks, block * ratio + k, is an int32 too.
        self._pool = [
            min(pool_blocks[g.name], 2**31 * (g.kernel_block_size or g.block_size) // g.block_size)
            for g in self.groups
        ]
        # The host's side, with what is queued: blocks per row of each group, rows in use, updates.
        self._counts = [[0] * max_reqs for _ in self.groups]
        self._in_use = [False] * max_reqs
        self._queue: list[list[tuple[int, int, int, list[int]]]] = [[] for _ in self.groups]
        graph = trace(lambda s: stages.update_tables(s, max_reqs), self.groups)
        ids = max(MAX_IDS, *(g.max_blocks for g in self.groups))
        capacity = {"U": MAX_UPDATES, "N": ids}
        buckets = {d: [n] for d, n in capacity.items()}
        self._step = compile(graph, capacity, target=target, device=device, buckets=buckets)
        memory = self._step.memory

        def zeros(*shape: int) -> Any:
            return memory.view(memory.zeros(4 * math.prod(shape)), 0, "int32", shape)

        self.block_table = {g.name: zeros(max_reqs, g.max_blocks) for g in self.groups}
        self.num_blocks = {g.name: zeros(max_reqs) for g in self.groups}
        self.bind(self._step)

    # -- updates, for all groups at once

    def add_row(self, row: int, ids: BlockIds) -> None:
        """A request enters at a free row with these blocks; every group is named."""
        row = self._row("add_row", row, in_use=False)
        self._put("add_row", Op.SET, row, ids, all_groups=True)
        self._in_use[row] = True

    def append(self, row: int, ids: BlockIds) -> None:
        """New blocks behind those of a row in use; a group not named gets none."""
        row = self._row("append", row, in_use=True)
        self._put("append", Op.APPEND, row, ids, all_groups=False)

    def set_row(self, row: int, ids: BlockIds) -> None:
        """Other blocks for a row in use (e.g. after preemption); every group is named."""
        row = self._row("set_row", row, in_use=True)
        self._put("set_row", Op.SET, row, ids, all_groups=True)

    def move_row(self, row: int, target: int) -> None:
        """A row in use goes to a free row, and is free then."""
        row = self._row("move_row", row, in_use=True)
        target = self._row("move_row", target, in_use=False)
        for counts, queue in zip(self._counts, self._queue, strict=True):
            counts[target], counts[row] = counts[row], 0
            queue.append((Op.MOVE, row, target, []))
        self._in_use[target], self._in_use[row] = True, False

    def swap_rows(self, row: int, other: int) -> None:
        """Two rows change places, in use or free."""
        row, other = self._row("swap_rows", row), self._row("swap_rows", other)
        by_row: list[list[Any]] = [*self._counts, self._in_use]
        for values in by_row:
            values[row], values[other] = values[other], values[row]
        for queue in self._queue:
            queue.append((Op.SWAP, row, other, []))

    def clear_row(self, row: int) -> None:
        """A request leaves: the row is free, and holds the null block in every column."""
        row = self._row("clear_row", row, in_use=True)
        for counts, queue in zip(self._counts, self._queue, strict=True):
            counts[row] = 0
            queue.append((Op.CLEAR, row, 0, []))
        self._in_use[row] = False

    def row_blocks(self, row: int) -> dict[str, int]:
        """How many blocks a row has in each group, with what is queued (known on the host)."""
        row = self._row("row_blocks", row)
        return {g.name: counts[row] for g, counts in zip(self.groups, self._counts, strict=True)}

    # -- writing

    def commit(self) -> None:
        """Write what is queued to the tables, in one call (several if it is longer than the
        staging buffer)."""
        while any(self._queue):
            lists, taken = self._pack(self._step.capacity)
            self._step(**lists)
            self._drop(taken)

    def run(self, step: Compiled, **args: Any) -> Outputs:
        """`step(**args)` for a step that begins with `stages.update_tables`: what is queued is
        written by the same call. What is longer than the step's U and N is written before it."""
        lists, taken = self._pack(step.capacity)
        if taken != [len(queue) for queue in self._queue]:
            self.commit()
            lists, taken = self._pack(step.capacity)
        out = step(**lists, **args)
        self._drop(taken)
        return out

    def bind(self, step: Compiled) -> None:
        """Bind the tables to a compiled step.

        Raises BindError, naming both sides, unless the step was traced for the same groups, in the
        same order and with the same geometry (block sizes, widths, kernel block sizes, ...), and
        for as many rows.
        """
        theirs = step.source_graph.groups
        if [g.name for g in theirs] != [g.name for g in self.groups]:
            raise BindError(
                f"the step is for the groups {[g.name for g in theirs]}, the block tables for "
                f"{[g.name for g in self.groups]}"
            )
        for mine, other in zip(self.groups, theirs, strict=True):
            names = [f.name for f in fields(Group)]
            names = [n for n in names if getattr(mine, n) != getattr(other, n)]
            if names:
                differ = ", ".join(f"{n} {getattr(other, n)}/{getattr(mine, n)}" for n in names)
                raise BindError(f"group {mine.name!r}, step/block tables: {differ}")
        found = set()
        for node in step.source_graph.inputs:
            name, groups = node.param("name"), node.param("groups")
            if groups is not None and name in ("block_table", "num_blocks"):
                found.add(name)
                if node.aval.shape[0] != self.max_reqs:
                    raise BindError(
                        f"{name}[{groups[0]}], step/block tables: {node.aval.shape[0]}/"
                        f"{self.max_reqs} rows"
                    )
        for name in sorted(found):
            step.bind(name, getattr(self, name))

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{g.name} {g.max_blocks} x {g.block_size}"
            + (f" (kernel {g.kernel_block_size})" if g.kernel_block_size else "")
            for g in self.groups
        )
        return f"<BlockTables {self.max_reqs} rows; {shown}>"

    # -- checks

    def _row(self, what: str, row: int, in_use: bool | None = None) -> int:
        number = None if isinstance(row, bool) else as_integer(row)
        if number is None or not 0 <= number < self.max_reqs:
            raise BlockTableError(f"{what}: row {row!r} is not one of 0..{self.max_reqs - 1}")
        if in_use is not None and self._in_use[number] != in_use:
            raise BlockTableError(f"{what}: row {number} is {'free' if in_use else 'in use'}")
        return number

    def _check_names(self, what: str, given: Any, all_groups: bool) -> None:
        names = list(self._index)
        if not isinstance(given, Mapping):
            raise BlockTableError(f"{what} wants {{group name: ...}}, got {type(given).__name__}")
        if unknown := [name for name in given if name not in self._index]:
            raise BlockTableError(f"{what}: no group {unknown[0]!r}; there are {names}")
        if all_groups and (missing := [name for name in names if name not in given]):
            raise BlockTableError(f"{what}: group {missing[0]!r} is missing; there are {names}")

    def _put(self, what: str, op: Op, row: int, ids: BlockIds, all_groups: bool) -> None:
        """Queue an update with block ids, after checking it for every group."""
        self._check_names(what, ids, all_groups)
        checked = []
        for name, given in ids.items():
            i = self._index[name]
            new = self._block_ids(f"{what}: group {name!r}, row {row}", i, given)
            have = self._counts[i][row] if op == Op.APPEND else 0
            if have + len(new) > self.groups[i].max_blocks:
                raise BlockTableError(
                    f"{what}: group {name!r}, row {row}: {have} + {len(new)} blocks are more than "
                    f"max_blocks {self.groups[i].max_blocks}"
                )
            checked.append((i, have + len(new), new))
        for i, count, new in checked:
            if new or op == Op.SET:
                self._counts[i][row] = count
                self._queue[i].append((op, row, 0, new))

    def _block_ids(self, where: str, i: int, given: Any) -> list[int]:
        if isinstance(given, np.ndarray) and given.size and given.dtype.kind not in "iu":
            raise BlockTableError(f"{where}: block ids are integers, not {given.dtype}")
        try:
            values = given.tolist() if isinstance(given, np.ndarray) else list(given)
        except TypeError:
            raise BlockTableError(
                f"{where}: expected a sequence of block ids, got {type(given).__name__}"
            ) from None
        group, limit = self.groups[i], self._pool[i]
        drops = group.window is not None or group.chunk is not None or group.cache_mode != "none"
        least = NULL_BLOCK if drops else NULL_BLOCK + 1
        new = []
        for value in values:
            number = value if type(value) is int else as_integer(value)
            if number is None:
                raise BlockTableError(f"{where}: {value!r} is not a block id")
            if not least <= number < limit:
                hint = " (0 is the null block)" if number == NULL_BLOCK else ""
                raise BlockTableError(
                    f"{where}: block id {number} is outside {least}..{limit - 1}{hint}"
                )
            new.append(number)
        return new

    # -- the queue

    def _pack(self, capacity: Mapping[str, int]) -> tuple[dict[str, Any], list[int]]:
        """The oldest updates of each group that fit, as arguments of a step, and their number."""
        if "U" not in capacity or "N" not in capacity:
            raise BindError("the step has no stages.update_tables: use commit() before it")
        ops: list[tuple[int, ...]] = []
        ids: list[int] = []
        offsets, taken = [0], []
        for queue in self._queue:
            first = len(ops)
            for op, row, other, new in queue:
                if len(ops) == capacity["U"] or len(ids) + len(new) > capacity["N"]:
                    break
                ops.append((op, row, other, len(ids), len(new)))
                ids += new
            offsets.append(len(ops))
            taken.append(len(ops) - first)
        lists = {
            "U": len(ops),
            "N": len(ids),
            "table_ops": np.array(ops, np.int32).reshape(-1, 5),
            "table_op_offsets": offsets,
            "table_op_ids": np.array(ids, np.int32),
        }
        return lists, taken

    def _drop(self, taken: list[int]) -> None:
        for queue, n in zip(self._queue, taken, strict=True):
            del queue[:n]
