"""Decode-only steps of one V1 runner: one compiled call for all compiled groups, attached to the
runner's own tensors, and vLLM's metadata objects made once per batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import stepgraph as sg
from stepgraph import stages
from stepgraph.interop.dlpack import to_numpy, to_torch
from stepgraph.pipeline.ops import reduce_max, reduce_sum
from stepgraph.pipeline.trace import Step

from . import mamba2

MAX_SHAPES = 1024  # batch sizes kept at a time


def decode_graph(groups: list[sg.Group], max_reqs: int) -> sg.Graph:
    """The graph of a decode-only step: one token for each of the B requests, tables in batch order.

    Inputs, bound to the runner's tensors, int32: num_computed_tokens, num_prompt_tokens, seq_lens,
    seq_lens_upper_bound (max_reqs,); block_table (max_reqs, max_blocks) of each group.
    Outputs: state_indices int32 (B, 1) of each group; is_prefilling bool (B,); scalars int32
    first_chunks, how many requests have no state yet (a one-token prompt), and max_seq_len, an
    upper bound.
    """

    def step(s: Step) -> None:
        b = s.dim("B")
        inputs = ("num_computed_tokens", "num_prompt_tokens", "seq_lens", "seq_lens_upper_bound")
        computed, prompt, lens, bound = (s.input(name, (b,), kind="device") for name in inputs)
        batch = stages.Batch(
            rows=s.iota(b),
            num_computed_tokens=computed,
            num_scheduled_tokens=lens - computed,
            query_start_loc=s.iota(b + 1),
            seq_lens=lens,
            token_to_request=s.iota(b),
            positions=computed.cast("int64"),
        )
        prefilling = computed < prompt
        s.output("is_prefilling", prefilling)
        first = prefilling & (bound <= 1)
        s.output("first_chunks", reduce_sum(first.cast("int32")), pad=0)
        s.output("max_seq_len", reduce_max(bound), pad=0)
        for g in s.groups:
            mamba2.outputs(g, stages.batch_table_input(g, max_reqs), batch)

    return sg.trace(step, groups)


@dataclass
class NativeGroup:
    """An attention group that vLLM's builder makes: its KV-cache group, the common metadata's
    unchanging fields, and the layers that get the result."""

    gid: int
    group: Any  # vLLM's AttentionGroup
    common: dict[str, Any]
    layers: list[str]
    reuse: tuple[Any, ...]  # groups with equal keys are built once and updated, as vLLM does


@dataclass
class Shape:
    """Everything of one batch size that does not change from step to step. `trusted`: a step of
    this size has been compared with vLLM's."""

    replay: Callable[[int], Any]
    first_chunks: memoryview
    max_seq_len: memoryview
    layers: dict[str, Any]
    native: list[NativeGroup]
    trusted: bool = False


class DecodeStep:
    """The compiled decode step of one runner, bound to its tensors as they are now.

    Raises what stepgraph raises if something cannot be compiled or bound.
    """

    def __init__(self, runner: Any, builders: dict[int, Any]) -> None:
        """builders: {index of a KV-cache group: its builder}, of the groups to compile."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        self.runner = runner
        self.builders = builders
        self.common_class = CommonAttentionMetadata
        tables = {gid: runner.input_batch.block_table[gid].block_table.gpu for gid in builders}
        self.names = {gid: f"{gid}" for gid in builders}
        groups = [
            mamba2.group(self.names[gid], builder, tables[gid].shape[1])
            for gid, builder in builders.items()
        ]
        capacity = int(runner.max_num_reqs)
        self.step = sg.compile(
            decode_graph(groups, capacity), {"B": capacity}, max_executables=MAX_SHAPES
        )
        batch = runner.input_batch
        self.step.bind("num_computed_tokens", to_numpy(batch.num_computed_tokens_cpu_tensor))
        self.step.bind("num_prompt_tokens", to_numpy(batch.num_prompt_tokens_cpu_tensor))
        self.step.bind("seq_lens", to_numpy(runner.seq_lens))
        self.step.bind("seq_lens_upper_bound", to_numpy(runner.optimistic_seq_lens_cpu))
        named = {self.names[gid]: to_numpy(table) for gid, table in tables.items()}
        self.step.bind("block_table", named)
        # What the binding rests on; all are replaced when vLLM lays out its caches anew.
        self.bound_to = self._foundations()
        self.shapes: dict[int, Shape] = {}

    def _foundations(self) -> tuple[Any, ...]:
        runner = self.runner
        batch = runner.input_batch
        return (
            runner.kv_cache_config,
            runner.attn_groups,
            batch,
            batch.block_table,
            runner.seq_lens,
            runner.optimistic_seq_lens_cpu,
        )

    def is_current(self) -> bool:
        """Whether the runner still has the tensors this was bound to."""
        return all(a is b for a, b in zip(self.bound_to, self._foundations(), strict=True))

    def shape(self, num_reqs: int) -> Shape:
        found = self.shapes.get(num_reqs)
        if found is None:
            if len(self.shapes) >= MAX_SHAPES:
                self.shapes.pop(next(iter(self.shapes)))
            found = self.shapes[num_reqs] = self._shape(num_reqs)
        return found

    def _shape(self, num_reqs: int) -> Shape:
        runner, executable = self.runner, self.step.executable(B=num_reqs)
        out = executable.outputs
        seq_lens = runner.seq_lens[:num_reqs]
        common = {
            "query_start_loc": runner.query_start_loc.gpu[: num_reqs + 1],
            "query_start_loc_cpu": runner.query_start_loc.cpu[: num_reqs + 1],
            "seq_lens": seq_lens,
            "num_reqs": num_reqs,
            "num_actual_tokens": num_reqs,
            "max_query_len": 1,
            "max_seq_len": 0,  # each step's own
            "block_table_tensor": None,
            "slot_mapping": None,  # each step's own
            "causal": True,
            "is_prefilling": to_torch(out["is_prefilling"]),
            "positions": runner.positions[:num_reqs],
            "seq_lens_cpu_upper_bound": runner.optimistic_seq_lens_cpu[:num_reqs],
        }
        layers: dict[str, Any] = {}
        native: list[NativeGroup] = []
        for gid, attention_groups in enumerate(runner.attn_groups):
            for group in attention_groups:
                builder = group.get_metadata_builder(0)
                made = None
                if gid in self.builders:
                    indices = to_torch(out["state_indices", self.names[gid]])
                    made = mamba2.metadata(builder, num_reqs, seq_lens, indices)
                else:
                    table = runner.input_batch.block_table[gid].get_device_tensor(num_reqs)
                    whole = self.common_class(**{**common, "block_table_tensor": table})
                    spec = runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec
                    native.append(
                        NativeGroup(
                            gid,
                            group,
                            dict(vars(whole)),
                            list(group.layer_names),
                            (spec, type(builder)),
                        )
                    )
                layers.update(dict.fromkeys(group.layer_names, made))
        return Shape(
            executable.replay,
            out["first_chunks"].data,
            out["max_seq_len"].data,
            layers,
            native,
        )

    def build(self, shape: Shape, num_reqs: int, slot_mappings: dict[int, Any]) -> Any:
        """{layer: metadata} of this step, or None if the batch has a request without any state."""
        shape.replay(num_reqs)
        if shape.first_chunks[()]:
            return None
        metadata = shape.layers.copy()
        built: dict[Any, Any] = {}
        for native in shape.native:
            common = object.__new__(self.common_class)
            fields = common.__dict__
            fields.update(native.common)
            fields["max_seq_len"] = shape.max_seq_len[()]
            fields["slot_mapping"] = slot_mappings[native.gid]
            builder = native.group.get_metadata_builder(0)
            before = built.get(native.reuse)
            if before is not None and builder.supports_update_block_table:
                table = native.group.map_to_kernel_block_table(common.block_table_tensor, 0)
                made = builder.update_block_table(before, table, common.slot_mapping)
            else:
                made = native.group.build_metadata(common, 0)
                built[native.reuse] = made
            for layer in native.layers:
                metadata[layer] = made
        return metadata
