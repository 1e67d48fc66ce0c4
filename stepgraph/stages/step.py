"""A whole step, composed from the library: what a hybrid model's backends need each step."""

from __future__ import annotations

from collections.abc import Callable

from stepgraph.pipeline.trace import Step

from .batch import batch, is_padding, step_kind_counts
from .recurrent import last_computed_block, last_scheduled_block, state_indices
from .tables import batch_table_input, block_table, kernel_block_table, slot_mapping, table_input
from .windows import window_block_table


def full_step(max_reqs: int, batch_order: bool = False) -> Callable[[Step], None]:
    """A step function with every field of the padding contract that the groups have.

    max_reqs: rows of the block tables. batch_order: the engine keeps its tables in batch order (as
    vLLM's V1 runner does); then there is no input `rows`, and no batch-order table to build.
    Host inputs: num_computed_tokens, num_scheduled_tokens, num_prompt_tokens (and rows).
    """

    def step(s: Step) -> None:
        b, t = s.dim("B"), s.dim("T")
        fields = batch(s, rows=s.iota(b) if batch_order else None)
        prompt = s.input("num_prompt_tokens", (b,))
        s.output("query_start_loc", fields.query_start_loc)
        s.output("seq_lens", fields.seq_lens)
        s.output("token_to_request", fields.token_to_request)
        s.output("positions", fields.positions)
        s.output("is_padding", is_padding(s, t))
        s.output("is_prefilling", fields.num_computed_tokens < prompt)
        counts = step_kind_counts(fields.query_start_loc, fields.num_computed_tokens, prompt)
        for name, value in counts.items():
            s.output(name, value, pad=0, host=True)
        for g in s.groups:
            table = batch_table_input(g, max_reqs) if batch_order else table_input(g, max_reqs)
            if g.kind == "recurrent":
                g.output("state_indices", state_indices(table, fields))
                if g.cache_mode == "all":
                    g.output("last_scheduled_block", last_scheduled_block(table, fields))
                    g.output("last_computed_block", last_computed_block(table, fields))
                else:
                    g.skip("last_scheduled_block")
                    g.skip("last_computed_block")
                continue
            g.output("slot_mapping", slot_mapping(table, fields))
            if batch_order:
                continue
            rows = block_table(table, fields.rows)
            if g.window is not None:
                rows = window_block_table(rows, fields.num_computed_tokens, g)
            g.output("block_table", rows)
            if g.kernel_block_size not in (None, g.block_size):
                g.output("kernel_block_table", kernel_block_table(rows, g))
            else:
                g.skip("kernel_block_table")

    return step
