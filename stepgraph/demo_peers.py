"""The metadata of a step in eager NumPy, in the two ways that engines build it: for every KV-cache
group in full, or shared by hand between groups of one kind. They write the same persistent
outputs, padded, as the compiled step; the demo checks them against the oracle as well.

Plain NumPy, one operation a line, as an engine's tensor code is; nothing is slowed down on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from stepgraph.pipeline.groups import Group
from stepgraph.pipeline.oracle import Key
from stepgraph.replay import Layout, StepInputs

PAD_SLOT = -1
Fields: TypeAlias = "dict[Key, Any]"


class Eager:
    """Builds the outputs of `stages.full_step(batch_order=True)` for the block tables `tables`,
    {group name: int32 (max_reqs, max_blocks)} in batch order.

    rebuild(inputs, padded): every group in full. share(inputs, padded): one group of a kind in
    full, then only what depends on the block table for its likes, as vLLM PR 29627 does. Both
    return {name or (name, group): array or number}; arrays are views of persistent buffers over the
    padded extents. Every request must fit its block table (no bounds are checked, as in engines).
    """

    def __init__(self, layout: Layout, tables: Mapping[str, np.ndarray]) -> None:
        self.groups, self.tables = layout.groups, tables
        b, t = layout.max_reqs, layout.max_tokens
        self.query_start_loc = np.zeros(b + 1, np.int32)
        self.seq_lens = np.zeros(b, np.int32)
        self.positions = np.zeros(t, np.int64)
        self.token_to_request = np.zeros(t, np.int32)
        self.is_padding = np.zeros(t, np.bool_)
        self.is_prefilling = np.zeros(b, np.bool_)
        self.slots = {g.name: np.zeros(t, np.int64) for g in layout.groups}
        self.states = {
            g.name: np.zeros((b, 1 + g.num_spec_tokens), np.int32) for g in layout.groups
        }
        self.last_scheduled = {g.name: np.zeros(b, np.int32) for g in layout.groups}
        self.last_computed = {g.name: np.zeros(b, np.int32) for g in layout.groups}
        kinds = {replace(g, name="any"): g.name for g in reversed(layout.groups)}
        self.first_of_kind = set(kinds.values())
        self.batch_slots = np.arange(b, dtype=np.int32)
        self.tokens = np.arange(t, dtype=np.int32)

    # -- the two ways

    def rebuild(self, inputs: StepInputs, padded: Mapping[str, int]) -> Fields:
        """Every group builds its metadata in full."""
        out = self._batch(inputs, padded)
        for g in self.groups:
            out.update(self._counts(inputs, padded))
            out.update(self._group(g, inputs, padded))
        return out

    def share(self, inputs: StepInputs, padded: Mapping[str, int]) -> Fields:
        """The first group of each kind builds in full; its likes take over what does not depend on
        their block table, and do the rest (the PR's `update_block_table`)."""
        out = self._batch(inputs, padded)
        for g in self.groups:
            if g.name in self.first_of_kind:
                out.update(self._counts(inputs, padded))
            out.update(self._group(g, inputs, padded))
        return out

    # -- the parts

    def _batch(self, inputs: StepInputs, padded: Mapping[str, int]) -> Fields:
        """What the runner computes once a step for all groups."""
        b, t, bp, tp = inputs.num_reqs, inputs.num_tokens, padded["B"], padded["T"]
        starts, lens = self.query_start_loc, self.seq_lens
        starts[0] = 0
        np.cumsum(inputs.num_scheduled_tokens, out=starts[1 : b + 1])
        starts[b + 1 : bp + 1] = starts[b]
        np.add(inputs.num_computed_tokens, inputs.num_scheduled_tokens, out=lens[:b])
        lens[b:bp] = 0
        owners = np.repeat(self.batch_slots[:b], inputs.num_scheduled_tokens)
        self.token_to_request[:t] = owners
        self.token_to_request[t:tp] = 0
        first = inputs.num_computed_tokens - starts[:b]
        np.add(first[owners], self.tokens[:t], out=self.positions[:t], dtype=np.int64)
        self.positions[t:tp] = 0
        self.is_padding[:t] = False
        self.is_padding[t:tp] = True
        return {
            "query_start_loc": starts[: bp + 1],
            "seq_lens": lens[:bp],
            "token_to_request": self.token_to_request[:tp],
            "positions": self.positions[:tp],
            "is_padding": self.is_padding[:tp],
        }

    def _counts(self, inputs: StepInputs, padded: Mapping[str, int]) -> Fields:
        """The split in decodes and prefills that each builder makes; the same for all groups."""
        b, bp = inputs.num_reqs, padded["B"]
        computed, prompt = inputs.num_computed_tokens, inputs.num_prompt_tokens
        lens, scheduled = self.seq_lens[:b], inputs.num_scheduled_tokens
        unfinished = computed < prompt
        self.is_prefilling[:b] = unfinished
        self.is_prefilling[b:bp] = False
        prefilling = unfinished & (scheduled > 0)
        decode_tokens = scheduled[~unfinished].sum()
        return {
            "num_decodes": b - np.count_nonzero(unfinished),
            "num_prefills": np.count_nonzero(prefilling),
            "num_decode_tokens": decode_tokens,
            "num_prefill_tokens": inputs.num_tokens - decode_tokens,
            "max_query_len": scheduled.max(initial=0),
            "max_seq_len": lens.max(initial=0),
            "is_prefilling": self.is_prefilling[:bp],
        }

    def _group(self, g: Group, inputs: StepInputs, padded: Mapping[str, int]) -> Fields:
        """What depends on the group's block table."""
        if g.kind == "recurrent":
            return self._recurrent(g, inputs, padded["B"])
        return {("slot_mapping", g.name): self._slot_mapping(g, inputs, padded["T"])}

    def _recurrent(self, g: Group, inputs: StepInputs, bp: int) -> Fields:
        b, table = inputs.num_reqs, self.tables[g.name]
        states = self.states[g.name]
        if g.cache_mode == "none":
            states[:b] = table[:b, : 1 + g.num_spec_tokens]
        else:
            first = np.maximum(self.seq_lens[:b] - 1, 0) // g.block_size
            columns = first[:, None] + np.arange(1 + g.num_spec_tokens)
            states[:b] = table[self.batch_slots[:b, None], columns]
        states[b:bp] = 0
        out: Fields = {("state_indices", g.name): states[:bp]}
        if g.cache_mode == "all":
            scheduled, computed = self.last_scheduled[g.name], self.last_computed[g.name]
            scheduled[:b] = first
            scheduled[b:bp] = 0
            computed[:b] = np.maximum(inputs.num_computed_tokens - 1, 0) // g.block_size
            computed[b:bp] = 0
            out["last_scheduled_block", g.name] = scheduled[:bp]
            out["last_computed_block", g.name] = computed[:bp]
        return out

    def _slot_mapping(self, g: Group, inputs: StepInputs, tp: int) -> np.ndarray:
        t, table, slots = inputs.num_tokens, self.tables[g.name], self.slots[g.name]
        columns, offsets = np.divmod(self.positions[:t], g.block_size)
        if g.ring:
            columns %= table.shape[1]
        blocks = table[self.token_to_request[:t], columns]
        np.add(blocks.astype(np.int64) * g.block_size, offsets, out=slots[:t])
        slots[t:tp] = PAD_SLOT
        return slots[:tp]
