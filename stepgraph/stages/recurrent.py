"""State indices of recurrent groups (Mamba, GDN, short convolution): which block holds the
state."""

from __future__ import annotations

from stepgraph.pipeline.ops import gather, maximum, minimum
from stepgraph.pipeline.trace import stage
from stepgraph.pipeline.value import Value

from .batch import Batch
from .tables import Table


@stage
def state_indices(table: Table, batch: Batch) -> Value:
    """int32 (B, 1 + num_spec_tokens): state blocks of each request. Pad: 0, the null block.

    cache_mode "none": the row's first 1 + K blocks. "align" and "all": from the block that holds
    the sequence's last token on: column max(seq_len - 1, 0) // block_size + k.
    Formula: vLLM's mamba_get_block_table_tensor.
    """
    g = table.group
    columns = batch.rows.step.iota(1 + g.num_spec_tokens).expand(0)
    if g.cache_mode != "none":
        columns = last_scheduled_block(table, batch).expand(1) + columns
    return gather(table.blocks, batch.rows.expand(1), columns)


@stage
def last_scheduled_block(table: Table, batch: Batch) -> Value:
    """int32 (B,): column of the block that holds the last token after this step. Pad: 0.

    Formula: max(seq_len - 1, 0) // block_size (the update path of vLLM PR 34874).
    """
    return maximum(batch.seq_lens - 1, 0) // table.group.block_size


@stage
def last_computed_block(table: Table, batch: Batch) -> Value:
    """int32 (B,): column of the block that held the last token before this step; 0 if there was
    none. Pad: 0. Formula: max(num_computed_tokens - 1, 0) // block_size (vLLM PR 34874)."""
    computed = minimum(batch.num_computed_tokens, batch.seq_lens)
    return maximum(computed - 1, 0) // table.group.block_size
