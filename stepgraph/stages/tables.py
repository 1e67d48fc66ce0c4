"""Block tables in batch order, and the cache slot of each token."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.kernels import KERNELS
from stepgraph.kernels.reference import OP_WIDTH
from stepgraph.pipeline.ir import Extent
from stepgraph.pipeline.ops import custom_call, gather
from stepgraph.pipeline.trace import GroupStep, Step, stage
from stepgraph.pipeline.value import Value

from .batch import Batch


@dataclass(frozen=True)
class Table:
    """A group's block table as the stages read it.

    blocks: int32 (rows, max_blocks). counts: int32 (rows,), blocks in use per row, or None where
    the engine does not say (then every column is taken as it is).
    """

    group: GroupStep
    blocks: Value
    counts: Value | None = None


def table_input(g: GroupStep, max_reqs: int, kind: str = "device") -> Table:
    """Declare a group's block table by request row: inputs `block_table` int32 (max_reqs,
    max_blocks) and `num_blocks` int32 (max_reqs,), bound by address (see `BlockTables`)."""
    blocks = g.input(
        "block_table",
        (max_reqs, g.max_blocks),
        kind=kind,
        unit="block",
        axes=("row", "column"),
    )
    return Table(g, blocks, g.input("num_blocks", (max_reqs,), kind=kind, axes=("row",)))


def update_tables(s: Step, max_reqs: int) -> dict[str, Table]:
    """Declare every group's block table as state, and apply an update list to them; the tables as
    they are after it, by group name. One kernel call for all groups.

    Host inputs: `table_ops` int32 (U, 5), sorted by group; `table_op_offsets` int32 (G + 1,), where
    each group's begin; `table_op_ids` int32 (N,), block ids. See `kernels.reference`; `BlockTables`
    makes these lists and checks them. No output's shape depends on U and N, so one bucket each
    will do: compile(..., buckets={"U": [u], "N": [n]}).
    """
    ops = s.input("table_ops", (s.dim("U"), OP_WIDTH))
    offsets = s.input("table_op_offsets", (len(s.groups) + 1,))
    ids = s.input("table_op_ids", (s.dim("N"),), unit="block")
    after = {}
    for i, g in enumerate(s.groups):
        table = table_input(g, max_reqs, kind="state")
        assert table.counts is not None
        kernel = KERNELS["update_block_table"]
        blocks, counts = custom_call(kernel, table.blocks, table.counts, ops, offsets, ids, group=i)
        s.update(table.blocks, blocks)
        s.update(table.counts, counts)
        after[g.name] = Table(g, blocks, counts)
    return after


def batch_table_input(g: GroupStep, max_reqs: int) -> Table:
    """Declare a group's block table that the engine keeps in batch order: input `block_table` int32
    (max_reqs, max_blocks), bound by address. Its rows are then the batch slots."""
    blocks = g.input(
        "block_table", (max_reqs, g.max_blocks), kind="device", unit="block", axes=(None, "column")
    )
    return Table(g, blocks)


@stage
def block_table(table: Table, rows: Value) -> Value:
    """int32 (B, max_blocks): the group's rows in batch order; columns past a row's own blocks hold
    the null block 0, whatever the row held before. Pad: 0."""
    if table.counts is None:
        step, width = rows.step, table.blocks.shape[1]
        columns = step.iota(width).expand(0)
        return gather(table.blocks, rows.expand(1), columns)
    return custom_call(KERNELS["gather_block_table"], table.blocks, table.counts, rows)


@stage
def slot_mapping(
    table: Table, batch: Batch, *, cp_size: int = 1, cp_rank: int = 0, cp_interleave: int = 1
) -> Value:
    """int64 (T,): cache slot of each token, block id * block_size + offset; -1 where the table
    has no such column, or another context-parallel rank holds the token. Pad: -1.

    Formula (context parallel, as vLLM's slot-mapping kernel): a virtual block has block_size *
    cp_size tokens; offset o in it is local iff (o // cp_interleave) % cp_size == cp_rank, at
    (o // (cp_size * cp_interleave)) * cp_interleave + o % cp_interleave.
    """
    g = table.group
    return custom_call(
        KERNELS["slot_mapping"],
        table.blocks,
        gather(batch.rows, batch.token_to_request, fill=-1),
        batch.positions,
        block_size=g.block_size,
        cp_size=cp_size,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
        ring=g.ring,
    )


@stage
def kernel_block_table(table: Value, g: GroupStep) -> Value:
    """int32 (B, max_blocks * block_size // kernel_block_size): the table in the kernel's smaller
    blocks; block b becomes b * ratio, b * ratio + 1, ... The null block stays 0. Pad: 0.

    Formula: vLLM's AttentionGroup.map_to_kernel_block_table.
    """
    kernel = g.kernel_block_size or g.block_size
    ratio = g.block_size // kernel
    step = table.step
    width: Extent = g.max_blocks * ratio
    column = step.iota(width)
    row = step.iota(table.shape[0]).expand(1)
    block = gather(table, row, (column // ratio).expand(0))
    return block * ratio + (column % ratio).expand(0)
