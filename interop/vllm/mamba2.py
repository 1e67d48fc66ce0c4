"""Mamba2 groups on decode-only steps: what the graph computes, and the metadata object around it.

On such a step the only field that differs between groups is `state_indices_tensor_d`; counts are
host ints, the sequence lengths a view of the runner's buffer, and the rest None.
"""

from __future__ import annotations

from typing import Any

from stepgraph import stages
from stepgraph.pipeline.groups import Group
from stepgraph.pipeline.trace import GroupStep
from stepgraph.stages import Batch, Table

BACKEND = "vllm.v1.attention.backends.mamba2_attn"


def unsupported(builder: Any) -> str | None:
    """Why the groups of this builder are left to vLLM; None if they can be compiled."""
    spec = builder.kv_cache_spec
    if builder.use_replayssm:
        return "ReplaySSM"
    if builder.num_spec_tokens or builder.use_spec_decode:
        return "speculative decoding"
    if builder.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return "full CUDA graphs"
    mode = builder.vllm_config.cache_config.mamba_cache_mode
    if mode not in ("none", "align") or spec.mamba_cache_mode != mode:
        return f"Mamba cache mode {mode}"
    return None


def group(name: str, builder: Any, width: int) -> Group:
    """The group as the graph knows it; `width`: columns of its block table."""
    spec = builder.kv_cache_spec
    return Group(
        name,
        kind="recurrent",
        block_size=spec.block_size,
        max_blocks=width,
        cache_mode=builder.vllm_config.cache_config.mamba_cache_mode,
    )


def outputs(g: GroupStep, table: Table, batch: Batch) -> None:
    """The group's fields of a decode-only step: state_indices int32 (B, 1)."""
    g.output("state_indices", stages.state_indices(table, batch))


def metadata(builder: Any, num_reqs: int, seq_lens: Any, state_indices: Any) -> Any:
    """vLLM's object for a decode-only step of `num_reqs` requests. seq_lens int32 (num_reqs,),
    state_indices int32 (num_reqs, 1): persistent tensors, so one object serves every step."""
    return builder.metadata_cls(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=num_reqs,
        num_decode_tokens=num_reqs,
        num_reqs=num_reqs,
        has_initial_states_p=None,
        query_start_loc_p=None,
        state_indices_tensor_p=state_indices.new_empty((0,)),
        state_indices_tensor_d=state_indices,
        num_accepted_tokens=None,
        query_start_loc_d=None,
        seq_lens=seq_lens,
        chunk_size=builder.chunk_size,
    )
