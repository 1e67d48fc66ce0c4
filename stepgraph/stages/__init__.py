"""The library of stages: the fields that attention backends need, each a function over traced
values.

    def step(s):
        batch = stages.batch(s)                       # declares the step's host inputs
        s.output("query_start_loc", batch.query_start_loc)
        s.output("seq_lens", batch.seq_lens)
        for g in s.groups:
            table = stages.table_input(g, max_reqs=256)
            if g.kind == "recurrent":
                g.output("state_indices", stages.state_indices(table, batch))
            else:
                g.output("slot_mapping", stages.slot_mapping(table, batch))

What each field holds past the actual extent is in `stepgraph.pipeline.padding`.
"""

from .batch import (
    Batch,
    batch,
    is_padding,
    positions,
    query_lens,
    query_start_loc,
    seq_lens,
    step_kind_counts,
    token_to_request,
)
from .context_parallel import local_seq_lens, local_token_bounds
from .pages import last_page_len, page_counts, page_indices, page_indptr, translate_pages
from .recurrent import last_computed_block, last_scheduled_block, state_indices
from .step import full_step
from .tables import (
    Table,
    batch_table_input,
    block_table,
    kernel_block_table,
    slot_mapping,
    table_input,
    update_tables,
)
from .windows import LocalRows, chunked_local_rows, num_local_rows, window_block_table

__all__ = [
    "Batch",
    "LocalRows",
    "Table",
    "batch",
    "batch_table_input",
    "block_table",
    "chunked_local_rows",
    "full_step",
    "is_padding",
    "kernel_block_table",
    "last_computed_block",
    "last_page_len",
    "last_scheduled_block",
    "local_seq_lens",
    "local_token_bounds",
    "num_local_rows",
    "page_counts",
    "page_indices",
    "page_indptr",
    "positions",
    "query_lens",
    "query_start_loc",
    "seq_lens",
    "slot_mapping",
    "state_indices",
    "step_kind_counts",
    "table_input",
    "token_to_request",
    "translate_pages",
    "update_tables",
    "window_block_table",
]
