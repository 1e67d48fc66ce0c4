"""Sliding-window and chunked-local attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.pipeline.ir import Dim
from stepgraph.pipeline.ops import cumsum, gather, maximum, minimum, segment_ids, select
from stepgraph.pipeline.trace import GroupStep, stage
from stepgraph.pipeline.value import Value

from .batch import Batch
from .tables import Table


@stage
def window_block_table(block_table: Value, num_computed_tokens: Value, g: GroupStep) -> Value:
    """int32 (B, max_blocks): the table with blocks that no token of this step can see nulled.
    Pad: 0.

    The first scheduled token, at position num_computed, sees back to num_computed - window + 1;
    whole blocks before that are dead (vLLM's SlidingWindowManager frees them).
    """
    if g.window is None:
        return block_table
    first = maximum(num_computed_tokens - (g.window - 1), 0) // g.block_size
    columns = block_table.step.iota(block_table.shape[1]).expand(0)
    rows = block_table.step.iota(block_table.shape[0]).expand(1)
    dead = columns < gather(first, rows)
    return select(dead, 0, block_table)


@dataclass(frozen=True)
class LocalRows:
    """Chunked-local attention as virtual requests: V rows, one per (request, chunk) with tokens.

    query_lens, seq_lens: int32 (V,). request: int32 (V,), the owning batch slot.
    block_table: int32 (V, chunk // block_size).
    """

    query_lens: Value
    seq_lens: Value
    request: Value
    block_table: Value


def num_local_rows(
    num_computed_tokens: Sequence[int], num_scheduled_tokens: Sequence[int], chunk: int
) -> int:
    """The number of virtual rows V of a step (the host needs it as the extent of V)."""
    rows = 0
    for computed, scheduled in zip(num_computed_tokens, num_scheduled_tokens, strict=True):
        if scheduled > 0:
            rows += (int(computed) + int(scheduled) - 1) // chunk - int(computed) // chunk + 1
    return rows


@stage
def chunked_local_rows(table: Table, batch: Batch, rows: Dim) -> LocalRows:
    """The virtual rows of a step: a token at position p attends to p // chunk * chunk .. p only, so
    each chunk that has scheduled tokens is a request of its own. Position k * chunk starts a chunk.

    Formula: vLLM's make_local_attention_virtual_batches.
    """
    g, s = table.group, batch.rows.step
    chunk = g.chunk
    if chunk is None or chunk % g.block_size:
        raise s.error(f"group {g.name!r}: chunk must be a multiple of block_size, got {chunk}")
    first = batch.num_computed_tokens // chunk
    last = (batch.seq_lens - 1) // chunk
    count = select(batch.num_scheduled_tokens > 0, last - first + 1, 0)
    starts = cumsum(count, "offsets")
    owner = segment_ids(starts, rows)
    number = gather(first, owner) + (s.iota(rows) - gather(starts, owner))
    begin = number * chunk
    # begin + chunk could leave int32
    end = begin + minimum(gather(batch.seq_lens, owner) - begin, chunk)
    query_begin = maximum(begin, gather(batch.num_computed_tokens, owner))
    per_chunk = chunk // g.block_size
    columns = (number * per_chunk).expand(1) + s.iota(per_chunk).expand(0)
    request_row = gather(batch.rows, owner, fill=-1)
    return LocalRows(
        query_lens=end - query_begin,
        seq_lens=end - begin,
        request=owner,
        block_table=gather(table.blocks, request_row.expand(1), columns),
    )
